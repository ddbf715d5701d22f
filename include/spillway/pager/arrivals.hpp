// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/fence.hpp>
#include <spillway/core/range.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/pager/blocks.hpp>
#include <spillway/schedule/use.hpp>

#include <cstddef>
#include <exception>
#include <vector>

namespace spillway::detail {

/// Brings blocks to the device, one by one or several small ones together.
///
/// Every function is entered with the lock and decides and commits under it; what is enqueued is
/// enqueued with the lock released. While it is, the blocks concerned are busy.
template <PolicySet Policies>
class Arrivals {
 public:
  using State = PagerState<Policies>;
  using Guard = typename State::Guard;
  using Unlocked = typename State::Unlocked;

  explicit Arrivals(State& state) : state_{state} {}

  /// Gives a block the range it was found, and nothing else: there are no bytes, or not needed.
  ///
  /// @throws std::bad_alloc; the range is then back in the arena
  void place(BlockId id, Placement const& placement, Use use) {
    BlockRecord& block = *state_.blocks.find(id);
    try {
      state_.eviction.on_insert(id, block.bytes, use);
    } catch (...) {
      state_.unplace(id, placement, placement.fence);
      throw;
    }
    if (block.has_contents) {
      --state_.swapped_out_blocks;
    }
    state_.on_range_taken(block, placement);
    state_.log(RecordKind::make_resident, id, block.bytes, block.address);
  }

  /// Gives a block the range it was found; its bytes come at the next `carry_in`, with those of the
  /// others that have begun. The caller has the turn and keeps it until then.
  ///
  /// @returns the bytes that are to come
  /// @throws  std::bad_alloc; the range is then back in the arena
  std::size_t begin(BlockId id, Placement const& placement, Use use, bool is_prefetch) {
    BlockRecord& block = *state_.blocks.find(id);
    std::size_t const begun = arrivals_.size();
    try {
      arrivals_.push_back({id, &block, placement, is_prefetch});
      requests_.push_back({.slot = block.host,
                           .device = placement.address,
                           .bytes = block.requested_bytes,
                           .after = placement.fence,
                           .reservation = state_.arena.reservation(placement.range)});
      state_.eviction.on_insert(id, block.bytes, use);
    } catch (...) {
      arrivals_.resize(begun);
      requests_.resize(begun);
      state_.unplace(id, placement, placement.fence);
      throw;
    }
    block.is_busy = true;
    bytes_ += block.bytes;
    return bytes_;
  }

  /// Enqueues the copies of all that have begun. The caller has the turn.
  ///
  /// @throws DeviceError, FileTierError, std::bad_alloc; a block whose copy was not enqueued is then on
  ///         the host as before, and its range back in the arena
  void carry_in(Guard& guard) {
    if (arrivals_.empty()) {
      return;
    }
    std::exception_ptr failure;
    {
      Unlocked const unlocked{guard};
      try {
        state_.streams.swap_in(requests_);
      } catch (...) {
        failure = std::current_exception();
      }
    }
    for (std::size_t i = 0; i < arrivals_.size(); ++i) {
      arrivals_[i].block->is_busy = false;
      if (requests_[i].state == TransferState::enqueued) {
        commit(arrivals_[i], requests_[i].done);
      } else {
        take_back(arrivals_[i]);
      }
    }
    arrivals_.clear();
    requests_.clear();
    bytes_ = 0;
    state_.notify();
    if (failure) {
      std::rethrow_exception(failure);
    }
  }

 private:
  struct Arrival {
    BlockId id{};
    BlockRecord* block = nullptr;
    Placement placement;
    bool is_prefetch = false;
  };

  void commit(Arrival const& arrival, Transfer const& transfer) {
    BlockRecord& block = *arrival.block;
    state_.on_range_taken(block, arrival.placement);
    --state_.swapped_out_blocks;
    block.written = transfer.device_done;
    block.is_arriving = true;
    block.is_unproven = state_.pool.tier(block.host) == HostTier::file;
    state_.stats.swap_ins.add(block.bytes);
    if (arrival.is_prefetch) {
      block.is_prefetched = true;
      state_.prefetched_bytes += block.bytes;
    }
    RecordKind const kind = arrival.is_prefetch ? RecordKind::prefetch : RecordKind::swap_in;
    state_.log(kind, arrival.id, block.bytes, block.address);
  }

  /// Part of the copy may have been enqueued.
  void take_back(Arrival const& arrival) noexcept {
    state_.eviction.on_erase(arrival.id);
    Fence after = arrival.placement.fence;
    after.add(state_.streams.in().mark());
    state_.unplace(arrival.id, arrival.placement, after);
  }

  State& state_;
  // Of what has begun, in the same order. Whoever has the turn has them.
  std::vector<Arrival> arrivals_;
  std::vector<TransferRequest> requests_;
  std::size_t bytes_ = 0;
};

}  // namespace spillway::detail
