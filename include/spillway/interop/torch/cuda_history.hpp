// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/record.hpp>
#include <spillway/core/types.hpp>
#include <spillway/interop/torch/context_table.hpp>
#include <spillway/interop/torch/private_pools.hpp>
#include <spillway/interop/torch/tensor_stats.hpp>
#include <spillway/observe/snapshot.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>

namespace spillway::torch {

/// Conversions of statistics and snapshots to PyTorch's types.
namespace as_torch {

using Contexts = ContextTable<c10::GatheredContext>;

inline c10::CachingAllocator::Stat stat(TensorStat const& from) {
  c10::CachingAllocator::Stat to;
  to.current = from.current;
  to.peak = from.peak;
  to.allocated = from.allocated;
  to.freed = from.freed;
  return to;
}

inline c10::CachingAllocator::StatArray stat_array(TensorStatArray const& from) {
  return {stat(from.all()), stat(from.small()), stat(from.large())};
}

inline c10::CachingDeviceAllocator::DeviceStats device_stats(TensorStats const& from) {
  c10::CachingDeviceAllocator::DeviceStats to;
  to.allocation = stat_array(from.allocation);
  to.segment = stat_array(from.segment);
  to.active = stat_array(from.active);
  to.inactive_split = stat_array(from.inactive_split);
  to.allocated_bytes = stat_array(from.allocated_bytes);
  to.reserved_bytes = stat_array(from.reserved_bytes);
  to.active_bytes = stat_array(from.active_bytes);
  to.inactive_split_bytes = stat_array(from.inactive_split_bytes);
  to.requested_bytes = stat_array(from.requested_bytes);
  to.num_alloc_retries = from.num_alloc_retries;
  to.num_ooms = from.num_ooms;
  to.num_device_alloc = from.num_device_alloc;
  to.num_device_free = from.num_device_free;
  return to;
}

/// Adds the bytes of one private pool, if this version of PyTorch counts pools separately.
template <class DeviceStats>
void add_private_pool(DeviceStats& to, PoolId id, std::size_t bytes) {
  if constexpr (requires { to.reserved_bytes_by_private_pools; }) {
    TensorStatArray counted;
    counted.set_large(static_cast<std::int64_t>(bytes));
    to.reserved_bytes_by_private_pools[id] = stat_array(counted);
  }
}

/// Converts a segment. A resident block counts as allocated, whether an operation uses it or not. A
/// block that is swapped out is not shown. If a block was freed while it was being copied, its
/// range is active but not allocated.
inline c10::CachingDeviceAllocator::SegmentInfo
segment(MemorySnapshot::Segment const& from, c10::DeviceIndex device, Contexts const& contexts) {
  using State = MemorySnapshot::State;
  c10::CachingDeviceAllocator::SegmentInfo to;
  to.device = device;
  to.address = from.address;
  to.total_size = from.size_bytes;
  to.requested_size = from.requested_bytes(State::allocated);
  to.allocated_size = from.bytes(State::allocated);
  to.active_size = to.allocated_size + from.bytes(State::leaving);
  to.is_large = true;
  to.blocks.reserve(from.blocks.size());
  for (MemorySnapshot::Block const& block : from.blocks) {
    c10::CachingDeviceAllocator::BlockInfo piece;
    piece.size = block.size_bytes;
    piece.requested_size = block.requested_bytes;
    piece.allocated = block.state == State::allocated;
    piece.active = block.state != State::free;
    piece.context_when_allocated = piece.allocated ? contexts.find(block.id) : nullptr;
    to.blocks.push_back(std::move(piece));
  }
  return to;
}

/// Converts a piece of a private pool, which becomes a segment of its own.
///
/// @param bytes    the bytes that the piece takes up
/// @param context  of the allocation, or null
template <class Piece>
c10::CachingDeviceAllocator::SegmentInfo
pool_segment(Piece const& from,
             c10::DeviceIndex device,
             std::size_t bytes,
             std::shared_ptr<c10::GatheredContext> context = nullptr) {
  bool const is_live = from.requested_bytes != 0;
  c10::CachingDeviceAllocator::SegmentInfo to;
  to.device = device;
  to.address = reinterpret_cast<std::size_t>(from.address);
  to.total_size = bytes;
  to.requested_size = from.requested_bytes;
  to.allocated_size = to.active_size = is_live ? bytes : 0;
  to.stream = from.stream;
  to.is_large = from.bytes > largest_small_bytes;
  to.owner_private_pool_id = from.pool;
  c10::CachingDeviceAllocator::BlockInfo piece;
  piece.size = bytes;
  piece.requested_size = from.requested_bytes;
  piece.allocated = piece.active = is_live;
  piece.context_when_allocated = is_live ? std::move(context) : nullptr;
  to.blocks.push_back(std::move(piece));
  return to;
}

/// Converts a segment to several: each piece of a private pool in it becomes a segment of its own.
///
/// @param pieces  of all pools, by address
template <class Piece>
void add_segments(MemorySnapshot::Segment const& from,
                  std::unordered_map<std::uintptr_t, Piece> const& pieces,
                  c10::DeviceIndex device,
                  Contexts const& contexts,
                  std::vector<c10::CachingDeviceAllocator::SegmentInfo>& to) {
  MemorySnapshot::Segment part{from.address};  // since the last piece
  auto const end_part = [&](std::uintptr_t next) {
    if (part.size_bytes != 0) {
      to.push_back(segment(part, device, contexts));
    }
    part = {next};
  };
  for (MemorySnapshot::Block const& block : from.blocks) {
    if (auto const found = pieces.find(block.address); found != pieces.end()) {
      end_part(block.address + block.size_bytes);
      to.push_back(pool_segment(found->second, device, block.size_bytes, contexts.find(block.id)));
    } else {
      part.blocks.push_back(block);
      part.size_bytes += block.size_bytes;
    }
  }
  end_part(0);
}

/// Converts the changes, oldest first. Swapping out is shown as freeing a block, swapping in as
/// allocating it, and a move as both.
///
/// @param epoch_ns  time of the wall clock at which the device's clock was 0
inline std::vector<c10::CachingDeviceAllocator::TraceEntry>
trace(MemorySnapshot const& from, std::int64_t epoch_ns, Contexts const& contexts) {
  using Entry = c10::CachingDeviceAllocator::TraceEntry;
  using Kind = MemorySnapshot::Change::Kind;
  std::vector<Entry> to;
  to.reserve(from.changes.size() + 1);
  auto const add = [&](Entry::Action action, std::size_t address, auto const& change) {
    to.emplace_back(action,
                    static_cast<c10::DeviceIndex>(from.device),
                    address,
                    change.size_bytes,
                    nullptr,
                    c10::MempoolId_t{0, 0},
                    c10::approx_time_t{},
                    contexts.find(change.id));
    to.back().time_.t_ = (static_cast<std::int64_t>(change.time_ns) + epoch_ns) / 1000;
  };
  for (MemorySnapshot::Change const& change : from.changes) {
    switch (change.kind) {
    case Kind::take:
      add(Entry::ALLOC, change.address, change);
      break;
    case Kind::leave:
      add(Entry::FREE_REQUESTED, change.address, change);
      add(Entry::FREE_COMPLETED, change.address, change);
      break;
    case Kind::reserve:
      add(Entry::SEGMENT_ALLOC, change.address, change);
      break;
    case Kind::out_of_memory:
      add(Entry::OOM, change.free_bytes, change);
      break;
    }
  }
  add(Entry::SNAPSHOT, 0, MemorySnapshot::Change{.time_ns = from.time_ns});
  return to;
}

}  // namespace as_torch

/// Keeps and calls the listeners of a CUDA allocator: the memory history, observers of
/// out-of-memory errors, and trace trackers. It is a part of `CudaTensorAllocator`.
///
/// Threads  thread-safe. Listeners are called without a lock.
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

  /// Implements `torch.cuda.memory._record_memory_history`.
  void record(TensorObserver& watch,
              bool enabled,
              Gather gather,
              std::size_t most_entries,
              When when,
              bool clears) {
    if (clears || !enabled) {
      watch.clear_history();
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

  /// Remembers the caller's context, which `gather` returns. Errors are ignored, so that no
  /// allocation fails for lack of history.
  void on_allocated(BlockId block) noexcept {
    if (Gather const gather = gather_) {
      try {
        contexts_.add(block, gather());
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

  /// Returns the wall clock's time at which a clock that now shows `now_ns` was 0.
  [[nodiscard]] static std::int64_t epoch_ns(std::uint64_t now_ns) {
    auto const wall = std::chrono::system_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(wall).count() -
           static_cast<std::int64_t>(now_ns);
  }

  // For a thread that forks: while it holds the lock, no other thread is inside of a call, except
  // of a listener.

  void lock() {
    mutex_.lock();
    contexts_.lock();
  }
  [[nodiscard]] bool try_lock() noexcept { return std::try_lock(mutex_, contexts_) == -1; }
  void unlock() noexcept {
    contexts_.unlock();
    mutex_.unlock();
  }

 private:
  /// Calls the trackers. A move is not reported, since trackers only look at segments.
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
      return;  // the block was not resident
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
    } catch (...) {  // a tracker's failure does not concern the allocator
    }
  }

  std::atomic<Gather> gather_{nullptr};
  as_torch::Contexts contexts_;
  std::mutex mutex_;  // guards what follows
  std::vector<ErrorObserver> observers_;
  std::vector<std::shared_ptr<Tracker const>> trackers_;
};

}  // namespace spillway::torch
