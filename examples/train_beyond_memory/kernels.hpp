// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <thrust/execution_policy.h>
#include <thrust/extrema.h>
#include <thrust/functional.h>
#include <thrust/inner_product.h>
#include <thrust/reduce.h>
#include <thrust/transform_reduce.h>

#include <cmath>
#include <cstdint>

#include "view.hpp"

/// Kernels for single elements or rows; see multiply.hpp for the matrix products. One thread
/// computes a sum, in the order of its terms, so that results are bitwise the same in every run.
namespace beyond {

/// Uniform in `[-bound, bound)`, from the element's index alone.
template <class T>
struct UniformWeight {
  std::uint64_t seed;
  T bound;

  SPILLWAY_HOST_DEVICE T operator()(Index i) const {
    std::uint64_t x = seed + static_cast<std::uint64_t>(i) * 0x9E3779B97F4A7C15U;  // SplitMix64
    x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
    x ^= x >> 31U;
    T const unit = static_cast<T>(x >> 40U) / static_cast<T>(1U << 24U);
    return bound * (2 * unit - 1);
  }
};

template <class T>
struct Relu {
  SPILLWAY_HOST_DEVICE T operator()(T x) const { return x > 0 ? x : T{0}; }
};

/// The gradient of ReLU: sets a gradient to 0 where the activation is 0.
template <class T>
struct ReluGradient {
  SPILLWAY_HOST_DEVICE T operator()(T gradient, T activation) const {
    return activation > 0 ? gradient : T{0};
  }
};

/// Shifts and scales one row to mean 0 and variance 1.
template <class T>
struct NormalizeRow {
  Matrix<T const> x;
  Matrix<T> normal;
  Matrix<T> inverse_deviation;  // one column

  struct SquaredDistance {
    T mean;
    SPILLWAY_HOST_DEVICE T operator()(T value) const { return (value - mean) * (value - mean); }
  };

  SPILLWAY_HOST_DEVICE void operator()(Index i) const {
    using std::sqrt;
    T const* const in = x.row(i);
    auto const n = static_cast<T>(x.cols);
    T const mean = thrust::reduce(thrust::seq, in, in + x.cols, T{0}) / n;
    T const variance = thrust::transform_reduce(
                           thrust::seq, in, in + x.cols, SquaredDistance{mean}, T{0}, Plus{}) /
                       n;
    T const scale = 1 / sqrt(variance + T(1e-5));
    inverse_deviation(i, 0) = scale;
    for (Index j = 0; j < x.cols; ++j) {
      normal(i, j) = (in[j] - mean) * scale;
    }
  }

 private:
  using Plus = thrust::plus<T>;
};

/// Adds to one row of `to` the gradient that reaches it through `NormalizeRow`.
template <class T>
struct AddNormalizeGradient {
  Matrix<T const> gradient;  // of the normalized rows
  Matrix<T const> normal;
  Matrix<T const> inverse_deviation;
  Matrix<T> to;

  SPILLWAY_HOST_DEVICE void operator()(Index i) const {
    T const* const g = gradient.row(i);
    T const* const x = normal.row(i);
    auto const n = static_cast<T>(normal.cols);
    T const mean = thrust::reduce(thrust::seq, g, g + normal.cols, T{0}) / n;
    T const along = thrust::inner_product(thrust::seq, g, g + normal.cols, x, T{0}) / n;
    T const scale = inverse_deviation(i, 0);
    for (Index j = 0; j < normal.cols; ++j) {
      to(i, j) += scale * (g[j] - mean - x[j] * along);
    }
  }
};

/// The cross-entropy of one row of logits, and its gradient divided by the number of rows.
template <class T>
struct SoftmaxLossRow {
  Matrix<T const> logits;
  Matrix<std::int32_t const> labels;  // one column
  Matrix<T> gradient;
  Matrix<T> losses;  // one column

  SPILLWAY_HOST_DEVICE void operator()(Index i) const {
    using std::exp;
    using std::log;
    T const* const in = logits.row(i);
    T const highest = *thrust::max_element(thrust::seq, in, in + logits.cols);
    T sum = 0;
    for (Index j = 0; j < logits.cols; ++j) {
      sum += exp(in[j] - highest);
    }
    auto const n = static_cast<T>(logits.rows);
    Index const label = labels(i, 0);
    for (Index j = 0; j < logits.cols; ++j) {
      T const probability = exp(in[j] - highest) / sum;
      gradient(i, j) = (probability - (j == label ? T{1} : T{0})) / n;
    }
    losses(i, 0) = log(sum) - (in[label] - highest);
  }
};

/// Writes the mean of `losses` to one place. One thread, for the sake of the order of the sum.
template <class T>
struct MeanLoss {
  Matrix<T const> losses;
  T* to;

  SPILLWAY_HOST_DEVICE void operator()(Index) const {
    T const sum = thrust::reduce(thrust::seq, losses.data, losses.data + losses.size(), T{0});
    *to = sum / static_cast<T>(losses.size());
  }
};

/// 1 where the highest logit of a row is its label's, else 0.
template <class T>
struct IsRowCorrect {
  Matrix<T const> logits;
  Matrix<std::int32_t const> labels;

  SPILLWAY_HOST_DEVICE std::int32_t operator()(Index i) const {
    T const* const in = logits.row(i);
    return thrust::max_element(thrust::seq, in, in + logits.cols) - in == labels(i, 0) ? 1 : 0;
  }
};

/// One step of Adam for one element.
template <class T>
struct AdamUpdate {
  T const* gradient;
  T* value;
  T* mean;
  T* square;
  T first_decay;
  T second_decay;
  T step_size;  // with the bias correction of both moments in it
  T epsilon;

  SPILLWAY_HOST_DEVICE void operator()(Index i) const {
    using std::sqrt;
    T const g = gradient[i];
    T const m = first_decay * mean[i] + (1 - first_decay) * g;
    T const v = second_decay * square[i] + (1 - second_decay) * g * g;
    mean[i] = m;
    square[i] = v;
    value[i] -= step_size * m / (sqrt(v) + epsilon);
  }
};

}  // namespace beyond
