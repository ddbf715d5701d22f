// SPDX-License-Identifier: Apache-2.0
#include <spillway/interop/framework/memory_limit.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include <support/buffer_leases_bench.hpp>

using namespace spillway;
using namespace spillway::framework;
using spillway::test::LeasesBench;
using Bytes = std::vector<unsigned char>;

TEST_SUITE("memory_limit") {
  TEST_CASE(
      "LimitReservation: lowers the limit, makes others leave for it, and can be raised again") {
    LeasesBench bench{8_MiB};
    LimitReservation<LeasesBench::Allocator> reservation{bench.memory};
    auto const start_reclaim = [&bench] {
      return !bench.leases.is_under_pressure() && (bench.leases.start_reclaim(), true);
    };
    auto* const a = bench.make(5_MiB, 1);
    reservation.set_limit(4_MiB, HostStream::caller, start_reclaim);
    CHECK(reservation.limit_bytes() == 4_MiB);
    CHECK(reservation.bytes() == 4_MiB);
    CHECK_FALSE(bench.leases.view(a).is_resident);
    CHECK_THROWS_AS(bench.read({a}), OutOfDeviceMemory);
    CHECK_THROWS_AS(reservation.set_limit(9_MiB, HostStream::caller, start_reclaim),
                    ContractViolation);
    reservation.set_limit(8_MiB, HostStream::caller, start_reclaim);
    CHECK(bench.read({a}) == Bytes{1});
  }

  TEST_CASE("LimitReservation: what is in use stands in the way") {
    LeasesBench bench{8_MiB};
    LimitReservation<LeasesBench::Allocator> reservation{bench.memory};
    void* const fixed = bench.leases.try_allocate(5_MiB, nullptr);
    CHECK(fixed != nullptr);
    CHECK_THROWS_AS(reservation.set_limit(1_MiB, HostStream::caller, [] { return false; }),
                    OutOfDeviceMemory);
    CHECK(reservation.limit_bytes() == 5_MiB);
  }

  TEST_CASE(
      "LimitedLookahead: what is on its way in is bounded by a share of the limit as it is now") {
    auto const limit = std::make_shared<std::atomic<std::size_t>>(600);
    LimitedLookahead policy{PrefetchOptions{.lookahead_ops = 4, .max_inflight_bytes = 90}, limit};
    CHECK(policy.max_inflight_bytes() == 90);
    *limit = 300;
    CHECK(policy.max_inflight_bytes() == 50);
    CHECK(LimitedLookahead{}.max_inflight_bytes() == PrefetchOptions{}.max_inflight_bytes);
  }
}
