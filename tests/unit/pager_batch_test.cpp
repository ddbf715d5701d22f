// SPDX-License-Identifier: Apache-2.0
// SwapPager: blocks that leave together.
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <support/small_allocator.hpp>

using namespace spillway;
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

}  // namespace

TEST_SUITE("pager_batch") {
  TEST_CASE("SwapPager: small blocks that leave together and lie side by side are a copy or two") {
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

  TEST_CASE("SwapPager: small blocks that do not touch go in batches") {
    SmallBench bench{small_options(capacity_bytes)};
    FullOfSmallBlocks full{1000, bench};  // rounded up: the bytes in between are nobody's
    SimCalls const before = bench.device.calls();

    full.send_all_out();

    std::size_t const blocks = full.blocks.size();
    CHECK(bench.device.calls().copies_to_host == before.copies_to_host + blocks);
    CHECK(bench.device.calls().copy_batches == before.copy_batches + 2);
    CHECK(full.torn() == 0);
  }

  TEST_CASE("SwapPager: blocks that did not leave because a copy failed are as they were") {
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

  TEST_CASE("SwapPager: when the second batch fails the blocks of the first have left") {
    auto options = small_options(capacity_bytes);
    SmallBench bench{options};
    FullOfSmallBlocks full{500, bench};
    REQUIRE(full.blocks.size() > 512);
    bench.device.fail_copy(600);

    CHECK_THROWS_AS(full.send_all_out(), DeviceError);

    CHECK(bench.allocator.stats().swap_outs.count == 512);
    CHECK(full.torn() == 0);
  }
}
