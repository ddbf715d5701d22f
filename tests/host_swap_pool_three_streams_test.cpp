// SPDX-License-Identifier: Apache-2.0
#include <spillway/host/host_tier.hpp>
#include <spillway/host_swap_pool.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include <support/pool_bench.hpp>

TEST_SUITE("host_swap_pool_three_streams") {
  using namespace spillway;
  using spillway::testing::SteppedSimApi;

  namespace {

  using Bench = PoolBench<SteppedSimApi>;
  using Pool = Bench::pool_type;

  constexpr std::array every_tier{HostTier::pinned, HostTier::pageable, HostTier::file};
  constexpr std::size_t half = 24 << 10;  // more chunks than the staging ring has
  constexpr std::size_t whole = 2 * half;

  /// One slab of two halves, and the three streams of the case: A stalls, B merges, C steals.
  struct Case {
    explicit Case(HostTier tier)
        : pool{bench.device, bench.order, options(bench, tier), bench.io},
          a{bench.device.create_stream()},
          b{bench.device.create_stream()},
          c{bench.device.create_stream()} {
      for (std::byte** const block : {&block_a, &block_b, &block_c, &back}) {
        *block = bench.reserve(whole);
      }
      put_pattern(block_a, whole, 1);
      put_pattern(block_b, whole, 2);
      put_pattern(block_c, whole, 3);
      REQUIRE(pool.try_grow(whole));
      slot_a = pool.try_take(half).value();
      slot_b = pool.try_take(half).value();
      REQUIRE_FALSE(pool.try_take(1).has_value());
    }

    static HostPoolOptions options(Bench const& bench, HostTier tier) {
      auto options = bench.options(tier, whole);
      options.slab_bytes = whole;
      return options;
    }

    /// C takes all of it and writes; then everything runs, A last. C's bytes have to be there.
    void steal_and_check(std::uint64_t seed) {
      auto const stolen = pool.try_take(whole).value();
      Transfer const written = pool.write(stolen, block_c, whole, c);
      bench.device.run_random(seed);
      CHECK_FALSE(bench.order.is_complete(written.host_done));

      bench.device.resume(a);
      bench.device.run_random(seed);
      CHECK(bench.order.is_complete(written.host_done));
      (void)pool.read(stolen, back, whole, c);
      bench.device.run_all();
      CHECK(has_pattern(back, whole, 3));
    }

    Bench bench;
    Pool pool;
    Bench::stream_type a, b, c;
    std::byte* block_a = nullptr;
    std::byte* block_b = nullptr;
    std::byte* block_c = nullptr;
    std::byte* back = nullptr;
    HostSlotId slot_a{};
    HostSlotId slot_b{};
  };

  void for_each_tier_and_order(auto const& test) {
    for (HostTier const tier : every_tier) {
      for (std::uint64_t seed = 1; seed <= 10; ++seed) {
        CAPTURE(static_cast<int>(tier));
        CAPTURE(seed);
        test(tier, seed);
      }
    }
  }

  }  // namespace

  TEST_CASE("HostSwapPool: A stalls in a swap-out, B's slot merges with A's, C steals both") {
    for_each_tier_and_order([](HostTier tier, std::uint64_t seed) {
      Case now{tier};
      now.bench.device.stall(now.a);
      (void)now.pool.write(now.slot_a, now.block_a, half, now.a);
      (void)now.pool.write(now.slot_b, now.block_b, half, now.b);
      now.pool.give_back(now.slot_a);
      now.pool.give_back(now.slot_b);

      now.steal_and_check(seed);
    });
  }

  TEST_CASE("HostSwapPool: B takes the merged slot and writes it before C steals it") {
    for_each_tier_and_order([](HostTier tier, std::uint64_t seed) {
      Case now{tier};
      now.bench.device.stall(now.a);
      (void)now.pool.write(now.slot_a, now.block_a, half, now.a);
      now.pool.give_back(now.slot_a);
      now.pool.give_back(now.slot_b);
      auto const merged = now.pool.try_take(whole).value();
      (void)now.pool.write(merged, now.block_b, whole, now.b);
      now.pool.give_back(merged);

      now.steal_and_check(seed);
    });
  }

  TEST_CASE("HostSwapPool: B takes the merged slot and never touches it before C steals it") {
    for_each_tier_and_order([](HostTier tier, std::uint64_t seed) {
      Case now{tier};
      now.bench.device.stall(now.a);
      (void)now.pool.write(now.slot_a, now.block_a, half, now.a);
      now.pool.give_back(now.slot_a);
      now.pool.give_back(now.slot_b);
      now.pool.give_back(now.pool.try_take(whole).value());

      now.steal_and_check(seed);
    });
  }

  TEST_CASE("HostSwapPool: A stalls in a swap-in, B merges, C steals, and A still gets its bytes") {
    for_each_tier_and_order([](HostTier tier, std::uint64_t seed) {
      Case now{tier};
      (void)now.pool.write(now.slot_a, now.block_a, half, now.a);
      now.bench.device.run_all();
      now.bench.device.stall(now.a);
      std::byte* const to = now.bench.reserve(half);
      (void)now.pool.read(now.slot_a, to, half, now.a);
      now.pool.give_back(now.slot_a);
      now.pool.give_back(now.slot_b);
      auto const merged = now.pool.try_take(whole).value();
      (void)now.pool.write(merged, now.block_b, whole, now.b);
      now.pool.give_back(merged);

      now.steal_and_check(seed);

      CHECK(has_pattern(to, half, 1));
    });
  }

  TEST_CASE("HostSwapPool: give_back takes a fence of uses that the pool does not know") {
    Case now{HostTier::pinned};
    now.bench.device.stall(now.a);
    auto const index = now.bench.order.index_of(now.a);
    now.bench.device.compute(now.a, 1);
    now.pool.give_back(now.slot_a, Fence{now.bench.order.mark(index)});
    now.pool.give_back(now.slot_b);

    now.steal_and_check(1);
  }

  TEST_CASE("HostSwapPool: memory of a copy that failed halfway is not reused before the copy has "
            "finished") {
    for_each_tier_and_order([](HostTier tier, std::uint64_t seed) {
      Case now{tier};
      // A scattered slot, so that the pinned tier too has a first and a second copy.
      now.pool.give_back(now.slot_a);
      now.pool.give_back(now.slot_b);
      std::array<HostSlotId, 4> quarters{};
      for (HostSlotId& quarter : quarters) {
        quarter = now.pool.try_take(whole / 4).value();
      }
      now.pool.give_back(quarters[0]);
      now.pool.give_back(quarters[2]);
      auto const scattered = now.pool.try_take(half).value();
      now.bench.device.stall(now.a);
      now.bench.device.fail_copy(2);

      CHECK_THROWS_AS((void)now.pool.write(scattered, now.block_a, half, now.a), DeviceError);

      CHECK_THROWS_AS((void)now.pool.read(scattered, now.back, 1, now.b), ContractViolation);
      now.pool.give_back(scattered);
      now.pool.give_back(quarters[1]);
      now.pool.give_back(quarters[3]);
      now.steal_and_check(seed);
    });
  }
}
