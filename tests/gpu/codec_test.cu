// SPDX-License-Identifier: Apache-2.0
// Codecs that run on a GPU.
#include <spillway/core/types.hpp>
#include <spillway/cuda.hpp>
#include <spillway/cuda_kernels.cuh>
#include <spillway/testing/stream_codec_contract.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.cuh"

using namespace spillway;
using namespace spillway::literals;

namespace {

constexpr std::size_t sparse_elements = 1 << 20;  // elements of a tensor

/// Numbers of which each fourth is not 0.
__global__ void write_sparse(float* to, float tag) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < sparse_elements;
       i += std::size_t{gridDim.x} * blockDim.x) {
    to[i] = i % 4 == 1 ? tag + static_cast<float>(i % 1024) : 0.0F;
  }
}
__global__ void check_sparse(float const* from, float tag, unsigned long long* wrong) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < sparse_elements;
       i += std::size_t{gridDim.x} * blockDim.x) {
    if (from[i] != (i % 4 == 1 ? tag + static_cast<float>(i % 1024) : 0.0F)) {
      atomicAdd(wrong, 1ULL);
    }
  }
}

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE("CudaZeroBitmap: encoded tensors take fewer bytes and come back unchanged") {
    CudaApi device;
    gpu_test::WrongBytes wrong{device};
    {
      DeviceAllocator<CudaPolicies> memory{
          device, {.capacity_bytes = 16_MiB, .host = {.pinned_bytes = 128_MiB}}};
      auto const stream = memory.create_stream();
      std::vector<Tensor<float, 1, CudaPolicies>> tensors;
      for (int i = 0; i < 16; ++i) {
        tensors.push_back(make_tensor<float>(memory, {sparse_elements}));
        tensors.back().set_codec<CudaZeroBitmap>();
        write_sparse<<<64, 256, 0, stream.get()>>>(tensors.back().acquire_write(stream).data(),
                                                   static_cast<float>(i + 1));
        cuda_check(cudaGetLastError());
      }
      for (int step = 0; step < 3; ++step) {
        for (int i = 0; i < 16; ++i) {
          auto const lease = tensors[static_cast<std::size_t>(i)].acquire_read(stream);
          check_sparse<<<64, 256, 0, stream.get()>>>(
              lease.data(), static_cast<float>(i + 1), wrong.counter());
          cuda_check(cudaGetLastError());
        }
      }
      device.synchronize(stream.get());
      auto const host = memory.host_stats();
      CHECK(host.encoded_raw_bytes >= 12 * sparse_elements * sizeof(float));
      CHECK(host.encoded_stored_bytes < host.encoded_raw_bytes * 3 / 10);
      CHECK(host.failed_reads == 0);
    }
    CHECK(wrong.value() == 0);
  }

  TEST_CASE_TEMPLATE_INVOKE(stream_codec_contract,
                            spillway::testing::CodecOnDevice<CudaZeroBitmap, CudaApi>,
                            spillway::testing::CodecOnDevice<CudaAsBfloat16, CudaApi>);
}
