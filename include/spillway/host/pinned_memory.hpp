// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>

#include <cstddef>
#include <utility>

namespace spillway::detail {

/// Page-locked host memory from a device, freed with this object. All work on it is over by then.
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

  /// Empty when there is no room. @throws DeviceError
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

}  // namespace spillway::detail
