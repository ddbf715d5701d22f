// SPDX-License-Identifier: Apache-2.0
#include <spillway/policy/compaction/exchange_search.hpp>
#include <spillway/policy/compaction/layout_line.hpp>
#include <spillway/policy/compaction/sliding_compaction.hpp>
#include <spillway/policy/compaction/window_search.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <utility>

#include <support/layout_oracle.hpp>

namespace {

using spillway::LayoutPlan;
using spillway::SlidingCompaction;
using spillway::detail::ExchangeSearch;
using spillway::detail::LayoutLine;
using spillway::detail::WindowSearch;
using spillway::test::check_plan;
using spillway::test::OwnedLayout;
using spillway::test::random_layout;

constexpr std::uint64_t no_bound = std::numeric_limits<std::uint64_t>::max() / 4;

/// The best plan; all plans that are found are checked.
template <class Search>
std::optional<LayoutPlan>
search(OwnedLayout const& layout, std::uint32_t count, typename Search::Limits const& limits = {}) {
  std::optional<LayoutPlan> best;
  Search{LayoutLine{layout.view()}, limits}.search(count, no_bound, [&](LayoutPlan plan) {
    check_plan(layout.view(), plan, count);
    REQUIRE((!best || plan.cost < best->cost));
    best = std::move(plan);
    return best->cost;
  });
  return best;
}

}  // namespace

TEST_SUITE("exchange_search") {
  TEST_CASE("ExchangeSearch: its plans can be made, and each moves less than the one before") {
    constexpr std::uint64_t seed = 21;
    MESSAGE("seed ", seed);
    std::mt19937_64 random{seed};
    std::size_t found = 0;
    for (int i = 0; i < 600; ++i) {
      CAPTURE(i);
      OwnedLayout const layout = random_layout(random, 1 + random() % 40, 30, 12, 12);
      if (layout.room() != 0) {
        std::uint32_t const count =
            layout.room() - static_cast<std::uint32_t>(random() % 3) % layout.room();
        found += search<ExchangeSearch>(layout, count) ? 1U : 0U;
      }
    }
    CHECK(found > 100);
  }

  TEST_CASE("ExchangeSearch: exchanges two blocks where vacating a window would move nearly all") {
    // gap of 1, 1, 4, 4, 2, gap of 3: the block of 2 goes where the gap and the block of 1 are.
    OwnedLayout const layout{{{1, 1, false}, {2, 4, false}, {6, 4, false}, {10, 2, false}}, 15};
    auto const by_window = search<WindowSearch>(layout, 4);
    auto const by_exchange = search<ExchangeSearch>(layout, 4);
    REQUIRE(by_window);
    REQUIRE(by_exchange);
    CHECK(by_window->cost == 11);
    CHECK(by_exchange->cost == 3);
    CHECK(by_exchange->first == 10);
  }

  TEST_CASE("ExchangeSearch: tries nothing without a look") {
    OwnedLayout const layout{{{1, 1, false}, {2, 4, false}, {6, 4, false}, {10, 2, false}}, 15};
    CHECK_FALSE(search<ExchangeSearch>(layout, 4, {.looks = 0}));
  }
}

TEST_SUITE("sliding_compaction") {
  TEST_CASE("SlidingCompaction: moves hardly more than must be moved, where all that is free is "
            "wanted too") {
    constexpr std::uint64_t seed = 31;
    MESSAGE("seed ", seed);
    std::mt19937_64 random{seed};
    std::uint64_t moved = 0;
    std::uint64_t least = 0;
    std::size_t missed = 0;
    std::size_t layouts = 0;
    for (int i = 0; i < 400; ++i) {
      CAPTURE(i);
      OwnedLayout const layout = random_layout(random, 2 + random() % 3, 3, 3, 6);
      if (layout.room() == 0 || layout.end > 15) {
        continue;
      }
      auto const count = static_cast<std::uint32_t>(1 + random() % layout.room());
      auto const needed = spillway::test::fewest_moved(layout.view(), count);
      SlidingCompaction compaction;
      auto const plan = compaction.plan(layout.view(), count, no_bound);
      REQUIRE((needed.has_value() || !plan));
      layouts += needed ? 1U : 0U;
      if (plan) {
        check_plan(layout.view(), *plan, count);
        REQUIRE(plan->cost >= *needed);
        moved += plan->cost;
        least += *needed;
      } else {
        missed += needed ? 1U : 0U;
      }
    }
    CHECK(layouts > 150);
    CHECK(missed <= layouts / 50);
    CHECK(moved <= least + least / 50);
  }

  TEST_CASE("SlidingCompaction: finds a plan within its budget or none") {
    OwnedLayout const layout{{{1, 1, false}, {2, 4, false}, {6, 4, false}, {10, 2, false}}, 15};
    SlidingCompaction compaction;
    CHECK_FALSE(compaction.plan(layout.view(), 4, 2));
    auto const plan = compaction.plan(layout.view(), 4, 3);
    REQUIRE(plan);
    CHECK(plan->cost == 3);
    CHECK_FALSE(compaction.plan(layout.view(), 5, 100));
  }
}
