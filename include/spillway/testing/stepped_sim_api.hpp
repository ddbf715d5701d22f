// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/sim/basic_sim_api.hpp>
#include <spillway/device/sim/sim_backing.hpp>
#include <spillway/device/sim/sim_handles.hpp>
#include <spillway/device/sim/sim_op.hpp>
#include <spillway/device/sim/sim_options.hpp>
#include <spillway/testing/order_check.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace spillway::detail {

/// A lock that does nothing, for objects that only one thread uses.
struct NoMutex {
  void lock() noexcept {}
  void unlock() noexcept {}
};

/// The executor of `SteppedSimApi`: runs nothing until it is told to, one operation at a time, so
/// that a test can try every order.
///
/// Threads  thread-unsafe: one thread makes all calls.
class SteppedExecutor {
 public:
  static constexpr bool is_thread_safe = false;
  static constexpr bool is_stepped = true;
  static constexpr bool is_virtual = false;
  using mutex_type = NoMutex;
  using backing_type = SimHostBacking;
  using lock_type = std::unique_lock<mutex_type>;

 private:
  // A point on a stream: its first `ops` operations.
  struct Point {
    std::uint64_t stream = 0;  // 0: no stream
    std::uint64_t ops = 0;
  };
  struct Op : SimOp {
    Point point{};                // the point that a wait waits for
    testing::OrderClock clock{};  // for a host function: what was ordered before it
    std::vector<SimCopy> kept{};  // the copies of a batch, which move with this object
  };
  struct Stream {
    std::deque<Op> queue;
    std::uint64_t run_ops = 0;
    bool is_stalled = false;
    bool is_destroyed = false;

    [[nodiscard]] std::uint64_t enqueued() const noexcept { return run_ops + queue.size(); }
  };
  using Streams = std::map<std::uint64_t, Stream>;  // in order of creation
  struct Event {
    Point point{};
    testing::OrderClock clock{};
  };

 public:
  /// All work that had been enqueued, on all streams, when this was made.
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

  explicit SteppedExecutor(SimOptions const& options) : checks_order_{options.check_order} {}
  SteppedExecutor(SteppedExecutor const&) = delete;
  SteppedExecutor& operator=(SteppedExecutor const&) = delete;
  ~SteppedExecutor();

  [[nodiscard]] SimStream create_stream();
  void destroy_stream(SimStream stream) noexcept;
  [[nodiscard]] SimEvent create_event() { return events_.insert(Event{}); }
  void destroy_event(SimEvent event) noexcept {
    (void)events_.expect(event, "destroy_event");
    events_.erase(event);
  }

  void check(SimStream stream, char const* caller) { (void)ids_.at(stream, caller); }
  void check(SimEvent event, char const* caller) { (void)events_.at(event, caller); }

  /// @throws ContractViolation if nothing orders the operation after earlier use of the same bytes
  void enqueue(SimStream stream, SimOp const& op, lock_type& /*lock*/);
  void record(SimEvent event, SimStream stream);
  void wait(SimStream stream, SimEvent event);
  [[nodiscard]] bool is_complete(SimEvent event);
  void synchronize(SimEvent event, lock_type& /*lock*/);
  void synchronize(SimStream stream, lock_type& /*lock*/);

  /// Checks the order of a kernel on `stream` that uses memory. Enqueues nothing.
  void use(SimStream stream, void const* p, std::size_t bytes, Access access);
  /// True if an operation that has not run yet reads or writes there.
  [[nodiscard]] bool is_in_use(void const* p, std::size_t bytes) const noexcept;
  /// Forgets earlier uses of memory that was freed or is new, so that later work need not be
  /// ordered after them.
  void forget(void const* p, std::size_t bytes) { order_.forget(p, bytes); }

  /// Runs the next operation of `stream`. Returns false if there is none, or the stream waits for
  /// another one or is stalled.
  bool step(SimStream stream) { return step(at(stream, "step")); }
  /// Runs the operations of `stream` until it has to wait; returns how many.
  std::size_t run(SimStream stream);
  /// Runs the operations of all streams in turns until all have to wait; returns how many.
  std::size_t run_all();
  /// As `run_all`, in an order that `seed` determines.
  std::size_t run_random(std::uint64_t seed);
  /// Keeps `stream` from running anything, even if it is waited for, until it is resumed.
  void stall(SimStream stream) { at(stream, "stall").is_stalled = true; }
  void resume(SimStream stream) { at(stream, "resume").is_stalled = false; }
  /// Returns how many operations have not run. Event records and waits count.
  [[nodiscard]] std::size_t queued_ops(SimStream stream) {
    return at(stream, "queued_ops").queue.size();
  }

  [[nodiscard]] Barrier barrier();
  [[nodiscard]] bool is_host_function_caller() const noexcept { return is_in_host_function_; }
  [[nodiscard]] std::uint64_t clock_ns() const noexcept { return steady_ns(); }
  [[nodiscard]] std::size_t streams() const noexcept { return ids_.size(); }
  [[nodiscard]] std::size_t events() const noexcept { return events_.size(); }

 private:
  [[nodiscard]] Stream& at(SimStream stream, char const* caller) {
    return streams_.at(ids_.at(stream, caller));
  }
  // A destroyed stream has run all its operations.
  [[nodiscard]] bool has_passed(Point point) const noexcept {
    auto const it = streams_.find(point.stream);
    return it == streams_.end() || it->second.run_ops >= point.ops;
  }
  [[nodiscard]] bool is_blocked(Stream const& stream) const noexcept {
    return stream.queue.front().what == SimOp::Kind::wait &&
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
  SimTable<SimStreamTag, std::uint64_t> ids_;
  SimTable<SimEventTag, Event> events_;
  testing::OrderCheck order_;
  bool checks_order_;
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
  std::uint64_t const id = ids_.expect(stream, "destroy_stream");
  streams_.at(id).is_destroyed = true;
  order_.forget_stream(id);
  ids_.erase(stream);
  sweep();
}

inline void SteppedExecutor::enqueue(SimStream stream, SimOp const& op, lock_type& /*lock*/) {
  std::uint64_t const id = ids_.at(stream, "an enqueued operation");
  if (checks_order_) {
    switch (op.what) {
    case SimOp::Kind::copy:
      order_.enqueue(id, "copy", {op.from, op.bytes, false}, {op.to, op.bytes, true});
      break;
    case SimOp::Kind::batch:
      order_.enqueue_batch(id, op.copies);
      break;
    case SimOp::Kind::fill:
      order_.enqueue(id, "fill", {op.to, op.bytes, true});
      break;
    case SimOp::Kind::host:
    case SimOp::Kind::compute:
    case SimOp::Kind::record:
    case SimOp::Kind::wait:
    case SimOp::Kind::stop:
      break;
    }
  }
  bool const is_host = op.what == SimOp::Kind::host;
  Op queued{op,
            {},
            is_host ? order_.clock(id) : testing::OrderClock{},
            {op.copies.begin(), op.copies.end()}};
  queued.copies = queued.kept;  // stays valid when the vector moves
  streams_.at(id).queue.push_back(std::move(queued));
}

inline void
SteppedExecutor::use(SimStream stream, void const* p, std::size_t bytes, Access access) {
  std::uint64_t const id = ids_.at(stream, "use");
  if (checks_order_) {
    order_.enqueue(id, "kernel", {p, bytes, access != Access::read});
  }
}

inline bool SteppedExecutor::is_in_use(void const* p, std::size_t bytes) const noexcept {
  return std::any_of(streams_.begin(), streams_.end(), [p, bytes](auto const& entry) {
    auto const& queue = entry.second.queue;
    return std::any_of(
        queue.begin(), queue.end(), [p, bytes](Op const& op) { return op.touches(p, bytes); });
  });
}

inline void SteppedExecutor::record(SimEvent event, SimStream stream) {
  Event& mine = events_.at(event, "record");
  std::uint64_t const id = ids_.at(stream, "record");
  Stream& recorded = streams_.at(id);
  recorded.queue.push_back({{.what = SimOp::Kind::record}});
  mine = {{id, recorded.enqueued()}, order_.clock(id)};
}

inline void SteppedExecutor::wait(SimStream stream, SimEvent event) {
  std::uint64_t const id = ids_.at(stream, "wait");
  Event const& other = events_.at(event, "wait");
  streams_.at(id).queue.push_back({{.what = SimOp::Kind::wait}, other.point});
  order_.stream_sees(id, other.clock);
}

inline bool SteppedExecutor::is_complete(SimEvent event) {
  Event const& mine = events_.at(event, "is_complete");
  bool const is_complete = has_passed(mine.point);
  if (is_complete) {
    order_.host_sees(mine.clock);
  }
  return is_complete;
}

inline void SteppedExecutor::synchronize(SimEvent event, lock_type& /*lock*/) {
  Event const mine = events_.at(event, "synchronize");
  drive(mine.point);
  order_.host_sees(mine.clock);
}

inline void SteppedExecutor::synchronize(SimStream stream, lock_type& /*lock*/) {
  std::uint64_t const id = ids_.at(stream, "synchronize");
  testing::OrderClock const clock = order_.clock(id);
  drive({id, streams_.at(id).enqueued()});
  order_.host_sees(clock);
}

inline bool SteppedExecutor::step(Stream& stream) {
  if (!can_step(stream)) {
    return false;
  }
  Op const op = std::move(stream.queue.front());
  is_in_host_function_ = op.what == SimOp::Kind::host;
  op.perform();
  is_in_host_function_ = false;
  order_.host_sees(op.clock);  // the function may have told the host that it has run
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

/// Runs what `goal` depends on and nothing else, so that tests notice work that nothing waits for.
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

SPILLWAY_COMPILED_PART(class SimMemory<SimHostBacking, SteppedExecutor::Barrier>);
SPILLWAY_COMPILED_PART(class BasicSimApi<SteppedExecutor>);

}  // namespace spillway::detail

namespace spillway::testing {

/// A simulated device that runs nothing until it is told to, for tests of order. `step`, `run`,
/// `run_all` and `run_random` run operations; `stall` keeps a stream from running any. With
/// `SimOptions::check_order`, an `OrderCheck` looks for races when an operation is enqueued.
///
/// Policies for it: `struct MyPolicies : PoliciesFor<testing::SteppedSimApi> {};`
using SteppedSimApi = detail::BasicSimApi<detail::SteppedExecutor>;

SPILLWAY_CHECK_MODEL(BatchCopyApi<SteppedSimApi>);
SPILLWAY_CHECK_MODEL(VirtualMemoryApi<SteppedSimApi>);

}  // namespace spillway::testing
