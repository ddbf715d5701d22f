// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/range.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/host/host_tier.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "released_lock.hpp"
#include <pybind11/pybind11.h>

namespace spillway_torch {

/// Adds a statistic under PyTorch's names, which distinguish a pool of small and one of large
/// allocations. Here everything counts as the large pool.
inline void
put(pybind11::dict& out, std::string const& name, char const* what, std::uint64_t value) {
  out[pybind11::str(name + ".all." + what)] = value;
  out[pybind11::str(name + ".large_pool." + what)] = value;
  out[pybind11::str(name + ".small_pool." + what)] = 0;
}

inline void put(pybind11::dict& out, std::string const& name, spillway::Gauge const& gauge) {
  put(out, name, "current", gauge.current);
  put(out, name, "peak", gauge.peak);
  put(out, name, "allocated", gauge.total);
  put(out, name, "freed", gauge.total - gauge.current);
}

template <class State>
pybind11::dict statistics(State& state) {
  using spillway::EvictionReason;
  using spillway::RangeSource;
  spillway::Stats const now = state.memory.stats();
  spillway::HostPoolStats const host = state.memory.host_stats();
  auto const counts = state.leases.counts();
  pybind11::dict out;
  put(out, "allocation", now.resident.blocks);
  put(out, "allocated_bytes", now.resident.bytes);
  put(out, "active", now.resident.blocks);
  put(out, "active_bytes", now.resident.bytes);
  put(out, "reserved_bytes", "current", now.reserved_bytes);
  put(out, "reserved_bytes", "peak", now.peak_reserved_bytes);
  std::size_t free_ranges = 0;
  state.memory.for_each_range([&](spillway::RangeView const& range) {
    free_ranges += range.state == spillway::RangeState::free ? 1U : 0U;
  });
  put(out, "inactive_split", "current", free_ranges);
  put(out, "inactive_split_bytes", "current", now.reserved_bytes - now.resident.bytes.current);
  // Memory that cannot be swapped out now. While support is off, none can be.
  spillway::Tally const allocated{now.resident.blocks.current, now.resident.bytes.current};
  spillway::Tally const pinned =
      state.leases.is_enabled() ? state.leases.unreclaimable() : allocated;
  put(out, "pinned", "current", std::min(pinned.count, allocated.count));
  put(out, "pinned_bytes", "current", std::min(pinned.bytes, allocated.bytes));
  put(out, "leased_bytes", now.leased.bytes);
  put(out, "tensor", now.allocated.blocks);  // resident or not
  put(out, "tensor_bytes", now.allocated.bytes);
  put(out, "requested_bytes", now.requested_bytes);
  auto const set = [&out](char const* key, auto value) { out[key] = value; };
  spillway::Tally const reclaimed = now.evicted({EvictionReason::pressure,
                                                 EvictionReason::watermark,
                                                 EvictionReason::prefetch,
                                                 EvictionReason::requested});
  set("reclaimed", reclaimed.count);
  set("reclaimed_bytes", reclaimed.bytes);
  set("alloc_distribution.freelist", now.ranges_from(RangeSource::free_range));
  set("alloc_distribution.cudamalloc", now.ranges_from(RangeSource::growth));
  set("alloc_distribution.reclaim_one", now.ranges_from(RangeSource::after_drop));
  set("alloc_distribution.reclaim_fragments", now.ranges_from(RangeSource::after_compaction));
  set("alloc_distribution.reclaim_all", now.ranges_from(RangeSource::after_swap_out));
  set("alloc_distribution.cudamalloc_retry", now.ranges_from(RangeSource::retry));
  if constexpr (requires { state.tensors->workspace_bytes(); }) {
    std::size_t bytes = 0;
    {
      // another thread may be making a workspace, and need the interpreter
      spillway_python::ReleasedLock const others_run;
      bytes = state.tensors->workspace_bytes();
    }
    set("cublas_workspace_bytes", bytes);
  }
  set("num_ooms", counts.out_of_memory);
  set("num_alloc_retries", counts.pressures + counts.waits + counts.regroups);
  set("regroups", counts.regroups);
  set("swap_outs", now.swap_outs.count);
  set("swap_out_bytes", now.swap_outs.bytes);
  set("swap_ins", now.swap_ins.count);
  set("swap_in_bytes", now.swap_ins.bytes);
  set("drops", now.drops.count);
  set("dropped_bytes", now.drops.bytes);
  set("spared", now.spared.count);
  set("spared_bytes", now.spared.bytes);
  set("recomputations", now.recomputations.count);
  set("recomputed_bytes", now.recomputations.bytes);
  set("recompute_ns", now.recompute_ns);
  set("moves", now.moves.count);
  set("moved_bytes", now.moves.bytes);
  set("speculative", now.evicted(EvictionReason::speculative).count);
  set("speculative_bytes", now.evicted(EvictionReason::speculative).bytes);
  set("prefetch.hits", now.prefetch_hits);
  set("prefetch.late", now.prefetch_late);
  set("prefetch.wasted", now.prefetch_wasted);
  set("mispredictions", now.mispredictions);
  set("steps", now.steps);
  set("frames", counts.frames);
  set("active_frames", counts.active_frames);
  set("enrolled", counts.entries);
  set("strays", counts.strays);
  set("waits", counts.waits);
  set("pressures", counts.pressures);
  set("compaction_passes", now.compaction_passes);
  set("host_wait_ns", now.host_wait_ns);
  set("external_fragmentation", now.external_fragmentation());
  set("largest_free_bytes", now.largest_free_bytes);
  set("free_bytes", now.free_bytes);
  set("capacity_bytes", now.capacity_bytes);
  set("host.pinned_bytes", host.tier(spillway::HostTier::pinned).used_bytes);
  set("host.pinned_peak_bytes", host.tier(spillway::HostTier::pinned).peak_used_bytes);
  set("host.pageable_bytes", host.tier(spillway::HostTier::pageable).used_bytes);
  set("host.file_bytes", host.tier(spillway::HostTier::file).used_bytes);
  set("host.encoded_raw_bytes", host.encoded_raw_bytes);
  set("host.encoded_stored_bytes", host.encoded_stored_bytes);
  set("host.codecs_given_up", host.codecs_given_up);
  return out;
}

}  // namespace spillway_torch
