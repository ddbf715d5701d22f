// SPDX-License-Identifier: Apache-2.0
// Copies by a kernel: on a GPU, and on the stand-in for one.
#include <spillway/core/types.hpp>
#include <spillway/cuda.hpp>
#include <spillway/cuda_kernels.cuh>
#include <spillway/testing/device_contracts.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <support/copy_kernel_device.hpp>

TEST_SUITE("gpu") {
  namespace {

  using namespace spillway;
  using namespace spillway::literals;
  using spillway::test::CudaApiWithCopyKernel;

  }  // namespace

  TEST_CASE_TEMPLATE_INVOKE(batch_copy_contract, CudaApiWithCopyKernel);
  TEST_CASE_TEMPLATE_INVOKE(virtual_memory_contract, CudaApiWithCopyKernel);

  TEST_CASE(
      "CudaCopyKernel: moved blocks, and small blocks that are swapped out, keep their bytes") {
    using Allocator = DeviceAllocator<CudaPolicies>;
    using Buffer = SwappableBuffer<Allocator>;
    CudaApiWithCopyKernel device;
    testing::DeviceRig<CudaApi> rig{device};
    auto const stream = rig.stream();
    unsigned char* const seen = rig.pinned(64_KiB);
    Allocator memory{device, {.capacity_bytes = 32_MiB, .host = {.pinned_bytes = 64_MiB}}};
    std::vector<std::pair<unsigned char, Buffer>> kept;
    std::vector<Buffer> gaps;
    for (std::size_t i = 0; i < 512; ++i) {
      std::size_t const bytes = 32_KiB + i % 7 * granule_bytes;
      auto const tag = static_cast<unsigned char>(1 + i % 251);
      Buffer buffer{memory, bytes};
      device.fill(buffer.acquire(Access::write, stream).data(), tag, bytes, stream);
      if (i % 2 == 0) {
        gaps.push_back(std::move(buffer));
      } else {
        kept.emplace_back(tag, std::move(buffer));
      }
    }
    auto const wrong_blocks = [&] {
      return std::count_if(kept.begin(), kept.end(), [&](auto& one) {
        std::size_t const bytes = one.second.size_bytes();
        auto const lease = one.second.acquire(Access::read, stream);
        device.copy(seen, lease.data(), bytes, CopyKind::to_host, stream);
        device.synchronize(stream);
        return !std::all_of(seen, seen + bytes, [&](auto byte) { return byte == one.first; });
      });
    };
    gaps.clear();
    while (memory.compact() != 0) {
    }
    CHECK(memory.stats().moves.count > 100);
    CHECK(wrong_blocks() == 0);
    { Buffer const large{memory, 31_MiB}; }
    CHECK(memory.stats().swap_outs.count > 200);
    CHECK(wrong_blocks() == 0);
    kept.clear();
    memory.retire_stream(stream);
  }
}
