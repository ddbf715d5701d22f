// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>
#include <spillway/sim.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <cstddef>

#include "../../bench/replay/verifier.hpp"

TEST_SUITE("replay") {
  using namespace spillway::literals;

  TEST_CASE("Verifier: no function that uses it is left on the stream when it ends") {
    spillway::testing::SteppedSimApi device{spillway::SimOptions{.capacity_bytes = 4_MiB}};
    auto const stream = device.create_stream();
    void* const memory = device.try_reserve(1_MiB);
    REQUIRE(memory != nullptr);
    {
      replay::Verifier<spillway::testing::SteppedSimApi> verifier{device, stream};
      verifier.fill(memory, 1_MiB, 7);
      verifier.check(memory, 1_MiB, 7);
      REQUIRE(device.queued_ops(stream) > 0);
    }

    CHECK(device.queued_ops(stream) == 0);
    device.release(memory, 1_MiB);
    device.destroy_stream(stream);
  }
}
