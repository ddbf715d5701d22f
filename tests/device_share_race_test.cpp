// SPDX-License-Identifier: Apache-2.0
#include <spillway/device_share.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include <support/small_allocator.hpp>
#include <support/temporary_folder.hpp>

using namespace spillway;
using namespace spillway::literals;
using namespace std::chrono_literals;
using support::SmallAllocator;
using support::SmallBuffer;

TEST_SUITE("DeviceShare") {
  TEST_CASE("DeviceShare: several allocators take turns with one device, and never exceed it") {
    constexpr std::size_t capacity = 1_MiB;
    constexpr std::size_t block_bytes = 64_KiB;
    TemporaryFolder folder;
    SimApi device{{.capacity_bytes = capacity}};
    std::atomic<bool> is_good{true};
    auto const run = [&](std::uint64_t seed) {
      std::mt19937_64 random{seed};
      SmallAllocator::Options options = support::small_options(capacity);
      options.initial_bytes = 0;
      options.growth_bytes = block_bytes;
      options.grows_in_place = true;
      options.paging.lease_wait = 0ms;
      SmallAllocator memory{device, options};
      DeviceShare share{memory,
                        {.file = folder.path() / "table",
                         .least_bytes = block_bytes,
                         .period = 1ms,
                         .idle_after = 5ms,
                         .patience = 10min}};
      auto const stream = memory.create_stream();
      for (int phase = 0; phase < 4; ++phase) {
        std::vector<SmallBuffer> buffers;
        for (std::size_t i = 0; i < 2 + random() % 14; ++i) {
          buffers.emplace_back(memory, block_bytes);
          device.fill(share.retry([&] { return buffers.back().acquire_write(stream); }).data(),
                      static_cast<unsigned char>(i),
                      block_bytes,
                      stream);
        }
        for (int use = 0; use < 40; ++use) {
          std::size_t const at = random() % buffers.size();
          std::uint8_t read = 0;
          auto const lease = share.retry([&] { return buffers[at].acquire_read(stream); });
          memory.copy_to_host_sync(&read, lease.data(), 1, stream);
          is_good = is_good && read == at;
        }
        (void)share.members();
        (void)share.capacity_bytes();
      }
    };
    std::vector<std::thread> threads;
    for (std::uint64_t i = 0; i < 3; ++i) {
      threads.emplace_back(run, i);
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    CHECK(is_good);
  }
}
