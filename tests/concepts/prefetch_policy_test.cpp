// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/callable_object.hpp>
#include <spillway/concepts/prefetch_policy.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/policy/prefetch/reverse_order.hpp>
#include <spillway/policy/prefetch/schedule_lookahead.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <cstdint>

#include <support/archetypes/policy_archetypes.hpp>
#include <support/concept_checks.hpp>

namespace {

using namespace spillway;
using spillway::test::PrefetchArchetype;
using testing::PrefetchRig;
using Visit = detail::CallableObject<bool(BlockId, std::uint64_t)>;
using PlainVisit = bool (*)(BlockId, std::uint64_t);

static_assert(PrefetchPolicy<PrefetchArchetype>);

static_assert(!PrefetchPolicy<spillway::test::NotMovable<NoPrefetch>>);

struct PrefetchVisitsByReference : PrefetchArchetype {
  template <class Visitor>
  void candidates(AccessSchedule const&, Visitor&) const {}
};
static_assert(!PrefetchPolicy<PrefetchVisitsByReference>, "it is called with temporaries");

}  // namespace

TEST_SUITE("prefetch") {
  TEST_CASE("PrefetchPolicy: the concept requires each member") {
    CHECK_NEEDS(PrefetchPolicy, PrefetchArchetype, on_create);
    CHECK_NEEDS(PrefetchPolicy, PrefetchArchetype, on_access);
    CHECK_NEEDS(PrefetchPolicy, PrefetchArchetype, on_destroy);
    CHECK_NEEDS(PrefetchPolicy, PrefetchArchetype, on_step);
    CHECK_NEEDS(PrefetchPolicy, PrefetchArchetype, candidates);
    CHECK_NEEDS(PrefetchPolicy, PrefetchArchetype, max_inflight_bytes);
  }

  TEST_CASE("PrefetchPolicy: members that may throw, or a query that is not const, are refused") {
    CHECK_REFUSES(PrefetchPolicy, NoPrefetch, void on_access(BlockId, Use));
    CHECK_REFUSES(PrefetchPolicy, NoPrefetch, void on_destroy(BlockId));
    CHECK_REFUSES(PrefetchPolicy, NoPrefetch, void on_step());
    CHECK_REFUSES(PrefetchPolicy, NoPrefetch, void candidates(AccessSchedule const&, Visit));
    CHECK_REFUSES(
        PrefetchPolicy, NoPrefetch, void candidates(AccessSchedule const&, PlainVisit) const);
  }

  TEST_CASE_TEMPLATE_INVOKE(prefetch_policy_contract, NoPrefetch, ScheduleLookahead, ReverseOrder);

  TEST_CASE("NoPrefetch: never names a candidate") {
    PrefetchRig<NoPrefetch> rig{4};
    rig.begin();
    rig.use(0);
    rig.begin();
    CHECK(rig.wanted().empty());
    CHECK(rig.policy.max_inflight_bytes() == 0);
  }
}
