// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/arena/move_plan.hpp>
#include <spillway/core/range.hpp>
#include <spillway/pager/blocks.hpp>
#include <spillway/schedule/use.hpp>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace spillway::detail {

/// Carries blocks from the device to the host pool, and from place to place inside the device.
///
/// Every function is entered with the lock and, where it says so, the turn. It decides under the
/// lock, marks the blocks concerned as busy, enqueues with the lock released, and commits under it.
/// When the device refuses, the blocks that were not carried yet are as they were.
template <PolicySet Policies>
class Transfers {
 public:
  using State = PagerState<Policies>;
  using Guard = typename State::Guard;
  using Unlocked = typename State::Unlocked;
  using Leaves = typename State::Leaves;

  static constexpr unsigned char poison_byte = 0xD5;

  explicit Transfers(State& state) : state_{state} {}

  /// Makes the blocks leave the device: dropped if clean, else copied to the host pool.
  ///
  /// Blocks for which the host pool has no room stay. The caller has the turn and has told the
  /// eviction policy to forget the blocks; those that stay are made known to it again.
  ///
  /// @returns the bytes of device ranges given up
  /// @throws DeviceError, FileTierError once what could be committed is committed
  std::size_t send_out(Guard& guard, std::vector<BlockId> const& victims, EvictionReason reason) {
    std::vector<Departure> departures;
    departures.reserve(victims.size());
    for (BlockId const id : victims) {
      BlockRecord& block = *state_.blocks.find(id);
      block.is_busy = true;
      departures.push_back(
          {.id = id, .block = &block, .after = block.last_uses(), .needs_copy = !block.is_clean()});
    }
    line_up(departures);
    std::vector<TransferRequest> requests;
    std::exception_ptr failure;
    try {
      requests.reserve(departures.size());
      for (Departure& departure : departures) {
        departure.may_leave = !departure.needs_copy || has_host_slot(guard, *departure.block);
        if (departure.may_leave && departure.needs_copy) {
          requests.push_back(request_for(*departure.block, departure.after));
        }
      }
      Unlocked const unlocked{guard};
      state_.streams.swap_out(requests);
      for (Departure& departure : departures) {
        if (departure.may_leave) {
          if constexpr (State::vacates) {
            vacate(departure);
          } else if (state_.options.poison_vacated) {
            poison(departure);
          }
        }
      }
    } catch (...) {
      failure = std::current_exception();
    }
    std::size_t freed = 0;
    auto request = requests.begin();
    for (Departure& departure : departures) {
      BlockRecord& block = *departure.block;
      block.is_busy = false;
      bool is_copied = false;
      if (departure.may_leave && departure.needs_copy) {
        is_copied = request->state == TransferState::enqueued;
        departure.transfer.device_done.add(request->done.device_done);
        departure.transfer.host_done = request->done.host_done;
        if (request->state == TransferState::torn) {
          forget_host_copy(block);
        }
        ++request;
      }
      if (departure.may_leave && (!departure.needs_copy || is_copied)) {
        freed += block.bytes;
        commit_departure(departure, reason);
      } else {
        make_known(departure.id, block.bytes);
      }
    }
    state_.notify();
    if (failure) {
      std::rethrow_exception(failure);
    }
    return freed;
  }

  /// Copies a block's bytes to the host ahead of need; the block stays resident and becomes clean.
  ///
  /// @returns false if the host pool has no room
  bool copy_out(Guard& guard, BlockId id) {
    BlockRecord& block = *state_.blocks.find(id);
    block.is_busy = true;
    TransferRequest request;
    std::exception_ptr failure;
    try {
      if (has_host_slot(guard, block)) {
        request = request_for(block, block.written);
        Unlocked const unlocked{guard};
        state_.streams.swap_out({&request, 1});
      }
    } catch (...) {
      failure = std::current_exception();
    }
    block.is_busy = false;
    if (request.state == TransferState::torn) {
      forget_host_copy(block);
    }
    bool const is_copied = request.state == TransferState::enqueued;
    if (is_copied) {
      block.used.add(request.done.device_done);
      block.is_host_valid = true;
      state_.stats.swap_outs.add(block.bytes);
      state_.stats.evictions[static_cast<std::size_t>(EvictionReason::speculative)].add(
          block.bytes);
      state_.log(RecordKind::copy_out, id, block.bytes, block.address);
    }
    state_.notify();
    if (failure) {
      std::rethrow_exception(failure);
    }
    return is_copied;
  }

  /// Moves blocks inside the device as `plan` says. The caller has the turn.
  ///
  /// @throws DeviceError after committing the moves that were enqueued
  template <class Plan>
  void move(Guard& guard, Plan& plan) {
    std::vector<Fence> after;
    after.reserve(plan.moves.size());
    for (Move const& move : plan.moves) {
      BlockRecord& block = *state_.blocks.find(move.owner);
      after.push_back(block.last_uses());
    }
    state_.arena.begin_moves(plan);
    for (Move const& move : plan.moves) {
      state_.blocks.find(move.owner)->is_busy = true;
    }
    std::size_t done = 0;
    bool is_torn = false;
    std::exception_ptr failure;
    {
      Unlocked const unlocked{guard};
      StreamIndex const stream = state_.streams.moves().index();
      try {
        state_.order.wait(stream, plan.fence);
        for (Move const& move : plan.moves) {
          state_.order.wait(stream, move.fence);
          state_.order.wait(stream, after[done]);
          enqueue_move(state_.device, move, state_.streams.moves().handle(), plan.bounce);
          ++done;
        }
      } catch (BlockLost const&) {
        is_torn = true;
        failure = std::current_exception();
      } catch (...) {
        failure = std::current_exception();
      }
    }
    Fence const moved = state_.streams.moves().mark();
    state_.arena.commit_moves(plan, done, moved);
    for (std::size_t i = 0; i < plan.moves.size(); ++i) {
      Move const& move = plan.moves[i];
      BlockRecord& block = *state_.blocks.find(move.owner);
      block.is_busy = false;
      if (i < done) {
        block.address = state_.arena.address(block.range);
        block.written = moved;
        block.used.clear();
        state_.stats.moves.add(block.bytes);
        state_.log(RecordKind::move, move.owner, block.bytes, block.address);
      } else {
        block.used.add(moved);  // part of the move may have been enqueued, and its way back
      }
      if (is_torn && i == done) {
        give_up(move.owner, block);
      }
    }
    ++state_.stats.compaction_passes;
    state_.notify();
    if (failure) {
      std::rethrow_exception(failure);
    }
  }

 private:
  struct Departure {
    BlockId id{};
    BlockRecord* block = nullptr;
    Fence after;
    Transfer transfer{};
    bool needs_copy = false;
    bool may_leave = false;
    bool is_vacated = false;
  };

  /// Blocks up to this size are worth being copied in the order of their addresses.
  static constexpr std::size_t small_bytes = 64_KiB;

  /// Small blocks that lie side by side get slots side by side, and both ways they are one copy. Large
  /// ones stay in the order in which they were chosen: what was used last may still be in use.
  static void line_up(std::vector<Departure>& departures) {
    auto const is_small = [](Departure const& d) { return d.block->bytes <= small_bytes; };
    if (std::all_of(departures.begin(), departures.end(), is_small)) {
      std::sort(departures.begin(), departures.end(), [](Departure const& a, Departure const& b) {
        return std::less<>{}(a.block->address, b.block->address);
      });
    }
  }

  [[nodiscard]] TransferRequest request_for(BlockRecord const& block, Fence const& after) const {
    return {.slot = block.host,
            .device = block.address,
            .bytes = block.requested_bytes,
            .after = after,
            .reservation = state_.arena.reservation(block.range)};
  }

  /// A move tore the block's bytes on the device: what is left is the host copy, if it is valid.
  void give_up(BlockId id, BlockRecord& block) {
    if (block.is_host_valid) {
      state_.eviction.on_erase(id);
      state_.log(RecordKind::drop, id, block.bytes, block.address);
      state_.on_range_left(block, block.last_uses(), Leaves::parked);
      ++state_.swapped_out_blocks;
    } else {
      block.has_contents = false;
      block.is_lost = true;
    }
  }

  /// Overwrites the range that is given up, so that a use of a stale address shows.
  void poison(Departure& departure) {
    StreamIndex const stream = state_.streams.out().index();
    state_.order.wait(stream, departure.after);
    state_.device.fill(departure.block->address,
                       poison_byte,
                       departure.block->bytes,
                       state_.streams.out().handle());
    departure.transfer.device_done.add(state_.streams.out().mark());
  }

  /// Has the range unmapped when its bytes are on the host.
  void vacate(Departure& departure) {
    state_.order.wait(state_.streams.out().index(), departure.after);
    state_.device.vacate(
        departure.block->address, departure.block->bytes, state_.streams.out().handle());
    departure.transfer.device_done.add(state_.streams.out().mark());
    departure.is_vacated = true;
  }

  void commit_departure(Departure const& departure, EvictionReason reason) {
    BlockRecord& block = *departure.block;
    Fence after = block.last_uses();
    after.add(departure.transfer.device_done);
    if (departure.needs_copy) {
      block.is_host_valid = true;
      state_.stats.swap_outs.add(block.bytes);
      state_.log(RecordKind::swap_out, departure.id, block.bytes, block.address);
    } else {
      state_.stats.drops.add(block.bytes);
      state_.log(RecordKind::drop, departure.id, block.bytes, block.address);
    }
    state_.on_range_left(block, after, departure.is_vacated ? Leaves::vacated : Leaves::parked);
    block.written = departure.transfer.host_done;  // what `residency` asks about
    block.used.clear();
    if (block.has_contents) {
      ++state_.swapped_out_blocks;
    }
    state_.stats.evictions[static_cast<std::size_t>(reason)].add(block.bytes);
    state_.last_eviction_step = state_.stats.steps + 1;
  }

  /// Tells the eviction policy of a block that was to leave and stays.
  void make_known(BlockId id, std::size_t bytes) {
    auto const& schedule = state_.prefetcher.schedule();
    state_.eviction.on_insert(id, bytes, schedule.use_of(id));
  }

  /// After a failed copy: part of it may have been enqueued, and what the slot holds is undefined.
  void forget_host_copy(BlockRecord& block) noexcept {
    Ticket const reached = state_.streams.out().mark();
    block.used.add(reached);
    state_.pool.give_back(block.host, reached);
    block.host = HostSlotId{};
    block.is_unproven = false;
  }

  /// Finds the block a place in the host pool, if need be by giving up host copies that resident
  /// blocks could do without.
  bool has_host_slot(Guard& guard, BlockRecord& block) {
    if (block.host != HostSlotId{} && state_.pool.has_failed(block.host)) {
      state_.pool.give_back(std::exchange(block.host, HostSlotId{}));  // takes no more bytes
    }
    while (block.host == HostSlotId{}) {
      if (auto const slot = state_.pool.try_take(block.requested_bytes)) {
        block.host = *slot;
        break;
      }
      bool has_grown = false;
      {
        Unlocked const unlocked{guard};
        has_grown = state_.pool.try_grow(block.requested_bytes);
      }
      if (!has_grown && !give_up_host_copy()) {
        return false;
      }
    }
    return true;
  }

  /// Frees one host slot of a resident block: a stale one, else a valid one, whose block then has to
  /// be copied again when it leaves.
  bool give_up_host_copy() {
    BlockRecord* poorest = nullptr;
    state_.blocks.for_each([&](BlockId, BlockRecord& block) {
      bool const can_go = block.host != HostSlotId{} && block.is_resident() && !block.is_busy &&
                          block.filler == nullptr;
      if (can_go && (poorest == nullptr || (poorest->is_host_valid && !block.is_host_valid))) {
        poorest = &block;
      }
    });
    if (poorest == nullptr) {
      return false;
    }
    state_.pool.give_back(poorest->host);
    poorest->host = HostSlotId{};
    poorest->is_host_valid = false;
    poorest->is_unproven = false;  // from now on the pool itself tells of a failure
    return true;
  }

  State& state_;
};

}  // namespace spillway::detail
