// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/host/host_api.hpp>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstddef>
#include <string>

namespace spillway::framework {

/// Options of a framework's module, which puts an allocator in the place of the framework's own.
struct InstallOptions {
  std::size_t limit = 0;       ///< bytes that tensors may take up; 0: as the module sees fit
  std::size_t host_limit = 0;  ///< bytes of host memory for what is away; 0: as the allocator sees
                               ///< fit, and with a file tier as `with_host_memory` does
  std::string file_tier{};     ///< a folder for what host memory cannot hold; empty: none
  std::size_t file_bytes = 0;  ///< the most to put there
  /// Smaller tensors are left to the framework; 0: as the module sees fit.
  std::size_t least_bytes = 0;

  /// Options for an allocator of `capacity_bytes` whose users wait for each other elsewhere. It
  /// takes memory from the device when it is needed, and no more than a third of the capacity ahead
  /// of need.
  template <class Allocator>
  [[nodiscard]] typename Allocator::Options for_allocator(std::size_t capacity_bytes) const {
    typename Allocator::Options options;
    options.capacity_bytes = capacity_bytes;
    options.initial_bytes = 0;
    options.growth_bytes =
        capacity_bytes == 0
            ? 32_MiB
            : std::clamp<std::size_t>(std::bit_ceil(capacity_bytes / 64), 2_MiB, 32_MiB);
    options.paging.prefetched_part = 1.0 / 3;
    options.paging.lease_wait = std::chrono::milliseconds{0};
    options.host.pinned_bytes = host_limit;
    if (!file_tier.empty()) {
      options.host.file = file_tier;
      options.host.file_bytes = file_bytes;
    }
    return options;
  }
};

/// The options of `InstallOptions::for_allocator` for this device: half of the machine's memory
/// stands before a file if no limit was set. A device that has the host's memory swaps to the file
/// alone then.
template <DeviceApi Device, class Options>
[[nodiscard]] Options with_host_memory(Device const& device, Options options) {
  bool is_memory_shared = false;
  if constexpr (SharedMemoryApi<Device>) {
    is_memory_shared = device.shares_host_memory();
  }
  if (!options.host.file.empty() && options.host.pinned_bytes == 0 && !is_memory_shared) {
    options.host.pinned_bytes = HostApi{}.memory_info().total_bytes / 2;
  }
  return options;
}

}  // namespace spillway::framework
