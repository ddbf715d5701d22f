// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/policy_set.hpp>
#include <spillway/core/record.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/pager/block_state.hpp>
#include <spillway/pager/monitor.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <vector>

namespace spillway::detail {

/// Counts a pager's work in `Stats`, and collects records of it until they are passed to the
/// observer.
///
/// Every function except `tell_observer` is called under the lock.
template <PolicySet Policies>
class Journal {
 public:
  using Device = typename Policies::device;
  using Lock = typename Policies::lock;
  using ObserverType = typename Policies::observer;

  /// The arguments are not owned and must outlive this object.
  Journal(Device const& device, Monitor<Lock>& monitor) : device_{device}, monitor_{monitor} {}

  // Blocks are made and freed. A block for which there is no room is added, refused, never counted.
  void block_added(BlockId id, BlockRecord const& block) noexcept {
    log(RecordKind::allocate, id, block.bytes, nullptr);
  }
  void block_counted(BlockRecord const& block) noexcept {
    stats_.allocated.add(block.bytes);
    stats_.requested_bytes.add(block.requested_bytes);
  }
  void block_refused(BlockId id, BlockRecord const& block) noexcept {
    log(RecordKind::deallocate, id, block.bytes, nullptr);
  }
  void block_freed(BlockId id, BlockRecord const& block) noexcept {
    uncount(block);
    log(RecordKind::deallocate, id, block.bytes, block.address);
  }
  /// An orphan was dropped: the block stays known, without memory, until nothing is made from it.
  void orphan_dropped(BlockId id, BlockRecord const& block) noexcept {
    uncount(block);
    if (block.address != nullptr) {
      range_lost(id, block);
    }
  }
  void range_taken(BlockRecord const& block) noexcept {
    stats_.resident.add(block.bytes);
    if (block.is_leased()) {
      stats_.leased.add(block.bytes);
    }
  }
  void range_left(BlockRecord const& block) noexcept {
    stats_.resident.subtract(block.bytes);
    if (block.is_leased()) {
      stats_.leased.subtract(block.bytes);
    }
  }
  void leases_begun(BlockRecord const& block) noexcept { stats_.leased.add(block.bytes); }
  void leases_ended(BlockRecord const& block) noexcept { stats_.leased.subtract(block.bytes); }

  // Blocks are copied, moved and dropped. Call each function while the block still has the address
  // that is to be recorded.
  void made_resident(BlockId id, BlockRecord const& block) noexcept {
    log(RecordKind::make_resident, id, block.bytes, block.address);
  }
  void swapped_in(BlockId id, BlockRecord const& block, bool is_prefetch) noexcept {
    stats_.swap_ins.add(block.bytes);
    log(is_prefetch ? RecordKind::prefetch : RecordKind::swap_in, id, block.bytes, block.address);
  }
  void swapped_out(BlockId id, BlockRecord const& block) noexcept {
    stats_.swap_outs.add(block.bytes);
    log(RecordKind::swap_out, id, block.bytes, block.address);
  }
  void copied_out(BlockId id, BlockRecord const& block) noexcept {
    stats_.swap_outs.add(block.bytes);
    eviction(EvictionReason::speculative).add(block.bytes);
    log(RecordKind::copy_out, id, block.bytes, block.address);
  }
  /// `spares_copy`: the block's recipe makes its bytes again.
  void dropped(BlockId id, BlockRecord const& block, bool spares_copy) noexcept {
    stats_.drops.add(block.bytes);
    if (spares_copy) {
      stats_.spared.add(block.bytes);
    }
    range_lost(id, block);
  }
  void recomputed(BlockId id, BlockRecord const& block, std::uint64_t ns) noexcept {
    stats_.recomputations.add(block.bytes);
    stats_.recompute_ns += ns;
    log(RecordKind::recompute, id, block.bytes, block.address);
  }
  /// A range was given up whose bytes nobody needs, which is not counted as a drop.
  void range_lost(BlockId id, BlockRecord const& block) noexcept {
    log(RecordKind::drop, id, block.bytes, block.address);
  }
  void evicted(BlockRecord const& block, EvictionReason reason) noexcept {
    eviction(reason).add(block.bytes);
    last_eviction_step_ = stats_.steps + 1;
  }
  void moved(BlockId id, BlockRecord const& block) noexcept {
    stats_.moves.add(block.bytes);
    log(RecordKind::move, id, block.bytes, block.address);
  }
  void compaction_pass() noexcept { ++stats_.compaction_passes; }
  void prefetch_used(bool had_arrived) noexcept {
    ++(had_arrived ? stats_.prefetch_hits : stats_.prefetch_late);
  }
  void prefetch_wasted() noexcept { ++stats_.prefetch_wasted; }

  // Changes of the reservation, and other events.
  void grown(std::size_t bytes, void const* segment, std::size_t reserved_bytes) noexcept {
    stats_.peak_reserved_bytes =
        std::max<std::uint64_t>(stats_.peak_reserved_bytes, reserved_bytes);
    log(RecordKind::grow, {}, bytes, segment);
  }
  void trimmed(std::size_t bytes, void const* segment) noexcept {
    log(RecordKind::trim, {}, bytes, segment);
  }
  void range_found(RangeSource source) noexcept {
    ++stats_.range_sources[static_cast<std::size_t>(source)];
  }
  void out_of_memory(BlockId id, std::size_t bytes) noexcept {
    ++stats_.out_of_memory;
    log(RecordKind::out_of_memory, id, bytes, nullptr);
  }
  void refused_block() noexcept { ++stats_.out_of_memory; }
  void host_waited(std::uint64_t waits, std::uint64_t start_ns, std::uint64_t end_ns) noexcept {
    if (waits != 0) {
      stats_.host_waits += waits;
      stats_.host_wait_ns += end_ns - start_ns;
      log(Record{.kind = RecordKind::host_wait, .start_ns = start_ns, .end_ns = end_ns});
    }
  }
  void begin_step() noexcept {
    ++stats_.steps;
    log(RecordKind::step, {}, 0, nullptr);
  }

  [[nodiscard]] Stats const& stats() const noexcept { return stats_; }
  void reset_peaks(std::size_t reserved_bytes) noexcept {
    stats_.allocated.reset_peak();
    stats_.requested_bytes.reset_peak();
    stats_.resident.reset_peak();
    stats_.leased.reset_peak();
    stats_.peak_reserved_bytes = reserved_bytes;
  }
  /// Whether blocks have left in this step or the one before. Then it is worth recording an event
  /// at the end of each lease.
  [[nodiscard]] bool is_under_pressure() const noexcept {
    return last_eviction_step_ != 0 && last_eviction_step_ >= stats_.steps;
  }

  /// Hands the records to the observer. Called without the lock.
  void tell_observer() {
    if constexpr (ObserverType::is_enabled) {
      std::vector<Record> told;
      {
        std::lock_guard const guard{monitor_};
        told.swap(records_);
      }
      for (Record const& record : told) {
        observer_.on_record(record);
      }
    }
  }
  [[nodiscard]] ObserverType& observer() noexcept { return observer_; }

 private:
  void uncount(BlockRecord const& block) noexcept {
    if (!block.is_uncounted) {
      stats_.allocated.subtract(block.bytes);
      stats_.requested_bytes.subtract(block.requested_bytes);
    }
  }
  [[nodiscard]] Tally& eviction(EvictionReason reason) noexcept {
    return stats_.evictions[static_cast<std::size_t>(reason)];
  }

  void log(RecordKind kind, BlockId id, std::size_t bytes, void const* address) noexcept {
    if constexpr (ObserverType::is_enabled) {
      std::uint64_t const now = device_.clock_ns();
      log(Record{kind, id, bytes, address, now, now});
    }
  }
  void log(Record const& record) noexcept {
    if constexpr (ObserverType::is_enabled) {
      try {
        records_.push_back(record);
      } catch (std::bad_alloc const&) {  // NOLINT(bugprone-empty-catch): the observer misses one
      }
    }
  }

  Device const& device_;
  Monitor<Lock>& monitor_;
  Stats stats_;
  std::uint64_t last_eviction_step_ = 0;  // `Stats::steps` + 1 at the last eviction; 0: never
  std::vector<Record> records_;
  [[no_unique_address]] ObserverType observer_;
};

}  // namespace spillway::detail
