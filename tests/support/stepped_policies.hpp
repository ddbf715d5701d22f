// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/device_allocator.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/sim.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

namespace support {

/// The defaults on a stepped device.
struct SteppedPolicies : spillway::SimPolicies {
  using device = spillway::testing::SteppedSimApi;
};
/// The same without anything that happens ahead of need.
struct SteppedOnDemand : SteppedPolicies {
  using eviction = spillway::LruEviction;
  using prefetch = spillway::NoPrefetch;
};

}  // namespace support

#if defined(SPILLWAY_TEST_POLICIES_COMPILED)
namespace spillway {

SPILLWAY_INSTANTIATE_DEVICE(extern template, testing::SteppedSimApi);
SPILLWAY_INSTANTIATE_ALLOCATOR(extern template, support::SteppedPolicies);
SPILLWAY_INSTANTIATE_ALLOCATOR(extern template, support::SteppedOnDemand);

}  // namespace spillway
#endif
