// SPDX-License-Identifier: Apache-2.0
#include <spillway/cuda.hpp>

#include <cstdio>

// Runs where there is no GPU, too: there it has been told so by the device.
int main() {
  try {
    spillway::CudaApi const device;
    std::printf("device %d\n", device.ordinal());
  } catch (spillway::DeviceError const& error) {
    std::printf("no device: %s\n", error.what());
  }
}
