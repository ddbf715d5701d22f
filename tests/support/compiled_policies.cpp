// SPDX-License-Identifier: Apache-2.0
// Templates for policies that several tests use, compiled once for all of them.
#include <support/small_allocator.hpp>
#include <support/stepped_policies.hpp>
#include <support/watched_program.hpp>

namespace spillway {

SPILLWAY_INSTANTIATE_DEVICE(template, testing::SteppedSimApi);
SPILLWAY_INSTANTIATE_ALLOCATOR(template, support::SmallPolicies);
SPILLWAY_INSTANTIATE_ALLOCATOR(template, support::SteppedPolicies);
SPILLWAY_INSTANTIATE_ALLOCATOR(template, support::SteppedOnDemand);
SPILLWAY_INSTANTIATE_ALLOCATOR(template, support::Watched);
SPILLWAY_INSTANTIATE_ALLOCATOR(template, support::WatchedOnDemand);

}  // namespace spillway
