// SPDX-License-Identifier: Apache-2.0
#include <spillway/cuda_kernels.cuh>

#include <cstdio>

SPILLWAY_INSTANTIATE_CUDA_KERNELS;

// Runs where there is no GPU, too: there it has been told so by the device.
int main() {
  try {
    spillway::CudaApi device;
    std::printf("codecs run: %d\n", spillway::CudaZeroBitmap::runs_on(device));
  } catch (spillway::DeviceError const& error) {
    std::printf("no device: %s\n", error.what());
  }
}
