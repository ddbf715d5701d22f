// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_capabilities.hpp>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

namespace spillway::torch {

/// Measures how long work on streams takes, with one event before the work and one behind it. The
/// time is known only after the stream has passed both. It is then reported together with a key
/// that the caller chose.
///
/// Events are reused. While `most_pairs` measurements are under way, no further one begins.
///
/// Threads  thread-safe.
/// Streams  nothing here waits for a stream.
template <TimingApi Device>
class EventTimer {
 public:
  using stream_type = typename Device::stream_type;
  using event_type = typename Device::event_type;

  static constexpr std::size_t most_pairs = 1024;
  /// The most pairs that one call of `collect` looks at.
  static constexpr std::size_t most_collected = 4;

  struct Pair {
    event_type before;
    event_type after;
  };

  /// `device` is not owned and must outlive this object.
  explicit EventTimer(Device& device) noexcept : device_{&device} {}
  EventTimer(EventTimer const&) = delete;
  EventTimer& operator=(EventTimer const&) = delete;
  ~EventTimer() {
    for (Measurement const& one : under_way_) {
      destroy(one.pair);
    }
    for (Pair const& one : free_) {
      destroy(one);
    }
  }

  /// To be called immediately before the work is enqueued. The result must be passed to `end` or
  /// `drop`.
  ///
  /// @returns nothing if `most_pairs` measurements are under way
  /// @throws  DeviceError, std::bad_alloc
  /// @stream  records an event
  [[nodiscard]] std::optional<Pair> try_begin(stream_type stream) {
    std::optional<Pair> const pair = take();
    if (pair) {
      try {
        device_->record(pair->before, stream);
      } catch (...) {
        drop(*pair);
        throw;
      }
    }
    return pair;
  }
  /// Moves the begin of the measurement to now. @stream records an event
  void begin_again(Pair const& pair, stream_type stream) { device_->record(pair.before, stream); }
  /// To be called when the work has been enqueued. @stream records an event
  void mark_end(Pair const& pair, stream_type stream) { device_->record(pair.after, stream); }
  /// Finishes a pair, after both of its events have been recorded. @throws std::bad_alloc
  void end(Pair const& pair, std::uint64_t key) {
    std::lock_guard const guard{mutex_};
    under_way_.push_back({pair, key});
  }
  /// Takes back a pair without measuring anything.
  void drop(Pair const& pair) noexcept {
    std::lock_guard const guard{mutex_};
    free_.push_back(pair);  // `take` has made room for it
  }

  /// Calls `note(key, ns)` for some of the pairs whose events the device has passed, oldest first.
  ///
  /// @throws DeviceError; the pair whose time could not be read is taken back
  template <class Note>
  void collect(Note const& note) {
    std::lock_guard const guard{mutex_};
    for (std::size_t i = 0; i < most_collected && !under_way_.empty(); ++i) {
      Measurement const oldest = under_way_.front();
      try {
        if (!device_->is_complete(oldest.pair.after)) {
          return;
        }
        note(oldest.key, device_->elapsed_ns(oldest.pair.before, oldest.pair.after));
      } catch (...) {
        take_back_oldest();
        throw;
      }
      take_back_oldest();
    }
  }

 private:
  struct Measurement {
    Pair pair;
    std::uint64_t key = 0;
  };

  [[nodiscard]] std::optional<Pair> take() {
    std::lock_guard const guard{mutex_};
    if (!free_.empty()) {
      Pair const pair = free_.back();
      free_.pop_back();
      return pair;
    }
    if (pairs_ == most_pairs) {
      return std::nullopt;
    }
    free_.reserve(pairs_ + 1);
    event_type const before = device_->create_timed_event();
    try {
      Pair const pair{before, device_->create_timed_event()};
      ++pairs_;
      return pair;
    } catch (...) {
      device_->destroy_event(before);
      throw;
    }
  }
  void take_back_oldest() noexcept {
    free_.push_back(under_way_.front().pair);  // `take` has made room for it
    under_way_.pop_front();
  }
  void destroy(Pair const& pair) noexcept {
    device_->destroy_event(pair.before);
    device_->destroy_event(pair.after);
  }

  Device* device_;
  std::mutex mutex_;
  std::vector<Pair> free_;
  std::deque<Measurement> under_way_;  // in the order of the calls of `end`
  std::size_t pairs_ = 0;
};

}  // namespace spillway::torch
