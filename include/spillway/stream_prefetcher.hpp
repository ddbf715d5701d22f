// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/prefetch_policy.hpp>
#include <spillway/core/types.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>

#include <cstddef>
#include <utility>

namespace spillway {

/// Records the order in which blocks are used, and names the blocks to swap in next.
///
/// It combines an `AccessSchedule`, which predicts a step of the program from the step before, with
/// a prefetch policy, which turns the prediction into an order of blocks. The pager owns one
/// prefetcher, tells it of every use, and swaps in the blocks that it names; the prefetcher itself
/// copies nothing and makes no device call.
///
/// Threads  thread-compatible.
template <PrefetchPolicy Policy>
class StreamPrefetcher {
 public:
  static constexpr bool is_thread_safe = false;

  explicit StreamPrefetcher(Policy policy = {}) : policy_{std::move(policy)} {}
  StreamPrefetcher(StreamPrefetcher const&) = delete;
  StreamPrefetcher& operator=(StreamPrefetcher const&) = delete;

  /// Marks the boundary between two steps of a program that repeats.
  void begin_step() noexcept {
    schedule_.begin_step();
    policy_.on_step();
  }

  /// Notes a new block. @throws std::bad_alloc, with nothing noted
  void on_create(BlockId id, std::size_t bytes) {
    policy_.on_create(id);
    try {
      schedule_.on_create(id, bytes);
    } catch (...) {
      policy_.on_destroy(id);
      throw;
    }
  }

  /// Notes how many of a block's bytes the eviction plan need not count as swapped in, since a
  /// codec or a recipe saves them.
  void on_spared(BlockId id, std::uint64_t bytes) noexcept { schedule_.on_spared(id, bytes); }

  /// Notes a use of a block. @returns what the schedule predicts of the block's next use
  Use on_access(BlockId id, Access access) noexcept {
    Use const use = schedule_.on_access(id, access);
    policy_.on_access(id, use);
    return use;
  }

  void on_release(BlockId id) noexcept { schedule_.on_release(id); }

  void on_destroy(BlockId id) noexcept {
    schedule_.on_destroy(id);
    policy_.on_destroy(id);
  }

  /// Calls `visit(id, next_use)` for blocks in the order in which they should become resident,
  /// until it returns false. Names blocks that are already resident, too.
  template <class Visit>
  void candidates(Visit visit) const {
    policy_.candidates(schedule_, std::move(visit));
  }

  /// Returns the most bytes that may be swapped in ahead of need and not yet used.
  [[nodiscard]] std::size_t max_inflight_bytes() const noexcept {
    return policy_.max_inflight_bytes();
  }
  [[nodiscard]] AccessSchedule& schedule() noexcept { return schedule_; }
  [[nodiscard]] AccessSchedule const& schedule() const noexcept { return schedule_; }

 private:
  Policy policy_;
  AccessSchedule schedule_;
};

}  // namespace spillway
