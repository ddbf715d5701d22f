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

static_assert(!FitPolicy<spillway::test::NotMovable<BestFit>>);

struct FitVisitsByReference : FitArchetype {
  template <class Visit>
  void visit_large(RangeTable const&, Visit&) const {}
};
static_assert(!FitPolicy<FitVisitsByReference>, "it is called with temporaries");

}  // namespace

TEST_SUITE("fit") {
  TEST_CASE("FitPolicy: the concept requires each member, as noexcept") {
    CHECK_NEEDS(FitPolicy, FitArchetype, insert);
    CHECK_NEEDS(FitPolicy, FitArchetype, erase);
    CHECK_NEEDS(FitPolicy, FitArchetype, resize);
    CHECK_NEEDS(FitPolicy, FitArchetype, find);
    CHECK_NEEDS(FitPolicy, FitArchetype, largest);
    CHECK_NEEDS(FitPolicy, FitArchetype, visit_large);
    CHECK_REFUSES(FitPolicy, FitArchetype, void insert(RangeTable&, std::uint32_t));  // may throw
    CHECK_REFUSES(FitPolicy,
                  FitArchetype,
                  void visit_large(RangeTable const&, bool (*)(std::uint32_t)) const);
  }

  TEST_CASE_TEMPLATE_INVOKE(fit_policy_contract, BestFit, SegregatedFit);

  TEST_CASE_TEMPLATE(
      "FitPolicy: visit_large visits the largest ranges first", P, BestFit, SegregatedFit) {
    testing::CheckedFit<P> index{10'000};
    for (std::uint32_t size = 1; size <= 100; ++size) {
      index.insert(10 * size);
    }
    auto const nodes = index.large(3);
    REQUIRE(nodes.size() == 3);
    CHECK(index.sizes().at(nodes[0]) == 1000);
    CHECK(index.sizes().at(nodes[1]) == 990);
    CHECK(index.sizes().at(nodes[2]) == 980);
  }
}
