// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/pager.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>
#include <spillway/stream.hpp>

#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdio>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

namespace spillway {

/// An allocator that can keep a block leased for as long as a caller wants; `DeviceAllocator` is
/// one.
// clang-format off
template <class A>
concept LeasingAllocator =
    Pager<A> && DeviceApi<typename A::device_type> &&
    requires(A a, typename A::stream_type s) {
      { a.device()         } -> std::same_as<typename A::device_type&>;
      { a.mark(s)          } -> std::same_as<Fence>;
      { a.retire_stream(s) } -> std::same_as<void>;
    };
// clang-format on

/// Gives plain device addresses, for code that cannot handle blocks and leases, such as libraries
/// that take raw pointers.
///
/// Each allocation is a block under a lease that lasts until it is deallocated. The block can be
/// neither swapped out nor moved, so less of the device is left for everything else. Use it for
/// scratch memory and for data that is in use all the time, not for data that should leave the
/// device while it is idle.
///
/// Units    bytes.
/// Threads  thread-safe.
/// Streams  stream-ordered: memory may be used by work on the stream it was allocated on, and on
///          streams that are ordered after it. The `_sync` calls are for callers without a stream.
///          A stream must be retired (`retire_stream`) before it is destroyed. Memory that was
///          allocated on it may be deallocated later, on another stream.
/// Address  fixed from `allocate` to `deallocate`.
template <LeasingAllocator Allocator>
class LeasedMemory {
 public:
  using allocator_type = Allocator;
  using stream_type = typename Allocator::stream_type;

  static constexpr bool is_thread_safe = true;

  /// `allocator` is not owned and must outlive this object.
  explicit LeasedMemory(Allocator& allocator) : allocator_{&allocator} {}
  LeasedMemory(LeasedMemory const&) = delete;
  LeasedMemory& operator=(LeasedMemory const&) = delete;

  /// Deallocates what has not been deallocated yet. Each block can be reused after the work that is
  /// on the stream it was allocated on.
  ~LeasedMemory();

  /// @param size_bytes  0 gives null
  /// @param alignment   a power of two; above 256 it costs `alignment` - 256 bytes more
  /// @throws as `DeviceAllocator::acquire`, and ContractViolation if `alignment` is no power of two
  ///         or the sum of size and alignment overflows; nothing is left behind
  /// @stream the memory may be used by work that is enqueued on `stream` from now on; does not wait
  [[nodiscard]] void* allocate(std::size_t size_bytes, std::size_t alignment, stream_type stream);

  /// As `allocate`, but work on any stream may use the memory at once.
  ///
  /// @stream none of the caller's; waits on the host until all earlier uses have finished
  [[nodiscard]] void* allocate_sync(std::size_t size_bytes, std::size_t alignment);

  /// @param memory  from `allocate` or `allocate_sync`, or null
  /// @throws ContractViolation naming the address if it is not allocated, and DeviceError if a
  ///         stream other than the one it was allocated on cannot be recorded; then nothing has
  ///         changed
  /// @stream the memory is used by others after the work that is on `stream` now; does not wait
  void deallocate(void* memory, stream_type stream);

  /// As `deallocate`, for memory that no unfinished work uses, except for work on the stream it was
  /// allocated on.
  ///
  /// @throws ContractViolation naming the address if it is not allocated
  void deallocate_sync(void* memory);

  [[nodiscard]] std::size_t allocation_count() const;
  [[nodiscard]] Allocator& allocator() const noexcept { return *allocator_; }

 private:
  using Lease = typename Allocator::lease_type;

  struct Allocation {
    BlockId block{};
    Lease lease;
    StreamIndex stream = StreamIndex::none;
  };

  /// `call` is the name of the public call, for errors.
  [[nodiscard]] void* take_block(std::size_t size_bytes,
                                 std::size_t alignment,
                                 stream_type stream,
                                 char const* call = __builtin_FUNCTION());
  [[nodiscard]] stream_type sync_stream();
  [[nodiscard]] StreamIndex index_of(stream_type stream);
  [[nodiscard]] Allocation take(void* memory, char const* call = __builtin_FUNCTION());
  void free(Allocation& allocation) noexcept;
  [[nodiscard]] static ContractViolation not_allocated(void const* memory,
                                                       char const* call = __builtin_FUNCTION());

  Allocator* allocator_;
  mutable std::mutex mutex_;  // guards what follows; never held across a call of the allocator
  std::unordered_map<void*, Allocation> allocations_;
  std::optional<Stream<Allocator>> sync_stream_;  // made by the first `allocate_sync`
};

template <LeasingAllocator Allocator>
LeasedMemory<Allocator>::~LeasedMemory() {
  for (auto& [memory, allocation] : allocations_) {
    free(allocation);
  }
}

template <LeasingAllocator Allocator>
void* LeasedMemory<Allocator>::allocate(std::size_t size_bytes,
                                        std::size_t alignment,
                                        stream_type stream) {
  return take_block(size_bytes, alignment, stream);
}

template <LeasingAllocator Allocator>
void* LeasedMemory<Allocator>::take_block(std::size_t size_bytes,
                                          std::size_t alignment,
                                          stream_type stream,
                                          char const* call) {
  expects(std::has_single_bit(alignment), "alignment must be a power of two", {}, call);
  if (size_bytes == 0) {
    return nullptr;
  }
  std::size_t const slack = alignment > granule_bytes ? alignment - granule_bytes : 0;
  expects(size_bytes <= std::numeric_limits<std::size_t>::max() - slack,
          "size and alignment overflow",
          {},
          call);
  Allocation allocation{.block = allocator_->allocate(size_bytes + slack), .lease = {}};
  try {
    allocation.lease = allocator_->acquire(allocation.block, Access::write, stream);
    allocation.stream = index_of(stream);
    void* memory = allocation.lease.data();
    std::size_t room = size_bytes + slack;
    (void)std::align(alignment, size_bytes, memory, room);
    std::scoped_lock const lock{mutex_};
    allocations_.emplace(memory, std::move(allocation));
    return memory;
  } catch (...) {
    free(allocation);
    throw;
  }
}

template <LeasingAllocator Allocator>
void* LeasedMemory<Allocator>::allocate_sync(std::size_t size_bytes, std::size_t alignment) {
  stream_type const stream = sync_stream();
  void* const memory = take_block(size_bytes, alignment, stream);
  try {
    allocator_->device().synchronize(stream);
  } catch (...) {
    deallocate_sync(memory);
    throw;
  }
  return memory;
}

template <LeasingAllocator Allocator>
void LeasedMemory<Allocator>::deallocate(void* memory, stream_type stream) {
  if (memory == nullptr) {
    return;
  }
  StreamIndex const on = index_of(stream);
  BlockId block{};
  bool is_same_stream = false;
  {
    std::scoped_lock const lock{mutex_};
    auto const found = allocations_.find(memory);
    if (found == allocations_.end()) {
      throw not_allocated(memory);
    }
    block = found->second.block;
    is_same_stream = found->second.stream == on;
  }
  // A second lease records that work on `stream` has used the memory, too.
  Lease last_use;
  if (!is_same_stream) {
    last_use = allocator_->acquire(block, Access::read, stream);
  }
  Allocation allocation = take(memory);
  last_use.release();
  free(allocation);
}

template <LeasingAllocator Allocator>
void LeasedMemory<Allocator>::deallocate_sync(void* memory) {
  if (memory != nullptr) {
    Allocation allocation = take(memory);
    free(allocation);
  }
}

template <LeasingAllocator Allocator>
std::size_t LeasedMemory<Allocator>::allocation_count() const {
  std::scoped_lock const lock{mutex_};
  return allocations_.size();
}

/// Returns the stream that `allocate_sync` uses. Nothing is enqueued on it except waits for the
/// earlier uses of the memory that `allocate_sync` returns.
template <LeasingAllocator Allocator>
auto LeasedMemory<Allocator>::sync_stream() -> stream_type {
  {
    std::scoped_lock const lock{mutex_};
    if (sync_stream_) {
      return *sync_stream_;
    }
  }
  // Created and destroyed without the lock. If another thread has been faster, its stream is used.
  std::optional fresh{Stream<Allocator>{*allocator_}};
  std::scoped_lock const lock{mutex_};
  if (!sync_stream_) {
    sync_stream_.swap(fresh);
  }
  return *sync_stream_;
}

/// Returns the number by which the allocator knows `stream`. Unlike the handle, it tells a stream
/// from one that was retired and destroyed, whose handle the device may have given to this one.
template <LeasingAllocator Allocator>
StreamIndex LeasedMemory<Allocator>::index_of(stream_type stream) {
  return allocator_->mark(stream).tickets().front().stream();
}

template <LeasingAllocator Allocator>
auto LeasedMemory<Allocator>::take(void* memory, char const* call) -> Allocation {
  std::scoped_lock const lock{mutex_};
  auto const found = allocations_.find(memory);
  if (found == allocations_.end()) {
    throw not_allocated(memory, call);
  }
  Allocation allocation = std::move(found->second);
  allocations_.erase(found);
  return allocation;
}

template <LeasingAllocator Allocator>
void LeasedMemory<Allocator>::free(Allocation& allocation) noexcept {
  allocation.lease.release();
  allocator_->abandon(allocation.block);
}

template <LeasingAllocator Allocator>
ContractViolation LeasedMemory<Allocator>::not_allocated(void const* memory, char const* call) {
  std::array<char, 32> address{};
  (void)std::snprintf(address.data(), address.size(), "%p", memory);
  return ContractViolation{
      detail::head_of_error({}, call) + address.data() +
      " is not allocated here: it was deallocated before or comes from elsewhere"};
}

}  // namespace spillway
