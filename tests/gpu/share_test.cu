// SPDX-License-Identifier: Apache-2.0
// Two allocators that share a part of one GPU, as two programs do.
#include <spillway/cuda.hpp>
#include <spillway/device_share.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <thread>
#include <vector>

#include "kernels.cuh"
#include <support/temporary_folder.hpp>

using namespace spillway;
using namespace spillway::literals;

namespace {

/// One program: an allocator, its share, and blocks that kernels write and check.
class SharingProgram {
 public:
  static constexpr std::size_t capacity_bytes = 64_MiB;
  static constexpr std::size_t block_bytes = 4_MiB;

  SharingProgram(CudaApi& device, std::filesystem::path const& file, std::uint32_t seed)
      : memory_{device,
                {.capacity_bytes = capacity_bytes, .initial_bytes = 0, .grows_in_place = true}},
        share_{memory_,
               {.file = file,
                .least_bytes = 2 * block_bytes,
                .period = std::chrono::milliseconds{1},
                .idle_after = std::chrono::milliseconds{50}}},
        wrong_{device},
        seed_{seed} {}

  void write() {
    auto const stream = memory_.create_stream();
    for (std::uint32_t i = 0; i < capacity_bytes / block_bytes; ++i) {
      blocks_.emplace_back(memory_, block_bytes);
      auto const lease = share_.retry([&] { return blocks_.back().acquire_write(stream); });
      gpu_test::launch_write(lease.data(), block_bytes, seed_ + i, stream);
    }
  }
  [[nodiscard]] unsigned long long wrong_bytes() {
    auto const stream = memory_.create_stream();
    for (std::uint32_t i = 0; i < blocks_.size(); ++i) {
      auto const lease = share_.retry([&] { return blocks_[i].acquire_read(stream); });
      gpu_test::launch_check(lease.data(), block_bytes, seed_ + i, wrong_.counter(), stream);
    }
    stream.synchronize();
    return wrong_.value();
  }
  [[nodiscard]] std::size_t capacity() const { return share_.capacity_bytes(); }

 private:
  DeviceAllocator<CudaPolicies> memory_;
  DeviceShare<DeviceAllocator<CudaPolicies>> share_;
  std::vector<SwappableBuffer<DeviceAllocator<CudaPolicies>>> blocks_;
  gpu_test::WrongBytes wrong_;
  std::uint32_t seed_;
};

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE("DeviceShare: two working programs divide the memory and lose no byte") {
    TemporaryFolder folder;
    CudaApi device;
    SharingProgram first{device, folder.path() / "table", 1000};
    first.write();
    CHECK(first.wrong_bytes() == 0);
    unsigned long long wrong_of_second = 0;
    std::thread other{[&] {
      SharingProgram second{device, folder.path() / "table", 2000};
      second.write();
      while (second.capacity() < SharingProgram::capacity_bytes / 2) {
        wrong_of_second += second.wrong_bytes();
      }
      wrong_of_second += second.wrong_bytes();
    }};
    while (first.capacity() > SharingProgram::capacity_bytes / 2) {
      CHECK(first.wrong_bytes() == 0);
    }
    other.join();
    CHECK(wrong_of_second == 0);
    while (first.capacity() < SharingProgram::capacity_bytes) {
      CHECK(first.wrong_bytes() == 0);
    }
    CHECK(first.wrong_bytes() == 0);
  }
}
