// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/sim/sim_handles.hpp>
#include <spillway/device/sim/sim_memory.hpp>
#include <spillway/device/sim/sim_op.hpp>
#include <spillway/device/sim/sim_options.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace spillway::detail {

/// A simulated device with a limited capacity. `Executor` runs its streams, and decides whether its
/// memory holds bytes or consists of addresses only. `SimApi`, `ModelApi` and `SteppedSimApi` are
/// instances of it.
///
/// It detects errors about which a real device is silent. A copy outside of live memory, an
/// overlapping copy or a destroyed handle throws `DeviceError` when it is enqueued; releasing
/// memory that was not given out ends the program. As on CUDA, memory may be released while
/// enqueued work still uses it: that work finishes, and later work is refused.
///
/// Threads  as the executor: `ThreadedExecutor` and `ModelExecutor` thread-safe, `SteppedExecutor`
///          thread-unsafe.
/// Streams  each call enqueues on the stream it is given and returns without waiting.
/// Errors   `noexcept` functions may allocate host memory; if there is none, they end the program.
/// Address  memory that it gives out does not move. The object itself is not movable.
template <class Executor>
class BasicSimApi {
 public:
  using stream_type = SimStream;
  using event_type = SimEvent;
  using physical_type = SimPhysical;

  static constexpr bool is_thread_safe = Executor::is_thread_safe;
  /// False if addresses only name memory, so that nothing may be read or written through them.
  static constexpr bool holds_bytes = Executor::backing_type::holds_bytes;
  static constexpr bool is_addressable = holds_bytes;

  /// @throws ContractViolation if the granularity is no power of two or no multiple of a page
  explicit BasicSimApi(SimOptions options = {});
  BasicSimApi(BasicSimApi const&) = delete;
  BasicSimApi& operator=(BasicSimApi const&) = delete;
  /// Runs what is enqueued, then frees all memory.
  ~BasicSimApi();

  // The functions that `DeviceApi` requires.
  [[nodiscard]] void* try_reserve(std::size_t bytes);
  void release(void* p, std::size_t bytes) noexcept;
  [[nodiscard]] void* try_allocate_pinned(std::size_t bytes, int numa_node);
  void free_pinned(void* p, std::size_t bytes) noexcept;
  void copy(void* to, void const* from, std::size_t bytes, CopyKind kind, stream_type stream);
  /// Enqueues a batch (`BatchCopyApi`) as one operation with the latency of one copy. If one of the
  /// copies fails, those before it have been enqueued.
  void copy_batch(std::span<void* const> to,
                  std::span<void const* const> from,
                  std::span<std::size_t const> sizes_bytes,
                  CopyKind kind,
                  stream_type stream);
  void fill(void* p, unsigned char byte, std::size_t bytes, stream_type stream);
  void launch_host(stream_type stream, HostFunction function, void* argument);
  /// Enqueues a call of `work()`, which stands for a kernel of a GPU. It may read and write memory
  /// under leases that were acquired on `stream`, and must not make device calls. An exception that
  /// leaves it ends the program.
  ///
  /// @throws as `launch_host`; std::bad_alloc
  template <std::invocable Work>
  void launch(stream_type stream, Work work) {
    launch_callable(*this, stream, std::move(work));
  }
  [[nodiscard]] stream_type create_stream();
  void destroy_stream(stream_type stream) noexcept;
  [[nodiscard]] event_type create_event();
  void destroy_event(event_type event) noexcept;
  void record(event_type event, stream_type stream);
  void wait(stream_type stream, event_type event);
  [[nodiscard]] bool is_complete(event_type event);
  void synchronize(event_type event);
  void synchronize(stream_type stream);
  [[nodiscard]] MemoryInfo memory_info() const;
  [[nodiscard]] int numa_node() const noexcept { return options_.numa_node; }
  [[nodiscard]] std::uint64_t clock_ns() const noexcept { return executor_.clock_ns(); }

  // The functions that `VirtualMemoryApi` requires.
  [[nodiscard]] std::size_t granularity_bytes() const noexcept {
    return options_.granularity_bytes;
  }
  [[nodiscard]] void* reserve_address(std::size_t bytes);
  void free_address(void* p, std::size_t bytes) noexcept;
  [[nodiscard]] std::optional<physical_type> try_create_physical(std::size_t bytes);
  void release_physical(physical_type physical) noexcept;
  [[nodiscard]] bool try_map(void* p, std::size_t bytes, std::span<physical_type const> pieces);
  void unmap(void* p, std::size_t bytes) noexcept;

  /// Keeps `stream` busy for `duration_ns`, like a kernel that touches no memory. A stepped device
  /// enqueues an operation that does nothing.
  void compute(stream_type stream, std::uint64_t duration_ns);

  /// Declares that a kernel which is enqueued on `stream` now uses device memory. Enqueues nothing.
  ///
  /// @throws DeviceError if the range is not live device memory; ContractViolation, on stepped
  ///         devices, if nothing orders the use after earlier work on the same bytes
  void use(void const* p, std::size_t bytes, Access access, stream_type stream);

  /// Overwrites unused memory with the poison byte, in stream order, so that tests notice a use of
  /// it.
  ///
  /// Does nothing if poison is off, the range is larger than the limit, or no bytes are held.
  /// Costs no virtual time, is not counted and cannot be made to fail.
  void poison(void* p, std::size_t bytes, stream_type stream);

  /// Makes a call fail without effect: the `nth` of that kind from now on; 1 is the next.
  void fail(SimCall call, std::uint64_t nth) {
    std::lock_guard const lock{mutex_};
    faults_.arm(call, nth);
  }
  void fail_copy(std::uint64_t nth) { fail(SimCall::copy, nth); }

  /// Returns how often each device call was made. Does not count as a device call.
  [[nodiscard]] SimCalls calls() const {
    std::lock_guard const lock{mutex_};
    return calls_;
  }
  /// Returns what has been given out and not given back. Does not count as a device call.
  [[nodiscard]] SimUsage usage() const {
    std::lock_guard const lock{mutex_};
    MemoryInfo const info = memory_.memory_info();
    return {info.total_bytes - info.free_bytes,
            memory_.pinned_bytes(),
            executor_.streams(),
            executor_.events()};
  }
  [[nodiscard]] SimOptions const& options() const noexcept { return options_; }
  /// Whether leases for reading a block that was never written are to be refused.
  [[nodiscard]] bool checks_reads() const noexcept {
    return holds_bytes && options_.checked && options_.check_reads;
  }

  /// Whether the caller is a function that a stream launched (`HostCallCheckingApi`).
  [[nodiscard]] bool is_host_function_caller() const {
    std::lock_guard const lock{mutex_};
    return executor_.is_host_function_caller();
  }

  // Only for stepped devices; documented at `SteppedExecutor`.
  bool step(stream_type stream) requires Executor::is_stepped { return executor_.step(stream); }
  std::size_t run(stream_type stream) requires Executor::is_stepped {
    return executor_.run(stream);
  }
  std::size_t run_all() requires Executor::is_stepped { return executor_.run_all(); }
  std::size_t run_random(std::uint64_t seed) requires Executor::is_stepped {
    return executor_.run_random(seed);
  }
  void stall(stream_type stream) requires Executor::is_stepped { executor_.stall(stream); }
  void resume(stream_type stream) requires Executor::is_stepped { executor_.resume(stream); }
  [[nodiscard]] std::size_t queued_ops(stream_type stream) requires Executor::is_stepped {
    return executor_.queued_ops(stream);
  }

  // Only for devices with a virtual clock; documented at `ModelExecutor`.
  void advance_host(std::uint64_t duration_ns) requires Executor::is_virtual {
    std::lock_guard const lock{mutex_};
    executor_.advance_host(duration_ns);
  }
  [[nodiscard]] std::uint64_t finish_time_ns() const requires Executor::is_virtual {
    std::lock_guard const lock{mutex_};
    return executor_.finish_time_ns();
  }

 private:
  using mutex_type = typename Executor::mutex_type;
  using lock_type = std::unique_lock<mutex_type>;

  [[nodiscard]] lock_type enter(char const* caller) const;

  SimOptions options_;
  mutable mutex_type mutex_;
  mutable SimCalls calls_;
  SimFaults faults_;
  std::vector<detail::SimCopy> batch_;  // of the current `copy_batch`; a member to reuse its memory
  detail::SimMemory<typename Executor::backing_type, typename Executor::barrier_type> memory_;
  // declared after memory_, so that enqueued work runs before the memory is freed
  Executor executor_;
};

template <class Executor>
BasicSimApi<Executor>::BasicSimApi(SimOptions options)
    : options_{options}, memory_{options_}, executor_{options_} {}

template <class Executor>
BasicSimApi<Executor>::~BasicSimApi() = default;

template <class Executor>
auto BasicSimApi<Executor>::enter(char const* caller) const -> lock_type {
  lock_type lock{mutex_};
  if (executor_.is_host_function_caller()) {
    detail::sim_misuse(Text{caller} +
                       " called by a function that a stream launched: it may use neither the "
                       "device nor an allocator, not even to end a lease, but can wake a thread "
                       "that does");
  }
  return lock;
}

template <class Executor>
void* BasicSimApi<Executor>::try_reserve(std::size_t bytes) {
  lock_type const lock = enter("try_reserve");
  void* const p = faults_.strikes(SimCall::reserve) ? nullptr : memory_.try_reserve(bytes);
  if (p != nullptr) {
    ++calls_.reserves;
  }
  return p;
}

template <class Executor>
void BasicSimApi<Executor>::release(void* p, std::size_t bytes) noexcept {
  lock_type const lock = enter("release");
  memory_.release(p, bytes, executor_.barrier());
  executor_.forget(p, bytes);
  ++calls_.releases;
}

template <class Executor>
void* BasicSimApi<Executor>::try_allocate_pinned(std::size_t bytes, int /*numa_node*/) {
  lock_type const lock = enter("try_allocate_pinned");
  void* const p =
      faults_.strikes(SimCall::allocate_pinned) ? nullptr : memory_.try_allocate_pinned(bytes);
  if (p != nullptr) {
    ++calls_.pinned_allocations;
  }
  return p;
}

template <class Executor>
void BasicSimApi<Executor>::free_pinned(void* p, std::size_t bytes) noexcept {
  lock_type const lock = enter("free_pinned");
  memory_.free_pinned(p, bytes, executor_.barrier());
  executor_.forget(p, bytes);
  ++calls_.pinned_frees;
}

template <class Executor>
void BasicSimApi<Executor>::copy(
    void* to, void const* from, std::size_t bytes, CopyKind kind, stream_type stream) {
  lock_type lock = enter("copy");
  faults_.strike(SimCall::copy, "copy");
  executor_.check(stream, "copy");
  if (options_.checked) {
    memory_.check_copy(to, from, bytes, kind);
  }
  executor_.enqueue(stream, detail::SimOp::copy(to, from, bytes, kind), lock);
  calls_.count_copy(kind, bytes);
}

template <class Executor>
void BasicSimApi<Executor>::copy_batch(std::span<void* const> to,
                                       std::span<void const* const> from,
                                       std::span<std::size_t const> sizes_bytes,
                                       CopyKind kind,
                                       stream_type stream) {
  expects(to.size() == from.size() && to.size() == sizes_bytes.size(),
          "the three spans differ in length");
  lock_type lock = enter("copy_batch");
  executor_.check(stream, "copy_batch");
  std::size_t bytes = 0;
  auto const enqueue = [&] {
    if (!batch_.empty()) {
      executor_.enqueue(stream, detail::SimOp::batch(batch_, bytes, kind), lock);
    }
  };
  batch_.clear();
  for (std::size_t i = 0; i < to.size(); ++i) {
    try {
      faults_.strike(SimCall::copy, "copy_batch");
      if (options_.checked) {
        memory_.check_copy(to[i], from[i], sizes_bytes[i], kind);
      }
    } catch (DeviceError const&) {
      enqueue();
      throw;
    }
    if (sizes_bytes[i] != 0) {
      batch_.push_back({to[i], from[i], sizes_bytes[i]});
      bytes += sizes_bytes[i];
    }
    calls_.count_copy(kind, sizes_bytes[i]);
  }
  enqueue();
  ++calls_.copy_batches;
}

template <class Executor>
void BasicSimApi<Executor>::fill(void* p,
                                 unsigned char byte,
                                 std::size_t bytes,
                                 stream_type stream) {
  lock_type lock = enter("fill");
  faults_.strike(SimCall::fill, "fill");
  executor_.check(stream, "fill");
  if (options_.checked) {
    memory_.check_device(p, bytes, "range of a fill");
  }
  executor_.enqueue(stream, detail::SimOp::fill(p, byte, bytes), lock);
  ++calls_.fills;
  calls_.filled_bytes += bytes;
}

template <class Executor>
void BasicSimApi<Executor>::use(void const* p,
                                std::size_t bytes,
                                Access access,
                                stream_type stream) {
  lock_type const lock = enter("use");
  executor_.check(stream, "use");
  if (options_.checked) {
    memory_.check_device(p, bytes, "range of a kernel");
  }
  executor_.use(stream, p, bytes, access);
}

template <class Executor>
void BasicSimApi<Executor>::poison(void* p, std::size_t bytes, stream_type stream) {
  lock_type lock = enter("poison");
  executor_.check(stream, "poison");
  if (options_.checked) {
    memory_.check_device(p, bytes, "range to poison");
  }
  if constexpr (holds_bytes) {
    if (options_.poison && bytes <= options_.poison_limit_bytes) {
      detail::SimOp op = detail::SimOp::fill(p, options_.poison_byte, bytes);
      op.is_free = true;
      executor_.enqueue(stream, op, lock);
    }
  }
}

template <class Executor>
void BasicSimApi<Executor>::launch_host(stream_type stream, HostFunction function, void* argument) {
  lock_type lock = enter("launch_host");
  faults_.strike(SimCall::launch_host, "launch_host");
  executor_.check(stream, "launch_host");
  if (function == nullptr) {
    throw DeviceError{"SimApi: launch_host was given no function"};
  }
  ++calls_.host_launches;  // counted before, since the executor may release the lock
  executor_.enqueue(stream, detail::SimOp::host(function, argument), lock);
}

template <class Executor>
void BasicSimApi<Executor>::compute(stream_type stream, std::uint64_t duration_ns) {
  lock_type lock = enter("compute");
  executor_.enqueue(stream, detail::SimOp::compute(duration_ns), lock);
}

template <class Executor>
auto BasicSimApi<Executor>::create_stream() -> stream_type {
  lock_type const lock = enter("create_stream");
  faults_.strike(SimCall::create_stream, "create_stream");
  stream_type const stream = executor_.create_stream();
  ++calls_.streams_created;
  return stream;
}

template <class Executor>
void BasicSimApi<Executor>::destroy_stream(stream_type stream) noexcept {
  lock_type const lock = enter("destroy_stream");
  executor_.destroy_stream(stream);
  ++calls_.streams_destroyed;
}

template <class Executor>
auto BasicSimApi<Executor>::create_event() -> event_type {
  lock_type const lock = enter("create_event");
  faults_.strike(SimCall::create_event, "create_event");
  event_type const event = executor_.create_event();
  ++calls_.events_created;
  return event;
}

template <class Executor>
void BasicSimApi<Executor>::destroy_event(event_type event) noexcept {
  lock_type const lock = enter("destroy_event");
  executor_.destroy_event(event);
  ++calls_.events_destroyed;
}

template <class Executor>
void BasicSimApi<Executor>::record(event_type event, stream_type stream) {
  lock_type const lock = enter("record");
  faults_.strike(SimCall::record, "record");
  executor_.record(event, stream);
  ++calls_.records;
}

template <class Executor>
void BasicSimApi<Executor>::wait(stream_type stream, event_type event) {
  lock_type const lock = enter("wait");
  faults_.strike(SimCall::wait, "wait");
  executor_.wait(stream, event);
  ++calls_.waits;
}

template <class Executor>
bool BasicSimApi<Executor>::is_complete(event_type event) {
  lock_type const lock = enter("is_complete");
  bool const is_complete = executor_.is_complete(event);
  ++calls_.completion_queries;
  return is_complete;
}

template <class Executor>
void BasicSimApi<Executor>::synchronize(event_type event) {
  lock_type lock = enter("synchronize");
  faults_.strike(SimCall::synchronize, "synchronize");
  executor_.check(event, "synchronize");
  // counted before, since the executor releases the lock while it waits
  ++calls_.host_synchronizations;
  executor_.synchronize(event, lock);
}

template <class Executor>
void BasicSimApi<Executor>::synchronize(stream_type stream) {
  lock_type lock = enter("synchronize");
  faults_.strike(SimCall::synchronize, "synchronize");
  executor_.check(stream, "synchronize");
  ++calls_.host_synchronizations;
  executor_.synchronize(stream, lock);
}

template <class Executor>
MemoryInfo BasicSimApi<Executor>::memory_info() const {
  lock_type const lock = enter("memory_info");
  ++calls_.memory_queries;
  return memory_.memory_info();
}

template <class Executor>
void* BasicSimApi<Executor>::reserve_address(std::size_t bytes) {
  lock_type const lock = enter("reserve_address");
  faults_.strike(SimCall::reserve_address, "reserve_address");
  void* const p = memory_.reserve_address(bytes);
  ++calls_.address_reservations;
  return p;
}

template <class Executor>
void BasicSimApi<Executor>::free_address(void* p, std::size_t bytes) noexcept {
  lock_type const lock = enter("free_address");
  memory_.free_address(p, bytes);
  ++calls_.address_frees;
}

template <class Executor>
auto BasicSimApi<Executor>::try_create_physical(std::size_t bytes) -> std::optional<physical_type> {
  lock_type const lock = enter("try_create_physical");
  faults_.strike(SimCall::create_physical, "try_create_physical");
  std::optional<physical_type> const physical = memory_.try_create_physical(bytes);
  if (physical) {
    ++calls_.physical_creations;
  }
  return physical;
}

template <class Executor>
void BasicSimApi<Executor>::release_physical(physical_type physical) noexcept {
  lock_type const lock = enter("release_physical");
  memory_.release_physical(physical);
  ++calls_.physical_releases;
}

template <class Executor>
bool BasicSimApi<Executor>::try_map(void* p,
                                    std::size_t bytes,
                                    std::span<physical_type const> pieces) {
  lock_type const lock = enter("map");
  faults_.strike(SimCall::map, "map");
  auto* const first = static_cast<std::byte*>(p);
  std::size_t mapped = 0;
  try {
    for (; mapped < pieces.size(); ++mapped) {
      memory_.map(first + mapped * bytes, bytes, pieces[mapped]);
    }
  } catch (...) {
    if (mapped != 0) {
      (void)memory_.unmap(p, mapped * bytes);
    }
    throw;
  }
  ++calls_.maps;
  calls_.mapped_pieces += pieces.size();
  return true;
}

template <class Executor>
void BasicSimApi<Executor>::unmap(void* p, std::size_t bytes) noexcept {
  lock_type const lock = enter("unmap");
  if (executor_.is_in_use(p, bytes)) {
    detail::sim_misuse(Text{"unmap of "} + detail::describe_range(p, bytes) +
                       " while enqueued work still uses it");
  }
  calls_.unmapped_pieces += memory_.unmap(p, bytes);
  executor_.forget(p, bytes);
  ++calls_.unmaps;
}

}  // namespace spillway::detail
