// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/callable_object.hpp>
#include <spillway/concepts/eviction_policy.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/eviction/ranked_eviction.hpp>
#include <spillway/policy/eviction/schedule_eviction.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <optional>

#include <support/archetypes/policy_archetypes.hpp>
#include <support/concept_checks.hpp>

namespace {

using namespace spillway;
using spillway::test::EvictionArchetype;
using spillway::test::NotMovable;
using spillway::test::SpeculativeEvictionArchetype;
using Inspect = detail::CallableObject<std::optional<EvictionCandidate>(BlockId) noexcept>;
using PlainInspect = std::optional<EvictionCandidate> (*)(BlockId) noexcept;

static_assert(EvictionPolicy<EvictionArchetype>);
static_assert(SpeculativeEvictionPolicy<SpeculativeEvictionArchetype>);
static_assert(SpeculativeEvictionPolicy<ScheduleEviction>);
static_assert(!SpeculativeEvictionPolicy<EvictionArchetype>);
static_assert(!SpeculativeEvictionPolicy<LruEviction>);

struct NeedsArgument : LruEviction {
  explicit NeedsArgument(int);
};
struct VictimByReference : EvictionArchetype {
  template <class Inspector>
  std::optional<BlockId> victim(std::size_t, Inspector&) noexcept {
    return std::nullopt;
  }
};
struct EarlyVictimByReference : SpeculativeEvictionArchetype {
  template <class Inspector>
  std::optional<BlockId> early_victim(Inspector&) noexcept {
    return std::nullopt;
  }
};
static_assert(!EvictionPolicy<VictimByReference>, "it is called with temporaries");
static_assert(EvictionPolicy<EarlyVictimByReference> &&
              !SpeculativeEvictionPolicy<EarlyVictimByReference>);
static_assert(!EvictionPolicy<NotMovable<LruEviction>> && !EvictionPolicy<NeedsArgument>);

}  // namespace

TEST_SUITE("eviction") {
  TEST_CASE("EvictionPolicy: the concept requires each member") {
    CHECK_NEEDS(EvictionPolicy, EvictionArchetype, on_insert);
    CHECK_NEEDS(EvictionPolicy, EvictionArchetype, on_access);
    CHECK_NEEDS(EvictionPolicy, EvictionArchetype, on_erase);
    CHECK_NEEDS(EvictionPolicy, EvictionArchetype, victim);
    CHECK_NEEDS(EvictionPolicy, EvictionArchetype, on_misprediction);
    CHECK_NEEDS(EvictionPolicy, EvictionArchetype, on_step);
    CHECK_NEEDS(SpeculativeEvictionPolicy, SpeculativeEvictionArchetype, victim);
    CHECK_NEEDS(SpeculativeEvictionPolicy, SpeculativeEvictionArchetype, early_victim);
    CHECK_NEEDS(SpeculativeEvictionPolicy, SpeculativeEvictionArchetype, leaving_victim);
    CHECK_NEEDS(SpeculativeEvictionPolicy, SpeculativeEvictionArchetype, may_return);
  }

  TEST_CASE("EvictionPolicy: members that lack noexcept, const or an optional result are refused") {
    CHECK_REFUSES(EvictionPolicy, LruEviction, void on_access(BlockId, Use));
    CHECK_REFUSES(EvictionPolicy, LruEviction, void on_erase(BlockId));
    CHECK_REFUSES(EvictionPolicy, LruEviction, std::optional<BlockId> victim(std::size_t, Inspect));
    CHECK_REFUSES(EvictionPolicy, LruEviction, BlockId victim(std::size_t, Inspect) noexcept);
    CHECK_REFUSES(EvictionPolicy,
                  LruEviction,
                  std::optional<BlockId> victim(std::size_t, PlainInspect) noexcept);
    CHECK_REFUSES(EvictionPolicy, LruEviction, void on_misprediction());
    CHECK_REFUSES(EvictionPolicy, LruEviction, void on_step(AccessSchedule const&) noexcept);
    CHECK_REFUSES(SpeculativeEvictionPolicy,
                  ScheduleEviction,
                  std::optional<BlockId> leaving_victim(Inspect));
    CHECK_REFUSES(
        SpeculativeEvictionPolicy, ScheduleEviction, BlockId leaving_victim(Inspect) noexcept);
    CHECK_REFUSES(SpeculativeEvictionPolicy,
                  ScheduleEviction,
                  bool may_return(AccessSchedule const&, BlockId) const);
  }

  TEST_CASE_TEMPLATE_INVOKE(eviction_policy_contract,
                            LruEviction,
                            FifoEviction,
                            SizeEviction,
                            CostEviction,
                            ScheduleEviction,
                            EvictionArchetype);
}
