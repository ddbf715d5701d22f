// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/pager.hpp>
#include <spillway/concepts/policy_set.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>
#include <spillway/lease.hpp>
#include <spillway/pager/blocks.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>

#include <thread>

namespace spillway::detail {

/// Counts who holds which block, and since when on which stream: all of a lease that needs neither a
/// device call nor a wait, which is all of most leases.
///
/// Every function but `close` is called under the lock, and keeps it.
template <PolicySet Policies>
class LeaseBook {
 public:
  using State = PagerState<Policies>;
  using Guard = typename State::Guard;

  explicit LeaseBook(State& state) : state_{state} {}

  [[nodiscard]] BlockRecord* at_hand(LeaseRequest request, StreamIndex on) noexcept;
  [[nodiscard]] LeaseRecord
  grant_at_once(BlockRecord& block, LeaseRequest request, StreamIndex on) noexcept;

  /// A hold: the block will not leave until `end`, and may still move.
  void count(BlockRecord& block) noexcept;
  [[nodiscard]] Use note_access(LeaseRequest request) noexcept;
  [[nodiscard]] LeaseRecord
  grant(BlockRecord& block, LeaseRequest request, StreamIndex stream) noexcept;
  /// Takes back a hold, whether it became a lease or not.
  void end(BlockId id, BlockRecord& block) noexcept;

  /// Ends a lease. Entered without the lock.
  void close(LeaseRecord const& lease) noexcept;

 private:
  State& state_;
};

/// The block if a lease on it can be given as things are, without a device call and without a way to
/// fail; null if not. Most leases are of this kind.
template <PolicySet Policies>
BlockRecord* LeaseBook<Policies>::at_hand(LeaseRequest request, StreamIndex on) noexcept {
  BlockRecord* const block = state_.blocks.find(request.id);
  if (block == nullptr || !block->is_resident()) {
    return nullptr;
  }
  bool const is_special = block->is_busy || block->filler != nullptr || block->is_orphan ||
                          block->is_lost || block->is_unproven || block->is_prefetched;
  bool const is_ordered =
      state_.order.is_ordered(block->written, on) &&
      (request.access == Access::read || state_.order.is_ordered(block->used, on));
  return !is_special && is_ordered ? block : nullptr;
}

template <PolicySet Policies>
LeaseRecord LeaseBook<Policies>::grant_at_once(BlockRecord& block,
                                               LeaseRequest request,
                                               StreamIndex on) noexcept {
  count(block);
  state_.eviction.on_access(request.id, note_access(request));
  return grant(block, request, on);
}

/// Records the access, and passes on what the schedule thinks of it.
template <PolicySet Policies>
Use LeaseBook<Policies>::note_access(LeaseRequest request) noexcept {
  Use const use = state_.prefetcher.on_access(request.id, request.access);
  AccessSchedule& schedule = state_.prefetcher.schedule();
  switch (schedule.take_change()) {
  case AccessSchedule::Change::none:
    break;
  case AccessSchedule::Change::lost:
    state_.eviction.on_misprediction();
    break;
  case AccessSchedule::Change::resumed:
    state_.eviction.on_step(schedule, state_.plannable_bytes());
    break;
  }
  return use;
}

/// Turns a hold into a lease.
template <PolicySet Policies>
LeaseRecord
LeaseBook<Policies>::grant(BlockRecord& block, LeaseRequest request, StreamIndex stream) noexcept {
  if (request.access != Access::read) {
    block.has_contents = true;
    block.is_host_valid = false;
    block.is_lost = false;
    if (request.access == Access::write) {
      block.is_unproven = false;
    }
  }
  if (block.filler != nullptr) {
    block.filler = nullptr;
    state_.notify();
  }
  block.is_arriving = false;
  ++block.granted;
  return {.block = request.id,
          .record = &block,
          .stream = stream,
          .access = request.access,
          .is_sole = block.leases == 1,
          .serial = block.lease_serial};
}

template <PolicySet Policies>
void LeaseBook<Policies>::count(BlockRecord& block) noexcept {
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
void LeaseBook<Policies>::end(BlockId id, BlockRecord& block) noexcept {
  ++state_.releases;
  if (--block.leases == 0) {
    if (block.is_resident()) {
      state_.stats.leased.subtract(block.bytes);
    }
    state_.prefetcher.on_release(id);
    if (block.is_orphan) {
      state_.free_block(id, block);
    }
  }
  state_.notify();
}

template <PolicySet Policies>
void LeaseBook<Policies>::close(LeaseRecord const& lease) noexcept {
  Guard guard{state_.lock};
  BlockRecord& block = *lease.record;
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
  end(lease.block, block);
  guard.unlock();
  if (is_exact_event_wanted) {
    try {
      state_.order.record(lease.stream);
    } catch (...) {  // NOLINT(bugprone-empty-catch): whoever waits records a later event
    }
  }
  state_.tell_observer();
}

}  // namespace spillway::detail
