// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/pager.hpp>
#include <spillway/core/types.hpp>

#include <cstddef>
#include <span>
#include <vector>

namespace spillway::test {

/// A lease with only what `BlockLease` requires.
class LeaseArchetype {
 public:
  LeaseArchetype() = default;
  LeaseArchetype(LeaseArchetype&&) = default;
  LeaseArchetype& operator=(LeaseArchetype&&) = default;

  void release() noexcept {}
  [[nodiscard]] void* data() const noexcept { return nullptr; }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return 0; }
  [[nodiscard]] BlockId block() const noexcept { return {}; }
  [[nodiscard]] Access access() const noexcept { return Access::read; }
  [[nodiscard]] bool empty() const noexcept { return true; }
};

/// A pager with only what `Pager` requires: a template that compiles with it uses nothing else. It
/// does nothing and is never run.
struct PagerArchetype {
  /// Copyable, and neither comparable nor default constructible.
  struct stream_type {
    explicit stream_type(int) {}
  };
  using lease_type = LeaseArchetype;

  explicit PagerArchetype(int) {}
  PagerArchetype(PagerArchetype const&) = delete;
  PagerArchetype& operator=(PagerArchetype const&) = delete;

  BlockId allocate(std::size_t) { return {}; }
  void deallocate(BlockId) {}
  void abandon(BlockId) noexcept {}
  lease_type acquire(BlockId, Access, stream_type) { return {}; }
  std::vector<lease_type> acquire_all(std::span<LeaseRequest const>, stream_type) { return {}; }
  void swap_out(BlockId) {}
  void swap_in(BlockId) {}
  Residency residency(BlockId) const { return Residency::none; }
  void copy_from_host_sync(void*, void const*, std::size_t, stream_type) {}
  void copy_to_host_sync(void*, void const*, std::size_t, stream_type) {}
};

}  // namespace spillway::test
