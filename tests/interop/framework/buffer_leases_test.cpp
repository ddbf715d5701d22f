// SPDX-License-Identifier: Apache-2.0
#include <spillway/interop/framework/memory_limit.hpp>
#include <spillway/interop/framework/buffer_leases.hpp>

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include <support/buffer_leases_bench.hpp>

using namespace spillway;
using spillway::test::DeskBench;
using Bytes = std::vector<unsigned char>;

TEST_SUITE("buffer_leases") {
  TEST_CASE("BufferDesk: what no operation uses leaves when room is needed, and comes back in its "
            "place") {
    DeskBench bench{256_KiB};
    auto* const a = bench.make(128_KiB, 1);
    auto* const b = bench.make(128_KiB, 2);
    CHECK_FALSE(bench.desk.is_under_pressure());
    auto* const c = bench.make(128_KiB, 3);
    REQUIRE(c != nullptr);
    CHECK(bench.desk.is_under_pressure());
    CHECK(bench.desk.counts().pressures == 1);
    CHECK(bench.memory.stats().swap_outs.count == 1);
    CHECK_FALSE((bench.desk.view(a).is_resident && bench.desk.view(b).is_resident));
    CHECK(bench.read({a, b}) == Bytes{1, 2});
    CHECK(bench.read({c, a}) == Bytes{3, 1});
    CHECK(bench.desk.counts().peak_reclaimed_bytes == 128_KiB);
  }

  TEST_CASE("BufferDesk: what is only read leaves again without being copied") {
    DeskBench bench{256_KiB};
    auto* const a = bench.make(128_KiB, 1);
    auto* const b = bench.make(128_KiB, 2);
    auto* const c = bench.make(128_KiB, 3);
    for (int i = 0; i < 4; ++i) {
      CHECK(bench.read({a, b}) == Bytes{1, 2});
      CHECK(bench.read({c}) == Bytes{3});
    }
    CHECK(bench.memory.stats().swap_outs.count <= 3);  // each once
    CHECK(bench.memory.stats().drops.count >= 3);
  }

  TEST_CASE("BufferDesk: what is written after it was read leaves with what was written") {
    DeskBench bench{256_KiB};
    auto* const a = bench.make(128_KiB, 1);
    auto* const b = bench.make(128_KiB, 2);
    auto* const c = bench.make(128_KiB, 3);
    CHECK(bench.read({a}) == Bytes{1});
    for (unsigned char i = 10; i < 14; ++i) {
      DeskBench::Frame reading{1};
      std::array<BufferUse, 1> const reads{BufferUse{a, false}};
      REQUIRE(bench.desk.try_enter(reading, reads).empty());
      DeskBench::Frame writing{2};  // while it is leased for reading
      std::array<BufferUse, 1> const writes{BufferUse{a, true}};
      REQUIRE(bench.desk.try_enter(writing, writes).empty());
      *a = i;
      bench.desk.leave(writing);
      bench.desk.leave(reading);
      CHECK(bench.read({b, c}) == Bytes{2, 3});
      CHECK(bench.read({a}) == Bytes{i});
    }
  }

  TEST_CASE(
      "BufferDesk: a buffer that no operation has shown stays, and so does one that is kept") {
    DeskBench bench{256_KiB};
    void* const hidden = bench.desk.try_allocate(64_KiB, nullptr);
    auto* const kept = bench.make(64_KiB, 2);
    std::array<void*, 1> const shown{kept};
    bench.desk.show(shown, true);
    CHECK(bench.desk.counts().fixed_bytes == 128_KiB);
    CHECK(bench.make(128_KiB, 3) != nullptr);
    CHECK(bench.make(128_KiB, 4) != nullptr);
    CHECK(bench.make(192_KiB, 5) == nullptr);  // the rest does not suffice
    CAPTURE(bench.desk.last_failure());
    (void)bench.desk.reclaim();
    CHECK(bench.desk.view(hidden).is_resident);
    CHECK(bench.desk.view(kept).is_resident);
    CHECK(bench.desk.last_failure().find("131072 bytes can never leave") != std::string::npos);
  }

  TEST_CASE(
      "BufferDesk: a buffer that was made outside of any operation may leave once it is shown") {
    DeskBench bench{256_KiB};
    (void)bench.make(256_KiB, 1);
    void* const copied = bench.desk.try_allocate(128_KiB, nullptr);  // under pressure from here on
    REQUIRE(copied != nullptr);
    std::array<void*, 1> const shown{copied};
    CHECK(bench.make(256_KiB, 2) == nullptr);
    bench.desk.show(shown, false);
    CHECK(bench.desk.view(copied).is_resident);
    CHECK(bench.make(256_KiB, 3) != nullptr);
    CHECK_FALSE(bench.desk.view(copied).is_resident);
    CHECK(bench.desk.counts().fixed_bytes == 0);
  }

  TEST_CASE("BufferDesk: operands and results of one operation have to fit together") {
    DeskBench bench{256_KiB};
    auto* const a = bench.make(128_KiB, 1);
    auto* const b = bench.make(128_KiB, 2);
    auto* const c = bench.make(128_KiB, 3);
    CHECK_THROWS_AS(bench.read({a, b, c}), OutOfDeviceMemory);
    CHECK(bench.desk.counts().active_bytes == 0);
    DeskBench::Frame frame{1};
    std::array<BufferUse, 2> const uses{BufferUse{a, false}, BufferUse{b, false}};
    REQUIRE(bench.desk.try_enter(frame, uses).empty());
    CHECK(bench.desk.counts().active_bytes == 256_KiB);
    CHECK(frame.refused_bytes() == 0);
    CHECK(bench.desk.try_allocate(64_KiB, &frame) == nullptr);
    CHECK(frame.refused_bytes() == 64_KiB);
    bench.desk.leave(frame);
    CHECK(bench.read({a, b}) == Bytes{1, 2});
    CHECK(bench.read({c}) == Bytes{3});
    CHECK(bench.desk.counts().out_of_memory == 2);
  }

  TEST_CASE("BufferDesk: switched off, nothing leaves, and what is away still comes back") {
    DeskBench bench{256_KiB};
    auto* const a = bench.make(128_KiB, 1);
    (void)bench.make(128_KiB, 2);
    CHECK(bench.desk.reclaim() == 256_KiB);
    bench.desk.enable(false);
    CHECK(bench.read({a}) == Bytes{1});
    CHECK(bench.make(256_KiB, 3) == nullptr);
    CHECK(bench.read({a}) == Bytes{1});
  }

  TEST_CASE("BufferDesk: what is freed gives its room back, in the middle of an operation, too") {
    DeskBench bench{256_KiB};
    DeskBench::Frame frame{1};
    REQUIRE(bench.desk.try_enter(frame, {}).empty());
    for (int i = 0; i < 8; ++i) {
      void* const scratch = bench.desk.try_allocate(192_KiB, &frame);
      REQUIRE(scratch != nullptr);
      CHECK(bench.desk.owns(scratch));
      CHECK(bench.desk.bytes_of(scratch) == 192_KiB);
      CHECK(bench.desk.free(scratch));
      CHECK_FALSE(bench.desk.free(scratch));
    }
    bench.desk.leave(frame);
    auto const counts = bench.desk.counts();
    CHECK(counts.buffers == 0);
    CHECK(counts.bytes == 0);
    CHECK(counts.active_bytes == 0);
    CHECK(counts.fixed_bytes == 0);
    CHECK(counts.peak_active_bytes == 192_KiB);
    CHECK(counts.allocations == 8);
    auto* const away = bench.make(128_KiB, 1);
    CHECK(bench.desk.reclaim() == 128_KiB);
    CHECK(bench.desk.free(away));
    CHECK(bench.memory.stats().allocated.blocks.current == 0);
  }

  TEST_CASE("BufferDesk: a thread waits for the operation of another one that has what it needs") {
    DeskBench bench{256_KiB};
    auto* const a = bench.make(192_KiB, 1);
    DeskBench::Frame frame{1};
    std::array<BufferUse, 1> const uses{BufferUse{a, false}};
    REQUIRE(bench.desk.try_enter(frame, uses).empty());
    unsigned char* b = nullptr;
    std::jthread other{[&] { b = bench.make(192_KiB, 2); }};
    while (bench.desk.counts().waits == 0) {
      std::this_thread::yield();
    }
    bench.desk.leave(frame);
    other.join();
    REQUIRE(b != nullptr);
    CHECK(bench.read({b}) == Bytes{2});
    CHECK(bench.read({a}) == Bytes{1});
  }

  TEST_CASE("BufferDesk: under pressure operations that may run alone do, and others go on") {
    DeskBench bench{256_KiB};
    (void)bench.desk.relieve();
    DeskBench::Frame first{1, true};
    REQUIRE(bench.desk.try_enter(first, {}).empty());
    DeskBench::Frame beside{1, false};
    REQUIRE(bench.desk.try_enter(beside, {}).empty());  // does not wait
    std::atomic<bool> has_entered{false};
    std::jthread other{[&] {
      DeskBench::Frame second{1, true};
      CHECK(bench.desk.try_enter(second, {}).empty());
      has_entered = true;
      bench.desk.leave(second);
    }};
    bench.desk.leave(beside);
    CHECK_FALSE(has_entered);
    bench.desk.leave(first);
    other.join();
    CHECK(has_entered);
  }

  TEST_CASE("BufferDesk: pressure ends with a step in which nothing had to leave") {
    DeskBench bench{256_KiB};
    auto* const a = bench.make(192_KiB, 1);
    auto* const b = bench.make(192_KiB, 2);
    bench.desk.begin_step();
    CHECK(bench.desk.is_under_pressure());
    CHECK(bench.desk.free(a));
    CHECK(bench.read({b}) == Bytes{2});
    bench.desk.begin_step();
    CHECK_FALSE(bench.desk.is_under_pressure());
  }

  TEST_CASE("Ballast: lowers the limit, makes others leave for it, and can be raised again") {
    DeskBench bench{8_MiB};
    Ballast<DeskBench::Allocator> ballast{bench.memory};
    auto const relieve = [&bench] {
      return !bench.desk.is_under_pressure() && (bench.desk.relieve(), true);
    };
    auto* const a = bench.make(5_MiB, 1);
    ballast.set_limit(4_MiB, HostStream::caller, relieve);
    CHECK(ballast.limit_bytes() == 4_MiB);
    CHECK(ballast.bytes() == 4_MiB);
    CHECK_FALSE(bench.desk.view(a).is_resident);
    CHECK_THROWS_AS(bench.read({a}), OutOfDeviceMemory);
    CHECK_THROWS_AS(ballast.set_limit(9_MiB, HostStream::caller, relieve), ContractViolation);
    ballast.set_limit(8_MiB, HostStream::caller, relieve);
    CHECK(bench.read({a}) == Bytes{1});
  }

  TEST_CASE("Ballast: what is in use stands in the way") {
    DeskBench bench{8_MiB};
    Ballast<DeskBench::Allocator> ballast{bench.memory};
    void* const fixed = bench.desk.try_allocate(5_MiB, nullptr);
    CHECK(fixed != nullptr);
    CHECK_THROWS_AS(ballast.set_limit(1_MiB, HostStream::caller, [] { return false; }),
                    OutOfDeviceMemory);
    CHECK(ballast.limit_bytes() == 5_MiB);
  }
}
