// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/host_mapping.hpp>
#include <spillway/host/host_slot.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host/pinned_memory.hpp>
#include <spillway/host/swap_file.hpp>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace spillway::detail {

/// What the tiers of a host pool are made of: pinned slabs, mappings, and the file.
///
/// Threads  `try_reserve` by one thread at a time; `adopt` under the pool's lock.
template <DeviceApi Device, FileIoApi FileIo>
class HostMemory {
 public:
  /// One slab that no tier has yet; gone with this object if none adopts it.
  struct Slab {
    PinnedMemory<Device> pinned;
    HostMapping mapping;
    HostSlab place;
    std::size_t numa_bound_bytes = 0;
  };

  /// @throws FileTierError
  HostMemory(Device& device, HostPoolOptions const& options, int numa_node, FileIo file_io)
      : device_{&device}, numa_node_{numa_node} {
    if (options.file_bytes > 0) {
      file_.emplace(options.file, options.file_direct_io, std::move(file_io));
    }
  }

  /// Takes `bytes` from the system for `tier`, or nothing where it has no room. Device and system
  /// calls. @throws DeviceError
  [[nodiscard]] std::optional<Slab> try_reserve(HostTier tier, std::size_t bytes) {
    Slab slab;
    switch (tier) {
    case HostTier::pinned:
      slab.pinned = PinnedMemory<Device>::try_allocate(*device_, bytes, numa_node_);
      slab.place.memory = slab.pinned.data();
      break;
    case HostTier::pageable:
      slab.mapping = HostMapping::try_map(bytes, numa_node_);
      slab.place.memory = slab.mapping.data();
      slab.numa_bound_bytes = slab.mapping.is_bound() ? bytes : 0;
      break;
    case HostTier::file:
      slab.place.file_offset = file_->size_bytes();
      if (!file_->try_extend(bytes)) {
        return std::nullopt;
      }
      return slab;
    }
    if (slab.place.memory == nullptr) {
      return std::nullopt;
    }
    return slab;
  }

  /// Makes room to `adopt` one slab. @throws std::bad_alloc
  void provide() {
    pinned_.reserve(pinned_.size() + 1);
    mappings_.reserve(mappings_.size() + 1);
  }
  void adopt(Slab slab) noexcept {
    if (slab.pinned.data() != nullptr) {
      pinned_.push_back(std::move(slab.pinned));
    } else if (slab.mapping.data() != nullptr) {
      mappings_.push_back(std::move(slab.mapping));
    }
  }

  /// The file, or null where there is no file tier.
  [[nodiscard]] SwapFile<FileIo>* file() noexcept { return file_ ? &*file_ : nullptr; }
  [[nodiscard]] SwapFile<FileIo> const* file() const noexcept { return file_ ? &*file_ : nullptr; }

 private:
  Device* device_;
  int numa_node_;
  std::vector<PinnedMemory<Device>> pinned_;
  std::vector<HostMapping> mappings_;
  std::optional<SwapFile<FileIo>> file_;
};

}  // namespace spillway::detail
