// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/sim/basic_sim_api.hpp>
#include <spillway/device/sim/sim_backing.hpp>
#include <spillway/device/sim/sim_handles.hpp>
#include <spillway/device/sim/sim_op.hpp>
#include <spillway/device/sim/sim_options.hpp>
#include <spillway/device/sim/sim_worker.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace spillway::detail {

/// The executor of `SimApi`: runs each stream of a simulated device on a thread of its own.
///
/// Threads  thread-safe through `BasicSimApi`, which calls it under its lock.
template <class = Lazily>
class BasicThreadedExecutor {
 public:
  static constexpr bool is_thread_safe = true;
  static constexpr bool is_stepped = false;
  static constexpr bool is_virtual = false;
  using mutex_type = std::mutex;
  using backing_type = SimHostBacking;

  /// Stands for all work that was enqueued, on all streams, when it was made.
  class Barrier {
   public:
    void add(SimWorker const& worker) { waits_.emplace_back(worker.progress(), worker.pushed()); }
    [[nodiscard]] bool is_passed() const noexcept {
      return std::all_of(waits_.begin(), waits_.end(), [](auto const& wait) {
        return wait.first->has_run(wait.second);
      });
    }

   private:
    std::vector<std::pair<std::shared_ptr<SimProgress const>, std::uint64_t>> waits_;
  };
  using barrier_type = Barrier;

  explicit BasicThreadedExecutor(SimOptions const& options) : engines_{options} {}
  BasicThreadedExecutor(BasicThreadedExecutor const&) = delete;
  BasicThreadedExecutor& operator=(BasicThreadedExecutor const&) = delete;
  ~BasicThreadedExecutor();

  [[nodiscard]] SimStream create_stream();
  void destroy_stream(SimStream stream) noexcept;
  [[nodiscard]] SimEvent create_event() { return events_.insert(nullptr); }
  void destroy_event(SimEvent event) noexcept;

  /// @throws DeviceError if `stream` names nothing
  void check(SimStream stream, char const* caller) { (void)streams_.at(stream, caller); }
  void check(SimEvent event, char const* caller) { (void)events_.at(event, caller); }

  void enqueue(SimStream stream, SimOp const& op, std::unique_lock<std::mutex>& lock);
  void record(SimEvent event, SimStream stream);
  void wait(SimStream stream, SimEvent event);
  [[nodiscard]] bool is_complete(SimEvent event);
  void synchronize(SimEvent event, std::unique_lock<std::mutex>& lock);
  void synchronize(SimStream stream, std::unique_lock<std::mutex>& lock);

  /// Only checks the stream, since a race detector of the host sees what the threads access.
  void use(SimStream stream, void const* /*p*/, std::size_t /*bytes*/, Access /*access*/) {
    check(stream, "use");
  }
  /// True if an operation that has not run yet reads or writes there.
  [[nodiscard]] bool is_in_use(void const* p, std::size_t bytes) noexcept;
  void forget(void const* /*p*/, std::size_t /*bytes*/) noexcept {}

  [[nodiscard]] Barrier barrier();
  /// True on a stream's thread. Such a thread runs only operations, so a call on it comes from a
  /// host function.
  [[nodiscard]] bool is_host_function_caller() const noexcept {
    return std::find(threads_.begin(), threads_.end(), std::this_thread::get_id()) !=
           threads_.end();
  }
  [[nodiscard]] std::uint64_t clock_ns() const noexcept { return steady_ns(); }
  [[nodiscard]] std::size_t streams() const noexcept { return streams_.size(); }
  [[nodiscard]] std::size_t events() const noexcept { return events_.size(); }

 private:
  using Worker = SimWorker;
  using Signal = SimSignal;

  [[nodiscard]] Signal* push_record(Worker& worker);
  void reap() noexcept;
  static void await(Signal& signal, std::unique_lock<std::mutex>& lock) noexcept;

  SimEngines engines_;
  SimSignals signals_;
  SimTable<SimStreamTag, std::unique_ptr<Worker>> streams_;
  SimTable<SimEventTag, Signal*> events_;
  std::vector<std::unique_ptr<Worker>> leaving_;  // destroyed streams that still have work to run
  std::vector<std::thread::id> threads_;  // of all streams, destroyed ones that still run included
};

using ThreadedExecutor = BasicThreadedExecutor<>;

template <class Lazy>
BasicThreadedExecutor<Lazy>::~BasicThreadedExecutor() {
  // All threads are told to stop before the first one is joined, and signals must outlive the
  // threads.
  streams_.for_each([](std::unique_ptr<Worker> const& worker) { worker->stop(); });
  streams_.for_each([](std::unique_ptr<Worker>& worker) { worker.reset(); });
  leaving_.clear();
}

template <class Lazy>
SimStream BasicThreadedExecutor<Lazy>::create_stream() {
  reap();
  leaving_.reserve(leaving_.size() + streams_.size() + 1);
  threads_.reserve(threads_.size() + 1);
  try {
    auto worker = std::make_unique<Worker>(engines_);
    std::thread::id const thread = worker->thread_id();
    SimStream const stream = streams_.insert(std::move(worker));
    threads_.push_back(thread);  // last: the system may give the id of an ended thread to another
    return stream;
  } catch (std::system_error const& error) {
    throw DeviceError{detail::Text{"SimApi: cannot start a thread for a stream: "} + error.what()};
  }
}

template <class Lazy>
void BasicThreadedExecutor<Lazy>::destroy_stream(SimStream stream) noexcept {
  std::unique_ptr<Worker>& worker = streams_.expect(stream, "destroy_stream");
  worker->stop();
  leaving_.push_back(std::move(worker));
  streams_.erase(stream);
}

template <class Lazy>
void BasicThreadedExecutor<Lazy>::destroy_event(SimEvent event) noexcept {
  signals_.abandon(events_.expect(event, "destroy_event"));
  events_.erase(event);
}

template <class Lazy>
void BasicThreadedExecutor<Lazy>::enqueue(SimStream stream,
                                          SimOp const& op,
                                          std::unique_lock<std::mutex>& /*lock*/) {
  streams_.at(stream, "an enqueued operation")->push({op});
}

template <class Lazy>
void BasicThreadedExecutor<Lazy>::record(SimEvent event, SimStream stream) {
  Signal*& signal = events_.at(event, "record");
  Signal* const recorded = push_record(*streams_.at(stream, "record"));
  signals_.abandon(std::exchange(signal, recorded));
}

template <class Lazy>
void BasicThreadedExecutor<Lazy>::wait(SimStream stream, SimEvent event) {
  Worker& worker = *streams_.at(stream, "wait");
  Signal* const signal = events_.at(event, "wait");
  if (signal == nullptr) {
    return;
  }
  signal->add_user();
  worker.push({{.what = SimOp::Kind::wait}, signal});
}

template <class Lazy>
bool BasicThreadedExecutor<Lazy>::is_complete(SimEvent event) {
  Signal const* const signal = events_.at(event, "is_complete");
  return signal == nullptr || signal->is_set();
}

template <class Lazy>
void BasicThreadedExecutor<Lazy>::synchronize(SimEvent event, std::unique_lock<std::mutex>& lock) {
  Signal* const signal = events_.at(event, "synchronize");
  if (signal == nullptr) {
    return;
  }
  signal->add_user();
  await(*signal, lock);
}

template <class Lazy>
void BasicThreadedExecutor<Lazy>::synchronize(SimStream stream,
                                              std::unique_lock<std::mutex>& lock) {
  Signal* const signal = push_record(*streams_.at(stream, "synchronize"));
  signal->add_user();
  signals_.abandon(signal);
  await(*signal, lock);
}

template <class Lazy>
void BasicThreadedExecutor<Lazy>::await(Signal& signal,
                                        std::unique_lock<std::mutex>& lock) noexcept {
  lock.unlock();
  signal.wait();
  signal.drop_user();
}

template <class Lazy>
SimSignal* BasicThreadedExecutor<Lazy>::push_record(Worker& worker) {
  Signal* const signal = signals_.acquire();
  signal->add_user();
  worker.push({{.what = SimOp::Kind::record}, signal});
  return signal;
}

template <class Lazy>
auto BasicThreadedExecutor<Lazy>::barrier() -> Barrier {
  Barrier barrier;
  auto const add = [&barrier](std::unique_ptr<Worker> const& worker) {
    if (!worker->is_idle()) {
      barrier.add(*worker);
    }
  };
  streams_.for_each([&add](std::unique_ptr<Worker> const& worker) { add(worker); });
  std::for_each(leaving_.begin(), leaving_.end(), add);
  return barrier;
}

template <class Lazy>
bool BasicThreadedExecutor<Lazy>::is_in_use(void const* p, std::size_t bytes) noexcept {
  bool is_in_use = std::any_of(leaving_.begin(), leaving_.end(), [p, bytes](auto const& worker) {
    return worker->is_in_use(p, bytes);
  });
  streams_.for_each([&](std::unique_ptr<Worker> const& worker) {
    is_in_use = is_in_use || worker->is_in_use(p, bytes);
  });
  return is_in_use;
}

template <class Lazy>
void BasicThreadedExecutor<Lazy>::reap() noexcept {
  std::erase_if(leaving_, [this](std::unique_ptr<Worker> const& worker) {
    bool const has_stopped = worker->is_idle();
    if (has_stopped) {
      std::erase(threads_, worker->thread_id());
    }
    return has_stopped;
  });
}

}  // namespace spillway::detail

namespace spillway {

/// A simulated device in host memory whose streams run concurrently, each on a thread of its own.
/// It is the default device on machines without a GPU.
using SimApi = detail::BasicSimApi<detail::ThreadedExecutor>;

SPILLWAY_CHECK_MODEL(BatchCopyApi<SimApi>);
SPILLWAY_CHECK_MODEL(VirtualMemoryApi<SimApi>);

SPILLWAY_COMPILED_PART(
    class detail::SimMemory<detail::SimHostBacking, detail::ThreadedExecutor::Barrier>);
SPILLWAY_COMPILED_PART(class detail::BasicSimApi<detail::ThreadedExecutor>);

SPILLWAY_COMPILED_PART(class detail::BasicThreadedExecutor<>);

}  // namespace spillway
