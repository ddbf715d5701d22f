// SPDX-License-Identifier: Apache-2.0
#pragma once

// How `BufferLeases` makes room, and what it counts; buffer_leases.hpp includes it.

#include <spillway/interop/framework/buffer_leases.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace spillway::framework {

template <class Allocator>
void BufferLeases<Allocator>::tell_waiters() noexcept {
  releases_.fetch_add(1);
  if (waiters_.load() != 0) {
    Guard const guard{mutex_};
    changed_.notify_all();
  }
}

/// After an allocation failed: lets go what is idle, or waits for others. @returns false if neither
/// can help
template <class Allocator>
bool BufferLeases<Allocator>::make_room(Frame const* frame, std::uint64_t seen) {
  if (!is_enabled_) {
    return false;
  }
  return !is_under_pressure_ ? (start_reclaim(), true) : await_others(frame, seen);
}

/// Sleeps until something is let go. @returns false if every thread inside a frame waits, or nothing
/// happens for too long
template <class Allocator>
bool BufferLeases<Allocator>::await_others(Frame const* frame, std::uint64_t seen) {
  Guard guard{mutex_};
  int const self = frame != nullptr ? frame->depth() : 0;
  waiters_.fetch_add(1);
  starving_.fetch_add(self);
  auto const has_changed = [&] { return releases_.load() != seen; };
  auto const is_hopeless = [&] { return active_.load() - starving_.load() <= 0; };
  if (!has_changed() && !is_hopeless()) {
    ++counts_.waits;
    changed_.wait_for(guard, patience_, [&] { return has_changed() || is_hopeless(); });
  }
  bool const is_better = has_changed();
  changed_.notify_all();
  starving_.fetch_sub(self);
  waiters_.fetch_sub(1);
  return is_better;
}

template <class Allocator>
std::size_t BufferLeases<Allocator>::start_reclaim() {
  std::vector<Lease> leases;
  std::size_t bytes = 0;
  {
    Guard const guard{mutex_};
    if (!is_under_pressure_.exchange(true)) {
      ++counts_.pressures;
    }
    for (Buffer* one = all_.next; one != &all_; one = one->next) {
      if (can_go(*one)) {
        leases.push_back(std::move(one->lease));
        bytes += one->bytes;
      }
    }
  }
  leases.clear();
  tell_waiters();
  return bytes;
}

template <class Allocator>
std::size_t BufferLeases<Allocator>::reclaim() {
  (void)start_reclaim();
  std::vector<BlockId> blocks;
  {
    Guard const guard{mutex_};
    ++counts_.full_reclaims;
    for (Buffer* one = all_.next; one != &all_; one = one->next) {
      if (!one->lease) {
        blocks.push_back(one->block);
      }
    }
  }
  std::size_t const before = memory_->stats().resident.bytes.current;
  for (BlockId const block : blocks) {
    try {
      memory_->swap_out(block);
    } catch (ContractViolation const&) {  // NOLINT(bugprone-empty-catch): freed or in use by now
    }
  }
  memory_->synchronize();
  std::size_t const after = memory_->stats().resident.bytes.current;
  note_reclaimed();
  return before - std::min(before, after);
}

template <class Allocator>
void BufferLeases<Allocator>::begin_step() {
  memory_->begin_step();
  Stats const now = memory_->stats();
  std::uint64_t const evictions = now.evicted().count;
  Guard const guard{mutex_};
  bool const is_calm = evictions == std::exchange(evictions_seen_, evictions);
  if (is_calm && now.resident.bytes.current == now.allocated.bytes.current) {
    is_under_pressure_ = false;  // leases are kept again, from the next use on
  }
}

/// Bytes that are away are seen only while something may be.
template <class Allocator>
void BufferLeases<Allocator>::note_reclaimed() {
  if (!is_under_pressure_) {
    return;
  }
  Stats const now = memory_->stats();
  std::size_t const away = now.allocated.bytes.current - now.resident.bytes.current;
  Guard const guard{mutex_};
  counts_.peak_reclaimed_bytes = std::max(counts_.peak_reclaimed_bytes, away);
}

template <class Allocator>
auto BufferLeases<Allocator>::counts() const -> Counts {
  Guard const guard{mutex_};
  return counts_;
}

template <class Allocator>
void BufferLeases<Allocator>::reset_peaks() {
  memory_->reset_peak_stats();
  Guard const guard{mutex_};
  counts_.peak_bytes = counts_.bytes;
  counts_.peak_active_bytes = counts_.active_bytes;
  counts_.peak_reclaimed_bytes = 0;
  counts_.largest_bytes = 0;
  counts_.allocations = 0;
}

template <class Allocator>
auto BufferLeases<Allocator>::view(void* address) const -> View {
  View seen;
  BlockId block{};
  {
    Guard const guard{mutex_};
    Buffer const* const one = find(address);
    if (one == nullptr) {
      return seen;
    }
    block = one->block;
    seen = View{.bytes = one->bytes,
                .is_resident = static_cast<bool>(one->lease),
                .is_in_use = one->pins != 0,
                .may_leave = one->may_leave && !one->is_kept};
  }
  if (!seen.is_resident) {
    try {
      seen.is_resident = memory_->residency(block) == Residency::device;
    } catch (ContractViolation const&) {
      return {};  // freed meanwhile
    }
  }
  return seen;
}

template <class Allocator>
std::string BufferLeases<Allocator>::explain(std::string const& why) {
  Guard const guard{mutex_};
  ++counts_.out_of_memory;
  std::string text = why;
  if (!is_enabled_) {
    text += " Support for large models is off: set_lms_enabled(True).";
  }
  failure_ = text + " " + std::to_string(counts_.active_bytes) + " bytes are in use by " +
             std::to_string(active_.load()) + " operations, " +
             std::to_string(counts_.fixed_bytes) + " bytes can never leave.";
  return failure_;
}

}  // namespace spillway::framework
