// SPDX-License-Identifier: Apache-2.0
// The default policies of the simulated device, compiled once for the programs that link
// spillway::compiled.
#define SPILLWAY_COMPILED 1
#include <spillway/sim.hpp>

namespace spillway {

SPILLWAY_INSTANTIATE_DEVICE(template, SimApi);
SPILLWAY_INSTANTIATE_ALLOCATOR(template, SimPolicies);

}  // namespace spillway
