// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/stats.hpp>
#include <spillway/interop/framework/buffer_leases.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>

#include <tensorflow/core/framework/allocator.h>

namespace spillway::tensorflow {

/// TensorFlow's allocator interface (`tensorflow::Allocator`) over a `BufferLeases`.
///
/// Memory that an operation allocates while it runs comes from `BufferLeases`. All other memory
/// comes from the allocator that was installed before, is not counted and is never swapped out:
/// tensors smaller than `least_bytes`, of which there are many, allocations outside of the
/// program's operations, and what an operation reads from a checkpoint or allocates for an input
/// pipeline that it runs (`pins_results`). If `Site::is_whole_device`, allocations outside of
/// operations come from `BufferLeases`, too; they stay resident until an operation returns them as
/// results.
///
/// If there is no room, the operation gets memory of the other allocator, and its device reports
/// the error when the operation returns, since some kernels, such as oneDNN's, do not check for
/// null. If `Site::is_whole_device`, it gets null, which kernels for GPUs check for.
///
/// Threads  thread-safe.
template <class Site>
class TensorAllocator final : public ::tensorflow::Allocator {
 public:
  /// Smaller tensors always come from `others`: scalars, and shapes of up to 64 dimensions.
  /// Operations that only pass larger tensors on read these, and so does code outside of
  /// operations.
  static constexpr std::size_t floor_bytes = 512;

  /// `others` is not owned and lives until the process ends, as TensorFlow's allocators do.
  TensorAllocator(::tensorflow::Allocator& others, std::size_t least_bytes)
      : others_{&others}, least_bytes_{std::max(least_bytes, floor_bytes)} {}

  /// The name under which programs look up statistics: that of the allocator installed before.
  std::string Name() override { return others_->Name(); }

  using ::tensorflow::Allocator::AllocateRaw;
  using ::tensorflow::Allocator::DeallocateRaw;

  void* AllocateRaw(std::size_t alignment, std::size_t bytes) override {
    auto* const frame = Site::frame();
    bool const is_for_others = !Site::is_whole_device && (frame == nullptr || !frame->pins_results);
    if (is_for_others || !Site::is_ready() || bytes < least_bytes_) {
      return others_->AllocateRaw(alignment, bytes);
    }
    void* p = nullptr;
    try {
      p = Site::leases().try_allocate(bytes, frame);
    } catch (std::exception const&) {  // NOLINT(bugprone-empty-catch): TensorFlow has no exceptions
    }
    return p != nullptr || Site::is_whole_device ? p : others_->AllocateRaw(alignment, bytes);
  }
  void DeallocateRaw(void* p) override {
    if (!Site::may_own(p) || !Site::leases().free(p)) {
      others_->DeallocateRaw(p);
    }
  }

  /// Statistics of the tensors that come from `BufferLeases`. Bytes in use are resident bytes.
  std::optional<::tensorflow::AllocatorStats> GetStats() override {
    if (!Site::is_ready()) {  // the device is being made, and asks how much memory it will have
      auto early = others_->GetStats().value_or(::tensorflow::AllocatorStats{});
      early.bytes_limit = static_cast<std::int64_t>(Site::limit_bytes());
      return early;
    }
    Stats const now = Site::leases().memory().stats();
    auto const counts = Site::leases().counts();
    ::tensorflow::AllocatorStats stats;
    stats.num_allocs = static_cast<std::int64_t>(counts.allocations);
    stats.bytes_in_use = static_cast<std::int64_t>(now.resident.bytes.current);
    stats.peak_bytes_in_use = static_cast<std::int64_t>(now.resident.bytes.peak);
    stats.largest_alloc_size = static_cast<std::int64_t>(counts.largest_bytes);
    stats.bytes_limit = static_cast<std::int64_t>(Site::limit_bytes());
    stats.bytes_reserved = static_cast<std::int64_t>(now.reserved_bytes);
    stats.peak_bytes_reserved = static_cast<std::int64_t>(now.peak_reserved_bytes);
    stats.largest_free_block_bytes = static_cast<std::int64_t>(now.largest_free_bytes);
    return stats;
  }
  bool ClearStats() override {
    if (Site::is_ready()) {
      Site::leases().reset_stats();
    }
    return true;
  }
  /// With CUDA's asynchronous allocator behind this one, this must be called before any memory can
  /// be allocated.
  void SetStreamAndPreallocateMemory(void* stream) override {
    others_->SetStreamAndPreallocateMemory(stream);
  }
  void SetSafeFrontier(std::uint64_t count) override { others_->SetSafeFrontier(count); }
  ::tensorflow::AllocatorMemoryType GetMemoryType() const override {
    return others_->GetMemoryType();
  }

  [[nodiscard]] std::size_t least_bytes() const noexcept { return least_bytes_; }

 private:
  ::tensorflow::Allocator* others_;
  std::size_t least_bytes_;
};

}  // namespace spillway::tensorflow
