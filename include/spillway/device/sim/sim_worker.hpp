// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/sim/sim_op.hpp>
#include <spillway/device/sim/sim_options.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#ifdef __linux__
#  include <linux/futex.h>
#  include <sys/syscall.h>
#  include <unistd.h>
#endif

namespace spillway::detail {

/// Blocks while `word` equals `old`. It may wake spuriously.
///
/// It replaces `std::atomic::wait`, which has a table of waiters that synchronises every notifier
/// with every waiter. With this function a signal orders exactly what the streams order, so a race
/// detector that watches the simulated device sees the races that a program would have on a real
/// one.
inline void sleep_while(std::atomic<std::uint32_t>& word, std::uint32_t old) noexcept {
#ifdef __linux__
  ::syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
  word.wait(old, std::memory_order_relaxed);
#endif
}

inline void wake_all(std::atomic<std::uint32_t>& word) noexcept {
#ifdef __linux__
  ::syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 0x7FFFFFFF, nullptr, nullptr, 0);
#else
  word.notify_all();
#endif
}

/// A point that one stream passes once and that other threads can wait for.
///
/// Threads  thread-safe.
class SimSignal {
 public:
  /// Everything before this call happens before everything after `wait`.
  void set(std::uint64_t time_ns) noexcept {
    time_ns_.store(time_ns, std::memory_order_relaxed);
    // One word says both that the signal is set and whether a thread sleeps. So the setter learns
    // of the sleeper by its own write, and is not ordered after what the sleeper did before.
    if (state_.exchange(reached, std::memory_order_release) == awaited) {
      wake_all(state_);
    }
  }
  /// Whether it is set. The first load is relaxed, so the result false orders nothing.
  [[nodiscard]] bool is_set() const noexcept {
    return state_.load(std::memory_order_relaxed) == reached &&
           state_.load(std::memory_order_acquire) == reached;
  }
  void wait() noexcept {
    while (!is_set()) {
      std::uint32_t seen = unset;
      state_.compare_exchange_strong(seen, awaited, std::memory_order_relaxed);
      sleep_while(state_, awaited);
    }
  }
  /// The time at which it was set. On a stream with a rate, the time at which it should have been
  /// set according to the rate.
  [[nodiscard]] std::uint64_t time_ns() const noexcept {
    return time_ns_.load(std::memory_order_relaxed);
  }

  void add_user() noexcept { users_.fetch_add(1, std::memory_order_relaxed); }
  void drop_user() noexcept { users_.fetch_sub(1, std::memory_order_release); }
  [[nodiscard]] bool is_unused() const noexcept {
    return users_.load(std::memory_order_acquire) == 0;
  }
  void reset() noexcept { state_.store(unset, std::memory_order_relaxed); }

 private:
  static constexpr std::uint32_t unset = 0;
  static constexpr std::uint32_t awaited = 1;
  static constexpr std::uint32_t reached = 2;

  std::atomic<std::uint32_t> state_{unset};
  std::atomic<std::uint32_t> users_{0};
  std::atomic<std::uint64_t> time_ns_{0};
};

/// Gives out signals, and reuses them when no stream uses them any more.
///
/// It looks for unused signals rarely and many at a time: looking orders the caller after the
/// streams, which would hide races.
///
/// Threads  thread-compatible; `drop_user` of a signal may run at any time.
template <class = Lazily>
class BasicSimSignals {
 public:
  [[nodiscard]] SimSignal* acquire() {
    if (idle_.empty()) {
      collect();
    }
    if (idle_.empty()) {
      idle_.reserve(all_.size() + 1);
      abandoned_.reserve(all_.size() + 1);
      all_.push_back(std::make_unique<SimSignal>());
      return all_.back().get();
    }
    SimSignal* const signal = idle_.back();
    idle_.pop_back();
    signal->reset();
    return signal;
  }

  /// Takes back a signal that no later call will name. Streams may still be using it.
  void abandon(SimSignal* signal) noexcept {
    if (signal != nullptr) {
      abandoned_.push_back(signal);
    }
  }

 private:
  static constexpr std::size_t batch = 1024;

  void collect() {
    if (abandoned_.size() < threshold_) {
      return;
    }
    std::erase_if(abandoned_, [this](SimSignal* signal) {
      bool const is_unused = signal->is_unused();
      if (is_unused) {
        idle_.push_back(signal);
      }
      return is_unused;
    });
    threshold_ = batch + 2 * abandoned_.size();
  }

  std::vector<std::unique_ptr<SimSignal>> all_;
  std::vector<SimSignal*> idle_;
  std::vector<SimSignal*> abandoned_;
  std::size_t threshold_ = batch;
};

using SimSignals = BasicSimSignals<>;

/// A copy engine that takes as long as a real one. It serves one copy at a time, in order of
/// arrival.
///
/// Threads  thread-safe.
template <class = Lazily>
class BasicSimEngine {
 public:
  struct Period {
    std::uint64_t start_ns = 0;
    std::uint64_t end_ns = 0;
  };

  BasicSimEngine() = default;
  explicit BasicSimEngine(SimRate rate) noexcept : rate_{rate} {}
  void set_rate(SimRate rate) noexcept { rate_ = rate; }

  [[nodiscard]] bool is_instant() const noexcept { return rate_.is_instant(); }

  /// Reserves the engine, from when it is next free, for a copy that could start at `ready_ns`.
  [[nodiscard]] Period take(std::uint64_t ready_ns, std::size_t bytes) noexcept {
    std::uint64_t const duration = rate_.duration_ns(bytes);
    std::uint64_t free = free_ns_.load(std::memory_order_relaxed);
    std::uint64_t start = 0;
    do {
      start = std::max(free, ready_ns);
    } while (!free_ns_.compare_exchange_weak(free, start + duration, std::memory_order_relaxed));
    return {start, start + duration};
  }

 private:
  SimRate rate_;
  std::atomic<std::uint64_t> free_ns_{0};  // relaxed, since an engine orders time and not memory
};

using SimEngine = BasicSimEngine<>;

/// The copy engines of one device, one for each direction.
struct SimEngines {
  explicit SimEngines(SimOptions const& options) {
    for (CopyKind const kind : {CopyKind::to_host, CopyKind::to_device, CopyKind::on_device}) {
      of(kind).set_rate(rate_of(options, kind));
    }
  }
  [[nodiscard]] SimEngine& of(CopyKind kind) noexcept {
    return engines[static_cast<std::size_t>(kind)];
  }

  std::array<SimEngine, 3> engines;
};

/// Counts the operations of a stream that have run. It may outlive the stream.
///
/// Threads  thread-safe.
template <class = Lazily>
class BasicSimProgress {
 public:
  void advance() noexcept { ops_.fetch_add(1, std::memory_order_release); }
  /// True if this thread can see that `ops` operations have run. It orders nothing.
  [[nodiscard]] bool seems_run(std::uint64_t ops) const noexcept {
    return ops_.load(std::memory_order_relaxed) >= ops;
  }
  /// As `seems_run`, and orders the caller after these operations.
  [[nodiscard]] bool has_run(std::uint64_t ops) const noexcept {
    return seems_run(ops) && ops_.load(std::memory_order_acquire) >= ops;
  }

 private:
  std::atomic<std::uint64_t> ops_{0};
};

using SimProgress = BasicSimProgress<>;

/// A stream with a thread of its own, which runs operations in the order in which they were pushed.
///
/// The queue orders each push before the run of the pushed operation and nothing else. The threads
/// that push and the thread that runs share no lock, so two streams are ordered only by their
/// signals.
///
/// Threads  `push` and `pushed` need a lock of the caller; the rest is thread-safe.
template <class = Lazily>
class BasicSimWorker {
 public:
  struct Op : SimOp {
    SimSignal* signal = nullptr;  // of a record or a wait
    std::uint64_t pushed_ns = 0;
  };

  explicit BasicSimWorker(SimEngines& engines)
      : engines_{&engines}, head_{std::make_unique<Node>()}, tail_{head_.get()}, thread_{[this] {
          run();
        }} {}
  BasicSimWorker(BasicSimWorker const&) = delete;
  BasicSimWorker& operator=(BasicSimWorker const&) = delete;
  /// Waits until the thread has run everything that was pushed.
  ~BasicSimWorker();

  /// @throws std::bad_alloc, with nothing pushed
  void push(Op const& op) {
    auto node = std::make_unique<Node>();
    node->op = op;
    node->copies.assign(op.copies.begin(), op.copies.end());
    node->op.copies = node->copies;
    node->op.pushed_ns = steady_ns();
    remember(op);
    append(std::move(node));
  }

  /// Makes the thread end when it has run everything that was pushed. Nothing may be pushed
  /// afterwards.
  void stop() noexcept {
    if (last_ != nullptr) {
      append(std::move(last_));
    }
  }

  [[nodiscard]] std::uint64_t pushed() const noexcept { return pushed_ops_; }
  [[nodiscard]] std::shared_ptr<SimProgress const> progress() const noexcept { return progress_; }
  /// True if an operation that was pushed and has not run reads or writes in `[p, p + bytes)`.
  [[nodiscard]] bool is_in_use(void const* p, std::size_t bytes) const noexcept {
    return std::any_of(recent_.begin(), recent_.end(), [&](Recent const& recent) {
      return recent.op.touches(p, bytes) && !progress_->has_run(recent.ops);
    });
  }
  [[nodiscard]] bool is_idle() const noexcept { return progress_->has_run(pushed_ops_); }
  [[nodiscard]] std::thread::id thread_id() const noexcept { return thread_.get_id(); }

 private:
  struct Node {
    Op op;
    std::vector<SimCopy> copies;
    std::atomic<Node*> next{nullptr};
  };

  /// A copy of an operation that may not have run yet. The operation itself must not be read here:
  /// the thread that runs it frees it, and reading it would order the reader after that thread.
  struct Recent {
    std::uint64_t ops = 0;  // the operation's number on its stream, from 1
    SimOp op;
    std::vector<SimCopy> copies;
  };

  static constexpr std::uint32_t asleep = 1;  // the thread sleeps, since it has found nothing to do
  static constexpr std::uint32_t one_push = 2;  // the other bits count pushes

  void append(std::unique_ptr<Node> node) noexcept;
  void remember(Op const& op);
  void sleep(std::uint32_t seen) noexcept;
  void run();
  void execute(Op const& op);
  void run_timed(Op const& op);
  static void wait_until(std::uint64_t time_ns);

  SimEngines* engines_;
  std::unique_ptr<Node> head_;  // the operation that ran last; owned by the thread
  // time at which the work so far should have ended according to the rates; used by the thread only
  std::uint64_t ready_ns_ = 0;
  std::shared_ptr<SimProgress> progress_ = std::make_shared<SimProgress>();
  std::atomic<std::uint32_t> pushes_{0};
  Node* tail_;
  std::uint64_t pushed_ops_ = 0;
  std::unique_ptr<Node> last_ = std::make_unique<Node>();  // ends the thread; null once pushed
  std::deque<Recent> recent_;
  std::thread thread_;  // last: it starts when all other members exist
};

using SimWorker = BasicSimWorker<>;

template <class Lazy>
void BasicSimWorker<Lazy>::append(std::unique_ptr<Node> node) noexcept {
  Node* const next = node.release();
  tail_->next.store(next, std::memory_order_release);
  tail_ = next;
  ++pushed_ops_;
  if ((pushes_.fetch_add(one_push, std::memory_order_release) & asleep) != 0) {
    pushes_.fetch_and(~asleep, std::memory_order_relaxed);
    wake_all(pushes_);
  }
}

/// Keeps a copy of an operation that touches memory until that has run. `is_in_use` reads the
/// copies and not the queue, so its caller is not ordered after what has run.
template <class Lazy>
void BasicSimWorker<Lazy>::remember(Op const& op) {
  while (!recent_.empty() && progress_->seems_run(recent_.front().ops)) {
    recent_.pop_front();
  }
  if (op.bytes != 0) {
    Recent recent{pushed_ops_ + 1, op, {op.copies.begin(), op.copies.end()}};
    recent.op.copies = recent.copies;  // stays valid when the vector moves
    recent_.push_back(std::move(recent));
  }
}

template <class Lazy>
BasicSimWorker<Lazy>::~BasicSimWorker() {
  stop();
  thread_.join();
}

template <class Lazy>
void BasicSimWorker<Lazy>::run() {
  for (;;) {
    std::uint32_t const seen = pushes_.load(std::memory_order_acquire);
    Node* const next = head_->next.load(std::memory_order_acquire);
    if (next == nullptr) {
      sleep(seen);
      continue;
    }
    head_.reset(next);
    execute(next->op);
    progress_->advance();
    if (next->op.what == SimOp::Kind::stop) {
      return;
    }
  }
}

/// Blocks the stream's thread until something is pushed. A bit of the counter of pushes says that
/// the thread sleeps. A pusher sees the bit in the word that it writes anyway, and is not ordered
/// after what the thread has run.
template <class Lazy>
void BasicSimWorker<Lazy>::sleep(std::uint32_t seen) noexcept {
  if ((seen & asleep) != 0 ||
      pushes_.compare_exchange_strong(seen, seen | asleep, std::memory_order_relaxed)) {
    sleep_while(pushes_, seen | asleep);
  }
}

template <class Lazy>
void BasicSimWorker<Lazy>::execute(Op const& op) {
  switch (op.what) {
  case SimOp::Kind::copy:
  case SimOp::Kind::batch:
  case SimOp::Kind::fill:
    run_timed(op);
    return;
  case SimOp::Kind::host:
    op.perform();
    ready_ns_ = steady_ns();
    return;
  case SimOp::Kind::compute:
    ready_ns_ = std::max(ready_ns_, op.pushed_ns) + op.duration_ns;
    wait_until(ready_ns_);
    return;
  case SimOp::Kind::record:
    op.signal->set(std::max(ready_ns_, op.pushed_ns));
    op.signal->drop_user();
    return;
  case SimOp::Kind::wait:
    op.signal->wait();
    ready_ns_ = std::max(ready_ns_, op.signal->time_ns());
    op.signal->drop_user();
    return;
  case SimOp::Kind::stop:
    return;
  }
}

/// Runs an operation that occupies an engine. It follows the engine's timetable and not the clock:
/// if the thread wakes up late, it starts the next copy as if it had been on time. So the rate is
/// right in the long run.
template <class Lazy>
void BasicSimWorker<Lazy>::run_timed(Op const& op) {
  SimEngine& engine = engines_->of(op.direction);
  if (op.is_free || engine.is_instant()) {
    op.perform();
    ready_ns_ = steady_ns();
    return;
  }
  SimEngine::Period const period = engine.take(std::max(ready_ns_, op.pushed_ns), op.bytes);
  wait_until(period.start_ns);
  op.perform();
  wait_until(period.end_ns);
  ready_ns_ = period.end_ns;
}

template <class Lazy>
void BasicSimWorker<Lazy>::wait_until(std::uint64_t time_ns) {
  constexpr std::uint64_t timer_slack_ns = 60'000;
  for (std::uint64_t now = steady_ns(); now < time_ns; now = steady_ns()) {
    if (time_ns - now > timer_slack_ns) {
      std::this_thread::sleep_for(std::chrono::nanoseconds{time_ns - now - timer_slack_ns});
    } else {
      std::this_thread::yield();
    }
  }
}

SPILLWAY_COMPILED_PART(class BasicSimSignals<>);
SPILLWAY_COMPILED_PART(class BasicSimEngine<>);
SPILLWAY_COMPILED_PART(class BasicSimProgress<>);
SPILLWAY_COMPILED_PART(class BasicSimWorker<>);

}  // namespace spillway::detail
