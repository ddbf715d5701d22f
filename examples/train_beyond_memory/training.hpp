// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "adam.hpp"
#include "data.hpp"
#include "network.hpp"
#include "session.hpp"
#include "training_types.hpp"

namespace beyond {

/// The order in which an epoch shows `count` pictures. The same for the same seed, everywhere.
[[nodiscard]] inline std::vector<std::size_t> shuffled(std::size_t count, std::uint64_t seed) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::mt19937_64 random{seed};
  for (std::size_t i = count; i > 1; --i) {
    std::swap(order[i - 1], order[random() % i]);
  }
  return order;
}

/// Trains one network on one session.
template <class S>
class Trainer {
 public:
  Trainer(S& session, Dataset const& data, TrainingOptions options)
      : session_{&session},
        data_{&data},
        options_{options},
        network_{session, options.shape, options.seed} {}

  [[nodiscard]] std::size_t steps_per_epoch() const {
    return data_->train.count() / options_.batch;
  }

  /// Trains, tests and hands everything over. `progress(steps, mean_loss)` is told of each step
  /// that was enqueued, and the mean loss of an epoch when it has ended.
  ///
  /// @throws spillway::OutOfDeviceMemory, spillway::OutOfHostMemory
  template <class Progress>
  [[nodiscard]] TrainingResult run(Progress progress) {
    TrainingResult result;
    std::size_t const steps = steps_per_epoch();
    PinnedArray<typename S::device_type, float> losses{session_->device(), steps * options_.epochs};
    Adam adam;
    session_->synchronize();
    auto const start = std::chrono::steady_clock::now();
    for (std::size_t epoch = 0; epoch < options_.epochs; ++epoch) {
      auto const order = shuffled(data_->train.count(), options_.seed + epoch);
      for (std::size_t step = 0; step < steps; ++step) {
        adam.begin_step(learning_rate(epoch * steps + step));
        train_on(std::span{order}.subspan(step * options_.batch, options_.batch),
                 adam,
                 losses.data() + epoch * steps + step);
        progress(epoch * steps + step + 1, std::optional<double>{});
      }
      session_->synchronize();
      std::span<float const> const seen{losses.data() + epoch * steps, steps};
      progress((epoch + 1) * steps, std::optional{epoch_losses(seen, 1).front()});
    }
    std::chrono::duration<double, std::milli> const elapsed =
        std::chrono::steady_clock::now() - start;
    result.stats = session_->allocator().stats();
    result.step_ms = elapsed.count() / static_cast<double>(losses.size());
    result.step_losses.assign(losses.data(), losses.data() + losses.size());
    result.test_accuracy = test_accuracy();
    result.state = state();
    return result;
  }

 private:
  using Images = TensorOf<S, float>;
  using Labels = TensorOf<S, std::int32_t>;

  /// Decreases linearly to 0, so that the last steps change the result only a little.
  [[nodiscard]] double learning_rate(std::size_t step) const {
    auto const all = static_cast<double>(steps_per_epoch() * options_.epochs);
    return options_.learning_rate * (1 - static_cast<double>(step) / all);
  }

  /// One step. From `begin_step` on, the allocator expects tensors in the order of the last step.
  void train_on(std::span<std::size_t const> pictures, Adam& adam, float* loss_to) {
    session_->allocator().begin_step();
    Images images = session_->template tensor<float>(pictures.size(), data_->train.pixels);
    Labels labels = session_->template tensor<std::int32_t>(pictures.size(), 1);
    Images loss = session_->template tensor<float>(1, 1);
    upload(data_->train, pictures, images, labels);
    network_.train_step(images, labels, adam, loss);
    session_->download(loss, loss_to);
  }

  void upload(beyond::Images const& from,
              std::span<std::size_t const> pictures,
              Images& images,
              Labels& labels) {
    session_->upload(images, [&](std::span<float> to) {
      auto at = to.begin();
      for (std::size_t const picture : pictures) {
        at = std::ranges::copy(from.picture(picture), at).out;
      }
    });
    session_->upload(labels, [&](std::span<std::int32_t> to) {
      std::ranges::transform(
          pictures, to.begin(), [&](std::size_t picture) { return from.labels[picture]; });
    });
  }

  [[nodiscard]] double test_accuracy() {
    std::vector<std::size_t> order(data_->test.count());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::int64_t correct = 0;
    for (std::size_t begin = 0; begin < order.size(); begin += options_.batch) {
      auto const pictures =
          std::span{order}.subspan(begin, std::min(options_.batch, order.size() - begin));
      Images images = session_->template tensor<float>(pictures.size(), data_->test.pixels);
      Labels labels = session_->template tensor<std::int32_t>(pictures.size(), 1);
      Labels is_correct = session_->template tensor<std::int32_t>(pictures.size(), 1);
      upload(data_->test, pictures, images, labels);
      find_correct(*session_, network_.predict(images), labels, is_correct);
      auto const found = session_->values_sync(is_correct);
      correct += std::accumulate(found.begin(), found.end(), std::int64_t{0});
    }
    return static_cast<double>(correct) / static_cast<double>(order.size());
  }

  [[nodiscard]] std::vector<float> state() {
    std::vector<float> all;
    network_.for_each_parameter([&](auto& parameter) {
      for (auto* const tensor : {&parameter.value, &parameter.mean, &parameter.square}) {
        auto const values = session_->values_sync(*tensor);
        all.insert(all.end(), values.begin(), values.end());
      }
    });
    return all;
  }

  S* session_;
  Dataset const* data_;
  TrainingOptions options_;
  Network<S, float> network_;
};

}  // namespace beyond
