// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/policy/compaction/sliding_compaction.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <cstdint>

#include <support/archetypes/policy_archetypes.hpp>
#include <support/concept_checks.hpp>

namespace {

using namespace spillway;
using spillway::test::CompactionArchetype;

static_assert(CompactionPolicy<CompactionArchetype>);

static_assert(!CompactionPolicy<spillway::test::NotMovable<NoCompaction>>);

struct MovesSometimes : CompactionArchetype {
  inline static bool moves_blocks = true;
};
static_assert(!CompactionPolicy<MovesSometimes>, "it is a constant");

}  // namespace

TEST_SUITE("compaction") {
  TEST_CASE("CompactionPolicy: the concept requires each member") {
    CHECK_NEEDS(CompactionPolicy, CompactionArchetype, plan);
    CHECK_NEEDS(CompactionPolicy, CompactionArchetype, moves_blocks);
    CHECK_REFUSES(CompactionPolicy,
                  NoCompaction,
                  LayoutPlan plan(Layout const&, std::uint32_t, std::uint64_t));
    CHECK_REFUSES(CompactionPolicy, CompactionArchetype, bool moves_blocks = true);
  }

  TEST_CASE_TEMPLATE_INVOKE(compaction_policy_contract, SlidingCompaction, NoCompaction);
}
