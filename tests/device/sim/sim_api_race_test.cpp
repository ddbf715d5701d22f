// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/sim/model_api.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/testing/device_contracts.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include <support/random_work.hpp>

// Meant for a thread sanitizer: a simulated stream is a thread, and two streams are ordered by
// nothing but their events, so a missing event shows as a data race.

using namespace spillway;
using spillway::test::RandomWork;
using spillway::test::WorkBench;
using spillway::test::WorkItem;
using spillway::testing::DeviceRig;

TEST_SUITE("sim_api_race") {
  TEST_CASE("SimApi: ordered work of several streams is free of races and gives the right result") {
    for (std::uint64_t seed = 100; seed < 130; ++seed) {
      CAPTURE(seed);
      RandomWork const work{seed};
      SimApi device;
      WorkBench bench{device};
      for (WorkItem const& item : work.items()) {
        if (item.is_ordered) {
          bench.enqueue(item);
        }
      }
      bench.synchronize();
      CHECK(bench.holds_result_of(work));
    }
  }

  TEST_CASE("SimApi: a value passed round a ring of streams by events arrives intact") {
    constexpr std::size_t streams = 5;
    constexpr int rounds = 200;
    constexpr std::size_t bytes = 4096;
    SimApi device;
    DeviceRig<SimApi> rig{device};
    std::array<SimStream, streams> stream{};
    std::array<SimEvent, streams> event{};
    std::generate(stream.begin(), stream.end(), [&] { return rig.stream(); });
    std::generate(event.begin(), event.end(), [&] { return rig.event(); });
    unsigned char* const memory = rig.device_memory(bytes);
    auto const add_one = [](void* p) noexcept {
      auto* const bytes_of = static_cast<unsigned char*>(p);
      std::for_each(bytes_of, bytes_of + bytes, [](unsigned char& byte) { ++byte; });
    };
    device.fill(memory, 0, bytes, stream[0]);
    device.record(event[0], stream[0]);

    for (int i = 1; i <= rounds; ++i) {
      std::size_t const me = static_cast<std::size_t>(i) % streams;
      std::size_t const before = static_cast<std::size_t>(i - 1) % streams;
      device.wait(stream[me], event[before]);
      device.launch_host(stream[me], add_one, memory);
      device.record(event[me], stream[me]);
    }

    device.synchronize(event[rounds % streams]);
    CHECK(std::count(memory, memory + bytes, rounds) == static_cast<std::ptrdiff_t>(bytes));
  }

  TEST_CASE("SimApi: host threads may make any calls at the same time") {
    constexpr int threads = 4;
    constexpr int rounds = 60;
    SimApi device{{.capacity_bytes = 64_MiB}};
    std::atomic<int> wrong{0};
    auto const work = [&](unsigned char name) {
      for (int i = 0; i < rounds; ++i) {
        auto const a = device.create_stream();
        auto const b = device.create_stream();
        auto const event = device.create_event();
        auto* const memory = static_cast<unsigned char*>(device.try_reserve(8192));
        auto* const host = static_cast<unsigned char*>(device.try_allocate_pinned(4096, -1));
        device.fill(memory, name, 4096, a);
        device.copy(memory + 4096, memory, 4096, CopyKind::on_device, a);
        device.record(event, a);
        device.wait(b, event);
        device.copy(host, memory + 4096, 4096, CopyKind::to_host, b);
        device.record(event, b);
        device.release(memory, 8192);
        device.synchronize(event);
        if (std::count(host, host + 4096, name) != 4096 || !device.is_complete(event)) {
          ++wrong;
        }
        device.destroy_stream(a);
        device.free_pinned(host, 4096);
        device.destroy_event(event);
        device.destroy_stream(b);
        (void)device.memory_info();
      }
    };

    std::vector<std::thread> all;
    for (int i = 0; i < threads; ++i) {
      all.emplace_back(work, static_cast<unsigned char>(i + 1));
    }
    for (std::thread& thread : all) {
      thread.join();
    }

    CHECK(wrong == 0);
    CHECK(device.usage() == SimUsage{});
    CHECK(device.calls().records == 2 * threads * rounds);
  }

  TEST_CASE("SimApi: several host threads may feed one stream and one event") {
    SimApi device;
    DeviceRig<SimApi> rig{device};
    auto const stream = rig.stream();
    auto const other = rig.stream();
    auto const event = rig.event();
    int count = 0;  // of the stream's thread alone
    auto const add_one = [](void* p) noexcept { ++*static_cast<int*>(p); };
    auto const feed = [&] {
      for (int i = 0; i < 500; ++i) {
        device.launch_host(stream, add_one, &count);
        device.record(event, stream);
        device.wait(other, event);
        if (i % 50 == 0) {
          device.synchronize(event);
        }
      }
    };

    std::thread first{feed};
    std::thread second{feed};
    first.join();
    second.join();
    device.synchronize(stream);

    CHECK(count == 1000);
  }

  TEST_CASE("ModelApi: host threads may make any calls at the same time") {
    ModelApi device{{.link_bytes_per_second = 1'000'000'000}};
    DeviceRig<ModelApi> rig{device};
    unsigned char* const memory = rig.device_memory(4096);
    unsigned char* const host = rig.pinned(4096);
    auto const work = [&] {
      auto const stream = device.create_stream();
      auto const event = device.create_event();
      for (int i = 0; i < 2000; ++i) {
        device.copy(host, memory, 100, CopyKind::to_host, stream);
        device.launch_host(
            stream, [](void*) noexcept {}, nullptr);
        device.record(event, stream);
        (void)device.is_complete(event);
        (void)device.clock_ns();
      }
      device.synchronize(stream);
      device.destroy_event(event);
      device.destroy_stream(stream);
    };

    std::thread first{work};
    std::thread second{work};
    first.join();
    second.join();

    CHECK(device.finish_time_ns() == 400'000);
  }
}
