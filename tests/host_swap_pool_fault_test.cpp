// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host_swap_pool.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <string>
#include <system_error>
#include <thread>

#include <support/pool_bench.hpp>

using namespace spillway;
using spillway::testing::FaultyFileIo;
using spillway::testing::SteppedSimApi;

namespace {

/// While set, `new` of arrays with an alignment fails.
std::atomic<bool> is_memory_refused{false};

}  // namespace

// Not inlined: g++ would see `malloc` or `free` on one side of a pair and not on the other, and
// warn.
[[gnu::noinline]] void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  auto const unit = static_cast<std::size_t>(alignment);
  if (void* const p = is_memory_refused
                          ? nullptr
                          : std::aligned_alloc(unit, (bytes + unit - 1) / unit * unit)) {
    return p;
  }
  throw std::bad_alloc{};
}
[[gnu::noinline]] void operator delete[](void* p, std::align_val_t /*alignment*/) noexcept {
  std::free(p);
}

namespace {

using Bench = PoolBench<SimApi>;
using SteppedBench = PoolBench<SteppedSimApi>;

constexpr std::array every_tier{HostTier::pinned, HostTier::pageable, HostTier::file};

/// A pool of one file tier with two written slots, and nothing running.
struct FileCase {
  static constexpr std::size_t bytes = 10'000;

  explicit FileCase(bool can_begin = false)
      : bench{{}, FaultyFileIo{can_begin}},
        pool{bench.device, bench.order, bench.options(HostTier::file, 64 << 10), bench.io} {
    for (std::byte** const block : {&from, &to}) {
      *block = bench.reserve(bytes);
    }
    put_pattern(from, bytes, 1);
    first = SteppedBench::take(pool, bytes);
    second = SteppedBench::take(pool, bytes);
  }

  void write(HostSlotId id, unsigned seed) {
    put_pattern(from, bytes, seed);
    (void)pool.write(id, from, bytes, bench.stream);
    bench.device.run_all();
  }
  [[nodiscard]] bool read_gives(HostSlotId id, unsigned seed) {
    (void)pool.read(id, to, bytes, bench.stream);
    bench.device.run_all();
    return has_pattern(to, bytes, seed);
  }

  SteppedBench bench;
  SteppedBench::pool_type pool;
  std::byte* from = nullptr;
  std::byte* to = nullptr;
  HostSlotId first{};
  HostSlotId second{};
};

std::string message_of(auto const& action) {
  try {
    action();
  } catch (FileTierError const& error) {
    return error.what();
  }
  return {};
}

}  // namespace

TEST_SUITE("host_swap_pool_fault") {
  TEST_CASE("HostSwapPool: a path that cannot be opened leaves nothing behind") {
    Bench bench;
    auto options = bench.options(64 << 10, 64 << 10, 64 << 10);
    options.initial_pinned_bytes = 64 << 10;
    options.file = bench.folder.path() / "missing" / "swap";
    SimUsage const before = bench.device.usage();

    auto const message = message_of([&] {
      Bench::pool_type pool{bench.device, bench.order, options, bench.io};
    });

    CHECK(message.find(options.file) != std::string::npos);
    CHECK(message.find("No such file or directory") != std::string::npos);
    CHECK(bench.device.usage() == before);
  }

  TEST_CASE("HostSwapPool: without pinned memory to stage through there are no slower tiers") {
    SimOptions sim;
    sim.pinned_capacity_bytes = 4096;
    Bench bench{sim};
    SimUsage const before = bench.device.usage();

    CHECK_THROWS_AS(
        (Bench::pool_type{bench.device, bench.order, bench.options(0, 64 << 10, 0), bench.io}),
        OutOfHostMemory);
    CHECK(bench.device.usage() == before);
  }

  TEST_CASE("HostSwapPool: with little pinned memory the staging ring is smaller and works") {
    SimOptions sim;
    sim.pinned_capacity_bytes = 16 << 10;  // one chunk and its alignment, for each direction
    Bench bench{sim};
    Bench::pool_type pool{bench.device, bench.order, bench.options(0, 64 << 10, 0), bench.io};
    auto const id = Bench::take(pool, 50'000);
    std::byte* const from = bench.reserve(50'000);
    std::byte* const to = bench.reserve(50'000);
    put_pattern(from, 50'000, 6);

    (void)pool.write(id, from, 50'000, bench.stream);
    bench.order.synchronize(pool.read(id, to, 50'000, bench.stream).device_done);

    CHECK(has_pattern(to, 50'000, 6));
  }

  TEST_CASE("HostSwapPool: a full disk is found when the file grows, not when it is written") {
    Bench bench;
    Bench::pool_type pool{
        bench.device, bench.order, bench.options(HostTier::file, 64 << 10), bench.io};
    auto const id = Bench::take(pool, 16 << 10);
    bench.io.plant({.allocate_error = ENOSPC});

    CHECK_FALSE(pool.try_grow(16 << 10));

    CHECK(pool.try_take(1) == std::nullopt);
    CHECK_FALSE(pool.stats().tier(HostTier::file).is_failed);
    pool.give_back(id);
    CHECK(pool.try_take(16 << 10).has_value());
    bench.io.plant({});
    CHECK(pool.try_grow(16 << 10));
  }

  TEST_CASE("HostSwapPool: the advice when it is full tells that the system refused memory") {
    SimOptions sim;
    sim.pinned_capacity_bytes = 32 << 10;
    Bench bench{sim};
    Bench::pool_type pool{
        bench.device, bench.order, bench.options(HostTier::pinned, 64 << 10), bench.io};
    REQUIRE(pool.try_grow(32 << 10));
    CHECK(pool.advice_when_full().find("The system") == std::string::npos);

    CHECK_FALSE(pool.try_grow(64 << 10));

    CHECK(pool.advice_when_full().find("The system gave less memory") != std::string::npos);
  }

  TEST_CASE("HostSwapPool: short and interrupted file calls lose no bytes") {
    FileCase now;
    now.bench.io.plant({.most_bytes = 999, .interrupt_every = 2});

    now.write(now.first, 7);

    CHECK(now.read_gives(now.first, 7));
    CHECK(now.bench.io.calls().writes >= 20);
    CHECK(now.pool.stats().failed_writes == 0);
  }

  TEST_CASE("HostSwapPool: file calls that begin early carry the right bytes in any order") {
    for (std::uint64_t seed = 1; seed <= 40; ++seed) {
      CAPTURE(seed);
      FileCase now{true};
      auto const other = now.bench.device.create_stream();
      std::byte* const between = now.bench.reserve(FileCase::bytes);
      for (unsigned round = 0; round < 4; ++round) {
        put_pattern(now.from, FileCase::bytes, round);
        Transfer const out = now.pool.write(now.first, now.from, FileCase::bytes, now.bench.stream);
        (void)now.pool.read(now.first, between, FileCase::bytes, other);
        (void)now.pool.write(now.second, between, FileCase::bytes, other);
        (void)now.pool.read(now.second, now.to, FileCase::bytes, other);
        if (round == 3) {
          now.pool.give_back(now.first, out.device_done);
        }
        now.bench.device.run_random(seed);
        CHECK(has_pattern(now.to, FileCase::bytes, round));
      }
      CHECK(now.bench.io.calls().writes == 4 * 2 * 3);  // each of three chunks once
      CHECK(now.bench.io.calls().reads == 4 * 2 * 3);
    }
  }

  TEST_CASE("HostSwapPool: a failed call that began early is handled like any failed call") {
    FileCase now{true};
    now.write(now.second, 2);
    now.bench.io.plant({.write_error = ENOSPC, .failing_from = 4096, .failing_to = 8192});
    now.write(now.first, 1);
    CHECK(now.pool.stats().rescued_bytes == 4096);
    CHECK(now.read_gives(now.first, 1));

    now.bench.io.plant({.read_error = EIO, .failing_from = 0, .failing_to = 4096});
    (void)now.read_gives(now.first, 1);
    CHECK_THROWS_AS(now.pool.check(now.first), FileTierError);
    now.bench.io.plant({});
    CHECK(now.read_gives(now.second, 2));

    now.bench.io.plant({.most_bytes = 999, .interrupt_every = 2});
    now.write(now.second, 3);
    CHECK(now.read_gives(now.second, 3));
  }

  TEST_CASE("HostSwapPool: bytes that the file refuses stay in memory and can be read back") {
    for (int const error : {EIO, ENOSPC}) {
      FileCase now;
      now.write(now.second, 2);
      now.bench.io.plant({.write_error = error});

      now.write(now.first, 1);

      HostPoolStats stats = now.pool.stats();
      CHECK(stats.failed_writes == 3);
      CHECK(stats.rescued_bytes == FileCase::bytes);
      CHECK(stats.tier(HostTier::file).is_failed);
      now.pool.check(now.first);
      CHECK(now.read_gives(now.first, 1));
      CHECK(now.read_gives(now.second, 2));

      CHECK(now.pool.try_take(1) == std::nullopt);
      CHECK_FALSE(now.pool.try_grow(1));
      CHECK(now.pool.free_bytes() == 0);
      std::string const advice = now.pool.advice_when_full();
      CHECK(advice.find("A write to the swap file at ") != std::string::npos);
      CHECK(advice.find(" failed: " + std::generic_category().message(error)) != std::string::npos);
      now.pool.give_back(now.first);
      CHECK(now.pool.stats().rescued_bytes == 0);
    }
  }

  TEST_CASE("HostSwapPool: a file that takes writes again gets the bytes that it refused, and then "
            "new slots") {
    for (int const error : {EIO, ENOSPC}) {
      for (bool const can_begin : {false, true}) {
        CAPTURE(error);
        CAPTURE(can_begin);
        FileCase now{can_begin};
        now.write(now.second, 2);
        now.bench.io.plant({.write_error = error, .failing_from = 4096});
        now.write(now.first, 1);
        CHECK(now.pool.stats().rescued_bytes == FileCase::bytes - 4096);
        now.bench.io.plant({});
        CHECK(now.pool.try_take(1) == std::nullopt);
        CHECK(now.pool.stats().tier(HostTier::file).is_failed);

        CHECK(now.pool.try_grow(1));

        HostPoolStats const stats = now.pool.stats();
        CHECK(stats.rescued_bytes == 0);
        CHECK(stats.failed_writes == 2);
        CHECK_FALSE(stats.tier(HostTier::file).is_failed);
        CHECK(now.pool.advice_when_full().find("A write") == std::string::npos);
        HostSlotId const third = now.pool.try_take(FileCase::bytes).value();
        now.write(third, 3);
        CHECK(now.read_gives(now.first, 1));
        CHECK(now.read_gives(now.second, 2));
        CHECK(now.read_gives(third, 3));

        now.bench.io.plant({.write_error = EDQUOT});
        now.write(third, 4);
        CHECK_FALSE(now.pool.try_grow(1));
        CHECK(now.pool.advice_when_full().find(std::generic_category().message(EDQUOT)) !=
              std::string::npos);
        CHECK(now.read_gives(third, 4));
      }
    }
  }

  TEST_CASE(
      "HostSwapPool: a file that never recovers costs few calls, and one that does is found") {
    FileCase now;
    now.bench.io.plant({.write_error = ENOSPC});
    now.write(now.first, 1);
    std::size_t const writes = now.bench.io.calls().writes;
    auto const count_attempts = [&](int requests) {
      std::size_t const before = now.bench.io.calls().writes;
      for (int i = 0; i < requests; ++i) {
        CHECK_FALSE(now.pool.try_grow(1));
      }
      return now.bench.io.calls().writes - before;
    };

    CHECK(count_attempts(1) == 1);
    CHECK(count_attempts(1) == 0);
    CHECK(count_attempts(1) == 1);
    CHECK(count_attempts(61) == 4);  // after 3, 7, 15 and 31 requests
    CHECK(count_attempts(640) == 10);
    CHECK(now.pool.stats().failed_writes == 3);
    CHECK(now.pool.stats().rescued_bytes == FileCase::bytes);
    CHECK(now.bench.io.calls().writes == writes + 16);

    now.bench.io.plant({});
    int requests = 1;
    for (; !now.pool.try_grow(1); ++requests) {
      REQUIRE(requests < 64);
    }
    CHECK(now.read_gives(now.first, 1));

    now.bench.io.plant({.write_error = ENOSPC});
    now.write(now.first, 2);
    now.bench.io.plant({});
    CHECK(now.pool.try_grow(1));  // at once, since it had recovered
  }

  TEST_CASE("HostSwapPool: a file that refused the bytes of a freed slot is tried elsewhere") {
    FileCase now;
    now.bench.io.plant({.write_error = ENOSPC});
    now.write(now.first, 1);
    now.pool.give_back(now.first);

    CHECK_FALSE(now.pool.try_grow(1));
    CHECK(now.pool.try_take(1) == std::nullopt);
    now.bench.io.plant({.allocate_error = ENOSPC});
    CHECK_FALSE(now.pool.try_grow(1));
    CHECK_FALSE(now.pool.try_grow(1));
    now.bench.io.plant({});
    while (!now.pool.try_grow(1)) {
    }

    HostSlotId const slot = now.pool.try_take(FileCase::bytes).value();
    now.write(slot, 2);
    CHECK(now.read_gives(slot, 2));
  }

  TEST_CASE("HostSwapPool: bytes that the file refused are not written over newer ones") {
    for (std::uint64_t seed = 1; seed <= 40; ++seed) {
      CAPTURE(seed);
      bool const is_given_back = seed % 4 < 2;  // and another slot takes its place
      FileCase now{seed % 2 == 0};
      auto const lane = now.bench.device.created.at(1);  // that of writes
      now.bench.io.plant({.write_error = ENOSPC});
      now.write(now.first, 1);
      now.bench.io.plant({});
      put_pattern(now.from, FileCase::bytes, 3);
      if (is_given_back) {
        (void)now.pool.read(now.first, now.to, FileCase::bytes, now.bench.stream);
        now.pool.give_back(now.first);
      } else {
        (void)now.pool.write(now.first, now.from, FileCase::bytes, now.bench.stream);
        now.bench.device.stall(lane);
        now.bench.device.run_all();  // begins the file calls, if that is possible
      }

      while (!now.pool.try_grow(1)) {
      }
      now.bench.device.resume(lane);
      if (is_given_back) {
        now.first = now.pool.try_take(FileCase::bytes).value();
        (void)now.pool.write(now.first, now.from, FileCase::bytes, now.bench.stream);
      }
      now.bench.device.run_random(seed);

      CHECK(now.read_gives(now.first, 3));
      CHECK(now.pool.stats().rescued_bytes == 0);
    }
  }

  TEST_CASE("HostSwapPool: if only some pieces were refused, all of them come back") {
    FileCase now;
    now.bench.io.plant({.write_error = EIO, .failing_from = 4096, .failing_to = 8192});

    now.write(now.first, 1);

    CHECK(now.pool.stats().rescued_bytes == 4096);
    CHECK(now.read_gives(now.first, 1));
  }

  TEST_CASE("HostSwapPool: a slot with rescued bytes can be rewritten, whether the file works "
            "again or not") {
    FileCase now;
    now.bench.io.plant({.write_error = EIO});
    now.write(now.first, 1);
    now.write(now.first, 2);
    CHECK(now.pool.stats().rescued_bytes == FileCase::bytes);
    CHECK(now.read_gives(now.first, 2));

    now.bench.io.plant({});
    now.write(now.first, 3);

    CHECK(now.pool.stats().rescued_bytes == 0);
    CHECK(now.read_gives(now.first, 3));
  }

  TEST_CASE("HostSwapPool: a failed tier gets no new slots") {
    SteppedBench bench;
    SteppedBench::pool_type pool{
        bench.device, bench.order, bench.options(16 << 10, 0, 64 << 10), bench.io};
    auto const fast = SteppedBench::take(pool, 16 << 10);
    auto const slow = SteppedBench::take(pool, 16 << 10);
    REQUIRE(pool.tier(slow) == HostTier::file);
    std::byte* const block = bench.reserve(16 << 10);
    bench.io.plant({.write_error = EIO});
    (void)pool.write(slow, block, 16 << 10, bench.stream);
    bench.device.run_all();

    CHECK(pool.try_take(1) == std::nullopt);
    pool.give_back(fast);
    CHECK(pool.tier(pool.try_take(16 << 10).value()) == HostTier::pinned);
  }

  TEST_CASE(
      "HostSwapPool: bytes that cannot be read from the file are lost, and the loss is reported") {
    FileCase now;
    now.write(now.first, 1);
    now.write(now.second, 2);
    now.bench.io.plant({.read_error = EIO, .failing_from = 4096, .failing_to = 8192});

    CHECK_FALSE(now.read_gives(now.first, 1));

    auto const message = message_of([&] { now.pool.check(now.first); });
    CHECK(message.find("reading 4096 bytes at offset 4096") != std::string::npos);
    CHECK(message.find(now.bench.folder.path().string()) != std::string::npos);
    CHECK(message.find("Input/output error") != std::string::npos);
    auto const& stream = now.bench.stream;
    CHECK_THROWS_AS((void)now.pool.read(now.first, now.to, 1, stream), FileTierError);
    CHECK_THROWS_AS((void)now.pool.write(now.first, now.to, 1, stream), FileTierError);
    CHECK(now.pool.stats().failed_reads == 1);

    now.pool.check(now.second);
    CHECK(now.read_gives(now.second, 2));
    now.pool.give_back(now.first);
    now.pool.check();  // the owner was told
    CHECK(now.pool.try_take(1).has_value());
  }

  TEST_CASE("HostSwapPool: reading a file that was truncated is an error and ends") {
    FileCase now;
    now.write(now.first, 1);
    now.bench.io.plant({.is_truncated = true});

    CHECK_FALSE(now.read_gives(now.first, 1));

    CHECK_THROWS_AS(now.pool.check(now.first), FileTierError);
  }

  TEST_CASE(
      "HostSwapPool: losses of which no owner was told are reported by check() without a slot") {
    FileCase now;
    now.write(now.first, 1);
    now.bench.io.plant({.read_error = EIO});

    SUBCASE("the slot was given back before the read ran") {
      (void)now.pool.read(now.first, now.to, FileCase::bytes, now.bench.stream);
      now.pool.give_back(now.first);
      now.pool.check();
      now.bench.device.run_all();
    }
    SUBCASE("the slot is given back after the read, and another one was refused") {
      CHECK_FALSE(now.read_gives(now.first, 1));
      CHECK_THROWS_AS((void)now.read_gives(now.first, 1), FileTierError);
      now.pool.check();
      now.pool.give_back(now.first);
    }

    CHECK_THROWS_AS(now.pool.check(), FileTierError);
    now.bench.io.plant({});
    now.write(now.second, 2);
    CHECK(now.read_gives(now.second, 2));
  }

  TEST_CASE("HostSwapPool: bytes of a slot that was given back are kept for a read still to run") {
    FileCase now;
    now.bench.io.plant({.write_error = EIO});
    (void)now.pool.write(now.first, now.from, FileCase::bytes, now.bench.stream);
    (void)now.pool.read(now.first, now.to, FileCase::bytes, now.bench.stream);
    now.pool.give_back(now.first);

    now.bench.device.run_all();

    CHECK(has_pattern(now.to, FileCase::bytes, 1));
    now.pool.check();
    CHECK(now.pool.stats().rescued_bytes == 0);
  }

  TEST_CASE("HostSwapPool: giving back a slot discards its rescued bytes, even if its last "
            "transfer failed") {
    FileCase now;
    now.bench.io.plant({.write_error = EIO});
    now.write(now.first, 1);
    REQUIRE(now.pool.stats().rescued_bytes == FileCase::bytes);
    auto const stream = now.bench.stream;

    now.bench.device.fail_copy(2);
    SUBCASE("a swap-out") {
      CHECK_THROWS_AS((void)now.pool.write(now.first, now.from, FileCase::bytes, stream),
                      DeviceError);
    }
    SUBCASE("a swap-in") {
      CHECK_THROWS_AS((void)now.pool.read(now.first, now.to, FileCase::bytes, stream), DeviceError);
    }
    now.pool.give_back(now.first);
    now.bench.device.run_all();

    CHECK(now.pool.stats().rescued_bytes == 0);
  }

  TEST_CASE("HostSwapPool: a slot that was given back is not written to the file") {
    FileCase now;
    (void)now.pool.write(now.first, now.from, FileCase::bytes, now.bench.stream);
    now.pool.give_back(now.first);

    now.bench.device.run_all();

    CHECK(now.bench.io.calls().writes == 0);
  }

  TEST_CASE("HostSwapPool: refused bytes are lost if there is no memory for them, and the loss is "
            "reported") {
    FileCase now;
    now.write(now.second, 2);
    now.bench.io.plant({.write_error = ENOSPC, .failing_from = 0, .failing_to = 4096});
    is_memory_refused = true;

    now.write(now.first, 1);

    is_memory_refused = false;
    auto const message = message_of([&] { now.pool.check(now.first); });
    CHECK(message.find("writing 4096 bytes at offset 0") != std::string::npos);
    CHECK(message.find("No space left on device") != std::string::npos);
    CHECK(message.find("no memory") != std::string::npos);
    CHECK(now.read_gives(now.second, 2));
  }

  TEST_CASE("HostSwapPool: a swap-out that the device refuses can be tried again") {
    for (HostTier const tier : every_tier) {
      // Each device call that a transfer makes fails once.
      for (SimCall const call :
           {SimCall::copy, SimCall::launch_host, SimCall::wait, SimCall::record}) {
        for (std::uint64_t nth = 1; nth <= 24; ++nth) {
          CAPTURE(static_cast<int>(tier));
          CAPTURE(static_cast<int>(call));
          CAPTURE(nth);
          SteppedBench bench{{}, FaultyFileIo{nth % 2 == 0}};
          SteppedBench::pool_type pool{
              bench.device, bench.order, bench.options(tier, 64 << 10), bench.io};
          auto const other = bench.device.create_stream();
          auto const id = SteppedBench::take(pool, 20'000);
          std::byte* const from = bench.reserve(20'000);
          std::byte* const to = bench.reserve(20'000);
          put_pattern(from, 20'000, 8);
          (void)pool.write(id, from, 20'000, other);  // something to wait for
          bool has_thrown = false;

          bench.device.fail(call, nth);
          try {
            (void)pool.write(id, from, 20'000, bench.stream);
            (void)pool.read(id, to, 20'000, other);
          } catch (DeviceError const&) {
            has_thrown = true;
          }
          bench.device.fail(call, 0);
          (void)pool.write(id, from, 20'000, bench.stream);
          (void)pool.read(id, to, 20'000, other);
          bench.device.run_random(nth);

          CHECK(has_pattern(to, 20'000, 8));
          CHECK((has_thrown || nth > 1 || call != SimCall::copy));
          pool.give_back(id);
          CHECK(pool.stats().tier(tier).used_bytes == 0);
          CHECK(pool.stats().tier(tier).slot_count == 0);
        }
      }
    }
  }

  TEST_CASE("HostSwapPool: a swap-in that the device refuses leaves the slot as it was") {
    for (HostTier const tier : every_tier) {
      SteppedBench bench;
      SteppedBench::pool_type pool{
          bench.device, bench.order, bench.options(tier, 64 << 10), bench.io};
      auto const id = SteppedBench::take(pool, 20'000);
      std::byte* const block = bench.reserve(20'000);
      put_pattern(block, 20'000, 8);
      (void)pool.write(id, block, 20'000, bench.stream);
      bench.device.run_all();
      std::memset(block, 0, 20'000);
      bench.device.fail_copy(1);

      CHECK_THROWS_AS((void)pool.read(id, block, 20'000, bench.stream), DeviceError);

      (void)pool.read(id, block, 20'000, bench.stream);
      bench.device.run_all();
      CHECK(has_pattern(block, 20'000, 8));
    }
  }

  TEST_CASE("HostSwapPool: a swap-out that fails before it enqueues anything keeps the old bytes") {
    for (HostTier const tier : every_tier) {
      SteppedBench bench;
      SteppedBench::pool_type pool{
          bench.device, bench.order, bench.options(tier, 64 << 10), bench.io};
      auto const id = SteppedBench::take(pool, 20'000);
      std::byte* const block = bench.reserve(20'000);
      put_pattern(block, 20'000, 8);
      (void)pool.write(id, block, 20'000, bench.stream);
      bench.device.run_all();
      bench.device.fail_copy(1);

      CHECK_THROWS_AS((void)pool.write(id, block, 20'000, bench.stream), DeviceError);

      std::memset(block, 0, 20'000);
      (void)pool.read(id, block, 20'000, bench.stream);
      bench.device.run_all();
      CHECK(has_pattern(block, 20'000, 8));
    }
  }

  TEST_CASE("HostSwapPool: a swap-out that fails halfway leaves an empty slot") {
    for (HostTier const tier : {HostTier::pageable, HostTier::file}) {
      SteppedBench bench;
      SteppedBench::pool_type pool{
          bench.device, bench.order, bench.options(tier, 64 << 10), bench.io};
      auto const id = SteppedBench::take(pool, 20'000);
      std::byte* const block = bench.reserve(20'000);
      (void)pool.write(id, block, 20'000, bench.stream);
      bench.device.fail_copy(3);

      CHECK_THROWS_AS((void)pool.write(id, block, 20'000, bench.stream), DeviceError);

      CHECK_THROWS_AS((void)pool.read(id, block, 1, bench.stream), ContractViolation);
    }
  }

  TEST_CASE("HostSwapPool: pinned memory is freed later if waiting for its last use fails") {
    bool is_tried_again = false;
    SUBCASE("by the next call") {
      is_tried_again = true;
    }
    SUBCASE("at the end of the pool") {}
    std::atomic<bool> may_read{false};  // read until the device is destroyed
    Bench bench;
    constexpr std::size_t bytes = 64 << 10;
    std::byte* const block = bench.reserve(bytes);
    {
      Bench::pool_type pool{bench.device, bench.order, bench.options(0, bytes, 0), bench.io};
      put_pattern(block, bytes, 1);
      HostSlotId const slot = Bench::take(pool, bytes);
      (void)pool.write(slot, block, bytes, bench.stream);
      bench.device.launch(bench.stream, [&may_read] {
        while (!may_read) {
          std::this_thread::yield();
        }
      });
      (void)pool.read(slot, block, bytes, bench.stream);
      pool.give_back(slot);
      bench.device.fail(SimCall::synchronize, 1);
      CHECK_THROWS_AS(pool.trim_sync(), DeviceError);
      may_read = true;
      if (is_tried_again) {
        CHECK(pool.trim_sync() == bytes);
        CHECK(pool.trim_sync() == 0);
      }
    }
    CHECK(has_pattern(block, bytes, 1));
  }

  TEST_CASE("HostSwapPool: a failure to make streams leaves nothing behind") {
    for (std::uint64_t nth = 1; nth <= 2; ++nth) {
      Bench bench;
      SimUsage const before = bench.device.usage();
      bench.device.fail(SimCall::create_stream, nth);

      CHECK_THROWS_AS(
          (Bench::pool_type{
              bench.device, bench.order, bench.options(64 << 10, 64 << 10, 64 << 10), bench.io}),
          DeviceError);
      SimUsage const after = bench.device.usage();
      CHECK(after.pinned_bytes == before.pinned_bytes);
      CHECK(after.streams == before.streams);
    }
  }
}
