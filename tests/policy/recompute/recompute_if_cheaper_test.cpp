// SPDX-License-Identifier: Apache-2.0
#include <spillway/policy/recompute/recompute_if_cheaper.hpp>

#include <doctest/doctest.h>

using namespace spillway;

TEST_SUITE("recompute_if_cheaper") {
  TEST_CASE("RecomputeIfCheaper: a block is made again if that takes at most as long as one copy") {
    RecomputeIfCheaper const policy;
    CHECK(policy.prefers_recompute({.copy_ns = 100, .recompute_ns = 0}));
    CHECK(policy.prefers_recompute({.copy_ns = 100, .recompute_ns = 100}));
    CHECK_FALSE(policy.prefers_recompute({.copy_ns = 100, .recompute_ns = 101}));
  }

  TEST_CASE(
      "RecomputeIfCheaper: a block is made again if that takes at most a given part of a copy") {
    RecomputeIfCheaper const quarter{0.25};
    CHECK(quarter.prefers_recompute({.copy_ns = 100, .recompute_ns = 25}));
    CHECK_FALSE(quarter.prefers_recompute({.copy_ns = 100, .recompute_ns = 26}));
    RecomputeIfCheaper const none{0};
    CHECK(none.prefers_recompute({.copy_ns = 100, .recompute_ns = 0}));
    CHECK_FALSE(none.prefers_recompute({.copy_ns = 100, .recompute_ns = 1}));
  }

  TEST_CASE("RecomputeIfCheaper: plans count the cost of recipes if the option says so") {
    RecomputeIfCheaper const quarter{0.25, true};
    CHECK(quarter.plan_share({.copy_ns = 100, .recompute_ns = 0}) == 0);
    CHECK(quarter.plan_share({.copy_ns = 100, .recompute_ns = 5}) == doctest::Approx(0.2));
    CHECK(quarter.plan_share({.copy_ns = 100, .recompute_ns = 25}) == 1);
    CHECK(quarter.plan_share({.copy_ns = 100, .recompute_ns = 50}) == 1);
    CHECK(RecomputeIfCheaper{0, true}.plan_share({.copy_ns = 100, .recompute_ns = 0}) == 1);
    CHECK(RecomputeIfCheaper{1}.plan_share({.copy_ns = 100, .recompute_ns = 0}) == 1);
  }

  TEST_CASE("AlwaysRecompute: a block is made again at any cost") {
    CHECK(AlwaysRecompute{}.prefers_recompute({.copy_ns = 0, .recompute_ns = 1e9}));
  }
}
