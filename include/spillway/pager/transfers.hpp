// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/arena/move_batch.hpp>
#include <spillway/concepts/policy_set.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host_swap_pool.hpp>
#include <spillway/pager/block_state.hpp>
#include <spillway/pager/blocks.hpp>
#include <spillway/pager/copy_streams.hpp>
#include <spillway/pager/journal.hpp>
#include <spillway/pager/monitor.hpp>
#include <spillway/schedule/use.hpp>
#include <spillway/stream/stream_order.hpp>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace spillway::detail {

/// Enqueues the copies of blocks: from the device to the host pool, back, and inside the device.
///
/// Every function is called with the lock and, unless it says otherwise, with the exclusive right.
/// It makes its decisions and puts the blocks into transit under the lock, enqueues with the lock
/// released, and commits under the lock. If the device refuses a copy, the blocks whose copies were
/// not enqueued are as before.
template <PolicySet Policies>
class Transfers {
 public:
  using Device = typename Policies::device;
  using Arena = typename Blocks<Policies>::Arena;
  using Pool = typename Blocks<Policies>::Pool;
  using Streams = CopyStreams<Device, typename Policies::file_io>;
  using MonitorType = Monitor<typename Policies::lock>;

  static constexpr unsigned char poison_byte = 0xD5;

  /// `poisons`: ranges that blocks leave are overwritten, so that a use of a stale address shows.
  /// The other arguments are not owned and must outlive this object.
  Transfers(Device& device,
            StreamOrder<Device>& order,
            Arena& arena,
            Pool& pool,
            Streams& streams,
            Blocks<Policies>& blocks,
            Journal<Policies>& journal,
            MonitorType& monitor,
            bool poisons)
      : device_{device},
        order_{order},
        arena_{arena},
        pool_{pool},
        streams_{streams},
        blocks_{blocks},
        journal_{journal},
        monitor_{monitor},
        poisons_{poisons} {}
  Transfers(Transfers const&) = delete;
  Transfers& operator=(Transfers const&) = delete;

  /// Frees the memory of a resident block's host slot, so that the block must be copied again when
  /// it leaves. The block keeps an empty slot while its swap-in may turn out to have failed.
  void give_up_host_copy(BlockRecord& block, Fence const& last_use = {}) {
    block.is_host_valid = false;
    if (!block.is_read_unchecked || !pool_.try_empty(block.host, last_use)) {
      pool_.give_back(std::exchange(block.host, HostSlotId{}), last_use);
      block.is_read_unchecked = false;
    }
  }

  /// Whether the swap-in of a resident block has failed and the block was not overwritten since.
  /// Its slot must be kept, since the next read of the block reports the failure from there.
  [[nodiscard]] bool has_lost_bytes(BlockRecord const& block) {
    return block.is_read_unchecked && pool_.has_lost_bytes(block.host);
  }

  /// Whether the bytes of a block on the host are known to be lost, so that its swap-in would fail.
  [[nodiscard]] bool has_failed(BlockRecord const& block) { return pool_.has_failed(block.host); }

  /// Whether the host pool might have room for a block that must be copied, after `spare_bytes` in
  /// it were freed.
  [[nodiscard]] bool may_take_host_slot(BlockRecord const& block, std::size_t spare_bytes) {
    return (block.host != HostSlotId{} && pool_.takes_bytes(block.host, block.coding)) ||
           pool_.may_take(block.requested_bytes, block.coding, spare_bytes);
  }
  /// Returns how many bytes of the host pool are slots of resident blocks, which could be freed.
  [[nodiscard]] std::size_t needless_host_bytes() {
    std::size_t bytes = 0;
    each_needless_on_host([&](BlockRecord const& block) {
      bytes += pool_.size_bytes(block.host);
      return true;
    });
    return bytes;
  }

  /// Adds a block that is `swapping_in`, and its range, to those that the next `swap_in` copies.
  ///
  /// @returns the bytes of all blocks that are staged now
  /// @throws  std::bad_alloc; the block is then on the host as before, and its range back in the
  ///          arena
  std::size_t stage_swap_in(BlockId id, Placement const& placement, Use use, bool is_prefetch) {
    std::size_t const staged = arrivals_.size();
    BlockRecord const& block = blocks_.at(id);
    try {
      arrivals_.push_back({id, placement, is_prefetch});
      arriving_.push_back({.slot = block.host,
                           .device = placement.address,
                           .bytes = block.requested_bytes,
                           .after = placement.fence,
                           .reservation = arena_.reservation(placement.range)});
      blocks_.track(id, use);
    } catch (...) {
      arrivals_.resize(staged);
      arriving_.resize(staged);
      blocks_.cancel_swap_in(id, placement, placement.fence);
      throw;
    }
    arriving_bytes_ += block.bytes;
    return arriving_bytes_;
  }

  /// Brings the bytes of all staged blocks to the device.
  ///
  /// @throws DeviceError, FileTierError, std::bad_alloc; a block whose copy was not enqueued is
  ///         then on the host as before, and its range back in the arena
  void swap_in() {
    if (arrivals_.empty()) {
      return;
    }
    std::exception_ptr failure;
    try {
      Unlocked const unlocked{monitor_};
      streams_.swap_in(arriving_);
    } catch (...) {
      failure = std::current_exception();
    }
    for (std::size_t i = 0; i < arrivals_.size(); ++i) {
      Arrival const& arrival = arrivals_[i];
      if (arriving_[i].state == TransferState::enqueued) {
        blocks_.commit_swap_in(
            arrival.id, arrival.placement, arriving_[i].done.device_done, arrival.is_prefetch);
      } else {
        Fence after = arrival.placement.fence;
        after.add(streams_.in().mark());           // part of the copy may have been enqueued there,
        after.add(arriving_[i].done.device_done);  // or on the pool's stream by a host function
        blocks_.cancel_swap_in(arrival.id, arrival.placement, after);
      }
    }
    arrivals_.clear();
    arriving_.clear();
    arriving_bytes_ = 0;
    end(failure);
  }

  /// Makes blocks that are `swapping_out` leave the device: dropped if clean or if it costs less to
  /// make them again, else copied to the host.
  ///
  /// Blocks for which the host pool has no room stay, unless they can be made again.
  ///
  /// @returns the bytes of device ranges given up
  /// @throws DeviceError, FileTierError once what could be committed is committed; std::bad_alloc
  std::size_t swap_out(std::span<BlockId const> victims, EvictionReason reason) {
    std::vector<Departure> departures;
    try {
      departures.reserve(victims.size());
    } catch (...) {
      std::exception_ptr failure = std::current_exception();
      std::for_each(victims.begin(), victims.end(), [&](BlockId id) { keep(id, failure); });
      end(failure);
    }
    for (BlockId const id : victims) {
      BlockRecord& block = blocks_.at(id);
      block.is_host_valid = may_be_dropped(block);
      bool const needs_copy = blocks_.must_copy(id);
      if (!needs_copy && !block.is_clean()) {
        blocks_.begin_drop(id);
      }
      departures.push_back(
          {.id = id, .block = &block, .after = block.last_uses(), .needs_copy = needs_copy});
    }
    sort_small(departures);
    std::vector<TransferRequest> requests;
    std::exception_ptr failure;
    try {
      requests.reserve(departures.size());
      for (Departure& departure : departures) {
        departure.may_leave = !departure.needs_copy || take_host_slot(*departure.block);
        if (!departure.may_leave && blocks_.may_drop(departure.id)) {
          blocks_.begin_drop(departure.id);
          departure.needs_copy = false;
          departure.may_leave = true;
        }
        if (departure.may_leave && departure.needs_copy) {
          requests.push_back(request_for(*departure.block));
        }
      }
      Unlocked const unlocked{monitor_};
      streams_.swap_out(requests);
      auto copied = requests.cbegin();
      for (Departure& departure : departures) {
        if (departure.may_leave) {
          if (departure.needs_copy) {
            departure.after.add((copied++)->done.device_done);
          }
          clear_range(departure);
        }
      }
    } catch (...) {
      failure = std::current_exception();
    }
    std::size_t freed = 0;
    auto request = requests.begin();
    for (Departure& departure : departures) {
      bool is_copied = false;
      if (departure.may_leave && departure.needs_copy) {
        is_copied = request->state == TransferState::enqueued;
        departure.copy.device_done.add(request->done.device_done);
        departure.copy.host_done = request->done.host_done;
        if (request->state == TransferState::torn) {
          forget_host_copy(*departure.block);
        }
        ++request;
      }
      if (departure.may_leave && (is_copied || !departure.needs_copy)) {
        freed += departure.block->bytes;
        if (!is_copied && !departure.block->is_clean() && departure.block->host != HostSlotId{}) {
          // Its slot holds outdated bytes, which a lease could read before it was written.
          pool_.forget_failures(departure.block->host, departure.block->is_read_unchecked);
          give_up_host_copy(*departure.block);
        }
        blocks_.commit_swap_out(
            departure.id, is_copied, departure.copy, departure.is_vacated, reason);
      } else {
        departure.block->used.add(departure.copy.device_done);
        keep(departure.id, failure);
      }
    }
    end(failure);
    return freed;
  }

  /// Copies a block's bytes to the host ahead of need; the block stays resident and becomes clean.
  ///
  /// @returns false if the host pool has no room
  /// @throws  DeviceError, FileTierError, std::bad_alloc; the block is then as it was
  bool copy_out(BlockId id) {
    BlockRecord& block = blocks_.at(id);
    if (has_lost_bytes(block)) {
      return false;
    }
    block.status.become(BlockState::copying_out);
    TransferRequest request;
    std::exception_ptr failure;
    try {
      if (take_host_slot(block)) {
        request = request_for(block);
        Unlocked const unlocked{monitor_};
        streams_.swap_out({&request, 1});
      }
    } catch (...) {
      failure = std::current_exception();
    }
    block.status.go_back();
    bool const is_copied = request.state == TransferState::enqueued;
    block.used.add(request.done.device_done);  // also if only a part of the copy was enqueued
    if (is_copied) {
      block.is_host_valid = true;
      journal_.copied_out(id, block);
    } else if (request.state == TransferState::torn) {
      forget_host_copy(block);
    }
    blocks_.note_host_slot(id, block);
    end(failure);
    return is_copied;
  }

  /// Moves blocks inside the device as `plan` says.
  ///
  /// @throws DeviceError after committing the moves that were enqueued; std::bad_alloc
  template <class Plan>
  void move(Plan& plan) {
    // The records of many blocks do not stay in the caches, so there are only two loops over them.
    std::vector<BlockRecord*> blocks;
    blocks.reserve(plan.moves.size());
    std::vector<Uses> uses;
    uses.reserve(plan.moves.size());
    arena_.begin_moves(plan);
    for (Move const& move : plan.moves) {
      BlockRecord& block = blocks_.at(move.owner);
      if (Fence const last = block.last_uses(); uses.empty() || uses.back().last != last) {
        uses.push_back({blocks.size(), last});
      }
      blocks.push_back(&block);
      if (!block.is_in_transit()) {  // a plan may move a block more than once
        block.status.become(BlockState::moving);
      }
    }
    std::size_t done = 0;
    BlockId torn{};
    std::exception_ptr failure;
    try {
      Unlocked const unlocked{monitor_};
      auto const& stream = streams_.moves();
      order_.wait(stream.index(), plan.fence);
      auto next = uses.cbegin();
      Fence freed;  // last uses of the destinations, for which the stream has to wait
      auto const wait_for_uses = [&](std::size_t i) {
        if (plan.moves[i].fence != freed) {
          freed = plan.moves[i].fence;
          order_.wait(stream.index(), freed);
        }
        if (next != uses.cend() && next->first_move == i) {
          order_.wait(stream.index(), (next++)->last);
        }
      };
      enqueue_moves(device_, plan.moves, stream.handle(), plan.bounce, done, wait_for_uses);
    } catch (BlockLost const&) {
      torn = plan.moves[done].owner;
      failure = std::current_exception();
    } catch (...) {
      failure = std::current_exception();
    }
    Fence const moved = streams_.moves().mark();
    arena_.commit_moves(plan, done, moved);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      BlockRecord& block = *blocks[i];
      if (i < done) {
        block.address = plan.moves[i].to;
        block.written = moved;
        block.used.clear();
        journal_.moved(plan.moves[i].owner, block);
      } else {
        block.written.add(moved);  // parts of the move, and of its undoing, may be enqueued
      }
      if (block.state() == BlockState::moving && plan.moves[i].owner != torn) {
        block.status.go_back();
      }
    }
    if (torn != BlockId{}) {
      blocks_.lose_bytes(torn, blocks_.at(torn));
    }
    journal_.compaction_pass();
    end(failure);
  }

 private:
  using Unlocked = typename MonitorType::Unlocked;

  struct Arrival {
    BlockId id{};
    Placement placement;
    bool is_prefetch = false;
  };
  struct Departure {
    BlockId id{};
    BlockRecord* block = nullptr;
    Fence after;
    Transfer copy{};
    bool needs_copy = false;
    bool may_leave = false;
    bool is_vacated = false;
  };

  /// Last uses that consecutive blocks of a plan have in common, so that one wait serves them all.
  struct Uses {
    std::size_t first_move = 0;
    Fence last;
  };

  /// Blocks up to this size are copied in the order of their addresses: see `sort_small`.
  static constexpr std::size_t small_bytes = 64_KiB;

  /// Sorts small blocks by address: neighbours then get neighbouring slots, so that they can be
  /// copied as one, out and in. Large blocks stay in the order in which they were chosen, since the
  /// last one may still be in use.
  static void sort_small(std::vector<Departure>& departures) {
    auto const is_small = [](Departure const& d) { return d.block->bytes <= small_bytes; };
    if (std::all_of(departures.begin(), departures.end(), is_small)) {
      std::sort(departures.begin(), departures.end(), [](Departure const& a, Departure const& b) {
        return std::less<>{}(a.block->address, b.block->address);
      });
    }
  }

  /// Makes a request for a copy to the host. The copy waits only for writes of the block: work that
  /// reads it may run at the same time.
  [[nodiscard]] TransferRequest request_for(BlockRecord const& block) const {
    return {.slot = block.host,
            .device = block.address,
            .bytes = block.requested_bytes,
            .after = block.written,
            .reservation = arena_.reservation(block.range)};
  }

  /// Ends the transit of a block that stays after all. If the eviction policy has no memory to
  /// track it, the exception is stored in `failure`, so that the other blocks can be settled first.
  void keep(BlockId id, std::exception_ptr& failure) noexcept {
    try {
      blocks_.cancel_swap_out(id);
    } catch (...) {
      failure = failure ? failure : std::current_exception();
    }
  }

  /// Wakes the threads that wait for the blocks, and rethrows `failure` if there is one.
  void end(std::exception_ptr const& failure) {
    monitor_.notify();
    if (failure) {
      std::rethrow_exception(failure);
    }
  }

  /// Enqueues what is done to a range that is given up, after the copy: it is unmapped or poisoned.
  void clear_range(Departure& departure) {
    auto const& out = streams_.out();
    std::byte* const address = departure.block->address;
    if constexpr (Blocks<Policies>::vacates) {
      order_.wait(out.index(), departure.after);
      device_.vacate(address, departure.block->bytes, out.handle());
      departure.is_vacated = true;
      departure.copy.device_done.add(out.mark());
    } else if (poisons_) {
      order_.wait(out.index(), departure.after);
      device_.fill(address, poison_byte, departure.block->bytes, out.handle());
      departure.copy.device_done.add(out.mark());
    }
  }

  /// Called when a copy failed of which a part may have been enqueued: the slot's contents are then
  /// undefined.
  void forget_host_copy(BlockRecord& block) {
    Ticket const reached = streams_.out().mark();
    block.used.add(reached);
    give_up_host_copy(block, reached);
  }

  /// Whether a block can leave without a copy as far as its host slot is concerned: the slot has
  /// the bytes, or the bytes on the device are wrong, which the next read reports from there.
  [[nodiscard]] bool may_be_dropped(BlockRecord const& block) {
    return block.is_read_unchecked ? block.is_host_valid || pool_.has_lost_bytes(block.host)
                                   : block.is_host_valid && !pool_.has_lost_write(block.host);
  }

  /// Makes sure that a block has a slot in the host pool that can be written, if need be by freeing
  /// slots of resident blocks. @returns false if there is none
  bool take_host_slot(BlockRecord& block) {
    if (block.host != HostSlotId{}) {
      if (pool_.takes_bytes(block.host, block.coding)) {
        return true;
      }
      give_up_host_copy(block);
    }
    auto const slot = try_take_slot_for(block);
    if (slot && block.host != HostSlotId{}) {
      pool_.replace(block.host, *slot);
    }
    block.host = slot ? *slot : block.host;
    return slot.has_value();
  }
  [[nodiscard]] std::optional<HostSlotId> try_take_slot_for(BlockRecord const& block) {
    bool has_asked = false;
    for (;;) {
      if (auto const slot = pool_.try_take(block.requested_bytes, block.coding)) {
        return slot;
      }
      bool has_grown = false;
      {
        Unlocked const unlocked{monitor_};
        has_grown = pool_.try_grow(block.requested_bytes, block.coding);
      }
      if (has_grown) {
        continue;
      }
      if (!std::exchange(has_asked, true) && !may_take_with_needless_ones(block)) {
        return std::nullopt;  // even freeing all of them would not make room
      }
      if (!give_up_needless_one()) {
        return std::nullopt;
      }
    }
  }

  /// Calls `visit(block)`, until it returns false, for the resident blocks whose host slot could be
  /// freed: first those whose slot is outdated, then those that must be copied again if they lose
  /// it.
  template <class Visit>
  void each_needless_on_host(Visit visit) {
    blocks_.kept_copies().each([&](BlockId id) {
      using enum KeptCopies::Visited;
      BlockRecord& block = blocks_.at(id);
      if (!block.is_resident() || block.host == HostSlotId{} || pool_.size_bytes(block.host) == 0) {
        return goes;
      }
      bool const is_needless = !block.is_in_transit() && block.state() != BlockState::filling;
      return !is_needless || visit(block) ? stays : ends_the_visit;
    });
  }
  /// Whether the host pool might have room for a block if enough of these slots were freed.
  [[nodiscard]] bool may_take_with_needless_ones(BlockRecord const& block) {
    std::size_t spare_bytes = 0;
    bool may_take = may_take_host_slot(block, 0);
    if (!may_take) {
      each_needless_on_host([&](BlockRecord const& other) {
        spare_bytes += pool_.size_bytes(other.host);
        may_take = may_take_host_slot(block, spare_bytes);
        return !may_take;
      });
    }
    return may_take;
  }
  /// Frees the first of these slots. @returns false if there is none
  bool give_up_needless_one() {
    bool is_given_up = false;
    each_needless_on_host([&](BlockRecord& block) {
      give_up_host_copy(block);
      is_given_up = true;
      return false;
    });
    return is_given_up;
  }

  Device& device_;
  StreamOrder<Device>& order_;
  Arena& arena_;
  Pool& pool_;
  Streams& streams_;
  Blocks<Policies>& blocks_;
  Journal<Policies>& journal_;
  MonitorType& monitor_;
  bool poisons_;
  // The blocks that are staged to be swapped in, and their requests in the same order. Only the
  // thread with the exclusive right uses them.
  std::vector<Arrival> arrivals_;
  std::vector<TransferRequest> arriving_;
  std::size_t arriving_bytes_ = 0;
};

}  // namespace spillway::detail
