// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/interop/torch/storage_leases.hpp>

#include <cstddef>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

namespace spillway::torch {

/// PyTorch's CPU allocator on a `StorageLeases`.
///
/// Tensors smaller than `Site::least_bytes()` come from the allocator that was installed before:
/// there are many of them, and swapping them gains nothing. They do not count against the limit.
///
/// Threads  thread-safe.
/// Address  fixed while a lease stands behind it; see `StorageLeases`.
template <class Site>
class HostTensorAllocator final : public c10::Allocator {
 public:
  using Leases = StorageLeases<Site>;

  /// `small` is not owned and lives until the process ends, as PyTorch's allocators do.
  explicit HostTensorAllocator(c10::Allocator& small) : small_{&small} {}

  [[nodiscard]] c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes < Site::least_bytes()) {
      return small_->allocate(bytes);
    }
    return Site::leases().allocate(bytes);
  }
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return Leases::deleter(); }
  void copy_data(void* to, void const* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  /// Memory that `StorageLeases` does not know of, and that does not count against the limit.
  [[nodiscard]] c10::DataPtr allocate_small(std::size_t bytes) { return small_->allocate(bytes); }
  /// Frees memory that `StorageLeases` did not allocate.
  void free_small(void* p) const { small_->raw_deallocate(p); }

 private:
  c10::Allocator* small_;
};

}  // namespace spillway::torch
