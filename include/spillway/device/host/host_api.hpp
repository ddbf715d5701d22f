// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/host_mapping.hpp>
#include <spillway/core/types.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <sys/mman.h>

namespace spillway {

/// Names a stream of a `HostApi`. The default, `caller`, is the calling thread itself, so work that
/// is enqueued on it runs at once.
enum class HostStream : std::uint32_t { caller = 0 };
enum class HostEvent : std::uint64_t {};

/// The machine's own memory as a device, for programs that compute on the CPU. A model of
/// `DeviceApi`.
///
/// A computation on the CPU has finished when its call returns. `HostStream::caller` stands for
/// that: a copy enqueued there runs within the call, an event recorded there is complete at once,
/// and a wait there for another stream blocks the calling thread. Each stream that is created has a
/// thread, which runs beside the program. Swap-outs and swap-ins are enqueued on such streams.
///
/// Waking a thread and waiting for it costs as much as copying tens of kilobytes. So a stream's
/// thread sleeps until 1 MiB of copies or a function is enqueued, or until an event of the stream
/// was queried twice before it was complete. A thread that waits for copies which have not begun
/// runs them itself. A derived class may enqueue *tasks*, which run in the same way.
///
/// Copies are as fast as the memory. To imitate a device behind a link, set a rate with
/// `set_link_bytes_per_second`. Copies between host and device on created streams then take at
/// least as long as on a link of that rate, separately in each direction.
///
/// The system provides memory when it is first touched, not when it is reserved. Nothing is
/// page-locked, since only the CPU accesses it. The only limit is the machine's memory, or what a
/// container leaves of it.
///
/// Threads  thread-safe.
/// Streams  created ones are asynchronous; `HostStream::caller` is not, and may be used by all
///          threads.
/// Address  fixed from `try_reserve` to `release`.
template <class = detail::Lazily>
class BasicHostApi {
 public:
  using HostApi = BasicHostApi;  // for the constructors of derived classes

  using stream_type = HostStream;
  using event_type = HostEvent;

  static constexpr bool is_thread_safe = true;
  static constexpr bool is_addressable = true;
  [[nodiscard]] static constexpr bool is_caller(stream_type stream) noexcept {
    return stream == HostStream::caller;
  }

  BasicHostApi() = default;
  BasicHostApi(BasicHostApi const&) = delete;
  BasicHostApi& operator=(BasicHostApi const&) = delete;
  /// Runs what is enqueued, then frees all memory.
  ~BasicHostApi();

  [[nodiscard]] void* try_reserve(std::size_t bytes) noexcept { return try_map(bytes); }
  void release(void* p, std::size_t bytes) noexcept { unmap(p, bytes); }
  [[nodiscard]] void* try_allocate_pinned(std::size_t bytes, int /*numa_node*/) noexcept {
    return try_map(bytes);
  }
  void free_pinned(void* p, std::size_t bytes) noexcept { unmap(p, bytes); }

  void copy(void* to, void const* from, std::size_t bytes, CopyKind kind, stream_type stream) {
    enqueue(stream,
            {.kind = Kind::copy,
             .to = to,
             .from = from,
             .bytes = bytes,
             .crosses_link = kind != CopyKind::on_device});
  }
  /// Sets the rate of copies between host and device that run from now on, in bytes per second and
  /// direction; 0: as fast as the memory.
  void set_link_bytes_per_second(double rate) noexcept { link_bytes_per_second_ = rate; }
  void fill(void* p, unsigned char byte, std::size_t bytes, stream_type stream) {
    enqueue(stream, {.kind = Kind::fill, .to = p, .bytes = bytes, .byte = byte});
  }
  void launch_host(stream_type stream, HostFunction function, void* argument) {
    enqueue(stream, {.kind = Kind::call, .to = argument, .function = function});
  }
  /// Enqueues a call of `work()` in the order of the stream, as a kernel on a GPU. It may read and
  /// write memory under leases that were acquired on `stream`, and must make no device calls. An
  /// exception that leaves it ends the program.
  ///
  /// @throws as `launch_host`; std::bad_alloc
  template <std::invocable Work>
  void launch(stream_type stream, Work work) {
    detail::launch_callable(*this, stream, std::move(work));
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
  [[nodiscard]] int numa_node() const noexcept { return -1; }
  [[nodiscard]] std::uint64_t clock_ns() const noexcept {
    return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                          std::chrono::steady_clock::now().time_since_epoch())
                                          .count());
  }

  /// To be called before `fork`: waits until all streams are idle, and locks out other threads. The
  /// same thread may call it again for another allocator on this device. After the fork, one of the
  /// functions below must be called for each call.
  void before_fork();
  /// Lets other threads in for a moment if this thread locks them out. It does so before it calls
  /// `before_fork` again, since what it then waits for may need the device.
  void let_others_in();
  /// To be called after `fork` in the parent: lets the streams and other threads continue.
  void after_fork_in_parent() noexcept { end_fork(); }
  /// To be called after `fork` in the child, which has none of the parent's threads: from now on
  /// every stream is the caller.
  void after_fork_in_child() noexcept;

 protected:
  /// Enqueues a call of a function that waits for nothing and takes no longer than a copy. It wakes
  /// no thread: it is run by the thread that runs the operation before it, or by a thread that
  /// waits for it.
  void enqueue_task(stream_type stream, HostFunction function, void* argument) {
    enqueue(stream, {.kind = Kind::task, .to = argument, .function = function});
  }
  /// Number of calls of `before_fork` by this thread for which the call after the fork is still
  /// missing.
  [[nodiscard]] std::size_t forks() const noexcept {
    return forker_ == std::this_thread::get_id() ? forks_ : 0;
  }
  /// Runs what is enqueued, and ends the streams' threads. To be called first in the destructor of
  /// a derived class if its tasks use its members.
  void finish() noexcept;

 private:
  enum class Kind : std::uint8_t { copy, fill, task, call, wait };

  using Clock = std::chrono::steady_clock;

  struct Stream;
  /// A point on a stream: its first `count` operations. `stream` is null for `HostStream::caller`.
  struct Point {
    Stream* stream = nullptr;
    std::uint64_t count = 0;
  };
  struct Op {
    Kind kind = Kind::copy;
    void* to = nullptr;
    void const* from = nullptr;
    std::size_t bytes = 0;
    unsigned char byte = 0;
    bool crosses_link = false;
    HostFunction function = nullptr;
    Point after{};
  };
  struct Stream {
    std::deque<Op> queue;
    std::condition_variable work;  // the stream's thread sleeps here
    std::uint64_t enqueued = 0;
    std::uint64_t done = 0;
    // smallest number of an operation that a sleeping thread waits for
    std::uint64_t awaited = never;
    std::size_t bytes = 0;    // bytes of copies and fills enqueued since the queue was last empty
    bool is_running = false;  // some thread runs an operation of this stream
    bool is_due = false;      // the stream's thread should run what is enqueued
    // an event was queried before it was complete, since the last operation was enqueued
    bool is_asked = false;
    bool is_closing = false;
    bool has_ended = false;            // its thread will do nothing more
    Clock::time_point link_free_at{};  // when the simulated link has carried all copies so far
    std::thread thread;

    [[nodiscard]] bool needs_thread() const noexcept {
      return !is_running && (is_closing || (is_due && !queue.empty()));
    }
    /// Whether the thread, although it was told to end, can serve another stream instead.
    [[nodiscard]] bool is_reusable() const noexcept {
      return !is_running && !has_ended && queue.empty();
    }
    /// Turns a destroyed, idle stream into a new one. Its counts continue, so events that were
    /// recorded on the old one stay valid.
    void restart() noexcept {
      is_closing = false;
      has_ended = false;
      link_free_at = {};
    }
  };
  using Guard = std::unique_lock<std::mutex>;

  static constexpr std::uint64_t never = std::numeric_limits<std::uint64_t>::max();
  /// The most bytes that may be enqueued without waking the stream's thread: 1 MiB, or less if a
  /// link would carry fewer in 100 us.
  [[nodiscard]] std::size_t most_idle_bytes() const noexcept {
    double const rate = link_bytes_per_second_;
    return rate == 0 ? 1_MiB : static_cast<std::size_t>(std::min(100e-6 * rate, 1048576.0));
  }

  [[nodiscard]] void* try_map(std::size_t bytes) noexcept;
  void unmap(void* p, std::size_t bytes) noexcept;
  void enqueue(stream_type stream, Op op);
  static void run_here(Op const& op) noexcept;
  /// Sleeps until the simulated link would have carried a copy that began at `start`. A rest that
  /// is shorter than the system can sleep is added to the next copy.
  void pace(Stream& stream, std::size_t bytes, typename Clock::time_point start) const;
  /// @returns whether the caller must wake the stream's thread, after it has released the lock
  [[nodiscard]] bool add(Stream& stream, Op const& op);
  void serve(Stream& stream);
  void run_next(Guard& guard, Stream& stream);
  void run_first(Guard& guard, Stream& stream);
  void await(Guard& guard, Point const& point);
  [[nodiscard]] static bool is_past(Point const& point) noexcept {
    return point.stream == nullptr || point.stream->done >= point.count;
  }
  /// Joins the threads of destroyed streams that have ended, to free their system resources. The
  /// caller holds the lock.
  void reap() noexcept;
  /// Gives the new stream of this name the thread of a destroyed stream whose thread has not ended
  /// yet. So there are never more threads than there were streams at a time, even if the threads
  /// seldom get to run. The caller holds the lock.
  /// @returns whether there was such a thread
  [[nodiscard]] bool try_reuse_thread(stream_type name);
  static void close(Stream& stream) {
    stream.is_closing = true;
    stream.work.notify_one();
  }
  void end_fork() noexcept {
    if (--forks_ == 0) {
      forker_ = std::thread::id{};
      mutex_.unlock();
      fork_mutex_.unlock();
    }
  }
  /// Returns null for `HostStream::caller`. @throws DeviceError for a handle that names no stream
  [[nodiscard]] Stream* find(stream_type stream, char const* call = __builtin_FUNCTION()) const;
  [[nodiscard]] Point& find(event_type event, char const* call = __builtin_FUNCTION());

  std::atomic<double> link_bytes_per_second_{0};
  std::mutex fork_mutex_;  // held from the first `before_fork` to the last call after the fork
  std::atomic<std::thread::id> forker_{};  // the thread that holds it
  std::size_t forks_ = 0;                  // calls of `before_fork` by that thread
  mutable std::mutex mutex_;  // guards all members below; not held while bytes are copied
  std::condition_variable progress_;
  std::unordered_map<HostStream, Stream*> streams_;
  // including destroyed streams, which events may still name
  std::vector<std::unique_ptr<Stream>> all_;
  std::vector<Stream*> leaving_;  // destroyed streams whose threads have not been joined
  // destroyed streams whose threads have been joined; reused for new streams
  std::vector<Stream*> idle_;
  std::unordered_map<HostEvent, Point> events_;
  std::uint32_t last_stream_ = 0;
  std::uint64_t last_event_ = 0;
  std::unordered_map<void*, std::size_t> maps_;
  std::size_t mapped_bytes_ = 0;
  std::size_t const total_bytes_ = detail::HostMemory::usable_bytes();
  bool has_threads_ = true;  // false in a forked child
};

using HostApi = BasicHostApi<>;

SPILLWAY_CHECK_MODEL(DeviceApi<HostApi>);

template <class Lazy>
void BasicHostApi<Lazy>::finish() noexcept {
  {
    Guard const guard{mutex_};
    for (auto const& stream : all_) {
      close(*stream);
    }
  }
  for (auto const& stream : all_) {
    if (stream->thread.joinable()) {
      stream->thread.join();
    }
  }
}

template <class Lazy>
BasicHostApi<Lazy>::~BasicHostApi() {
  finish();
  for (auto const& [p, bytes] : maps_) {
    ::munmap(p, bytes);
  }
}

template <class Lazy>
void* BasicHostApi<Lazy>::try_map(std::size_t bytes) noexcept {
  std::size_t const most = memory_info().total_bytes;
  if (bytes == 0 || bytes > most) {
    return nullptr;
  }
  void* const p = ::mmap(
      nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    return nullptr;
  }
  (void)::madvise(p, bytes, MADV_HUGEPAGE);  // fewer page faults where the system has large pages
  try {
    Guard const guard{mutex_};
    maps_.emplace(p, bytes);
    mapped_bytes_ += bytes;
  } catch (...) {
    ::munmap(p, bytes);
    return nullptr;
  }
  return p;
}

template <class Lazy>
void BasicHostApi<Lazy>::unmap(void* p, std::size_t bytes) noexcept {
  {
    Guard const guard{mutex_};
    maps_.erase(p);
    mapped_bytes_ -= bytes;
  }
  ::munmap(p, bytes);
}

template <class Lazy>
MemoryInfo BasicHostApi<Lazy>::memory_info() const {
  Guard const guard{mutex_};
  return {total_bytes_ - std::min(mapped_bytes_, total_bytes_), total_bytes_};
}

template <class Lazy>
auto BasicHostApi<Lazy>::find(stream_type stream, char const* call) const -> Stream* {
  if (stream == HostStream::caller) {
    return nullptr;
  }
  auto const found = streams_.find(stream);
  if (found == streams_.end()) {
    throw DeviceError{detail::Text{"HostApi: "} + call +
                      ": no such stream: it was destroyed, or is another device's"};
  }
  return found->second;
}

template <class Lazy>
auto BasicHostApi<Lazy>::find(event_type event, char const* call) -> Point& {
  auto const found = events_.find(event);
  if (found == events_.end()) {
    throw DeviceError{detail::Text{"HostApi: "} + call +
                      ": no such event: it was destroyed, or is another device's"};
  }
  return found->second;
}

template <class Lazy>
void BasicHostApi<Lazy>::run_here(Op const& op) noexcept {
  switch (op.kind) {
  case Kind::copy:
    std::memmove(op.to, op.from, op.bytes);
    break;
  case Kind::fill:
    std::memset(op.to, op.byte, op.bytes);
    break;
  case Kind::task:
  case Kind::call:
    op.function(op.to);
    break;
  case Kind::wait:
    break;
  }
}

template <class Lazy>
void BasicHostApi<Lazy>::pace(Stream& stream,
                              std::size_t bytes,
                              typename Clock::time_point start) const {
  double const rate = link_bytes_per_second_;
  if (rate == 0) {
    return;
  }
  constexpr std::chrono::microseconds shortest_sleep{100};
  stream.link_free_at =
      std::max(stream.link_free_at, start) +
      std::chrono::nanoseconds{static_cast<std::int64_t>(1e9 * static_cast<double>(bytes) / rate)};
  if (stream.link_free_at - Clock::now() > shortest_sleep) {
    std::this_thread::sleep_until(stream.link_free_at);
  }
}

template <class Lazy>
bool BasicHostApi<Lazy>::add(Stream& stream, Op const& op) {
  stream.queue.push_back(op);
  ++stream.enqueued;
  stream.bytes += op.bytes;
  stream.is_due = stream.is_due || op.kind == Kind::call || stream.bytes >= most_idle_bytes();
  return stream.needs_thread();
}

template <class Lazy>
void BasicHostApi<Lazy>::enqueue(stream_type stream, Op op) {
  Stream* on = nullptr;
  bool needs_thread = false;
  {
    Guard const guard{mutex_};
    on = find(stream);
    if (on != nullptr && has_threads_) {
      needs_thread = add(*on, op);
    } else {
      on = nullptr;
    }
  }
  if (needs_thread) {
    on->work.notify_one();  // without the lock, which the thread needs at once
  } else if (on == nullptr) {
    run_here(op);
  }
}

/// Runs the first operation of a stream that no thread is running now, and the tasks directly
/// behind it.
template <class Lazy>
void BasicHostApi<Lazy>::run_next(Guard& guard, Stream& stream) {
  do {
    run_first(guard, stream);
  } while (!stream.queue.empty() && stream.queue.front().kind == Kind::task);
}

template <class Lazy>
void BasicHostApi<Lazy>::run_first(Guard& guard, Stream& stream) {
  Op const op = stream.queue.front();
  stream.queue.pop_front();
  stream.is_running = true;
  if (op.kind == Kind::wait) {
    await(guard, op.after);
  } else {
    guard.unlock();
    auto const start = op.crosses_link ? Clock::now() : typename Clock::time_point{};
    run_here(op);
    if (op.crosses_link) {
      pace(stream, op.bytes, start);
    }
    guard.lock();
  }
  stream.is_running = false;
  stream.is_asked = false;
  ++stream.done;
  if (stream.queue.empty()) {
    stream.is_due = false;
    stream.bytes = 0;
  }
  if (stream.done >= stream.awaited) {
    stream.awaited = never;
    progress_.notify_all();
  }
}

/// Blocks until the point has passed. Runs the operations before it, unless another thread does.
/// Functions are left to the stream's own thread.
template <class Lazy>
void BasicHostApi<Lazy>::await(Guard& guard, Point const& point) {
  while (!is_past(point)) {
    Stream& stream = *point.stream;
    if (!stream.is_running && stream.queue.front().kind != Kind::call) {
      run_next(guard, stream);
      if (stream.needs_thread()) {
        stream.work.notify_one();  // it has left the queue alone while this thread ran it
      }
    } else {
      stream.is_due = true;  // the thread that runs the stream now may stop before this point
      stream.awaited = std::min(stream.awaited, point.count);
      progress_.wait(guard);
    }
  }
}

template <class Lazy>
void BasicHostApi<Lazy>::serve(Stream& stream) {
  Guard guard{mutex_};
  for (;;) {
    stream.work.wait(guard, [&] { return stream.needs_thread(); });
    if (stream.queue.empty()) {
      stream.has_ended = true;
      return;
    }
    run_next(guard, stream);
  }
}

template <class Lazy>
auto BasicHostApi<Lazy>::create_stream() -> stream_type {
  Guard const guard{mutex_};
  reap();
  // so that destroying streams cannot fail
  leaving_.reserve(leaving_.size() + streams_.size() + 1);
  idle_.reserve(idle_.size() + leaving_.size() + streams_.size() + 1);
  HostStream const name{++last_stream_};
  if (try_reuse_thread(name)) {
    return name;
  }
  if (idle_.empty()) {
    idle_.push_back(all_.emplace_back(std::make_unique<Stream>()).get());
  }
  Stream& stream = *idle_.back();
  streams_.emplace(name, &stream);
  idle_.pop_back();
  stream.restart();
  if (has_threads_) {
    try {
      stream.thread = std::thread{[this, &stream] { serve(stream); }};
    } catch (std::exception const& error) {
      streams_.erase(name);
      idle_.push_back(&stream);
      throw DeviceError{detail::Text{"HostApi: the system gave no thread for a stream: "} +
                        error.what()};
    }
  }
  return name;
}

template <class Lazy>
bool BasicHostApi<Lazy>::try_reuse_thread(stream_type name) {
  auto const found = std::find_if(
      leaving_.begin(), leaving_.end(), [](Stream* stream) { return stream->is_reusable(); });
  if (found == leaving_.end()) {
    return false;
  }
  streams_.emplace(name, *found);
  (*found)->restart();
  leaving_.erase(found);
  return true;
}

template <class Lazy>
void BasicHostApi<Lazy>::destroy_stream(stream_type stream) noexcept {
  Guard const guard{mutex_};
  auto const found = streams_.find(stream);
  if (found != streams_.end()) {
    close(*found->second);
    (has_threads_ ? leaving_ : idle_).push_back(found->second);
    streams_.erase(found);
  }
}

template <class Lazy>
void BasicHostApi<Lazy>::reap() noexcept {
  std::erase_if(leaving_, [this](Stream* stream) {
    if (stream->has_ended) {
      stream->thread.join();  // it has released the lock for the last time, so it ends soon
      idle_.push_back(stream);
    }
    return stream->has_ended;
  });
}

template <class Lazy>
auto BasicHostApi<Lazy>::create_event() -> event_type {
  Guard const guard{mutex_};
  HostEvent const name{++last_event_};
  events_.emplace(name, Point{});
  return name;
}

template <class Lazy>
void BasicHostApi<Lazy>::destroy_event(event_type event) noexcept {
  Guard const guard{mutex_};
  events_.erase(event);
}

template <class Lazy>
void BasicHostApi<Lazy>::record(event_type event, stream_type stream) {
  Guard const guard{mutex_};
  Stream* const on = find(stream);
  find(event) = on == nullptr ? Point{} : Point{on, on->enqueued};
}

template <class Lazy>
void BasicHostApi<Lazy>::wait(stream_type stream, event_type event) {
  Guard guard{mutex_};
  Point const point = find(event);
  Stream* const on = find(stream);
  if (on == nullptr) {
    await(guard, point);
  } else if (!is_past(point) && add(*on, {.kind = Kind::wait, .after = point})) {
    on->work.notify_one();
  }
}

template <class Lazy>
bool BasicHostApi<Lazy>::is_complete(event_type event) {
  Guard const guard{mutex_};
  Point const point = find(event);
  if (is_past(point)) {
    return true;
  }
  Stream& stream = *point.stream;
  stream.is_due = stream.is_due || std::exchange(stream.is_asked, true);
  if (stream.needs_thread()) {
    stream.work.notify_one();
  }
  return false;
}

template <class Lazy>
void BasicHostApi<Lazy>::synchronize(event_type event) {
  Guard guard{mutex_};
  Point const point = find(event);
  await(guard, point);
}

template <class Lazy>
void BasicHostApi<Lazy>::synchronize(stream_type stream) {
  Guard guard{mutex_};
  if (Stream* const on = find(stream); on != nullptr) {
    await(guard, Point{on, on->enqueued});
  }
}

template <class Lazy>
void BasicHostApi<Lazy>::before_fork() {
  if (forks() == 0) {
    fork_mutex_.lock();
    forker_ = std::this_thread::get_id();
    mutex_.lock();
  }
  ++forks_;
  Guard guard{mutex_, std::adopt_lock};
  // Waiting for a stream releases the lock, so that another stream may meanwhile get work or be
  // created.
  for (bool has_waited = true; has_waited;) {
    has_waited = false;
    for (std::size_t i = 0; i < all_.size(); ++i) {
      Point const end{all_[i].get(), all_[i]->enqueued};
      has_waited = has_waited || !is_past(end);
      await(guard, end);
    }
  }
  (void)guard.release();
}

template <class Lazy>
void BasicHostApi<Lazy>::let_others_in() {
  if (forks() == 0) {
    std::this_thread::yield();
    return;
  }
  mutex_.unlock();
  std::this_thread::yield();
  mutex_.lock();
}

template <class Lazy>
void BasicHostApi<Lazy>::after_fork_in_child() noexcept {
  has_threads_ = false;
  for (auto& stream : all_) {
    // Its thread exists only in the parent. Neither that thread's handle nor the condition variable
    // that it waits for may be destroyed here.
    (void)stream.release();
  }
  all_.clear();
  leaving_.clear();
  idle_.clear();
  // Threads that only the parent has may have been waiting here; the destructor would wait for
  // them.
  new (&progress_) std::condition_variable;
  end_fork();
}

SPILLWAY_COMPILED_PART(class BasicHostApi<>);

}  // namespace spillway
