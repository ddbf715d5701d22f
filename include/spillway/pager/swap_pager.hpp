// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/arena.hpp>
#include <spillway/concepts/pager.hpp>
#include <spillway/concepts/policy_set.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/lease.hpp>
#include <spillway/pager/arrivals.hpp>
#include <spillway/pager/lease_book.hpp>
#include <spillway/pager/leases.hpp>
#include <spillway/pager/look_ahead.hpp>
#include <spillway/pager/blocks.hpp>
#include <spillway/pager/reclaimer.hpp>
#include <spillway/pager/transfers.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace spillway::detail {

/// Knows of every block where its bytes are, who holds it and what was last done with it; makes room
/// by dropping, swapping out and compacting.
///
/// Threads  thread-safe with a real `lock` policy. One thread at a time makes room; others go on with
///          resident blocks meanwhile.
/// Streams  everything is ordered by events. The host waits only for leases of other threads, when
///          nothing else can make room; `Stats::host_waits` counts it.
/// Address  a block's address is promised by a lease and by nothing else.
template <PolicySet Policies>
class SwapPager {
 public:
  using State = PagerState<Policies>;
  using device_type = typename Policies::device;
  using stream_type = typename device_type::stream_type;
  using lease_type = Lease<SwapPager>;
  using observer_type = typename Policies::observer;

  using Guard = typename State::Guard;

  static constexpr bool is_thread_safe = !std::is_empty_v<typename Policies::lock>;

  /// The parts are not owned and must outlive the pager.
  SwapPager(device_type& device,
            StreamOrder<device_type>& order,
            typename State::Arena& arena,
            typename State::Pool& pool,
            CopyStreams<device_type>& streams,
            typename State::Prefetcher& prefetcher,
            PagerOptions options)
      : state_{device, order, arena, pool, streams, prefetcher, options} {}
  SwapPager(SwapPager const&) = delete;
  SwapPager& operator=(SwapPager const&) = delete;

  /// Makes a block of `size_bytes`, resident and without contents.
  ///
  /// @throws ContractViolation for 0 bytes; OutOfDeviceMemory, DeviceError, FileTierError if room
  ///         cannot be made; std::bad_alloc. Nothing is left behind.
  /// @stream no call on any stream unless blocks have to leave or move
  /// @cost   O(1) when a free range fits
  [[nodiscard]] BlockId allocate(std::size_t size_bytes);

  /// Makes a block of `size_bytes` that gets its range when it is first leased.
  ///
  /// For the results of an operation: leased together with its operands, nothing is evicted or fixed
  /// in its place for their sake before all of them are known.
  ///
  /// @throws ContractViolation for 0 bytes; OutOfDeviceMemory only if the block alone is larger than
  ///         the capacity; std::bad_alloc
  /// @cost   O(1), no device call
  [[nodiscard]] BlockId declare(std::size_t size_bytes);

  /// Frees a block. Its range is reused only after its last uses, its host copy with it.
  ///
  /// @throws ContractViolation if the block is unknown or leased; it is then unchanged
  void deallocate(BlockId id);

  /// Frees a block now, or when its last lease ends. An unknown id is an error of the caller that
  /// checked builds stop at and others ignore.
  void abandon(BlockId id) noexcept;

  /// Makes a block resident and holds it there.
  ///
  /// @param access  `write` promises to overwrite everything that is read later, so that nothing is
  ///                brought in and a host copy is forgotten
  /// @throws ContractViolation for an unknown block, or if anything would have to be enqueued on a stream
  ///         that is being captured; OutOfDeviceMemory, OutOfHostMemory, DeviceError, FileTierError. No
  ///         lease is held then and no byte is lost.
  /// @stream orders `stream` after earlier uses that conflict: writes before a read, all uses before
  ///         a write. Without one on another stream no device call is made. Does not wait.
  /// @cost   O(1) for a resident block
  [[nodiscard]] lease_type acquire(BlockId id, Access access, stream_type stream) {
    LeaseRequest const request{id, access};
    lease_type lease;
    acquire_into({&request, 1}, stream, &lease);
    return lease;
  }

  /// Leases for all operands of one operation: all are held before any is brought in, so that none is
  /// evicted for the sake of another. A block may occur more than once.
  ///
  /// @throws as `acquire`; then no lease of the group is held
  [[nodiscard]] std::vector<lease_type> acquire_all(std::span<LeaseRequest const> requests,
                                                    stream_type stream) {
    std::vector<lease_type> leases(requests.size());
    acquire_into(requests, stream, leases.data());
    return leases;
  }

  /// Copies a block's bytes to the host pool, or drops it if the host copy is still valid, and gives
  /// its range back.
  ///
  /// @throws ContractViolation if the block is unknown or leased, OutOfHostMemory, DeviceError,
  ///         FileTierError; the block then stays resident
  /// @stream enqueues on the outgoing copy stream; does not wait
  void swap_out(BlockId id);

  /// Brings a block's bytes back ahead of need. No effect on a resident block or one without contents.
  ///
  /// @throws as `acquire`; the block then stays on the host
  void swap_in(BlockId id);

  /// Where the bytes are now. Asks the device whether a copy is still in flight.
  [[nodiscard]] Residency residency(BlockId id) const;

  /// The block's address for life, where the policies keep addresses: to be used under a lease only.
  [[nodiscard]] void* stable_address(BlockId id) const requires State::keeps_addresses {
    Guard const guard{state_.lock};
    return state_.arena.address(state_.record(id).range);
  }

  /// Marks the boundary between two steps of a program that repeats: what was recorded since the last
  /// mark predicts the step that begins.
  ///
  /// @throws FileTierError if the file tier failed to give bytes back since it was last asked; the
  ///         step has begun all the same, and only those bytes are lost
  void begin_step();

  /// Moves blocks together for at most `budget_bytes`. @returns bytes moved
  std::size_t compact(std::size_t budget_bytes);

  /// Gives wholly free segments back to the device after waiting on the host for their last uses.
  /// @returns bytes released
  std::size_t trim_sync();

  /// Must be called before work on `stream` is captured into a graph: others who wait for what has been
  /// done there then need no event of a stream that is being captured.
  ///
  /// The graph keeps addresses: hold leases on all it uses from before the capture until it has run for
  /// the last time, and release none that was acquired on `stream` during the capture.
  /// @throws DeviceError
  void prepare_capture(stream_type stream) {
    Guard guard{state_.lock};
    StreamIndex const index = state_.index_of(guard, stream);
    guard.unlock();
    state_.order.record(index);
  }

  /// Must be called before a stream that leases were acquired on is destroyed.
  void retire_stream(stream_type stream);

  [[nodiscard]] Stats stats() const;
  void reset_peak_stats();
  [[nodiscard]] observer_type& observer() noexcept { return state_.observer; }

  /// How many threads wait for leases of others at this moment.
  [[nodiscard]] std::size_t lease_waiters() const {
    Guard const guard{state_.lock};
    return state_.lease_waiters.size();
  }

  /// Calls `visit(id, BlockRecord const&)` for every block under the lock; it must not call back.
  template <class Visit>
  void for_each_block(Visit visit) const {
    Guard const guard{state_.lock};
    std::as_const(state_.blocks).for_each(visit);
  }
  /// Calls `visit` for every range of the arena under the lock; it must not call back.
  template <class Visit>
  void for_each_range(Visit visit) const {
    Guard const guard{state_.lock};
    std::as_const(state_.arena).for_each_range(visit);
  }

 private:
  friend lease_type;
  using Turn = typename State::Turn;

  void acquire_into(std::span<LeaseRequest const> requests, stream_type stream, lease_type* leases);
  [[nodiscard]] BlockId add_block(std::size_t size_bytes);
  void release(LeaseRecord const& lease) noexcept { book_.close(lease); }

  mutable State state_;
  Transfers<Policies> transfers_{state_};
  RoomMaker<Policies> rooms_{state_, transfers_};
  Arrivals<Policies> arrivals_{state_};
  LeaseBook<Policies> book_{state_};
  LeaseDesk<Policies> desk_{state_, book_, rooms_, arrivals_};
  LookAhead<Policies> ahead_{state_, transfers_, arrivals_, rooms_};
};

template <PolicySet Policies>
BlockId SwapPager<Policies>::declare(std::size_t size_bytes) {
  Guard guard{state_.lock};
  BlockId const id = add_block(size_bytes);
  guard.unlock();
  state_.tell_observer();
  return id;
}

template <PolicySet Policies>
BlockId SwapPager<Policies>::allocate(std::size_t size_bytes) {
  Guard guard{state_.lock};
  BlockId const id = add_block(size_bytes);
  BlockRecord& block = *state_.blocks.find(id);
  try {
    std::optional<Placement> placement;
    if constexpr (!State::maps_pages) {
      placement = state_.try_place(guard, block.bytes, id);
    }
    if (placement) {
      ++state_.stats.range_sources[static_cast<std::size_t>(RangeSource::free_range)];
    } else {
      Turn const turn{state_, guard};
      placement = rooms_.take(guard, block.bytes, id);
    }
    arrivals_.place(id, *placement, state_.prefetcher.schedule().use_of(id));
  } catch (...) {
    state_.free_block(id, block);
    throw;
  }
  guard.unlock();
  state_.tell_observer();
  return id;
}

/// A block that has neither a range nor contents.
template <PolicySet Policies>
BlockId SwapPager<Policies>::add_block(std::size_t size_bytes) {
  expects(size_bytes != 0, "a block must have at least one byte");
  // Rounding must not overflow.
  bool const is_absurd = size_bytes > std::numeric_limits<std::size_t>::max() / 2;
  if (is_absurd || state_.rounded(size_bytes) > state_.arena.capacity_bytes()) {
    ++state_.stats.out_of_memory;
    throw OutOfDeviceMemory{
        state_.report(size_bytes),
        "The block alone is larger than the capacity: raise capacity_bytes or split the block."};
  }
  std::size_t const bytes = state_.rounded(size_bytes);
  BlockId const id = state_.blocks.emplace({.requested_bytes = size_bytes, .bytes = bytes});
  try {
    state_.prefetcher.on_create(id, bytes);
  } catch (...) {
    state_.blocks.erase(id);
    throw;
  }
  state_.stats.allocated.add(bytes);
  state_.stats.requested_bytes.add(size_bytes);
  state_.log(RecordKind::allocate, id, bytes, nullptr);
  return id;
}

template <PolicySet Policies>
void SwapPager<Policies>::deallocate(BlockId id) {
  Guard guard{state_.lock};
  BlockRecord& block = state_.record(id);
  expects(!block.is_leased(), "a leased block cannot be freed: release its leases first");
  state_.await_transition(guard, block, nullptr);
  state_.free_block(id, block);
  guard.unlock();
  state_.tell_observer();
}

template <PolicySet Policies>
void SwapPager<Policies>::abandon(BlockId id) noexcept {
  Guard guard{state_.lock};
  BlockRecord* const block = state_.blocks.find(id);
  SPILLWAY_ASSERT(block != nullptr && !block->is_orphan);
  if (block == nullptr) {
    return;
  }
  state_.await_transition(guard, *block, nullptr);
  if (block->is_leased()) {
    block->is_orphan = true;
    return;
  }
  state_.free_block(id, *block);
  guard.unlock();
  state_.tell_observer();
}

template <PolicySet Policies>
void SwapPager<Policies>::acquire_into(std::span<LeaseRequest const> requests,
                                       stream_type stream,
                                       lease_type* leases) {
  Guard guard{state_.lock};
  desk_.open(
      guard, requests, stream, [&](std::size_t i, LeaseRecord lease, BlockRecord const& block) {
        leases[i] = lease_type{*this, lease, block.address, block.requested_bytes};
      });
  if (ahead_.is_due()) {
    ahead_.run(guard);
  }
  if constexpr (observer_type::is_enabled) {
    guard.unlock();
    state_.tell_observer();
  }
}

template <PolicySet Policies>
void SwapPager<Policies>::swap_out(BlockId id) {
  Guard guard{state_.lock};
  (void)state_.record(id);
  {
    Turn const turn{state_, guard};
    BlockRecord& block = state_.record(id);
    expects(!block.is_leased(), "a leased block cannot be swapped out: release its leases first");
    state_.await_transition(guard, block, nullptr);
    if (!block.is_resident()) {
      return;
    }
    std::size_t const bytes = block.bytes;
    state_.eviction.on_erase(id);
    if (transfers_.send_out(guard, {id}, EvictionReason::requested) == 0) {
      throw OutOfHostMemory{bytes,
                            state_.pool.free_bytes(),
                            "Raise the capacity of a tier of the host pool or free blocks."};
    }
  }
  guard.unlock();
  state_.tell_observer();
}

template <PolicySet Policies>
void SwapPager<Policies>::swap_in(BlockId id) {
  Guard guard{state_.lock};
  desk_.bring_in(guard, id);
  guard.unlock();
  state_.tell_observer();
}

template <PolicySet Policies>
Residency SwapPager<Policies>::residency(BlockId id) const {
  Guard guard{state_.lock};
  BlockRecord const& block = state_.record(id);
  bool const is_resident = block.is_resident();
  bool const may_be_moving = is_resident ? block.is_arriving : block.has_contents;
  Residency const settled = is_resident          ? Residency::device
                            : block.has_contents ? Residency::host
                                                 : Residency::none;
  Fence const transfer = block.written;
  guard.unlock();
  if (may_be_moving && !state_.order.is_complete(transfer)) {
    return is_resident ? Residency::moving_in : Residency::moving_out;
  }
  return settled;
}

template <PolicySet Policies>
void SwapPager<Policies>::begin_step() {
  Guard guard{state_.lock};
  ++state_.stats.steps;
  state_.prefetcher.begin_step();
  state_.note_stuck_bytes();
  state_.eviction.on_step(state_.prefetcher.schedule(), state_.plannable_bytes());
  state_.log(RecordKind::step, {}, 0, nullptr);
  guard.unlock();
  state_.tell_observer();
  state_.pool.check();
}

template <PolicySet Policies>
std::size_t SwapPager<Policies>::compact(std::size_t budget_bytes) {
  Guard guard{state_.lock};
  std::size_t moved = 0;
  {
    Turn const turn{state_, guard};
    moved = rooms_.compact_ahead(guard, budget_bytes);
  }
  guard.unlock();
  state_.tell_observer();
  return moved;
}

template <PolicySet Policies>
std::size_t SwapPager<Policies>::trim_sync() {
  Guard guard{state_.lock};
  std::size_t released = 0;
  if constexpr (GrowingArena<typename State::Arena>) {
    Turn const turn{state_, guard};
    while (auto const segment = state_.arena.trim()) {
      state_.log(RecordKind::trim, {}, segment->bytes, segment->address);
      std::uint64_t const start_ns = state_.device.clock_ns();
      {
        typename State::Unlocked const unlocked{guard};
        try {
          state_.order.synchronize(segment->fence);
        } catch (...) {
          state_.device.release(segment->address, segment->bytes);
          throw;
        }
        state_.device.release(segment->address, segment->bytes);
      }
      state_.count_host_waits(1, start_ns, state_.device.clock_ns());
      released += segment->bytes;
    }
  }
  guard.unlock();
  state_.tell_observer();
  return released;
}

template <PolicySet Policies>
void SwapPager<Policies>::retire_stream(stream_type stream) {
  {
    Guard const guard{state_.lock};
    state_.stream_cache.fill({});
  }
  state_.order.retire(stream);
}

template <PolicySet Policies>
Stats SwapPager<Policies>::stats() const {
  Guard const guard{state_.lock};
  Stats now = state_.stats;
  now.capacity_bytes = state_.arena.capacity_bytes();
  now.reserved_bytes = state_.arena.reserved_bytes();
  now.free_bytes = state_.arena.free_bytes();
  now.largest_free_bytes = state_.arena.largest_free_bytes();
  now.peak_reserved_bytes = std::max(now.peak_reserved_bytes, now.reserved_bytes);
  now.mispredictions = state_.prefetcher.schedule().mispredictions();
  return now;
}

template <PolicySet Policies>
void SwapPager<Policies>::reset_peak_stats() {
  Guard const guard{state_.lock};
  Stats& stats = state_.stats;
  stats.allocated.reset_peak();
  stats.requested_bytes.reset_peak();
  stats.resident.reset_peak();
  stats.leased.reset_peak();
  stats.peak_reserved_bytes = state_.arena.reserved_bytes();
}

}  // namespace spillway::detail
