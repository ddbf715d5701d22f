// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/range_table.hpp>
#include <spillway/policy/fit/segregated_fit.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <random>

namespace {

using spillway::Fit;
using spillway::no_node;
using spillway::RangeTable;
using spillway::SegregatedFit;
using spillway::testing::CheckedFit;

/// Free ranges at places that a test chooses.
struct PlacedRanges {
  std::uint32_t insert(std::uint32_t first, std::uint32_t count) {
    if (table.idle_nodes() == 0) {
      table.grow();
    }
    std::uint32_t const node = table.acquire();
    table[node] = {};
    table[node].first = first;
    table[node].count = count;
    policy.insert(table, node);
    ++table.free_ranges;
    return node;
  }
  /// Adds ranges until there are `free_ranges` in all.
  void insert_small(std::size_t free_ranges) {
    for (std::uint32_t first = 1'000'000; table.free_ranges < free_ranges; first += 2) {
      insert(first, 1);
    }
  }
  [[nodiscard]] Fit find(std::uint32_t count) const { return policy.find(table, count); }

  RangeTable table;
  SegregatedFit policy;
};

}  // namespace

TEST_SUITE("fit") {
  TEST_CASE("SegregatedFit: finds no range more than one class larger than one of the next class") {
    std::mt19937_64 random{11};
    for (std::size_t const taken_ranges : {1000U, 100'000U}) {
      CheckedFit<SegregatedFit> index{taken_ranges};
      for (int i = 0; i < 2000; ++i) {
        index.insert(static_cast<std::uint32_t>(1000 + random() % 100'000));
      }
      for (int i = 0; i < 2000; ++i) {
        auto const size = static_cast<std::uint32_t>(1000 + random() % 90'000);
        Fit const fit = index.find(size);
        REQUIRE(fit.node != no_node);
        std::uint32_t const of_next_class = index.best(size + size / 64 + 1);
        CHECK(index.sizes().at(fit.node) <= of_next_class + of_next_class / 64);
      }
    }
  }

  TEST_CASE("SegregatedFit: takes the newest range of its own class if that fits") {
    CheckedFit<SegregatedFit> index{100'000};
    index.insert(10'000);
    std::uint32_t const newest = index.insert(9990);
    std::uint32_t const next_class = index.insert(10'300);

    CHECK(index.find(9990).node == newest);
    CHECK(index.find(9985).node == newest);
    CHECK(index.find(9995).node == next_class);  // though the older one would do
  }

  TEST_CASE("SegregatedFit: with few ranges, an exact fit is always found") {
    for (bool const has_few_free : {false, true}) {
      for (bool const has_few_taken : {false, true}) {
        PlacedRanges ranges;
        std::uint32_t const exact = ranges.insert(5000, 1000);
        std::uint32_t const newest = ranges.insert(9000, 1003);
        ranges.insert_small(has_few_free ? 8 : 9);
        ranges.table.taken_ranges = has_few_taken ? 256 : 257;
        CHECK(ranges.find(1000).node == (has_few_free && has_few_taken ? exact : newest));
      }
    }
  }

  TEST_CASE("SegregatedFit: with few ranges and no exact fit, the lowest or the highest is cut") {
    struct Sizes {
      std::uint32_t low = 0;
      std::uint32_t middle = 0;
      std::uint32_t high = 0;
    };
    auto const find_100 = [](Sizes const& sizes) {
      PlacedRanges ranges;
      ranges.insert(5000, sizes.middle);
      ranges.insert(9000, sizes.high);
      ranges.insert(1000, sizes.low);
      ranges.table.taken_ranges = 4;
      ranges.table.taken_granules = 400;
      Fit const fit = ranges.find(100);
      return Fit{ranges.table[fit.node].first, fit.is_high_end};
    };
    CHECK(find_100({200, 110, 300}) == Fit{1000, false});  // at the low end of the lowest
    CHECK(find_100({300, 110, 200}) == Fit{9000, true});   // at the high end of the highest
    CHECK(find_100({200, 110, 200}) == Fit{9000, true});
    CHECK(find_100({200, 110, 50}) == Fit{1000, false});
    CHECK(find_100({50, 110, 200}) == Fit{9000, true});
    CHECK(find_100({50, 110, 60}) == Fit{5000, false});  // neither fits
    CHECK(find_100({200, 100, 300}) == Fit{5000, false});
  }

  TEST_CASE("SegregatedFit: a block counts as large from twice the mean size on") {
    for (std::size_t const free_ranges : {1U, 9U}) {  // few, and more than that
      PlacedRanges ranges;
      ranges.insert(0, 100'000);
      ranges.insert_small(free_ranges);
      ranges.table.taken_ranges = 10;
      ranges.table.taken_granules = 640;
      CHECK_FALSE(ranges.find(128).is_high_end);
      CHECK(ranges.find(129).is_high_end);
    }
  }

  TEST_CASE("SegregatedFit: puts large blocks at the high end") {
    CheckedFit<SegregatedFit> index{100'000};  // of 64 granules in the mean
    index.insert(100'000);

    CHECK_FALSE(index.find(64).is_high_end);
    CHECK(index.find(1000).is_high_end);
  }
}
