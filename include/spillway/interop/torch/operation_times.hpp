// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/core/stats.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>

namespace spillway::torch {

/// Statistics of operations: how long each takes, and what was recomputed by it.
///
/// Threads  thread-safe.
class OperationTimes {
 public:
  static constexpr std::uint64_t runs_to_settle = 64;
  static constexpr std::uint64_t measured_one_in = 16;

  struct Recomputed {
    Tally results;
    std::uint64_t ns = 0;
  };

  /// Records how long an operation took on operands of certain shapes.
  ///
  /// @param key  identifies the operation and the shapes
  /// @returns    the least time so far; longer times contain other work of the processor
  std::uint64_t note(std::uint64_t key, std::uint64_t ns) {
    std::lock_guard const guard{mutex_};
    if (least_.size() >= most_keys) {
      least_.clear();
    }
    auto const noted = least_.try_emplace(key, ns).first;
    noted->second = std::min(noted->second, ns);
    return noted->second;
  }
  /// The least time so far; nothing if none is known.
  [[nodiscard]] std::optional<std::uint64_t> find(std::uint64_t key) const {
    std::lock_guard const guard{mutex_};
    auto const noted = least_.find(key);
    return noted == least_.end() ? std::nullopt : std::optional{noted->second};
  }
  /// Whether to measure the next run of an operation that is measured with events. Every run is
  /// measured until the times of `runs_to_settle` runs in a row were known; after that every
  /// `measured_one_in`th, since the times so far may have been too long.
  ///
  /// @param op  identifies the operation; the shapes of its operands do not matter
  [[nodiscard]] bool is_measured(void const* op) {
    std::lock_guard const guard{mutex_};
    Runs& runs = runs_of(op);
    return runs.known_in_a_row < runs_to_settle || ++runs.others % measured_one_in == 0;
  }
  /// Records whether the time of an operation was known when it ran.
  void note_run(void const* op, bool is_known) {
    std::lock_guard const guard{mutex_};
    Runs& runs = runs_of(op);
    runs.known_in_a_row = is_known ? runs.known_in_a_row + 1 : 0;
  }
  void count(std::string const& name, std::size_t bytes, std::uint64_t ns) {
    std::lock_guard const guard{mutex_};
    Recomputed& counted = recomputed_[name];
    counted.results.add(bytes);
    counted.ns += ns;
  }
  /// Locks out other threads while the process forks.
  void lock() { mutex_.lock(); }
  void unlock() noexcept { mutex_.unlock(); }
  [[nodiscard]] std::unordered_map<std::string, Recomputed> recomputed() const {
    std::lock_guard const guard{mutex_};
    return recomputed_;
  }

 private:
  static constexpr std::size_t most_keys = 1 << 14;

  struct Runs {
    std::uint64_t known_in_a_row = 0;
    std::uint64_t others = 0;  ///< runs since the times were known in a row
  };
  [[nodiscard]] Runs& runs_of(void const* op) {
    if (runs_.size() >= most_keys) {
      runs_.clear();
    }
    return runs_[op];
  }

  mutable std::mutex mutex_;
  std::unordered_map<std::uint64_t, std::uint64_t> least_;
  std::unordered_map<void const*, Runs> runs_;
  std::unordered_map<std::string, Recomputed> recomputed_;
};

namespace detail {

[[nodiscard]] inline std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

/// Measures, by the host's clock, an operation that has finished when its call returns. Time in
/// which the thread waits for memory is left out: under pressure an allocation may wait for copies.
template <class Site>
class ClockTime {
 public:
  void start(void const* /*op*/) {
    waited_ns_ = Site::frames().waited_ns;
    start_ns_ = now_ns();
  }
  void stop() {
    std::uint64_t const all = now_ns() - start_ns_;
    ns_ = all - std::min(all, Site::frames().waited_ns - waited_ns_);
  }
  /// Returns the time to expect of the operation when it is run again.
  [[nodiscard]] std::optional<std::uint64_t> price(std::uint64_t key) const {
    return Site::operation_times().note(key, ns_);
  }

  /// Counts a run of a recipe that began at `start_ns`.
  static void
  count_again(std::uint64_t key, std::string const& name, std::size_t bytes, std::uint64_t start) {
    std::uint64_t const ns = now_ns() - start;
    (void)Site::operation_times().note(key, ns);
    Site::operation_times().count(name, bytes, ns);
  }

 private:
  std::uint64_t start_ns_ = 0;
  std::uint64_t waited_ns_ = 0;
  std::uint64_t ns_ = 0;
};

/// Measures, with events, an operation that is enqueued on the current stream. Its time is known
/// only some operations later, so the time to expect is that of earlier runs with the same key.
///
/// Under pressure the stream may wait for copies when the operation gets memory for its result.
/// Kernels ask for that first, so the measurement begins after it.
template <class Site>
class StreamTime {
 public:
  StreamTime() = default;
  StreamTime(StreamTime const&) = delete;
  StreamTime& operator=(StreamTime const&) = delete;
  ~StreamTime() {
    stop_restarting();
    drop();
  }

  /// @param op  as for `OperationTimes::is_measured`
  void start(void const* op) {
    op_ = op;
    if (!Site::operation_times().is_measured(op)) {
      return;
    }
    stream_ = Site::current_stream();
    pair_ = Site::timer().try_begin(stream_);
    Site::frames().after_allocation = &restart_;
  }
  void stop() {
    stop_restarting();
    if (pair_) {
      Site::timer().mark_end(*pair_, stream_);
    }
  }
  [[nodiscard]] std::optional<std::uint64_t> price(std::uint64_t key) {
    if (pair_) {
      Site::timer().end(*pair_, key);
      pair_.reset();
    }
    OperationTimes& times = Site::operation_times();
    Site::timer().collect([&times](std::uint64_t of, std::uint64_t ns) { times.note(of, ns); });
    std::optional<std::uint64_t> const known = times.find(key);
    times.note_run(op_, known.has_value());
    return known;
  }
  static void count_again(std::uint64_t key,
                          std::string const& name,
                          std::size_t bytes,
                          std::uint64_t /*start*/) {
    Site::operation_times().count(name, bytes, Site::operation_times().find(key).value_or(0));
  }

 private:
  void restart() noexcept {
    if (pair_) {
      try {
        Site::timer().begin_again(*pair_, stream_);
      } catch (std::exception const&) {
        drop();
      }
    }
  }
  void stop_restarting() noexcept {
    auto& frames = Site::frames();
    if (frames.after_allocation == &restart_) {
      frames.after_allocation = nullptr;
    }
  }
  void drop() noexcept {
    if (pair_) {
      Site::timer().drop(*pair_);
      pair_.reset();
    }
  }

  void const* op_ = nullptr;
  typename Site::stream_type stream_{};
  std::optional<typename Site::Timer::Pair> pair_;
  std::function<void()> restart_{[this] { restart(); }};
};

template <class Site>
using OperationTime =
    std::conditional_t<CallerStreamApi<typename Site::allocator_type::device_type>,
                       ClockTime<Site>,
                       StreamTime<Site>>;

}  // namespace detail

}  // namespace spillway::torch
