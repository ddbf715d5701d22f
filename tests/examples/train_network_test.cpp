// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "network.hpp"
#include "train_session.hpp"
#include "training.hpp"

namespace {

using namespace beyond_test;

/// Takes the place of the optimizer: keeps each gradient and leaves the weights as they are.
struct KeepGradients {
  struct Kept {
    beyond::Parameter<Tensor<double>>* parameter;
    std::vector<double> gradient;
  };
  std::vector<Kept> kept;

  void apply(TestSession& session,
             beyond::Parameter<Tensor<double>>& parameter,
             Tensor<double>& gradient) {
    kept.push_back({&parameter, session.values_sync(gradient)});
  }
};

constexpr beyond::NetworkShape small{.inputs = 3, .width = 6, .blocks = 2, .classes = 3};
constexpr std::size_t batch = 5;

/// Two kinds of pictures, told apart by which half is bright.
beyond::Images halves(std::size_t count, std::uint64_t seed) {
  beyond::Images images{.pixels = 16, .values = {}, .labels = {}};
  auto const noise = random_values<float>(count * images.pixels, seed);
  for (std::size_t i = 0; i < count; ++i) {
    std::int32_t const label = i % 2 == 0 ? 0 : 1;
    images.labels.push_back(label);
    for (std::size_t j = 0; j < images.pixels; ++j) {
      bool const is_bright = (j < images.pixels / 2) == (label == 0);
      images.values.push_back((is_bright ? 0.8F : 0.2F) + 0.2F * noise[i * images.pixels + j]);
    }
  }
  return images;
}

beyond::TrainingResult train(std::size_t capacity_bytes, bool recomputes = false) {
  beyond::Dataset const data{
      .name = "halves", .classes = 2, .train = halves(96, 1), .test = halves(50, 2)};
  beyond::TrainingOptions const options{
      .shape = {.inputs = 16, .width = 24, .blocks = 8, .classes = 2},
      .batch = 32,
      .epochs = 8,
      .learning_rate = 2e-3,
      .seed = 3};
  Bench bench{capacity_bytes, recomputes};
  beyond::Trainer trainer{bench.session(), data, options};
  return trainer.run([](std::size_t, std::optional<double>) {});
}

}  // namespace

TEST_SUITE("train_beyond_memory network") {
  TEST_CASE("Network: every gradient agrees with finite differences of the loss") {
    Bench bench;
    auto& session = bench.session();
    beyond::Network<TestSession, double> network{session, small, 17};
    // Biases start at 0, where derivatives of weights may vanish, so all values are shifted.
    std::uint64_t seed = 100;
    std::size_t parameters = 0;
    network.for_each_parameter([&](auto& parameter) {
      bench.set(parameter.value, random_values<double>(parameter.value.size(), seed++));
      ++parameters;
    });
    auto const images =
        bench.tensor(batch, small.inputs, random_values<double>(batch * small.inputs, 18));
    auto const labels = bench.tensor<std::int32_t>(batch, 1, {0, 1, 2, 1, 0});
    auto loss = session.tensor<double>(1, 1);
    KeepGradients gradients;

    network.train_step(images, labels, gradients, loss);

    CHECK(gradients.kept.size() == parameters);
    KeepGradients ignored;
    for (KeepGradients::Kept const& kept : gradients.kept) {
      auto* const parameter = kept.parameter;
      auto const there = session.values_sync(parameter->value);
      check_gradient(kept.gradient, there, [&](auto const& values) {
        bench.set(parameter->value, values);
        network.train_step(images, labels, ignored, loss);
        return session.values_sync(loss).front();
      });
      bench.set(parameter->value, there);
    }
  }

  TEST_CASE("Trainer: learns, and gives identical bits when little memory is left") {
    beyond::TrainingResult const free = train(std::size_t{1} << 20U);
    REQUIRE(free.stats.swap_outs.count == 0);
    auto const peak = static_cast<std::size_t>(free.stats.allocated.bytes.peak);

    CHECK(free.test_accuracy > 0.95);
    CHECK(free.step_losses.size() == 24);
    CHECK(free.step_losses.back() < free.step_losses.front() / 2);

    auto const check_same = [&](beyond::TrainingResult const& tight) {
      CHECK(tight.stats.swap_outs.count > 0);
      CHECK(tight.step_losses == free.step_losses);
      CHECK(tight.state == free.state);
      CHECK(tight.test_accuracy == free.test_accuracy);
    };
    for (std::size_t const part : {2U, 4U, 6U}) {
      CAPTURE(part);
      check_same(train(peak / part));
    }
    beyond::TrainingResult const recomputed = train(peak / 4, true);
    CHECK(recomputed.stats.recomputations.count > 0);
    check_same(recomputed);
  }
}
