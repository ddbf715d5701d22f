// SPDX-License-Identifier: Apache-2.0
#include <spillway/policy/compaction/layout_line.hpp>
#include <spillway/policy/compaction/window_search.hpp>

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

using spillway::LayoutPlan;
using spillway::detail::LayoutLine;
using spillway::detail::WindowSearch;
using spillway::testing::check_plan;
using spillway::testing::OwnedLayout;
using spillway::testing::random_layout;

/// The best plan; all plans that are found are checked.
std::optional<LayoutPlan> search(OwnedLayout const& layout,
                                 std::uint32_t count,
                                 WindowSearch::Limits const& limits = {},
                                 std::uint64_t bound = spillway::test::no_bound) {
  return spillway::test::best_plan<WindowSearch>(layout, count, limits, bound);
}

}  // namespace

TEST_SUITE("window_search") {
  TEST_CASE("WindowSearch: its plans are valid, and each moves less than the one before") {
    constexpr std::uint64_t seed = 11;
    MESSAGE("seed ", seed);
    std::mt19937_64 random{seed};
    std::size_t found = 0;
    for (int i = 0; i < 1500; ++i) {
      CAPTURE(i);
      OwnedLayout const layout = random_layout(random, 1 + random() % 40, 60, 20, 12);
      if (layout.room() != 0) {
        found += search(layout, static_cast<std::uint32_t>(1 + random() % layout.room())) ? 1U : 0U;
      }
    }
    CHECK(found > 700);
  }

  TEST_CASE("WindowSearch: never moves less than the minimum, and seldom more") {
    auto const result = spillway::test::compare_with_least(
        12, 3, [](OwnedLayout const& layout, std::uint32_t count) {
          return search(layout, count);
        });
    CHECK(result.least > 100);
    CHECK(result.moved <= result.least + result.least / 10);
  }

  TEST_CASE("WindowSearch: a block that leaves the window for a gap does not move other blocks") {
    // 4, gap of 2, 3, gap of 2, 9, gap of 3
    OwnedLayout const layout{{{0, 4, false}, {6, 3, false}, {11, 9, false}}, 23};
    auto const plan = search(layout, 7);
    REQUIRE(plan);
    CHECK(plan->cost == 3);
    CHECK(plan->moves == std::vector{spillway::LayoutMove{1, 20}});
    CHECK(plan->first == 4);
  }

  TEST_CASE("WindowSearch: for a block that fits no gap, a gap is made") {
    // Block 1 has to leave between two fixed ones; block 3 slides, so that two gaps of 2 hold it.
    OwnedLayout const layout{
        {{0, 1, true}, {3, 4, false}, {7, 1, true}, {10, 1, false}, {13, 1, true}}, 14};
    auto const plan = search(layout, 6);
    REQUIRE(plan);
    CHECK(plan->cost == 5);
  }

  TEST_CASE("WindowSearch: finds nothing if no plan meets the bound, or without looks") {
    OwnedLayout const layout{{{0, 4, false}, {6, 3, false}, {11, 9, false}}, 23};
    CHECK_FALSE(search(layout, 7, {}, 3));
    CHECK(search(layout, 7, {}, 4));
    CHECK_FALSE(search(layout, 7, {.tries = 0}));
  }
}
