// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/range_table.hpp>
#include <spillway/policy/fit/best_fit.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <cstdint>

namespace {

using spillway::BestFit;
using spillway::Fit;
using spillway::no_node;
using spillway::testing::CheckedFit;

}  // namespace

TEST_SUITE("fit") {
  TEST_CASE("BestFit: finds the smallest range that fits, at its low end") {
    CheckedFit<BestFit> index{100};
    for (std::uint32_t const size : {500U, 100U, 300U, 200U, 400U}) {
      index.insert(size);
    }

    for (std::uint32_t const size : {1U, 100U, 150U, 200U, 399U, 401U}) {
      Fit const fit = index.find(size);
      REQUIRE(fit.node != no_node);
      CHECK(index.sizes().at(fit.node) == index.best(size));
      CHECK_FALSE(fit.is_high_end);
    }
  }
}
