// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/policy_set.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <thread>

namespace spillway::detail {

/// The lock of a pager, with the conditions that threads wait for under it: changes of state,
/// releases of leases, and the exclusive right to reclaim memory. It counts the leases of each
/// thread, so that no thread waits for leases that cannot end.
///
/// It is a monitor in the textbook sense: one lock, and one condition variable that is notified of
/// every change. Every function except `lock` is called by a thread that holds the lock. Device
/// calls are made in the scope of an `Unlocked`. No function here waits for the device.
template <LockPolicy Lock>
class Monitor {
 public:
  Monitor() = default;
  Monitor(Monitor const&) = delete;
  Monitor& operator=(Monitor const&) = delete;

  void lock() { lock_.lock(); }
  void unlock() { lock_.unlock(); }

  /// Begins a call that may release the lock before it ends: takes the lock and counts the call, so
  /// that a fork can wait for it.
  void begin_call() {
    lock_.lock();
    ++calls_;
  }
  void end_call() {
    --calls_;
    lock_.unlock();
  }

  /// Scope of a call into an object that has its own lock. A fork has to wait for such a call, too,
  /// since in the child no thread would release that lock.
  class Elsewhere {
   public:
    explicit Elsewhere(Monitor& monitor) : monitor_{monitor} {
      monitor_.begin_call();
      monitor_.unlock();
    }
    Elsewhere(Elsewhere const&) = delete;
    Elsewhere& operator=(Elsewhere const&) = delete;
    ~Elsewhere() {
      monitor_.lock();
      monitor_.end_call();
    }

   private:
    Monitor& monitor_;
  };

  /// Releases the lock during its lifetime.
  class Unlocked {
   public:
    explicit Unlocked(Monitor& monitor) : monitor_{monitor} { monitor_.unlock(); }
    Unlocked(Unlocked const&) = delete;
    Unlocked& operator=(Unlocked const&) = delete;
    ~Unlocked() { monitor_.lock(); }

   private:
    Monitor& monitor_;
  };

  /// Holds the exclusive right to reclaim memory: to swap blocks out or in, and to move them.
  ///
  /// At most one thread has it. It is a flag and not a second lock, so that its owner can release
  /// the lock while it enqueues copies, and other threads can use resident blocks meanwhile.
  class Exclusive {
   public:
    explicit Exclusive(Monitor& monitor) : monitor_{monitor} { monitor_.take_exclusive(); }
    Exclusive(Exclusive const&) = delete;
    Exclusive& operator=(Exclusive const&) = delete;
    ~Exclusive() { monitor_.give_up_exclusive(); }

   private:
    Monitor& monitor_;
  };
  [[nodiscard]] bool is_exclusive_taken() const noexcept { return is_exclusive_taken_; }

  /// Stands for a thread that holds leases.
  using ThreadIndex = std::uint8_t;

  /// Wakes the threads that wait for a change.
  void notify() noexcept {
    if (sleepers_ != 0) {
      changed_.notify_all();
    }
  }

  /// Counts a release of memory, and wakes the threads that wait for one.
  void notify_release() noexcept {
    ++releases_;
    notify();
  }
  /// Counts leases of the calling thread. @returns the thread's index, for `end_lease`
  [[nodiscard]] ThreadIndex begin_leases(std::uint32_t count) noexcept {
    ThreadIndex const caller = index_of_caller();
    threads_[caller].leases += count;
    return caller;
  }
  /// Uncounts a lease, on whatever thread, and does the same as `notify_release`.
  void end_lease(ThreadIndex thread) noexcept {
    --threads_[thread].leases;
    notify_release();
  }

  /// Waits while `is_blocked()` is true. @returns whether it had to; the lock was then released
  /// meanwhile
  ///
  /// Meanwhile the thread counts as waiting, so that a thread that reclaims does not wait for the
  /// leases of this one.
  template <class IsBlocked>
  bool wait_while(IsBlocked is_blocked) {
    if (!is_blocked()) {
      return false;
    }
    Waiting const waiting{*this};
    notify();
    while (is_blocked()) {
      sleep();
    }
    return true;
  }

  /// Waits while `is_blocked()` is true, which does not depend on leases: meanwhile the thread does
  /// not count as waiting for others.
  template <class IsBlocked>
  void sleep_while(IsBlocked is_blocked) {
    while (is_blocked()) {
      sleep();
    }
  }

  /// The result of `wait_for_release`.
  struct ReleaseWait {
    bool has_slept = false;
    bool is_released = false;
  };

  using Clock = std::chrono::steady_clock;
  /// Returns the time in `at_most` from now.
  [[nodiscard]] static Clock::time_point deadline_in(std::chrono::milliseconds at_most) {
    // Limits a wait that is meant to be endless, since adding it to the clock would overflow.
    constexpr std::chrono::milliseconds most = std::chrono::hours{100 * 365 * 24};
    return Clock::now() + std::min(at_most, most);
  }
  /// Returns how many times memory or a lease was released.
  [[nodiscard]] std::uint64_t releases() const noexcept { return releases_; }
  /// Waits until more than `seen` releases of memory or of a lease were counted, until `deadline`
  /// at the latest and only while another thread holds leases that does not itself wait for others.
  /// Called with the exclusive right, which is released meanwhile: other threads may need it to
  /// finish the work for which they hold leases.
  ///
  /// @param seen  what `releases` returned before the caller looked for room, since a release may
  ///              have come while it made device calls without the lock
  ReleaseWait wait_for_release(std::uint64_t seen, Clock::time_point deadline) {
    ReleaseWait result;
    {
      Waiting const waiting{*this};
      give_up_exclusive();
      while (releases_ == seen && others_hold_leases()) {
        result.has_slept = true;
        ++sleepers_;
        bool const is_late = changed_.wait_until(*this, deadline) == std::cv_status::timeout;
        --sleepers_;
        if (is_late) {
          break;
        }
      }
    }
    take_exclusive();
    result.is_released = releases_ != seen;
    return result;
  }

  /// For `fork`: takes the lock if no thread is inside a call. Other threads do not exist in the
  /// child, so calls that they had begun would never end there. @returns whether it has the lock
  [[nodiscard]] bool try_lock_between_calls() {
    lock_.lock();
    if (calls_ != 0) {
      lock_.unlock();
      return false;
    }
    return true;
  }

  /// Returns how many threads are waiting for others now.
  [[nodiscard]] std::size_t waiting_count() const noexcept {
    std::size_t count = 0;
    for (Thread const& thread : threads_) {
      count += thread.waits;
    }
    return count;
  }

 private:
  /// What is known of a thread that holds leases or waits.
  struct Thread {
    std::thread::id id{};
    std::uint32_t leases = 0;
    std::uint32_t waits = 0;  // for others
    [[nodiscard]] bool is_idle() const noexcept { return leases == 0 && waits == 0; }
  };

  /// Registers the calling thread as one that waits for others.
  class Waiting {
   public:
    explicit Waiting(Monitor& monitor) noexcept
        : thread_{monitor.threads_[monitor.index_of_caller()]} {
      ++thread_.waits;
    }
    Waiting(Waiting const&) = delete;
    Waiting& operator=(Waiting const&) = delete;
    ~Waiting() { --thread_.waits; }

   private:
    Thread& thread_;
  };

  /// Returns the caller's index in `threads_`. The last one stands for all threads that find no
  /// other.
  [[nodiscard]] ThreadIndex index_of_caller() noexcept {
    auto const me = std::this_thread::get_id();
    if (threads_[last_caller_].id != me) {
      last_caller_ = find_or_add(me);
    }
    return last_caller_;
  }
  [[nodiscard, gnu::noinline]] ThreadIndex find_or_add(std::thread::id id) noexcept {
    auto const known_end = threads_.begin() + known_threads_;
    auto found = std::find_if(
        threads_.begin(), known_end, [id](Thread const& thread) { return thread.id == id; });
    if (found == known_end && known_threads_ < threads_.size() - 1) {
      ++known_threads_;
    } else if (found == known_end) {  // `known_end` is the last one, which stands for many threads
      found = std::find_if(threads_.begin(), known_end, std::mem_fn(&Thread::is_idle));
    }
    if (found != std::prev(threads_.end())) {
      found->id = id;
    }
    return static_cast<ThreadIndex>(found - threads_.begin());
  }

  /// Whether a thread holds leases that does not itself wait for others. The threads that share the
  /// last index count as such a thread, since it is not known which of them waits.
  [[nodiscard]] bool others_hold_leases() const noexcept {
    return threads_.back().leases != 0 ||
           std::any_of(threads_.begin(), threads_.end(), [](Thread const& thread) {
             return thread.leases != 0 && thread.waits == 0;
           });
  }

  void sleep() {
    ++sleepers_;
    changed_.wait(*this);
    --sleepers_;
  }
  void take_exclusive() {
    while (is_exclusive_taken_) {
      sleep();
    }
    is_exclusive_taken_ = true;
  }
  void give_up_exclusive() noexcept {
    is_exclusive_taken_ = false;
    notify();
  }

  Lock lock_;
  std::condition_variable_any changed_;
  std::size_t calls_ = 0;
  std::size_t sleepers_ = 0;
  bool is_exclusive_taken_ = false;
  std::uint64_t releases_ = 0;
  ThreadIndex last_caller_ = 0;
  std::uint8_t known_threads_ = 0;
  std::array<Thread, 64> threads_{};  // at first the known ones; the last stands for all others
};

}  // namespace spillway::detail
