// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#ifdef __linux__
#  include <linux/futex.h>
#  include <sys/syscall.h>
#  include <unistd.h>
#endif

namespace spillway::detail {

/// Sleeps while `word` is `old`; may wake for no reason.
///
/// `std::atomic::wait` would do, but its table of waiters makes every notifier synchronise with
/// every waiter. Here a signal orders exactly what the streams order, and a race detector that
/// watches the simulated device sees the races that a program would have on a real one.
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

/// A point that one stream passes once and that others can wait for.
///
/// Threads  thread-safe.
class SimSignal {
 public:
  /// What came before this call happens before what comes after `wait`.
  void set(std::uint64_t time_ns) noexcept {
    time_ns_.store(time_ns, std::memory_order_relaxed);
    // One word says both that it is set and that somebody sleeps: so the setter learns the one
    // without being ordered after the other.
    if (state_.exchange(reached, std::memory_order_release) == awaited) {
      wake_all(state_);
    }
  }
  /// Looks first without ordering, so that a signal that is not set yet orders nothing.
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
  /// When it was set; of a throttled stream, when it should have been.
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

/// Hands out signals and takes them back when no stream uses them any more.
///
/// Looks rarely, in batches: looking orders the caller after the streams, which would hide races.
///
/// Threads  thread-compatible; `drop_user` of a signal may run at any time.
class SimSignals {
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

  /// Nobody will name `signal` again; streams that use it may go on.
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

}  // namespace spillway::detail
