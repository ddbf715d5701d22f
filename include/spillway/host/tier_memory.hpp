// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/host_mapping.hpp>
#include <spillway/host/host_ledger.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host/swap_file.hpp>

#include <algorithm>
#include <cstddef>
#include <new>
#include <optional>
#include <utility>
#include <vector>

namespace spillway::detail {

/// Page-locked host memory of a device, freed with this object.
///
/// The owner destroys it only after all work on the memory has finished.
template <DeviceApi Device>
class PinnedMemory {
 public:
  PinnedMemory() = default;
  PinnedMemory(PinnedMemory&& other) noexcept
      : device_{other.device_},
        data_{std::exchange(other.data_, nullptr)},
        bytes_{std::exchange(other.bytes_, 0)} {}
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~PinnedMemory() {
    if (data_ != nullptr) {
      device_->free_pinned(data_, bytes_);
    }
  }

  /// Allocates memory; empty if there is no room. @throws DeviceError
  [[nodiscard]] static PinnedMemory try_allocate(Device& device, std::size_t bytes, int numa_node) {
    PinnedMemory made;
    made.device_ = &device;
    made.data_ = static_cast<std::byte*>(device.try_allocate_pinned(bytes, numa_node));
    made.bytes_ = bytes;
    return made;
  }

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return bytes_; }

 private:
  Device* device_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Owns the memory of a host pool's tiers: pinned slabs, mappings, and the file.
///
/// Threads  one thread at a time calls `try_reserve`; the others are called under the pool's lock.
template <DeviceApi Device, FileIoApi FileIo>
class TierMemory {
 public:
  /// One slab that was reserved: memory, which is freed with this object unless `adopt` takes it,
  /// or room in the file, which only `give_back` frees.
  struct Slab {
    PinnedMemory<Device> pinned;
    HostMapping mapping;
    HostSlab place;
    std::size_t bytes = 0;
  };

  /// @throws FileTierError
  TierMemory(Device& device, HostPoolOptions const& options, int numa_node, FileIo file_io)
      : device_{&device}, numa_node_{numa_node} {
    if (options.file_bytes > 0) {
      file_.emplace(
          options.file, options.file_direct_io, std::move(file_io), options.file_checksums);
    }
  }

  /// Reserves a slab of `bytes` for `tier` from the system. Makes device and system calls.
  /// @returns nothing if the system has no room. @throws DeviceError
  [[nodiscard]] std::optional<Slab> try_reserve(HostTier tier, std::size_t bytes) {
    Slab slab;
    slab.bytes = bytes;
    switch (tier) {
    case HostTier::pinned:
      slab.pinned = PinnedMemory<Device>::try_allocate(*device_, bytes, numa_node_);
      slab.place.memory = slab.pinned.data();
      break;
    case HostTier::pageable:
      slab.mapping = HostMapping::try_map(bytes, numa_node_);
      slab.place.memory = slab.mapping.data();
      slab.place.numa_bound_bytes = slab.mapping.is_bound() ? bytes : 0;
      break;
    case HostTier::file:
      if (auto const offset = file_->try_reserve(bytes)) {
        slab.place.file_offset = *offset;
        return slab;
      }
      return std::nullopt;
    }
    return slab.place.memory != nullptr ? std::optional{std::move(slab)} : std::nullopt;
  }

  /// Makes sure that the next `adopt` cannot fail. @throws std::bad_alloc
  void prepare_adopt() { slabs_.reserve(slabs_.size() + 1); }
  /// Takes over the memory of a slab that was added to the ledger.
  void adopt(Slab slab) noexcept { slabs_.push_back(std::move(slab)); }
  /// Hands out an adopted slab that was removed from the ledger.
  [[nodiscard]] Slab release(HostSlab const& place) noexcept {
    auto const at = std::find_if(slabs_.begin(), slabs_.end(), [&](Slab const& slab) {
      return slab.place.memory == place.memory && slab.place.file_offset == place.file_offset;
    });
    SPILLWAY_ASSERT(at != slabs_.end());
    Slab gone = std::move(*at);
    std::swap(*at, slabs_.back());
    slabs_.pop_back();
    return gone;
  }
  /// Frees a slab that is not adopted. Makes device and system calls.
  void give_back(Slab slab) noexcept {
    if (slab.place.memory == nullptr) {
      try {
        file_->release(slab.place.file_offset, slab.bytes);
      } catch (std::bad_alloc const&) {  // NOLINT(bugprone-empty-catch): the file keeps the room
      }
    }
  }
  /// Returns the number of adopted slabs.
  [[nodiscard]] std::size_t slab_count() const noexcept { return slabs_.size(); }

  /// The file, or null where there is no file tier.
  [[nodiscard]] SwapFile<FileIo>* file() noexcept { return file_ ? &*file_ : nullptr; }
  [[nodiscard]] SwapFile<FileIo> const* file() const noexcept { return file_ ? &*file_ : nullptr; }

 private:
  Device* device_;
  int numa_node_;
  std::vector<Slab> slabs_;
  std::optional<SwapFile<FileIo>> file_;
};

}  // namespace spillway::detail
