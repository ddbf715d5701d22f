// SPDX-License-Identifier: Apache-2.0
// CuFileIo on a GPU, in whatever way cuFile serves the folder of temporary files.
#include <spillway/cuda.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/swappable_buffer.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include <support/temporary_folder.hpp>

using namespace spillway;
using namespace spillway::literals;

TEST_SUITE("cufile") {
  TEST_CASE("CuFileIo: blocks swapped out to a file come back unchanged") {
    constexpr std::size_t block_bytes = 8_MiB;
    TemporaryFolder folder;
    CudaApi device;
    cudaStream_t const stream = device.create_stream();
    {
      DeviceAllocator<CudaPolicies>::Options options{.capacity_bytes = 2 * block_bytes};
      options.host.file_bytes = 256_MiB;
      options.host.file = folder.path();
      options.host.file_direct_io = true;
      options.host.file_checksums = false;
      DeviceAllocator<CudaPolicies> allocator{device, options};
      std::vector<SwappableBuffer<DeviceAllocator<CudaPolicies>>> buffers;
      for (unsigned i = 0; i < 8; ++i) {
        auto const lease =
            buffers.emplace_back(allocator, block_bytes).acquire(Access::write, stream);
        device.fill(lease.data(), static_cast<unsigned char>(i + 1), block_bytes, stream);
      }
      std::vector<unsigned char> bytes(block_bytes);
      for (int round = 0; round < 3; ++round) {
        for (unsigned i = 0; i < buffers.size(); ++i) {
          auto const lease = buffers[i].acquire(Access::read, stream);
          allocator.copy_to_host_sync(bytes.data(), lease.data(), block_bytes, stream);
          CHECK(std::all_of(
              bytes.begin(), bytes.end(), [&](unsigned char one) { return one == i + 1; }));
        }
      }
      MESSAGE("file calls: ", std::string{allocator.host_stats().file_calls});
      buffers.clear();
      allocator.retire_stream(stream);
    }
    device.synchronize(stream);
    device.destroy_stream(stream);
  }
}
