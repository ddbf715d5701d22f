// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/observer.hpp>
#include <spillway/core/record.hpp>
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
/// What the allocator does comes as records; what the program does (asks for a tensor's memory, frees it,
/// is refused) is told by whoever serves it.
///
/// Units    bytes rounded up to the granule, but for `requested_bytes`.
/// Threads  thread-safe. The listener is called outside of every lock.
class TensorObserver {
 public:
  using Listener = std::function<void(Record const&)>;

  static constexpr bool is_enabled = true;
  static constexpr bool is_thread_safe = true;

  TensorObserver() = default;
  TensorObserver(TensorObserver const&) = delete;
  TensorObserver& operator=(TensorObserver const&) = delete;

  void on_record(Record const& record) noexcept {
    {
      std::scoped_lock const lock{mutex_};
      count(record);
    }
    if (is_recording_.load(std::memory_order_relaxed)) {
      history_.on_record(record);
    }
    if (has_listener_.load(std::memory_order_acquire)) {
      listener_(record);
    }
  }

  /// What was reserved before the first record.
  void on_reserved(std::size_t bytes) noexcept {
    if (bytes != 0) {
      on_record({.kind = RecordKind::grow, .bytes = bytes});
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

  /// Remembers the newest `most_records` from now on, or nothing more.
  void record(bool on, std::size_t most_records = Timeline::default_limit) noexcept {
    history_.set_limit(most_records);
    is_recording_ = on;
  }
  [[nodiscard]] bool is_recording() const noexcept { return is_recording_; }
  void forget_history() noexcept { history_.clear(); }
  /// In order of time. @throws std::bad_alloc
  [[nodiscard]] std::vector<Record> history() const { return history_.records(); }

  /// Calls `listener` for each record from now on; it must not throw. To be set once.
  void listen(Listener listener) {
    listener_ = std::move(listener);
    has_listener_.store(true, std::memory_order_release);
  }

 private:
  void count(Record const& record) noexcept {
    switch (record.kind) {
    case RecordKind::deallocate:
      if (record.address != nullptr) {
        retire(record.bytes);
      }
      return;
    case RecordKind::make_resident:
    case RecordKind::swap_in:
    case RecordKind::prefetch:
      stats_.active.add(record.bytes, 1);
      stats_.active_bytes.add(record.bytes, record.bytes);
      break;
    case RecordKind::swap_out:
    case RecordKind::drop:
      retire(record.bytes);
      return;
    case RecordKind::grow:
      stats_.segment.add(record.bytes, 1);
      stats_.reserved_bytes.add(record.bytes, record.bytes);
      ++stats_.num_device_alloc;
      break;
    case RecordKind::trim:
      stats_.segment.subtract(record.bytes, 1);
      stats_.reserved_bytes.subtract(record.bytes, record.bytes);
      ++stats_.num_device_free;
      break;
    case RecordKind::out_of_memory:
      ++stats_.num_alloc_retries;
      return;
    case RecordKind::allocate:  // may fail yet; `on_requested` tells of those that do not
    case RecordKind::copy_out:
    case RecordKind::move:
    case RecordKind::host_wait:
    case RecordKind::step:
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

static_assert(Observer<TensorObserver>);

}  // namespace spillway::torch
