// SPDX-License-Identifier: Apache-2.0
#include <spillway/host/slot_codecs.hpp>
#include <spillway/host_swap_pool.hpp>
#include <spillway/policy/codec/as_bfloat16.hpp>
#include <spillway/policy/codec/identity.hpp>
#include <spillway/policy/codec/kernel_slot.hpp>
#include <spillway/policy/codec/zero_bitmap.hpp>
#include <spillway/testing/faulty_file_io.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <ios>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include <support/planes_on_host.hpp>
#include <support/pool_bench.hpp>
#include <support/stripes_on_host.hpp>

TEST_SUITE("slot_codecs") {
  namespace {

  using namespace spillway;
  using namespace spillway::literals;
  using spillway::test::AsBfloat16OnStream;
  using spillway::test::PlanesOnStream;
  using spillway::test::ZeroBitmapOnStream;

  using Bench = PoolBench<testing::SteppedSimApi>;
  using Pool = Bench::pool_type;

  /// A device whose memory the host cannot address, like a GPU.
  struct RemoteApi : testing::SteppedSimApi {
    using testing::SteppedSimApi::BasicSimApi;
    [[maybe_unused]] static constexpr bool is_addressable = false;
  };
  using RemoteBench = PoolBench<RemoteApi>;
  using RemotePool = RemoteBench::pool_type;
  constexpr HostTier staged_tiers[] = {HostTier::pageable, HostTier::file};
  using Faults = testing::FaultyFileIo::Faults;

  /// Floating-point numbers, of which every `period`-th is not 0.
  void put_sparse(std::byte* at, std::size_t bytes, std::size_t period) {
    for (std::size_t i = 0; i < bytes / 4; ++i) {
      float const x = i % period == 0 ? 1.0F + static_cast<float>(i) : 0.0F;
      std::memcpy(at + 4 * i, &x, 4);
    }
  }

  template <class P>
  [[nodiscard]] HostSlotId take(P& pool, std::size_t bytes, CodingId coding) {
    auto id = pool.try_take(bytes, coding);
    if (!id && pool.try_grow(bytes, coding)) {
      id = pool.try_take(bytes, coding);
    }
    REQUIRE(id.has_value());
    return *id;
  }

  [[nodiscard]] std::vector<std::byte> copy_of(std::byte const* data, std::size_t bytes) {
    return {data, data + bytes};
  }

  }  // namespace

  TEST_CASE("HostSwapPool: any number of tags each have their own coding of a codec") {
    Bench bench;
    Pool pool{bench.device, bench.order, bench.options(HostTier::pinned, 1_MiB), bench.io};
    std::set<CodingId> names;
    for (std::uint64_t tag = 0; tag < 20'000; ++tag) {  // a linear search would take a minute
      CodingId const name = pool.coding<ZeroBitmap>(tag);
      names.insert(name);
      names.insert(pool.coding<AsBfloat16>(tag));
      REQUIRE(name == pool.coding<ZeroBitmap>(tag));
    }
    CHECK(names.size() == 40'000);
  }

  TEST_CASE("HostSwapPool: a slot with a codec shrinks to its encoded bytes") {
    for (HostTier const tier : {HostTier::pinned, HostTier::pageable, HostTier::file}) {
      CAPTURE(static_cast<int>(tier));
      Bench bench;
      Pool pool{bench.device, bench.order, bench.options(tier, 1_MiB), bench.io};
      std::size_t const bytes = 200'000;
      auto* const block = bench.reserve(bytes);
      put_sparse(block, bytes, 4);
      auto const expected = copy_of(block, bytes);

      HostSlotId const slot = take(pool, bytes, pool.coding<ZeroBitmap>());
      CHECK(pool.size_bytes(slot) >= bytes);  // the worst case
      static_cast<void>(pool.write(slot, block, bytes, bench.stream));
      CHECK(pool.size_bytes(slot) >= bytes);  // nothing has run
      bench.device.run_all();
      CHECK(pool.size_bytes(slot) < bytes / 4 + bytes / 16);
      CHECK(pool.stats().tier(tier).used_bytes == pool.size_bytes(slot));
      CHECK(pool.stats().encoded_raw_bytes == bytes);
      CHECK(pool.stats().encoded_stored_bytes <= pool.size_bytes(slot));
      CHECK(pool.stats().encoded_stored_bytes + granule_bytes > pool.size_bytes(slot));

      // Other slots can use the bytes that it does not need at once.
      auto* const other = bench.reserve(bytes);
      put_pattern(other, bytes, 5);
      HostSlotId const second = take(pool, bytes, {});
      static_cast<void>(pool.write(second, other, bytes, bench.stream));
      std::memset(block, 1, bytes);
      static_cast<void>(pool.read(slot, block, bytes, bench.stream));
      static_cast<void>(pool.read(second, other, bytes, bench.stream));
      bench.device.run_all();
      pool.check(slot);
      CHECK(copy_of(block, bytes) == expected);
      CHECK(has_pattern(other, bytes, 5));
      pool.give_back(slot);
      pool.give_back(second);
      CHECK(pool.stats().tier(tier).used_bytes == 0);
    }
  }

  TEST_CASE("HostSwapPool: a size for which the room cannot be counted gets no slot") {
    constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
    constexpr std::size_t stripe = 64_KiB + 16;  // with its header
    for (HostTier const tier : {HostTier::pinned, HostTier::pageable, HostTier::file}) {
      Bench bench;
      Pool pool{bench.device, bench.order, bench.options(tier, 1_MiB), bench.io};
      REQUIRE(pool.try_grow(256_KiB));
      for (CodingId const coding : {pool.coding<ZeroBitmap>(),
                                    pool.coding<AsBfloat16>(),
                                    pool.coding<ZeroBitmapOnStream>(),
                                    pool.coding<PlanesOnStream>()}) {
        for (std::size_t const bytes : {most, most - 20'000, (most / stripe + 1) * 64_KiB}) {
          CAPTURE(bytes);
          CHECK_FALSE(pool.try_take(bytes, coding).has_value());
          CHECK_FALSE(pool.may_take(bytes, coding));
          CHECK_FALSE(pool.try_grow(bytes, coding));
        }
      }
    }
  }

  TEST_CASE("HostSwapPool: AsBfloat16 needs half the room from the start") {
    Bench bench;
    Pool pool{bench.device, bench.order, bench.options(HostTier::pinned, 36_KiB), bench.io};
    std::size_t const bytes = 64_KiB;
    auto* const block = bench.reserve(bytes);
    put_sparse(block, bytes, 1);
    CHECK_FALSE(pool.try_grow(bytes));
    HostSlotId const slot = take(pool, bytes, pool.coding<AsBfloat16>());
    static_cast<void>(pool.write(slot, block, bytes, bench.stream));
    bench.device.run_all();
    std::memset(block, 1, bytes);
    // Only the first bytes: the last stripe of these is decoded in part.
    static_cast<void>(pool.read(slot, block, 1000, bench.stream));
    bench.device.run_all();
    float x = 0;
    std::memcpy(&x, block + 996, 4);
    CHECK(x == 250.0F);
    CHECK(block[1000] == std::byte{1});
    pool.give_back(slot);
  }

  TEST_CASE("HostSwapPool: blocks that a codec does not make smaller are stored unencoded") {
    Bench bench;
    Pool pool{bench.device, bench.order, bench.options(HostTier::pinned, 4_MiB), bench.io};
    std::size_t const bytes = 100'000;
    auto* const block = bench.reserve(bytes);
    put_pattern(block, bytes, 1);
    CodingId const coding = pool.coding<ZeroBitmap>(7);
    auto const encodes = [&] {
      std::uint64_t const before = pool.stats().encoded_raw_bytes;
      HostSlotId const slot = take(pool, bytes, coding);
      static_cast<void>(pool.write(slot, block, bytes, bench.stream));
      bench.device.run_all();
      CHECK(pool.size_bytes(slot) <= bytes + 2 * 16 + granule_bytes);
      static_cast<void>(pool.read(slot, block, bytes, bench.stream));
      bench.device.run_all();
      pool.give_back(slot);
      return pool.stats().encoded_raw_bytes != before;
    };
    CHECK(encodes());
    CHECK(pool.stats().codecs_given_up == 0);
    CHECK(encodes());
    CHECK(pool.stats().codecs_given_up == 1);
    CHECK(pool.stored_share(coding) == 1);
    for (int i = 0; i < 63; ++i) {
      CHECK_FALSE(encodes());  // given up for this tag
    }
    CHECK(pool.coding<ZeroBitmap>(7) == coding);
    CHECK(pool.coding<ZeroBitmap>(8) != coding);
    CHECK(encodes());  // tried again
    CHECK_FALSE(encodes());
    CHECK(has_pattern(block, bytes, 1));

    put_sparse(block, bytes, 4);
    for (int i = 0; i < 62; ++i) {
      CHECK_FALSE(encodes());
    }
    CHECK(encodes());  // and now it pays
    CHECK(encodes());
    CHECK(pool.stats().codecs_given_up == 0);
    CHECK(pool.stored_share(coding) < 1);
  }

  TEST_CASE("HostSwapPool: a codec that saves less than an eighth is given up") {
    Bench bench;
    Pool pool{bench.device, bench.order, bench.options(HostTier::pinned, 4_MiB), bench.io};
    std::size_t const bytes = 128_KiB;
    auto* const block = bench.reserve(bytes);
    auto const is_given_up = [&](std::size_t period) {  // of zeros; a map takes 1/32 of the bytes
      float const x = 1;
      for (std::size_t i = 0; i < bytes / 4; ++i) {
        i % period == 0 ? std::memset(block + 4 * i, 0, 4) : std::memcpy(block + 4 * i, &x, 4);
      }
      std::size_t const before = pool.stats().codecs_given_up;
      for (int i = 0; i < 2; ++i) {
        HostSlotId const slot = take(pool, bytes, pool.coding<ZeroBitmap>(period));
        static_cast<void>(pool.write(slot, block, bytes, bench.stream));
        bench.device.run_all();
        CHECK(pool.size_bytes(slot) < bytes - bytes / 16);
        pool.give_back(slot);
      }
      return pool.stats().codecs_given_up != before;
    };

    CHECK(is_given_up(8));        // 9 % smaller
    CHECK_FALSE(is_given_up(6));  // 13 %
  }

  TEST_CASE("HostSwapPool: small blocks and Identity use no codec") {
    Bench bench;
    Pool pool{bench.device, bench.order, bench.options(HostTier::pinned, 1_MiB), bench.io};
    auto* const block = bench.reserve(4_KiB);
    std::size_t const bytes = 4_KiB - 4;
    put_sparse(block, bytes, 4);
    CHECK(pool.coding<Identity>() == CodingId{});
    HostSlotId const slot = take(pool, bytes, pool.coding<AsBfloat16>());
    auto const expected = copy_of(block, bytes);
    static_cast<void>(pool.write(slot, block, bytes, bench.stream));
    static_cast<void>(pool.read(slot, block, bytes, bench.stream));
    bench.device.run_all();
    CHECK(copy_of(block, bytes) == expected);
    CHECK(pool.stats().encoded_raw_bytes == 0);
    CHECK(pool.takes_bytes(slot, pool.coding<AsBfloat16>()));
    CHECK_FALSE(pool.takes_bytes(slot));  // its owner has another codec now
    pool.give_back(slot);
  }

  TEST_CASE("HostSwapPool: a slot with a codec can be written once") {
    Bench bench;
    Pool pool{bench.device, bench.order, bench.options(HostTier::pinned, 1_MiB), bench.io};
    auto* const block = bench.reserve(64_KiB);
    put_sparse(block, 64_KiB, 4);
    CodingId const coding = pool.coding<ZeroBitmap>();
    HostSlotId const slot = take(pool, 64_KiB, coding);
    CHECK(pool.takes_bytes(slot, coding));
    bench.device.fail(SimCall::launch_host, 1);
    CHECK_THROWS_AS(static_cast<void>(pool.write(slot, block, 64_KiB, bench.stream)), DeviceError);
    CHECK(pool.takes_bytes(slot, coding));  // nothing was enqueued
    static_cast<void>(pool.write(slot, block, 64_KiB, bench.stream));
    CHECK_FALSE(pool.takes_bytes(slot, coding));
    CHECK_THROWS_AS(static_cast<void>(pool.write(slot, block, 64_KiB, bench.stream)),
                    ContractViolation);
    bench.device.run_all();
    CHECK_THROWS_AS(static_cast<void>(pool.write(slot, block, 1000, bench.stream)),
                    ContractViolation);
    bench.device.fail(SimCall::launch_host, 1);
    CHECK_THROWS_AS(static_cast<void>(pool.read(slot, block, 64_KiB, bench.stream)), DeviceError);
    static_cast<void>(pool.read(slot, block, 64_KiB, bench.stream));
    pool.give_back(slot);  // its bytes are still to be read
    bench.device.run_all();
    CHECK(pool.stats().tier(HostTier::pinned).used_bytes == 0);
    float x = 0;
    std::memcpy(&x, block + 16, 4);
    CHECK(x == 5.0F);
  }

  TEST_CASE("HostSwapPool: a slot given back before it was written returns all its bytes") {
    Bench bench;
    Pool pool{bench.device, bench.order, bench.options(HostTier::pinned, 1_MiB), bench.io};
    auto* const block = bench.reserve(64_KiB);
    put_sparse(block, 64_KiB, 4);
    HostSlotId const slot = take(pool, 64_KiB, pool.coding<ZeroBitmap>());
    static_cast<void>(pool.write(slot, block, 64_KiB, bench.stream));
    pool.give_back(slot);
    HostSlotId const next = take(pool, 64_KiB, {});
    static_cast<void>(pool.write(next, block, 64_KiB, bench.stream));
    bench.device.run_all();
    CHECK(pool.size_bytes(next) == 64_KiB);
    CHECK(pool.stats().encoded_raw_bytes == 0);  // nobody could read it
    pool.give_back(next);
  }

  TEST_CASE("HostSwapPool: damaged encoded bytes are detected before they are read back") {
    std::size_t const bytes = 150'000;
    struct Damage {
      std::size_t at;
      std::uint32_t bits;
    };
    // In the headers of the first two stripes: their bytes, what is stored of them and their place.
    // In that of the last one: more stored bytes than the slot has. Then a bit in the bitmap.
    std::size_t const second = 16 + 2048 + 65536 / 4;
    std::size_t const last = 2 * second;
    std::vector<Damage> const all{{0, 1},
                                  {0, 0x10000},
                                  {4, 1},
                                  {4, 0x00FF0000},
                                  {4, 0x80000000},
                                  {8, 1},
                                  {second, 4},
                                  {second + 4, 8},
                                  {second + 12, 1},
                                  {last + 4, 0x800},
                                  {16, 2}};
    auto const check = [&](HostTier tier, Damage const& damage) {
      CAPTURE(static_cast<int>(tier));
      CAPTURE(damage.at);
      CAPTURE(damage.bits);
      Bench bench;
      HostPoolOptions options = bench.options(tier, 1_MiB);
      options.file = (bench.folder.path() / "swap").string();
      Pool pool{bench.device, bench.order, options, bench.io};
      auto* const block = bench.reserve(bytes);
      put_sparse(block, bytes, 4);
      CodingId const coding = pool.coding<ZeroBitmap>();
      HostSlotId const slot = take(pool, bytes, coding);
      HostSlotId const healthy = take(pool, bytes, coding);
      static_cast<void>(pool.write(slot, block, bytes, bench.stream));
      static_cast<void>(pool.write(healthy, block, bytes, bench.stream));
      bench.device.run_all();
      std::uint32_t bits = 0;
      if (tier == HostTier::file) {
        std::fstream file{options.file, std::ios::binary | std::ios::in | std::ios::out};
        file.seekg(static_cast<std::streamoff>(damage.at));
        file.read(reinterpret_cast<char*>(&bits), 4);
        bits ^= damage.bits;
        file.seekp(static_cast<std::streamoff>(damage.at));
        file.write(reinterpret_cast<char const*>(&bits), 4);
        REQUIRE(file.good());
      } else {
        std::byte* const place = bench.device.pinned.front() + damage.at;
        std::memcpy(&bits, place, 4);
        bits ^= damage.bits;
        std::memcpy(place, &bits, 4);
      }

      static_cast<void>(pool.read(slot, block, bytes, bench.stream));
      bench.device.run_all();
      CHECK_THROWS_WITH_AS(pool.check(slot), doctest::Contains("cannot be decoded"), FileTierError);
      CHECK_THROWS_AS(static_cast<void>(pool.read(slot, block, bytes, bench.stream)),
                      FileTierError);
      CHECK(pool.stats().failed_reads == 1);
      static_cast<void>(pool.read(healthy, block, bytes, bench.stream));
      bench.device.run_all();
      pool.check(healthy);
      pool.give_back(slot);
      pool.give_back(healthy);
    };
    for (Damage const& damage : all) {
      check(HostTier::pinned, damage);
      check(HostTier::file, damage);
    }
  }

  TEST_CASE(
      "HostSwapPool: encoded bytes are read from the file, or from memory after a failed write") {
    struct Case {
      std::string what;
      Faults when_writing;
      Faults when_reading;
      std::size_t failed_writes;
    };
    // The encoded block fills parts of 4 KiB, 7 and a shorter one.
    std::vector<Case> const all{
        {"nothing fails", {}, {}, 0},
        {"short counts, interrupted",
         {.most_bytes = 1000, .interrupt_every = 3},
         {.most_bytes = 999, .interrupt_every = 2},
         0},
        {"a part is refused",
         {.write_error = EIO, .failing_from = 4_KiB, .failing_to = 8_KiB},
         {.read_error = EIO, .failing_from = 4_KiB, .failing_to = 8_KiB},
         1},
        {"the disk is full after 12 KiB",
         {.write_error = ENOSPC, .failing_from = 12_KiB},
         {.read_error = EIO, .failing_from = 12_KiB},
         5},
        {"the disk is full", {.write_error = ENOSPC}, {.is_truncated = true}, 8}};
    std::size_t const bytes = 110'000;
    for (Case const& each : all) {
      for (std::size_t const chunk_bytes : {4_KiB, 16_KiB}) {  // one part or four
        for (bool const can_begin : {false, true}) {
          for (bool const is_direct : {false, true}) {  // where the file system can do that
            CAPTURE(each.what);
            CAPTURE(chunk_bytes);
            CAPTURE(can_begin);
            CAPTURE(is_direct);
            Bench bench{{}, testing::FaultyFileIo{can_begin}};
            HostPoolOptions options = bench.options(HostTier::file, 1_MiB);
            options.staging_bytes = chunk_bytes;
            options.file_direct_io = is_direct && each.when_writing.most_bytes >= 4_KiB;
            Pool pool{bench.device, bench.order, options, bench.io};
            auto* const block = bench.reserve(bytes);
            put_sparse(block, bytes, 4);
            auto const expected = copy_of(block, bytes);
            HostSlotId const slot = take(pool, bytes, pool.coding<ZeroBitmap>());

            bench.io.plant(each.when_writing);
            static_cast<void>(pool.write(slot, block, bytes, bench.stream));
            bench.device.run_all();
            CHECK(pool.stats().failed_writes == each.failed_writes);
            CHECK(pool.stats().tier(HostTier::file).is_failed == (each.failed_writes > 0));
            CHECK(pool.stats().encoded_stored_bytes < bytes / 3);
            CHECK(pool.stats().tier(HostTier::file).used_bytes < bytes / 3 + 4_KiB);

            bench.io.plant(each.when_reading);
            for (std::size_t const wanted : {bytes, std::size_t{70'000}}) {
              std::memset(block, 1, bytes);
              static_cast<void>(pool.read(slot, block, wanted, bench.stream));
              bench.device.run_all();
              pool.check(slot);
              CHECK(copy_of(block, wanted) == copy_of(expected.data(), wanted));
            }
            CHECK(pool.stats().failed_reads == 0);
            pool.give_back(slot);
            CHECK(pool.stats().rescued_bytes == 0);
          }
        }
      }
    }
  }

  TEST_CASE("HostSwapPool: encoded bytes that cannot be read are lost, other slots are not") {
    std::size_t const bytes = 110'000;
    for (bool const can_begin : {false, true}) {
      for (bool const is_truncated : {false, true}) {
        CAPTURE(can_begin);
        CAPTURE(is_truncated);
        Bench bench{{}, testing::FaultyFileIo{can_begin}};
        Pool pool{bench.device, bench.order, bench.options(HostTier::file, 1_MiB), bench.io};
        auto* const block = bench.reserve(bytes);
        put_sparse(block, bytes, 4);
        CodingId const coding = pool.coding<ZeroBitmap>();
        HostSlotId const slot = take(pool, bytes, coding);
        HostSlotId const healthy = take(pool, bytes, coding);
        static_cast<void>(pool.write(slot, block, bytes, bench.stream));
        static_cast<void>(pool.write(healthy, block, bytes, bench.stream));
        bench.device.run_all();

        is_truncated
            ? bench.io.plant({.is_truncated = true})
            : bench.io.plant({.read_error = EIO, .failing_from = 8_KiB, .failing_to = 12_KiB});
        static_cast<void>(pool.read(slot, block, bytes, bench.stream));
        bench.device.run_all();
        CHECK_THROWS_WITH_AS(pool.check(slot), doctest::Contains("reading 4096"), FileTierError);
        CHECK(pool.stats().failed_reads == 1);

        bench.io.plant({});
        static_cast<void>(pool.read(healthy, block, bytes, bench.stream));
        bench.device.run_all();
        pool.check(healthy);
        pool.give_back(slot);
        pool.give_back(healthy);
      }
    }
  }

  TEST_CASE("HostSwapPool: a full disk has no room for an encoded slot either") {
    Bench bench;
    Pool pool{bench.device, bench.order, bench.options(HostTier::file, 1_MiB), bench.io};
    bench.io.plant({.allocate_error = ENOSPC});
    CHECK_FALSE(pool.try_grow(64_KiB, pool.coding<ZeroBitmap>()));
    bench.io.plant({});
    CHECK(pool.try_grow(64_KiB, pool.coding<ZeroBitmap>()));
  }

  TEST_CASE("HostSwapPool: a codec on a stream shrinks pinned slots, scattered ones, too") {
    Bench bench;
    Pool pool{bench.device, bench.order, bench.options(HostTier::pinned, 1_MiB), bench.io};
    std::size_t const bytes = 200'000;
    auto* const block = bench.reserve(bytes);
    put_sparse(block, bytes, 4);
    auto const expected = copy_of(block, bytes);
    CodingId const coding = pool.coding<ZeroBitmapOnStream>();

    std::vector<HostSlotId> between;  // every second one is given back, so the room is scattered
    for (int i = 0; i < 40; ++i) {
      between.push_back(take(pool, 16_KiB, {}));
    }
    for (std::size_t i = 0; i < between.size(); i += 2) {
      pool.give_back(between[i]);
    }
    HostSlotId const slot = take(pool, bytes, coding);
    CHECK(pool.size_bytes(slot) >= bytes);
    static_cast<void>(pool.write(slot, block, bytes, bench.stream));
    bench.device.run_all();
    CHECK(pool.size_bytes(slot) < bytes / 4 + bytes / 16);
    CHECK(pool.stats().encoded_raw_bytes == bytes);
    CHECK(pool.stored_share(coding) < 0.35);
    CHECK_FALSE(pool.takes_bytes(slot, coding));
    for (std::size_t const wanted : {bytes, std::size_t{70'001}}) {
      std::memset(block, 1, bytes);
      static_cast<void>(pool.read(slot, block, wanted, bench.stream));
      bench.device.run_all();
      pool.check(slot);
      CHECK(copy_of(block, wanted) == copy_of(expected.data(), wanted));
      CHECK(block[bytes - 1] == (wanted == bytes ? expected.back() : std::byte{1}));
    }
    pool.give_back(slot);
  }

  TEST_CASE(
      "HostSwapPool: a codec on a stream is not used in tiers that the device cannot address") {
    for (HostTier const tier : {HostTier::pageable, HostTier::file}) {
      CAPTURE(static_cast<int>(tier));
      Bench bench;
      Pool pool{bench.device, bench.order, bench.options(tier, 64_KiB), bench.io};
      auto* const block = bench.reserve(64_KiB);
      put_sparse(block, 64_KiB, 4);
      auto const expected = copy_of(block, 64_KiB);
      CodingId const coding = pool.coding<AsBfloat16OnStream>();
      CHECK_FALSE(pool.try_grow(100_KiB, coding));  // half of it would have fitted
      HostSlotId const slot = take(pool, 64_KiB, coding);
      CHECK(pool.may_lose_bytes(slot) == (tier == HostTier::file));
      static_cast<void>(pool.write(slot, block, 64_KiB, bench.stream));
      static_cast<void>(pool.read(slot, block, 64_KiB, bench.stream));
      bench.device.run_all();
      CHECK(copy_of(block, 64_KiB) == expected);
      CHECK(pool.stats().encoded_raw_bytes == 0);
      pool.give_back(slot);
    }
  }

  TEST_CASE("HostSwapPool: if a codec on a stream fails halfway, only its slot is lost") {
    std::size_t const bytes = 64_KiB;
    for (std::uint64_t call = 1; call <= 4; ++call) {  // three kernels, and a note of the length
      CAPTURE(call);
      Bench bench;
      Pool pool{bench.device, bench.order, bench.options(HostTier::pinned, 1_MiB), bench.io};
      auto* const block = bench.reserve(bytes);
      put_sparse(block, bytes, 4);
      auto const expected = copy_of(block, bytes);
      CodingId const coding = pool.coding<ZeroBitmapOnStream>();
      HostSlotId const torn = take(pool, bytes, coding);
      HostSlotId const slot = take(pool, bytes, coding);
      bench.device.fail(SimCall::launch_host, call);
      CHECK_THROWS_AS(static_cast<void>(pool.write(torn, block, bytes, bench.stream)), DeviceError);
      CHECK_FALSE(pool.takes_bytes(torn, coding));
      CHECK_THROWS_AS(static_cast<void>(pool.read(torn, block, bytes, bench.stream)),
                      ContractViolation);
      pool.give_back(torn);  // enqueued work may still write to it
      HostSlotId const next = take(pool, bytes, {});

      static_cast<void>(pool.write(slot, block, bytes, bench.stream));
      static_cast<void>(pool.write(next, block, bytes, bench.stream));
      std::size_t const reads = call <= 2 ? call : 0;  // a kernel, and a note of the result
      if (reads != 0) {
        bench.device.fail(SimCall::launch_host, reads);
        CHECK_THROWS_AS(static_cast<void>(pool.read(slot, block, bytes, bench.stream)),
                        DeviceError);
      }
      bench.device.run_all();
      for (HostSlotId const healthy : {slot, next}) {
        std::memset(block, 1, bytes);
        static_cast<void>(pool.read(healthy, block, bytes, bench.stream));
        bench.device.run_all();
        pool.check(healthy);
        CHECK(copy_of(block, bytes) == expected);
        pool.give_back(healthy);
      }
      CHECK(pool.stats().tier(HostTier::pinned).used_bytes == 0);
    }
  }

  TEST_CASE("HostSwapPool: transfers on different streams share the scratch memory of a codec") {
    Bench bench;
    Pool pool{bench.device, bench.order, bench.options(HostTier::pinned, 1_MiB), bench.io};
    CodingId const coding = pool.coding<PlanesOnStream>();
    std::size_t const bytes = 150'000;
    std::array<SimStream, 2> const streams{bench.stream, bench.device.create_stream()};
    std::array<std::byte*, 2> blocks{};
    std::array<HostSlotId, 2> slots{};
    std::array<std::vector<std::byte>, 2> expected;
    for (std::size_t i = 0; i < 2; ++i) {
      blocks[i] = bench.reserve(bytes);
      put_sparse(blocks[i], bytes, 300 + i);
      expected[i] = copy_of(blocks[i], bytes);
      slots[i] = take(pool, bytes, coding);
      static_cast<void>(pool.write(slots[i], blocks[i], bytes, streams[i]));
    }
    bench.device.run_all();
    CHECK(pool.stats().encoded_stored_bytes < 2 * bytes / 8);
    for (std::size_t i = 0; i < 2; ++i) {
      std::memset(blocks[i], 1, bytes);
      static_cast<void>(pool.read(slots[i], blocks[i], bytes, streams[i]));
    }
    bench.device.run_all();
    for (std::size_t i = 0; i < 2; ++i) {
      pool.check(slots[i]);
      CHECK(copy_of(blocks[i], bytes) == expected[i]);
      pool.give_back(slots[i]);
    }
    bench.order.retire(streams[1]);
    bench.device.destroy_stream(streams[1]);
  }

  TEST_CASE("HostSwapPool: a codec is not used if the device has no scratch memory for it") {
    Bench bench;
    Pool pool{bench.device, bench.order, bench.options(HostTier::pinned, 1_MiB), bench.io};
    bench.device.fail(SimCall::reserve, 1);
    CHECK_THROWS_WITH_AS(static_cast<void>(pool.coding<PlanesOnStream>()),
                         doctest::Contains("A codec needs device memory to work in"),
                         OutOfDeviceMemory);
    CHECK(pool.coding<PlanesOnStream>() != CodingId{});
  }

  TEST_CASE("HostSwapPool: damage to what a codec on a stream wrote is detected") {
    std::size_t const bytes = 100'000;
    for (std::size_t const at : {0UL, 15UL, 32UL, 40UL, 32UL + 16 * 7}) {
      CAPTURE(at);
      Bench bench;
      Pool pool{bench.device, bench.order, bench.options(HostTier::pinned, 1_MiB), bench.io};
      auto* const block = bench.reserve(bytes);
      put_sparse(block, bytes, 4);
      HostSlotId const slot = take(pool, bytes, pool.coding<ZeroBitmapOnStream>());
      static_cast<void>(pool.write(slot, block, bytes, bench.stream));
      bench.device.run_all();
      bench.device.pinned.front()[at] ^= std::byte{0x42};
      static_cast<void>(pool.read(slot, block, bytes, bench.stream));
      bench.device.run_all();
      CHECK_THROWS_WITH_AS(pool.check(slot), doctest::Contains("cannot be decoded"), FileTierError);
      CHECK(pool.stats().failed_reads == 1);
      pool.give_back(slot);
    }
  }

  TEST_CASE(
      "HostSwapPool: a codec on a stream that names more bytes than the slot has is refused") {
    std::size_t const bytes = 100'000;
    for (bool const is_given_back : {false, true}) {  // before the write runs
      CAPTURE(is_given_back);
      Bench bench;
      Pool pool{bench.device, bench.order, bench.options(HostTier::pinned, 1_MiB), bench.io};
      auto* const block = bench.reserve(bytes);
      HostSlotId const slot = take(pool, bytes, pool.coding<ZeroBitmapOnStream>());
      static_cast<void>(pool.write(slot, block, bytes, bench.stream));
      if (is_given_back) {
        pool.give_back(slot);
      }
      while (bench.device.queued_ops(bench.stream) > 1) {  // all but the function behind kernels
        REQUIRE(bench.device.step(bench.stream));
      }
      std::uint64_t const too_many = 2_MiB;
      std::memcpy(bench.device.pinned.front() + offsetof(detail::SlotHeader, stored_bytes),
                  &too_many,
                  sizeof(too_many));
      bench.device.run_all();

      if (!is_given_back) {
        CHECK(pool.has_lost_write(slot));  // so that the block does not leave without another copy
        CHECK_FALSE(pool.has_lost_bytes(slot));
        CHECK_THROWS_WITH_AS(
            pool.check(slot), doctest::Contains("were not written"), FileTierError);
        pool.give_back(slot);
      }
      CHECK(pool.stats().tier(HostTier::pinned).used_bytes == 0);
      pool.check();  // nothing is lost, since nobody has read the slot
    }
  }

  TEST_CASE("HostSwapPool: if the host cannot address the device, codecs work on staged bytes") {
    for (HostTier const tier : staged_tiers) {
      for (std::size_t const chunk_bytes : {64_KiB, 200_KiB, 1_MiB}) {  // 7, 3 parts and one
        CAPTURE(static_cast<int>(tier));
        CAPTURE(chunk_bytes);
        RemoteBench bench;
        HostPoolOptions options = bench.options(tier, 1_MiB);
        options.staging_bytes = chunk_bytes;
        RemotePool pool{bench.device, bench.order, options, bench.io};
        std::size_t const bytes = 400'000;
        auto* const block = bench.reserve(bytes);
        put_sparse(block, bytes, 4);
        auto const expected = copy_of(block, bytes);
        HostSlotId const slot = take(pool, bytes, pool.coding<ZeroBitmap>());
        for (int i = 0; i < 2; ++i) {  // in the second round with the scratch memory of the first
          HostSlotId const other = take(pool, bytes, pool.coding<ZeroBitmap>());
          static_cast<void>(pool.write(i == 0 ? slot : other, block, bytes, bench.stream));
          CHECK(pool.stats().encoded_raw_bytes == (i == 0 ? 0 : bytes));
          bench.device.run_all();
          pool.give_back(other);
        }
        CHECK(pool.size_bytes(slot) < bytes / 4 + bytes / 16);
        CHECK(pool.stats().tier(tier).used_bytes == pool.size_bytes(slot));
        for (std::size_t const wanted : {bytes, std::size_t{270'001}}) {
          std::memset(block, 1, bytes);
          static_cast<void>(pool.read(slot, block, wanted, bench.stream));
          bench.device.run_all();
          pool.check(slot);
          CHECK(copy_of(block, wanted) == copy_of(expected.data(), wanted));
          CHECK(block[bytes - 1] == (wanted == bytes ? expected.back() : std::byte{1}));
        }
        pool.give_back(slot);
        CHECK(pool.stats().tier(tier).used_bytes == 0);
      }
    }
  }

  TEST_CASE("HostSwapPool: pinned slots, and chunks too short for a stripe, are copied unencoded") {
    for (bool const is_pinned : {false, true}) {
      CAPTURE(is_pinned);
      RemoteBench bench;
      RemotePool pool{bench.device,
                      bench.order,
                      bench.options(is_pinned ? HostTier::pinned : HostTier::pageable, 1_MiB),
                      bench.io};
      auto* const block = bench.reserve(200'000);
      put_pattern(block, 200'000, 3);
      HostSlotId const slot = take(pool, 200'000, pool.coding<AsBfloat16>());
      static_cast<void>(pool.write(slot, block, 200'000, bench.stream));
      static_cast<void>(pool.read(slot, block, 200'000, bench.stream));
      bench.device.run_all();
      CHECK(has_pattern(block, 200'000, 3));
      CHECK(pool.stats().encoded_raw_bytes == 0);
      pool.give_back(slot);
    }
  }

  TEST_CASE("HostSwapPool: if an encoded staged transfer fails halfway, no other bytes are lost") {
    std::size_t const bytes = 300'000;  // five parts
    for (HostTier const tier : staged_tiers) {
      for (SimCall const what : {SimCall::copy, SimCall::launch_host}) {
        for (std::uint64_t call = 1; call <= 5; ++call) {
          CAPTURE(static_cast<int>(tier));
          CAPTURE(static_cast<int>(what));
          CAPTURE(call);
          RemoteBench bench;
          HostPoolOptions options = bench.options(tier, 2_MiB);
          options.staging_bytes = 64_KiB;
          RemotePool pool{bench.device, bench.order, options, bench.io};
          auto* const block = bench.reserve(bytes);
          put_sparse(block, bytes, 4);
          auto const expected = copy_of(block, bytes);
          CodingId const coding = pool.coding<ZeroBitmap>();
          HostSlotId const torn = take(pool, bytes, coding);
          HostSlotId const slot = take(pool, bytes, coding);
          bench.device.fail(what, call);
          CHECK_THROWS_AS(static_cast<void>(pool.write(torn, block, bytes, bench.stream)),
                          DeviceError);
          pool.give_back(torn);
          static_cast<void>(pool.write(slot, block, bytes, bench.stream));
          bench.device.run_all();
          CHECK(pool.stats().encoded_raw_bytes == bytes);

          bench.device.fail(what, call);
          CHECK_THROWS_AS(static_cast<void>(pool.read(slot, block, bytes, bench.stream)),
                          DeviceError);
          bench.device.run_all();
          std::memset(block, 1, bytes);
          static_cast<void>(pool.read(slot, block, bytes, bench.stream));
          bench.device.run_all();
          pool.check(slot);
          CHECK(copy_of(block, bytes) == expected);
          pool.give_back(slot);
          CHECK(pool.stats().tier(tier).used_bytes == 0);
          CHECK(pool.stats().failed_reads == 0);
        }
      }
    }
  }

  TEST_CASE("HostSwapPool: a staged block that is damaged or unreadable is refused") {
    std::size_t const bytes = 300'000;
    for (bool const is_damaged : {false, true}) {  // or cannot be read
      CAPTURE(is_damaged);
      RemoteBench bench;
      HostPoolOptions options = bench.options(HostTier::file, 2_MiB);
      options.staging_bytes = 64_KiB;
      options.file = (bench.folder.path() / "swap").string();
      RemotePool pool{bench.device, bench.order, options, bench.io};
      auto* const block = bench.reserve(bytes);
      put_sparse(block, bytes, 4);
      HostSlotId const slot = take(pool, bytes, pool.coding<ZeroBitmap>());
      HostSlotId const healthy = take(pool, bytes, pool.coding<ZeroBitmap>());
      static_cast<void>(pool.write(slot, block, bytes, bench.stream));
      static_cast<void>(pool.write(healthy, block, bytes, bench.stream));
      bench.device.run_all();
      auto const expected = copy_of(block, bytes);
      if (is_damaged) {
        std::fstream file{options.file, std::ios::binary | std::ios::in | std::ios::out};
        file.seekp(16 + 2048 + 65536 / 4);  // the second stripe's header
        file.put('x');
      } else {
        bench.io.plant({.read_error = EIO, .failing_from = 0, .failing_to = 64_KiB});
      }
      static_cast<void>(pool.read(slot, block, bytes, bench.stream));
      bench.device.run_all();
      CHECK_THROWS_WITH_AS(pool.check(slot),
                           doctest::Contains(is_damaged ? "cannot be decoded" : "reading"),
                           FileTierError);
      CHECK(pool.stats().failed_reads == 1);
      bench.io.plant({});
      static_cast<void>(pool.read(healthy, block, bytes, bench.stream));
      bench.device.run_all();
      pool.check(healthy);
      CHECK(copy_of(block, bytes) == expected);
      pool.give_back(slot);
      pool.give_back(healthy);
    }
  }
}
