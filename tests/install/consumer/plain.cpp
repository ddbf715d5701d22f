// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/sim/sim_api.hpp>

#if defined(SPILLWAY_WITH_CUDA) && SPILLWAY_WITH_CUDA
#  error "a program that did not ask for CUDA was given it"
#endif

int main() {
  spillway::SimApi device;
  device.destroy_stream(device.create_stream());
}
