// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/observer.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/record.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/observe/by_start.hpp>
#include <spillway/observe/json_stream.hpp>
#include <spillway/observe/names.hpp>
#include <spillway/observe/range_history.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <new>
#include <ostream>
#include <span>
#include <unordered_set>
#include <vector>

namespace spillway {

namespace detail {

/// Does the work of `write_chrome_trace`.
template <class = Lazily>
class BasicChromeTraceWriter {
 public:
  BasicChromeTraceWriter(std::ostream& out,
                         std::span<Record const> records,
                         std::span<DeviceSpan const> spans)
      : json_{out}, records_{records}, spans_{spans} {}

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
      follow_unused(records_[i]);
      write_counters(records_[i].start_ns);
    }
    write_spans();
    json_.new_line().end_array().end_object();
  }

 private:
  struct Counter {
    char const* name;
    std::uint64_t value = 0;
    bool is_written = false;
  };

  static constexpr std::uint64_t process = 1;

  /// Tracks of the trace are numbered from 1; steps are on the first.
  static std::uint64_t track_of(RecordKind kind) noexcept {
    return kind == RecordKind::step ? 1 : static_cast<std::uint64_t>(kind) + 2;
  }

  /// Computes the counters and the number of steps before the first record. Like all counters here,
  /// modulo 2^64.
  void rewind(std::vector<RangeChange> const& changes, Stats const& now) {
    resident_ = now.resident.bytes.current;
    allocated_ = now.allocated.bytes.current;
    reserved_ = now.reserved_bytes;
    auto const steps_kept = static_cast<std::uint64_t>(
        std::count_if(records_.begin(), records_.end(), [](Record const& one) {
          return one.kind == RecordKind::step;
        }));
    steps_ = now.steps - std::min(now.steps, steps_kept);
    for (RangeChange const& change : changes) {
      resident_ -= change.is_taken ? change.bytes : -change.bytes;
    }
    for (Record const& record : records_) {
      count(record, ~std::uint64_t{0});
    }
    if (allocated_ == 0) {
      resident_ = 0;  // no block existed, so none was resident, whatever the missing records say
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

  /// Keeps account of the blocks that have had no device range since they were allocated. They hold
  /// no bytes anywhere.
  void follow_unused(Record const& record) {
    if (record.kind == RecordKind::allocate) {
      unused_.insert(record.block);
      unused_bytes_ += record.bytes;
    } else if (record.kind != RecordKind::out_of_memory && unused_.erase(record.block) != 0) {
      unused_bytes_ -= record.bytes;
    }
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
      write_track(track_of(kind), name_of(kind));
    }
  }

  void write_track(std::uint64_t track, char const* name) {
    write_name("thread_name", track, name);
    begin("thread_sort_index", "M", track).key("args").begin_object();
    json_.member("sort_index", track).end_object().end_object();
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

  /// Writes spans. Those of one track must not overlap, so each kind gets as many tracks as it has
  /// spans at the same time.
  void write_spans() {
    std::uint64_t track =
        track_of(RecordKind::step) + static_cast<std::uint64_t>(RecordKind::step) + 2;
    for (auto i = std::uint8_t{0}; i <= static_cast<std::uint8_t>(SpanKind::kernel); ++i) {
      auto const kind = static_cast<SpanKind>(i);
      std::vector<std::uint64_t> ends_ns;  // end of the last span on each track
      for (DeviceSpan const& span : spans_) {
        if (span.kind != kind) {
          continue;
        }
        auto free = std::find_if(ends_ns.begin(), ends_ns.end(), [&](std::uint64_t end_ns) {
          return end_ns <= span.start_ns;
        });
        auto const lane = static_cast<std::uint64_t>(free - ends_ns.begin());
        if (free == ends_ns.end()) {
          write_track(track + lane, name_of(kind));
          free = ends_ns.insert(free, 0);
        }
        *free = span.end_ns;
        write_span(span, track + lane);
      }
      track += ends_ns.size();
    }
  }

  void write_span(DeviceSpan const& span, std::uint64_t track) {
    begin(name_of(span.kind), "X", track).key("ts").microseconds(span.start_ns);
    json_.key("dur").microseconds(span.end_ns - span.start_ns).key("args").begin_object();
    if (span.bytes != 0) {
      json_.member("bytes", span.bytes);
    }
    if (span.address != nullptr) {
      json_.member("address", reinterpret_cast<std::uintptr_t>(span.address));
    }
    json_.end_object().end_object();
  }

  /// Returns when a step ends: at the start of the next one, or at the end of all records and
  /// spans.
  [[nodiscard]] std::uint64_t end_of_step(std::size_t i) const noexcept {
    auto const rest = records_.subspan(i + 1);
    auto const next = std::find_if(
        rest.begin(), rest.end(), [](Record const& one) { return one.kind == RecordKind::step; });
    if (next != rest.end()) {
      return next->start_ns;
    }
    std::uint64_t end_ns = records_.back().start_ns;
    for (Record const& record : records_) {
      end_ns = std::max(end_ns, record.end_ns);
    }
    for (DeviceSpan const& span : spans_) {
      end_ns = std::max(end_ns, span.end_ns);
    }
    return end_ns;
  }

  void write_counters(std::uint64_t time_ns) {
    std::array const values{
        resident_, allocated_ - resident_ - unused_bytes_, reserved_ - resident_};
    for (std::size_t k = 0; k < counters_.size(); ++k) {
      Counter& counter = counters_[k];
      if (counter.is_written && counter.value == values[k]) {
        continue;
      }
      counter.value = values[k];
      counter.is_written = true;
      begin(counter.name, "C", 0).key("ts").microseconds(time_ns);
      // Signed, since a number below zero can result if records are missing.
      json_.key("args").begin_object().member("bytes", static_cast<std::int64_t>(values[k]));
      json_.end_object().end_object();
    }
  }

  JsonStream json_;
  std::span<Record const> records_;
  std::span<DeviceSpan const> spans_;
  std::uint64_t resident_ = 0;
  std::uint64_t allocated_ = 0;
  std::uint64_t reserved_ = 0;
  std::unordered_set<BlockId> unused_;
  std::uint64_t unused_bytes_ = 0;
  std::uint64_t steps_ = 0;
  std::array<Counter, 3> counters_{{{"resident bytes"}, {"swapped-out bytes"}, {"free bytes"}}};
};

using ChromeTraceWriter = BasicChromeTraceWriter<>;

}  // namespace detail

/// Writes records as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.
///
/// The trace has one track for each kind of record, with blocks and bytes as arguments, and three
/// counters: resident bytes, swapped-out bytes, and free bytes of the reservation. All blocks that
/// are not resident count as swapped out, except those that were allocated in the trace and not
/// used yet. A record is at the time of the call on the host, so most have no duration. The copies
/// themselves run later, in stream order; they have tracks of their own if a `TimedDevice` was
/// used. A step lasts until the next one begins, and the last one until all in the trace has ended.
///
/// @param records  in order of time, as `Timeline::records` gives them
/// @param now      the allocator's statistics after the last record. Counters and the numbers of
///                 steps are computed backwards from these, so they are right even if older records
///                 are forgotten
/// @param spans    when copies and kernels ran, in order of start, from `TimedDevice::spans`
/// @throws std::bad_alloc. To learn whether everything was written, ask `out`
/// @cost   O(n log n)
template <class = detail::Lazily>
void write_chrome_trace(std::ostream& out,
                        std::span<Record const> records,
                        Stats const& now,
                        std::span<DeviceSpan const> spans = {}) {
  detail::ChromeTraceWriter{out, records, spans}.write(now);
}

/// An observer that remembers what an allocator has done, for traces and snapshots.
///
/// Name it as `observer` in the policies; `allocator.observer()` returns it.
///
/// Threads  thread-safe.
/// Memory   48 bytes for each of the newest `default_limit` records, allocated as they come.
template <class = detail::Lazily>
class BasicTimeline {
 public:
  using Timeline = BasicTimeline;  // for the constructors of derived classes

  static constexpr bool is_enabled = true;
  static constexpr bool is_thread_safe = true;
  static constexpr std::size_t default_limit = std::size_t{1} << 20U;

  BasicTimeline() = default;
  BasicTimeline(BasicTimeline const&) = delete;
  BasicTimeline& operator=(BasicTimeline const&) = delete;

  /// Remembers the record. If there is no memory for it, counts it as forgotten.
  void on_record(Record const& record) noexcept {
    std::scoped_lock const lock{mutex_};
    try {
      records_.push_back(record);
      trim();
    } catch (std::bad_alloc const&) {
      ++forgotten_;
    }
  }

  /// How many records to remember; older ones are forgotten.
  void set_limit(std::size_t most_records) noexcept {
    std::scoped_lock const lock{mutex_};
    limit_ = most_records;
    trim();
  }

  /// Forgets all records so far, so that later ones can be looked at alone.
  void clear() noexcept {
    std::scoped_lock const lock{mutex_};
    records_.clear();
    forgotten_ = 0;
  }

  /// Returns the records that are remembered, in order of time.
  ///
  /// @throws std::bad_alloc
  [[nodiscard]] std::vector<Record> records() const {
    std::vector<Record> copy;
    {
      std::scoped_lock const lock{mutex_};
      copy.assign(records_.begin(), records_.end());
    }
    // Records of one thread arrive in order, those of different threads do not.
    return detail::by_start(copy);
  }

  /// Writes the records that are remembered as a trace for Perfetto or Chrome; see
  /// `write_chrome_trace`.
  ///
  /// @param now    `allocator.stats()`
  /// @param spans  when copies and kernels ran: `spans()` of a `TimedDevice`
  void write(std::ostream& out, Stats const& now, std::span<DeviceSpan const> spans = {}) const {
    write_chrome_trace(out, records(), now, spans);
  }

  /// Returns how many records are not remembered any more.
  [[nodiscard]] std::uint64_t forgotten() const noexcept {
    std::scoped_lock const lock{mutex_};
    return forgotten_;
  }

 private:
  void trim() noexcept {
    while (records_.size() > limit_) {
      records_.pop_front();
      ++forgotten_;
    }
  }

  mutable std::mutex mutex_;  // guards what follows
  std::deque<Record> records_;
  std::size_t limit_ = default_limit;
  std::uint64_t forgotten_ = 0;
};

using Timeline = BasicTimeline<>;

SPILLWAY_CHECK_MODEL(Observer<Timeline>);

SPILLWAY_COMPILED_PART(class detail::BasicChromeTraceWriter<>);
SPILLWAY_COMPILED_PART(class BasicTimeline<>);

}  // namespace spillway
