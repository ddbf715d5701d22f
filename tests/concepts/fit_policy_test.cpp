// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/fit_policy.hpp>
#include <spillway/policy/fit/best_fit.hpp>
#include <spillway/policy/fit/segregated_fit.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <cstdint>

#include <support/archetypes/policy_archetypes.hpp>
#include <support/concept_checks.hpp>

namespace {

using namespace spillway;
using spillway::test::FitArchetype;

static_assert(FitPolicy<FitArchetype>);

struct NotMovable : BestFit {
  NotMovable() = default;
  NotMovable(NotMovable const&) = delete;
};
static_assert(!FitPolicy<NotMovable>);

}  // namespace

TEST_SUITE("fit") {
  TEST_CASE("FitPolicy: each member is asked for, and may not throw") {
    CHECK_NEEDS(FitPolicy, FitArchetype, insert);
    CHECK_NEEDS(FitPolicy, FitArchetype, erase);
    CHECK_NEEDS(FitPolicy, FitArchetype, resize);
    CHECK_NEEDS(FitPolicy, FitArchetype, find);
    CHECK_NEEDS(FitPolicy, FitArchetype, largest);
    CHECK_NEEDS(FitPolicy, FitArchetype, visit_large);
    CHECK_REFUSES(FitPolicy, FitArchetype, void insert(RangeTable&, std::uint32_t));  // may throw
  }

  TEST_CASE_TEMPLATE_INVOKE(fit_policy_contract, BestFit, SegregatedFit);
}
