// SPDX-License-Identifier: Apache-2.0
// Twice as many bytes as the device holds, and still each tensor is there when it is used.
#include <spillway/spillway.hpp>

#include <cstdio>
#include <vector>

using spillway::Access;
using namespace spillway::literals;

int main() {
  // [hello]
  spillway::SimApi device;  // on a GPU: CudaApi here and CudaPolicies below
  auto const stream = device.create_stream();
  spillway::DeviceAllocator<spillway::SimPolicies> memory{device, {.capacity_bytes = 16_MiB}};

  // Eight tensors of 4 MiB where there is room for four: the others swap out to host memory.
  std::vector<spillway::SwappableTensor<float, 2, decltype(memory)>> tensors;
  for (int i = 0; i < 8; ++i) {
    std::vector<float> const values(1024 * 1024, static_cast<float>(i));
    tensors.push_back(spillway::make_tensor<float>(memory, {1024, 1024}));
    tensors.back().copy_from_host_sync(values, stream);
  }

  {  // A lease brings a tensor in and keeps it in its place while work that uses it is enqueued.
    auto const from = tensors[0].acquire(Access::read, stream);
    auto const to = tensors[7].acquire(Access::write, stream);  // its old bytes are not needed
    device.copy(to.data(), from.data(), 4_MiB, spillway::CopyKind::on_device, stream);
  }

  std::vector<float> result(1024 * 1024);
  tensors[7].copy_to_host_sync(result, stream);  // all zeros now, as tensor 0
  // [hello end]

  spillway::Stats const stats = memory.stats();
  std::printf(
      "%zu MiB of tensors, %zu MiB of them on the device; %zu swapped out, %zu swapped in\n",
      static_cast<std::size_t>(stats.allocated.bytes.current) >> 20U,
      static_cast<std::size_t>(stats.resident.bytes.current) >> 20U,
      static_cast<std::size_t>(stats.swap_outs.count),
      static_cast<std::size_t>(stats.swap_ins.count));
  memory.retire_stream(stream);
  device.destroy_stream(stream);
  return result == std::vector<float>(1024 * 1024, 0.0F) ? 0 : 1;
}
