// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/interop/torch/desk/desk_state.hpp>

#include <cstdint>

namespace spillway::torch {

/// Where threads sleep that need room, or a storage that another thread is bringing in.
///
/// A thread waits for room only while somebody can make some: another thread inside an operation that
/// does not wait itself. `seen` is the count of releases before the caller found that it had to wait,
/// so that none in between is missed.
///
/// Threads  thread-safe; called without the lock. Gives up the interpreter's lock meanwhile.
template <class Site>
class RoomQueue {
 public:
  using State = DeskState<Site>;

  explicit RoomQueue(State& state) : state_{state} {}

  /// Sleeps until another thread has acquired what it is acquiring, or failed to. It waits for no frame.
  void await_arrival(std::uint64_t seen) {
    [[maybe_unused]] auto const polite = Site::let_others_run();
    typename State::Guard guard{state_.mutex};
    state_.waiters.fetch_add(1);
    state_.changed.wait(guard, [&] { return state_.changes() != seen; });
    state_.waiters.fetch_sub(1);
  }

  /// Sleeps until something is let go. @returns false if every thread that is inside an operation waits
  [[nodiscard]] bool await_others(typename State::Frames const& frames, std::uint64_t seen) {
    [[maybe_unused]] auto const polite = Site::let_others_run();
    typename State::Guard guard{state_.mutex};
    int const self = frames.is_counted ? 1 : 0;
    state_.waiters.fetch_add(1);
    starving_ += self;
    auto const is_hopeless = [&] { return state_.active - starving_ <= 0; };
    bool const must_wait = state_.changes() == seen;
    if (must_wait && !is_hopeless()) {
      state_.waits.fetch_add(1);
      state_.changed.wait(guard, [&] { return state_.changes() != seen || is_hopeless(); });
    }
    starving_ -= self;
    state_.waiters.fetch_sub(1);
    bool const has_changed = state_.changes() != seen;
    state_.changed.notify_all();
    return has_changed;
  }

 private:
  State& state_;
  int starving_ = 0;  // threads that sleep here inside an operation; under the lock
};

}  // namespace spillway::torch
