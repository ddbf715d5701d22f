// SPDX-License-Identifier: Apache-2.0
#include <spillway/policy/compaction/layout_line.hpp>
#include <spillway/policy/compaction/move_order.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include <support/layout_oracle.hpp>

namespace {

using spillway::LayoutMove;
using spillway::LayoutPlan;
using spillway::detail::LayoutLine;
using spillway::detail::MoveOrder;
using spillway::testing::check_plan;
using spillway::testing::OwnedLayout;

constexpr std::uint64_t no_bound = std::numeric_limits<std::uint64_t>::max();

std::optional<LayoutPlan>
order(OwnedLayout const& layout, std::vector<LayoutMove> wanted, std::uint64_t bound = no_bound) {
  LayoutLine const line{layout.view()};
  MoveOrder order;
  order.read(line);
  return order.order(line, std::move(wanted), bound);
}

/// The last place of each block, in order of blocks.
std::vector<std::uint32_t> places_after(OwnedLayout const& layout,
                                        std::vector<LayoutMove> const& moves) {
  std::vector<std::uint32_t> places;
  for (auto const& block : layout.blocks) {
    places.push_back(block.first);
  }
  for (auto const [block, to] : moves) {
    places[block] = to;
  }
  return places;
}

}  // namespace

TEST_SUITE("move_order") {
  TEST_CASE("MoveOrder: every block arrives, and its place is free before it moves") {
    constexpr std::uint64_t seed = 51;
    MESSAGE("seed ", seed);
    std::mt19937_64 random{seed};
    std::size_t ordered = 0;
    for (int i = 0; i < 1000; ++i) {
      CAPTURE(i);
      OwnedLayout const layout =
          spillway::testing::random_layout(random, 1 + random() % 12, 8, 6, 0);
      // The wanted places: the blocks in any order from the low end on.
      std::vector<std::uint32_t> blocks(layout.blocks.size());
      for (std::uint32_t block = 0; block < blocks.size(); ++block) {
        blocks[block] = block;
      }
      std::shuffle(blocks.begin(), blocks.end(), random);
      std::vector<LayoutMove> wanted;
      std::uint32_t at = 0;
      for (std::uint32_t const block : blocks) {
        if (layout.blocks[block].first != at) {
          wanted.push_back({block, at});
        }
        at += layout.blocks[block].count;
      }
      if (auto plan = order(layout, wanted)) {
        ++ordered;
        REQUIRE(places_after(layout, plan->moves) == places_after(layout, wanted));
        plan->first = at;
        plan->count = layout.end - at;
        check_plan(layout.view(), *plan, plan->count);
      }
    }
    CHECK(ordered > 300);
  }

  TEST_CASE("MoveOrder: if two blocks need each other's places, the smaller one is moved aside") {
    OwnedLayout const layout{{{0, 4, false}, {4, 3, false}}, 10};
    auto const plan = order(layout, {{0, 3}, {1, 0}});
    REQUIRE(plan);
    CHECK(plan->moves == std::vector<LayoutMove>{{1, 7}, {0, 3}, {1, 0}});
    CHECK(plan->cost == 10);
  }

  TEST_CASE("MoveOrder: moves blocks aside up to eight times") {
    for (std::uint32_t const pairs : {8U, 9U}) {
      OwnedLayout layout{{}, 2 * pairs + 1};
      std::vector<LayoutMove> wanted;
      for (std::uint32_t i = 0; i < 2 * pairs; ++i) {
        layout.blocks.push_back({i, 1, false});
        wanted.push_back({i, i % 2 == 0 ? i + 1 : i - 1});  // each pair exchanges its places
      }
      auto const plan = order(layout, wanted);
      CHECK(plan.has_value() == (pairs == 8));
      CHECK((!plan || plan->cost == 3 * pairs));
    }
  }

  TEST_CASE("MoveOrder: gives up if no block can be moved aside, and at its limit") {
    OwnedLayout const tight{{{0, 4, false}, {4, 3, false}}, 9};
    CHECK_FALSE(order(tight, {{0, 3}, {1, 0}}));
    OwnedLayout const wide{{{0, 4, false}, {4, 3, false}}, 10};
    CHECK_FALSE(order(wide, {{0, 3}, {1, 0}}, 10));
    CHECK(order(wide, {{0, 3}, {1, 0}}, 11));
  }
}
