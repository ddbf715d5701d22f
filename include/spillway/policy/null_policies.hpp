// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/concepts/observer.hpp>
#include <spillway/concepts/policy_set.hpp>
#include <spillway/concepts/prefetch_policy.hpp>
#include <spillway/concepts/recompute_policy.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/record.hpp>
#include <spillway/core/types.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace spillway {

/// A lock that does nothing, for allocators that only one thread uses.
class NullLock {
 public:
  void lock() noexcept {}
  void unlock() noexcept {}
  [[nodiscard]] bool try_lock() noexcept { return true; }
};

/// An observer that is told nothing and costs nothing.
class NullObserver {
 public:
  static constexpr bool is_enabled = false;

  void on_record(Record const& /*record*/) noexcept {}
};

/// A compaction policy that moves nothing.
struct NoCompaction {
  static constexpr bool is_thread_safe = true;
  static constexpr bool moves_blocks = false;

  [[nodiscard]] std::optional<LayoutPlan>
  plan(Layout const& /*layout*/, std::uint32_t /*count*/, std::uint64_t /*budget*/) const noexcept {
    return std::nullopt;
  }
};

/// A prefetch policy that brings nothing in ahead of need.
class NoPrefetch {
 public:
  void on_create(BlockId /*id*/) {}
  void on_access(BlockId /*id*/, Use /*use*/) noexcept {}
  void on_destroy(BlockId /*id*/) noexcept {}
  void on_step() noexcept {}

  template <class Visit>
  void candidates(AccessSchedule const& /*schedule*/, Visit /*visit*/) const {}

  [[nodiscard]] std::size_t max_inflight_bytes() const noexcept { return 0; }
};

/// A recompute policy that always prefers copies. Recipes are used only if no copy can be kept.
struct NoRecompute {
  void on_step(double /*step_ns*/, std::size_t /*bytes*/) noexcept {}
  [[nodiscard]] bool prefers_recompute(RecomputeCosts /*costs*/) const noexcept { return false; }
  [[nodiscard]] double plan_share(RecomputeCosts /*costs*/) const noexcept { return 1; }
  [[nodiscard]] bool wants_recipes() const noexcept { return false; }
};

SPILLWAY_CHECK_MODEL(LockPolicy<NullLock>);
SPILLWAY_CHECK_MODEL(Observer<NullObserver>);
SPILLWAY_CHECK_MODEL(CompactionPolicy<NoCompaction>);
SPILLWAY_CHECK_MODEL(PrefetchPolicy<NoPrefetch>);
SPILLWAY_CHECK_MODEL(RecomputePolicy<NoRecompute>);

}  // namespace spillway
