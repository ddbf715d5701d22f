// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/host/file_checksums.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/policy/codec/zero_bitmap.hpp>
#include <spillway/testing/faulty_file_io.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include <support/pool_bench.hpp>

using namespace spillway;
using spillway::detail::FileChecksums;
using spillway::testing::FaultyFileIo;
using spillway::testing::SteppedSimApi;

static_assert(FileChecksums::is_available);

namespace {

constexpr std::size_t unit = FileChecksums::unit_bytes;

/// A pool with a named file, which the test can open, too, and three written slots.
struct Bench {
  static constexpr std::size_t bytes = 10'000;  // three units, the last one not full

  explicit Bench(bool can_begin = false, bool has_checksums = true)
      : pools{{}, FaultyFileIo{can_begin}},
        path{pools.folder.path() / "swap"},
        pool{pools.device, pools.order, options(has_checksums), pools.io} {
    from = pools.reserve(bytes);
    to = pools.reserve(bytes);
    for (unsigned i = 0; i < 3; ++i) {
      slots.push_back(PoolBench<SteppedSimApi>::take(pool, bytes));
      write(i, i);
    }
  }

  [[nodiscard]] HostPoolOptions options(bool has_checksums) const {
    HostPoolOptions made = pools.options(HostTier::file, 64 << 10);
    made.file = path;
    made.file_checksums = has_checksums;
    return made;
  }
  void write(std::size_t slot, unsigned seed) {
    put_pattern(from, bytes, seed);
    (void)pool.write(slots[slot], from, bytes, pools.stream);
    pools.device.run_all();
  }
  [[nodiscard]] bool read_gives(std::size_t slot, unsigned seed, std::size_t first_bytes = bytes) {
    (void)pool.read(slots[slot], to, first_bytes, pools.stream);
    pools.device.run_all();
    return has_pattern(to, first_bytes, seed);
  }
  /// Changes one byte of the file.
  void corrupt(std::uint64_t offset) const {
    std::fstream file{path, std::ios::in | std::ios::out | std::ios::binary};
    file.seekg(static_cast<std::streamoff>(offset));
    auto const byte = static_cast<char>(file.get());
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(static_cast<char>(byte ^ 1));
    REQUIRE(file.good());
  }
  [[nodiscard]] std::string loss_of(std::size_t slot) {
    try {
      pool.check(slots[slot]);
    } catch (FileTierError const& error) {
      return error.what();
    }
    return {};
  }

  PoolBench<SteppedSimApi> pools;
  std::string path;
  PoolBench<SteppedSimApi>::pool_type pool;
  std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::vector<HostSlotId> slots;
};

}  // namespace

TEST_SUITE("file_checksums") {
  TEST_CASE("FileChecksums: detect a difference in each unit") {
    FileChecksums sums;
    sums.grow(200 * unit);
    std::vector<std::byte> data(150 * unit);
    put_pattern(data.data(), data.size(), 1);

    sums.note(data.data(), data.size(), 20 * unit);

    CHECK(sums.match(data.data(), data.size(), 20 * unit));
    CHECK(sums.match(data.data() + 100 * unit, unit, 120 * unit));
    CHECK_FALSE(sums.match(data.data() + 100 * unit, unit, 121 * unit));
    data[149 * unit + 7] ^= std::byte{1};
    CHECK_FALSE(sums.match(data.data(), data.size(), 20 * unit));
    CHECK(sums.match(data.data(), 149 * unit, 20 * unit));
  }

  TEST_CASE("FileChecksums: each unit by which the file grows has a checksum") {
    FileChecksums sums;
    std::vector<std::byte> data(4 * unit);
    put_pattern(data.data(), data.size(), 1);
    for (std::size_t units = 1; units <= 4; ++units) {
      sums.grow(units * unit);
      sums.note(data.data(), units * unit, 0);
      sums.grow((units - 1) * unit);  // which removes no checksum
      CHECK(sums.match(data.data(), units * unit, 0));
    }
  }

  TEST_CASE("HostSwapPool: a slot whose bytes changed in the file is lost, other slots are not") {
    for (bool const can_begin : {false, true}) {
      CAPTURE(can_begin);
      Bench now{can_begin};
      CHECK(now.pool.stats().is_file_checked);
      now.corrupt(3 * unit + unit + 99);  // of the second slot

      (void)now.read_gives(1, 1);

      std::string const loss = now.loss_of(1);
      CHECK(loss.find("reading 4096 bytes at offset 16384") != std::string::npos);
      CHECK(loss.find("they are not what was written there") != std::string::npos);
      CHECK(now.pool.stats().failed_reads == 1);
      CHECK_THROWS_AS((void)now.pool.read(now.slots[1], now.to, 1, now.pools.stream),
                      FileTierError);
      CHECK(now.read_gives(0, 0));
      CHECK(now.read_gives(2, 2));
      now.pool.check(now.slots[0]);
      now.pool.check(now.slots[2]);
    }
  }

  TEST_CASE("HostSwapPool: a changed slot is lost even if its codec would not notice") {
    for (bool const can_begin : {false, true}) {
      CAPTURE(can_begin);
      Bench now{can_begin};
      auto options = now.options(true);
      options.file += "2";
      now.path = options.file;
      PoolBench<SteppedSimApi>::pool_type pool{
          now.pools.device, now.pools.order, options, now.pools.io};
      std::size_t const block_bytes = 24'000;
      CodingId const coding = pool.coding<ZeroBitmap>();
      auto* const block = now.pools.reserve(block_bytes);
      std::memset(block, 1, block_bytes / 2);
      std::memset(block + block_bytes / 2, 0, block_bytes / 2);
      REQUIRE(pool.try_grow(block_bytes, coding));
      HostSlotId const slot = pool.try_take(block_bytes, coding).value();
      (void)pool.write(slot, block, block_bytes, now.pools.stream);
      now.pools.device.run_all();
      CHECK(pool.stats().encoded_stored_bytes < 13'500);
      now.corrupt(2 * unit);  // in an element

      (void)pool.read(slot, block, block_bytes, now.pools.stream);
      now.pools.device.run_all();

      CHECK_THROWS_WITH_AS(pool.check(slot),
                           doctest::Contains("they are not what was written there"),
                           FileTierError);
      CHECK(pool.stats().failed_reads == 1);
    }
  }

  TEST_CASE("HostSwapPool: if one file call reads several slots, only the corrupted one is lost") {
    Bench now{true};
    auto options = now.options(true);
    options.file += "2";
    options.staging_bytes = 16 << 10;
    PoolBench<SteppedSimApi>::pool_type pool{
        now.pools.device, now.pools.order, options, now.pools.io};
    now.path = options.file;
    std::byte* const blocks = now.pools.reserve(3 * unit);
    put_pattern(blocks, 3 * unit, 5);
    std::vector<TransferRequest> requests(3);
    for (std::size_t i = 0; i < 3; ++i) {
      requests[i] = {.slot = PoolBench<SteppedSimApi>::take(pool, unit),
                     .device = blocks + i * unit,
                     .bytes = unit};
    }
    pool.write_all(requests, now.pools.stream);
    now.pools.device.run_all();
    now.corrupt(unit + 1);

    std::size_t const reads = now.pools.io.calls().reads;
    pool.read_all(requests, now.pools.stream);
    now.pools.device.run_all();

    CHECK(now.pools.io.calls().reads == reads + 1 + 3);  // together, then one by one
    CHECK(pool.takes_bytes(requests[0].slot));
    CHECK_FALSE(pool.takes_bytes(requests[1].slot));
    CHECK(pool.takes_bytes(requests[2].slot));
  }

  TEST_CASE("HostSwapPool: slots that are rewritten or partly read pass the check") {
    Bench now;
    CHECK(now.read_gives(0, 0, 5000));
    now.write(0, 7);
    CHECK(now.read_gives(0, 7));
    CHECK(now.read_gives(0, 7, 1));
    now.pool.check(now.slots[0]);
  }

  TEST_CASE("HostSwapPool: bytes kept in memory after a failed file write are not checked") {
    Bench now;
    now.pools.io.plant({.write_error = 28, .failing_from = 0, .failing_to = 1});
    now.write(0, 7);
    CHECK(now.pool.stats().rescued_bytes == unit);
    CHECK(now.read_gives(0, 7));
    now.pool.check(now.slots[0]);
  }

  TEST_CASE("HostSwapPool: without checksums a corrupted slot is not noticed") {
    Bench now{false, false};
    CHECK_FALSE(now.pool.stats().is_file_checked);
    now.corrupt(5);

    CHECK_FALSE(now.read_gives(0, 0));

    now.pool.check(now.slots[0]);
  }
}
