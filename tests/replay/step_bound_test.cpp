// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "../../bench/replay/replay.hpp"
#include "../../bench/replay/trace.hpp"
#include "../../bench/step_bound.hpp"
#include "../../bench/trace_step.hpp"

namespace {

using namespace spillway::literals;
using spillway::Access;
using spillway::bench::Step;
using spillway::bench::StepBound;

/// `n` operations that each make a block of 100 bytes, then `n` that use the blocks, the newest
/// first.
Step there_and_back(std::uint32_t n) {
  Step step;
  for (std::uint32_t block = 0; block < n; ++block) {
    step.push_back({{block, 100, false, Access::write}});
  }
  for (std::uint32_t block = n; block-- > 0;) {
    step.push_back({{block, 100, false, Access::read}});
  }
  return step;
}

/// The same with random kernels, and with weights that both halves use.
replay::Trace random_trace(std::mt19937_64& random) {
  replay::Trace trace;
  trace.form = replay::Trace::Form::accesses;
  std::uint32_t const layers = 4 + static_cast<std::uint32_t>(random() % 8);
  auto const draw_bytes = [&] { return 256 * (1 + random() % 64); };
  auto const add_tensor = [&](bool is_weight) {
    trace.tensors.push_back({trace.tensors.size(), draw_bytes(), is_weight});
  };
  for (std::uint32_t i = 0; i < layers; ++i) {
    add_tensor(true);
    add_tensor(false);
  }
  auto const add = [&](std::vector<replay::Operand> const& operands) {
    trace.operations.push_back({trace.operands.size(), operands.size(), random() % 4000});
    trace.operands.insert(trace.operands.end(), operands.begin(), operands.end());
    trace.compute_ns += trace.operations.back().kernel_ns;
    std::size_t bytes = 0;
    for (replay::Operand const& operand : operands) {
      bytes += trace.tensors[operand.tensor].bytes;
    }
    trace.working_set_bytes = std::max(trace.working_set_bytes, bytes);
  };
  for (std::uint32_t i = 0; i < layers; ++i) {
    std::vector<replay::Operand> operands{{2 * i, false, false}, {2 * i + 1, true, false}};
    if (i > 0) {
      operands.push_back({2 * i - 1, false, false});
    }
    add(operands);
  }
  for (std::uint32_t i = layers; i-- > 0;) {
    add({{2 * i, false, false}, {2 * i + 1, false, true}});
  }
  for (replay::Tensor const& tensor : trace.tensors) {
    trace.peak_live_bytes += tensor.bytes;
  }
  return trace;
}

}  // namespace

TEST_SUITE("replay") {
  TEST_CASE("StepBound: with room for everything a step takes as long as its kernels") {
    StepBound const bound{there_and_back(4), std::vector<std::uint64_t>(8, 50)};

    CHECK(bound.least_ns(400, 1) == 8 * 50);
  }

  TEST_CASE("StepBound: blocks made in the first half of a step leave in that half") {
    StepBound const bound{there_and_back(4), std::vector<std::uint64_t>(8, 10)};

    // 200 of the 400 bytes are out when the fourth operation begins. From the fifth on, which
    // begins with 200 bytes resident, 200 come in before the last one begins.
    CHECK(bound.least_ns(200, 1) == 200 + 10 + 200 + 10);
  }

  TEST_CASE("StepBound: weights that begin with a step are copied out before they come in") {
    auto const weights = [](Access access) {
      Step step;
      for (std::uint32_t block = 0; block < 4; ++block) {
        step.push_back({{block, 100, true, access}});
      }
      return step;
    };
    Step step = weights(Access::read);
    // 200 of the 400 bytes come in before the fourth operation begins.
    CHECK(StepBound{step, std::vector<std::uint64_t>(4, 10)}.least_ns(200, 1) == 200 + 10);

    step = weights(Access::write);
    CHECK(StepBound{step, std::vector<std::uint64_t>(4, 10)}.least_ns(400, 1) == 4 * 10);
    // 200 of the 400 bytes are out when the fourth operation begins.
    CHECK(StepBound{step, std::vector<std::uint64_t>(4, 10)}.least_ns(200, 1) == 200 + 10);

    for (std::uint32_t const block : {0U, 1U, 2U}) {
      step.push_back({{block, 100, true, Access::read}});
    }
    // They are not freed: after the fourth operation, the others come in.
    CHECK(StepBound{step, std::vector<std::uint64_t>(7, 10)}.least_ns(200, 1) == 200 + 200 + 10);
  }

  TEST_CASE("StepBound: no run takes less time") {
    std::uint64_t const seed = 20260101;
    CAPTURE(seed);
    std::mt19937_64 random{seed};
    std::size_t bounded_by_copies = 0;
    for (int i = 0; i < 200; ++i) {
      CAPTURE(i);
      replay::Trace const trace = random_trace(random);
      Step const step = spillway::bench::step_of(trace);
      replay::Settings settings;
      settings.steps = 4;
      settings.link_gbps = 1 + static_cast<double>(random() % 20);
      settings.capacity_bytes =
          std::max(trace.working_set_bytes + 16_KiB,
                   static_cast<std::size_t>(0.1 * static_cast<double>(2 + random() % 8) *
                                            static_cast<double>(trace.peak_live_bytes)) &
                       ~std::size_t{255});
      std::vector<std::uint64_t> const kernels_ns = spillway::bench::kernels_ns(trace);
      double const least_ns =
          StepBound{step, kernels_ns}.least_ns(settings.capacity_bytes, *settings.link_gbps);
      double const least_first_ns =
          StepBound{spillway::bench::first_step_of(trace), kernels_ns}.least_ns(
              settings.capacity_bytes, *settings.link_gbps);
      bounded_by_copies += least_ns > static_cast<double>(trace.compute_ns) ? 1 : 0;

      replay::Result const result = replay::replay_on_model(trace, settings);

      REQUIRE(result.completed);
      CHECK(static_cast<double>(result.steps.back().simulated_ns) >= 0.999 * least_ns);
      CHECK(static_cast<double>(result.steps.front().simulated_ns) >= 0.999 * least_first_ns);
    }
    CHECK(bounded_by_copies > 20);
  }
}
