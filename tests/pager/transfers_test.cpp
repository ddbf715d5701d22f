// SPDX-License-Identifier: Apache-2.0
// Blocks that leave together, and blocks that come in together.
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/prefetch/reverse_order.hpp>
#include <spillway/sim.hpp>
#include <spillway/swappable_buffer.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <support/small_allocator.hpp>

using namespace spillway;
using namespace spillway::detail;
using support::KnownBytes;
using support::small_options;
using support::SmallBench;
using support::SmallBuffer;

namespace {

constexpr std::size_t capacity_bytes = 512_KiB;

/// An allocator that is full of small blocks with known bytes.
struct FullOfSmallBlocks {
  explicit FullOfSmallBlocks(std::size_t block_bytes, SmallBench& the_bench) : bench{the_bench} {
    for (std::size_t i = 0; i < capacity_bytes / round_up(block_bytes, granule_bytes); ++i) {
      blocks.push_back(
          std::make_unique<KnownBytes>(bench, block_bytes, static_cast<std::uint8_t>(i)));
    }
  }

  /// All leave for one that takes all of the room, which does not stay.
  void send_all_out() { SmallBuffer const large{bench.allocator, capacity_bytes}; }

  [[nodiscard]] std::size_t torn() {
    std::size_t count = 0;
    for (auto const& block : blocks) {
      count += block->is_intact() ? 0U : 1U;
    }
    return count;
  }

  SmallBench& bench;
  std::vector<std::unique_ptr<KnownBytes>> blocks;
};

/// A pass over small blocks and back, all of which have left in between.
struct ThereAndBack {
  struct Policies : SimPolicies {
    using eviction = LruEviction;
    using prefetch = ReverseOrder;
  };
  using Allocator = DeviceAllocator<Policies>;
  using Buffer = SwappableBuffer<Allocator>;

  static constexpr std::size_t count = 40;
  static constexpr std::size_t bytes = 1000;

  ThereAndBack() {
    for (std::size_t i = 0; i < count; ++i) {
      blocks.push_back(std::make_unique<Buffer>(allocator, bytes));
      auto const lease = blocks.back()->acquire(Access::write, stream);
      device.fill(lease.data(), static_cast<unsigned char>(i + 1), bytes, stream);
    }
    Buffer const large{allocator, capacity_bytes};
  }
  ThereAndBack(ThereAndBack const&) = delete;
  ThereAndBack& operator=(ThereAndBack const&) = delete;
  ~ThereAndBack() {
    allocator.retire_stream(stream);
    device.synchronize(stream);
    device.destroy_stream(stream);
  }

  [[nodiscard]] bool is_intact(std::size_t i) {
    std::array<unsigned char, bytes> read{};
    auto const lease = blocks[i]->acquire(Access::read, stream);
    allocator.copy_to_host_sync(read.data(), lease.data(), bytes, stream);
    return std::all_of(read.begin(), read.end(), [&](unsigned char byte) { return byte == i + 1; });
  }

  SimApi device{{.capacity_bytes = 64_MiB}};
  SimApi::stream_type stream = device.create_stream();
  Allocator allocator{device,
                      {.capacity_bytes = capacity_bytes,
                       .bounce_bytes = 0,
                       .host = {.pinned_bytes = 1_MiB, .slab_bytes = 1_MiB}}};
  std::vector<std::unique_ptr<Buffer>> blocks;
};

}  // namespace

TEST_SUITE("pager") {
  TEST_CASE(
      "DeviceAllocator: small blocks that leave together and lie side by side are a copy or two") {
    SmallBench bench{small_options(capacity_bytes)};
    FullOfSmallBlocks full{4096, bench};
    SimCalls const before = bench.device.calls();

    full.send_all_out();

    // The first ones do not wait for what the last ones may have to wait for.
    CHECK(bench.device.calls().copies_to_host <= before.copies_to_host + 2);
    CHECK(bench.device.calls().bytes_to_host == before.bytes_to_host + capacity_bytes);
    CHECK(bench.allocator.stats().swap_outs.count == 128);
    CHECK(full.torn() == 0);
  }

  TEST_CASE("DeviceAllocator: small blocks that do not touch go in batches") {
    SmallBench bench{small_options(capacity_bytes)};
    FullOfSmallBlocks full{1000, bench};  // rounded up: the bytes in between are nobody's
    SimCalls const before = bench.device.calls();

    full.send_all_out();

    std::size_t const blocks = full.blocks.size();
    CHECK(bench.device.calls().copies_to_host == before.copies_to_host + blocks);
    CHECK(bench.device.calls().copy_batches == before.copy_batches + 2);
    CHECK(full.torn() == 0);
  }

  TEST_CASE("DeviceAllocator: blocks that did not leave because a copy failed are as they were") {
    for (std::uint64_t const nth : {1U, 2U, 300U, 512U}) {
      CAPTURE(nth);
      SmallBench bench{small_options(capacity_bytes)};
      FullOfSmallBlocks full{1000, bench};
      bench.device.fail_copy(nth);

      CHECK_THROWS_AS(full.send_all_out(), DeviceError);

      CHECK(full.torn() == 0);
      full.send_all_out();
      CHECK(full.torn() == 0);
    }
  }

  TEST_CASE("DeviceAllocator: when the second batch fails the blocks of the first have left") {
    auto options = small_options(capacity_bytes);
    SmallBench bench{options};
    FullOfSmallBlocks full{500, bench};
    REQUIRE(full.blocks.size() > 512);
    bench.device.fail_copy(600);

    CHECK_THROWS_AS(full.send_all_out(), DeviceError);

    CHECK(bench.allocator.stats().swap_outs.count == 512);
    CHECK(full.torn() == 0);
  }

  TEST_CASE("DeviceAllocator: small blocks that are prefetched come together") {
    ThereAndBack now;
    std::uint64_t const batches = now.device.calls().copy_batches;
    std::size_t i = ThereAndBack::count;
    while (now.device.calls().copy_batches == batches) {
      REQUIRE(i > 20);
      CHECK(now.is_intact(--i));  // until it is clear that this is the way back
    }
    std::size_t const left = ThereAndBack::count - now.allocator.stats().swap_ins.count;
    CHECK(left + 8 < i);
    while (i > 0) {
      CHECK(now.is_intact(--i));
    }
    Stats const stats = now.allocator.stats();
    CHECK(stats.swap_ins.count == ThereAndBack::count);
    CHECK(stats.swap_ins.bytes == ThereAndBack::count * 1_KiB);
  }

  TEST_CASE("DeviceAllocator: when some of them cannot be swapped in, the others are and all stay "
            "whole") {
    for (std::uint64_t nth = 1; nth <= 12; ++nth) {
      CAPTURE(nth);
      ThereAndBack now;
      for (std::size_t i = ThereAndBack::count; i-- > 30;) {
        now.device.fail_copy(nth);  // of this acquire or of what it brings in ahead, or of none
        bool is_intact = false;
        try {
          is_intact = now.is_intact(i);
        } catch (DeviceError const&) {
          now.device.fail_copy(0);
          is_intact = now.is_intact(i);
        }
        CHECK(is_intact);
      }
      now.device.fail_copy(0);
      for (std::size_t i = ThereAndBack::count; i-- > 0;) {
        CHECK(now.is_intact(i));
      }
    }
  }
}
