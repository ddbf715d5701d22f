// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/stats.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

namespace beyond {

/// The shape of a network.
struct NetworkShape {
  std::size_t inputs = 64;
  std::size_t width = 128;
  std::size_t blocks = 24;
  std::size_t classes = 10;
};

struct TrainingOptions {
  NetworkShape shape;
  std::size_t batch = 256;
  std::size_t epochs = 15;
  double learning_rate = 1e-3;
  std::uint64_t seed = 1;
  bool recompute = false;  // results of hidden layers may be recomputed instead of copied
  std::optional<std::chrono::nanoseconds> recompute_time{};  // of a layer; empty: it is measured
};

/// The results of a run.
struct TrainingResult {
  std::vector<float> step_losses;
  std::vector<float> state;  // every weight, then every moment of its gradients
  double test_accuracy = 0;
  double step_ms = 0;
  spillway::Stats stats;  // of the training only
};

/// The mean loss of each epoch.
[[nodiscard]] inline std::vector<double> epoch_losses(std::span<float const> step_losses,
                                                      std::size_t epochs) {
  std::vector<double> means;
  std::size_t const steps = epochs == 0 ? 0 : step_losses.size() / epochs;
  for (std::size_t epoch = 0; steps > 0 && epoch < epochs; ++epoch) {
    auto const part = step_losses.subspan(epoch * steps, steps);
    means.push_back(std::accumulate(part.begin(), part.end(), 0.0) / static_cast<double>(steps));
  }
  return means;
}

}  // namespace beyond
