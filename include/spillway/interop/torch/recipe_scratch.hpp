// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>

#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace spillway::torch {

/// Allocates the memory that operations need beside their result when recipes run them: blocks of
/// the allocator that stay leased until they are freed.
///
/// Threads  thread-safe.
template <class Allocator>
class RecipeScratch {
 public:
  using stream_type = typename Allocator::stream_type;

  /// @throws OutOfDeviceMemory, DeviceError
  /// @stream work that is enqueued on `stream` from now on may use the memory, until it is freed
  [[nodiscard]] void* allocate(Allocator& memory, std::size_t bytes, stream_type stream) {
    if (bytes == 0) {
      return nullptr;
    }
    BlockId const block = memory.allocate(bytes);
    try {
      Lease lease = memory.acquire(block, Access::write, stream);
      void* const p = lease.data();
      std::lock_guard const guard{mutex_};
      leases_.emplace(p, std::move(lease));
      return p;
    } catch (...) {
      memory.abandon(block);
      throw;
    }
  }
  /// @returns false if no such memory was allocated at that address
  bool free(Allocator& memory, void* p) noexcept {
    Lease lease;
    {
      std::lock_guard const guard{mutex_};
      auto const found = leases_.find(p);
      if (found == leases_.end()) {
        return false;
      }
      lease = std::move(found->second);
      leases_.erase(found);
    }
    BlockId const block = lease.block();
    lease.release();
    memory.abandon(block);
    return true;
  }

  // For a thread that forks: while it holds the lock, no other thread is inside of a call.

  void lock() { mutex_.lock(); }
  [[nodiscard]] bool try_lock() noexcept { return mutex_.try_lock(); }
  void unlock() noexcept { mutex_.unlock(); }

 private:
  using Lease = typename Allocator::lease_type;

  std::mutex mutex_;
  std::unordered_map<void*, Lease> leases_;
};

}  // namespace spillway::torch
