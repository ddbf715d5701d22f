// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/record.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/observe/json_stream.hpp>
#include <spillway/observe/names.hpp>
#include <spillway/observe/range_history.hpp>
#include <spillway/observe/stats_json.hpp>
#include <spillway/pager/block_state.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <ostream>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace spillway {

/// The layout of an allocator's memory, and the changes that led to it. `snapshot` makes one, and
/// `write_json` writes it for viewers. It consists of plain values.
///
/// Sizes are rounded up to the granule unless the name says `requested`.
struct MemorySnapshot {
  /// The state of a part of a segment. A block that was freed while it is being moved is `leaving`.
  enum class State : std::uint8_t { free, allocated, leaving };

  /// A piece of a segment: a resident block or a free range.
  struct Block {
    std::uintptr_t address = 0;
    std::size_t size_bytes = 0;
    std::size_t requested_bytes = 0;  ///< 0 for a free range
    State state = State::free;
    BlockId id{};
    std::uint32_t leases = 0;
    bool is_clean = false;  ///< the host has the same bytes, or the block was never written
  };

  /// One reservation. Its blocks and free ranges are in order of address and cover all of it.
  struct Segment {
    std::uintptr_t address = 0;
    std::size_t size_bytes = 0;
    std::vector<Block> blocks{};

    /// Sum of the sizes of blocks in `state`; the second function sums what was requested.
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

  /// A block that is not resident.
  struct Absent {
    BlockId id{};
    std::size_t size_bytes = 0;
    std::size_t requested_bytes = 0;
    Residency residency = Residency::host;  ///< or `none`: never written, or dropped
  };

  /// A change of the layout. A `leave` ends what a `take` has begun.
  struct Change {
    enum class Kind : std::uint8_t { take, leave, reserve, out_of_memory };

    Kind kind{};
    BlockId id{};
    std::uintptr_t address = 0;  ///< 0 for `out_of_memory`
    std::size_t size_bytes = 0;
    std::uint64_t time_ns = 0;
    /// Only for `out_of_memory`: bytes that were free in the reservation
    std::size_t free_bytes = 0;
  };

  int device = 0;  ///< ordinal of the device
  std::uint64_t time_ns = 0;
  std::vector<Segment> segments;  ///< in order of address
  std::vector<Absent> absent;
  /// Only changes in the segments above; none in memory that has been given back to the device
  /// since.
  std::vector<Change> changes;
  Stats stats;
  HostPoolStats host;
};

namespace detail {

/// Makes the `changes` of a snapshot from records: which blocks came and went in each of its
/// segments.
template <class = Lazily>
class BasicSnapshotChanges {
 public:
  BasicSnapshotChanges(MemorySnapshot& snapshot, std::span<Record const> records)
      : snapshot_{snapshot}, records_{records} {}

  void fill() {
    find_segments();
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
    count_free_bytes();
  }

 private:
  using Kind = MemorySnapshot::Change::Kind;

  struct Reservation {
    std::size_t bytes = 0;
    std::size_t since = 0;  // position of the record that made the segment; 0 if none did
  };

  void find_segments() {
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

  /// Whether `address` was in a segment that still exists, when that record was made.
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

  /// Computes the free bytes at each `out_of_memory`, backwards from what is free now.
  void count_free_bytes() {
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

using SnapshotChanges = BasicSnapshotChanges<>;

}  // namespace detail

/// Makes a snapshot of all of an allocator's memory.
///
/// @param allocator  a `DeviceAllocator`
/// @param records    the records so far, in order of time, as `Timeline::records` returns them; may
///                   be empty
/// @throws std::bad_alloc
/// @threads blocks, ranges and statistics are read one after another. If other threads use the
///          allocator meanwhile, a block that comes or goes may be missing in some of them
/// @cost    O(n log n) for n blocks, free ranges and records; the allocator's lock is held for O(n)
template <class Allocator>
[[nodiscard]] MemorySnapshot snapshot(Allocator& allocator, std::span<Record const> records = {}) {
  MemorySnapshot now;
  if constexpr (NumberedApi<typename Allocator::device_type>) {
    now.device = static_cast<int>(allocator.device().ordinal());
  }
  now.time_ns = allocator.device().clock_ns();
  std::unordered_map<BlockId, MemorySnapshot::Block> resident;
  allocator.for_each_block([&](BlockId id, detail::BlockRecord const& block) {
    if (block.is_resident()) {
      resident[id] = MemorySnapshot::Block{.requested_bytes = block.requested_bytes,
                                           .leases = block.leases,
                                           .is_clean = block.is_clean()};
    } else if (!block.is_uncounted) {
      bool const is_on_host = block.has_contents() && !block.needs_recipe();
      now.absent.push_back({.id = id,
                            .size_bytes = block.bytes,
                            .requested_bytes = block.requested_bytes,
                            .residency = is_on_host ? Residency::host : Residency::none});
    }
  });
  allocator.for_each_range([&](RangeView const& range) {
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
  // If the arena maps pages, its segments are not in order of address.
  std::sort(now.segments.begin(), now.segments.end(), [](auto const& a, auto const& b) {
    return a.address < b.address;
  });
  now.stats = allocator.stats();
  now.host = allocator.host_stats();
  detail::SnapshotChanges{now, records}.fill();
  return now;
}

namespace detail {

/// Writes a snapshot as `write_json` says.
template <class = Lazily>
class BasicSnapshotWriter {
 public:
  explicit BasicSnapshotWriter(std::ostream& out) : json_{out} {}

  void write(MemorySnapshot const& snapshot) {
    json_.begin_object().key("segments").begin_array();
    for (MemorySnapshot::Segment const& segment : snapshot.segments) {
      write(segment, snapshot.device);
    }
    json_.new_line().end_array().key("device_traces").begin_array();
    for (int i = 0; i < snapshot.device; ++i) {
      json_.begin_array().end_array();
    }
    json_.begin_array();
    for (MemorySnapshot::Change const& change : snapshot.changes) {
      write(change);
    }
    write_entry("snapshot", 0, 0, snapshot.time_ns);
    json_.new_line().end_array().end_array();
    json_.key("allocator_settings").begin_object().end_object();
    json_.key("external_annotations").begin_array().end_array();
    json_.new_line().key("spillway").begin_object().key("absent").begin_array();
    for (MemorySnapshot::Absent const& block : snapshot.absent) {
      json_.new_line()
          .begin_object()
          .member("id", static_cast<std::uint64_t>(block.id))
          .member("size", block.size_bytes)
          .member("requested_size", block.requested_bytes)
          .member("residency", name_of(block.residency))
          .end_object();
    }
    json_.end_array()
        .new_line()
        .member("stats", snapshot.stats)
        .new_line()
        .member("host", snapshot.host)
        .end_object()
        .end_object();
  }

 private:
  using State = MemorySnapshot::State;
  using Kind = MemorySnapshot::Change::Kind;

  static char const* name_of_state(State state) noexcept {
    return state == State::free        ? "inactive"
           : state == State::allocated ? "active_allocated"
                                       : "active_pending_free";
  }

  void write(MemorySnapshot::Segment const& segment, int device) {
    std::size_t const allocated = segment.bytes(State::allocated);
    json_.new_line()
        .begin_object()
        .member("device", device)
        .member("address", segment.address)
        .member("total_size", segment.size_bytes)
        .member("allocated_size", allocated)
        .member("active_size", allocated + segment.bytes(State::leaving))
        .member("requested_size", segment.requested_bytes(State::allocated))
        .member("stream", 0)
        .member("segment_type", "large");
    json_.key("segment_pool_id").begin_array().value(0).value(0).end_array();
    json_.member("is_expandable", false).key("frames").begin_array().end_array();
    json_.key("blocks").begin_array();
    for (MemorySnapshot::Block const& block : segment.blocks) {
      write(block);
    }
    json_.end_array().end_object();
  }

  void write(MemorySnapshot::Block const& block) {
    json_.new_line()
        .begin_object()
        .member("address", block.address)
        .member("size", block.size_bytes)
        .member("requested_size", block.requested_bytes)
        .member("state", name_of_state(block.state));
    json_.key("frames").begin_array().end_array();
    if (block.state == State::allocated) {
      json_.member("id", static_cast<std::uint64_t>(block.id))
          .member("leases", block.leases)
          .member("is_clean", block.is_clean);
    }
    json_.end_object();
  }

  void write(MemorySnapshot::Change const& change) {
    switch (change.kind) {
    case Kind::take:
      write_entry("alloc", change.address, change.size_bytes, change.time_ns);
      break;
    case Kind::leave:
      // PyTorch's allocator has two entries, since it may wait for streams in between. Here the
      // range has a fence instead.
      write_entry("free_requested", change.address, change.size_bytes, change.time_ns);
      write_entry("free_completed", change.address, change.size_bytes, change.time_ns);
      break;
    case Kind::reserve:
      write_entry("segment_alloc", change.address, change.size_bytes, change.time_ns);
      break;
    case Kind::out_of_memory:
      begin_entry("oom", change.size_bytes, change.time_ns)
          .member("device_free", change.free_bytes)
          .end_object();
      break;
    }
  }

  void write_entry(char const* action,
                   std::uintptr_t address,
                   std::size_t bytes,
                   std::uint64_t time_ns) {
    begin_entry(action, bytes, time_ns).member("addr", address).end_object();
  }

  detail::JsonStream& begin_entry(char const* action, std::size_t bytes, std::uint64_t time_ns) {
    json_.new_line()
        .begin_object()
        .member("action", action)
        .member("size", bytes)
        .member("stream", 0)
        .member("time_us", time_ns / 1000);
    return json_.key("frames").begin_array().end_array();
  }

  detail::JsonStream json_;
};

using SnapshotWriter = BasicSnapshotWriter<>;

}  // namespace detail

/// Writes a snapshot as JSON with the structure that PyTorch's memory snapshots have in Python.
///
/// PyTorch's viewers read pickles; scripts/snapshot-to-pickle.py makes one from the file. A
/// resident block is `active_allocated`, whether it is leased or not, and has additional members:
/// the number of its `leases`, and whether it `is_clean`. Free ranges are `inactive`. The trace
/// shows a block that leaves the device as freed, one that comes back as allocated, and a move as
/// both. Blocks that are not resident, and all statistics, are in the member `spillway`, which
/// viewers ignore.
template <class = detail::Lazily>
void write_json(std::ostream& out, MemorySnapshot const& snapshot) {
  detail::SnapshotWriter{out}.write(snapshot);
}

SPILLWAY_COMPILED_PART(class detail::BasicSnapshotChanges<>);
SPILLWAY_COMPILED_PART(class detail::BasicSnapshotWriter<>);

SPILLWAY_COMPILED_PART(void write_json<>(std::ostream&, MemorySnapshot const&));

}  // namespace spillway
