// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <limits>

namespace spillway {

/// How a pager makes room. Part of `AllocatorOptions`.
struct PagerOptions {
  bool swapping = true;     ///< false: a full device is an error, as without this library
  bool compaction = true;   ///< false: fragmented room counts as no room unless blocks can leave
  bool prefetching = true;  ///< false: blocks come in when they are acquired and never before
  bool poison_vacated = false;  ///< overwrite ranges that are given up, to find stale addresses
  bool early_swap_out = true;   ///< copy out ahead of need what the plan sends out anyway
  /// The most bytes one compaction pass may move.
  std::size_t compaction_budget_bytes = std::numeric_limits<std::size_t>::max();
  /// Part of the capacity above which blocks leave ahead of need, and at which that stops. 1: never.
  double high_watermark = 1.0;
  double low_watermark = 1.0;
  /// What plans are priced with: the host link one way, and reads plus writes of device memory.
  double link_bytes_per_second = 25e9;
  double device_bytes_per_second = 1.5e12;
  /// Up to so many ranges are always looked at as a whole when room has to be made. More are only
  /// where that takes no longer than to let a block leave instead and come back.
  std::size_t few_ranges = 256;
  /// How long a call that needs room may wait for leases of other threads. Zero: fail at once.
  std::chrono::milliseconds lease_wait{10'000};
};

}  // namespace spillway
