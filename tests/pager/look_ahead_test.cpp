// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/pager/look_ahead.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include <support/pager_bench.hpp>

namespace {

using namespace spillway::literals;
using spillway::Access;
using support::PagerBench;
using support::Plain;
using support::Scheduled;
using support::StubbornDevice;

}  // namespace

TEST_SUITE("pager") {
  TEST_CASE("DeviceAllocator: a repeated step is brought in ahead of need, and to the same bytes") {
    PagerBench<Scheduled> bench{256_KiB};
    std::vector<PagerBench<Scheduled>::Buffer> weights;
    for (std::uint64_t i = 0; i < 8; ++i) {
      weights.emplace_back(bench.allocator, 64_KiB);
      bench.write(weights.back(), i);
    }
    for (int step = 0; step < 5; ++step) {
      bench.allocator.begin_step();
      for (std::uint64_t i = 0; i < 8; ++i) {
        bench.check(weights[i], i);
      }
      bench.run();
    }
    auto const stats = bench.allocator.stats();
    CHECK(stats.prefetch_hits + stats.prefetch_late > 0);
    // Least recently used would bring in all eight in each of the five steps.
    CHECK(stats.swap_ins.count < 40);
    CHECK(bench.kernels.checks() == 40);
  }

  TEST_CASE("DeviceAllocator: above the high watermark blocks leave until the low one is reached") {
    PagerBench<Plain>::Allocator::Options options = PagerBench<Plain>::options(256_KiB, 64_MiB);
    options.paging.high_watermark = 0.75;
    options.paging.low_watermark = 0.5;
    StubbornDevice device{{.capacity_bytes = 64_MiB}};
    PagerBench<Plain>::Allocator allocator{device, options};
    auto const stream = device.create_stream();
    std::vector<PagerBench<Plain>::Buffer> buffers;
    for (std::size_t i = 0; i < 4; ++i) {
      buffers.emplace_back(allocator, 64_KiB);
      (void)buffers.back().acquire(Access::write, stream);
    }
    (void)buffers[3].acquire(Access::read, stream);
    CHECK(allocator.stats().evicted(spillway::EvictionReason::watermark).count == 2);
    CHECK(allocator.stats().resident.bytes.current == 128_KiB);
    CHECK(allocator.stats().evicted(spillway::EvictionReason::pressure).count == 0);
    buffers.clear();
    allocator.retire_stream(stream);
  }
}
