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

  TEST_CASE("RecomputeIfCheaper: a block is made again if that takes at most a share of a copy") {
    RecomputeIfCheaper const quarter{0.25};
    CHECK(quarter.prefers_recompute({.copy_ns = 100, .recompute_ns = 25}));
    CHECK_FALSE(quarter.prefers_recompute({.copy_ns = 100, .recompute_ns = 26}));
    RecomputeIfCheaper const none{0};
    CHECK(none.prefers_recompute({.copy_ns = 100, .recompute_ns = 0}));
    CHECK_FALSE(none.prefers_recompute({.copy_ns = 100, .recompute_ns = 1}));
  }

  TEST_CASE("AlwaysRecompute: a block is made again, whatever that takes") {
    CHECK(AlwaysRecompute{}.prefers_recompute({.copy_ns = 0, .recompute_ns = 1e9}));
  }
}
