// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/sim/model_api.hpp>
#include <spillway/testing/device_contracts.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <thread>
#include <utility>
#include <vector>

using namespace spillway;
using namespace spillway::detail;
using spillway::testing::DeviceRig;

namespace {

// 1 byte a nanosecond on the link, 10 inside the device.
constexpr SimOptions one_gbps{.capacity_bytes = 1_GiB,
                              .link_bytes_per_second = 1'000'000'000,
                              .on_device_bytes_per_second = 10'000'000'000};

struct Timed {
  explicit Timed(SimOptions const& options = one_gbps) : device{options} {}

  ModelApi device;
  DeviceRig<ModelApi> rig{device};
  SimStream a = rig.stream();
  SimStream b = rig.stream();
  SimEvent event = rig.event();
  unsigned char* memory = rig.device_memory(1_MiB);
  unsigned char* host = rig.pinned(1_MiB);

  void copy(SimStream stream, CopyKind kind, std::size_t bytes) {
    switch (kind) {
    case CopyKind::to_host:
      return device.copy(host, memory, bytes, kind, stream);
    case CopyKind::to_device:
      return device.copy(memory, host, bytes, kind, stream);
    case CopyKind::on_device:
      return device.copy(memory + bytes, memory, bytes, kind, stream);
    }
  }
  /// When all work on `stream` will have finished.
  std::uint64_t end_of(SimStream stream) {
    device.record(event, stream);
    std::uint64_t const before = device.clock_ns();
    device.synchronize(event);
    std::uint64_t const after = device.clock_ns();
    REQUIRE(after >= before);
    return after;
  }
};

}  // namespace

TEST_SUITE("sim_model") {
  TEST_CASE("ModelApi: nothing takes time unless a rate or a duration says so") {
    Timed t{{.capacity_bytes = 1_GiB}};
    t.copy(t.a, CopyKind::to_host, 1000);
    t.copy(t.a, CopyKind::on_device, 1000);
    t.device.fill(t.memory, 0, 1000, t.a);
    CHECK(t.device.finish_time_ns() == 0);
    t.device.compute(t.a, 5);
    CHECK(t.device.finish_time_ns() == 5);
  }

  TEST_CASE("ModelApi: a copy takes the latency plus its bytes divided by the rate") {
    SimOptions options = one_gbps;
    options.copy_latency_ns = 7;
    Timed t{options};
    t.copy(t.a, CopyKind::to_host, 1000);
    CHECK(t.end_of(t.a) == 1007);
    t.copy(t.a, CopyKind::on_device, 1000);
    CHECK(t.end_of(t.a) == 1007 + 107);
    t.device.fill(t.memory, 0, 2000, t.a);
    CHECK(t.end_of(t.a) == 1007 + 107 + 207);
  }

  TEST_CASE(
      "ModelApi: copies in one direction share its bandwidth; the two directions are independent") {
    Timed t;
    t.copy(t.a, CopyKind::to_host, 1000);
    t.copy(t.b, CopyKind::to_host, 500);
    CHECK(t.device.finish_time_ns() == 1500);
    auto const c = t.rig.stream();
    t.copy(c, CopyKind::to_device, 1400);
    t.copy(c, CopyKind::on_device, 1000);
    CHECK(t.device.finish_time_ns() == 1500);
    CHECK(t.end_of(c) == 1500);
  }

  TEST_CASE("ModelApi: work of a stream runs in order, and computes while copies run") {
    Timed t;
    t.device.compute(t.a, 300);
    t.copy(t.a, CopyKind::to_host, 100);
    t.device.compute(t.a, 50);
    t.device.compute(t.b, 440);
    CHECK(t.device.finish_time_ns() == 450);
    CHECK(t.device.clock_ns() == 0);
  }

  TEST_CASE("ModelApi: a wait is for the event as recorded so far, not for a later record") {
    Timed t;
    t.device.compute(t.a, 100);
    t.device.record(t.event, t.a);
    t.device.wait(t.b, t.event);
    t.device.compute(t.a, 1000);
    t.device.record(t.event, t.a);
    t.device.compute(t.b, 1);

    auto const second = t.rig.event();
    t.device.record(second, t.b);
    t.device.synchronize(second);
    CHECK(t.device.clock_ns() == 101);
    CHECK_FALSE(t.device.is_complete(t.event));
  }

  TEST_CASE("ModelApi: the host's clock moves when it waits or is advanced, and never back") {
    Timed t;
    t.device.compute(t.a, 100);
    t.device.record(t.event, t.a);
    CHECK_FALSE(t.device.is_complete(t.event));
    t.device.advance_host(99);
    CHECK_FALSE(t.device.is_complete(t.event));
    t.device.advance_host(1);
    CHECK(t.device.is_complete(t.event));
    t.device.advance_host(400);
    t.device.synchronize(t.a);
    CHECK(t.device.clock_ns() == 500);
    CHECK(t.device.finish_time_ns() == 500);
  }

  TEST_CASE("ModelApi: work starts no earlier than the host enqueued it") {
    Timed t;
    t.device.advance_host(1000);
    t.device.record(t.event, t.a);
    t.copy(t.a, CopyKind::to_host, 10);
    t.device.compute(t.b, 5);
    CHECK(t.device.is_complete(t.event));
    CHECK(t.end_of(t.b) == 1005);
    CHECK(t.end_of(t.a) == 1010);
  }

  TEST_CASE("ModelApi: an engine serves other streams while one is not ready") {
    Timed t;
    t.device.compute(t.a, 1000);
    t.copy(t.a, CopyKind::to_host, 100);  // 1000 to 1100
    t.copy(t.b, CopyKind::to_host, 400);  // 0 to 400
    CHECK(t.end_of(t.b) == 400);
    t.copy(t.b, CopyKind::to_host, 601);  // 400 to 1001 would not fit
    CHECK(t.end_of(t.b) == 1701);
    CHECK(t.end_of(t.a) == 1701);
  }

  TEST_CASE("ModelApi: a host function runs at once and sees the time of its stream") {
    struct Call {
      ModelApi* device;
      std::uint64_t seen_ns = 0;
      std::uint64_t seen_elsewhere_ns = 1;
    };
    Timed t;
    Call call{&t.device};
    t.device.compute(t.a, 70);

    t.device.launch_host(
        t.a,
        [](void* p) noexcept {
          auto* const c = static_cast<Call*>(p);
          c->seen_ns = c->device->clock_ns();
          std::thread{[c] { c->seen_elsewhere_ns = c->device->clock_ns(); }}.join();
        },
        &call);

    CHECK(call.seen_ns == 70);
    CHECK(call.seen_elsewhere_ns == 0);
    CHECK(t.device.clock_ns() == 0);
  }

  TEST_CASE("ModelApi: the work of a destroyed stream still counts") {
    ModelApi device;
    auto const stream = device.create_stream();
    device.compute(stream, 30);
    device.destroy_stream(stream);
    CHECK(device.finish_time_ns() == 30);
  }

  TEST_CASE("ModelApi: addresses are never reused") {
    ModelApi device{{.capacity_bytes = std::size_t{1} << 45U}};
    std::vector<std::pair<std::uintptr_t, std::size_t>> taken;
    std::mt19937_64 random{5};
    for (int i = 0; i < 2000; ++i) {
      std::size_t const bytes = 1 + random() % 1_GiB;
      void* const p = i % 2 == 0 ? device.try_reserve(bytes) : device.try_allocate_pinned(bytes, 0);
      REQUIRE(p != nullptr);
      taken.emplace_back(reinterpret_cast<std::uintptr_t>(p), bytes);
      if (i % 2 == 0) {
        device.release(p, bytes);
      } else {
        device.free_pinned(p, bytes);
      }
    }
    std::sort(taken.begin(), taken.end());
    for (std::size_t i = 1; i < taken.size(); ++i) {
      CHECK(taken[i - 1].first + taken[i - 1].second < taken[i].first);
    }
  }

  TEST_CASE("ModelApi: without checks, copies between arbitrary addresses are accepted") {
    ModelApi device{{.checked = false}};
    auto const stream = device.create_stream();
    device.copy(nullptr, nullptr, 100, CopyKind::to_host, stream);
    CHECK(device.calls().bytes_to_host == 100);
  }

  TEST_CASE(
      "SimTimetable: copies never overlap, start no earlier than ready, and fill idle times") {
    for (std::uint64_t seed = 1; seed <= 50; ++seed) {
      CAPTURE(seed);
      std::mt19937_64 random{seed};
      detail::SimTimetable table{detail::SimRate{1'000'000'000, 0}};
      std::vector<std::pair<std::uint64_t, std::uint64_t>> busy;  // sorted
      std::uint64_t now = 0;
      for (int i = 0; i < 60; ++i) {
        now += random() % 3;
        std::uint64_t const ready = now + random() % 200;
        std::size_t const bytes = 1 + random() % 40;
        std::uint64_t expected = ready;
        for (auto const& [begin, end] : busy) {
          if (expected + bytes > begin && expected < end) {
            expected = end;
          }
        }

        std::uint64_t const end = table.take(now, ready, bytes);

        // It finds the earliest time within the idle times that it remembers.
        REQUIRE(end == expected + bytes);
        busy.emplace_back(expected, end);
        std::sort(busy.begin(), busy.end());
      }
    }
  }
}
