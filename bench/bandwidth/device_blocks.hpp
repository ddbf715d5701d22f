// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/core/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <random>
#include <span>
#include <vector>

#include "bandwidth.hpp"

namespace bandwidth {

/// Device memory for the blocks of one direction, gone with this object.
template <spillway::DeviceApi Device>
class DeviceBlocks {
 public:
  DeviceBlocks(
      Device& device, std::size_t block_bytes, std::size_t count, Layout layout, std::uint64_t seed)
      : device_{&device} {
    bool const is_scattered = layout == Layout::scattered || layout == Layout::apart;
    std::size_t const gap = is_scattered ? spillway::granule_bytes : 0;
    bytes_ = count * (block_bytes + gap);
    memory_ = static_cast<std::byte*>(device.try_reserve(bytes_));
    if (memory_ == nullptr) {
      throw std::bad_alloc{};
    }
    blocks_.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      blocks_.push_back(memory_ + i * (block_bytes + gap));
    }
    if (is_scattered) {
      std::shuffle(blocks_.begin(), blocks_.end(), std::mt19937_64{seed});
    }
  }
  DeviceBlocks(DeviceBlocks const&) = delete;
  DeviceBlocks& operator=(DeviceBlocks const&) = delete;
  ~DeviceBlocks() { device_->release(memory_, bytes_); }

  [[nodiscard]] std::span<std::byte* const> blocks() const noexcept { return blocks_; }
  /// At least as many bytes in one piece as all blocks have.
  [[nodiscard]] std::byte* memory() const noexcept { return memory_; }

 private:
  Device* device_;
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;
  std::vector<std::byte*> blocks_;
};

}  // namespace bandwidth
