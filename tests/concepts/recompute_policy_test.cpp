// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/recompute_policy.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/policy/recompute/recompute_if_cheaper.hpp>
#include <spillway/policy/recompute/tuned_recompute.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <support/archetypes/policy_archetypes.hpp>
#include <support/concept_checks.hpp>

namespace {

using namespace spillway;
using spillway::test::RecomputeArchetype;

static_assert(RecomputePolicy<RecomputeArchetype>);

static_assert(!RecomputePolicy<spillway::test::NotMovable<NoRecompute>>);

}  // namespace

TEST_SUITE("recompute_policy") {
  TEST_CASE("RecomputePolicy: the concept requires each member") {
    CHECK_NEEDS(RecomputePolicy, RecomputeArchetype, on_step);
    CHECK_NEEDS(RecomputePolicy, RecomputeArchetype, prefers_recompute);
    CHECK_NEEDS(RecomputePolicy, RecomputeArchetype, plan_share);
    CHECK_NEEDS(RecomputePolicy, RecomputeArchetype, wants_recipes);
  }

  TEST_CASE("RecomputePolicy: members that may throw, or a query that is not const, are refused") {
    CHECK_REFUSES(RecomputePolicy, NoRecompute, void on_step(double, std::size_t));
    CHECK_REFUSES(RecomputePolicy, NoRecompute, bool prefers_recompute(RecomputeCosts) const);
    CHECK_REFUSES(RecomputePolicy, NoRecompute, bool prefers_recompute(RecomputeCosts) noexcept);
    CHECK_REFUSES(RecomputePolicy, NoRecompute, double plan_share(RecomputeCosts) const);
    CHECK_REFUSES(RecomputePolicy, NoRecompute, float plan_share(RecomputeCosts) const noexcept);
    CHECK_REFUSES(RecomputePolicy, NoRecompute, bool wants_recipes() const);
  }

  TEST_CASE_TEMPLATE_INVOKE(recompute_policy_contract,
                            NoRecompute,
                            RecomputeIfCheaper,
                            TunedRecompute,
                            AlwaysRecompute,
                            RecomputeArchetype);

  TEST_CASE("NoRecompute: always prefers a copy, whatever it costs") {
    CHECK_FALSE(NoRecompute{}.prefers_recompute({.copy_ns = 1e9, .recompute_ns = 0}));
  }
}
