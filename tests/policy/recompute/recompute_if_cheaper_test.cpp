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

  TEST_CASE("RecomputeIfCheaper: nothing is made again while all copies of a step hide behind a "
            "quarter of its work") {
    RecomputeIfCheaper policy;
    RecomputeCosts const cheap{.copy_ns = 100, .recompute_ns = 1};
    policy.on_step({.link_ns = 24, .work_ns = 100});
    CHECK_FALSE(policy.prefers_recompute(cheap));
    policy.on_step({.link_ns = 25, .work_ns = 100});
    CHECK(policy.prefers_recompute(cheap));
    policy.on_step({.link_ns = 0, .work_ns = 0});  // nothing is known of the work
    CHECK(policy.prefers_recompute(cheap));
  }

  TEST_CASE("AlwaysRecompute: a block is made again, whatever that takes") {
    CHECK(AlwaysRecompute{}.prefers_recompute({.copy_ns = 0, .recompute_ns = 1e9}));
  }
}
