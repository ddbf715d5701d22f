// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/observer.hpp>
#include <spillway/core/record.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/observe/chrome_trace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <new>
#include <ostream>
#include <vector>

namespace spillway {

/// An observer that remembers what an allocator did, for Perfetto, Chrome's tracing and snapshots.
///
/// Name it as the `observer` of the policies; `allocator.observer()` is it.
///
/// Threads  thread-safe.
/// Memory   48 bytes a record, taken as they come, for the newest `default_limit` records.
class Timeline {
 public:
  static constexpr bool is_enabled = true;
  static constexpr bool is_thread_safe = true;
  static constexpr std::size_t default_limit = std::size_t{1} << 20U;

  Timeline() = default;
  Timeline(Timeline const&) = delete;
  Timeline& operator=(Timeline const&) = delete;

  /// Notes the record. If there is no memory for it, it counts as forgotten.
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

  /// Forgets everything, so that what comes next can be looked at alone.
  void clear() noexcept {
    std::scoped_lock const lock{mutex_};
    records_.clear();
    forgotten_ = 0;
  }

  /// What is remembered, in order of time.
  ///
  /// @throws std::bad_alloc
  [[nodiscard]] std::vector<Record> records() const {
    std::vector<Record> copy;
    {
      std::scoped_lock const lock{mutex_};
      copy.assign(records_.begin(), records_.end());
    }
    // Threads tell what they noted each in its order, but not in turns.
    std::stable_sort(copy.begin(), copy.end(), [](Record const& a, Record const& b) {
      return a.start_ns < b.start_ns;
    });
    return copy;
  }

  /// Writes what is remembered as a trace for Perfetto or Chrome, see `write_chrome_trace`.
  ///
  /// @param now  `allocator.stats()`
  void write(std::ostream& out, Stats const& now) const {
    detail::write_chrome_trace(out, records(), now);
  }

  /// How many records came and are not remembered.
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

static_assert(Observer<Timeline>);

}  // namespace spillway
