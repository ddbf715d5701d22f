// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/arena.hpp>
#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/eviction_policy.hpp>
#include <spillway/concepts/file_io_api.hpp>
#include <spillway/concepts/fit_policy.hpp>
#include <spillway/concepts/observer.hpp>
#include <spillway/concepts/prefetch_policy.hpp>
#include <spillway/concepts/recompute_policy.hpp>

#include <concepts>

namespace spillway {

/// A lock with the interface of `std::mutex`. `NullLock` suits an allocator that one thread uses.
template <class L>
concept LockPolicy = std::default_initializable<L> && requires(L lock) {
  lock.lock();
  lock.unlock();
  { lock.try_lock() } -> std::same_as<bool>;
};

/// The policies of an allocator, bundled by name. Derive from a bundle and change one alias:
///
/// | alias        | chooses                               | models in the library                |
/// |--------------|---------------------------------------|--------------------------------------|
/// | `device`     | where the memory is                   | `CudaApi`, `SimApi`, `ModelApi`,     |
/// |              |                                       | `SteppedSimApi`, `HostApi`,          |
/// |              |                                       | `HostPagedApi`, `TimedDevice<D>`     |
/// | `fit`        | which free range a block gets         | `SegregatedFit`, `BestFit`           |
/// | `arena`      | whether blocks move or pages map      | `MovableBlocks`, `MappedPages`,      |
/// |              |                                       | `StableAddresses`                    |
/// | `compaction` | which blocks move to join free ranges | `SlidingCompaction`, `NoCompaction`  |
/// | `eviction`   | which blocks leave                    | `ScheduleEviction`, `LruEviction`,   |
/// |              |                                       | `FifoEviction`, `SizeEviction`,      |
/// |              |                                       | `CostEviction`                       |
/// | `prefetch`   | which blocks come in ahead of need    | `ScheduleLookahead`, `ReverseOrder`, |
/// |              |                                       | `NoPrefetch`                         |
/// | `recompute`  | which blocks are made again by their  | `TunedRecompute`, `NoRecompute`,     |
/// |              | recipes instead of copied             | `RecomputeIfCheaper`,                |
/// |              |                                       | `AlwaysRecompute`                    |
/// | `file_io`    | how the file tier's file is accessed  | `SystemFileIo`, `PosixFileIo`,       |
/// |              |                                       | `IoUringFileIo`, `CuFileIo`          |
/// | `lock`       | how threads exclude each other        | `std::mutex`, `NullLock`             |
/// | `observer`   | who receives records                  | `NullObserver`, `Timeline`,          |
/// |              |                                       | `NvtxMarks`                          |
template <class S>
concept PolicySet = DeviceApi<typename S::device> && FitPolicy<typename S::fit> &&
    CompactionPolicy<typename S::compaction> && Arena<ArenaOf<S>> &&
    EvictionPolicy<typename S::eviction> && PrefetchPolicy<typename S::prefetch> &&
    RecomputePolicy<typename S::recompute> && FileIoApi<typename S::file_io> &&
    LockPolicy<typename S::lock> && Observer<typename S::observer>;

}  // namespace spillway
