// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/pager.hpp>
#include <spillway/concepts/policy_set.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/lease.hpp>
#include <spillway/pager/look_ahead.hpp>
#include <spillway/pager/pager_state.hpp>
#include <spillway/pager/room_maker.hpp>
#include <spillway/pager/transfers.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace spillway {

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
            typename State::Prefetcher& prefetcher,
            PagerOptions options)
      : state_{device, order, arena, pool, prefetcher, options} {}
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
  /// @throws ContractViolation for an unknown block; OutOfDeviceMemory, OutOfHostMemory, DeviceError,
  ///         FileTierError. No lease is held then and no byte is lost.
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
  void begin_step();

  /// Moves blocks together for at most `budget_bytes`. @returns bytes moved
  std::size_t compact(std::size_t budget_bytes);

  /// Gives wholly free segments back to the device after waiting on the host for their last uses.
  /// @returns bytes released
  std::size_t trim_sync();

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

  /// Leases counted but not handed out yet; taken back unless `keep` is called.
  class Holds {
   public:
    Holds(SwapPager& pager, Guard& guard, std::span<LeaseRequest const> requests)
        : pager_{pager}, guard_{guard}, requests_{requests} {}
    Holds(Holds const&) = delete;
    Holds& operator=(Holds const&) = delete;
    ~Holds() {
      if (!guard_.owns_lock()) {
        guard_.lock();
      }
      for (; count_ != 0; --count_) {
        pager_.undo_hold(requests_[count_ - 1].id, *this);
      }
    }
    void add(BlockRecord& block) noexcept {
      pager_.count_lease(block);
      ++count_;
    }
    void keep() noexcept { count_ = 0; }

   private:
    SwapPager& pager_;
    Guard& guard_;
    std::span<LeaseRequest const> requests_;
    std::size_t count_ = 0;
  };

  void acquire_into(std::span<LeaseRequest const> requests, stream_type stream, lease_type* leases);
  void make_resident(Guard& guard, LeaseRequest request, Use use, Holds const& group);
  bool await_transition(Guard& guard, BlockRecord const& block, void const* group);
  [[nodiscard]] Use note_access(LeaseRequest request) noexcept;
  [[nodiscard]] lease_type grant(LeaseRequest request, StreamIndex stream) noexcept;
  [[nodiscard]] bool is_settled(BlockId id) noexcept {
    BlockRecord const& block = *state_.blocks.find(id);
    return block.is_resident() && !block.is_busy && block.filler == nullptr;
  }
  void order_after_earlier_uses(Guard& guard,
                                std::span<LeaseRequest const> requests,
                                StreamIndex on,
                                Holds const& group);
  void judge_prefetches(Guard& guard, std::span<LeaseRequest const> requests);
  [[nodiscard]] BlockId add_block(std::size_t size_bytes);
  void count_lease(BlockRecord& block) noexcept;
  void end_lease(BlockId id, BlockRecord& block) noexcept;
  void undo_hold(BlockId id, Holds const& group) noexcept;
  void release(LeaseRecord const& lease) noexcept;
  void free_block(BlockId id, BlockRecord& block) noexcept;

  mutable State state_;
  Transfers<Policies> transfers_{state_};
  RoomMaker<Policies> rooms_{state_, transfers_};
  LookAhead<Policies> ahead_{state_, transfers_, rooms_};
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
    transfers_.bring_in(
        guard, id, *placement, true, state_.prefetcher.schedule().use_of(id), false);
  } catch (...) {
    free_block(id, block);
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
  state_.log(EventKind::allocate, id, bytes, nullptr);
  return id;
}

template <PolicySet Policies>
void SwapPager<Policies>::deallocate(BlockId id) {
  Guard guard{state_.lock};
  BlockRecord& block = state_.record(id);
  expects(!block.is_leased(), "a leased block cannot be freed: release its leases first");
  await_transition(guard, block, nullptr);
  free_block(id, block);
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
  await_transition(guard, *block, nullptr);
  if (block->is_leased()) {
    block->is_orphan = true;
    return;
  }
  free_block(id, *block);
  guard.unlock();
  state_.tell_observer();
}

template <PolicySet Policies>
void SwapPager<Policies>::free_block(BlockId id, BlockRecord& block) noexcept {
  if (block.is_resident()) {
    state_.eviction.on_erase(id);
    state_.on_range_left(block, block.last_uses(), true);
  } else if (block.has_contents) {
    --state_.swapped_out_blocks;
  }
  if constexpr (State::keeps_addresses) {
    if (block.is_parked) {
      state_.arena.release(block.range);
    }
  }
  if (block.host != HostSlotId{}) {
    state_.pool.give_back(block.host);
  }
  state_.prefetcher.on_destroy(id);
  state_.stats.allocated.subtract(block.bytes);
  state_.stats.requested_bytes.subtract(block.requested_bytes);
  state_.log(EventKind::deallocate, id, block.bytes, block.address);
  state_.blocks.erase(id);
  ++state_.releases;  // room for whoever waits for it
  state_.notify();
}

template <PolicySet Policies>
void SwapPager<Policies>::acquire_into(std::span<LeaseRequest const> requests,
                                       stream_type stream,
                                       lease_type* leases) {
  Guard guard{state_.lock};
  StreamIndex const on = state_.index_of(guard, stream);
  for (LeaseRequest const& request : requests) {  // all are known before any is held
    if (state_.record(request.id).is_lost && request.access != Access::write) {
      throw BlockLost{"the bytes of this block were lost when the device failed: write it anew"};
    }
  }
  Holds holds{*this, guard, requests};
  for (LeaseRequest const& request : requests) {
    holds.add(*state_.blocks.find(request.id));
  }
  for (LeaseRequest const& request : requests) {
    Use const use = note_access(request);
    if (is_settled(request.id)) {
      state_.eviction.on_access(request.id, use);
    } else {
      make_resident(guard, request, use, holds);
    }
  }
  judge_prefetches(guard, requests);
  order_after_earlier_uses(guard, requests, on, holds);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    leases[i] = grant(requests[i], on);
  }
  holds.keep();
  if (ahead_.is_due()) {
    ahead_.run(guard);
  }
  if constexpr (observer_type::is_enabled) {
    guard.unlock();
    state_.tell_observer();
  }
}

/// Makes later work on `on` run after whatever conflicts with the operands. All of them are resident
/// and held on return, and the lock has not been let go since that was seen.
template <PolicySet Policies>
void SwapPager<Policies>::order_after_earlier_uses(Guard& guard,
                                                   std::span<LeaseRequest const> requests,
                                                   StreamIndex on,
                                                   Holds const& group) {
  std::vector<Fence> waits;
  for (;;) {
    // An operand that is held may still move until its address is handed out.
    bool has_slept = false;
    for (LeaseRequest const& request : requests) {
      has_slept = await_transition(guard, *state_.blocks.find(request.id), &group) || has_slept;
    }
    if (has_slept) {
      continue;  // what was settled before may be on the move again
    }
    waits.clear();
    for (LeaseRequest const& request : requests) {
      BlockRecord const& block = *state_.blocks.find(request.id);
      Fence const fence = request.access == Access::read ? block.written : block.last_uses();
      if (!state_.order.is_ordered(fence, on)) {
        waits.push_back(fence);
      }
    }
    if (waits.empty()) {
      return;
    }
    typename State::Unlocked const unlocked{guard};
    for (Fence const& fence : waits) {
      state_.order.wait(on, fence);
    }
  }
}

/// Records the access, and passes on what the schedule thinks of it.
template <PolicySet Policies>
Use SwapPager<Policies>::note_access(LeaseRequest request) noexcept {
  Use const use = state_.prefetcher.on_access(request.id, request.access);
  AccessSchedule& schedule = state_.prefetcher.schedule();
  switch (schedule.take_change()) {
  case AccessSchedule::Change::none:
    break;
  case AccessSchedule::Change::lost:
    state_.eviction.on_misprediction();
    break;
  case AccessSchedule::Change::resumed:
    state_.eviction.on_step(schedule, state_.arena.capacity_bytes());
    break;
  }
  return use;
}

/// Waits for other threads' transitions of the block, and brings it in. The block is held.
template <PolicySet Policies>
void SwapPager<Policies>::make_resident(Guard& guard,
                                        LeaseRequest request,
                                        Use use,
                                        Holds const& group) {
  BlockRecord& block = *state_.blocks.find(request.id);
  await_transition(guard, block, &group);
  if (!block.is_resident()) {
    Turn const turn{state_, guard};
    await_transition(guard, block, &group);
    if (!block.is_resident()) {
      auto const placement = rooms_.take(guard, block.bytes, request.id);
      bool const discards = request.access == Access::write;
      transfers_.bring_in(guard, request.id, placement, discards, use, false);
      if (discards && block.has_contents) {
        block.filler = &group;
      }
      return;
    }
  }
  state_.eviction.on_access(request.id, use);
}

/// Waits while another thread carries the block, or has its range and not yet its lease.
/// @returns whether it had to: the lock was then let go
template <PolicySet Policies>
bool SwapPager<Policies>::await_transition(Guard& guard,
                                           BlockRecord const& block,
                                           void const* group) {
  if (!block.is_busy && (block.filler == nullptr || block.filler == group)) {
    return false;
  }
  // Whoever makes room must not wait for leases of a thread that waits for it.
  auto const me = std::this_thread::get_id();
  state_.lease_waiters.push_back(me);
  state_.notify();
  while (block.is_busy || (block.filler != nullptr && block.filler != group)) {
    state_.wait_for_change(guard);
  }
  auto& waiters = state_.lease_waiters;
  waiters.erase(std::find(waiters.begin(), waiters.end(), me));
  return true;
}

/// Turns a hold into a lease.
template <PolicySet Policies>
auto SwapPager<Policies>::grant(LeaseRequest request, StreamIndex stream) noexcept -> lease_type {
  BlockRecord& block = *state_.blocks.find(request.id);
  if (request.access != Access::read) {
    block.has_contents = true;
    block.is_host_valid = false;
    block.is_lost = false;
  }
  if (block.filler != nullptr) {
    block.filler = nullptr;
    state_.notify();
  }
  block.is_arriving = false;
  ++block.granted;
  return lease_type{*this,
                    {.block = request.id,
                     .stream = stream,
                     .access = request.access,
                     .is_sole = block.leases == 1,
                     .serial = block.lease_serial},
                    block.address,
                    block.requested_bytes};
}

/// Counts what the prefetches of these blocks were worth: done before they were needed, or not.
template <PolicySet Policies>
void SwapPager<Policies>::judge_prefetches(Guard& guard, std::span<LeaseRequest const> requests) {
  for (LeaseRequest const& request : requests) {
    BlockRecord& block = *state_.blocks.find(request.id);
    if (!block.is_prefetched) {
      continue;
    }
    block.is_prefetched = false;
    state_.prefetched_bytes -= block.bytes;
    Fence const arrival = block.written;
    bool is_done = false;
    {
      typename State::Unlocked const unlocked{guard};
      is_done = state_.order.is_complete(arrival);
    }
    ++(is_done ? state_.stats.prefetch_hits : state_.stats.prefetch_late);
  }
}

template <PolicySet Policies>
void SwapPager<Policies>::count_lease(BlockRecord& block) noexcept {
  auto const me = std::this_thread::get_id();
  if (block.leases++ == 0) {
    block.leaser = me;
    if (block.is_resident()) {
      state_.stats.leased.add(block.bytes);
    }
  } else if (block.leaser != me) {
    block.leaser = std::thread::id{};
  }
  ++block.lease_serial;
}

template <PolicySet Policies>
void SwapPager<Policies>::end_lease(BlockId id, BlockRecord& block) noexcept {
  ++state_.releases;
  if (--block.leases == 0) {
    if (block.is_resident()) {
      state_.stats.leased.subtract(block.bytes);
    }
    state_.prefetcher.on_release(id);
    if (block.is_orphan) {
      free_block(id, block);
    }
  }
  state_.notify();
}

/// Takes back a hold that did not become a lease. A range taken to be overwritten was not: the bytes
/// are still on the host and nowhere else.
template <PolicySet Policies>
void SwapPager<Policies>::undo_hold(BlockId id, Holds const& group) noexcept {
  BlockRecord& block = *state_.blocks.find(id);
  if (block.filler == &group) {
    block.filler = nullptr;
    state_.eviction.on_erase(id);
    state_.on_range_left(block, block.last_uses(), false);
    ++state_.swapped_out_blocks;
  }
  end_lease(id, block);
}

template <PolicySet Policies>
void SwapPager<Policies>::release(LeaseRecord const& lease) noexcept {
  Guard guard{state_.lock};
  BlockRecord& block = *state_.blocks.find(lease.block);
  Ticket const now = state_.order.mark(lease.stream);
  if (lease.access == Access::read) {
    block.used.add(now);
  } else if (lease.is_sole && block.lease_serial == lease.serial) {
    block.written = now;  // this stream had waited for everything before
    block.used.clear();
  } else {
    block.written.add(now);
  }
  bool const is_exact_event_wanted = state_.is_under_pressure();
  --block.granted;
  end_lease(lease.block, block);
  guard.unlock();
  if (is_exact_event_wanted) {
    try {
      state_.order.record(lease.stream);
    } catch (...) {  // NOLINT(bugprone-empty-catch): whoever waits records a later event
    }
  }
  state_.tell_observer();
}

template <PolicySet Policies>
void SwapPager<Policies>::swap_out(BlockId id) {
  Guard guard{state_.lock};
  (void)state_.record(id);
  {
    Turn const turn{state_, guard};
    BlockRecord& block = state_.record(id);
    expects(!block.is_leased(), "a leased block cannot be swapped out: release its leases first");
    await_transition(guard, block, nullptr);
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
  LeaseRequest const request{id, Access::read};
  BlockRecord& block = state_.record(id);
  await_transition(guard, block, nullptr);
  if (!block.is_resident() && block.has_contents) {
    Holds hold{*this, guard, {&request, 1}};
    hold.add(block);
    auto const& schedule = state_.prefetcher.schedule();
    make_resident(guard, request, schedule.use_of(id), hold);
  }
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
  state_.eviction.on_step(state_.prefetcher.schedule(), state_.arena.capacity_bytes());
  state_.log(EventKind::step, {}, 0, nullptr);
  guard.unlock();
  state_.tell_observer();
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
  Turn const turn{state_, guard};
  std::size_t released = 0;
  while (auto const segment = state_.arena.trim()) {
    typename State::Unlocked const unlocked{guard};
    state_.order.synchronize(segment->fence);
    state_.device.release(segment->address, segment->bytes);
    released += segment->bytes;
  }
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

}  // namespace spillway
