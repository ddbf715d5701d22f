// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/device/host/host_api.hpp>
#include <spillway/device/sim/model_api.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host_swap_pool.hpp>
#include <spillway/stream/stream_order.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstddef>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <support/death.hpp>
#include <support/fork.hpp>
#include <support/pool_bench.hpp>

TEST_SUITE("host_swap_pool") {
  using namespace spillway;
  using spillway::testing::SteppedSimApi;

  namespace {

  using Bench = PoolBench<SimApi>;
  using SteppedBench = PoolBench<SteppedSimApi>;

  struct SlowSim : SimApi {
    using SimApi::SimApi;
    static constexpr bool pins_slowly = true;
  };
  using SlowBench = PoolBench<SlowSim>;
  static_assert(SlowPinningApi<SlowSim> && !SlowPinningApi<SimApi>);

  struct SharedSim : SimApi {
    using SimApi::SimApi;
    [[nodiscard]] bool shares_host_memory() const noexcept { return is_shared; }

    bool is_shared = true;
  };
  static_assert(SharedMemoryApi<SharedSim> && !SharedMemoryApi<SimApi>);

  constexpr std::array every_tier{HostTier::pinned, HostTier::pageable, HostTier::file};

  template <class B>
  void round_trip(HostTier tier, HostPoolOptions options, std::vector<std::size_t> const& sizes) {
    CAPTURE(static_cast<int>(tier));
    B bench;
    options.file = bench.folder.path();
    typename B::pool_type pool{bench.device, bench.order, options, bench.io};
    std::vector<HostSlotId> ids;
    for (unsigned i = 0; i < sizes.size(); ++i) {
      std::byte* const from = bench.reserve(sizes[i]);
      put_pattern(from, sizes[i], i);
      ids.push_back(B::take(pool, sizes[i]));
      CHECK(pool.tier(ids.back()) == tier);
      CHECK(pool.size_bytes(ids.back()) >= sizes[i]);
      bench.order.synchronize(pool.write(ids[i], from, sizes[i], bench.stream).device_done);
      std::memset(from, 0xEE, sizes[i]);  // the device range is free for others now
    }
    for (unsigned i = 0; i < sizes.size(); ++i) {
      std::byte* const to = bench.reserve(sizes[i]);
      bench.order.synchronize(pool.read(ids[i], to, sizes[i], bench.stream).device_done);
      CHECK(has_pattern(to, sizes[i], i));
      pool.check(ids[i]);
    }
    pool.check();
  }

  }  // namespace

  TEST_CASE_TEMPLATE("HostSwapPool: every tier returns the bytes written", B, Bench, SteppedBench) {
    // Less than a chunk, one exactly, many chunks round the ring several times, odd tails.
    std::vector<std::size_t> const sizes = {1, 255, 256, 4096, 4097, 50'000, 16'384, 100'001};
    for (HostTier const tier : every_tier) {
      round_trip<B>(tier, B{}.options(tier, 400'000), sizes);
    }
  }

  TEST_CASE("HostSwapPool: direct I/O returns the bytes written, at any size") {
    auto options = Bench{}.options(HostTier::file, 400'000);
    options.file_direct_io = true;
    round_trip<Bench>(HostTier::file, options, {1, 4095, 4096, 4097, 100'001});
  }

  TEST_CASE("HostSwapPool: a slot may be written again and keeps the last bytes") {
    for (HostTier const tier : every_tier) {
      Bench bench;
      Bench::pool_type pool{bench.device, bench.order, bench.options(tier, 64'000), bench.io};
      auto const id = Bench::take(pool, 30'000);
      std::byte* const first = bench.reserve(30'000);
      std::byte* const second = bench.reserve(30'000);
      std::byte* const back = bench.reserve(30'000);
      put_pattern(first, 30'000, 1);
      put_pattern(second, 30'000, 2);

      (void)pool.write(id, first, 30'000, bench.stream);
      (void)pool.write(id, second, 30'000, bench.stream);
      bench.order.synchronize(pool.read(id, back, 30'000, bench.stream).device_done);

      CHECK(has_pattern(back, 30'000, 2));
    }
  }

  TEST_CASE("HostSwapPool: a transfer on a caller's stream has run when the call returns") {
    HostApi device;
    StreamOrder<HostApi> order{device};
    HostSwapPool<HostApi> pool{device, order, {.pinned_bytes = 64'000}};
    HostSlotId const id = Bench::take(pool, 30'000);
    std::vector<std::byte> block(30'000);
    for (unsigned round = 0; round < 2; ++round) {
      put_pattern(block.data(), block.size(), round);
      (void)pool.write(id, block.data(), block.size(), HostStream::caller);
      std::fill(block.begin(), block.end(), std::byte{});
      (void)pool.read(id, block.data(), block.size(), HostStream::caller);
      CHECK(has_pattern(block.data(), block.size(), round));
    }
  }

  TEST_CASE("HostSwapPool: slots go to the first tier with room, then to the next") {
    Bench bench;
    Bench::pool_type pool{
        bench.device, bench.order, bench.options(16 << 10, 32 << 10, 16 << 10), bench.io};
    std::vector<HostTier> tiers;

    for (int i = 0; i < 8; ++i) {
      tiers.push_back(pool.tier(Bench::take(pool, 8 << 10)));
    }

    CHECK(tiers == std::vector<HostTier>{HostTier::pinned,
                                         HostTier::pinned,
                                         HostTier::pageable,
                                         HostTier::pageable,
                                         HostTier::pageable,
                                         HostTier::pageable,
                                         HostTier::file,
                                         HostTier::file});
    CHECK(pool.try_take(1) == std::nullopt);
    CHECK_FALSE(pool.try_grow(1));
    CHECK(pool.free_bytes() == 0);
  }

  TEST_CASE("HostSwapPool: memory that was given back is used before slower tiers") {
    Bench bench;
    Bench::pool_type pool{
        bench.device, bench.order, bench.options(16 << 10, 16 << 10, 0), bench.io};
    auto const fast = Bench::take(pool, 16 << 10);
    auto const slow = Bench::take(pool, 8 << 10);
    REQUIRE(pool.tier(slow) == HostTier::pageable);

    pool.give_back(fast);

    CHECK(pool.tier(pool.try_take(8 << 10).value()) == HostTier::pinned);
  }

  TEST_CASE("HostSwapPool: a slot larger than any free range is scattered and comes back whole") {
    for (HostTier const tier : every_tier) {
      Bench bench;
      Bench::pool_type pool{bench.device, bench.order, bench.options(tier, 48 << 10), bench.io};
      std::vector<HostSlotId> ids;
      for (int i = 0; i < 6; ++i) {
        ids.push_back(Bench::take(pool, 8 << 10));
      }
      pool.give_back(ids[0]);
      pool.give_back(ids[2]);
      pool.give_back(ids[5]);
      REQUIRE(pool.stats().tier(tier).largest_free_bytes == 8 << 10);
      std::byte* const from = bench.reserve(20'000);
      std::byte* const to = bench.reserve(20'000);
      put_pattern(from, 20'000, 5);

      auto const id = pool.try_take(20'000).value();
      (void)pool.write(id, from, 20'000, bench.stream);
      bench.order.synchronize(pool.read(id, to, 20'000, bench.stream).device_done);

      CHECK(has_pattern(to, 20'000, 5));
    }
  }

  TEST_CASE("HostSwapPool: taking and giving back slots makes no device call") {
    Bench bench;
    auto options = bench.options(64 << 10, 0, 0);
    options.initial_pinned_bytes = 64 << 10;
    Bench::pool_type pool{bench.device, bench.order, options, bench.io};
    SimCalls const before = bench.device.calls();

    auto const id = pool.try_take(10'000).value();
    pool.give_back(id, bench.order.mark(bench.order.index_of(bench.stream)));
    (void)pool.free_bytes();
    (void)pool.stats();

    CHECK(bench.device.calls() == before);
  }

  TEST_CASE("HostSwapPool: transfers pin no memory and never wait on the host") {
    SteppedBench bench;  // nothing runs, so anything that waited would be seen as a deadlock
    SteppedBench::pool_type pool{
        bench.device, bench.order, bench.options(64 << 10, 64 << 10, 64 << 10), bench.io};
    std::byte* const block = bench.reserve(60'000);
    std::array const ids{SteppedBench::take(pool, 60'000),
                         SteppedBench::take(pool, 60'000),
                         SteppedBench::take(pool, 60'000)};
    SimCalls const before = bench.device.calls();

    for (HostSlotId const id : ids) {
      (void)pool.write(id, block, 60'000, bench.stream);
      (void)pool.read(id, block, 60'000, bench.stream);
    }

    SimCalls const after = bench.device.calls();
    CHECK(after.pinned_allocations == before.pinned_allocations);
    CHECK(after.host_synchronizations == before.host_synchronizations);
    CHECK(after.completion_queries == before.completion_queries);
    CHECK(after.host_launches == before.host_launches + 4 * 15);
  }

  TEST_CASE("HostSwapPool: the device side of a swap-out is done before the file is written") {
    SteppedBench bench;
    SteppedBench::pool_type pool{
        bench.device, bench.order, bench.options(HostTier::file, 64 << 10), bench.io};
    auto const id = SteppedBench::take(pool, 12 << 10);  // as many chunks as the ring has
    std::byte* const from = bench.reserve(12 << 10);

    Transfer const transfer = pool.write(id, from, 12 << 10, bench.stream);
    bench.device.run(bench.stream);

    CHECK(bench.order.is_complete(transfer.device_done));
    CHECK_FALSE(bench.order.is_complete(transfer.host_done));
    CHECK(bench.io.calls().writes == 0);
    bench.device.run_all();
    CHECK(bench.order.is_complete(transfer.host_done));
    CHECK(bench.io.calls().writes == 3);
  }

  TEST_CASE("HostSwapPool: a chunk is reused as soon as it is empty, not after the whole ring") {
    SteppedBench bench;
    SteppedBench::pool_type pool{
        bench.device, bench.order, bench.options(HostTier::file, 64 << 10), bench.io};
    auto const out = bench.device.created.at(1);
    auto const in = bench.device.created.at(2);
    auto const id = SteppedBench::take(pool, 32 << 10);
    std::byte* const block = bench.reserve(32 << 10);

    SUBCASE("during swap-out") {
      (void)pool.write(id, block, 32 << 10, bench.stream);
      for (std::size_t written = 1; written <= 5; ++written) {
        bench.device.run(bench.stream);  // blocked by the full ring
        std::size_t const queued = bench.device.queued_ops(bench.stream);
        while (bench.io.calls().writes < written) {
          REQUIRE(bench.device.step(out));
        }
        while (bench.device.queued_ops(out) % 3 != 0) {  // wait, host function, event
          REQUIRE(bench.device.step(out));
        }

        CHECK(bench.device.run(bench.stream) > 0);
        CHECK(bench.device.queued_ops(bench.stream) < queued);
      }
    }
    SUBCASE("during swap-in") {
      (void)pool.write(id, block, 32 << 10, bench.stream);
      bench.device.run_all();
      (void)pool.read(id, block, 32 << 10, bench.stream);
      bench.device.run(in);
      REQUIRE(bench.io.calls().reads == 3);
      for (std::size_t filled = 4; filled <= 8; ++filled) {
        while (bench.io.calls().reads < filled) {
          REQUIRE(bench.device.step(bench.stream));
          bench.device.run(in);
        }
        CHECK(bench.io.calls().reads == filled);
        CHECK(bench.device.queued_ops(bench.stream) > 0);
      }
    }
  }

  TEST_CASE("HostSwapPool: a swap-in does not wait for blocks that are being swapped out") {
    SteppedBench bench;
    SteppedBench::pool_type pool{
        bench.device, bench.order, bench.options(HostTier::file, 128 << 10), bench.io};
    std::byte* const from = bench.reserve(32 << 10);
    std::byte* const to = bench.reserve(32 << 10);
    put_pattern(from, 32 << 10, 9);
    auto const there = SteppedBench::take(pool, 32 << 10);
    auto const leaving = SteppedBench::take(pool, 32 << 10);
    (void)pool.write(there, from, 32 << 10, bench.stream);
    bench.device.run_all();
    auto const busy = bench.device.create_stream();
    bench.device.stall(busy);

    (void)pool.write(leaving, from, 32 << 10, busy);
    Transfer const transfer = pool.read(there, to, 32 << 10, bench.stream);
    bench.device.run_all();

    CHECK(bench.order.is_complete(transfer.device_done));
    CHECK(has_pattern(to, 32 << 10, 9));
    bench.device.resume(busy);
  }

  TEST_CASE("HostSwapPool: a read waits for the write of the same slot on another stream") {
    for (HostTier const tier : every_tier) {
      for (std::uint64_t seed = 0; seed < 20; ++seed) {
        CAPTURE(seed);
        SteppedBench bench;
        SteppedBench::pool_type pool{
            bench.device, bench.order, bench.options(tier, 64'000), bench.io};
        auto const other = bench.device.create_stream();
        std::byte* const from = bench.reserve(30'000);
        std::byte* const to = bench.reserve(30'000);
        put_pattern(from, 30'000, 3);
        auto const id = SteppedBench::take(pool, 30'000);

        (void)pool.write(id, from, 30'000, bench.stream);
        (void)pool.read(id, to, 30'000, other);
        bench.device.run_random(seed);

        CHECK(has_pattern(to, 30'000, 3));
      }
    }
  }

  TEST_CASE("HostSwapPool: a write waits for reads of the same slot on other streams") {
    for (HostTier const tier : every_tier) {
      for (std::uint64_t seed = 0; seed < 20; ++seed) {
        CAPTURE(seed);
        SteppedBench bench;
        SteppedBench::pool_type pool{
            bench.device, bench.order, bench.options(tier, 64'000), bench.io};
        std::array const readers{bench.device.create_stream(), bench.device.create_stream()};
        std::byte* const from = bench.reserve(30'000);
        std::byte* const later = bench.reserve(30'000);
        std::array const to{bench.reserve(30'000), bench.reserve(30'000)};
        put_pattern(from, 30'000, 3);
        put_pattern(later, 30'000, 4);
        auto const id = SteppedBench::take(pool, 30'000);

        (void)pool.write(id, from, 30'000, bench.stream);
        (void)pool.read(id, to[0], 30'000, readers[0]);
        (void)pool.read(id, to[1], 30'000, readers[1]);
        (void)pool.write(id, later, 30'000, bench.stream);
        bench.device.run_random(seed);

        CHECK(has_pattern(to[0], 30'000, 3));
        CHECK(has_pattern(to[1], 30'000, 3));
      }
    }
  }

  TEST_CASE("HostSwapPool: stale, foreign and null slot ids are detected") {
    Bench bench;
    Bench::pool_type pool{bench.device, bench.order, bench.options(64 << 10, 0, 0), bench.io};
    Bench::pool_type other{bench.device, bench.order, bench.options(64 << 10, 0, 0), bench.io};
    std::byte* const block = bench.reserve(256);
    auto const stale = Bench::take(pool, 256);
    pool.give_back(stale);
    auto const fresh = Bench::take(pool, 256);
    auto const foreign = Bench::take(other, 256);
    REQUIRE(fresh != stale);

    for (HostSlotId const id : {stale, foreign, HostSlotId{}}) {
      CHECK_THROWS_AS((void)pool.write(id, block, 256, bench.stream), ContractViolation);
      CHECK_THROWS_AS((void)pool.read(id, block, 256, bench.stream), ContractViolation);
      CHECK_THROWS_AS((void)pool.tier(id), ContractViolation);
      CHECK_THROWS_AS((void)pool.size_bytes(id), ContractViolation);
      CHECK_THROWS_AS(pool.check(id), ContractViolation);
    }
    CHECK(pool.tier(fresh) == HostTier::pinned);
  }

  TEST_CASE("HostSwapPool: giving a slot back twice ends the program") {
    Bench bench;
    Bench::pool_type pool{bench.device, bench.order, bench.options(64 << 10, 0, 0), bench.io};
    auto const id = Bench::take(pool, 256);
    pool.give_back(id);

    CHECK(spillway::test::death_of([&] { pool.give_back(id); }).signal == SIGABRT);
  }

  TEST_CASE("HostSwapPool: more bytes than the slot has, or than were written, are refused") {
    for (HostTier const tier : every_tier) {
      Bench bench;
      Bench::pool_type pool{bench.device, bench.order, bench.options(tier, 64 << 10), bench.io};
      std::byte* const block = bench.reserve(8192);
      auto const id = Bench::take(pool, 4096);

      CHECK_THROWS_AS((void)pool.read(id, block, 1, bench.stream), ContractViolation);
      CHECK_THROWS_AS((void)pool.write(id, block, 4097, bench.stream), ContractViolation);
      (void)pool.write(id, block, 1000, bench.stream);
      CHECK_THROWS_AS((void)pool.read(id, block, 1001, bench.stream), ContractViolation);
      (void)pool.read(id, block, 1000, bench.stream);
      (void)pool.read(id, block, 0, bench.stream);
    }
  }

  TEST_CASE(
      "HostSwapPool: memory starts at the requested size and grows by slabs up to the capacity") {
    Bench bench;
    auto options = bench.options(100'000, 0, 0);
    options.initial_pinned_bytes = 20'000;
    Bench::pool_type pool{bench.device, bench.order, options, bench.io};
    auto const pinned = [&] { return pool.stats().tier(HostTier::pinned); };
    CHECK(pinned().reserved_bytes == 20'000 / granule_bytes * granule_bytes);
    CHECK(pinned().capacity_bytes == 100'000 / granule_bytes * granule_bytes);
    CHECK(bench.device.usage().pinned_bytes == pinned().reserved_bytes);

    REQUIRE(pool.try_grow(100));  // there is room: nothing grows
    CHECK(pinned().reserved_bytes == 20'000 / granule_bytes * granule_bytes);
    REQUIRE(pool.try_take(19'000).has_value());
    REQUIRE(pool.try_grow(3000));
    CHECK(pinned().reserved_bytes == 20'000 / granule_bytes * granule_bytes + (16 << 10));
    REQUIRE(pool.try_grow(40'000));  // more than a slab, by what is missing
    CHECK(pinned().reserved_bytes - pinned().used_bytes == round_up(40'000, granule_bytes));

    CHECK_FALSE(pool.try_grow(100'000));
    CHECK(pool.free_bytes() == pinned().capacity_bytes - pinned().used_bytes);
    CHECK(pinned().used_bytes == 75 * granule_bytes);
    CHECK(pinned().peak_used_bytes == 75 * granule_bytes);
    CHECK(pinned().slot_count == 1);
  }

  TEST_CASE("HostSwapPool: wholly free slabs are returned to the system, others stay") {
    for (HostTier const tier : every_tier) {
      Bench bench;
      Bench::pool_type pool{bench.device, bench.order, bench.options(tier, 100'000), bench.io};
      auto const reserved = [&] { return pool.stats().tier(tier).reserved_bytes; };
      std::byte* const data = bench.reserve(16 << 10);
      put_pattern(data, 16 << 10, 1);
      auto const gone = Bench::take(pool, 16 << 10);
      auto const stays = Bench::take(pool, 16 << 10);
      (void)pool.write(gone, data, 16 << 10, bench.stream);
      (void)pool.write(stays, data, 16 << 10, bench.stream);
      CHECK(pool.trim_sync() == 0);
      pool.give_back(gone);
      CHECK(pool.trim_sync() == 16 << 10);
      CHECK(reserved() == 16 << 10);
      std::byte* const back = bench.reserve(16 << 10);
      bench.order.synchronize(pool.read(stays, back, 16 << 10, bench.stream).device_done);
      CHECK(has_pattern(back, 16 << 10, 1));
      pool.give_back(stays);
      CHECK(pool.trim_sync() == 16 << 10);
      CHECK(reserved() == 0);
      CHECK(bench.io.calls().discards == (tier == HostTier::file ? 2 : 0));
      CHECK(pool.size_bytes(Bench::take(pool, 16 << 10)) == 16 << 10);  // it grows again
      CHECK(reserved() == 16 << 10);
    }
  }

  TEST_CASE("HostSwapPool: set_first_tier decides where new slots begin") {
    Bench bench;
    Bench::pool_type pool{
        bench.device, bench.order, bench.options(64'000, 64'000, 40'000), bench.io};
    auto const pinned = Bench::take(pool, 1000);
    pool.set_first_tier(HostTier::file);
    auto const in_file = Bench::take(pool, 16'000);
    CHECK(pool.tier(in_file) == HostTier::file);
    CHECK(pool.tier(Bench::take(pool, 16'000)) == HostTier::file);
    CHECK_FALSE(pool.try_take(16'000).has_value());  // there is room before it, and none there
    CHECK_FALSE(pool.try_grow(16'000));
    pool.set_first_tier(HostTier::pinned);
    CHECK(pool.tier(Bench::take(pool, 1000)) == HostTier::pinned);
    CHECK(pool.tier(pinned) == HostTier::pinned);
  }

  TEST_CASE("HostSwapPool: a forked child can destroy a pool that pins ahead of need") {
    SlowBench bench;
    std::optional<SlowBench::pool_type> pool;
    pool.emplace(bench.device, bench.order, bench.options(64 << 10, 0, 0), bench.io);
    (void)SlowBench::take(*pool, 64 << 10);  // so that the thread of the pool has nothing to do

    spillway::test::ForkedChild const child{[&] { pool.reset(); }};
    CHECK(child.status() == 0);
  }

  TEST_CASE("HostSwapPool: where pinning is slow the next slab is pinned ahead of need") {
    SlowBench bench;
    constexpr std::size_t slab = 16 << 10;
    SlowBench::pool_type pool{bench.device, bench.order, bench.options(8_MiB, 0, 0), bench.io};
    auto const pinned = [&] { return pool.stats().tier(HostTier::pinned); };
    CHECK(pinned().reserved_bytes == 0);  // nothing has left yet
    auto const free = [&] { return pinned().reserved_bytes - pinned().used_bytes; };

    (void)SlowBench::take(pool, 4096);
    while (free() < slab / 2) {
      std::this_thread::yield();
    }
    CHECK(pool.try_take(slab / 2).has_value());

    SUBCASE("at most a 20th of the bytes in use is pinned beyond them") {
      while (pinned().used_bytes < 4_MiB) {
        (void)SlowBench::take(pool, 4096);
        HostTierStats const now = pinned();
        CHECK(now.reserved_bytes <=
              now.used_bytes + std::max(slab / 2, now.used_bytes / 64) + slab);
      }
      while (free() < pinned().used_bytes / 64) {
        std::this_thread::yield();
      }
      CHECK(static_cast<double>(bench.device.usage().pinned_bytes) <=
            1.05 * static_cast<double>(pinned().used_bytes));
    }
    SUBCASE("up to the capacity") {
      while (pool.free_bytes() != 0) {
        (void)SlowBench::take(pool, std::min<std::size_t>(pool.free_bytes(), 64 << 10));
      }
      CHECK(pinned().reserved_bytes == 8_MiB);
    }
  }

  TEST_CASE(
      "HostSwapPool: if memory could not be pinned ahead, it is requested again when needed") {
    SlowBench bench;
    SlowBench::pool_type pool{bench.device, bench.order, bench.options(1_MiB, 0, 0), bench.io};
    (void)SlowBench::take(pool, 64 << 10);
    bench.device.fail(SimCall::allocate_pinned, 1);

    (void)pool.try_grow(64 << 10);  // this call is the one that fails, or the thread's is
    for (int i = 1; i < 16; ++i) {
      (void)SlowBench::take(pool, 64 << 10);
    }

    CHECK(pool.stats().tier(HostTier::pinned).used_bytes == 1_MiB);
  }

  TEST_CASE("HostSwapPool: a device that shares the host's memory swaps to files only") {
    using SharedBench = PoolBench<SharedSim>;
    SharedBench bench;
    auto const make = [&](HostPoolOptions const& options) {
      SharedBench::pool_type{bench.device, bench.order, options, bench.io};
    };
    CHECK_THROWS_AS(make(bench.options(HostTier::pinned, 1_MiB)), ContractViolation);
    CHECK_THROWS_AS(make(bench.options(HostTier::pageable, 1_MiB)), ContractViolation);
    round_trip<SharedBench>(
        HostTier::file, bench.options(HostTier::file, 1_MiB), {1, 4096, 100'000});

    bench.device.is_shared = false;
    make(bench.options(HostTier::pinned, 1_MiB));
  }

  TEST_CASE("HostSwapPool: where memory cannot be pinned the next tier grows") {
    SimOptions sim;
    sim.pinned_capacity_bytes = 64 << 10;
    Bench bench{sim};
    auto options = bench.options(256 << 10, 256 << 10, 0);
    options.initial_pinned_bytes = 128 << 10;  // staging and half of it do not fit together
    Bench::pool_type pool{bench.device, bench.order, options, bench.io};
    std::size_t const initial = pool.stats().tier(HostTier::pinned).reserved_bytes;
    CHECK(initial > 0);
    CHECK(initial < 64 << 10);

    auto const id = Bench::take(pool, 64 << 10);

    CHECK(pool.tier(id) == HostTier::pageable);
    CHECK(pool.tier(Bench::take(pool, initial)) == HostTier::pinned);
  }

  TEST_CASE("HostSwapPool: a refused slab is requested again at the size that is needed") {
    Bench bench;
    Bench::pool_type pool{bench.device, bench.order, bench.options(64 << 10, 0, 0), bench.io};
    bench.device.fail(SimCall::allocate_pinned, 1);

    CHECK(pool.try_grow(5000));

    CHECK(pool.stats().tier(HostTier::pinned).reserved_bytes == 5120);
  }

  TEST_CASE(
      "HostSwapPool: all memory is returned to the device at the end, after waiting for its use") {
    Bench bench;
    std::byte* const block = bench.reserve(60'000);
    SimUsage const before = bench.device.usage();
    {
      Bench::pool_type pool{
          bench.device, bench.order, bench.options(64 << 10, 64 << 10, 64 << 10), bench.io};
      for (int i = 0; i < 3; ++i) {
        auto const id = Bench::take(pool, 60'000);
        bench.device.compute(bench.stream, 1'000'000);
        (void)pool.write(id, block, 60'000, bench.stream);
        (void)pool.read(id, block, 60'000, bench.stream);
      }
    }
    SimUsage const after = bench.device.usage();
    CHECK(after.pinned_bytes == before.pinned_bytes);
    CHECK(after.streams == before.streams);
    CHECK(after.device_bytes == before.device_bytes);
    CHECK(bench.folder.entries() == 0);
  }

  TEST_CASE("HostSwapPool: its end waits for transfers of slots that were given back") {
    SteppedBench bench;
    std::byte* const block = bench.reserve(8192);
    {
      SteppedBench::pool_type pool{
          bench.device, bench.order, bench.options(64 << 10, 0, 0), bench.io};
      auto const id = SteppedBench::take(pool, 8192);
      (void)pool.write(id, block, 8192, bench.stream);
      pool.give_back(id);
      REQUIRE(bench.device.queued_ops(bench.stream) > 0);
    }
    CHECK(bench.device.queued_ops(bench.stream) == 0);
  }

  TEST_CASE("HostSwapPool: a device that stores no bytes has the pinned tier only") {
    ModelApi device;
    StreamOrder<ModelApi> order{device};
    auto const stream = device.create_stream();
    HostSwapPool<ModelApi> pool{
        device, order, {.pinned_bytes = 1_GiB, .initial_pinned_bytes = 1_GiB}};
    auto const id = pool.try_take(1_GiB).value();
    void* const block = device.try_reserve(512_MiB);
    (void)pool.write(id, block, 512_MiB, stream);
    (void)pool.read(id, block, 512_MiB, stream);

    CHECK_THROWS_AS((HostSwapPool<ModelApi>{device, order, {.pageable_bytes = 1_MiB}}),
                    ContractViolation);
  }

  TEST_CASE("HostSwapPool: pageable memory is bound to a NUMA node, or reported as not bound") {
    Bench bench;
    auto options = bench.options(0, 64 << 10, 0);
    options.numa_node = 0;
    Bench::pool_type near{bench.device, bench.order, options, bench.io};
    options.numa_node = -1;
    Bench::pool_type anywhere{bench.device, bench.order, options, bench.io};
    (void)Bench::take(near, 1000);
    (void)Bench::take(anywhere, 1000);

    HostTierStats const stats = near.stats().tier(HostTier::pageable);
    CHECK((stats.numa_bound_bytes == 0 || stats.numa_bound_bytes == stats.reserved_bytes));
    CHECK(anywhere.stats().tier(HostTier::pageable).numa_bound_bytes == 0);
  }

  TEST_CASE("HostSwapPool: invalid options are refused") {
    Bench bench;
    auto no_path = bench.options(0, 0, 1000);
    no_path.file.clear();
    auto no_chunks = bench.options(0, 1000, 0);
    no_chunks.staging_chunks = 0;
    SimUsage const before = bench.device.usage();

    CHECK_THROWS_AS((Bench::pool_type{bench.device, bench.order, no_path}), ContractViolation);
    CHECK_THROWS_AS((Bench::pool_type{bench.device, bench.order, no_chunks}), ContractViolation);
    CHECK(bench.device.usage() == before);
  }
}
