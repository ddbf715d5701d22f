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

/// Options of `install`, which replaces a framework's allocator by one of this library.
struct InstallOptions {
  /// Most bytes of device memory that tensors may take up; 0: the default of `install`
  std::size_t limit = 0;
  /// Most bytes of host memory for tensors that are swapped out; 0: the allocator's default, or
  /// that of `with_host_memory` if there is a file tier
  std::size_t host_limit = 0;
  std::string file_tier{};  ///< folder for what does not fit into host memory; empty: no file tier
  std::size_t file_bytes = 0;  ///< most bytes in the file tier; 0: the default of `install`
  /// Tensors smaller than this stay with the framework's allocator; 0: the default of `install`.
  std::size_t least_bytes = 0;

  /// Returns options for an allocator of `capacity_bytes` whose acquisitions do not wait for other
  /// threads' leases: `OperandLeases` does that. Memory is reserved in pieces when it is needed.
  /// Prefetching may use at most a third of the capacity.
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

/// Adds a default for host memory to the options of `InstallOptions::for_allocator`. If there is a
/// file tier and no limit for host memory, half of the machine's memory is used before the file. On
/// a device that shares the host's memory there is no such default: blocks are swapped out to the
/// file only.
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
