// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/stats.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/observe/json_stream.hpp>
#include <spillway/observe/names.hpp>

#include <cstddef>
#include <ostream>

namespace spillway {

inline void write_value(detail::JsonStream& json, Gauge const& gauge) {
  json.begin_object()
      .member("current", gauge.current)
      .member("peak", gauge.peak)
      .member("total", gauge.total)
      .end_object();
}

inline void write_value(detail::JsonStream& json, BlockGauge const& gauge) {
  json.begin_object().member("blocks", gauge.blocks).member("bytes", gauge.bytes).end_object();
}

inline void write_value(detail::JsonStream& json, Tally const& tally) {
  json.begin_object().member("count", tally.count).member("bytes", tally.bytes).end_object();
}

inline void write_value(detail::JsonStream& json, HostTierStats const& tier) {
  json.begin_object()
      .member("capacity_bytes", tier.capacity_bytes)
      .member("reserved_bytes", tier.reserved_bytes)
      .member("used_bytes", tier.used_bytes)
      .member("peak_used_bytes", tier.peak_used_bytes)
      .member("largest_free_bytes", tier.largest_free_bytes)
      .member("slot_count", tier.slot_count)
      .member("numa_bound_bytes", tier.numa_bound_bytes)
      .member("is_failed", tier.is_failed)
      .end_object();
}

/// Writes all statistics as one JSON object within a larger text.
///
/// Members are named as those of `Stats`; arrays become objects with a member for each reason or
/// source. Sizes are rounded up to the granule unless the name says `requested`.
inline void write_value(detail::JsonStream& json, Stats const& stats) {
  json.begin_object()
      .member("capacity_bytes", stats.capacity_bytes)
      .member("reserved_bytes", stats.reserved_bytes)
      .member("peak_reserved_bytes", stats.peak_reserved_bytes)
      .member("free_bytes", stats.free_bytes)
      .member("largest_free_bytes", stats.largest_free_bytes)
      .member("external_fragmentation", stats.external_fragmentation())
      .member("inactive_bytes", stats.inactive_bytes())
      .member("allocated", stats.allocated)
      .member("requested_bytes", stats.requested_bytes)
      .member("resident", stats.resident)
      .member("leased", stats.leased)
      .member("swap_outs", stats.swap_outs)
      .member("swap_ins", stats.swap_ins)
      .member("drops", stats.drops)
      .member("spared", stats.spared)
      .member("recomputations", stats.recomputations)
      .member("recompute_ns", stats.recompute_ns)
      .key("evictions")
      .begin_object();
  for (std::size_t i = 0; i < eviction_reason_count; ++i) {
    json.member(name_of(static_cast<EvictionReason>(i)), stats.evictions[i]);
  }
  json.end_object().key("range_sources").begin_object();
  for (std::size_t i = 0; i < range_source_count; ++i) {
    json.member(name_of(static_cast<RangeSource>(i)), stats.range_sources[i]);
  }
  json.end_object()
      .member("mispredictions", stats.mispredictions)
      .member("prefetch_hits", stats.prefetch_hits)
      .member("prefetch_late", stats.prefetch_late)
      .member("prefetch_wasted", stats.prefetch_wasted)
      .member("steps", stats.steps)
      .member("compaction_passes", stats.compaction_passes)
      .member("moves", stats.moves)
      .member("host_waits", stats.host_waits)
      .member("host_wait_ns", stats.host_wait_ns)
      .member("out_of_memory", stats.out_of_memory)
      .end_object();
}

/// Writes the host pool's statistics as one JSON object: its tiers by name, and what went wrong.
inline void write_value(detail::JsonStream& json, HostPoolStats const& stats) {
  json.begin_object().key("tiers").begin_object();
  for (std::size_t i = 0; i < host_tier_count; ++i) {
    json.member(name_of(static_cast<HostTier>(i)), stats.tiers[i]);
  }
  json.end_object()
      .member("failed_writes", stats.failed_writes)
      .member("failed_reads", stats.failed_reads)
      .member("rescued_bytes", stats.rescued_bytes)
      .member("encoded_raw_bytes", stats.encoded_raw_bytes)
      .member("encoded_stored_bytes", stats.encoded_stored_bytes)
      .member("codecs_given_up", stats.codecs_given_up)
      .member("staging_waits", stats.staging_waits)
      .member("is_file_direct", stats.is_file_direct)
      .member("is_file_checked", stats.is_file_checked)
      .member("file_calls", stats.file_calls)
      .end_object();
}

/// Writes the statistics of an allocator and of its host pool as `{"device": ..., "host": ...}`.
inline void write_json(std::ostream& out, Stats const& stats, HostPoolStats const& host) {
  detail::JsonStream json{out};
  json.begin_object().member("device", stats).member("host", host).end_object();
}

}  // namespace spillway
