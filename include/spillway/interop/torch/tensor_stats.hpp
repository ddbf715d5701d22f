// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/observer.hpp>
#include <spillway/core/record.hpp>
#include <spillway/core/types.hpp>
#include <spillway/observe/timeline.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

namespace spillway::torch {

/// A quantity in PyTorch's terms: the current value, the peak, and the totals of what was added and
/// subtracted.
struct TensorStat {
  std::int64_t current = 0;
  std::int64_t peak = 0;
  std::int64_t allocated = 0;
  std::int64_t freed = 0;

  void add(std::size_t n) noexcept {
    current += static_cast<std::int64_t>(n);
    allocated += static_cast<std::int64_t>(n);
    peak = std::max(peak, current);
  }
  void subtract(std::size_t n) noexcept {
    current -= static_cast<std::int64_t>(n);
    freed += static_cast<std::int64_t>(n);
  }
  /// Sets the value of a quantity that is computed from others, and counts the difference.
  void set(std::int64_t now) noexcept {
    std::int64_t const change = now - current;
    (change > 0 ? allocated : freed) += change > 0 ? change : -change;
    current = now;
    peak = std::max(peak, current);
  }
  void reset_peak() noexcept { peak = current; }
  void reset_accumulated() noexcept { allocated = freed = 0; }

  friend bool operator==(TensorStat const&, TensorStat const&) noexcept = default;
};

/// PyTorch counts allocations of up to 1 MiB separately, as small ones.
inline constexpr std::size_t largest_small_bytes = std::size_t{1} << 20U;

/// One quantity: of all allocations, of the small ones and of the large ones.
class TensorStatArray {
 public:
  void add(std::size_t allocation_bytes, std::size_t n) noexcept {
    stats_[0].add(n);
    pool_of(allocation_bytes).add(n);
  }
  void subtract(std::size_t allocation_bytes, std::size_t n) noexcept {
    stats_[0].subtract(n);
    pool_of(allocation_bytes).subtract(n);
  }
  void set_large(std::int64_t now) noexcept {
    stats_[0].set(now);
    stats_[2].set(now);
  }
  void reset_peak() noexcept {
    for (TensorStat& stat : stats_) {
      stat.reset_peak();
    }
  }
  void reset_accumulated() noexcept {
    for (TensorStat& stat : stats_) {
      stat.reset_accumulated();
    }
  }

  [[nodiscard]] TensorStat const& all() const noexcept { return stats_[0]; }
  [[nodiscard]] TensorStat const& small() const noexcept { return stats_[1]; }
  [[nodiscard]] TensorStat const& large() const noexcept { return stats_[2]; }

  friend bool operator==(TensorStatArray const&, TensorStatArray const&) noexcept = default;

 private:
  [[nodiscard]] TensorStat& pool_of(std::size_t allocation_bytes) noexcept {
    return stats_[allocation_bytes <= largest_small_bytes ? 1 : 2];
  }

  std::array<TensorStat, 3> stats_{};
};

/// The statistics of `torch.cuda.memory_stats`, in PyTorch's terms.
///
/// A tensor is *allocated* and *active* while it is resident. A tensor that is swapped out is
/// neither, so that no tool sees more memory allocated than reserved. Reserved memory is active or
/// *inactive split*: free, in a reservation that also holds active memory.
struct TensorStats {
  TensorStatArray allocation;
  TensorStatArray segment;
  TensorStatArray active;
  TensorStatArray inactive_split;
  TensorStatArray allocated_bytes;
  TensorStatArray reserved_bytes;
  TensorStatArray active_bytes;
  TensorStatArray inactive_split_bytes;
  TensorStatArray requested_bytes;
  std::int64_t num_alloc_retries = 0;  ///< attempts to make room that failed
  std::int64_t num_ooms = 0;           ///< out-of-memory errors that reached the program
  std::int64_t num_device_alloc = 0;   ///< calls that reserved device memory
  std::int64_t num_device_free = 0;

  template <class Visit>
  void for_each_array(Visit visit) {
    for (TensorStatArray* const array : {&allocation,
                                         &segment,
                                         &active,
                                         &inactive_split,
                                         &allocated_bytes,
                                         &reserved_bytes,
                                         &active_bytes,
                                         &inactive_split_bytes,
                                         &requested_bytes}) {
      visit(*array);
    }
  }
  void reset_peak() noexcept {
    for_each_array([](TensorStatArray& array) { array.reset_peak(); });
  }
  void reset_accumulated() noexcept {
    for_each_array([](TensorStatArray& array) { array.reset_accumulated(); });
    num_alloc_retries = num_ooms = num_device_alloc = num_device_free = 0;
  }
};

/// An observer that keeps the statistics which PyTorch's tools expect. On request it also remembers
/// the newest records.
///
/// The allocator reports its own work as records. The adapter reports what the program does:
/// requests for memory, frees, and errors.
///
/// Units    bytes rounded up to the granule. Exception: `requested_bytes` counts the bytes of
///          tensors, resident or not.
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

  /// Counts memory that was reserved before the first record.
  void on_reserved(std::size_t bytes) noexcept {
    if (bytes != 0) {
      on_record({.kind = RecordKind::grow, .bytes = bytes});
    }
  }
  void on_requested(std::size_t bytes) noexcept {
    std::scoped_lock const lock{mutex_};
    stats_.requested_bytes.add(round_up(bytes, granule_bytes), bytes);
  }
  void on_request_freed(std::size_t bytes) noexcept {
    std::scoped_lock const lock{mutex_};
    stats_.requested_bytes.subtract(round_up(bytes, granule_bytes), bytes);
  }
  void on_out_of_memory() noexcept {
    std::scoped_lock const lock{mutex_};
    ++stats_.num_ooms;
  }

  /// @param free_ranges  the number of free ranges in the reservation now
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

  /// Starts to remember the newest `most_records` records, or stops.
  void record(bool on, std::size_t most_records = Timeline::default_limit) noexcept {
    history_.set_limit(most_records);
    is_recording_ = on;
  }
  [[nodiscard]] bool is_recording() const noexcept { return is_recording_; }
  void clear_history() noexcept { history_.clear(); }
  /// In order of time. @throws std::bad_alloc
  [[nodiscard]] std::vector<Record> history() const { return history_.records(); }

  /// Calls `listener` for each record from now on. The listener must not throw. Can be called only
  /// once.
  void listen(Listener listener) {
    listener_ = std::move(listener);
    has_listener_.store(true, std::memory_order_release);
  }

  // For a thread that forks: while it holds the lock, no other thread counts anything.

  void lock() { mutex_.lock(); }
  [[nodiscard]] bool try_lock() noexcept { return mutex_.try_lock(); }
  void unlock() noexcept { mutex_.unlock(); }

 private:
  void count(Record const& record) noexcept {
    switch (record.kind) {
    case RecordKind::deallocate:
      if (record.address != nullptr) {
        subtract_active(record.bytes);
      }
      return;
    case RecordKind::make_resident:
    case RecordKind::swap_in:
    case RecordKind::prefetch:
      for (TensorStatArray* const count : {&stats_.allocation, &stats_.active}) {
        count->add(record.bytes, 1);
      }
      for (TensorStatArray* const sum : {&stats_.allocated_bytes, &stats_.active_bytes}) {
        sum->add(record.bytes, record.bytes);
      }
      break;
    case RecordKind::swap_out:
    case RecordKind::drop:
      subtract_active(record.bytes);
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
    case RecordKind::allocate:  // takes up no device memory yet
    case RecordKind::copy_out:
    case RecordKind::recompute:
    case RecordKind::move:
    case RecordKind::host_wait:
    case RecordKind::step:
      return;
    }
    update_inactive();
  }

  void subtract_active(std::size_t bytes) noexcept {
    for (TensorStatArray* const count : {&stats_.allocation, &stats_.active}) {
      count->subtract(bytes, 1);
    }
    for (TensorStatArray* const sum : {&stats_.allocated_bytes, &stats_.active_bytes}) {
      sum->subtract(bytes, bytes);
    }
    update_inactive();
  }
  void update_inactive() noexcept {
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
