// SPDX-License-Identifier: Apache-2.0
#include <spillway/policy/compaction/exchange_search.hpp>
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

using spillway::detail::ExchangeSearch;
using spillway::detail::WindowSearch;
using spillway::test::best_plan;
using spillway::testing::OwnedLayout;
using spillway::testing::random_layout;

}  // namespace

TEST_SUITE("exchange_search") {
  TEST_CASE("ExchangeSearch: its plans are valid, and each moves less than the one before") {
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
        found += best_plan<ExchangeSearch>(layout, count) ? 1U : 0U;
      }
    }
    CHECK(found > 100);
  }

  TEST_CASE("ExchangeSearch: exchanges two blocks where vacating a window would move nearly all") {
    // gap of 1, 1, 4, 4, 2, gap of 3: the block of 2 goes where the gap and the block of 1 are.
    OwnedLayout const layout{{{1, 1, false}, {2, 4, false}, {6, 4, false}, {10, 2, false}}, 15};
    auto const by_window = best_plan<WindowSearch>(layout, 4);
    auto const by_exchange = best_plan<ExchangeSearch>(layout, 4);
    REQUIRE(by_window);
    REQUIRE(by_exchange);
    CHECK(by_window->cost == 11);
    CHECK(by_exchange->cost == 3);
    CHECK(by_exchange->first == 10);
  }

  TEST_CASE("ExchangeSearch: with a budget of no looks it tries nothing") {
    OwnedLayout const layout{{{1, 1, false}, {2, 4, false}, {6, 4, false}, {10, 2, false}}, 15};
    CHECK_FALSE(best_plan<ExchangeSearch>(layout, 4, {.looks = 0}));
  }
}
