// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/prefetch_policy.hpp>
#include <spillway/core/block_list.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/types.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace spillway {

/// Prefetches blocks in the reverse order of their first use in the step. A backward pass uses them
/// in this order, so no record of the step before is needed.
///
/// It starts when blocks whose first use is not recent are used again in reverse order: each was
/// first used before the block that was used last. It pauses when a use goes in the other
/// direction. A program whose weights live on from step to step must mark its steps.
template <class = detail::Lazily>
class BasicReverseOrder {
 public:
  using ReverseOrder = BasicReverseOrder;  // what a derived class calls its base

  BasicReverseOrder() = default;
  explicit BasicReverseOrder(PrefetchOptions options) noexcept : options_{options} {}

  void on_create(BlockId id) {
    by_first_use_.reserve(id);
    if (index_of_block(id) >= rank_.size()) {
      rank_.resize(std::size_t{index_of_block(id)} + 1);
    }
  }

  void on_access(BlockId id, Use /*use*/) noexcept {
    if (!by_first_use_.contains(id)) {
      by_first_use_.push_back(id);
      rank_[index_of_block(id)] = ++count_;
      return;
    }
    std::uint64_t const rank = rank_[index_of_block(id)];
    if (count_ - rank < recent) {
      return;  // recent blocks prove nothing: any program uses the result of its last operation
    }
    if (reached_rank_ == 0 || rank > reached_rank_ + recent) {
      reach(id, rank, 0);
    } else if (rank < reached_rank_) {
      reach(id, rank, descents_ + 1);
    }
  }

  void on_destroy(BlockId id) noexcept {
    if (!by_first_use_.contains(id)) {
      return;
    }
    if (next_ == id) {
      next_ = by_first_use_.before(id);
    }
    by_first_use_.erase(id);
  }

  void on_step() noexcept {
    by_first_use_.clear();
    next_ = BlockId{};
    reached_rank_ = 0;
    count_ = 0;
    descents_ = 0;
  }

  template <class Visit>
  void candidates(AccessSchedule const& schedule, Visit visit) const {
    if (descents_ < proof) {
      return;
    }
    BlockId id = next_;
    for (std::size_t i = 0; i < options_.lookahead_ops && id != BlockId{}; ++i) {
      if (!visit(id, schedule.position() + i)) {
        return;
      }
      id = by_first_use_.before(id);
    }
  }

  [[nodiscard]] std::size_t max_inflight_bytes() const noexcept {
    return options_.max_inflight_bytes;
  }

 private:
  static constexpr std::uint64_t recent = 8;  // a block among the last so many first uses is recent
  static constexpr std::uint64_t proof = 2;   // descents that show that the pass is a backward one

  void reach(BlockId id, std::uint64_t rank, std::uint64_t descents) noexcept {
    next_ = by_first_use_.before(id);
    reached_rank_ = rank;
    descents_ = descents;
  }

  PrefetchOptions options_{.lookahead_ops = 64};  // it looks at each of them each time
  detail::BlockList by_first_use_;
  std::vector<std::uint64_t> rank_;  // by block index: its place among the first uses of the step
  std::uint64_t count_ = 0;          // blocks used in the step
  std::uint64_t reached_rank_ = 0;   // rank of the earliest block that was reached; 0: none
  BlockId next_{};                   // the block before that one
  std::uint64_t descents_ = 0;       // uses in a row, each of a block before that of the last
};

using ReverseOrder = BasicReverseOrder<>;

SPILLWAY_CHECK_MODEL(PrefetchPolicy<ReverseOrder>);

SPILLWAY_COMPILED_PART(class BasicReverseOrder<>);

}  // namespace spillway
