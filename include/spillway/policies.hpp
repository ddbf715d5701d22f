// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/policy_set.hpp>
#include <spillway/defrag_arena.hpp>
#include <spillway/policy/compaction/sliding_compaction.hpp>
#include <spillway/policy/eviction/schedule_eviction.hpp>
#include <spillway/policy/fit/segregated_fit.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/policy/prefetch/schedule_lookahead.hpp>
#include <spillway/policy/recompute/tuned_recompute.hpp>

#include <mutex>

/// The classes of an allocator with the given policies that spillway::compiled holds: those that
/// most of the time to build a program goes into.
#define SPILLWAY_INSTANTIATE_ALLOCATOR(Policies)                                                   \
  SPILLWAY_INSTANTIATE class StreamOrder<Policies::device>;                                        \
  SPILLWAY_INSTANTIATE class HostSwapPool<Policies::device>;                                       \
  SPILLWAY_INSTANTIATE class DefragArena<Policies::device, Policies::fit, Policies::compaction>;   \
  SPILLWAY_INSTANTIATE class detail::HostTransfers<Policies::device, SystemFileIo>;                \
  SPILLWAY_INSTANTIATE class detail::Journal<Policies>;                                            \
  SPILLWAY_INSTANTIATE class detail::Blocks<Policies>;                                             \
  SPILLWAY_INSTANTIATE class detail::Transfers<Policies>;                                          \
  SPILLWAY_INSTANTIATE class detail::Reclaimer<Policies>;                                          \
  SPILLWAY_INSTANTIATE class detail::Leases<Policies>;                                             \
  SPILLWAY_INSTANTIATE class detail::LookAhead<Policies>;                                          \
  SPILLWAY_INSTANTIATE class detail::CopyStreams<Policies::device>;                                \
  SPILLWAY_INSTANTIATE class DeviceAllocator<Policies>;                                            \
  SPILLWAY_INSTANTIATE bool detail::Leases<Policies>::try_acquire(                                 \
      std::span<LeaseRequest const>,                                                               \
      StreamIndex,                                                                                 \
      DeviceAllocator<Policies>::Granted const&) noexcept;                                         \
  SPILLWAY_INSTANTIATE void detail::Leases<Policies>::acquire(                                     \
      std::span<LeaseRequest const>,                                                               \
      Policies::device::stream_type,                                                               \
      StreamIndex,                                                                                 \
      DeviceAllocator<Policies>::Granted const&)

namespace spillway {

/// The default policies of an allocator on a device of type `Device`.
///
/// `SimPolicies` of sim.hpp and `CudaPolicies` of cuda.hpp are this bundle for the library's
/// devices. Derive from one of them, or from this for a device of your own, and change an alias:
/// ```
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
  using lock = std::mutex;
  using observer = NullObserver;
};

struct SimPolicies;

/// What `DeviceAllocator<>` is made of: the simulated device, which runs everywhere. To name
/// `DeviceAllocator<>`, include sim.hpp, which defines the bundle; a program for a GPU names
/// `DeviceAllocator<CudaPolicies>` and compiles no simulator.
using DefaultPolicies = SimPolicies;

}  // namespace spillway
