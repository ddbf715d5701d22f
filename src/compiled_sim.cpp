// SPDX-License-Identifier: Apache-2.0
// The default policies of the simulated device, compiled once for the programs that link
// spillway::compiled.
#define SPILLWAY_COMPILED
#define SPILLWAY_COMPILING
#include <spillway/sim.hpp>
