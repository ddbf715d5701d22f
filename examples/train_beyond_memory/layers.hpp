// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <thrust/fill.h>
#include <thrust/for_each.h>
#include <thrust/functional.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/tabulate.h>
#include <thrust/transform.h>

#include <cstdint>
#include <type_traits>

#include "kernels.hpp"
#include "multiply.hpp"
#include "session.hpp"

/// The operations of a network. Each names its operands and how it accesses them, and gets matrices
/// to work on. It need not know whether these were swapped out before.
namespace beyond {

/// Calls `f(i)` for each `i` in `[0, n)`.
template <class Policy, class F>
void for_each_index(Policy const& policy, Index n, F f) {
  thrust::for_each_n(policy, thrust::counting_iterator<Index>{0}, n, f);
}

/// `c = a b`, plus what `start` says: `bias` is one row, unused when starting from zero.
template <class S, class Policy, class T>
void multiply(Policy const& policy,
              LeftFactor<T> a,
              Matrix<T const> b,
              Matrix<T> c,
              std::type_identity_t<T> const* bias,
              StartFrom start) {
  using Multiply = MultiplyTile<T, typename S::tiling>;
  for_each_index(policy, Multiply::count(c), Multiply{a, b, c, bias, start});
}

template <class S, class Tensor>
void fill(S& session, Tensor& tensor, typename Tensor::element_type value) {
  session.run([value](auto const& policy,
                      auto to) { thrust::fill(policy, to.data, to.data + to.size(), value); },
              writes(tensor));
}

/// Weights for `tensor.extents()[0]` inputs, in proportion to `gain`.
template <class S, class Tensor>
void fill_uniform(S& session, Tensor& tensor, double gain, std::uint64_t seed) {
  using T = typename Tensor::element_type;
  double const bound = gain * std::sqrt(3.0 / static_cast<double>(tensor.extents()[0]));
  UniformWeight<T> const uniform{seed, static_cast<T>(bound)};
  session.run(
      [uniform](auto const& policy, auto to) {
        thrust::tabulate(policy, to.data, to.data + to.size(), uniform);
      },
      writes(tensor));
}

// [linear]
/// `y = x weight + bias`.
template <class S, class Tensor>
void linear(S& session, Tensor const& x, Tensor const& weight, Tensor const& bias, Tensor& y) {
  session.run(
      [](auto const& policy, auto in, auto w, auto b, auto out) {
        multiply<S>(policy, as_is(in), w, out, b.data, StartFrom::bias);
      },
      reads(x),
      reads(weight),
      reads(bias),
      writes(y));
}
// [linear end]

/// `y = max(0, x weight + bias)`, which can be made again.
template <class S, class Tensor>
void linear_relu(S& session, Tensor const& x, Tensor const& weight, Tensor const& bias, Tensor& y) {
  using T = typename Tensor::element_type;
  session.make(
      [](auto const& policy, auto in, auto w, auto b, auto out) {
        multiply<S>(policy, as_is(in), w, out, b.data, StartFrom::bias);
        thrust::transform(policy, out.data, out.data + out.size(), out.data, Relu<T>{});
      },
      y,
      x,
      weight,
      bias);
}

/// `y += x weight + bias`.
template <class S, class Tensor>
void add_linear(S& session, Tensor const& x, Tensor const& weight, Tensor const& bias, Tensor& y) {
  session.run(
      [](auto const& policy, auto in, auto w, auto b, auto out) {
        multiply<S>(policy, as_is(in), w, out, b.data, StartFrom::old_and_bias);
      },
      reads(x),
      reads(weight),
      reads(bias),
      updates(y));
}

/// The gradients of `linear`'s weight and bias, from that of its result.
template <class S, class Tensor>
void linear_gradients(
    S& session, Tensor const& x, Tensor const& y_gradient, Tensor& weight, Tensor& bias) {
  using T = typename Tensor::element_type;
  session.run(
      [](auto const& policy, auto in, auto dy, auto dw) {
        multiply<S>(policy, transposed(in), dy, dw, nullptr, StartFrom::zero);
      },
      reads(x),
      reads(y_gradient),
      writes(weight));
  session.run(
      [](auto const& policy, auto dy, auto db) {
        using Sum = SumColumns<T, typename S::tiling>;
        for_each_index(policy, Sum::count(dy), Sum{dy, db.data});
      },
      reads(y_gradient),
      writes(bias));
}

/// The gradient of `linear`'s input, from that of its result.
template <class S, class Tensor>
void linear_input_gradient(S& session,
                           Tensor const& y_gradient,
                           Tensor const& weight,
                           Tensor& x_gradient) {
  using T = typename Tensor::element_type;
  Tensor turned = session.template tensor<T>(weight.extents()[1], weight.extents()[0]);
  session.run(
      [](auto const& policy, auto from, auto to) {
        using Transpose = TransposeTile<T, typename S::tiling>;
        for_each_index(policy, Transpose::count(to), Transpose{from, to});
      },
      reads(weight),
      writes(turned));
  session.run(
      [](auto const& policy, auto dy, auto w, auto dx) {
        multiply<S>(policy, as_is(dy), w, dx, nullptr, StartFrom::zero);
      },
      reads(y_gradient),
      reads(turned),
      writes(x_gradient));
}

/// Stops the gradient where `linear_relu` made `activation` 0.
template <class S, class Tensor>
void relu_gradient(S& session, Tensor const& activation, Tensor& gradient) {
  using T = typename Tensor::element_type;
  session.run(
      [](auto const& policy, auto a, auto g) {
        thrust::transform(policy, g.data, g.data + g.size(), a.data, g.data, ReluGradient<T>{});
      },
      reads(activation),
      updates(gradient));
}

/// Each row of `x` with mean 0 and variance 1; the gradient needs the column `inverse_deviation`.
template <class S, class Tensor>
void normalize(S& session, Tensor const& x, Tensor& normal, Tensor& inverse_deviation) {
  using T = typename Tensor::element_type;
  session.run(
      [](auto const& policy, auto in, auto out, auto scale) {
        for_each_index(policy, in.rows, NormalizeRow<T>{in, out, scale});
      },
      reads(x),
      writes(normal),
      writes(inverse_deviation));
}

/// Adds to `x_gradient` what reaches it through `normalize`.
template <class S, class Tensor>
void add_normalize_gradient(S& session,
                            Tensor const& normal_gradient,
                            Tensor const& normal,
                            Tensor const& inverse_deviation,
                            Tensor& x_gradient) {
  using T = typename Tensor::element_type;
  session.run(
      [](auto const& policy, auto g, auto n, auto scale, auto to) {
        for_each_index(policy, to.rows, AddNormalizeGradient<T>{g, n, scale, to});
      },
      reads(normal_gradient),
      reads(normal),
      reads(inverse_deviation),
      updates(x_gradient));
}

/// The mean cross-entropy of `logits` against `labels`, one number, and its gradient.
template <class S, class Tensor, class Labels>
void softmax_loss(
    S& session, Tensor const& logits, Labels const& labels, Tensor& gradient, Tensor& loss) {
  using T = typename Tensor::element_type;
  Tensor losses = session.template tensor<T>(logits.extents()[0], 1);
  session.run(
      [](auto const& policy, auto in, auto is, auto out, auto each) {
        for_each_index(policy, in.rows, SoftmaxLossRow<T>{in, is, out, each});
      },
      reads(logits),
      reads(labels),
      writes(gradient),
      writes(losses));
  session.run(
      [](auto const& policy, auto each, auto mean) {
        for_each_index(policy, 1, MeanLoss<T>{each, mean.data});
      },
      reads(losses),
      writes(loss));
}

/// 1 for each row of `logits` whose highest is its label's, else 0.
template <class S, class Tensor, class Labels>
void find_correct(S& session, Tensor const& logits, Labels const& labels, Labels& correct) {
  using T = typename Tensor::element_type;
  session.run(
      [](auto const& policy, auto in, auto is, auto out) {
        thrust::tabulate(policy, out.data, out.data + out.size(), IsRowCorrect<T>{in, is});
      },
      reads(logits),
      reads(labels),
      writes(correct));
}

}  // namespace beyond
