// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>

namespace spillway {

/// What a simulated device is like. Rates of 0 mean "as fast as it goes" (no time on a virtual clock).
struct SimOptions {
  std::size_t capacity_bytes = 1_GiB;  ///< reservations and physical memory together
  std::size_t pinned_capacity_bytes = std::numeric_limits<std::size_t>::max();
  int numa_node = -1;
  std::size_t granularity_bytes = 64_KiB;   ///< of mappings; a power of two, a multiple of a page
  std::uint64_t link_bytes_per_second = 0;  ///< of each direction; the two do not slow each other
  std::uint64_t on_device_bytes_per_second = 0;  ///< bytes copied, each of them read and written
  std::uint64_t copy_latency_ns = 0;             ///< added to each copy and fill
  bool poison = true;                ///< fill memory that is handed out, where bytes are held
  unsigned char poison_byte = 0xFF;  ///< reads as NaN in every floating-point type
  std::size_t poison_limit_bytes =
      64_MiB;               ///< larger pieces are not poisoned: they would be backed
  bool checked = true;      ///< look up both ranges of every copy and fill
  bool check_order = true;  ///< stepped devices only: refuse work that races with earlier work
};

}  // namespace spillway
