// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

namespace spillway::detail {

/// The number that points on one stream share until an event is recorded there.
///
/// An event covers everything enqueued before it, so points with no event between them need no numbers
/// of their own: whatever waits for one of them waits for all.
///
/// Threads  thread-safe.
class StreamEpoch {
 public:
  /// Begins with number `first`; numbers below it stand for nothing. Not while others use it.
  void start(std::uint64_t first) noexcept { state_ = 2 * first; }

  /// The number of a point that stands for all work enqueued so far. @cost one load, mostly
  [[nodiscard]] std::uint64_t mark() noexcept {
    std::uint64_t now = state_.load();
    if (now % 2 == 0) {
      now = state_.fetch_or(1);
    }
    return now / 2;
  }

  /// No point marked so far has a greater number.
  [[nodiscard]] std::uint64_t last() const noexcept {
    std::uint64_t const now = state_.load();
    return now % 2 == 0 ? now / 2 - 1 : now / 2;
  }

  /// To be called before an event is recorded: points marked from now on get the greater number that
  /// `next()` gives, and the event covers all up to the number returned. Work that a thread enqueued
  /// before it marked a point of the old number is on the stream already, so the event comes after it.
  template <class Next>
  [[nodiscard]] std::uint64_t close(Next next) noexcept {
    std::uint64_t now = state_.load();
    while (now % 2 != 0) {
      std::uint64_t const wanted = 2 * next();
      if (state_.compare_exchange_strong(now, wanted)) {
        now = wanted;
      }
    }
    return now / 2 - 1;
  }

 private:
  std::atomic<std::uint64_t> state_{0};  // twice the number, and 1 more once a point has it
};

}  // namespace spillway::detail
