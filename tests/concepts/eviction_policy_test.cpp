// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/eviction_policy.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/eviction/ranked_eviction.hpp>
#include <spillway/policy/eviction/schedule_eviction.hpp>
#include <spillway/schedule/access_schedule.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <support/eviction_rig.hpp>

namespace {

using namespace spillway;
using testing::anyone;
using testing::block;
using testing::drain;
using testing::only;

// One struct per requirement that is missing or loosened: the concept must refuse each of them.
struct NoInsert {
  void on_access(BlockId, Use) noexcept;
  void on_erase(BlockId) noexcept;
  template <class I>
  std::optional<BlockId> victim(std::size_t, I) noexcept;
  void on_misprediction() noexcept;
  void on_step(AccessSchedule const&, std::size_t) noexcept;
};
struct NoVictim {
  void on_insert(BlockId, std::size_t, Use);
  void on_access(BlockId, Use) noexcept;
  void on_erase(BlockId) noexcept;
  void on_misprediction() noexcept;
  void on_step(AccessSchedule const&, std::size_t) noexcept;
};
struct ThrowingAccess : LruEviction {
  void on_access(BlockId, Use);
};
struct ThrowingErase : LruEviction {
  void on_erase(BlockId);
};
struct ThrowingVictim : LruEviction {
  template <class I>
  std::optional<BlockId> victim(std::size_t, I);
};
struct VictimMustExist : LruEviction {
  template <class I>
  BlockId victim(std::size_t, I) noexcept;
};
struct ThrowingMisprediction : LruEviction {
  void on_misprediction();
};
struct NoCapacity : LruEviction {
  void on_step(AccessSchedule const&) noexcept;
};
struct NotMovable : LruEviction {
  NotMovable() = default;
  NotMovable(NotMovable const&) = delete;
};
struct NeedsArgument : LruEviction {
  explicit NeedsArgument(int);
};
static_assert(!EvictionPolicy<NoInsert>);
static_assert(!EvictionPolicy<NoVictim>);
static_assert(!EvictionPolicy<ThrowingAccess>);
static_assert(!EvictionPolicy<ThrowingErase>);
static_assert(!EvictionPolicy<ThrowingVictim>);
static_assert(!EvictionPolicy<VictimMustExist>);
static_assert(!EvictionPolicy<ThrowingMisprediction>);
static_assert(!EvictionPolicy<NoCapacity>);
static_assert(!EvictionPolicy<NotMovable>);
static_assert(!EvictionPolicy<NeedsArgument>);

struct NoWord : ScheduleEviction {
  bool is_leaving(BlockId) const;  // not noexcept
};
struct NoReturn : ScheduleEviction {
  bool may_return(AccessSchedule const&, BlockId) const;  // not noexcept
};
static_assert(SpeculativeEvictionPolicy<ScheduleEviction>);
static_assert(!SpeculativeEvictionPolicy<LruEviction>);
static_assert(!SpeculativeEvictionPolicy<NoWord>);
static_assert(!SpeculativeEvictionPolicy<NoReturn>);

}  // namespace

TEST_SUITE("eviction") {
  // What every model of EvictionPolicy owes; a new policy joins by adding its name below.
  TEST_CASE_TEMPLATE_DEFINE("EvictionPolicy: ", P, eviction_policy_contract) {
    P policy;
    SUBCASE("an empty policy names no victim") {
      CHECK(policy.victim(1, anyone) == std::nullopt);
    }

    policy.on_insert(block(1), 64, {});
    policy.on_insert(block(2), 64, {});
    policy.on_insert(block(3), 64, {});

    SUBCASE("every tracked block is named once, and no other") {
      auto victims = drain(policy, anyone);
      std::sort(victims.begin(), victims.end());
      CHECK(victims == std::vector{block(1), block(2), block(3)});
    }
    SUBCASE("a block that cannot leave is not named") {
      CHECK(policy.victim(1, only({block(2)})) == block(2));
      CHECK(policy.victim(1, only({})) == std::nullopt);
    }
    SUBCASE("refusals leave the order as it was") {
      P same;
      for (std::uint32_t i = 1; i <= 3; ++i) {
        same.on_insert(block(i), 64, {});
      }
      CHECK(policy.victim(1, only({block(3)})) == block(3));
      CHECK(policy.victim(1, only({})) == std::nullopt);
      CHECK(drain(policy, anyone) == drain(same, anyone));
    }
    SUBCASE("an erased block is not named") {
      policy.on_erase(block(1));
      policy.on_erase(block(1));  // no effect the second time
      policy.on_access(block(1), {});
      CHECK(drain(policy, anyone).size() == 2);
    }
    SUBCASE("an older block of an index that was reused is another block") {
      policy.on_erase(block(2));
      policy.on_insert(make_block_id(2, 2), 64, {});
      policy.on_erase(block(2));
      policy.on_access(block(2), {});
      CHECK(policy.victim(1, only({block(2)})) == std::nullopt);
      CHECK(policy.victim(1, only({make_block_id(2, 2)})) == make_block_id(2, 2));
    }
    SUBCASE("naming a victim does not forget it") {
      CHECK(policy.victim(1, anyone) == policy.victim(1, anyone));
    }
    SUBCASE("an erased block may come back") {
      policy.on_erase(block(1));
      policy.on_insert(block(1), 64, {});
      CHECK(drain(policy, anyone).size() == 3);
    }
    SUBCASE("with nothing predicted, a step and a misprediction change nothing") {
      P same;
      for (std::uint32_t i = 1; i <= 3; ++i) {
        same.on_insert(block(i), 64, {});
      }
      AccessSchedule schedule;
      policy.on_step(schedule, 1024);
      policy.on_misprediction();
      CHECK(drain(policy, anyone) == drain(same, anyone));
    }
    SUBCASE("moved, it knows the same blocks") {
      P moved{std::move(policy)};
      CHECK(drain(moved, anyone).size() == 3);
    }
  }
  TEST_CASE_TEMPLATE_INVOKE(eviction_policy_contract,
                            LruEviction,
                            FifoEviction,
                            SizeEviction,
                            CostEviction,
                            ScheduleEviction);
}
