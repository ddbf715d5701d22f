// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/record.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/observe/json_stream.hpp>
#include <spillway/observe/names.hpp>
#include <spillway/observe/range_history.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <span>
#include <vector>

namespace spillway::detail {

/// Writes records as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.
///
/// One track for each kind of record, with the blocks and bytes as arguments, and three counters:
/// resident bytes, bytes of blocks that are not resident, and free bytes of the reservation. A record
/// is where the call was made on the host, so most of them have no duration; the copies themselves run
/// later, in stream order. Steps last until the next one.
///
/// @param records  in order of time, as `Timeline::records` gives them
/// @param now     what the allocator says after the last of them; the counters start from what must
///                have been before the first, so they are right even if older ones are forgotten
/// @throws std::bad_alloc
/// @cost   O(n log n); nothing is kept but what changed where. `out` says whether it took it all
void write_chrome_trace(std::ostream& out, std::span<Record const> records, Stats const& now);

/// Writes one trace.
class ChromeTraceWriter {
 public:
  ChromeTraceWriter(std::ostream& out, std::span<Record const> records)
      : json_{out}, records_{records} {}

  void write(Stats const& now) {
    std::vector<RangeChange> const changes = range_changes(records_);
    rewind(changes, now);
    json_.begin_object().member("displayTimeUnit", "ns").key("traceEvents").begin_array();
    write_names();
    auto change = changes.begin();
    for (std::size_t i = 0; i < records_.size(); ++i) {
      write_record(i);
      for (; change != changes.end() && change->record == i; ++change) {
        resident_ += change->is_taken ? change->bytes : -change->bytes;
      }
      count(records_[i], 1);
      write_counters(records_[i].start_ns);
    }
    json_.new_line().end_array().end_object();
  }

 private:
  struct Counter {
    char const* name;
    std::uint64_t value = 0;
    bool is_written = false;
  };

  static constexpr std::uint64_t process = 1;

  /// Threads of the trace are numbered from 1, steps on top.
  static std::uint64_t track_of(RecordKind kind) noexcept {
    return kind == RecordKind::step ? 1 : static_cast<std::uint64_t>(kind) + 2;
  }

  /// What the counters were before the first record, modulo 2^64 as everything here.
  void rewind(std::vector<RangeChange> const& changes, Stats const& now) {
    resident_ = now.resident.bytes.current;
    allocated_ = now.allocated.bytes.current;
    reserved_ = now.reserved_bytes;
    for (RangeChange const& change : changes) {
      resident_ -= change.is_taken ? change.bytes : -change.bytes;
    }
    for (Record const& record : records_) {
      count(record, ~std::uint64_t{0});
    }
    if (allocated_ == 0) {
      resident_ = 0;  // there were no blocks: that much is certain
    }
  }

  void count(Record const& record, std::uint64_t sign) noexcept {
    allocated_ += record.kind == RecordKind::allocate     ? sign * record.bytes
                  : record.kind == RecordKind::deallocate ? -sign * record.bytes
                                                          : 0;
    reserved_ += record.kind == RecordKind::grow   ? sign * record.bytes
                 : record.kind == RecordKind::trim ? -sign * record.bytes
                                                   : 0;
  }

  JsonStream& begin(char const* name, char const* phase, std::uint64_t track) {
    return json_.new_line()
        .begin_object()
        .member("name", name)
        .member("ph", phase)
        .member("pid", process)
        .member("tid", track);
  }

  void write_name(char const* what, std::uint64_t track, char const* name) {
    begin(what, "M", track)
        .key("args")
        .begin_object()
        .member("name", name)
        .end_object()
        .end_object();
  }

  void write_names() {
    write_name("process_name", 0, "spillway");
    for (auto i = std::uint8_t{0}; i <= static_cast<std::uint8_t>(RecordKind::step); ++i) {
      auto const kind = static_cast<RecordKind>(i);
      write_name("thread_name", track_of(kind), name_of(kind));
      begin("thread_sort_index", "M", track_of(kind)).key("args").begin_object();
      json_.member("sort_index", track_of(kind)).end_object().end_object();
    }
  }

  void write_record(std::size_t i) {
    Record const& record = records_[i];
    std::uint64_t const end_ns = record.kind == RecordKind::step ? end_of_step(i) : record.end_ns;
    bool const has_duration = record.kind == RecordKind::step || end_ns > record.start_ns;
    begin(name_of(record.kind), has_duration ? "X" : "i", track_of(record.kind))
        .key("ts")
        .microseconds(record.start_ns);
    if (has_duration) {
      json_.key("dur").microseconds(end_ns - record.start_ns);
    } else {
      json_.member("s", "t");
    }
    json_.key("args").begin_object();
    if (record.kind == RecordKind::step) {
      json_.member("step", ++steps_);
    }
    if (record.block != BlockId{}) {
      json_.member("block", static_cast<std::uint64_t>(record.block));
    }
    if (record.bytes != 0) {
      json_.member("bytes", record.bytes);
    }
    if (record.address != nullptr) {
      json_.member("address", reinterpret_cast<std::uintptr_t>(record.address));
    }
    json_.end_object().end_object();
  }

  /// The start of the next step, or the end of all there is.
  [[nodiscard]] std::uint64_t end_of_step(std::size_t i) const noexcept {
    auto const rest = records_.subspan(i + 1);
    auto const next = std::find_if(
        rest.begin(), rest.end(), [](Record const& one) { return one.kind == RecordKind::step; });
    return next != rest.end() ? next->start_ns : records_.back().start_ns;
  }

  void write_counters(std::uint64_t time_ns) {
    std::array const values{resident_, allocated_ - resident_, reserved_ - resident_};
    for (std::size_t k = 0; k < counters_.size(); ++k) {
      Counter& counter = counters_[k];
      if (counter.is_written && counter.value == values[k]) {
        continue;
      }
      counter.value = values[k];
      counter.is_written = true;
      begin(counter.name, "C", 0).key("ts").microseconds(time_ns);
      // A number below zero can only come of records that are missing.
      json_.key("args").begin_object().member("bytes", static_cast<std::int64_t>(values[k]));
      json_.end_object().end_object();
    }
  }

  JsonStream json_;
  std::span<Record const> records_;
  std::uint64_t resident_ = 0;
  std::uint64_t allocated_ = 0;
  std::uint64_t reserved_ = 0;
  std::uint64_t steps_ = 0;
  std::array<Counter, 3> counters_{{{"resident bytes"}, {"swapped-out bytes"}, {"free bytes"}}};
};

inline void
write_chrome_trace(std::ostream& out, std::span<Record const> records, Stats const& now) {
  detail::ChromeTraceWriter{out, records}.write(now);
}

}  // namespace spillway::detail
