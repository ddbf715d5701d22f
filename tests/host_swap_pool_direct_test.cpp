// SPDX-License-Identifier: Apache-2.0
// HostSwapPool with a file whose queues can address device memory.
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/sim/sim_options.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host_swap_pool.hpp>
#include <spillway/policy/codec/zero_bitmap.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include <support/pool_bench.hpp>

TEST_SUITE("host_swap_pool_direct") {
  using namespace spillway;
  using spillway::testing::FaultyFileIo;
  using spillway::testing::SteppedSimApi;

  namespace {

  using SteppedBench = PoolBench<SteppedSimApi>;

  constexpr std::size_t large = 256_KiB + 1000;
  constexpr std::size_t small = 10'000;
  constexpr std::size_t chunk_bytes = 64_KiB;
  constexpr std::size_t calls_of_large = 5;  // a chunk's bytes each

  /// A pool of one file, and two adjacent device ranges, one to write from and one to read into.
  struct Bench : SteppedBench {
    explicit Bench(bool is_checked = false)
        : SteppedBench{{}, FaultyFileIo::reaching_device()},
          pool{device, order, file_options(*this, is_checked), io} {}

    static HostPoolOptions file_options(SteppedBench const& bench, bool is_checked) {
      HostPoolOptions options = bench.options(HostTier::file, 4_MiB);
      options.slab_bytes = 1_MiB;
      options.staging_bytes = chunk_bytes;
      options.file_checksums = is_checked;
      return options;
    }

    HostSlotId write(std::size_t bytes, unsigned seed) {
      HostSlotId const slot = take(pool, bytes);
      put_pattern(from, bytes, seed);
      (void)pool.write(slot, from, bytes, stream);
      device.run_all();
      return slot;
    }
    bool read_gives(HostSlotId slot, std::size_t bytes, unsigned seed) {
      std::memset(to, 0, large);
      (void)pool.read(slot, to, bytes, stream);
      device.run_all();
      return has_pattern(to, bytes, seed);
    }
    [[nodiscard]] std::size_t copies() const {
      auto const calls = device.calls();
      return calls.copies_to_host + calls.copies_to_device;
    }

    std::byte* from = reserve(large);
    std::byte* to = reserve(large);
    pool_type pool;
  };

  }  // namespace

  TEST_CASE("HostSwapPool: large blocks are transferred directly between device and file") {
    Bench bench;

    HostSlotId const slot = bench.write(large, 1);
    CHECK(bench.io.calls().writes == calls_of_large);
    CHECK(bench.read_gives(slot, large, 1));
    CHECK(bench.io.calls().reads == calls_of_large);
    CHECK(bench.read_gives(slot, 70'001, 1));
    CHECK(bench.copies() == 0);
    CHECK(bench.to[70'001] == std::byte{});

    bench.pool.give_back(slot);
    CHECK(bench.pool.stats().tier(HostTier::file).slot_count == 0);
  }

  TEST_CASE("HostSwapPool: small, encoded and checksummed blocks are staged, large ones are not") {
    Bench bench;
    HostSlotId const in_file = bench.write(small, 1);
    CHECK(bench.copies() == 1);
    HostSlotId const large_in_file = bench.write(large, 2);
    CHECK(bench.copies() == 1);
    CHECK(bench.read_gives(in_file, small, 1));
    CHECK(bench.read_gives(large_in_file, large, 2));

    // Mostly zeros, otherwise the codec would be given up.
    HostSlotId const encoded = bench.pool.try_take(large, bench.pool.coding<ZeroBitmap>()).value();
    std::memset(bench.from + 1000, 0, large - 1000);
    std::size_t const writes = bench.io.calls().writes;
    (void)bench.pool.write(encoded, bench.from, large, bench.stream);
    bench.device.run_all();
    CHECK(bench.io.calls().writes == writes + 1);
    (void)bench.pool.read(encoded, bench.to, large, bench.stream);
    bench.device.run_all();
    CHECK(std::equal(bench.from, bench.from + large, bench.to));

    Bench checked{true};
    HostSlotId const slot = checked.write(large, 3);
    CHECK(checked.read_gives(slot, large, 3));
    CHECK((checked.copies() > 0) == checked.pool.stats().is_file_checked);
  }

  TEST_CASE(
      "HostSwapPool: large blocks in a batch are transferred directly, and touch no other bytes") {
    Bench bench;
    std::byte* const memory = bench.reserve(2 * large);
    std::array<TransferRequest, 4> requests;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      std::size_t const bytes = i % 2 == 0 ? large : small;
      requests[i] = {.slot = SteppedBench::take(bench.pool, bytes),
                     .device = memory + i / 2 * large,
                     .bytes = bytes};
    }
    put_pattern(memory, 2 * large, 7);
    bench.pool.write_all(requests, bench.stream);
    for (TransferRequest& request : requests) {
      CHECK(request.state == TransferState::enqueued);
      bench.order.wait(bench.order.index_of(bench.stream), request.done.device_done);
    }
    bench.device.fill(memory, 0, 2 * large, bench.stream);
    bench.pool.read_all(requests, bench.stream);
    bench.device.run_random(1);
    CHECK(has_pattern(memory, 2 * large, 7));
  }

  TEST_CASE(
      "HostSwapPool: a direct write is ordered between the work before it and the work after it") {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      CAPTURE(seed);
      Bench bench;
      auto const other = bench.device.create_stream();
      HostSlotId const slot = SteppedBench::take(bench.pool, large);
      for (int round = 0; round < 3; ++round) {
        bench.device.fill(bench.from, static_cast<unsigned char>(round + 1), large, bench.stream);
        Transfer const out = bench.pool.write(slot, bench.from, large, bench.stream);
        bench.order.wait(bench.order.index_of(bench.stream), out.device_done);
        bench.device.fill(bench.from, 99, large, bench.stream);
        Transfer const in = bench.pool.read(slot, bench.to, large, other);
        bench.device.run_random(seed);
        bench.order.synchronize(in.device_done);
        CHECK(std::all_of(bench.to, bench.to + large, [&](std::byte one) {
          return one == static_cast<std::byte>(round + 1);
        }));
      }
    }
  }

  TEST_CASE("HostSwapPool: a direct write that the device refuses halfway leaves an empty slot") {
    auto const rewrite = [](Bench& bench, HostSlotId slot) {
      put_pattern(bench.from, large, 2);
      CHECK_THROWS_AS((void)bench.pool.write(slot, bench.from, large, bench.stream), DeviceError);
      bench.device.fail(SimCall::launch_host, 0);
      bench.device.run_all();
      CHECK_THROWS_AS((void)bench.pool.read(slot, bench.to, 1, bench.stream), ContractViolation);
      (void)bench.pool.write(slot, bench.from, large, bench.stream);
      bench.device.run_all();
      CHECK(bench.read_gives(slot, large, 2));
    };
    for (std::uint64_t nth = 1; nth <= 2 * calls_of_large; ++nth) {  // a chunk takes two launches
      CAPTURE(nth);
      Bench bench;
      HostSlotId const slot = bench.write(large, 1);
      bench.device.fail(SimCall::launch_host, nth);
      rewrite(bench, slot);
    }
    // The queue refuses the second piece of a chunk, and then the copy to the chunk fails.
    Bench bench;
    std::array<HostSlotId, 100> fillers{};
    for (HostSlotId& filler : fillers) {
      filler = SteppedBench::take(bench.pool, small);
    }
    for (std::size_t i = 0; i < fillers.size(); i += 2) {
      bench.pool.give_back(fillers[i]);
    }
    HostSlotId const slot = bench.pool.try_take(large).value();
    put_pattern(bench.from, large, 1);
    (void)bench.pool.write(slot, bench.from, large, bench.stream);
    bench.device.run_all();
    std::size_t const calls = bench.io.calls().writes;
    CHECK(calls > calls_of_large);
    bench.io.plant({.most_enqueued = calls + 1});
    bench.device.fail_copy(1);
    rewrite(bench, slot);
  }

  TEST_CASE("HostSwapPool: bytes of a failed direct write are lost, and the loss is reported") {
    Bench bench;
    HostSlotId const healthy = bench.write(large, 1);
    bench.io.plant({.write_error = ENOSPC});
    HostSlotId const slot = bench.write(large, 2);
    bench.io.plant({});

    CHECK(bench.pool.stats().failed_writes == calls_of_large);
    CHECK(bench.pool.stats().rescued_bytes == 0);
    std::string message;
    try {
      (void)bench.pool.read(slot, bench.to, large, bench.stream);
    } catch (FileTierError const& error) {
      message = error.what();
    }
    CHECK(message.find("writing ") != std::string::npos);
    CHECK(message.find("they were on the device only") != std::string::npos);
    CHECK(bench.read_gives(healthy, large, 1));
    CHECK_FALSE(bench.pool.try_take(large).has_value());  // the tier takes no more
  }

  TEST_CASE("HostSwapPool: after a failed direct write no more bytes can be lost") {
    Bench bench;
    HostSlotId const healthy = bench.write(large, 1);
    HostSlotId const other = SteppedBench::take(bench.pool, large);
    bench.io.plant({.write_error = ENOSPC});
    HostSlotId const lost = bench.write(large, 2);
    CHECK(bench.pool.has_failed(lost));
    std::size_t const copies = bench.copies();

    put_pattern(bench.from, large, 3);
    (void)bench.pool.write(other, bench.from, large, bench.stream);
    bench.device.run_all();

    CHECK(bench.copies() == copies + calls_of_large);
    CHECK(bench.pool.stats().rescued_bytes == large);
    CHECK(bench.read_gives(other, large, 3));
    CHECK(bench.read_gives(healthy, large, 1));
    bench.io.plant({});
    CHECK(bench.pool.try_grow(large));
    CHECK(bench.pool.stats().rescued_bytes == 0);
    CHECK(bench.read_gives(other, large, 3));
    CHECK(bench.read_gives(bench.write(large, 4), large, 4));
  }

  TEST_CASE("HostSwapPool: a failed write is no loss while its owner has the bytes") {
    Bench bench;
    bench.io.plant({.write_error = ENOSPC});
    HostSlotId const slot = bench.write(large, 1);
    bench.io.plant({});

    CHECK_FALSE(bench.pool.has_lost_bytes(slot));
    CHECK(bench.pool.has_lost_write(slot));
    CHECK_FALSE(bench.pool.takes_bytes(slot));
    bench.pool.give_back(slot);
    bench.pool.check();
  }

  TEST_CASE("HostSwapPool: a failed write is a loss once its bytes have been read back") {
    Bench bench;
    HostSlotId const slot = Bench::take(bench.pool, large);
    (void)bench.pool.write(slot, bench.from, large, bench.stream);
    (void)bench.pool.read(slot, bench.to, large, bench.stream);
    bench.io.plant({.write_error = ENOSPC});
    bench.device.run_all();
    bench.io.plant({});

    CHECK(bench.pool.has_lost_bytes(slot));
    CHECK_FALSE(bench.pool.has_lost_write(slot));
    CHECK_THROWS_AS(bench.pool.check(slot), FileTierError);
  }

  TEST_CASE(
      "HostSwapPool: bytes that a direct read cannot get are lost, and the loss is reported") {
    for (bool const is_truncated : {false, true}) {
      Bench bench;
      HostSlotId const slot = bench.write(large, 1);
      HostSlotId const healthy = bench.write(large, 2);
      bench.io.plant({.read_error = is_truncated ? 0 : EIO, .is_truncated = is_truncated});
      CHECK_FALSE(bench.read_gives(slot, large, 1));
      bench.io.plant({});

      CHECK_THROWS_AS(bench.pool.check(slot), FileTierError);
      CHECK_THROWS_AS((void)bench.pool.read(slot, bench.to, 1, bench.stream), FileTierError);
      CHECK(bench.read_gives(healthy, large, 2));
    }
  }

  TEST_CASE("HostSwapPool: a failed direct write to a slot already given back is no loss") {
    Bench bench;
    HostSlotId const slot = SteppedBench::take(bench.pool, large);
    bench.io.plant({.write_error = EIO});
    (void)bench.pool.write(slot, bench.from, large, bench.stream);
    bench.pool.give_back(slot);
    bench.device.run_all();
    bench.pool.check();
    CHECK(bench.pool.stats().tier(HostTier::file).used_bytes == 0);
  }

  TEST_CASE("HostSwapPool: direct transfers that the device refuses can be repeated") {
    std::size_t failures = 0;
    for (SimCall const call : {SimCall::launch_host, SimCall::wait, SimCall::record}) {
      for (std::uint64_t nth = 1; nth <= 24; ++nth) {
        CAPTURE(static_cast<int>(call));
        CAPTURE(nth);
        Bench bench;
        auto const other = bench.device.create_stream();
        HostSlotId const slot = bench.write(large, 1);
        put_pattern(bench.from, large, 2);

        bench.device.fail(call, nth);
        try {
          (void)bench.pool.write(slot, bench.from, large, bench.stream);
          (void)bench.pool.read(slot, bench.to, large, other);
        } catch (DeviceError const&) {
          ++failures;
        }
        bench.device.fail(call, 0);
        (void)bench.pool.write(slot, bench.from, large, bench.stream);
        (void)bench.pool.read(slot, bench.to, large, other);
        bench.device.run_random(nth);

        CHECK(has_pattern(bench.to, large, 2));
        bench.pool.give_back(slot);
        CHECK(bench.pool.stats().tier(HostTier::file).slot_count == 0);
        CHECK(bench.pool.stats().tier(HostTier::file).used_bytes == 0);
      }
    }
    CHECK(failures > 20);
  }

  TEST_CASE("HostSwapPool: if the file refuses direct transfers later, bytes are staged") {
    for (std::size_t most = 0; most <= 2 * calls_of_large; ++most) {
      CAPTURE(most);
      Bench bench;
      bench.io.plant({.most_enqueued = most});
      HostSlotId const slot = bench.write(large, 1);
      CHECK(bench.read_gives(slot, large, 1));
      std::size_t const copies = bench.copies();
      CHECK((copies > 0) == (most < 2 * calls_of_large));

      bench.io.plant({});
      HostSlotId const later = bench.write(large, 2);
      CHECK(bench.read_gives(later, large, 2));
      CHECK(bench.read_gives(slot, large, 1));
      CHECK((bench.copies() > copies) == (most < 2 * calls_of_large));  // it is not asked again
    }
  }

  TEST_CASE("HostSwapPool: a block that is freed before its refused direct write is not written") {
    Bench bench;
    bench.io.plant({.most_enqueued = 0});
    HostSlotId const slot = SteppedBench::take(bench.pool, large);
    (void)bench.pool.write(slot, bench.from, large, bench.stream);
    bench.pool.give_back(slot);
    bench.device.run_all();

    CHECK(bench.io.calls().writes == 0);
    CHECK(bench.pool.stats().tier(HostTier::file).slot_count == 0);
  }

  TEST_CASE("HostSwapPool: work of a failed direct transfer finishes before the next one starts") {
    Bench bench;
    HostSlotId const written = bench.write(large, 1);
    HostSlotId const torn = SteppedBench::take(bench.pool, large);
    bench.device.fail(SimCall::launch_host, 2);  // behind the first transfer
    CHECK_THROWS_AS((void)bench.pool.write(torn, bench.from, large, bench.stream), DeviceError);
    bench.device.fail(SimCall::launch_host, 0);
    for (auto const stream : bench.device.created) {  // whatever is left of it comes late
      if (stream != bench.stream && bench.device.queued_ops(stream) > 0) {
        bench.device.stall(stream);
      }
    }

    (void)bench.pool.read(written, bench.to, large, bench.stream);
    bench.device.fill(bench.to, 5, large, bench.stream);
    bench.device.run_all();
    for (auto const stream : bench.device.created) {
      bench.device.resume(stream);
    }
    bench.device.run_all();
    CHECK(
        std::all_of(bench.to, bench.to + large, [](std::byte one) { return one == std::byte{5}; }));
  }
}
