// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace spillway::torch {

/// Remembers the call stack (*context*) that each block was allocated from, for PyTorch's memory
/// snapshots. A context is kept as long as its block lives. While history is recorded, it is also
/// kept for some time after that.
///
/// Threads  thread-safe.
template <class Context>
class ContextTable {
 public:
  using Pointer = std::shared_ptr<Context>;

  /// Sets how many freed blocks keep their contexts.
  void set_limit(std::size_t most_freed) {
    std::scoped_lock const lock{mutex_};
    limit_ = most_freed;
    trim();
  }
  void add(BlockId block, Pointer context) {
    if (context) {
      std::scoped_lock const lock{mutex_};
      contexts_[block] = std::move(context);
    }
  }
  void on_freed(BlockId block) {
    std::scoped_lock const lock{mutex_};
    if (contexts_.count(block) != 0) {
      freed_.push_back(block);
      trim();
    }
  }
  /// Returns null if the block has no context.
  [[nodiscard]] Pointer find(BlockId block) const {
    std::scoped_lock const lock{mutex_};
    auto const found = contexts_.find(block);
    return found == contexts_.end() ? nullptr : found->second;
  }
  void clear() {
    std::scoped_lock const lock{mutex_};
    contexts_.clear();
    freed_.clear();
  }
  [[nodiscard]] std::size_t size() const {
    std::scoped_lock const lock{mutex_};
    return contexts_.size();
  }

  // For a thread that forks: while it holds the lock, no other thread is inside of a call.

  void lock() { mutex_.lock(); }
  [[nodiscard]] bool try_lock() noexcept { return mutex_.try_lock(); }
  void unlock() noexcept { mutex_.unlock(); }

 private:
  void trim() {
    while (freed_.size() > limit_) {
      contexts_.erase(freed_.front());
      freed_.pop_front();
    }
  }

  mutable std::mutex mutex_;  // guards what follows
  std::unordered_map<BlockId, Pointer> contexts_;
  std::deque<BlockId> freed_;
  std::size_t limit_ = 0;
};

}  // namespace spillway::torch
