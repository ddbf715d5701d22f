// SPDX-License-Identifier: Apache-2.0
// Twice as many bytes as the device holds, and still each tensor is there when it is used.
// [hello]
#include <spillway/sim.hpp>

#include <cstdio>
#include <vector>

using namespace spillway::literals;

int main() {
  // On a GPU include <spillway/cuda.hpp> and name CudaApi, DeviceAllocator<CudaPolicies> and
  // Tensor<float, 2, CudaPolicies>.
  spillway::SimApi device;
  spillway::DeviceAllocator<> memory{device, {.capacity_bytes = 16_MiB}};
  auto const stream = memory.create_stream();

  // Eight tensors of 4 MiB where there is room for four: the others swap out to host memory.
  std::vector<spillway::Tensor<float, 2>> tensors;
  for (int i = 0; i < 8; ++i) {
    std::vector<float> const values(1024 * 1024, static_cast<float>(i));
    tensors.push_back(spillway::make_tensor<float>(memory, {1024, 1024}));
    tensors.back().copy_from_host_sync(values, stream);
  }

  {  // A lease brings a tensor in and keeps it in its place while work that uses it is enqueued.
    auto const from = tensors[0].acquire_read(stream);  // its view is of float const
    auto const to = tensors[7].acquire_write(stream);   // its old elements are not brought in
    device.launch(stream, [in = from.view(), out = to.view()] {  // on a GPU: a kernel
      for (std::size_t i = 0; i < in.extent(0); ++i) {
        for (std::size_t j = 0; j < in.extent(1); ++j) {
          out(i, j) = in(i, j) + 0.5F;
        }
      }
    });
  }

  std::vector<float> result(1024 * 1024);
  tensors[7].copy_to_host_sync(result, stream);
  spillway::Stats const stats = memory.stats();
  std::printf("%.1f; %zu of %zu MiB are on the device, %zu tensors swapped out, %zu swapped in\n",
              static_cast<double>(result.back()),
              static_cast<std::size_t>(stats.resident.bytes.current) >> 20U,
              static_cast<std::size_t>(stats.allocated.bytes.current) >> 20U,
              static_cast<std::size_t>(stats.swap_outs.count),
              static_cast<std::size_t>(stats.swap_ins.count));
  return result == std::vector<float>(1024 * 1024, 0.5F) ? 0 : 1;
}
// [hello end]
