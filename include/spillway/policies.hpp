// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/policy_set.hpp>
#include <spillway/defrag_arena.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/policy/compaction/sliding_compaction.hpp>
#include <spillway/policy/eviction/schedule_eviction.hpp>
#include <spillway/policy/fit/segregated_fit.hpp>
#include <spillway/policy/null_observer.hpp>
#include <spillway/policy/prefetch/schedule_lookahead.hpp>

#include <mutex>

namespace spillway {

/// What an allocator is made of unless told otherwise, on the simulated device.
///
/// Derive and change one alias to choose differently:
/// ```
/// struct MyPolicies : spillway::SimPolicies {
///   using eviction = spillway::LruEviction;
/// };
/// ```
struct SimPolicies {
  using device = SimApi;
  using fit = SegregatedFit;
  using arena = MovableBlocks;
  using compaction = SlidingCompaction;
  using eviction = ScheduleEviction;
  using prefetch = ScheduleLookahead;
  using lock = std::mutex;
  using observer = NullObserver;
};

static_assert(PolicySet<SimPolicies>);

/// The embedded default: runs everywhere. On a GPU use `CudaPolicies` of cuda_policies.hpp.
using DefaultPolicies = SimPolicies;

}  // namespace spillway
