// SPDX-License-Identifier: Apache-2.0
#include <spillway/device_allocator.hpp>
#include <spillway/page_arena.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/sim.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <support/stepped_bench.hpp>

namespace {

using namespace spillway::literals;
using spillway::Access;
using spillway::Residency;

/// A stepped device that can refuse all copies from some point on.
class StubbornDevice : public spillway::testing::SteppedSimApi {
 public:
  using spillway::testing::SteppedSimApi::SteppedSimApi;

  void
  copy(void* to, void const* from, std::size_t bytes, spillway::CopyKind kind, stream_type stream) {
    if (copies_left == 0) {
      throw spillway::DeviceError{"no more copies"};
    }
    --copies_left;
    spillway::testing::SteppedSimApi::copy(to, from, bytes, kind, stream);
  }

  std::size_t copies_left = SIZE_MAX;
};

struct Plain : spillway::SimPolicies {
  using device = StubbornDevice;
  using eviction = spillway::LruEviction;
  using prefetch = spillway::NoPrefetch;
};
struct Remapping : Plain {
  using arena = spillway::MappedPages;
};
struct Stable : Plain {
  using arena = spillway::StableAddresses;
};
// In a short loop, room to prefetch costs a large part of what is away.
struct RoomyEviction : spillway::ScheduleEviction {
  RoomyEviction() : ScheduleEviction{spillway::detail::PlanOptions{.most_extra_for_next = 0.5}} {}
};
struct Scheduled : Plain {
  using eviction = RoomyEviction;
  using prefetch = spillway::ScheduleLookahead;
};

template <class Policies>
struct Bench : support::SteppedBench<Policies> {
  using Allocator = typename support::SteppedBench<Policies>::Allocator;

  explicit Bench(std::size_t capacity_bytes, std::size_t pinned_bytes = 64_MiB)
      : support::SteppedBench<Policies>{{.capacity_bytes = 64_MiB, .granularity_bytes = 4_KiB},
                                        options(capacity_bytes, pinned_bytes)} {}

  static typename Allocator::Options options(std::size_t capacity_bytes, std::size_t pinned_bytes) {
    typename Allocator::Options options{.capacity_bytes = capacity_bytes};
    options.bounce_bytes = 16_KiB;
    options.host.pinned_bytes = pinned_bytes;
    options.host.initial_pinned_bytes = pinned_bytes;
    return options;
  }
};

}  // namespace

TEST_SUITE("pager") {
  TEST_CASE("DeviceAllocator: a block that was never written leaves without a copy and comes back "
            "without one") {
    Bench<Plain> bench{64_KiB};
    Bench<Plain>::Buffer a{bench.allocator, 64_KiB};
    Bench<Plain>::Buffer const b{bench.allocator, 64_KiB};
    CHECK(a.residency() == Residency::none);
    CHECK(bench.allocator.stats().swap_outs.count == 0);
    CHECK(bench.allocator.stats().drops.count == 1);
    (void)a.acquire(Access::read_write, bench.stream());
    CHECK(bench.allocator.stats().swap_ins.count == 0);
  }

  TEST_CASE("DeviceAllocator: residency tells of copies that are in flight") {
    Bench<Plain> bench{64_KiB};
    Bench<Plain>::Buffer a{bench.allocator, 64_KiB};
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

  TEST_CASE("DeviceAllocator: operands acquired together are not evicted for each other") {
    Bench<Plain> bench{128_KiB};
    std::vector<Bench<Plain>::Buffer> buffers;
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
    Bench<Plain> bench{128_KiB};
    std::vector<Bench<Plain>::Buffer> buffers;
    for (std::uint64_t i = 0; i < 3; ++i) {
      buffers.emplace_back(bench.allocator, 64_KiB);
      bench.write(buffers.back(), i);
    }
    // The first would be overwritten, so no bytes come in for it; its only copy must survive.
    std::array const requests{buffers[0].request(Access::write),
                              buffers[1].request(Access::read),
                              buffers[2].request(Access::read)};
    CHECK_THROWS_AS((void)bench.allocator.acquire_all(requests, bench.stream()),
                    spillway::OutOfDeviceMemory);
    CHECK(bench.allocator.stats().leased.blocks.current == 0);
    for (std::uint64_t i = 0; i < 3; ++i) {
      bench.check(buffers[i], i);
    }
    bench.run();
    CHECK(bench.kernels.checks() == 3);
  }

  TEST_CASE("DeviceAllocator: a resident block used on one stream costs no device call") {
    Bench<Plain> bench{64_KiB};
    Bench<Plain>::Buffer a{bench.allocator, 4_KiB};
    (void)a.acquire(Access::write, bench.stream());
    auto const before = bench.device.calls();
    for (int i = 0; i < 100; ++i) {
      (void)a.acquire(Access::read_write, bench.stream());
      (void)a.acquire(Access::read, bench.stream());
    }
    CHECK(bench.device.calls() == before);
  }

  TEST_CASE(
      "DeviceAllocator: with the host pool full, blocks that need no room there still leave") {
    Bench<Plain> bench{128_KiB, 64_KiB};
    Bench<Plain>::Buffer outside{bench.allocator, 64_KiB};
    bench.write(outside, 1);
    outside.swap_out();  // fills the pool
    Bench<Plain>::Buffer dirty{bench.allocator, 64_KiB};
    bench.write(dirty, 2);
    Bench<Plain>::Buffer empty{bench.allocator, 64_KiB};

    // The dirty block is the least recently used, and has nowhere to go.
    Bench<Plain>::Buffer more{bench.allocator, 64_KiB};
    CHECK(dirty.residency() == Residency::device);
    CHECK(empty.residency() == Residency::none);
    CHECK_THROWS_AS(dirty.swap_out(), spillway::OutOfHostMemory);
    CHECK(dirty.residency() == Residency::device);

    bench.write(more, 3);
    CHECK_THROWS_AS((void)outside.acquire(Access::read, bench.stream()),
                    spillway::OutOfDeviceMemory);
    more.reset();
    bench.check(outside, 1);
    bench.check(dirty, 2);
    bench.run();
    CHECK(bench.kernels.checks() == 2);
  }

  TEST_CASE(
      "DeviceAllocator: a host copy that a resident block could do without makes way for others") {
    Bench<Plain> bench{128_KiB, 64_KiB};
    Bench<Plain>::Buffer a{bench.allocator, 64_KiB};
    bench.write(a, 1);
    a.swap_out();
    bench.check(a, 1);  // resident, and its host copy fills the pool
    Bench<Plain>::Buffer b{bench.allocator, 64_KiB};
    bench.write(b, 2);
    b.swap_out();
    CHECK(bench.allocator.stats().swap_outs.count == 2);
    bench.check(a, 1);
    a.reset();
    bench.check(b, 2);
    bench.run();
    CHECK(bench.kernels.checks() == 3);
  }

  TEST_CASE("DeviceAllocator: a compaction whose copies fail leaves every block whole") {
    // A slide by 4 KiB of a block of 48 KiB takes twelve pieces; each of them fails once.
    for (std::size_t nth = 1; nth <= 13; ++nth) {
      Bench<Plain> bench{64_KiB};
      Bench<Plain>::Buffer first{bench.allocator, 4_KiB};
      Bench<Plain>::Buffer second{bench.allocator, 48_KiB};
      Bench<Plain>::Buffer third{bench.allocator, 8_KiB};
      bench.write(first, 1);
      bench.write(second, 2);
      bench.write(third, 3);
      first.reset();  // 4 KiB free in front, 4 KiB behind
      bench.device.fail_copy(nth);
      std::size_t failures = 0;
      try {
        bench.allocator.compact();
      } catch (spillway::DeviceError const&) {
        ++failures;
      }
      bench.device.fail_copy(0);
      CAPTURE(nth);
      CHECK((failures == 1 || nth > 2));
      bench.check(second, 2);
      bench.check(third, 3);
      bench.run();
      CHECK(bench.kernels.checks() == 2);
    }
  }

  TEST_CASE("DeviceAllocator: bytes that a dying device tore are never handed out") {
    Bench<Plain> bench{64_KiB};
    Bench<Plain>::Buffer first{bench.allocator, 4_KiB};
    Bench<Plain>::Buffer second{bench.allocator, 60_KiB};
    bench.write(first, 1);
    bench.write(second, 2);
    first.reset();
    bench.device.copies_left = 3;  // of a slide in pieces; the way back is refused too
    bool is_torn = false;
    try {
      bench.allocator.compact();
    } catch (spillway::BlockLost const&) {
      is_torn = true;
    } catch (spillway::DeviceError const&) {
    }
    bench.device.copies_left = SIZE_MAX;
    if (is_torn) {
      CHECK_THROWS_AS((void)second.acquire(Access::read, bench.stream()), spillway::BlockLost);
      bench.write(second, 3);
      bench.check(second, 3);
    } else {
      bench.check(second, 2);
    }
    bench.run();
  }

  TEST_CASE("DeviceAllocator: mapped pages make room where moving would be needed") {
    Bench<Remapping> bench{64_KiB};
    std::vector<Bench<Remapping>::Buffer> buffers;
    for (std::uint64_t i = 0; i < 4; ++i) {
      buffers.emplace_back(bench.allocator, 16_KiB);
      bench.write(buffers.back(), i);
    }
    buffers.erase(buffers.begin() + 2);
    buffers.erase(buffers.begin());
    Bench<Remapping>::Buffer big{bench.allocator, 32_KiB};
    bench.write(big, 9);
    bench.check(buffers[0], 1);
    bench.check(buffers[1], 3);
    bench.check(big, 9);
    bench.run();
    CHECK(bench.allocator.stats().moves.count == 0);
    CHECK(bench.allocator.stats().swap_outs.count == 0);
  }

  TEST_CASE("DeviceAllocator: a stable block comes back to the address it had") {
    Bench<Stable> bench{64_KiB};
    Bench<Stable>::Buffer a{bench.allocator, 48_KiB};
    void* const address = bench.allocator.stable_address(a.id());
    for (std::uint64_t i = 0; i < 5; ++i) {
      bench.write(a, i);
      Bench<Stable>::Buffer b{bench.allocator, 48_KiB};
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

  TEST_CASE("DeviceAllocator: a repeated step is brought in ahead of need, and to the same bytes") {
    Bench<Scheduled> bench{256_KiB};
    std::vector<Bench<Scheduled>::Buffer> weights;
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

  TEST_CASE("DeviceAllocator: what is leased for good takes no part in the plan of a step") {
    auto const run = [](std::size_t capacity_bytes, std::size_t kept_bytes) {
      Bench<Scheduled> bench{capacity_bytes};
      std::optional<Bench<Scheduled>::Buffer> kept;
      Bench<Scheduled>::Allocator::lease_type lease;
      std::vector<Bench<Scheduled>::Buffer> buffers;
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

  TEST_CASE("DeviceAllocator: above the high watermark blocks leave until the low one is reached") {
    Bench<Plain>::Allocator::Options options = Bench<Plain>::options(256_KiB, 64_MiB);
    options.paging.high_watermark = 0.75;
    options.paging.low_watermark = 0.5;
    StubbornDevice device{{.capacity_bytes = 64_MiB}};
    Bench<Plain>::Allocator allocator{device, options};
    auto const stream = device.create_stream();
    std::vector<Bench<Plain>::Buffer> buffers;
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

  TEST_CASE("DeviceAllocator: an abandoned block lives until its last lease ends") {
    Bench<Plain> bench{64_KiB};
    Bench<Plain>::Allocator::lease_type lease;
    {
      Bench<Plain>::Buffer buffer{bench.allocator, 64_KiB};
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

  TEST_CASE("DeviceAllocator: sources of ranges, evictions and copies are counted exactly") {
    Bench<Plain> bench{128_KiB};
    Bench<Plain>::Buffer a{bench.allocator, 60_KiB};
    Bench<Plain>::Buffer b{bench.allocator, 60_KiB};
    bench.write(a, 1);
    bench.write(b, 2);
    Bench<Plain>::Buffer c{bench.allocator, 50_KiB};  // a is swapped out
    bench.write(c, 3);
    bench.check(a, 1);                                // b is swapped out, a swapped in
    Bench<Plain>::Buffer d{bench.allocator, 40_KiB};  // c is swapped out
    auto const stats = bench.allocator.stats();
    CHECK(stats.swap_outs == spillway::Tally{3, 170_KiB});
    CHECK(stats.swap_ins == spillway::Tally{1, 60_KiB});
    CHECK(stats.evicted(spillway::EvictionReason::pressure) == spillway::Tally{3, 170_KiB});
    CHECK(stats.drops.count == 0);
    CHECK(stats.ranges_from(spillway::RangeSource::free_range) == 2);
    CHECK(stats.ranges_from(spillway::RangeSource::after_swap_out) +
              stats.ranges_from(spillway::RangeSource::after_compaction) ==
          3);
    CHECK(stats.allocated.bytes.current == 210_KiB);
    CHECK(stats.resident.bytes.current == 100_KiB);
    CHECK(stats.resident.bytes.peak <= 128_KiB);
    bench.device.run_all();
    CHECK(bench.device.calls().bytes_to_host == 170_KiB);
    CHECK(bench.device.calls().bytes_to_device == 60_KiB);
  }
}
