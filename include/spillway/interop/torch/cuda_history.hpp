// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/record.hpp>
#include <spillway/core/types.hpp>
#include <spillway/interop/torch/context_table.hpp>
#include <spillway/interop/torch/cuda_snapshot.hpp>
#include <spillway/interop/torch/tensor_observer.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>

namespace spillway::torch {

/// Who wants to know what a CUDA allocator does: memory history, observers of errors, trackers.
///
/// Threads  thread-safe. Nobody is called under a lock.
class CudaHistory {
 public:
  using Gather = c10::cuda::CUDACachingAllocator::CreateContextFn;
  using When = c10::cuda::CUDACachingAllocator::RecordContext;
  using ErrorObserver = c10::cuda::CUDACachingAllocator::OutOfMemoryObserver;
  using Tracker = c10::cuda::CUDACachingAllocator::AllocatorTraceTracker;
  using Entry = c10::CachingDeviceAllocator::TraceEntry;

  CudaHistory() = default;
  CudaHistory(CudaHistory const&) = delete;
  CudaHistory& operator=(CudaHistory const&) = delete;

  /// As `torch.cuda.memory._record_memory_history`.
  void record(TensorObserver& watch,
              bool enabled,
              Gather gather,
              std::size_t most_entries,
              When when,
              bool clears) {
    if (clears || !enabled) {
      watch.forget_history();
      contexts_.clear();
    }
    contexts_.set_limit(enabled ? most_entries : 0);
    gather_ = enabled && when != When::NEVER ? gather : nullptr;
    watch.record(enabled, enabled ? most_entries : 0);
  }

  void attach(ErrorObserver observer) {
    std::scoped_lock const lock{mutex_};
    observers_.push_back(std::move(observer));
  }
  void attach(TensorObserver& watch, Tracker tracker, c10::DeviceIndex device) {
    std::unique_lock lock{mutex_};
    trackers_.push_back(std::make_shared<Tracker const>(std::move(tracker)));
    bool const is_first = trackers_.size() == 1;
    lock.unlock();
    if (is_first) {
      watch.listen([this, device](Record const& record) { tell_trackers(record, device); });
    }
  }

  /// Keeps what `gather` finds out about the caller. History that fails to be kept fails nobody.
  void on_allocated(BlockId block) noexcept {
    if (Gather const gather = gather_) {
      try {
        contexts_.note(block, gather());
      } catch (...) {  // NOLINT(bugprone-empty-catch)
      }
    }
  }
  void on_freed(BlockId block) noexcept {
    if (gather_.load() != nullptr) {
      try {
        contexts_.on_freed(block);
      } catch (...) {  // NOLINT(bugprone-empty-catch)
      }
    }
  }
  void on_out_of_memory(c10::DeviceIndex device,
                        std::size_t bytes,
                        std::size_t total_bytes,
                        std::size_t free_bytes) {
    std::vector<ErrorObserver> observers;
    {
      std::scoped_lock const lock{mutex_};
      observers = observers_;
    }
    for (ErrorObserver const& observer : observers) {
      observer(device, bytes, total_bytes, free_bytes);
    }
  }

  [[nodiscard]] as_torch::Contexts const& contexts() const noexcept { return contexts_; }

  /// The wall clock's time when a clock that shows `now_ns` was 0.
  [[nodiscard]] static std::int64_t epoch_ns(std::uint64_t now_ns) {
    auto const wall = std::chrono::system_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(wall).count() -
           static_cast<std::int64_t>(now_ns);
  }

 private:
  /// Blocks that move are told neither as freed nor as allocated: segments are what trackers are for.
  void tell_trackers(Record const& record, c10::DeviceIndex device) noexcept {
    Entry::Action action{};
    switch (record.kind) {
    case RecordKind::make_resident:
    case RecordKind::swap_in:
    case RecordKind::prefetch:
      action = Entry::ALLOC;
      break;
    case RecordKind::swap_out:
    case RecordKind::drop:
    case RecordKind::deallocate:
      action = Entry::FREE_COMPLETED;
      break;
    case RecordKind::grow:
      action = Entry::SEGMENT_ALLOC;
      break;
    case RecordKind::trim:
      action = Entry::SEGMENT_FREE;
      break;
    default:
      return;
    }
    if (record.address == nullptr) {
      return;  // it was not on the device
    }
    std::vector<std::shared_ptr<Tracker const>> trackers;
    try {
      {
        std::scoped_lock const lock{mutex_};
        trackers = trackers_;
      }
      Entry const entry{action,
                        device,
                        reinterpret_cast<std::size_t>(record.address),
                        record.bytes,
                        nullptr,
                        c10::MempoolId_t{0, 0},
                        c10::approx_time_t{}};
      for (auto const& tracker : trackers) {
        (*tracker)(entry);
      }
    } catch (...) {  // NOLINT(bugprone-empty-catch): a tracker's failure is its own
    }
  }

  std::atomic<Gather> gather_{nullptr};
  as_torch::Contexts contexts_;
  std::mutex mutex_;  // guards what follows
  std::vector<ErrorObserver> observers_;
  std::vector<std::shared_ptr<Tracker const>> trackers_;
};

}  // namespace spillway::torch
