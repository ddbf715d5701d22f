// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <mutex>
#include <vector>

namespace spillway::tensorflow {

/// Finds the boundaries between a program's steps: the moments at which an optimizer's counter of
/// steps goes up.
///
/// With several counters one of them, the leader, marks the boundary. The first counter leads until
/// another one has gone up twice since the leader last did.
///
/// Threads  thread-safe.
class StepDetector {
 public:
  static constexpr bool is_thread_safe = true;

  /// @param counter  identifies a counter that goes up; never dereferenced
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
  std::vector<void const*> others_;  // that went up since the leader did
};

}  // namespace spillway::tensorflow
