// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/pager/leases.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include <support/pager_bench.hpp>

namespace {

using namespace spillway::literals;
using spillway::Access;
using spillway::Residency;
using support::PagerBench;
using support::Plain;

}  // namespace

TEST_SUITE("pager") {
  TEST_CASE("DeviceAllocator: operands acquired together are not evicted for each other") {
    PagerBench<Plain> bench{128_KiB};
    std::vector<PagerBench<Plain>::Buffer> buffers;
    for (std::uint64_t i = 0; i < 3; ++i) {
      buffers.emplace_back(bench.allocator, 64_KiB);
      bench.write(buffers.back(), i);
    }
    // The first was swapped out; the second is the next victim, but it is an operand too.
    auto const leases = bench.allocator.acquire_all(
        {buffers[0].request(Access::read), buffers[1].request(Access::read)}, bench.stream());
    CHECK(leases.size() == 2);
    CHECK(buffers[2].residency() != Residency::device);
    CHECK(bench.allocator.stats().swap_ins.count == 1);
    CHECK(bench.allocator.stats().leased.blocks.current == 2);
  }

  TEST_CASE("DeviceAllocator: a group that cannot be had leaves nothing leased and nothing lost") {
    PagerBench<Plain> bench{128_KiB};
    std::vector<PagerBench<Plain>::Buffer> buffers;
    for (std::uint64_t i = 0; i < 3; ++i) {
      buffers.emplace_back(bench.allocator, 64_KiB);
      bench.write(buffers.back(), i);
    }
    // The first would be overwritten, so no bytes come in for it; its only copy must survive.
    std::array const requests{buffers[0].request(Access::write),
                              buffers[1].request(Access::read),
                              buffers[2].request(Access::read)};
    CHECK_THROWS_WITH_AS((void)bench.allocator.acquire_all(requests, bench.stream()),
                         doctest::Contains("requested 196608 bytes"),
                         spillway::OutOfDeviceMemory);
    CHECK(bench.allocator.stats().leased.blocks.current == 0);
    for (std::uint64_t i = 0; i < 3; ++i) {
      bench.check(buffers[i], i);
    }
    bench.run();
    CHECK(bench.kernels.checks() == 3);
  }

  TEST_CASE("DeviceAllocator: a resident block used on one stream costs no device call") {
    PagerBench<Plain> bench{64_KiB};
    PagerBench<Plain>::Buffer a{bench.allocator, 4_KiB};
    (void)a.acquire(Access::write, bench.stream());
    auto const before = bench.device.calls();
    for (int i = 0; i < 100; ++i) {
      (void)a.acquire(Access::read_write, bench.stream());
      (void)a.acquire(Access::read, bench.stream());
    }
    CHECK(bench.device.calls() == before);
  }

  TEST_CASE("DeviceAllocator: an abandoned block lives until its last lease ends") {
    PagerBench<Plain> bench{64_KiB};
    PagerBench<Plain>::Allocator::lease_type lease;
    {
      PagerBench<Plain>::Buffer buffer{bench.allocator, 64_KiB};
      bench.write(buffer, 1);
      lease = buffer.acquire(Access::read, bench.stream());
    }
    CHECK(bench.allocator.stats().allocated.blocks.current == 1);
    bench.kernels.check(bench.device, bench.stream(), lease.data(), lease.size_bytes(), 1);
    CHECK_THROWS_AS(bench.allocator.close(), spillway::ContractViolation);
    lease.release();
    CHECK(bench.allocator.stats().allocated.blocks.current == 0);
    bench.run();
    CHECK(bench.kernels.checks() == 1);
  }
}
