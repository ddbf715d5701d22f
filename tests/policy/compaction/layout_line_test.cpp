// SPDX-License-Identifier: Apache-2.0
#include <spillway/policy/compaction/layout_line.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>

namespace {

using spillway::detail::BlockSpan;
using spillway::detail::cheapest_slide;
using spillway::detail::LayoutLine;
using spillway::testing::OwnedLayout;
using spillway::testing::random_layout;

/// The fewest granules of blocks between gaps of `count` granules in all, by trying all spans.
std::optional<std::uint64_t> slow_cost(LayoutLine const& line, std::uint64_t count) {
  std::optional<std::uint64_t> best;
  for (std::size_t from = 0; from <= line.size(); ++from) {
    std::uint64_t room = 0;
    std::uint64_t cost = 0;
    for (std::size_t to = from; to <= line.size(); ++to) {
      room += line.gap(to);
      if (room >= count && (!best || cost < *best)) {
        best = cost;
      }
      if (to == line.size() || line.block(to).is_fixed) {
        break;
      }
      cost += line.block(to).count;
    }
  }
  return best;
}

}  // namespace

TEST_SUITE("layout_line") {
  TEST_CASE("LayoutLine: gaps lie around and between the blocks, and may be empty") {
    OwnedLayout const layout{{{0, 2, false}, {5, 1, false}, {6, 3, true}}, 12};
    LayoutLine const line{layout.view()};
    REQUIRE(line.size() == 3);
    CHECK(line.gap(0) == 0);
    CHECK(line.gap_first(1) == 2);
    CHECK(line.gap_end(1) == 5);
    CHECK(line.gap(2) == 0);
    CHECK(line.gap_first(3) == 9);
    CHECK(line.gap_end(3) == 12);
    LayoutLine const empty{OwnedLayout{{}, 7}.view()};
    CHECK(empty.size() == 0);
    CHECK(empty.gap(0) == 7);
  }

  TEST_CASE("cheapest_slide: finds the cheapest span of all without a fixed block") {
    constexpr std::uint64_t seed = 51;
    MESSAGE("seed ", seed);
    std::mt19937_64 random{seed};
    std::size_t found = 0;
    for (int i = 0; i < 2000; ++i) {
      CAPTURE(i);
      OwnedLayout const layout = random_layout(random, random() % 12, 9, 6, 5);
      LayoutLine const line{layout.view()};
      std::uint64_t const count = 1 + random() % 20;
      BlockSpan const span = cheapest_slide(line, count);
      auto const least = slow_cost(line, count);
      REQUIRE(span.is_none() == !least.has_value());
      if (span.is_none()) {
        continue;
      }
      ++found;
      REQUIRE(span.cost == *least);
      std::uint64_t room = line.gap(span.from);
      std::uint64_t cost = 0;
      for (std::size_t block = span.from; block < span.to; ++block) {
        REQUIRE_FALSE(line.block(block).is_fixed);
        cost += line.block(block).count;
        room += line.gap(block + 1);
      }
      REQUIRE(room == span.room);
      REQUIRE(cost == span.cost);
      REQUIRE(room >= count);
    }
    CHECK(found > 500);
  }

  TEST_CASE("cheapest_slide: finds the lowest of equal spans") {
    OwnedLayout const layout{{{2, 1, false}, {5, 9, false}, {16, 1, false}}, 19};
    BlockSpan const span = cheapest_slide(LayoutLine{layout.view()}, 4);
    CHECK(span.cost == 1);
    CHECK(span.from == 0);
  }
}
