// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/pager/blocks.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <support/pager_bench.hpp>

namespace {

using namespace spillway::literals;
using spillway::Access;
using spillway::Residency;
using support::PagerBench;
using support::Plain;
using support::Remapping;
using support::Scheduled;
using support::Stable;

}  // namespace

TEST_SUITE("pager") {
  TEST_CASE(
      "DeviceAllocator: a block that was never written leaves and comes back without a copy") {
    PagerBench<Plain> bench{64_KiB};
    PagerBench<Plain>::Buffer a{bench.allocator, 64_KiB};
    PagerBench<Plain>::Buffer const b{bench.allocator, 64_KiB};
    CHECK(a.residency() == Residency::none);
    CHECK(bench.allocator.stats().swap_outs.count == 0);
    CHECK(bench.allocator.stats().drops.count == 1);
    (void)a.acquire(Access::read_write, bench.stream());
    CHECK(bench.allocator.stats().swap_ins.count == 0);
  }

  TEST_CASE("DeviceAllocator: residency shows copies in flight") {
    PagerBench<Plain> bench{64_KiB};
    PagerBench<Plain>::Buffer a{bench.allocator, 64_KiB};
    bench.write(a, 1);
    a.swap_out();
    CHECK(a.residency() == Residency::moving_out);
    bench.device.run_all();
    CHECK(a.residency() == Residency::host);
    a.swap_in();
    CHECK(a.residency() == Residency::moving_in);
    bench.device.run_all();
    CHECK(a.residency() == Residency::device);
  }

  TEST_CASE("DeviceAllocator: mapping pages makes room where blocks would have to move otherwise") {
    PagerBench<Remapping> bench{64_KiB};
    std::vector<PagerBench<Remapping>::Buffer> buffers;
    for (std::uint64_t i = 0; i < 4; ++i) {
      buffers.emplace_back(bench.allocator, 16_KiB);
      bench.write(buffers.back(), i);
    }
    buffers.erase(buffers.begin() + 2);
    buffers.erase(buffers.begin());
    PagerBench<Remapping>::Buffer big{bench.allocator, 32_KiB};
    bench.write(big, 9);
    bench.check(buffers[0], 1);
    bench.check(buffers[1], 3);
    bench.check(big, 9);
    bench.run();
    CHECK(bench.allocator.stats().moves.count == 0);
    CHECK(bench.allocator.stats().swap_outs.count == 0);
  }

  TEST_CASE("DeviceAllocator: a stable block comes back to its address") {
    PagerBench<Stable> bench{64_KiB};
    PagerBench<Stable>::Buffer a{bench.allocator, 48_KiB};
    void* const address = bench.allocator.stable_address(a.id());
    for (std::uint64_t i = 0; i < 5; ++i) {
      bench.write(a, i);
      PagerBench<Stable>::Buffer b{bench.allocator, 48_KiB};
      bench.write(b, 100 + i);
      CHECK(a.residency() != Residency::device);
      CHECK(bench.allocator.stable_address(a.id()) == address);
      CHECK(bench.allocator.stable_address(b.id()) != address);
      bench.check(a, i);
      CHECK(a.acquire(Access::read, bench.stream()).data() == address);
      bench.check(b, 100 + i);
    }
    bench.run();
    CHECK(bench.kernels.checks() == 10);
  }

  TEST_CASE("DeviceAllocator: a block leased for good takes no part in the plan of a step") {
    auto const run = [](std::size_t capacity_bytes, std::size_t kept_bytes) {
      PagerBench<Scheduled> bench{capacity_bytes};
      std::optional<PagerBench<Scheduled>::Buffer> kept;
      PagerBench<Scheduled>::Allocator::lease_type lease;
      std::vector<PagerBench<Scheduled>::Buffer> buffers;
      for (std::uint64_t i = 0; i < 12; ++i) {
        buffers.emplace_back(bench.allocator, 64_KiB);
      }
      for (int step = 0; step < 8; ++step) {
        bench.allocator.begin_step();
        if (step == 3 && kept_bytes != 0) {
          kept.emplace(bench.allocator, kept_bytes);
          lease = kept->acquire(Access::write, bench.stream());
        }
        for (std::uint64_t i = 0; i < 12; ++i) {
          bench.write(buffers[i], i);
        }
        for (std::uint64_t i = 12; i-- > 0;) {
          bench.check(buffers[i], i);
        }
        bench.run();
      }
      return bench.allocator.stats().evicted(spillway::EvictionReason::speculative).count;
    };
    auto const without = run(512_KiB, 0);
    CHECK(without > 0);
    CHECK(run(1_MiB, 512_KiB) > without / 2);
  }
}
