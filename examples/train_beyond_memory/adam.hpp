// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

#include "layers.hpp"

namespace beyond {

/// A weight and the two moments of its gradients that Adam keeps: three swappable tensors.
template <class Tensor>
struct Parameter {
  Tensor value;
  Tensor mean;
  Tensor square;
};

/// Adam (Kingma and Ba, 2015), one parameter at a time: a gradient is applied as soon as it is
/// known, so that it need not be kept.
class Adam {
 public:
  /// Begins a step that moves a weight by about `learning_rate` at most.
  void begin_step(double learning_rate) {
    learning_rate_ = learning_rate;
    ++step_;
  }

  template <class S, class Tensor>
  void apply(S& session, Parameter<Tensor>& parameter, Tensor const& gradient) const {
    using T = typename Tensor::element_type;
    double const second_correction = std::sqrt(1 - std::pow(second_decay, step_));
    double const step_size =
        learning_rate_ * second_correction / (1 - std::pow(first_decay, step_));
    AdamUpdate<T> const rates{nullptr,
                              nullptr,
                              nullptr,
                              nullptr,
                              static_cast<T>(first_decay),
                              static_cast<T>(second_decay),
                              static_cast<T>(step_size),
                              static_cast<T>(epsilon * second_correction)};
    session.run(
        [rates](auto const& policy, auto g, auto value, auto mean, auto square) {
          AdamUpdate<T> adam = rates;
          adam.gradient = g.data;
          adam.value = value.data;
          adam.mean = mean.data;
          adam.square = square.data;
          for_each_index(policy, value.size(), adam);
        },
        reads(gradient),
        updates(parameter.value),
        updates(parameter.mean),
        updates(parameter.square));
  }

 private:
  static constexpr double first_decay = 0.9;
  static constexpr double second_decay = 0.999;
  static constexpr double epsilon = 1e-8;

  double learning_rate_ = 0;
  int step_ = 0;
};

}  // namespace beyond
