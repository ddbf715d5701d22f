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
using spillway::SegregatedFit;
using spillway::testing::CheckedFit;

}  // namespace

TEST_SUITE("fit") {
  TEST_CASE(
      "SegregatedFit: names no range that is more than a class larger than one of the next class") {
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

  TEST_CASE("SegregatedFit: takes the newest range of the own class if it fits") {
    CheckedFit<SegregatedFit> index{100'000};
    index.insert(10'000);
    std::uint32_t const newest = index.insert(9990);
    std::uint32_t const next_class = index.insert(10'300);

    CHECK(index.find(9990).node == newest);
    CHECK(index.find(9985).node == newest);
    CHECK(index.find(9995).node == next_class);  // though the older one would do
  }

  TEST_CASE("SegregatedFit: puts large blocks at the high end") {
    CheckedFit<SegregatedFit> index{100'000};  // of 64 granules in the mean
    index.insert(100'000);

    CHECK_FALSE(index.find(64).is_high_end);
    CHECK(index.find(1000).is_high_end);
  }
}
