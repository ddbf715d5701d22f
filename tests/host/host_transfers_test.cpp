// SPDX-License-Identifier: Apache-2.0
// HostTransfers: which device calls are made for requests. The bytes are tested with HostSwapPool.
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host/host_transfers.hpp>
#include <spillway/host_swap_pool.hpp>
#include <spillway/stream/stream_order.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <support/archetypes/batch_copy_archetype.hpp>
#include <support/archetypes/file_io_archetype.hpp>
#include <support/pool_bench.hpp>

using namespace spillway;
using spillway::testing::SteppedSimApi;

template class spillway::HostSwapPool<spillway::test::OneByOneArchetype,
                                      spillway::test::FileIoArchetype>;
template class spillway::HostSwapPool<spillway::test::BatchCopyArchetype,
                                      spillway::test::FileIoArchetype>;

namespace {

std::size_t allocations = 0;
bool is_counting = true;

/// A stepped simulation whose own allocations are not counted.
class UncountedSim : public SteppedSimApi {
  struct Pause {
    Pause() { is_counting = false; }
    ~Pause() { is_counting = true; }
  };

 public:
  using SteppedSimApi::SteppedSimApi;
  void copy(void* to, void const* from, std::size_t bytes, CopyKind kind, stream_type stream) {
    Pause const pause;
    SteppedSimApi::copy(to, from, bytes, kind, stream);
  }
  void copy_batch(std::span<void* const> to,
                  std::span<void const* const> from,
                  std::span<std::size_t const> sizes,
                  CopyKind kind,
                  stream_type stream) {
    Pause const pause;
    SteppedSimApi::copy_batch(to, from, sizes, kind, stream);
  }
  void launch_host(stream_type stream, HostFunction function, void* argument) {
    Pause const pause;
    SteppedSimApi::launch_host(stream, function, argument);
  }
  void record(event_type event, stream_type stream) {
    Pause const pause;
    SteppedSimApi::record(event, stream);
  }
  void wait(stream_type stream, event_type event) {
    Pause const pause;
    SteppedSimApi::wait(stream, event);
  }
  void synchronize(stream_type stream) {
    Pause const pause;
    SteppedSimApi::synchronize(stream);
  }
  void synchronize(event_type event) {
    Pause const pause;
    SteppedSimApi::synchronize(event);
  }
  event_type create_event() {
    Pause const pause;
    return SteppedSimApi::create_event();
  }
};

}  // namespace

// Not inlined: otherwise g++ sees `malloc` or `free` on one side of a pair only, and warns.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  allocations += is_counting ? 1U : 0U;
  if (void* const p = std::malloc(bytes); p != nullptr) {
    return p;
  }
  throw std::bad_alloc{};
}
[[gnu::noinline]] void operator delete(void* p) noexcept {
  std::free(p);
}
[[gnu::noinline]] void operator delete(void* p, std::size_t /*bytes*/) noexcept {
  std::free(p);
}

namespace {

using Bench = PoolBench<SteppedSimApi>;

constexpr std::array every_tier{HostTier::pinned, HostTier::pageable, HostTier::file};

/// A slot of 18 KiB in three pieces of 8, 8 and 2 KiB, and device memory to go with it.
struct Scattered {
  explicit Scattered(HostTier tier, std::size_t chunk_bytes = 4096) {
    HostPoolOptions options = bench.options(tier, 48 << 10);
    options.staging_bytes = chunk_bytes;
    pool.emplace(bench.device, bench.order, options, bench.io);
    std::vector<HostSlotId> ids;
    for (int i = 0; i < 6; ++i) {
      ids.push_back(Bench::take(*pool, 8 << 10));
    }
    for (std::size_t const i : {0U, 2U, 5U}) {
      pool->give_back(ids[i]);
    }
    slot = pool->try_take(bytes).value();
    put_pattern(block, bytes, 5);
  }

  static constexpr std::size_t bytes = 18 << 10;
  Bench bench;
  std::optional<Bench::pool_type> pool;
  std::byte* block = bench.reserve(bytes);
  HostSlotId slot{};
};

}  // namespace

TEST_SUITE("host_transfers") {
  TEST_CASE("HostTransfers: a single transfer makes the same calls as a batch of one") {
    for (HostTier const tier : every_tier) {
      CAPTURE(static_cast<int>(tier));
      Scattered single{tier};
      Scattered batch{tier};
      TransferRequest request{
          .slot = batch.slot, .device = batch.block, .bytes = Scattered::bytes, .reservation = 1};

      Transfer const done =
          single.pool->write(single.slot, single.block, Scattered::bytes, single.bench.stream);
      batch.pool->write_all({&request, 1}, batch.bench.stream);
      single.bench.device.run_all();
      batch.bench.device.run_all();
      CHECK(request.state == TransferState::enqueued);
      CHECK(request.done.device_done == done.device_done);
      CHECK(request.done.host_done == done.host_done);
      CHECK(single.bench.device.calls() == batch.bench.device.calls());

      (void)single.pool->read(single.slot, single.block, Scattered::bytes, single.bench.stream);
      batch.pool->read_all({&request, 1}, batch.bench.stream);
      single.bench.device.run_all();
      batch.bench.device.run_all();
      CHECK(single.bench.device.calls() == batch.bench.device.calls());
      CHECK(has_pattern(single.block, Scattered::bytes, 5));
      CHECK(has_pattern(batch.block, Scattered::bytes, 5));
    }
  }

  TEST_CASE("HostTransfers: the pieces of a scattered pinned slot are copied by one call") {
    Scattered now{HostTier::pinned};

    (void)now.pool->write(now.slot, now.block, Scattered::bytes, now.bench.stream);

    CHECK(now.bench.device.calls().copy_batches == 1);
    CHECK(now.bench.device.calls().copies_to_host == 3);
    CHECK(now.bench.device.queued_ops(now.bench.stream) == 1);
  }

  TEST_CASE("HostTransfers: the pieces of a scattered staged slot share chunks where they fit") {
    std::size_t chunk = 0;
    std::size_t chunks = 0;
    SUBCASE("all pieces share a chunk") {
      chunk = 20 << 10;
      chunks = 1;
    }
    SUBCASE("the last two pieces share a chunk") {
      chunk = 12 << 10;
      chunks = 2;
    }
    SUBCASE("no pieces share a chunk: each is split as if alone") {
      chunk = 4 << 10;
      chunks = 5;
    }
    for (HostTier const tier : {HostTier::pageable, HostTier::file}) {
      Scattered now{tier, chunk};

      (void)now.pool->write(now.slot, now.block, Scattered::bytes, now.bench.stream);
      CHECK(now.bench.device.calls().host_launches == chunks);
      now.bench.device.run_all();
      std::memset(now.block, 0, Scattered::bytes);
      (void)now.pool->read(now.slot, now.block, Scattered::bytes, now.bench.stream);
      CHECK(now.bench.device.calls().host_launches == 2 * chunks);
      now.bench.device.run_all();

      CHECK(has_pattern(now.block, Scattered::bytes, 5));
    }
  }

  TEST_CASE("HostTransfers: a scattered copy that fails halfway leaves the slot empty, a single "
            "copy does not") {
    Scattered now{HostTier::pinned};
    (void)now.pool->write(now.slot, now.block, Scattered::bytes, now.bench.stream);
    now.bench.device.run_all();
    now.bench.device.fail_copy(2);

    CHECK_THROWS_AS((void)now.pool->write(now.slot, now.block, Scattered::bytes, now.bench.stream),
                    DeviceError);

    CHECK_THROWS_AS((void)now.pool->read(now.slot, now.block, 1, now.bench.stream),
                    ContractViolation);
  }

  TEST_CASE("HostTransfers: a transfer allocates nothing once its lists have grown") {
    PoolBench<UncountedSim> bench;
    PoolBench<UncountedSim>::pool_type pool{
        bench.device, bench.order, bench.options(HostTier::pinned, 64 << 10), bench.io};
    std::byte* const block = bench.reserve(40'000);
    std::array<TransferRequest, 4> requests;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      requests[i] = {.slot = PoolBench<UncountedSim>::take(pool, 10'000),
                     .device = block + i * 10'000,
                     .bytes = 10'000};
    }
    auto const go_out_and_come_back = [&] {
      std::size_t const before = allocations;
      pool.write_all(requests, bench.stream);
      (void)pool.read(requests[0].slot, block, 10'000, bench.stream);
      return allocations - before;
    };
    CHECK(go_out_and_come_back() > 0);
    CHECK(go_out_and_come_back() == 0);
    bench.device.run_all();
  }

  TEST_CASE("HostTransfers: what waits for the staging chunks allocates nothing") {
    PoolBench<UncountedSim> bench;
    std::optional<PoolBench<UncountedSim>::pool_type> pool;
    pool.emplace(bench.device, bench.order, bench.options(HostTier::pageable, 64 << 10), bench.io);
    std::byte* const block = bench.reserve(10'000);
    HostSlotId const slot = PoolBench<UncountedSim>::take(*pool, 10'000);
    (void)pool->write(slot, block, 10'000, bench.stream);
    (void)pool->read(slot, block, 10'000, bench.stream);
    std::size_t const before = allocations;

    pool.reset();  // would free chunks that copies use if it could not allocate

    CHECK(allocations == before);
    CHECK(bench.device.queued_ops(bench.stream) == 0);
  }

  TEST_CASE(
      "HostTransfers: a slot with rescued bytes is split into the same file calls in any batch") {
    Bench bench;
    HostPoolOptions options = bench.options(HostTier::file, 64 << 10);
    options.staging_bytes = 8 << 10;
    Bench::pool_type pool{bench.device, bench.order, options, bench.io};
    std::byte* const block = bench.reserve(6000);
    std::array<TransferRequest, 3> requests;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      put_pattern(block + i * 2000, 2000, static_cast<unsigned>(i));
      requests[i] = {.slot = Bench::take(pool, 2000), .device = block + i * 2000, .bytes = 2000};
    }
    bench.io.plant({.write_error = EIO});
    pool.write_all(requests, bench.stream);
    bench.device.run_all();
    REQUIRE(pool.stats().rescued_bytes == 6000);
    std::memset(block, 0, 6000);

    std::swap(requests[0], requests[2]);
    pool.read_all(std::span{requests}.first(2), bench.stream);
    (void)pool.read(requests[2].slot, requests[2].device, 2000, bench.stream);
    bench.device.run_all();

    for (unsigned i = 0; i < 3; ++i) {
      CHECK(has_pattern(block + i * 2000, 2000, i));
    }
  }

  TEST_CASE("HostTransfers: a write of no bytes forgets no earlier use of the slot's memory") {
    constexpr std::size_t bytes = 4096;
    for (HostTier const tier : every_tier) {
      CAPTURE(static_cast<int>(tier));
      Bench bench;
      Bench::pool_type pool{bench.device, bench.order, bench.options(tier, bytes), bench.io};
      std::byte* const block = bench.reserve(bytes);
      put_pattern(block, bytes, 1);
      HostSlotId const before = Bench::take(pool, bytes);
      (void)pool.write(before, block, bytes, bench.stream);
      bench.device.run_all();
      std::memset(block, 0, bytes);
      (void)pool.read(before, block, bytes, bench.stream);
      pool.give_back(before);
      HostSlotId const slot = pool.try_take(bytes).value();
      (void)pool.write(slot, block, 0, bench.stream);
      pool.give_back(slot);

      CHECK(pool.trim_sync() == bytes);  // not before the read has run

      auto const reads = tier == HostTier::pinned ? bench.stream : bench.device.created.at(2);
      CHECK(bench.device.queued_ops(reads) == 0);
      bench.device.run_all();
      CHECK(has_pattern(block, bytes, 1));
    }
  }
}
