// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/testing/device_contracts.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>

using namespace spillway;
using spillway::testing::DeviceRig;

TEST_SUITE("sim_worker") {
  TEST_CASE("SimEngine: serves one copy at a time, none before it is ready") {
    detail::SimEngine engine{detail::SimRate{1'000'000'000, 5}};

    auto const first = engine.take(100, 20);
    auto const second = engine.take(50, 10);
    auto const third = engine.take(1000, 10);

    CHECK(first.start_ns == 100);
    CHECK(first.end_ns == 125);
    CHECK(second.start_ns == 125);
    CHECK(second.end_ns == 140);
    CHECK(third.start_ns == 1000);
    CHECK(third.end_ns == 1015);
  }

  TEST_CASE("SimApi: a link is never faster than its set rate, over all streams together") {
    // 2 x 20 copies of 64 KiB at 1 GiB/s: at least 2.5 ms each way, whoever issues them.
    SimApi device{{.link_bytes_per_second = 1_GiB}};
    DeviceRig<SimApi> rig{device};
    auto const a = rig.stream();
    auto const b = rig.stream();
    unsigned char* const memory = rig.device_memory(128_KiB);
    unsigned char* const host = rig.pinned(128_KiB, 1);
    std::uint64_t const begin = device.clock_ns();

    for (int i = 0; i < 20; ++i) {
      device.copy(memory, host, 64_KiB, CopyKind::to_device, a);
      device.copy(memory + 64_KiB, host + 64_KiB, 64_KiB, CopyKind::to_device, b);
    }
    device.synchronize(a);
    device.synchronize(b);

    CHECK(device.clock_ns() - begin >= 40 * 64_KiB * 1'000'000'000 / 1_GiB);
    CHECK(std::memcmp(memory, host, 128_KiB) == 0);
  }

  TEST_CASE(
      "SimApi: computing takes at least its set time, and waits carry that time to other streams") {
    SimApi device;
    DeviceRig<SimApi> rig{device};
    auto const a = rig.stream();
    auto const b = rig.stream();
    auto const event = rig.event();
    std::uint64_t const begin = device.clock_ns();

    device.compute(a, 1'000'000);
    device.record(event, a);
    device.wait(b, event);
    device.compute(b, 1'000'000);
    device.synchronize(b);

    CHECK(device.clock_ns() - begin >= 2'000'000);
  }

  TEST_CASE("SimSignals: a signal is reused only when abandoned and without users") {
    detail::SimSignals signals;
    detail::SimSignal* const used = signals.acquire();
    used->add_user();
    used->set(0);
    signals.abandon(used);
    std::size_t reused = 0;
    for (int i = 0; i < 5000; ++i) {
      detail::SimSignal* const signal = signals.acquire();
      CHECK(signal != used);
      CHECK_FALSE(signal->is_set());
      signals.abandon(signal);
    }
    used->drop_user();
    for (int i = 0; i < 5000; ++i) {
      detail::SimSignal* const signal = signals.acquire();
      reused += static_cast<std::size_t>(signal == used);
      CHECK_FALSE(signal->is_set());
      signals.abandon(signal);
    }
    CHECK(reused > 0);
  }
}
