// SPDX-License-Identifier: Apache-2.0
#include <spillway/policy/compaction/sliding_compaction.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include <support/layout_oracle.hpp>

namespace {

using spillway::LayoutBlock;
using spillway::LayoutMove;
using spillway::SlidingCompaction;
using spillway::test::no_bound;
using spillway::testing::OwnedLayout;

// gap of 1, 1, 4, 4, 2, gap of 3
OwnedLayout const exchangeable{{{1, 1, false}, {2, 4, false}, {6, 4, false}, {10, 2, false}}, 15};

}  // namespace

TEST_SUITE("sliding_compaction") {
  TEST_CASE("SlidingCompaction: moves hardly more than the minimum, also when all free bytes are "
            "wanted") {
    auto const result = spillway::test::compare_with_least(
        31, 4, [](OwnedLayout const& layout, std::uint32_t count) {
          return SlidingCompaction{}.plan(layout.view(), count, no_bound);
        });
    CHECK(result.found > 150);
    CHECK(result.missed <= result.found / 50);
    CHECK(result.moved <= result.least + result.least / 50);
  }

  TEST_CASE("SlidingCompaction: an arena without memory has no plan, and no search without end") {
    SlidingCompaction policy;
    CHECK_FALSE(policy.plan(spillway::Layout{}, 1, 100));
    auto const nothing = policy.plan(spillway::Layout{}, 0, 100);
    CHECK((!nothing || nothing->cost == 0));
  }

  TEST_CASE("SlidingCompaction: finds a plan within its budget or none") {
    SlidingCompaction compaction;
    CHECK_FALSE(compaction.plan(exchangeable.view(), 4, 2));
    auto const plan = compaction.plan(exchangeable.view(), 4, 3);
    REQUIRE(plan);
    CHECK(plan->cost == 3);
    CHECK_FALSE(compaction.plan(exchangeable.view(), 5, 100));
  }

  TEST_CASE("SlidingCompaction: slides blocks where that moves least") {
    // 9, gap of 2, 1, gap of 2, 9: the block of 1 slides, although its window could be emptied.
    OwnedLayout const layout{{{0, 9, false}, {11, 1, false}, {14, 9, false}}, 23};
    auto const plan = SlidingCompaction{}.plan(layout.view(), 4, no_bound);
    REQUIRE(plan);
    CHECK(plan->moves == std::vector{LayoutMove{1, 9}});
    CHECK(plan->first == 10);
    CHECK(plan->count == 4);
  }

  TEST_CASE("SlidingCompaction: does not exchange blocks if it sees only a part of the arena") {
    auto layout = exchangeable.view();
    layout.is_part = true;
    auto const plan = SlidingCompaction{}.plan(layout, 4, no_bound);
    REQUIRE(plan);
    CHECK(plan->cost == 11);
  }

  TEST_CASE("SlidingCompaction: searches no longer than the time of the moves that it may save") {
    auto layout = exchangeable.view();
    layout.granules_per_look = 64;
    auto plan = SlidingCompaction{}.plan(layout, 4, no_bound);
    REQUIRE(plan);
    CHECK(plan->cost == 11);
    layout.granules_per_look = 1e-3;
    plan = SlidingCompaction{}.plan(layout, 4, no_bound);
    REQUIRE(plan);
    CHECK(plan->cost == 3);
  }

  TEST_CASE("SlidingCompaction: in a large arena all free bytes can be joined") {
    OwnedLayout layout;
    for (std::uint32_t i = 0; i < 2 * SlidingCompaction::few_blocks; ++i) {
      layout.blocks.push_back({2 * i, 1, false});
    }
    layout.end = static_cast<std::uint32_t>(2 * layout.blocks.size());
    auto const plan = SlidingCompaction{}.plan(layout.view(), layout.room(), no_bound);
    REQUIRE(plan);
    spillway::testing::check_plan(layout.view(), *plan, layout.room());
  }

  TEST_CASE(
      "SlidingCompaction: with every other block of one size freed, half of the others are moved") {
    for (std::uint32_t const blocks : {100U, 2'000U, 5'000U, 100'000U}) {
      CAPTURE(blocks);
      OwnedLayout layout;
      for (std::uint32_t i = 0; i < blocks; ++i) {
        layout.blocks.push_back({(2 * i + 1) * 8, 8, false});
      }
      layout.end = 2 * blocks * 8;
      auto const plan = SlidingCompaction{}.plan(layout.view(), layout.room(), no_bound);
      REQUIRE(plan);
      spillway::testing::check_plan(layout.view(), *plan, layout.room());
      CHECK(plan->cost == blocks / 2 * 8);
    }
  }
}
