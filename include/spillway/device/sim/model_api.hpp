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

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace spillway::detail {

/// The timetable of a copy engine in virtual time. The engine serves one copy at a time, each as
/// early as possible.
///
/// A copy that was enqueued later but is ready earlier may run while the engine would otherwise be
/// idle. A real engine does the same, since it does not wait for a stream that is not ready.
///
/// Threads  thread-compatible.
/// Cost     O(idle times remembered), at most 32.
class SimTimetable {
 public:
  SimTimetable() = default;
  explicit SimTimetable(SimRate rate) noexcept : rate_{rate} {}

  /// Reserves the engine for a copy that is ready at `ready_ns`; returns when the copy ends.
  /// `now_ns` must never decrease, and `ready_ns` is never less than it.
  [[nodiscard]] std::uint64_t
  take(std::uint64_t now_ns, std::uint64_t ready_ns, std::size_t bytes) {
    std::uint64_t const duration = rate_.duration_ns(bytes);
    if (duration == 0) {
      return ready_ns;
    }
    if (ready_ns < free_ns_) {
      if (auto const end = try_take_idle_time(now_ns, ready_ns, duration)) {
        return *end;
      }
    } else if (ready_ns > free_ns_) {
      if (idle_.size() == most_remembered) {
        idle_.erase(idle_.begin());
      }
      idle_.push_back({free_ns_, ready_ns});
    }
    free_ns_ = std::max(free_ns_, ready_ns) + duration;
    return free_ns_;
  }

 private:
  /// A time between two copies in which the engine is idle.
  struct IdleTime {
    std::uint64_t begin_ns = 0;
    std::uint64_t end_ns = 0;
  };
  static constexpr std::size_t most_remembered = 32;

  [[nodiscard]] std::optional<std::uint64_t>
  try_take_idle_time(std::uint64_t now_ns, std::uint64_t ready_ns, std::uint64_t duration);

  SimRate rate_;
  std::uint64_t free_ns_ = 0;
  std::vector<IdleTime> idle_;  // in order of time, all before free_ns_
};

inline std::optional<std::uint64_t> SimTimetable::try_take_idle_time(std::uint64_t now_ns,
                                                                     std::uint64_t ready_ns,
                                                                     std::uint64_t duration) {
  auto const is_ahead = [&](IdleTime idle) { return idle.end_ns > now_ns; };
  idle_.erase(idle_.begin(), std::find_if(idle_.begin(), idle_.end(), is_ahead));
  for (auto place = idle_.begin(); place != idle_.end(); ++place) {
    IdleTime const idle = *place;
    std::uint64_t const start = std::max(idle.begin_ns, ready_ns);
    std::uint64_t const end = start + duration;
    if (end > idle.end_ns) {
      continue;
    }
    // The idle time after the copy is always kept, the one before it if there is room.
    place = idle_.erase(place);
    for (IdleTime const rest : {IdleTime{end, idle.end_ns}, IdleTime{idle.begin_ns, start}}) {
      if (rest.begin_ns < rest.end_ns && idle_.size() < most_remembered) {
        place = idle_.insert(place, rest);
      }
    }
    return end;
  }
  return std::nullopt;
}

/// The executor of `ModelApi`. It holds no bytes, and an operation only moves a virtual clock. Only
/// host functions really run; they are called when they are enqueued.
///
/// Each stream has the time at which its work ends, each event the time at which it was recorded.
/// The host has a clock, too, which moves when the host waits and by `advance_host`. No operation
/// starts before the host has enqueued it. Copies of one direction share an engine.
///
/// Threads  thread-safe through `BasicSimApi`, which calls it under its lock.
/// Cost     O(1) for every call.
class ModelExecutor {
 public:
  static constexpr bool is_thread_safe = true;
  static constexpr bool is_stepped = false;
  static constexpr bool is_virtual = true;
  using mutex_type = std::mutex;
  using backing_type = SimFakeBacking;
  using lock_type = std::unique_lock<mutex_type>;

  /// Always passed, since no work is left when the call that enqueued it returns.
  struct Barrier {
    [[nodiscard]] static bool is_passed() noexcept { return true; }
  };
  using barrier_type = Barrier;

  explicit ModelExecutor(SimOptions const& options);

  [[nodiscard]] SimStream create_stream() { return streams_.insert(0); }
  void destroy_stream(SimStream stream) noexcept {
    (void)streams_.expect(stream, "destroy_stream");
    streams_.erase(stream);
  }
  [[nodiscard]] SimEvent create_event() { return events_.insert(0); }
  void destroy_event(SimEvent event) noexcept {
    (void)events_.expect(event, "destroy_event");
    events_.erase(event);
  }

  void check(SimStream stream, char const* caller) { (void)streams_.at(stream, caller); }
  void check(SimEvent event, char const* caller) { (void)events_.at(event, caller); }

  void enqueue(SimStream stream, SimOp const& op, lock_type& lock);
  void record(SimEvent event, SimStream stream) {
    std::uint64_t const time = ready_ns(streams_.at(stream, "record"));
    events_.at(event, "record") = time;
  }
  void wait(SimStream stream, SimEvent event) {
    std::uint64_t& ready = streams_.at(stream, "wait");
    ready = std::max(ready, events_.at(event, "wait"));
  }
  [[nodiscard]] bool is_complete(SimEvent event) {
    return events_.at(event, "is_complete") <= now_ns();
  }
  void synchronize(SimEvent event, lock_type& /*lock*/) {
    move_host(events_.at(event, "synchronize"));
  }
  void synchronize(SimStream stream, lock_type& /*lock*/) {
    move_host(streams_.at(stream, "synchronize"));
  }

  /// Moves the host's clock forward by `duration_ns`, as if the host did something else in that
  /// time.
  void advance_host(std::uint64_t duration_ns) noexcept { move_host(now_ns() + duration_ns); }
  /// The time at which all work enqueued so far will have finished, including that of destroyed
  /// streams.
  [[nodiscard]] std::uint64_t finish_time_ns() const noexcept {
    return std::max(finish_ns_, now_ns());
  }

  /// Only checks the stream; `compute` models the time of kernels.
  void use(SimStream stream, void const* /*p*/, std::size_t /*bytes*/, Access /*access*/) {
    check(stream, "use");
  }
  [[nodiscard]] static bool is_in_use(void const* /*p*/, std::size_t /*bytes*/) noexcept {
    return false;
  }
  void forget(void const* /*p*/, std::size_t /*bytes*/) noexcept {}

  [[nodiscard]] static Barrier barrier() noexcept { return {}; }
  [[nodiscard]] bool is_host_function_caller() const noexcept;
  /// The host's time, or inside a host function the time of the stream that launched it.
  [[nodiscard]] std::uint64_t clock_ns() const noexcept;
  [[nodiscard]] std::size_t streams() const noexcept { return streams_.size(); }
  [[nodiscard]] std::size_t events() const noexcept { return events_.size(); }

 private:
  struct HostCall {
    std::thread::id thread;
    std::uint64_t time_ns = 0;
  };

  [[nodiscard]] std::uint64_t now_ns() const noexcept {
    return now_ns_.load(std::memory_order_relaxed);
  }
  void move_host(std::uint64_t time_ns) noexcept {
    now_ns_.store(std::max(now_ns(), time_ns), std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t ready_ns(std::uint64_t stream_ns) const noexcept {
    return std::max(stream_ns, now_ns());
  }
  void call(SimOp const& op, std::uint64_t time_ns, lock_type& lock);

  std::array<SimTimetable, 3> engines_;
  SimTable<SimStreamTag, std::uint64_t> streams_;  // when the stream will have run all its work
  // when it was recorded; 0: not recorded, which counts as complete
  SimTable<SimEventTag, std::uint64_t> events_;
  std::atomic<std::uint64_t> now_ns_{0};
  std::uint64_t finish_ns_ = 0;
  mutable std::mutex calls_mutex_;
  std::vector<HostCall> calls_;  // host functions that are running, guarded by calls_mutex_
  std::atomic<std::size_t> running_calls_{0};
};

inline ModelExecutor::ModelExecutor(SimOptions const& options) {
  for (CopyKind const kind : {CopyKind::to_host, CopyKind::to_device, CopyKind::on_device}) {
    engines_[static_cast<std::size_t>(kind)] = SimTimetable{rate_of(options, kind)};
  }
}

inline void ModelExecutor::enqueue(SimStream stream, SimOp const& op, lock_type& lock) {
  std::uint64_t& stream_ns = streams_.at(stream, "an enqueued operation");
  std::uint64_t ready = ready_ns(stream_ns);
  switch (op.what) {
  case SimOp::Kind::copy:
  case SimOp::Kind::batch:
  case SimOp::Kind::fill:
    ready = engines_[static_cast<std::size_t>(op.direction)].take(now_ns(), ready, op.bytes);
    break;
  case SimOp::Kind::compute:
    ready += op.duration_ns;
    break;
  case SimOp::Kind::host:
  case SimOp::Kind::record:
  case SimOp::Kind::wait:
  case SimOp::Kind::stop:
    break;
  }
  stream_ns = ready;
  finish_ns_ = std::max(finish_ns_, ready);
  if (op.what == SimOp::Kind::host) {
    call(op, ready, lock);
  }
}

inline void ModelExecutor::call(SimOp const& op, std::uint64_t time_ns, lock_type& lock) {
  lock.unlock();
  {
    std::lock_guard const guard{calls_mutex_};
    calls_.push_back({std::this_thread::get_id(), time_ns});
    running_calls_.store(calls_.size(), std::memory_order_relaxed);
  }
  op.function(op.argument);
  std::lock_guard const guard{calls_mutex_};
  auto const mine = [](HostCall const& c) { return c.thread == std::this_thread::get_id(); };
  calls_.erase(std::find_if(calls_.begin(), calls_.end(), mine));
  running_calls_.store(calls_.size(), std::memory_order_relaxed);
}

inline bool ModelExecutor::is_host_function_caller() const noexcept {
  if (running_calls_.load(std::memory_order_relaxed) == 0) {
    return false;
  }
  std::lock_guard const guard{calls_mutex_};
  return std::any_of(calls_.begin(), calls_.end(), [](HostCall const& c) {
    return c.thread == std::this_thread::get_id();
  });
}

inline std::uint64_t ModelExecutor::clock_ns() const noexcept {
  if (running_calls_.load(std::memory_order_relaxed) != 0) {
    std::lock_guard const guard{calls_mutex_};
    for (HostCall const& c : calls_) {
      if (c.thread == std::this_thread::get_id()) {
        return c.time_ns;
      }
    }
  }
  return now_ns();
}

}  // namespace spillway::detail

namespace spillway {

/// A device without bytes and with a virtual clock, for planning and replaying at any scale.
///
/// `advance_host` moves the host's clock on, `finish_time_ns` says when all enqueued work will have
/// finished.
using ModelApi = detail::BasicSimApi<detail::ModelExecutor>;

SPILLWAY_CHECK_MODEL(BatchCopyApi<ModelApi>);
SPILLWAY_CHECK_MODEL(VirtualMemoryApi<ModelApi>);

SPILLWAY_COMPILED_PART(
    class detail::SimMemory<detail::SimFakeBacking, detail::ModelExecutor::Barrier>);
SPILLWAY_COMPILED_PART(class detail::BasicSimApi<detail::ModelExecutor>);

}  // namespace spillway
