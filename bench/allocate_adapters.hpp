// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/fence.hpp>
#include <spillway/defrag_arena.hpp>
#include <spillway/device/sim/model_api.hpp>
#include <spillway/policy/fit/best_fit.hpp>
#include <spillway/policy/fit/segregated_fit.hpp>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <stdexcept>

#if defined(SPILLWAY_HAS_OFFSET_ALLOCATOR)
// The source file and not the header, so that the compiler can inline it as it can a header-only
// library.
#  include <offsetAllocator.cpp>
#endif
#if defined(SPILLWAY_HAS_VMA)
#  include <vk_mem_alloc.h>
#endif

namespace spillway::bench {

// Adapters for the allocators that are measured. `allocate(bytes)` returns an optional handle, and
// `free(handle)` frees its memory. Sizes are multiples of 256 bytes.

/// Measures the loop and the clock alone.
class NoAllocator {
 public:
  using Handle = std::uint32_t;

  NoAllocator(std::uint64_t /*capacity_bytes*/, std::size_t /*most_blocks*/) {}
  [[nodiscard]] std::optional<Handle> allocate(std::uint64_t bytes) {
    return static_cast<Handle>(bytes);
  }
  void free(Handle /*handle*/) {}
};

/// The arena, used as the pager does. With `Tickets` 0 the host knows that the device has finished
/// with a block when the block is freed; otherwise the block was last used on one of `Tickets`
/// streams.
template <FitPolicy Fit, unsigned Tickets>
class ArenaAdapter {
 public:
  using Handle = RangeId;

  ArenaAdapter(std::uint64_t capacity_bytes, std::size_t /*most_blocks*/)
      : device_{{.capacity_bytes = capacity_bytes}},
        arena_{device_, {.capacity_bytes = capacity_bytes, .bounce_bytes = 0}} {}

  [[nodiscard]] std::optional<Handle> allocate(std::uint64_t bytes) {
    auto const placement = arena_.try_take(bytes, BlockId{++serial_});
    return placement ? std::optional{placement->range} : std::nullopt;
  }
  void free(Handle range) {
    Fence fence;
    if constexpr (Tickets != 0) {
      ++sequence_;
      fence.add(
          Ticket{StreamIndex{static_cast<std::uint16_t>(1 + sequence_ % Tickets)}, sequence_});
    }
    arena_.give_back(range, fence);
  }

 private:
  ModelApi device_;
  DefragArena<ModelApi, Fit> arena_;
  std::uint64_t serial_ = 0;
  std::uint64_t sequence_ = 0;
};

#if defined(SPILLWAY_HAS_OFFSET_ALLOCATOR)
class OffsetAllocatorAdapter {
 public:
  using Handle = OffsetAllocator::Allocation;

  OffsetAllocatorAdapter(std::uint64_t capacity_bytes, std::size_t most_blocks)
      : allocator_{static_cast<std::uint32_t>(capacity_bytes / granule_bytes),
                   static_cast<std::uint32_t>(2 * most_blocks + 64)} {}

  [[nodiscard]] std::optional<Handle> allocate(std::uint64_t bytes) {
    Handle const handle = allocator_.allocate(static_cast<std::uint32_t>(bytes / granule_bytes));
    return handle.offset == Handle::NO_SPACE ? std::nullopt : std::optional{handle};
  }
  void free(Handle handle) { allocator_.free(handle); }

 private:
  OffsetAllocator::Allocator allocator_;
};
#endif

#if defined(SPILLWAY_HAS_VMA)
class VmaAdapter {
 public:
  using Handle = VmaVirtualAllocation;

  VmaAdapter(std::uint64_t capacity_bytes, std::size_t /*most_blocks*/) {
    VmaVirtualBlockCreateInfo info{};
    info.size = capacity_bytes;
    if (vmaCreateVirtualBlock(&info, &block_) != VK_SUCCESS) {
      throw std::runtime_error{"vmaCreateVirtualBlock failed"};
    }
  }
  VmaAdapter(VmaAdapter const&) = delete;
  VmaAdapter& operator=(VmaAdapter const&) = delete;
  ~VmaAdapter() {
    vmaClearVirtualBlock(block_);
    vmaDestroyVirtualBlock(block_);
  }

  [[nodiscard]] std::optional<Handle> allocate(std::uint64_t bytes) {
    VmaVirtualAllocationCreateInfo info{};
    info.size = bytes;
    info.alignment = granule_bytes;
    Handle handle{};
    return vmaVirtualAllocate(block_, &info, &handle, nullptr) == VK_SUCCESS ? std::optional{handle}
                                                                             : std::nullopt;
  }
  void free(Handle handle) { vmaVirtualFree(block_, handle); }

 private:
  VmaVirtualBlock block_{};
};
#endif

/// Any of these allocators behind a mutex, as in the facade of the allocator.
template <class Adapter>
class Locked {
 public:
  using Handle = typename Adapter::Handle;

  Locked(std::uint64_t capacity_bytes, std::size_t most_blocks)
      : adapter_{capacity_bytes, most_blocks} {}

  [[nodiscard]] std::optional<Handle> allocate(std::uint64_t bytes) {
    std::lock_guard const lock{mutex_};
    return adapter_.allocate(bytes);
  }
  void free(Handle handle) {
    std::lock_guard const lock{mutex_};
    adapter_.free(handle);
  }

 private:
  std::mutex mutex_;
  Adapter adapter_;
};

}  // namespace spillway::bench
