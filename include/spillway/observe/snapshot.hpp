// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/record.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/observe/range_history.hpp>
#include <spillway/pager/block_record.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace spillway {

/// What lies where in an allocator's memory, and how it came to: plain values to look at or to write.
///
/// Sizes are rounded up to the granule unless the name says `requested`.
struct MemorySnapshot {
  /// What a piece of a segment is; a block that moves away is `leaving` once it has been freed.
  enum class State : std::uint8_t { free, allocated, leaving };

  /// A piece of a segment: a resident block or a free range.
  struct Block {
    std::uintptr_t address = 0;
    std::size_t size_bytes = 0;
    std::size_t requested_bytes = 0;  ///< 0 for a free range
    State state = State::free;
    BlockId id{};
    std::uint32_t leases = 0;
    bool is_clean = false;  ///< the host has the same bytes, or nothing was written
  };

  /// One reservation. Its blocks lie in order of address and leave nothing out.
  struct Segment {
    std::uintptr_t address = 0;
    std::size_t size_bytes = 0;
    std::vector<Block> blocks{};

    /// Of blocks in `state`, or what they asked for.
    [[nodiscard]] std::size_t bytes(State state) const noexcept { return sum(state).first; }
    [[nodiscard]] std::size_t requested_bytes(State state) const noexcept {
      return sum(state).second;
    }

   private:
    [[nodiscard]] std::pair<std::size_t, std::size_t> sum(State state) const noexcept {
      std::pair<std::size_t, std::size_t> all{};
      for (Block const& block : blocks) {
        if (block.state == state) {
          all.first += block.size_bytes;
          all.second += block.requested_bytes;
        }
      }
      return all;
    }
  };

  /// A block without a device range.
  struct Absent {
    BlockId id{};
    std::size_t size_bytes = 0;
    std::size_t requested_bytes = 0;
    Residency residency = Residency::host;  ///< or `none`: nothing was ever written
  };

  /// Something that changed what lies where. `leave` ends what `take` began.
  struct Change {
    enum class Kind : std::uint8_t { take, leave, reserve, out_of_memory };

    Kind kind{};
    BlockId id{};
    std::uintptr_t address = 0;  ///< 0 for `out_of_memory`
    std::size_t size_bytes = 0;
    std::uint64_t time_ns = 0;
    std::size_t free_bytes = 0;  ///< for `out_of_memory`: free in the reservation
  };

  int device = 0;  ///< ordinal of the device
  std::uint64_t time_ns = 0;
  std::vector<Segment> segments;  ///< in order of address
  std::vector<Absent> absent;
  /// Only what concerns the segments shown: none that has been given back to the device since.
  std::vector<Change> changes;
  Stats stats;
  HostPoolStats host;
};

namespace detail {

/// Tells records as changes of the segments of a snapshot.
class ChangeTeller {
 public:
  ChangeTeller(MemorySnapshot& snapshot, std::span<Record const> records)
      : snapshot_{snapshot}, records_{records} {}

  void tell() {
    note_segments();
    std::vector<detail::RangeChange> const changes = range_changes(records_);
    auto change = changes.begin();
    for (std::size_t i = 0; i < records_.size(); ++i) {
      Record const& record = records_[i];
      auto const address = reinterpret_cast<std::uintptr_t>(record.address);
      if (record.kind == RecordKind::grow && is_shown(address, i)) {
        add(record, {.kind = Kind::reserve, .address = address, .size_bytes = record.bytes});
      } else if (record.kind == RecordKind::out_of_memory) {
        add(record, {.kind = Kind::out_of_memory, .id = record.block, .size_bytes = record.bytes});
      }
      for (; change != changes.end() && change->record == i; ++change) {
        if (is_shown(change->address, i)) {
          add(record,
              {.kind = change->is_taken ? Kind::take : Kind::leave,
               .id = change->block,
               .address = change->address,
               .size_bytes = change->bytes});
        }
      }
    }
    tell_free_bytes();
  }

 private:
  using Kind = MemorySnapshot::Change::Kind;

  struct Reservation {
    std::size_t bytes = 0;
    std::size_t since = 0;  // position of the record that made it, 0 if none did
  };

  void note_segments() {
    for (MemorySnapshot::Segment const& segment : snapshot_.segments) {
      segments_[segment.address] = {segment.size_bytes, 0};
    }
    for (std::size_t i = 0; i < records_.size(); ++i) {
      auto const found = segments_.find(reinterpret_cast<std::uintptr_t>(records_[i].address));
      if (records_[i].kind == RecordKind::grow && found != segments_.end()) {
        found->second.since = i;
      }
    }
  }

  /// Whether `address` at that time was in a segment that is still there.
  [[nodiscard]] bool is_shown(std::uintptr_t address, std::size_t record) const {
    auto const after = segments_.upper_bound(address);
    if (after == segments_.begin()) {
      return false;
    }
    auto const& [base, segment] = *std::prev(after);
    return address - base < segment.bytes && record >= segment.since;
  }

  void add(Record const& record, MemorySnapshot::Change change) {
    change.time_ns = record.start_ns;
    snapshot_.changes.push_back(change);
  }

  /// From what is free now, backwards.
  void tell_free_bytes() {
    std::size_t free_bytes = snapshot_.stats.free_bytes;
    std::for_each(snapshot_.changes.rbegin(), snapshot_.changes.rend(), [&](auto& change) {
      switch (change.kind) {
      case Kind::take:
        free_bytes += change.size_bytes;
        break;
      case Kind::leave:
      case Kind::reserve:
        free_bytes -= std::min(free_bytes, change.size_bytes);
        break;
      case Kind::out_of_memory:
        change.free_bytes = free_bytes;
        break;
      }
    });
  }

  MemorySnapshot& snapshot_;
  std::span<Record const> records_;
  std::map<std::uintptr_t, Reservation> segments_;
};

}  // namespace detail

/// Looks at all of an allocator's memory.
///
/// @param allocator  a `DeviceAllocator`
/// @param records     what led here, in order of time, as `Timeline::records` gives them; may be empty
/// @throws std::bad_alloc
/// @threads blocks, ranges and statistics are read one after another: exact if no other thread uses
///          the allocator meanwhile, else a block that comes or goes may show in some of them only
/// @cost    O(n log n) for n blocks, free ranges and records; the allocator's lock is held for O(n)
template <class Allocator>
[[nodiscard]] MemorySnapshot snapshot(Allocator& allocator, std::span<Record const> records = {}) {
  MemorySnapshot now;
  if constexpr (NumberedApi<typename Allocator::device_type>) {
    now.device = static_cast<int>(allocator.device().ordinal());
  }
  now.time_ns = allocator.device().clock_ns();
  std::unordered_map<BlockId, MemorySnapshot::Block> resident;
  allocator.pager().for_each_block([&](BlockId id, detail::BlockRecord const& block) {
    if (block.is_resident()) {
      resident[id] = MemorySnapshot::Block{.requested_bytes = block.requested_bytes,
                                           .leases = block.leases,
                                           .is_clean = block.is_clean()};
    } else {
      now.absent.push_back({.id = id,
                            .size_bytes = block.bytes,
                            .requested_bytes = block.requested_bytes,
                            .residency = block.has_contents ? Residency::host : Residency::none});
    }
  });
  allocator.pager().for_each_range([&](RangeView const& range) {
    auto const address = reinterpret_cast<std::uintptr_t>(range.address);
    if (range.segment == now.segments.size()) {
      now.segments.push_back({.address = address});
    }
    MemorySnapshot::Block piece;
    if (range.state == RangeState::taken || range.state == RangeState::moving) {
      auto const found = resident.find(range.owner);
      piece = found != resident.end() ? found->second : piece;
      piece.state = MemorySnapshot::State::allocated;
      piece.id = range.owner;
    } else if (range.state == RangeState::leaving) {
      piece.state = MemorySnapshot::State::leaving;
    }
    piece.address = address;
    piece.size_bytes = range.size_bytes;
    now.segments.back().size_bytes += range.size_bytes;
    now.segments.back().blocks.push_back(piece);
  });
  // An arena that maps pages shows its ranges, each a segment, in another order.
  std::sort(now.segments.begin(), now.segments.end(), [](auto const& a, auto const& b) {
    return a.address < b.address;
  });
  now.stats = allocator.stats();
  now.host = allocator.host_stats();
  detail::ChangeTeller{now, records}.tell();
  return now;
}

}  // namespace spillway
