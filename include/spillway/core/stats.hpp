// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace spillway {

/// Why a block left the device.
enum class EvictionReason : std::uint8_t {
  pressure,     ///< room was needed at once
  watermark,    ///< the high watermark was passed
  speculative,  ///< the recorded schedule says the block is not needed soon
  prefetch,     ///< room for a block that is needed sooner
  requested     ///< the caller asked: `swap_out`
};
inline constexpr std::size_t eviction_reason_count = 5;

/// Where the device range of a block came from.
enum class RangeSource : std::uint8_t {
  free_range,        ///< a free range fitted at once
  growth,            ///< after the reservation grew
  after_drop,        ///< after clean blocks were dropped
  after_swap_out,    ///< after blocks were swapped out
  after_compaction,  ///< after blocks were moved together
  retry              ///< after waiting for leases of other threads
};
inline constexpr std::size_t range_source_count = 6;

/// A quantity that goes up and down: what it is now, the most it ever was, and all that was added.
struct Gauge {
  std::uint64_t current = 0;
  std::uint64_t peak = 0;
  std::uint64_t total = 0;  ///< sum of everything ever added

  void add(std::uint64_t n) noexcept {
    current += n;
    total += n;
    peak = std::max(peak, current);
  }
  void subtract(std::uint64_t n) noexcept { current -= n; }
  void reset_peak() noexcept { peak = current; }

  friend bool operator==(Gauge const&, Gauge const&) noexcept = default;
};

/// A quantity counted in blocks and in bytes.
struct BlockGauge {
  Gauge blocks;
  Gauge bytes;

  void add(std::uint64_t n) noexcept {
    blocks.add(1);
    bytes.add(n);
  }
  void subtract(std::uint64_t n) noexcept {
    blocks.subtract(1);
    bytes.subtract(n);
  }
  void reset_peak() noexcept {
    blocks.reset_peak();
    bytes.reset_peak();
  }

  friend bool operator==(BlockGauge const&, BlockGauge const&) noexcept = default;
};

/// Counts how often something happened, and to how many bytes.
struct Tally {
  std::uint64_t count = 0;
  std::uint64_t bytes = 0;

  void add(std::uint64_t n) noexcept {
    ++count;
    bytes += n;
  }
  void add(Tally const& other) noexcept {
    count += other.count;
    bytes += other.bytes;
  }

  friend bool operator==(Tally const&, Tally const&) noexcept = default;
};

/// Counts of an allocator's work since it was made. A plain value: copy it and compare two of them;
/// `summary` and `write_json` print it.
///
/// Bytes are rounded up to the arena's granule unless the name says `requested`.
struct Stats {
  BlockGauge allocated;                   ///< blocks that exist, wherever their bytes are
  Gauge requested_bytes;                  ///< the same blocks, before rounding
  BlockGauge resident;                    ///< blocks with a device range
  BlockGauge leased;                      ///< resident blocks with at least one lease
  std::uint64_t reserved_bytes = 0;       ///< taken from the device
  std::uint64_t peak_reserved_bytes = 0;  ///< the most that were reserved at once
  std::uint64_t capacity_bytes = 0;       ///< the most that may be reserved
  std::uint64_t free_bytes = 0;           ///< free inside the reservation
  std::uint64_t largest_free_bytes = 0;   ///< the largest free range

  Tally swap_outs;  ///< copies to the host pool, with or without giving up the range
  Tally swap_ins;   ///< copies back
  /// Ranges given up without a copy: the host copy was valid, nothing was written, or a recipe
  /// makes the bytes again.
  Tally drops;
  Tally spared;          ///< drops of blocks that a recipe makes again, which saved a copy
  Tally recomputations;  ///< blocks whose bytes were made again by their recipes
  /// The time that the recomputations took: as stated by the program, or as measured on devices
  /// whose work runs on the calling thread.
  std::uint64_t recompute_ns = 0;
  std::array<Tally, eviction_reason_count> evictions{};           ///< by `EvictionReason`
  std::array<std::uint64_t, range_source_count> range_sources{};  ///< by `RangeSource`

  std::uint64_t mispredictions = 0;   ///< times the recorded schedule was wrong
  std::uint64_t prefetch_hits = 0;    ///< prefetched blocks whose copy had finished at first use
  std::uint64_t prefetch_late = 0;    ///< prefetched blocks whose copy was in flight at first use
  std::uint64_t prefetch_wasted = 0;  ///< prefetched blocks that left or died unused
  std::uint64_t steps = 0;            ///< calls of `begin_step`

  std::uint64_t compaction_passes = 0;  ///< passes that moved blocks, or tried to
  Tally moves;                          ///< blocks moved inside the device

  std::uint64_t host_waits = 0;  ///< times a call waited on the host for the device or for a lease
  std::uint64_t host_wait_ns = 0;   ///< how long these waits took together, on the device's clock
  std::uint64_t out_of_memory = 0;  ///< `OutOfDeviceMemory` thrown

  [[nodiscard]] std::uint64_t inactive_bytes() const noexcept {
    return resident.bytes.current - leased.bytes.current;
  }
  /// 0 if nothing is free or all free bytes are in one piece; close to 1 if they are in many small
  /// pieces.
  [[nodiscard]] double external_fragmentation() const noexcept {
    return free_bytes == 0
               ? 0.0
               : 1.0 - static_cast<double>(largest_free_bytes) / static_cast<double>(free_bytes);
  }
  [[nodiscard]] Tally const& evicted(EvictionReason reason) const noexcept {
    return evictions[static_cast<std::size_t>(reason)];
  }
  /// The blocks that were evicted for any of these reasons.
  [[nodiscard]] Tally evicted(std::initializer_list<EvictionReason> reasons) const noexcept {
    Tally sum;
    for (EvictionReason const reason : reasons) {
      sum.add(evicted(reason));
    }
    return sum;
  }
  /// All blocks that were evicted.
  [[nodiscard]] Tally evicted() const noexcept {
    Tally sum;
    for (Tally const& one : evictions) {
      sum.add(one);
    }
    return sum;
  }
  [[nodiscard]] std::uint64_t ranges_from(RangeSource source) const noexcept {
    return range_sources[static_cast<std::size_t>(source)];
  }
};

}  // namespace spillway
