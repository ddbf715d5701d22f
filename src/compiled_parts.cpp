// SPDX-License-Identifier: Apache-2.0
// The parts that depend on no policies, compiled once for the programs that link
// spillway::compiled: the policies themselves, the host pool's files, the devices that need no
// toolkit and what users see.
#define SPILLWAY_COMPILED 1
#define SPILLWAY_COMPILING_PARTS
#include <spillway/device/sim/model_api.hpp>
#include <spillway/spillway.hpp>
#include <spillway/testing/stepped_sim_api.hpp>
