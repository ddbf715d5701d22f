// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/sim_backing.hpp>
#include <spillway/device/sim_handles.hpp>
#include <spillway/device/sim_op.hpp>
#include <spillway/device/sim_options.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace spillway {

namespace detail {

/// A lock for what one thread uses.
struct NoMutex {
  void lock() noexcept {}
  void unlock() noexcept {}
};

}  // namespace detail

/// Runs nothing until it is told to, one operation at a time: every order of work can be tried.
///
/// Threads  thread-unsafe: one thread makes all calls.
class SteppedExecutor {
 public:
  static constexpr bool is_thread_safe = false;
  static constexpr bool is_stepped = true;
  static constexpr bool is_virtual = false;
  using mutex_type = detail::NoMutex;
  using backing_type = detail::SimHostBacking;
  using lock_type = std::unique_lock<mutex_type>;

 private:
  // A point on a stream: its first `ops` operations.
  struct Point {
    std::uint64_t stream = 0;  // 0 names no stream
    std::uint64_t ops = 0;
  };
  struct Op : detail::SimOp {
    Point point{};  // of a wait
  };
  struct Stream {
    std::deque<Op> queue;
    std::uint64_t run_ops = 0;
    bool is_stalled = false;
    bool is_destroyed = false;

    [[nodiscard]] std::uint64_t enqueued() const noexcept { return run_ops + queue.size(); }
  };
  using Streams = std::map<std::uint64_t, Stream>;  // in order of creation

 public:
  /// The work that had been enqueued, on all streams, when it was made.
  class Barrier {
   public:
    [[nodiscard]] bool is_passed() const noexcept {
      return std::all_of(points_.begin(), points_.end(), [this](Point point) {
        return executor_->has_passed(point);
      });
    }

   private:
    friend class SteppedExecutor;
    SteppedExecutor const* executor_ = nullptr;
    std::vector<Point> points_;
  };
  using barrier_type = Barrier;

  explicit SteppedExecutor(SimOptions const& /*options*/) {}
  SteppedExecutor(SteppedExecutor const&) = delete;
  SteppedExecutor& operator=(SteppedExecutor const&) = delete;
  ~SteppedExecutor();

  [[nodiscard]] SimStream create_stream();
  void destroy_stream(SimStream stream) noexcept;
  [[nodiscard]] SimEvent create_event() { return events_.insert(Point{}); }
  void destroy_event(SimEvent event) noexcept {
    (void)events_.expect(event, "destroy_event");
    events_.erase(event);
  }

  void check(SimStream stream, char const* caller) { (void)ids_.at(stream, caller); }
  void check(SimEvent event, char const* caller) { (void)events_.at(event, caller); }

  void enqueue(SimStream stream, detail::SimOp const& op, lock_type& /*lock*/) {
    at(stream, "an enqueued operation").queue.push_back({op, {}});
  }
  void record(SimEvent event, SimStream stream);
  void wait(SimStream stream, SimEvent event);
  [[nodiscard]] bool is_complete(SimEvent event) {
    return has_passed(events_.at(event, "is_complete"));
  }
  void synchronize(SimEvent event, lock_type& /*lock*/) { drive(events_.at(event, "synchronize")); }
  void synchronize(SimStream stream, lock_type& /*lock*/);

  /// Runs the next operation of `stream`; false if there is none, it is blocked, or it is stalled.
  bool step(SimStream stream) { return step(at(stream, "step")); }
  /// Runs what `stream` can run before it blocks; returns how many operations ran.
  std::size_t run(SimStream stream);
  /// Runs what all streams can run, in turns; returns how many operations ran.
  std::size_t run_all();
  /// The same in an order drawn from `seed`: the same seed gives the same order.
  std::size_t run_random(std::uint64_t seed);
  /// From now on `stream` runs nothing, whoever asks, until it is resumed.
  void stall(SimStream stream) { at(stream, "stall").is_stalled = true; }
  void resume(SimStream stream) { at(stream, "resume").is_stalled = false; }
  /// How many operations wait to be run; event records and waits are operations too.
  [[nodiscard]] std::size_t queued_ops(SimStream stream) {
    return at(stream, "queued_ops").queue.size();
  }

  [[nodiscard]] Barrier barrier();
  [[nodiscard]] bool is_host_function_caller() const noexcept { return is_in_host_function_; }
  [[nodiscard]] std::uint64_t clock_ns() const noexcept { return detail::steady_ns(); }
  [[nodiscard]] std::size_t streams() const noexcept { return ids_.size(); }
  [[nodiscard]] std::size_t events() const noexcept { return events_.size(); }

 private:
  [[nodiscard]] Stream& at(SimStream stream, char const* caller) {
    return streams_.at(ids_.at(stream, caller));
  }
  // A stream that is gone has run all it had.
  [[nodiscard]] bool has_passed(Point point) const noexcept {
    auto const it = streams_.find(point.stream);
    return it == streams_.end() || it->second.run_ops >= point.ops;
  }
  [[nodiscard]] bool is_blocked(Stream const& stream) const noexcept {
    return stream.queue.front().what == detail::SimOp::Kind::wait &&
           !has_passed(stream.queue.front().point);
  }
  [[nodiscard]] bool can_step(Stream const& stream) const noexcept {
    return !stream.queue.empty() && !stream.is_stalled && !is_blocked(stream);
  }
  bool step(Stream& stream);
  void drive(Point goal);
  void sweep() noexcept;

  Streams streams_;
  std::uint64_t last_stream_ = 0;
  detail::SimSlots<SimStreamTag, std::uint64_t> ids_;
  detail::SimSlots<SimEventTag, Point> events_;
  bool is_in_host_function_ = false;
};

inline SteppedExecutor::~SteppedExecutor() {
  for (auto& [id, stream] : streams_) {
    stream.is_stalled = false;
  }
  run_all();
}

inline SimStream SteppedExecutor::create_stream() {
  SimStream const stream = ids_.insert(last_stream_ + 1);
  streams_[++last_stream_];
  return stream;
}

inline void SteppedExecutor::destroy_stream(SimStream stream) noexcept {
  streams_.at(ids_.expect(stream, "destroy_stream")).is_destroyed = true;
  ids_.erase(stream);
  sweep();
}

inline void SteppedExecutor::record(SimEvent event, SimStream stream) {
  Point& point = events_.at(event, "record");
  std::uint64_t const id = ids_.at(stream, "record");
  Stream& recorded = streams_.at(id);
  recorded.queue.push_back({{.what = detail::SimOp::Kind::record}, {}});
  point = {id, recorded.enqueued()};
}

inline void SteppedExecutor::wait(SimStream stream, SimEvent event) {
  Stream& waiting = at(stream, "wait");
  Point const point = events_.at(event, "wait");
  waiting.queue.push_back({{.what = detail::SimOp::Kind::wait}, point});
}

inline void SteppedExecutor::synchronize(SimStream stream, lock_type& /*lock*/) {
  drive({ids_.at(stream, "synchronize"), at(stream, "synchronize").enqueued()});
}

inline bool SteppedExecutor::step(Stream& stream) {
  if (!can_step(stream)) {
    return false;
  }
  Op const op = stream.queue.front();
  is_in_host_function_ = op.what == detail::SimOp::Kind::host;
  op.perform();
  is_in_host_function_ = false;
  stream.queue.pop_front();
  ++stream.run_ops;
  return true;
}

inline std::size_t SteppedExecutor::run(SimStream stream) {
  Stream& running = at(stream, "run");
  std::size_t ops = 0;
  while (step(running)) {
    ++ops;
  }
  return ops;
}

inline std::size_t SteppedExecutor::run_all() {
  std::size_t ops = 0;
  for (bool has_run = true; has_run;) {
    has_run = false;
    for (auto& [id, stream] : streams_) {
      if (step(stream)) {
        has_run = true;
        ++ops;
      }
    }
  }
  sweep();
  return ops;
}

inline std::size_t SteppedExecutor::run_random(std::uint64_t seed) {
  std::mt19937_64 random{seed};
  std::vector<Stream*> ready;
  for (std::size_t ops = 0;; ++ops) {
    ready.clear();
    for (auto& [id, stream] : streams_) {
      if (can_step(stream)) {
        ready.push_back(&stream);
      }
    }
    if (ready.empty()) {
      sweep();
      return ops;
    }
    step(*ready[random() % ready.size()]);
  }
}

/// Runs what `goal` depends on and nothing else, so that work nobody waits for stays behind.
inline void SteppedExecutor::drive(Point goal) {
  std::vector<Point> goals{goal};
  while (!goals.empty()) {
    Point const next = goals.back();
    if (has_passed(next)) {
      goals.pop_back();
      continue;
    }
    Stream& stream = streams_.at(next.stream);
    if (stream.is_stalled) {
      throw DeviceError{"SimApi: deadlock: the host waits for stream number " +
                        std::to_string(next.stream) + ", which is stalled with " +
                        std::to_string(stream.queue.size()) + " operations to run"};
    }
    if (is_blocked(stream)) {
      goals.push_back(stream.queue.front().point);
    } else {
      step(stream);
    }
  }
  sweep();
}

inline SteppedExecutor::Barrier SteppedExecutor::barrier() {
  Barrier barrier;
  barrier.executor_ = this;
  for (auto const& [id, stream] : streams_) {
    if (!stream.queue.empty()) {
      barrier.points_.push_back({id, stream.enqueued()});
    }
  }
  return barrier;
}

inline void SteppedExecutor::sweep() noexcept {
  std::erase_if(streams_, [](auto const& entry) {
    return entry.second.is_destroyed && entry.second.queue.empty();
  });
}

}  // namespace spillway
