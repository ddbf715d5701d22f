// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "adam.hpp"
#include "layers.hpp"
#include "session.hpp"
#include "training_types.hpp"

namespace beyond {

/// A deep residual network: a linear layer, then blocks that each add
/// `relu(normalize(x) W1 + b1) W2 + b2` to `x`, then a linear layer to the classes.
///
/// Each weight, each moment of its gradient and each activation kept for the backward pass is a
/// tensor of its own. No operation needs more than four of them at once; a step needs all of them.
template <class S, class T>
class Network {
 public:
  using Tensor = TensorOf<S, T>;
  using Labels = TensorOf<S, std::int32_t>;

  Network(S& session, NetworkShape shape, std::uint64_t seed)
      : session_{&session},
        shape_{shape},
        seed_{seed},
        entry_{linear_layer(shape.inputs, shape.width, 1.0)},
        exit_{linear_layer(shape.width, shape.classes, 0.1)} {
    // The sum of many blocks should not outgrow what it is added to.
    double const gain = 1.0 / std::sqrt(static_cast<double>(shape.blocks));
    for (std::size_t i = 0; i < shape.blocks; ++i) {
      Linear first = linear_layer(shape.width, shape.width, std::sqrt(2.0));
      Linear second = linear_layer(shape.width, shape.width, gain);
      blocks_.push_back({std::move(first), std::move(second)});
    }
  }

  /// Enqueues the forward pass, the backward pass and, layer by layer, `optimizer.apply`.
  template <class Optimizer>
  void train_step(Tensor const& images, Labels const& labels, Optimizer& optimizer, Tensor& loss) {
    std::size_t const rows = images.extents()[0];
    Tensor x = forward_entry(images);
    std::vector<Kept> kept;
    kept.reserve(blocks_.size());
    for (Block const& block : blocks_) {
      kept.push_back(forward_block(block, x));
    }
    Tensor normal = tensor(rows, shape_.width);
    Tensor scale = tensor(rows, 1);
    Tensor logits = forward_exit(x, normal, scale);

    Tensor logits_gradient = tensor(rows, shape_.classes);
    softmax_loss(*session_, logits, labels, logits_gradient, loss);

    // From here on `x` holds the gradient of what it held: nobody needs the values any more.
    Tensor normal_gradient = tensor(rows, shape_.width);
    linear_input_gradient(*session_, logits_gradient, exit_.weight.value, normal_gradient);
    apply(optimizer, exit_, normal, logits_gradient);
    fill(*session_, x, T{0});
    add_normalize_gradient(*session_, normal_gradient, normal, scale, x);
    for (std::size_t i = blocks_.size(); i-- > 0;) {
      backward_block(blocks_[i], std::move(kept[i]), x, optimizer);
    }
    apply(optimizer, entry_, images, x);
  }

  /// Enqueues the forward pass alone, keeping nothing.
  [[nodiscard]] Tensor predict(Tensor const& images) {
    Tensor x = forward_entry(images);
    for (Block const& block : blocks_) {
      static_cast<void>(forward_block(block, x));
    }
    Tensor normal = tensor(images.extents()[0], shape_.width);
    Tensor scale = tensor(images.extents()[0], 1);
    return forward_exit(x, normal, scale);
  }

  /// Calls `f` with every weight and bias, from the input to the output.
  template <class F>
  void for_each_parameter(F f) {
    auto const both = [&f](Linear& layer) {
      f(layer.weight);
      f(layer.bias);
    };
    both(entry_);
    for (Block& block : blocks_) {
      both(block.first);
      both(block.second);
    }
    both(exit_);
  }

 private:
  struct Linear {
    Parameter<Tensor> weight;
    Parameter<Tensor> bias;
  };
  struct Block {
    Linear first;
    Linear second;
  };
  /// What the backward pass of a block needs of its forward pass.
  struct Kept {
    Tensor normal;
    Tensor inverse_deviation;
    Tensor activation;
  };

  [[nodiscard]] Tensor tensor(std::size_t rows, std::size_t cols) {
    return session_->template tensor<T>(rows, cols);
  }

  [[nodiscard]] Parameter<Tensor> parameter(std::size_t rows, std::size_t cols, double gain) {
    Parameter<Tensor> made{tensor(rows, cols), tensor(rows, cols), tensor(rows, cols)};
    if (gain == 0) {
      fill(*session_, made.value, T{0});
    } else {
      fill_uniform(*session_, made.value, gain, seed_ + ++weights_ * 0xD1B54A32D192ED03U);
    }
    fill(*session_, made.mean, T{0});
    fill(*session_, made.square, T{0});
    return made;
  }

  [[nodiscard]] Linear linear_layer(std::size_t inputs, std::size_t outputs, double gain) {
    Parameter<Tensor> weight = parameter(inputs, outputs, gain);
    return {std::move(weight), parameter(1, outputs, 0)};
  }

  [[nodiscard]] Tensor forward_entry(Tensor const& images) {
    Tensor x = tensor(images.extents()[0], shape_.width);
    linear(*session_, images, entry_.weight.value, entry_.bias.value, x);
    return x;
  }

  [[nodiscard]] Kept forward_block(Block const& block, Tensor& x) {
    std::size_t const rows = x.extents()[0];
    Kept kept{tensor(rows, shape_.width), tensor(rows, 1), tensor(rows, shape_.width)};
    normalize(*session_, x, kept.normal, kept.inverse_deviation);
    linear_relu(
        *session_, kept.normal, block.first.weight.value, block.first.bias.value, kept.activation);
    add_linear(*session_, kept.activation, block.second.weight.value, block.second.bias.value, x);
    return kept;
  }

  [[nodiscard]] Tensor forward_exit(Tensor const& x, Tensor& normal, Tensor& inverse_deviation) {
    normalize(*session_, x, normal, inverse_deviation);
    Tensor logits = tensor(x.extents()[0], shape_.classes);
    linear(*session_, normal, exit_.weight.value, exit_.bias.value, logits);
    return logits;
  }

  /// Turns `x`, the gradient of the block's result, into that of its input.
  template <class Optimizer>
  void backward_block(Block& block, Kept kept, Tensor& x, Optimizer& optimizer) {
    std::size_t const rows = x.extents()[0];
    Tensor gradient = tensor(rows, shape_.width);
    linear_input_gradient(*session_, x, block.second.weight.value, gradient);
    apply(optimizer, block.second, kept.activation, x);
    relu_gradient(*session_, kept.activation, gradient);

    Tensor normal_gradient = tensor(rows, shape_.width);
    linear_input_gradient(*session_, gradient, block.first.weight.value, normal_gradient);
    apply(optimizer, block.first, kept.normal, gradient);
    add_normalize_gradient(*session_, normal_gradient, kept.normal, kept.inverse_deviation, x);
  }

  /// Computes the gradients of one layer and hands them to the optimizer.
  template <class Optimizer>
  void apply(Optimizer& optimizer, Linear& layer, Tensor const& x, Tensor const& y_gradient) {
    Tensor weight = tensor(x.extents()[1], y_gradient.extents()[1]);
    Tensor bias = tensor(1, y_gradient.extents()[1]);
    linear_gradients(*session_, x, y_gradient, weight, bias);
    optimizer.apply(*session_, layer.weight, weight);
    optimizer.apply(*session_, layer.bias, bias);
  }

  S* session_;
  NetworkShape shape_;
  std::uint64_t seed_;
  std::uint64_t weights_ = 0;
  Linear entry_;
  Linear exit_;
  std::vector<Block> blocks_;
};

}  // namespace beyond
