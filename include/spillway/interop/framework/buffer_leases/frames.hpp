// SPDX-License-Identifier: Apache-2.0
#pragma once

// How `BufferLeases` gives and frees buffers and how operations use them; buffer_leases.hpp includes it.

#include <spillway/interop/framework/buffer_leases.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace spillway::framework {

template <class Allocator>
BufferLeases<Allocator>::~BufferLeases() {
  while (all_.next != &all_) {
    (void)free(all_.next->address);
  }
}

template <class Allocator>
void* BufferLeases<Allocator>::try_allocate(std::size_t bytes, Frame* frame) {
  auto one = std::make_unique<Buffer>();
  one->bytes = bytes;
  for (;;) {
    std::uint64_t const seen = releases_.load();
    std::string failure;
    try {
      one->block = memory_->allocate(bytes);
      try {
        one->lease = memory_->acquire(one->block, Access::write, stream_);
      } catch (...) {
        memory_->abandon(one->block);
        throw;
      }
      break;
    } catch (OutOfDeviceMemory const& error) {
      failure = error.what();
    } catch (OutOfHostMemory const& error) {
      failure = error.what();
    }
    if (!make_room(frame, seen)) {
      (void)explain(failure);
      if (frame != nullptr) {
        frame->refused_bytes_ = bytes;
      }
      return nullptr;
    }
  }
  one->address = one->lease.data();
  {
    Guard const guard{mutex_};
    buffers_.emplace(one->address, one.get());
    one->previous = all_.previous;
    one->next = &all_;
    all_.previous->next = one.get();
    all_.previous = one.get();
    ++counts_.buffers;
    ++counts_.allocations;
    counts_.bytes += bytes;
    counts_.peak_bytes = std::max(counts_.peak_bytes, counts_.bytes);
    counts_.largest_bytes = std::max(counts_.largest_bytes, bytes);
    counts_.largest_ever_bytes = std::max(counts_.largest_ever_bytes, bytes);
    counts_.fixed_bytes += bytes;
    if (frame != nullptr) {
      pin(*frame, *one);
    }
  }
  note_reclaimed();
  return one.release()->address;
}

template <class Allocator>
bool BufferLeases<Allocator>::free(void* address) noexcept {
  Lease lease;
  BlockId block{};
  Buffer* grave = nullptr;
  {
    Guard const guard{mutex_};
    Buffer* const one = find(address);
    if (one == nullptr) {
      return false;
    }
    buffers_.erase(address);
    one->previous->next = one->next;
    one->next->previous = one->previous;
    --counts_.buffers;
    counts_.bytes -= one->bytes;
    counts_.fixed_bytes -= one->may_leave && !one->is_kept ? 0 : one->bytes;
    block = one->block;
    lease = std::move(one->lease);
    one->is_dead = true;
    if (one->pins == 0) {
      grave = one;
    } else {
      counts_.active_bytes -= one->bytes;
    }
  }
  lease.release();
  memory_->abandon(block);
  delete grave;
  tell_waiters();
  return true;
}

template <class Allocator>
bool BufferLeases<Allocator>::owns(void* address) const {
  Guard const guard{mutex_};
  return find(address) != nullptr;
}

template <class Allocator>
std::size_t BufferLeases<Allocator>::bytes_of(void* address) const {
  Guard const guard{mutex_};
  Buffer const* const one = find(address);
  return one == nullptr ? 0 : one->bytes;
}

/// The lock is held.
template <class Allocator>
void BufferLeases<Allocator>::pin(Frame& frame, Buffer& one) {
  frame.pins_.push_back(&one);
  if (one.pins++ == 0) {
    counts_.active_bytes += one.bytes;
    counts_.peak_active_bytes = std::max(counts_.peak_active_bytes, counts_.active_bytes);
  }
}

/// Under pressure, until no other frame that runs alone is open. Nothing is pinned yet.
template <class Allocator>
void BufferLeases<Allocator>::await_solitude(Guard& guard, Frame& frame) {
  if (!frame.runs_alone_ || !is_tight()) {
    return;
  }
  waiters_.fetch_add(1);
  frame.is_alone_ = changed_.wait_for(guard, patience_, [&] { return !is_alone_taken_; });
  waiters_.fetch_sub(1);
  is_alone_taken_ = is_alone_taken_ || frame.is_alone_;
}

template <class Allocator>
std::string BufferLeases<Allocator>::try_enter(Frame& frame, std::span<BufferUse const> uses) {
  std::vector<BufferUse> wanted;
  {
    Guard guard{mutex_};
    await_solitude(guard, frame);
    frame.is_counted_ = frame.depth_ > 0;
    active_.fetch_add(frame.is_counted_ ? 1 : 0);
    ++counts_.frames;
    for (BufferUse const& use : uses) {
      if (Buffer* const one = find(use.address)) {
        pin(frame, *one);
        if (!allows(*one, use)) {
          merge(wanted, use);
        }
      }
    }
  }
  if (wanted.empty()) {
    return {};
  }
  try {
    std::string why = attach(frame, wanted);
    if (!why.empty()) {
      leave(frame);
    }
    return why;
  } catch (...) {
    leave(frame);
    throw;
  }
}

/// Acquires what is pinned and has no lease that allows the use, all of it together.
template <class Allocator>
std::string BufferLeases<Allocator>::attach(Frame const& frame,
                                          std::vector<BufferUse> const& wanted) {
  for (;;) {
    std::vector<Buffer*> mine;
    std::vector<LeaseRequest> requests;
    bool must_await = false;
    std::uint64_t const seen = releases_.load();
    {
      Guard guard{mutex_};
      for (BufferUse const& use : wanted) {
        Buffer* const one = find(use.address);
        if (one == nullptr || allows(*one, use)) {
          continue;
        }
        if (std::exchange(one->is_arriving, true)) {
          must_await = true;
        } else {
          mine.push_back(one);
          requests.push_back({one->block, use.writes ? Access::read_write : Access::read});
        }
      }
      if (mine.empty()) {
        if (!must_await) {
          return {};
        }
        waiters_.fetch_add(1);
        changed_.wait(guard, [&] { return releases_.load() != seen; });
        waiters_.fetch_sub(1);
        continue;
      }
    }
    std::vector<Lease> leases;
    std::string failure;
    std::exception_ptr error;
    try {
      leases = memory_->acquire_all(requests, stream_);
    } catch (OutOfDeviceMemory const& e) {
      failure = e.what();
    } catch (OutOfHostMemory const& e) {
      failure = e.what();
    } catch (...) {
      error = std::current_exception();
    }
    {
      Guard const guard{mutex_};
      for (std::size_t i = 0; i < mine.size(); ++i) {
        mine[i]->is_arriving = false;
        if (!leases.empty()) {
          std::swap(mine[i]->lease, leases[i]);  // what allowed less ends below
        }
      }
    }
    bool const has_arrived = !leases.empty();
    leases.clear();
    tell_waiters();
    if (error) {
      std::rethrow_exception(error);
    }
    if (!has_arrived &&
        !make_room(&frame, seen + 1)) {  // which tells of what this thread did itself
      return explain(failure);
    }
    note_reclaimed();
  }
}

template <class Allocator>
void BufferLeases<Allocator>::show(std::span<void* const> addresses, bool is_kept) {
  std::vector<Lease> leases;  // of what nobody has in use: it may leave from now on
  Guard guard{mutex_};
  for (void* const address : addresses) {
    if (Buffer* const one = find(address)) {
      bool const was_fixed = !one->may_leave || one->is_kept;
      one->may_leave = true;
      one->is_kept = one->is_kept || is_kept;
      if (was_fixed && !one->is_kept) {
        counts_.fixed_bytes -= one->bytes;
      } else if (!was_fixed && one->is_kept) {
        counts_.fixed_bytes += one->bytes;
      }
      if (is_under_pressure_ && can_go(*one)) {
        leases.push_back(std::move(one->lease));
      }
    }
  }
  guard.unlock();
  if (!leases.empty()) {
    leases.clear();
    tell_waiters();
  }
}

template <class Allocator>
void BufferLeases<Allocator>::leave(Frame& frame) noexcept {
  std::vector<Lease> leases;
  {
    Guard const guard{mutex_};
    bool const lets_go = is_under_pressure_;
    for (Buffer* const one : frame.pins_) {
      if (--one->pins != 0) {
        continue;
      }
      if (one->is_dead) {
        delete one;
        continue;
      }
      counts_.active_bytes -= one->bytes;
      if (lets_go && can_go(*one)) {
        leases.push_back(std::move(one->lease));
      }
    }
    frame.pins_.clear();
    if (std::exchange(frame.is_alone_, false)) {
      is_alone_taken_ = false;
    }
  }
  leases.clear();
  if (std::exchange(frame.is_counted_, false)) {
    active_.fetch_sub(1);
  }
  tell_waiters();
}

}  // namespace spillway::framework
