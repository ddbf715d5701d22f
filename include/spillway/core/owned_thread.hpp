// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include <unistd.h>

namespace spillway::detail {

/// A thread that works for an object until the object ends, and the condition variable on which the
/// thread sleeps. The object's calls may sleep on it, too.
///
/// In a forked child neither that thread nor other threads that slept exist. `end` then forgets
/// them. It must not even detach the thread: in glibc, a thread of the child may have the same
/// handle by then. And the destructor of a condition variable waits for all that sleep on it.
///
/// Thread-unsafe, except `changed`: the owner calls `is_ending` under its lock.
class OwnedThread {
 public:
  OwnedThread() = default;
  OwnedThread(OwnedThread const&) = delete;
  OwnedThread& operator=(OwnedThread const&) = delete;
  /// @pre `end` was called if the thread was started
  ~OwnedThread() = default;

  /// Starts the thread, which calls `run()`. That must return soon after `is_ending()` is true.
  ///
  /// @throws std::system_error if the system has no thread
  template <class Run>
  void start(Run run) {
    thread_ = std::thread{std::move(run)};
  }

  /// What the thread sleeps on. `end` notifies it.
  [[nodiscard]] std::condition_variable& changed() noexcept { return changed_; }
  /// Whether the thread must end.
  [[nodiscard]] bool is_ending() const noexcept { return is_ending_; }

  /// Ends the thread, if there is one, and waits for that. Called by the owner's destructor before
  /// anything that the thread uses is destroyed.
  ///
  /// @param mutex  the owner's lock, which the caller does not hold
  void end(std::mutex& mutex) noexcept {
    if (::getpid() != process_) {
      new (&thread_) std::thread;
      new (&changed_) std::condition_variable;
      return;
    }
    {
      std::scoped_lock const lock{mutex};
      is_ending_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) {
      thread_.join();
    }
  }

 private:
  std::condition_variable changed_;
  bool is_ending_ = false;
  pid_t process_ = ::getpid();
  std::thread thread_;
};

}  // namespace spillway::detail
