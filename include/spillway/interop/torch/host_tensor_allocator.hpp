// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/interop/torch/storage_desk.hpp>

#include <atomic>
#include <cstddef>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

namespace spillway::pytorch {

/// PyTorch's CPU allocator on a `StorageDesk`.
///
/// Tensors smaller than `least_bytes` come from the allocator that was there before: they are many,
/// and moving them gains nothing. They do not count against the limit.
///
/// Threads  thread-safe.
/// Address  fixed while a lease stands behind it; see `StorageDesk`.
template <class Site>
class HostTensorAllocator final : public c10::Allocator {
 public:
  using Desk = StorageDesk<Site>;

  /// `small` is not owned and lives until the process ends, as PyTorch's allocators do.
  HostTensorAllocator(c10::Allocator& small, std::size_t least_bytes)
      : small_{&small}, least_bytes_{least_bytes} {}

  [[nodiscard]] c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes < least_bytes_.load(std::memory_order_relaxed)) {
      return small_->allocate(bytes);
    }
    return Site::desk().allocate(bytes);
  }
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return &Desk::drop_raw; }
  void copy_data(void* to, void const* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  /// Frees what `Desk::drop_raw` was given and the desk does not know.
  void drop_small(void* p) const { small_->raw_deallocate(p); }
  void set_least_bytes(std::size_t bytes) noexcept { least_bytes_ = bytes; }
  [[nodiscard]] std::size_t least_bytes() const noexcept { return least_bytes_; }

 private:
  c10::Allocator* small_;
  std::atomic<std::size_t> least_bytes_;
};

}  // namespace spillway::pytorch
