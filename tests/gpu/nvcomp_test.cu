// SPDX-License-Identifier: Apache-2.0
// nvCOMP's compressors as codecs.
#include <spillway/core/types.hpp>
#include <spillway/cuda.hpp>
#include <spillway/nvcomp_codecs.cuh>
#include <spillway/testing/stream_codec_contract.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

#include "kernels.cuh"

using namespace spillway;
using namespace spillway::literals;

namespace {

constexpr std::size_t weight_elements = 1 << 20;  // elements of a tensor

/// Numbers of few exponents, as weights are.
__device__ float weight(std::size_t i, float tag) {
  auto const random = static_cast<unsigned>(i) * 2654435761U >> 8U;
  return tag * (1.0F + static_cast<float>(random) * 0x1p-24F);
}
__global__ void write_weights(float* to, float tag) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < weight_elements;
       i += std::size_t{gridDim.x} * blockDim.x) {
    to[i] = weight(i, tag);
  }
}
__global__ void check_weights(float const* from, float tag, unsigned long long* wrong) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < weight_elements;
       i += std::size_t{gridDim.x} * blockDim.x) {
    if (from[i] != weight(i, tag)) {
      atomicAdd(wrong, 1ULL);
    }
  }
}

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE_TEMPLATE("CudaBytePlanes: encoded weights take fewer bytes and come back unchanged",
                     Compressor,
                     NvcompAns,
                     NvcompLz4) {
    CudaApi device;
    gpu_test::WrongBytes wrong{device};
    {
      DeviceAllocator<CudaPolicies> memory{
          device, {.capacity_bytes = 16_MiB, .host = {.pinned_bytes = 128_MiB}}};
      auto const stream = memory.create_stream();
      std::vector<Tensor<float, 1, CudaPolicies>> tensors;
      for (int i = 0; i < 16; ++i) {
        tensors.push_back(make_tensor<float>(memory, {weight_elements}));
        tensors.back().set_codec<CudaBytePlanes<Compressor>>();
        write_weights<<<64, 256, 0, stream.get()>>>(tensors.back().acquire_write(stream).data(),
                                                    static_cast<float>(i + 1));
        cuda_check(cudaGetLastError());
      }
      for (int step = 0; step < 3; ++step) {
        for (int i = 0; i < 16; ++i) {
          auto const lease = tensors[static_cast<std::size_t>(i)].acquire_read(stream);
          check_weights<<<64, 256, 0, stream.get()>>>(
              lease.data(), static_cast<float>(i + 1), wrong.counter());
          cuda_check(cudaGetLastError());
        }
      }
      device.synchronize(stream.get());
      auto const host = memory.host_stats();
      CHECK(host.encoded_raw_bytes >= 12 * weight_elements * sizeof(float));
      CHECK(host.encoded_stored_bytes < host.encoded_raw_bytes * 85 / 100);
      CHECK(host.failed_reads == 0);
    }
    CHECK(wrong.value() == 0);
  }

  TEST_CASE_TEMPLATE_INVOKE(stream_codec_contract,
                            spillway::testing::CodecOnDevice<CudaBytePlanes<NvcompAns>, CudaApi>,
                            spillway::testing::CodecOnDevice<CudaBytePlanes<NvcompLz4>, CudaApi>);
}
