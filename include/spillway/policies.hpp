// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/policy_set.hpp>
#include <spillway/defrag_arena.hpp>
#include <spillway/host/system_file_io.hpp>
#include <spillway/policy/compaction/sliding_compaction.hpp>
#include <spillway/policy/eviction/schedule_eviction.hpp>
#include <spillway/policy/fit/segregated_fit.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/policy/prefetch/schedule_lookahead.hpp>
#include <spillway/policy/recompute/tuned_recompute.hpp>

#include <mutex>

/// Declares (with `how` = `extern template`) or defines (`template`) the instantiations that depend
/// on a device and on no other policy. If spillway::compiled contains them, allocators on that
/// device compile faster, even with policies of the program's own.
#define SPILLWAY_INSTANTIATE_DEVICE(how, Device)                                                   \
  how class StreamOrder<Device>;                                                                   \
  how class HostSwapPool<Device>;                                                                  \
  how class DefragArena<Device, SegregatedFit, SlidingCompaction>;                                 \
  how class detail::HostTransfers<Device, SystemFileIo>;                                           \
  how class detail::StagingLane<Device>;                                                           \
  how class detail::ArenaMemory<Device>;                                                           \
  how class detail::CopyStreams<Device, SystemFileIo>

/// The same for the classes of an allocator with the given policies. Compiling these takes most of
/// the time of building a program.
#define SPILLWAY_INSTANTIATE_ALLOCATOR(how, Policies)                                              \
  how class detail::Journal<Policies>;                                                             \
  how class detail::Blocks<Policies>;                                                              \
  how class detail::Transfers<Policies>;                                                           \
  how class detail::Reclaimer<Policies>;                                                           \
  how class detail::Leases<Policies>;                                                              \
  how class detail::LookAhead<Policies>;                                                           \
  how class DeviceAllocator<Policies>;                                                             \
  how bool detail::Leases<Policies>::try_acquire(                                                  \
      std::span<LeaseRequest const>,                                                               \
      StreamIndex,                                                                                 \
      DeviceAllocator<Policies>::Granted const&) noexcept;                                         \
  how void detail::Leases<Policies>::acquire(std::span<LeaseRequest const>,                        \
                                             Policies::device::stream_type,                        \
                                             StreamIndex,                                          \
                                             DeviceAllocator<Policies>::Granted const&,            \
                                             char const*)

namespace spillway {

/// The default policies of an allocator on a device of type `Device`.
///
/// `SimPolicies` of sim.hpp and `CudaPolicies` of cuda.hpp are this bundle for the library's
/// devices. Derive from one of them, or from this for a device of your own, and change an alias:
/// ```
/// #include <spillway/cuda.hpp>
/// #include <spillway/policy/eviction/queue_eviction.hpp>
///
/// struct MyPolicies : spillway::PoliciesFor<spillway::CudaApi> {
///   using eviction = spillway::LruEviction;
/// };
/// ```
template <DeviceApi Device>
struct PoliciesFor {
  using device = Device;
  using fit = SegregatedFit;
  using arena = MovableBlocks;
  using compaction = SlidingCompaction;
  using eviction = ScheduleEviction;
  using prefetch = ScheduleLookahead;
  using recompute = TunedRecompute;
  using file_io = SystemFileIo;
  using lock = std::mutex;
  using observer = NullObserver;
};

struct SimPolicies;

/// The policies of `DeviceAllocator<>`: those of the simulated device, which runs everywhere. A
/// program that uses `DeviceAllocator<>` includes sim.hpp, which defines them. A program for a GPU
/// uses `DeviceAllocator<CudaPolicies>` and does not compile the simulator.
using DefaultPolicies = SimPolicies;

SPILLWAY_COMPILED_PART(class detail::RangeMap<SegregatedFit>);
SPILLWAY_COMPILED_PART(class detail::RoomSearch<SlidingCompaction>);

}  // namespace spillway
