// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/stats.hpp>
#include <spillway/host/host_tier.hpp>

#include <cstddef>
#include <cstdint>

namespace support {

/// Statistics in which no two numbers are the same.
struct CountedStats {
  static constexpr std::uint64_t first = 1000;

  CountedStats() {
    for (auto* gauge : {&stats.leased, &stats.resident, &stats.allocated}) {
      count(gauge->blocks);
      count(gauge->bytes);
    }
    count(stats.requested_bytes);
    for (auto* number : {&stats.reserved_bytes,
                         &stats.peak_reserved_bytes,
                         &stats.capacity_bytes,
                         &stats.largest_free_bytes,
                         &stats.free_bytes,
                         &stats.mispredictions,
                         &stats.prefetch_hits,
                         &stats.prefetch_late,
                         &stats.prefetch_wasted,
                         &stats.steps,
                         &stats.compaction_passes,
                         &stats.host_waits,
                         &stats.host_wait_ns,
                         &stats.out_of_memory}) {
      *number = next++;
    }
    for (auto* tally : {&stats.swap_outs, &stats.swap_ins, &stats.drops, &stats.moves}) {
      count(*tally);
    }
    for (auto& tally : stats.evictions) {
      count(tally);
    }
    for (auto& number : stats.range_sources) {
      number = next++;
    }
    for (auto& tier : host.tiers) {
      for (auto* number : {&tier.capacity_bytes,
                           &tier.reserved_bytes,
                           &tier.used_bytes,
                           &tier.peak_used_bytes,
                           &tier.largest_free_bytes,
                           &tier.slot_count,
                           &tier.numa_bound_bytes}) {
        *number = static_cast<std::size_t>(next++);
      }
    }
    host.tiers[1].is_failed = true;
    for (auto* number : {&host.failed_writes, &host.failed_reads, &host.rescued_bytes}) {
      *number = static_cast<std::size_t>(next++);
    }
    host.staging_waits = next++;
    host.is_file_direct = true;
    host.is_file_checked = true;
    host.file_calls = "io_uring";
  }

  void count(spillway::Gauge& gauge) {
    gauge.current = next++;
    gauge.peak = next++;
    gauge.total = next++;
  }
  void count(spillway::Tally& tally) {
    tally.count = next++;
    tally.bytes = next++;
  }

  std::uint64_t next = first;  // one more than the largest number that was counted
  spillway::Stats stats;
  spillway::HostPoolStats host;
};

}  // namespace support
