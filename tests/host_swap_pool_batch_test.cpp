// SPDX-License-Identifier: Apache-2.0
// HostSwapPool: several transfers at once.
#include <spillway/core/error.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host_swap_pool.hpp>
#include <spillway/stream/stream_order.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <support/pool_bench.hpp>

TEST_SUITE("host_swap_pool_batch") {
  using namespace spillway;
  using spillway::testing::SteppedSimApi;

  namespace {

  using Bench = PoolBench<SimApi>;
  using SteppedBench = PoolBench<SteppedSimApi>;

  constexpr std::array every_tier{HostTier::pinned, HostTier::pageable, HostTier::file};

  /// A pool and blocks with contents of their own, each with a slot.
  template <class B>
  struct Blocks {
    Blocks(HostPoolOptions options, std::vector<std::size_t> const& sizes, std::size_t gap = 0)
        : pool{bench.device, bench.order, with_folder(options), bench.io} {
      std::size_t all = 0;
      for (std::size_t const size : sizes) {
        all += size + gap;
      }
      std::byte* at = bench.reserve(all);
      for (unsigned i = 0; i < sizes.size(); ++i) {
        put_pattern(at, sizes[i], i);
        requests.push_back({.slot = B::take(pool, sizes[i]), .device = at, .bytes = sizes[i]});
        requests.back().reservation = 1;
        at += sizes[i] + gap;
      }
    }

    [[nodiscard]] HostPoolOptions with_folder(HostPoolOptions options) const {
      options.file = bench.folder.path();
      return options;
    }
    void write_all() { pool.write_all(requests, bench.stream); }
    void read_all() { pool.read_all(requests, bench.stream); }
    void finish() {
      for (TransferRequest const& request : requests) {
        bench.order.synchronize(request.done.device_done);
        bench.order.synchronize(request.done.host_done);
      }
    }
    void wipe() {
      for (TransferRequest const& request : requests) {
        std::memset(request.device, 0xEE, request.bytes);
      }
    }
    void go_out_and_come_back() {
      write_all();
      finish();
      wipe();
      read_all();
      finish();
    }
    [[nodiscard]] bool is_back(std::size_t i) const {
      return has_pattern(requests[i].device, requests[i].bytes, static_cast<unsigned>(i));
    }
    [[nodiscard]] std::size_t wrong() const {
      std::size_t count = 0;
      for (std::size_t i = 0; i < requests.size(); ++i) {
        count += is_back(i) ? 0U : 1U;
      }
      return count;
    }
    [[nodiscard]] std::size_t count(TransferState state) const {
      std::size_t found = 0;
      for (TransferRequest const& request : requests) {
        found += request.state == state ? 1U : 0U;
      }
      return found;
    }

    B bench;
    typename B::pool_type pool;
    std::vector<TransferRequest> requests;
  };

  HostPoolOptions only(HostTier tier, std::size_t bytes) {
    HostPoolOptions options = Bench{}.options(tier, bytes);
    options.staging_bytes = 16 << 10;
    options.slab_bytes = bytes;
    return options;
  }

  }  // namespace

  TEST_CASE_TEMPLATE(
      "HostSwapPool: blocks swapped out in a batch come back in a batch, in every tier",
      B,
      Bench,
      SteppedBench) {
    // Small blocks, of which many share a chunk, and among them one larger than a chunk and one
    // larger than a batch.
    std::vector<std::size_t> sizes(40, 1000);
    sizes[7] = 4096;
    sizes[8] = 1;
    sizes[20] = 50'000;
    sizes[30] = (1 << 20) + 5;
    for (HostTier const tier : every_tier) {
      CAPTURE(static_cast<int>(tier));
      Blocks<B> blocks{only(tier, 4 << 20), sizes};

      blocks.write_all();
      CHECK(blocks.count(TransferState::enqueued) == sizes.size());
      blocks.finish();
      blocks.wipe();
      blocks.read_all();
      blocks.finish();

      CHECK(blocks.count(TransferState::enqueued) == sizes.size());
      CHECK(blocks.wrong() == 0);
      blocks.pool.check();
    }
  }

  TEST_CASE("HostSwapPool: a batch of mixed tiers is split where the tier changes") {
    auto options = Bench{}.options(3 * 4096, 3 * 4096, 6 * 4096);
    options.staging_bytes = 16 << 10;
    Blocks<SteppedBench> blocks{options, std::vector<std::size_t>(12, 4096)};
    std::swap(blocks.requests[1], blocks.requests[4]);
    auto const patterns = [&](std::size_t i) { return i == 1 ? 4U : i == 4 ? 1U : unsigned(i); };

    blocks.go_out_and_come_back();

    for (std::size_t i = 0; i < 12; ++i) {
      CAPTURE(i);
      CHECK(has_pattern(blocks.requests[i].device, 4096, patterns(i)));
    }
  }

  TEST_CASE("HostSwapPool: a batch of pinned transfers is one operation with one ticket") {
    Blocks<SteppedBench> blocks{
        only(HostTier::pinned, 1 << 20), std::vector<std::size_t>(100, 1000), 24};

    blocks.write_all();

    CHECK(blocks.bench.device.queued_ops(blocks.bench.stream) == 1);
    CHECK(blocks.bench.device.calls().copy_batches == 1);
    CHECK(blocks.bench.device.calls().copies_to_host == 100);
    for (TransferRequest const& request : blocks.requests) {
      CHECK(request.done.device_done == blocks.requests[0].done.device_done);
    }
  }

  TEST_CASE("HostSwapPool: pieces adjacent on both sides are one copy, within one reservation") {
    Blocks<SteppedBench> blocks{only(HostTier::pinned, 1 << 20),
                                std::vector<std::size_t>(64, 1024)};
    SUBCASE("all blocks in one reservation") {
      blocks.write_all();
      CHECK(blocks.bench.device.calls().copies_to_host == 1);
      CHECK(blocks.bench.device.calls().bytes_to_host == 64 * 1024);
    }
    SUBCASE("half of the blocks in another reservation") {
      for (std::size_t i = 32; i < 64; ++i) {
        blocks.requests[i].reservation = 2;
      }
      blocks.write_all();
      CHECK(blocks.bench.device.calls().copies_to_host == 2);
    }
    SUBCASE("blocks in unknown reservations") {
      for (TransferRequest& request : blocks.requests) {
        request.reservation = 0;
      }
      blocks.write_all();
      CHECK(blocks.bench.device.calls().copies_to_host == 64);
    }
    SUBCASE("slots in several slabs") {
      HostPoolOptions options = only(HostTier::pinned, 1 << 20);
      options.slab_bytes = 16 << 10;
      Blocks<SteppedBench> others{options, std::vector<std::size_t>(64, 1024)};
      others.write_all();
      CHECK(others.bench.device.calls().copies_to_host == 4);
    }
  }

  TEST_CASE("HostSwapPool: a batch to a slower tier shares a chunk and a file call") {
    Blocks<SteppedBench> blocks{only(HostTier::file, 1 << 20), std::vector<std::size_t>(16, 1024)};

    blocks.go_out_and_come_back();

    CHECK(blocks.wrong() == 0);
    CHECK(blocks.bench.device.calls().host_launches == 2);
    CHECK(blocks.bench.io.calls().writes == 1);
    CHECK(blocks.bench.io.calls().reads == 1);
  }

  TEST_CASE("HostSwapPool: direct I/O of many odd sizes returns the bytes written") {
    HostPoolOptions options = only(HostTier::file, 1 << 20);
    options.file_direct_io = true;
    std::vector<std::size_t> sizes;
    for (std::size_t i = 0; i < 60; ++i) {
      sizes.push_back(1 + i * 211 % 9000);
    }
    Blocks<Bench> blocks{options, sizes};

    blocks.go_out_and_come_back();

    CHECK(blocks.wrong() == 0);
  }

  TEST_CASE("HostSwapPool: a batch waits for what each of its ranges and slots must wait for") {
    for (HostTier const tier : every_tier) {
      for (std::uint64_t seed = 1; seed <= 10; ++seed) {
        CAPTURE(static_cast<int>(tier));
        CAPTURE(seed);
        Blocks<SteppedBench> blocks{only(tier, 1 << 20), std::vector<std::size_t>(8, 1000), 24};
        auto& bench = blocks.bench;
        auto const reader = bench.device.create_stream();
        auto const writer = bench.device.create_stream();
        std::byte* const old = bench.reserve(1000);
        blocks.write_all();
        blocks.finish();
        bench.device.stall(reader);
        Transfer const read = blocks.pool.read(blocks.requests[3].slot, old, 1000, reader);
        put_pattern(blocks.requests[3].device, 1000, 33);
        bench.device.fill(blocks.requests[5].device, 0x21, 1000, writer);
        blocks.requests[5].after = bench.order.mark(bench.order.index_of(writer));

        blocks.write_all();  // the device itself refuses it if it is not ordered

        bench.device.run_random(seed);
        // From a slower tier the bytes have been staged, and the slot is free.
        CHECK(bench.order.is_complete(blocks.requests[0].done.host_done) ==
              (tier != HostTier::pinned));
        bench.device.resume(reader);
        bench.device.run_random(seed);
        CHECK(bench.order.is_complete(read.device_done));
        CHECK(has_pattern(old, 1000, 3));
        blocks.finish();
        blocks.wipe();
        blocks.read_all();
        blocks.finish();
        CHECK(has_pattern(blocks.requests[3].device, 1000, 33));
        CHECK(blocks.requests[5].device[999] == std::byte{0x21});
        CHECK(blocks.is_back(7));
      }
    }
  }

  TEST_CASE("HostSwapPool: a large transfer that has to wait does not delay those before it") {
    Blocks<SteppedBench> blocks{only(HostTier::pinned, 2 << 20), {1000, 2000, 400'000, 3000}};
    auto& device = blocks.bench.device;
    auto const stalled = device.create_stream();
    device.fill(blocks.requests[2].device, 0x21, 400'000, stalled);
    blocks.requests[2].after = blocks.bench.order.mark(blocks.bench.order.index_of(stalled));
    device.stall(stalled);

    blocks.write_all();
    std::size_t const all = device.queued_ops(blocks.bench.stream);
    device.run_all();

    CHECK(device.queued_ops(blocks.bench.stream) == all - 1);  // the batch of the first two
    device.resume(stalled);
    device.run_all();
    CHECK(device.queued_ops(blocks.bench.stream) == 0);
  }

  TEST_CASE("HostSwapPool: if several transfers fail, each one has its own state") {
    // The first 8 MiB go in one batch, the rest in a second one.
    std::vector<std::size_t> const sizes(24, 512 << 10);
    for (std::uint64_t nth : {1U, 5U, 16U, 17U, 24U}) {
      CAPTURE(nth);
      Blocks<SteppedBench> blocks{only(HostTier::pinned, 16 << 20), sizes, 256};
      std::size_t const before = nth <= 16 ? 0 : 16;
      std::size_t const torn = nth <= 16 ? 16 : 8;
      blocks.write_all();
      blocks.finish();
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        put_pattern(blocks.requests[i].device, sizes[i], static_cast<unsigned>(i + 100));
      }
      blocks.bench.device.fail_copy(nth);

      CHECK_THROWS_AS(blocks.write_all(), DeviceError);

      CHECK(blocks.count(TransferState::enqueued) == before);
      CHECK(blocks.count(TransferState::torn) == torn);
      CHECK(blocks.count(TransferState::waiting) == sizes.size() - before - torn);
      blocks.finish();
      blocks.wipe();
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        CAPTURE(i);
        TransferRequest& request = blocks.requests[i];
        if (request.state == TransferState::torn) {
          CHECK_THROWS_AS((void)blocks.pool.read(
                              request.slot, request.device, request.bytes, blocks.bench.stream),
                          ContractViolation);
          blocks.pool.give_back(request.slot);
          continue;
        }
        bool const is_new = request.state == TransferState::enqueued;
        (void)blocks.pool.read(request.slot, request.device, request.bytes, blocks.bench.stream);
        blocks.bench.device.run_all();
        CHECK(has_pattern(
            request.device, request.bytes, static_cast<unsigned>(is_new ? i + 100 : i)));
      }
    }
  }

  TEST_CASE("HostSwapPool: a failed batch to a slower tier leaves chunk and slots usable") {
    for (HostTier const tier : {HostTier::pageable, HostTier::file}) {
      for (SimCall const call : {SimCall::copy, SimCall::launch_host, SimCall::record}) {
        for (bool const is_read : {false, true}) {
          CAPTURE(static_cast<int>(tier));
          CAPTURE(static_cast<int>(call));
          CAPTURE(is_read);
          Blocks<SteppedBench> blocks{only(tier, 1 << 20), std::vector<std::size_t>(30, 1000), 24};
          auto& bench = blocks.bench;
          blocks.write_all();
          blocks.finish();
          bench.device.fail(call, 1);

          CHECK_THROWS_AS(is_read ? blocks.read_all() : blocks.write_all(), DeviceError);
          CHECK(blocks.count(TransferState::enqueued) == 0);
          blocks.finish();

          // All transfers that failed can be repeated.
          for (std::size_t i = 0; i < 30; ++i) {
            put_pattern(blocks.requests[i].device, 1000, static_cast<unsigned>(i));
          }
          blocks.go_out_and_come_back();
          CHECK(blocks.wrong() == 0);
          for (TransferRequest const& request : blocks.requests) {
            blocks.pool.give_back(request.slot);
          }
          CHECK(blocks.pool.stats().tier(tier).used_bytes == 0);
        }
      }
    }
  }

  TEST_CASE("HostSwapPool: a refused transfer stops those after it, not those before") {
    for (HostTier const tier : every_tier) {
      CAPTURE(static_cast<int>(tier));
      Blocks<SteppedBench> blocks{only(tier, 1 << 20), std::vector<std::size_t>(10, 1000)};
      HostSlotId const good = blocks.requests[6].slot;
      SUBCASE("a stale slot id") {
        blocks.requests[6].slot = HostSlotId{};
      }
      SUBCASE("a slot that is too small") {
        blocks.requests[6].bytes = 5000;
      }
      CHECK_THROWS_AS(blocks.write_all(), ContractViolation);
      CHECK(blocks.count(TransferState::enqueued) == 6);
      CHECK(blocks.count(TransferState::waiting) == 4);

      blocks.requests[6].slot = good;
      blocks.requests[6].bytes = 1000;
      blocks.go_out_and_come_back();
      CHECK(blocks.wrong() == 0);
    }
  }

  TEST_CASE(
      "HostSwapPool: a slot named twice in a batch is written twice, in order, and read twice") {
    for (HostTier const tier : every_tier) {
      Blocks<SteppedBench> blocks{only(tier, 1 << 20), std::vector<std::size_t>(4, 1000), 24};
      blocks.requests[2].slot = blocks.requests[1].slot;

      blocks.go_out_and_come_back();

      CHECK(has_pattern(blocks.requests[1].device, 1000, 2));
      CHECK(has_pattern(blocks.requests[2].device, 1000, 2));
      CHECK(blocks.is_back(3));
    }
  }

  TEST_CASE("HostSwapPool: a failed shared file call is repeated piece by piece") {
    Blocks<SteppedBench> blocks{only(HostTier::file, 1 << 20), std::vector<std::size_t>(8, 1024)};
    blocks.bench.io.plant(
        {.write_error = EIO, .failing_from = 2048, .failing_to = 3072, .most_bytes = 1024});

    blocks.write_all();
    blocks.finish();

    CHECK(blocks.pool.stats().failed_writes == 1);
    CHECK(blocks.pool.stats().rescued_bytes == 1024);
    blocks.wipe();
    blocks.read_all();  // the third from memory, the others from the file
    blocks.finish();
    CHECK(blocks.wrong() == 0);
    blocks.pool.check();

    blocks.bench.io.plant(
        {.read_error = EIO, .failing_from = 5 * 1024, .failing_to = 6 * 1024, .most_bytes = 1024});
    blocks.wipe();
    blocks.read_all();
    blocks.finish();
    CHECK(blocks.wrong() == 1);
    CHECK(blocks.pool.stats().failed_reads == 1);
    CHECK_THROWS_AS(blocks.pool.check(blocks.requests[5].slot), FileTierError);
    CHECK_THROWS_AS(blocks.read_all(), FileTierError);
    CHECK(blocks.count(TransferState::enqueued) == 5);
  }
}
