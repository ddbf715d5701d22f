// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/types.hpp>

#include <cstddef>
#include <vector>

namespace spillway::detail {

/// Collects copies and enqueues them together, in one call if the device takes batches.
///
/// `HostTransfers` fills one for each batch of transfers, `enqueue_moves` one for each batch of
/// moves.
///
/// Threads  thread-compatible.
template <class = Lazily>
class BasicCopyBatch {
 public:
  /// Adds a copy, which may run in any order with the others. `may_join` says that its two ranges
  /// are in the same reservations as those of the copy added before; if both are adjacent, the two
  /// copies become one.
  ///
  /// @throws std::bad_alloc, with nothing added
  void add(std::byte* to, std::byte const* from, std::size_t bytes, bool may_join) {
    if (may_join && !to_.empty() && static_cast<std::byte*>(to_.back()) + sizes_.back() == to &&
        static_cast<std::byte const*>(from_.back()) + sizes_.back() == from) {
      sizes_.back() += bytes;
      return;
    }
    to_.push_back(to);
    try {
      from_.push_back(from);
      sizes_.push_back(bytes);
    } catch (...) {
      from_.resize(sizes_.size());
      to_.pop_back();
      throw;
    }
  }

  /// Enqueues the copies, one by one if the device does not take batches.
  ///
  /// @throws  DeviceError. A single copy was not enqueued then; of several any may have been
  template <DeviceApi Device>
  void enqueue(Device& device, CopyKind kind, typename Device::stream_type stream) const {
    if constexpr (BatchCopyApi<Device>) {
      if (to_.size() > 1) {
        device.copy_batch(to_, from_, sizes_, kind, stream);
        return;
      }
    }
    for (std::size_t i = 0; i < to_.size(); ++i) {
      device.copy(to_[i], from_[i], sizes_[i], kind, stream);
    }
  }

  void clear() noexcept {
    to_.clear();
    from_.clear();
    sizes_.clear();
  }
  [[nodiscard]] std::size_t size() const noexcept { return to_.size(); }

 private:
  std::vector<void*> to_;
  std::vector<void const*> from_;
  std::vector<std::size_t> sizes_;
};

using CopyBatch = BasicCopyBatch<>;

SPILLWAY_COMPILED_PART(class BasicCopyBatch<>);

}  // namespace spillway::detail
