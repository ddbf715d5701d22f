// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>
#include <spillway/observe/json_stream.hpp>
#include <spillway/observe/names.hpp>
#include <spillway/observe/snapshot.hpp>
#include <spillway/observe/stats_json.hpp>

#include <cstddef>
#include <cstdint>
#include <ostream>

namespace spillway {

namespace detail {

/// Writes one snapshot in the form of PyTorch's.
class SnapshotWriter {
 public:
  explicit SnapshotWriter(std::ostream& out) : json_{out} {}

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
    switch (state) {
    case State::free:
      return "inactive";
    case State::allocated:
      return "active_allocated";
    case State::leaving:
      return "active_pending_free";
    }
    return "?";
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
      // Where the caching allocator waits for streams between the two, we hand on a fence.
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

}  // namespace detail

/// Writes a snapshot as JSON, member by member what PyTorch's memory snapshots are in Python.
///
/// PyTorch's viewers read pickles: scripts/snapshot-to-pickle.py makes one of the file. A resident
/// block is `active_allocated`, whether it is leased or not, and says in members of its own how many
/// `leases` it has and whether it `is_clean`; free ranges are `inactive`. In the trace a block is freed
/// when it leaves the device and allocated when it comes back, and a move is both. Blocks that are not
/// resident, and all statistics, are under `spillway`, which the viewers pass over.
inline void write_json(std::ostream& out, MemorySnapshot const& snapshot) {
  detail::SnapshotWriter{out}.write(snapshot);
}

}  // namespace spillway
