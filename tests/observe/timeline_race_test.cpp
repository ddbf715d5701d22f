// SPDX-License-Identifier: Apache-2.0
#include <spillway/device_allocator.hpp>
#include <spillway/observe/snapshot.hpp>
#include <spillway/observe/timeline.hpp>
#include <spillway/sim.hpp>
#include <spillway/swappable_buffer.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <sstream>
#include <thread>
#include <vector>

TEST_SUITE("timeline race") {
  using namespace spillway;

  namespace {

  struct Policies : SimPolicies {
    using observer = Timeline;
  };
  using Allocator = DeviceAllocator<Policies>;

  template <class Work>
  void run_threads(std::size_t count, Work work) {
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < count; ++i) {
      threads.emplace_back(work, i);
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }

  }  // namespace

  TEST_CASE("Timeline: records of several threads are all kept, in each thread's order") {
    constexpr std::size_t threads = 4;
    constexpr std::size_t records_each = 5000;
    Timeline timeline;
    std::atomic<bool> is_over{false};
    std::thread reader{[&] {
      while (!is_over) {
        (void)timeline.records();
        (void)timeline.forgotten();
      }
    }};
    run_threads(threads, [&](std::size_t me) {
      for (std::size_t i = 0; i < records_each; ++i) {
        timeline.on_record({.block = make_block_id(static_cast<std::uint32_t>(me), 1), .bytes = i});
      }
    });
    is_over = true;
    reader.join();

    std::array<std::size_t, threads> seen{};
    for (Record const& record : timeline.records()) {
      CHECK(record.bytes == seen.at(index_of_block(record.block))++);
    }
    CHECK(std::all_of(seen.begin(), seen.end(), [&](auto n) { return n == records_each; }));
  }

  TEST_CASE("Timeline: its limit holds with several threads, and the missing records are counted") {
    Timeline timeline;
    timeline.set_limit(100);
    run_threads(4, [&](std::size_t me) {
      for (std::size_t i = 0; i < 2000; ++i) {
        timeline.on_record({.bytes = i});
        if (me == 0 && i % 100 == 0) {
          timeline.set_limit(50 + i % 300);
        }
      }
    });

    CHECK(timeline.records().size() + timeline.forgotten() == 4 * 2000);
  }

  TEST_CASE("Timeline: can be read and written while threads use the watched allocator") {
    SimApi device{{.capacity_bytes = 64_MiB}};
    Allocator::Options options{.capacity_bytes = 512_KiB};
    options.host.pinned_bytes = 64_MiB;
    Allocator allocator{device, options};
    std::atomic<std::size_t> running{3};
    std::thread reader{[&] {
      while (running != 0) {
        std::ostringstream out;
        allocator.observer().write(out, allocator.stats());
        auto const records = allocator.observer().records();
        auto const now =
            snapshot(allocator, {records.data(), std::min<std::size_t>(records.size(), 50)});
        write_json(out, now);
        for (auto const& segment : now.segments) {
          std::size_t bytes = 0;
          for (auto const& block : segment.blocks) {
            bytes += block.size_bytes;
          }
          CHECK(bytes == segment.size_bytes);
        }
      }
    }};
    run_threads(3, [&](std::size_t me) {
      std::mt19937_64 random{me};
      auto const stream = device.create_stream();
      {
        std::vector<SwappableBuffer<Allocator>> buffers;
        for (std::size_t i = 0; i < 150; ++i) {
          if (buffers.size() < 24) {
            buffers.emplace_back(allocator, 1 + random() % 64_KiB);
          } else if (random() % 4 == 0) {
            buffers.erase(buffers.begin());
          }
          (void)buffers[random() % buffers.size()].acquire(Access::read_write, stream);
        }
      }
      allocator.synchronize();
      allocator.retire_stream(stream);
      device.destroy_stream(stream);
      --running;
    });
    reader.join();

    auto const stats = allocator.stats();
    std::map<RecordKind, std::size_t> counts;
    for (Record const& record : allocator.observer().records()) {
      ++counts[record.kind];
    }
    CHECK(counts[RecordKind::allocate] == stats.allocated.blocks.total);
    CHECK(counts[RecordKind::deallocate] == stats.allocated.blocks.total);
    CHECK(counts[RecordKind::swap_out] + counts[RecordKind::copy_out] == stats.swap_outs.count);
    CHECK(counts[RecordKind::swap_in] + counts[RecordKind::prefetch] == stats.swap_ins.count);
    CHECK(counts[RecordKind::drop] == stats.drops.count);
    CHECK(counts[RecordKind::move] == stats.moves.count);
    CHECK(stats.swap_outs.count > 50);
  }
}
