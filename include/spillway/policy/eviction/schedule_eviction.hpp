// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/eviction_policy.hpp>
#include <spillway/core/block_heap.hpp>
#include <spillway/core/block_list.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/types.hpp>
#include <spillway/policy/eviction/step_plan.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <vector>

namespace spillway {

/// The default eviction policy: evicts by a plan that is made from the recorded step.
///
/// At the start of a step that the schedule predicts, `StepPlan` decides which blocks are away
/// between which two uses so that the rest fits, and victims are taken from that plan. Where the
/// plan leaves too little room (fragmentation, blocks that the record does not know), the victim is
/// one of the blocks with the farthest next uses, preferably the smallest that suffices. While
/// nothing is predicted, the policy is LRU.
///
/// Cost  `on_access` O(1); `victim` O(1) amortised while it follows the plan, else O(log n);
///       `on_step` O(n log n) for a step of n uses, O(resident blocks) when predictions resume
///       within a step.
template <class = detail::Lazily>
class BasicScheduleEviction {
 public:
  using ScheduleEviction = BasicScheduleEviction;  // what a derived class calls its base

  BasicScheduleEviction() noexcept : BasicScheduleEviction{detail::PlanOptions{}} {}
  explicit BasicScheduleEviction(detail::PlanOptions options) noexcept : plan_{options} {}

  void on_insert(BlockId id, std::size_t bytes, Use use) {
    std::uint32_t const index = index_of_block(id);
    if (index >= tracked_.size()) {
      tracked_.resize(std::size_t{index} + 1);
    }
    for (detail::BlockList* order : {&by_use_, &leaving_, &free_to_leave_, &to_offer_}) {
      order->reserve(id);
    }
    by_distance_.reserve(id, blocks_);
    on_erase(id);
    ++blocks_;
    by_use_.push_back(id);
    tracked_[index] = Tracked{.bytes = bytes};
    note(index, use);
  }

  void on_access(BlockId id, Use use) noexcept {
    if (by_use_.contains(id)) {
      by_use_.move_to_back(id);
      note(index_of_block(id), use);
    }
  }

  void on_erase(BlockId id) noexcept {
    if (by_use_.contains(id)) {
      --blocks_;
      by_use_.erase(id);
      forget_plan(id);
      by_distance_.erase(id);
    }
  }

  void on_misprediction() noexcept {
    is_predicting_ = false;
    leaving_.clear();
    free_to_leave_.clear();
    to_offer_.clear();
    by_distance_.clear();
    sorted_ = 0;
    ranked_ = 0;
  }

  void on_step(AccessSchedule const& schedule, std::size_t capacity_bytes) noexcept {
    on_misprediction();
    if (!schedule.is_predicting()) {
      return;
    }
    is_predicting_ = true;
    length_ = schedule.record().length();
    base_ = schedule.position() - schedule.cursor();
    std::size_t unknown_bytes = 0;
    for (BlockId id = by_use_.front(); id != BlockId{}; id = by_use_.after(id)) {
      Tracked& block = tracked_[index_of_block(id)];
      block.entry = schedule.use_of(id).entry;
      unknown_bytes += block.entry == unknown_entry ? block.bytes : 0;
    }
    if (planned_step_ == schedule.steps() && planned_bytes_ == capacity_bytes) {
      return;  // predictions have resumed within the step: its plan still holds
    }
    planned_step_ = schedule.steps();
    planned_bytes_ = capacity_bytes;
    for (BlockId id = by_use_.front(); id != BlockId{}; id = by_use_.after(id)) {
      tracked_[index_of_block(id)].is_back = false;
    }
    try {
      (void)plan_.make(schedule, capacity_bytes, unknown_bytes, [this](BlockId id) noexcept {
        return by_use_.contains(id);
      });
    } catch (std::bad_alloc const&) {
      plan_.clear();  // victims are then chosen by the distance of their next use alone
    }
  }

  template <class Inspect>
  [[nodiscard]] std::optional<BlockId> victim(std::size_t short_bytes, Inspect inspect) noexcept {
    if (!is_predicting_) {
      return by_use_.find_first([&](BlockId id) { return inspect(id).has_value(); });
    }
    auto const id = leaving_victim(inspect);
    return id ? id : far_victim(short_bytes, inspect);
  }

  template <class Inspect>
  [[nodiscard]] std::optional<BlockId> leaving_victim(Inspect inspect) noexcept {
    if (!is_predicting_) {
      return std::nullopt;
    }
    auto const can_leave = [&](BlockId id) { return inspect(id).has_value(); };
    sort_by_plan();
    // Blocks that need no copy come first: the room of a block that is copied out is free only
    // after all copies that were enqueued before it.
    auto const id = free_to_leave_.find_first(can_leave);
    return id ? id : leaving_.find_first(can_leave);
  }

  [[nodiscard]] bool may_return(AccessSchedule const& schedule, BlockId id) const noexcept {
    return !is_predicting_ || plan_.returns_at(schedule.use_of(id).entry) <=
                                  schedule.cursor() + detail::StepPlan::next_ops;
  }

  /// Names each block that will leave by the plan and is not clean, once. Clean blocks are noted as
  /// such instead, so that from then on they leave before all others.
  template <class Inspect>
  [[nodiscard]] std::optional<BlockId> early_victim(Inspect inspect) noexcept {
    if (!is_predicting_) {
      return std::nullopt;
    }
    sort_by_plan();
    std::size_t tries = most_refusals;
    for (BlockId id = to_offer_.front(); id != BlockId{} && tries != 0; --tries) {
      BlockId const next = to_offer_.after(id);
      std::optional<EvictionCandidate> const block = inspect(id);
      if (!block) {
        to_offer_.move_to_back(id);  // it is leased now
      } else {
        to_offer_.erase(id);
        if (!block->is_clean) {
          return id;
        }
        leaving_.erase(id);
        free_to_leave_.push_back(id);
      }
      id = next;
    }
    return std::nullopt;
  }

 private:
  static constexpr std::size_t most_refusals = 4;
  static constexpr std::size_t most_candidates = 32;

  struct Tracked {
    std::size_t bytes = 0;
    std::uint64_t noted = 0;              // number of its last note; see `notes_`
    std::uint64_t now = 0;                // position of its last use
    std::uint32_t entry = unknown_entry;  // of its next use
    bool is_back = false;  // it came back ahead of that entry and must not be evicted again
  };

  /// Ranks the farthest next use first.
  struct Distance {
    std::uint64_t entry;
    [[nodiscard]] bool is_before(Distance other) const noexcept { return entry > other.entry; }
  };

  void note(std::uint32_t index, Use use) noexcept {
    Tracked& block = tracked_[index];
    block.noted = ++notes_;
    block.now = use.now;
    block.entry = use.entry;
    block.is_back = use.is_ahead;
  }

  void forget_plan(BlockId id) noexcept {
    leaving_.erase(id);
    free_to_leave_.erase(id);
    to_offer_.erase(id);
  }

  /// The first block in the order of use whose last note is later than `since`.
  [[nodiscard]] BlockId first_used_after(std::uint64_t since) const noexcept {
    BlockId first{};
    for (BlockId id = by_use_.back(); id != BlockId{} && tracked_[index_of_block(id)].noted > since;
         id = by_use_.before(id)) {
      first = id;
    }
    return first;
  }

  /// Sorts the blocks that were used since the last call into those that leave by the plan and
  /// those that stay. Done only when room is needed, to keep `on_access` short.
  void sort_by_plan() noexcept {
    for (BlockId id = first_used_after(sorted_); id != BlockId{}; id = by_use_.after(id)) {
      forget_plan(id);
      std::uint32_t const entry = tracked_[index_of_block(id)].entry;
      if (plan_.must_leave(entry) && !tracked_[index_of_block(id)].is_back) {
        leaving_.push_back(id);
        to_offer_.push_back(id);
      } else if (plan_.leaves_for_nothing(entry)) {
        free_to_leave_.push_back(id);
      }
    }
    sorted_ = notes_;
  }

  /// Ranks the blocks that were used since the last call by the distance of their next use.
  void rank_by_distance() noexcept {
    for (BlockId id = first_used_after(ranked_); id != BlockId{}; id = by_use_.after(id)) {
      Tracked const& block = tracked_[index_of_block(id)];
      // A block that the record does not know is assumed to be used once a step.
      Distance const distance{block.entry == unknown_entry ? block.now - base_ + length_
                                                           : std::uint64_t{block.entry}};
      if (by_distance_.contains(id)) {
        by_distance_.update(id, distance);
      } else {
        by_distance_.insert_reserved(id, distance);
      }
    }
    ranked_ = notes_;
  }

  /// Chooses among the blocks with the farthest next uses: the smallest that suffices, else the one
  /// whose next use is farthest.
  template <class Inspect>
  std::optional<BlockId> far_victim(std::size_t short_bytes, Inspect& inspect) noexcept {
    rank_by_distance();
    std::optional<BlockId> farthest;
    std::optional<BlockId> best;
    EvictionCandidate best_block;
    std::size_t candidates = std::clamp<std::size_t>(blocks_ / 4, 1, most_candidates);
    (void)by_distance_.best([&](BlockId id, Distance&) noexcept {
      std::optional<EvictionCandidate> const block = inspect(id);
      if (!block) {
        return detail::Verdict::skip;
      }
      if (!farthest) {
        farthest = id;
      }
      bool const is_smaller =
          block->bytes < best_block.bytes ||
          (block->bytes == best_block.bytes && block->is_clean && !best_block.is_clean);
      if (block->bytes >= short_bytes && (!best || is_smaller)) {
        best = id;
        best_block = *block;
      }
      return --candidates == 0 ? detail::Verdict::take : detail::Verdict::skip;
    });
    return best ? best : farthest;
  }

  std::vector<Tracked> tracked_;
  std::size_t blocks_ = 0;
  std::uint64_t notes_ = 0;          // uses and returns of blocks so far
  detail::BlockList by_use_;         // all blocks, the least recently used first
  detail::BlockList leaving_;        // blocks that the plan sends out before their next use
  detail::BlockList free_to_leave_;  // blocks that need no copy to leave, or need not come back
  detail::BlockList to_offer_;       // blocks of `leaving_` that `early_victim` has not named
  detail::BlockHeap<Distance> by_distance_;
  std::uint64_t sorted_ = 0;  // the last note that the lists of the plan take account of
  std::uint64_t ranked_ = 0;  // the last note that by_distance_ takes account of
  detail::StepPlan plan_;
  std::uint64_t planned_step_ = 0;
  std::size_t planned_bytes_ = 0;
  std::uint64_t base_ = 0;    // position of the record's first entry
  std::uint64_t length_ = 0;  // entries in the record
  bool is_predicting_ = false;
};

using ScheduleEviction = BasicScheduleEviction<>;

SPILLWAY_CHECK_MODEL(SpeculativeEvictionPolicy<ScheduleEviction>);

SPILLWAY_COMPILED_PART(class BasicScheduleEviction<>);

}  // namespace spillway
