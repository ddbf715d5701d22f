// SPDX-License-Identifier: Apache-2.0
// 01_hello_swap on a GPU, with a kernel. nvcc compiles the kernel alone; this file needs only the
// toolkit's headers and any C++20 compiler. Exits with status 77 if there is no GPU.
// [gpu]
#include <spillway/cuda.hpp>

#include <cstdio>
#include <vector>

#include "kernel.hpp"  // add_on_device, from a file that nvcc compiles

using namespace spillway::literals;

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU\n");
    return 77;
  }
  spillway::CudaApi device;
  spillway::DeviceAllocator<spillway::CudaPolicies> memory{
      device, {.capacity_bytes = 16_MiB, .host = {.pinned_bytes = 64_MiB}}};
  auto const stream = memory.create_stream();

  std::vector<spillway::Tensor<float, 2, spillway::CudaPolicies>> tensors;
  for (int i = 0; i < 8; ++i) {  // 32 MiB where there is room for 16
    std::vector<float> const values(1024 * 1024, static_cast<float>(i));
    tensors.push_back(spillway::make_tensor<float>(memory, {1024, 1024}));
    tensors.back().copy_from_host_sync(values, stream);
  }
  {
    auto const from = tensors[0].acquire_read(stream);
    auto const to = tensors[7].acquire_write(stream);
    if (add_on_device(to.data(), from.data(), 0.5F, 1024 * 1024, stream) != cudaSuccess) {
      return 1;
    }
  }
  std::vector<float> result(1024 * 1024);
  tensors[7].copy_to_host_sync(result, stream);
  std::printf("%.1f, %zu tensors swapped out\n",
              static_cast<double>(result.back()),
              static_cast<std::size_t>(memory.stats().swap_outs.count));
  return result == std::vector<float>(1024 * 1024, 0.5F) ? 0 : 1;
}
// [gpu end]
