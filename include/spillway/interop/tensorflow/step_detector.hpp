// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <mutex>
#include <vector>

namespace spillway::tensorflow {

/// Detects when a program begins a new step: when an optimizer increases its counter of steps.
///
/// If there are several counters, one of them, the leader, marks the boundary. The first counter is
/// the leader until another counter has increased twice since the leader's last increase.
///
/// Threads  thread-safe.
class StepDetector {
 public:
  static constexpr bool is_thread_safe = true;

  /// @param counter  identifies the counter that has increased; never dereferenced
  /// @returns whether a step begins
  [[nodiscard]] bool on_count(void const* counter) {
    std::scoped_lock const lock{mutex_};
    bool const is_again = std::find(others_.begin(), others_.end(), counter) != others_.end();
    if (leader_ != nullptr && counter != leader_ && !is_again) {
      others_.push_back(counter);
      return false;
    }
    leader_ = counter;
    others_.clear();
    return true;
  }

 private:
  std::mutex mutex_;
  void const* leader_ = nullptr;
  std::vector<void const*> others_;  // counters that have increased since the leader has
};

}  // namespace spillway::tensorflow
