// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/observer.hpp>
#include <spillway/core/event.hpp>
#include <spillway/core/types.hpp>
#include <spillway/interop/torch/tensor_stats.hpp>
#include <spillway/observe/timeline.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

namespace spillway::torch {

/// An observer that counts as PyTorch does, and remembers what happened while it is asked to.
///
/// What the allocator does comes as events; what the program does (asks for a tensor's memory, frees it,
/// is refused) is told by whoever serves it.
///
/// Units    bytes rounded up to the granule, but for `requested_bytes`.
/// Threads  thread-safe. The listener is called outside of every lock.
class TensorWatch {
 public:
  using Listener = std::function<void(Event const&)>;

  static constexpr bool is_enabled = true;
  static constexpr bool is_thread_safe = true;

  TensorWatch() = default;
  TensorWatch(TensorWatch const&) = delete;
  TensorWatch& operator=(TensorWatch const&) = delete;

  void on_event(Event const& event) noexcept {
    {
      std::scoped_lock const lock{mutex_};
      count(event);
    }
    if (is_recording_.load(std::memory_order_relaxed)) {
      history_.on_event(event);
    }
    if (has_listener_.load(std::memory_order_acquire)) {
      listener_(event);
    }
  }

  /// What was reserved before the first event.
  void on_reserved(std::size_t bytes) noexcept {
    if (bytes != 0) {
      on_event({.kind = EventKind::grow, .bytes = bytes});
    }
  }
  void on_requested(std::size_t bytes) noexcept {
    std::size_t const rounded = round_up(bytes, granule_bytes);
    std::scoped_lock const lock{mutex_};
    stats_.allocation.add(rounded, 1);
    stats_.allocated_bytes.add(rounded, rounded);
    stats_.requested_bytes.add(rounded, bytes);
  }
  void on_request_freed(std::size_t bytes) noexcept {
    std::size_t const rounded = round_up(bytes, granule_bytes);
    std::scoped_lock const lock{mutex_};
    stats_.allocation.subtract(rounded, 1);
    stats_.allocated_bytes.subtract(rounded, rounded);
    stats_.requested_bytes.subtract(rounded, bytes);
  }
  void on_refused() noexcept {
    std::scoped_lock const lock{mutex_};
    ++stats_.num_ooms;
  }

  /// @param free_ranges  free ranges beside active ones, as there are now
  [[nodiscard]] TensorStats stats(std::size_t free_ranges) {
    std::scoped_lock const lock{mutex_};
    stats_.inactive_split.set_large(static_cast<std::int64_t>(free_ranges));
    return stats_;
  }
  void reset_peak() noexcept {
    std::scoped_lock const lock{mutex_};
    stats_.reset_peak();
  }
  void reset_accumulated() noexcept {
    std::scoped_lock const lock{mutex_};
    stats_.reset_accumulated();
  }

  /// Remembers the newest `most_events` from now on, or nothing more.
  void record(bool on, std::size_t most_events = Timeline::default_limit) noexcept {
    history_.set_limit(most_events);
    is_recording_ = on;
  }
  [[nodiscard]] bool is_recording() const noexcept { return is_recording_; }
  void forget_history() noexcept { history_.clear(); }
  /// In order of time. @throws std::bad_alloc
  [[nodiscard]] std::vector<Event> history() const { return history_.events(); }

  /// Calls `listener` for each event from now on; it must not throw. To be set once.
  void listen(Listener listener) {
    listener_ = std::move(listener);
    has_listener_.store(true, std::memory_order_release);
  }

 private:
  void count(Event const& event) noexcept {
    switch (event.kind) {
    case EventKind::deallocate:
      if (event.address != nullptr) {
        retire(event.bytes);
      }
      return;
    case EventKind::make_resident:
    case EventKind::swap_in:
    case EventKind::prefetch:
      stats_.active.add(event.bytes, 1);
      stats_.active_bytes.add(event.bytes, event.bytes);
      break;
    case EventKind::swap_out:
    case EventKind::drop:
      retire(event.bytes);
      return;
    case EventKind::grow:
      stats_.segment.add(event.bytes, 1);
      stats_.reserved_bytes.add(event.bytes, event.bytes);
      ++stats_.num_device_alloc;
      break;
    case EventKind::trim:
      stats_.segment.subtract(event.bytes, 1);
      stats_.reserved_bytes.subtract(event.bytes, event.bytes);
      ++stats_.num_device_free;
      break;
    case EventKind::out_of_memory:
      ++stats_.num_alloc_retries;
      return;
    case EventKind::allocate:  // may fail yet; `on_requested` tells of those that do not
    case EventKind::copy_out:
    case EventKind::move:
    case EventKind::host_wait:
    case EventKind::step:
      return;
    }
    derive();
  }

  void retire(std::size_t bytes) noexcept {
    stats_.active.subtract(bytes, 1);
    stats_.active_bytes.subtract(bytes, bytes);
    derive();
  }
  void derive() noexcept {
    stats_.inactive_split_bytes.set_large(stats_.reserved_bytes.all().current -
                                          stats_.active_bytes.all().current);
  }

  mutable std::mutex mutex_;  // guards `stats_`
  TensorStats stats_;
  Timeline history_;
  std::atomic<bool> is_recording_{false};
  std::atomic<bool> has_listener_{false};
  Listener listener_;
};

static_assert(Observer<TensorWatch>);

}  // namespace spillway::torch
