// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The allocator, its tensors and its policies on the simulated device: all that a program without
/// a GPU needs. cuda.hpp is the same for a GPU.

#include <spillway/concepts/policy_set.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/policies.hpp>
#include <spillway/swappable_buffer.hpp>
#include <spillway/swappable_tensor.hpp>

namespace spillway {

/// The default policies on the simulated device. Derive and change an alias to choose differently:
/// ```
/// struct MyPolicies : spillway::SimPolicies {
///   using eviction = spillway::LruEviction;
/// };
/// ```
struct SimPolicies : PoliciesFor<SimApi> {};

static_assert(PolicySet<SimPolicies>);

#if defined(SPILLWAY_COMPILED)
SPILLWAY_INSTANTIATE class detail::SimMemory<detail::SimHostBacking,
                                             detail::ThreadedExecutor::Barrier>;
SPILLWAY_INSTANTIATE class detail::BasicSimWorker<>;
SPILLWAY_INSTANTIATE class detail::BasicThreadedExecutor<>;
SPILLWAY_INSTANTIATE class detail::BasicSimApi<detail::ThreadedExecutor>;
SPILLWAY_INSTANTIATE class StreamPrefetcher<SimPolicies::prefetch>;
SPILLWAY_INSTANTIATE class detail::RangeMap<SimPolicies::fit>;
SPILLWAY_INSTANTIATE_ALLOCATOR(SimPolicies);
#endif

}  // namespace spillway
