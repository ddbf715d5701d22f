// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The allocator, its tensors and its policies on the simulated device: all that a program without
/// a GPU needs. cuda.hpp is the same for a GPU.

#include <spillway/concepts/policy_set.hpp>
#include <spillway/core/config.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/policies.hpp>
#include <spillway/swappable_buffer.hpp>
#include <spillway/swappable_tensor.hpp>

namespace spillway {

/// The default policies on the simulated device. Derive and change an alias to choose differently:
/// ```
/// #include <spillway/policy/eviction/queue_eviction.hpp>
///
/// struct MyPolicies : spillway::SimPolicies {
///   using eviction = spillway::LruEviction;
/// };
/// ```
struct SimPolicies : PoliciesFor<SimApi> {};

SPILLWAY_CHECK_MODEL(PolicySet<SimPolicies>);

#if defined(SPILLWAY_COMPILED)
SPILLWAY_INSTANTIATE_DEVICE(extern template, SimApi);
SPILLWAY_INSTANTIATE_ALLOCATOR(extern template, SimPolicies);
#endif

}  // namespace spillway
