// SPDX-License-Identifier: Apache-2.0
#include <spillway/interop/framework/buffer_leases.hpp>

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include <support/buffer_leases_bench.hpp>
#include <support/fork.hpp>
#include <support/temporary_folder.hpp>

using namespace spillway;
using namespace spillway::framework;
using spillway::test::LeasesBench;
using Bytes = std::vector<unsigned char>;

TEST_SUITE("buffer_leases") {
  TEST_CASE("BufferLeases: a buffer that no operation uses leaves under pressure and returns to "
            "its address") {
    LeasesBench bench{256_KiB};
    auto* const a = bench.make(128_KiB, 1);
    auto* const b = bench.make(128_KiB, 2);
    CHECK_FALSE(bench.leases.is_under_pressure());
    auto* const c = bench.make(128_KiB, 3);
    REQUIRE(c != nullptr);
    CHECK(bench.leases.is_under_pressure());
    CHECK(bench.leases.counts().pressures == 1);
    CHECK(bench.memory.stats().swap_outs.count == 1);
    CHECK_FALSE((bench.leases.view(a).is_resident && bench.leases.view(b).is_resident));
    CHECK(bench.read({a, b}) == Bytes{1, 2});
    CHECK(bench.read({c, a}) == Bytes{3, 1});
    CHECK(bench.leases.counts().peak_reclaimed_bytes == 128_KiB);
  }

  TEST_CASE("BufferLeases: a buffer that was only read leaves again without a copy") {
    LeasesBench bench{256_KiB};
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

  TEST_CASE("BufferLeases: a buffer written while leased for reading keeps the new bytes") {
    LeasesBench bench{256_KiB};
    auto* const a = bench.make(128_KiB, 1);
    auto* const b = bench.make(128_KiB, 2);
    auto* const c = bench.make(128_KiB, 3);
    CHECK(bench.read({a}) == Bytes{1});
    for (unsigned char i = 10; i < 14; ++i) {
      LeasesBench::Frame reading{1};
      std::array<BufferUse, 1> const reads{BufferUse{a, false}};
      REQUIRE(bench.leases.try_enter(reading, reads).empty());
      LeasesBench::Frame writing{2};  // while it is leased for reading
      std::array<BufferUse, 1> const writes{BufferUse{a, true}};
      REQUIRE(bench.leases.try_enter(writing, writes).empty());
      *a = i;
      bench.leases.exit(writing);
      bench.leases.exit(reading);
      CHECK(bench.read({b, c}) == Bytes{2, 3});
      CHECK(bench.read({a}) == Bytes{i});
    }
  }

  TEST_CASE("BufferLeases: only results of operations that are not kept can leave") {
    LeasesBench bench{256_KiB};
    void* const hidden = bench.leases.try_allocate(64_KiB, nullptr);
    auto* const kept = bench.make(64_KiB, 2);
    std::array<void*, 1> const results{kept};
    bench.leases.keep(results);
    CHECK(bench.leases.counts().fixed_bytes == 128_KiB);
    CHECK(bench.make(128_KiB, 3) != nullptr);
    CHECK(bench.make(128_KiB, 4) != nullptr);
    CHECK(bench.make(192_KiB, 5) == nullptr);  // the rest does not suffice
    CAPTURE(bench.leases.last_failure());
    (void)bench.leases.reclaim();
    CHECK(bench.leases.view(hidden).is_resident);
    CHECK(bench.leases.view(kept).is_resident);
    CHECK(bench.leases.last_failure().find("131072 bytes can never leave") != std::string::npos);
  }

  TEST_CASE(
      "BufferLeases: a buffer made outside of operations can leave once it is made swappable") {
    LeasesBench bench{256_KiB};
    (void)bench.make(256_KiB, 1);
    // From here on there is memory pressure.
    void* const copied = bench.leases.try_allocate(128_KiB, nullptr);
    REQUIRE(copied != nullptr);
    std::array<void*, 1> const results{copied};
    CHECK(bench.make(256_KiB, 2) == nullptr);
    bench.leases.make_swappable(results);
    CHECK(bench.leases.view(copied).is_resident);
    CHECK(bench.make(256_KiB, 3) != nullptr);
    CHECK_FALSE(bench.leases.view(copied).is_resident);
    CHECK(bench.leases.counts().fixed_bytes == 0);
  }

  TEST_CASE("BufferLeases: operands and results of one operation must fit together") {
    LeasesBench bench{256_KiB};
    auto* const a = bench.make(128_KiB, 1);
    auto* const b = bench.make(128_KiB, 2);
    auto* const c = bench.make(128_KiB, 3);
    CHECK_THROWS_AS(bench.read({a, b, c}), OutOfDeviceMemory);
    CHECK(bench.leases.counts().active_bytes == 0);
    LeasesBench::Frame frame{1};
    std::array<BufferUse, 2> const uses{BufferUse{a, false}, BufferUse{b, false}};
    REQUIRE(bench.leases.try_enter(frame, uses).empty());
    CHECK(bench.leases.counts().active_bytes == 256_KiB);
    CHECK(frame.refused_bytes() == 0);
    CHECK(bench.leases.try_allocate(64_KiB, &frame) == nullptr);
    CHECK(frame.refused_bytes() == 64_KiB);
    bench.leases.exit(frame);
    CHECK(bench.read({a, b}) == Bytes{1, 2});
    CHECK(bench.read({c}) == Bytes{3});
    CHECK(bench.leases.counts().out_of_memory == 2);
  }

  TEST_CASE("BufferLeases: an allocation for a frame that has ended is not leased by it") {
    LeasesBench bench{256_KiB};
    LeasesBench::Frame frame{1};
    REQUIRE(bench.leases.try_enter(frame, {}).empty());
    bench.leases.exit(frame);
    void* const late = bench.leases.try_allocate(128_KiB, &frame);
    REQUIRE(late != nullptr);
    CHECK(bench.leases.counts().active_bytes == 0);
    std::array<void*, 1> const results{late};
    bench.leases.make_swappable(results);
    CHECK(bench.leases.reclaim() == 128_KiB);
    CHECK(bench.leases.free(late));
  }

  TEST_CASE("BufferLeases: while disabled, no buffer leaves, and those away still come back") {
    LeasesBench bench{256_KiB};
    auto* const a = bench.make(128_KiB, 1);
    (void)bench.make(128_KiB, 2);
    CHECK(bench.leases.reclaim() == 256_KiB);
    bench.leases.enable(false);
    CHECK(bench.read({a}) == Bytes{1});
    CHECK(bench.make(256_KiB, 3) == nullptr);
    CHECK(bench.read({a}) == Bytes{1});
  }

  TEST_CASE("BufferLeases: freeing a buffer frees its memory, also during an operation") {
    LeasesBench bench{256_KiB};
    LeasesBench::Frame frame{1};
    REQUIRE(bench.leases.try_enter(frame, {}).empty());
    for (int i = 0; i < 8; ++i) {
      void* const scratch = bench.leases.try_allocate(192_KiB, &frame);
      REQUIRE(scratch != nullptr);
      CHECK(bench.leases.owns(scratch));
      CHECK(bench.leases.view(scratch).bytes == 192_KiB);
      CHECK(bench.leases.free(scratch));
      CHECK_FALSE(bench.leases.free(scratch));
    }
    bench.leases.exit(frame);
    auto const counts = bench.leases.counts();
    CHECK(counts.buffers == 0);
    CHECK(counts.bytes == 0);
    CHECK(counts.active_bytes == 0);
    CHECK(counts.fixed_bytes == 0);
    CHECK(counts.peak_active_bytes == 192_KiB);
    CHECK(counts.allocations == 8);
    auto* const away = bench.make(128_KiB, 1);
    CHECK(bench.leases.reclaim() == 128_KiB);
    CHECK(bench.leases.free(away));
    CHECK(bench.memory.stats().allocated.blocks.current == 0);
  }

  TEST_CASE(
      "BufferLeases: an address inside a buffer identifies the buffer, also while it is away") {
    LeasesBench bench{256_KiB};
    auto* const a = bench.make(100_KiB, 1);
    auto* const b = bench.make(64_KiB, 2);
    (void)bench.leases.reclaim();
    CHECK(bench.leases.base_of(a) == a);
    CHECK(bench.leases.base_of(a + 100_KiB - 1) == a);
    CHECK(bench.leases.base_of(a + 100_KiB) != a);
    CHECK(bench.leases.base_of(b + 1) == b);
    int elsewhere = 0;
    CHECK(bench.leases.base_of(&elsewhere) == nullptr);
  }

  TEST_CASE(
      "BufferLeases: a forked child has the buffers that were away, whatever other threads did") {
    LeasesBench bench{256_KiB};
    auto* const a = bench.make(64_KiB, 1);
    auto* const b = bench.make(64_KiB, 2);
    auto* const c = bench.make(64_KiB, 3);
    auto* const d = bench.make(128_KiB, 4);
    std::jthread const others{[&](std::stop_token const& stop) {
      while (spillway::test::children_may_allocate && !stop.stop_requested()) {
        (void)bench.read({b, c});
        (void)bench.read({d});
      }
    }};
    for (int i = 0; i < 20; ++i) {
      bench.leases.before_fork();
      spillway::test::ForkedChild const child{[&] {
        bench.leases.after_fork_in_child(nullptr);
        return bench.read({a}) == Bytes{1} && bench.read({b}) == Bytes{2};
      }};
      bench.leases.after_fork_in_parent();
      CHECK(child.status() == 0);
    }
  }

  TEST_CASE("BufferLeases: a forked child holds no leases of other threads' operations") {
    LeasesBench bench{256_KiB};
    auto* const a = bench.make(64_KiB, 1);
    auto* const b = bench.make(64_KiB, 2);
    auto* const mine = bench.make(64_KiB, 3);
    std::array<BufferUse, 1> const uses{BufferUse{mine, false}};
    LeasesBench::Frame frame{1};
    REQUIRE(bench.leases.try_enter(frame, uses).empty());
    std::barrier both{2};
    std::jthread const other{[&] {
      std::array<BufferUse, 3> const its{
          BufferUse{a, false}, BufferUse{b, true}, BufferUse{mine, false}};
      LeasesBench::Frame operation{1};
      CHECK(bench.leases.try_enter(operation, its).empty());
      CHECK(bench.leases.try_allocate(4_KiB, &operation) != nullptr);
      both.arrive_and_wait();
      both.arrive_and_wait();
      bench.leases.exit(operation);
    }};
    both.arrive_and_wait();
    bench.leases.before_fork();
    spillway::test::ForkedChild const child{[&] {
      bench.leases.after_fork_in_child(&frame);
      auto const counts = bench.leases.counts();
      bool const is_right = counts.active_bytes == 64_KiB && counts.active_frames == 1 &&
                            bench.make(128_KiB, 4) != nullptr && bench.leases.view(mine).is_in_use;
      bench.leases.exit(frame);
      return is_right && bench.make(240_KiB, 5) != nullptr &&
             bench.leases.counts().active_frames == 0 && bench.read({a, b, mine}) == Bytes{1, 2, 3};
    }};
    bench.leases.after_fork_in_parent();
    both.arrive_and_wait();
    CHECK(child.status() == 0);
    bench.leases.exit(frame);
  }

  TEST_CASE(
      "BufferLeases: a thread waits for another thread's operation to end if that has the memory") {
    LeasesBench bench{256_KiB};
    auto* const a = bench.make(192_KiB, 1);
    LeasesBench::Frame frame{1};
    std::array<BufferUse, 1> const uses{BufferUse{a, false}};
    REQUIRE(bench.leases.try_enter(frame, uses).empty());
    unsigned char* b = nullptr;
    std::jthread other{[&] { b = bench.make(192_KiB, 2); }};
    while (bench.leases.counts().waits == 0) {
      std::this_thread::yield();
    }
    bench.leases.exit(frame);
    other.join();
    REQUIRE(b != nullptr);
    CHECK(bench.read({b}) == Bytes{2});
    CHECK(bench.read({a}) == Bytes{1});
  }

  TEST_CASE("BufferLeases: operations that might not fit together run one after another") {
    LeasesBench bench{256_KiB};
    (void)bench.make(48_KiB, 1);
    LeasesBench::Frame first{1, true};
    REQUIRE(bench.leases.try_enter(first, {}).empty());
    LeasesBench::Frame beside{1, false};
    REQUIRE(bench.leases.try_enter(beside, {}).empty());  // does not wait
    std::atomic<bool> has_entered{false};
    std::jthread other{[&] {
      LeasesBench::Frame second{1, true};
      CHECK(bench.leases.try_enter(second, {}).empty());
      has_entered = true;
      bench.leases.exit(second);
    }};
    bench.leases.exit(beside);
    CHECK_FALSE(has_entered);
    bench.leases.exit(first);
    other.join();
    CHECK(has_entered);
  }

  TEST_CASE("BufferLeases: an operation waits to begin as long as others release memory") {
    LeasesBench bench{256_KiB};
    LeasesBench::Leases leases{bench.memory, HostStream::caller, std::chrono::milliseconds{250}};
    void* const a = leases.try_allocate(48_KiB, nullptr);  // from here on room is scarce
    LeasesBench::Frame first{1, true};
    REQUIRE(leases.try_enter(first, {}).empty());
    std::atomic<bool> has_entered{false};
    std::jthread other{[&] {
      LeasesBench::Frame second{1, true};
      CHECK(leases.try_enter(second, {}).empty());
      has_entered = true;
      leases.exit(second);
    }};
    while (!has_entered && leases.counts().waits < 3) {  // each wait takes as long as the patience
      leases.free(leases.try_allocate(4_KiB, nullptr));
      std::this_thread::yield();
    }
    CHECK_FALSE(has_entered);
    leases.exit(first);
    other.join();
    CHECK(has_entered);
    leases.free(a);
  }

  TEST_CASE("BufferLeases: an operation gives up waiting to begin if nothing is released") {
    LeasesBench bench{256_KiB};
    LeasesBench::Leases leases{bench.memory, HostStream::caller, std::chrono::milliseconds{1}};
    void* const a = leases.try_allocate(48_KiB, nullptr);
    LeasesBench::Frame first{1, true};
    REQUIRE(leases.try_enter(first, {}).empty());
    LeasesBench::Frame second{1, true};
    CHECK(leases.try_enter(second, {}).empty());  // on this thread: `first` cannot end meanwhile
    CHECK(leases.counts().waits == 1);
    leases.exit(second);
    leases.exit(first);
    leases.free(a);
  }

  TEST_CASE("BufferLeases: operations that wait to begin do so in the order in which they came") {
    LeasesBench bench{256_KiB};
    std::vector<BufferUse> uses;
    for (unsigned char i = 0; i < 11; ++i) {
      uses.push_back({bench.make(16_KiB, i), false});
    }
    bench.leases.begin_step();
    bench.leases.begin_step();  // the largest size, 16 KiB, is known from here on
    std::span const all{uses};
    LeasesBench::Frame first{1, true};
    REQUIRE(bench.leases.try_enter(first, all.first(2)).empty());
    std::atomic<int> order{0};
    int large_order = 0;
    std::jthread large{[&] {
      LeasesBench::Frame frame{1, true};
      CHECK(bench.leases.try_enter(frame, all.subspan(2, 7)).empty());  // does not fit beside it
      large_order = ++order;
      bench.leases.exit(frame);
    }};
    while (bench.leases.counts().waits == 0 && order == 0) {
      std::this_thread::yield();
    }
    CHECK(order == 0);
    std::span const few = all.last(2);  // fit beside the first, but not beside the large one
    bool others_run = false;
    SUBCASE("if all of them end by themselves") {}
    SUBCASE("but not behind one that may depend on another operation") {
      others_run = true;
    }
    if (others_run) {
      LeasesBench::Frame asynchronous{1, false};
      REQUIRE(bench.leases.try_enter(asynchronous, {}).empty());
      LeasesBench::Frame small{1, true};
      CHECK(bench.leases.try_enter(small, few).empty());  // on this thread: it cannot wait
      CHECK(bench.leases.counts().waits == 1);
      CHECK(order == 0);
      bench.leases.exit(small);
      bench.leases.exit(asynchronous);
      bench.leases.exit(first);
    } else {
      int small_order = 0;
      std::jthread small{[&] {
        LeasesBench::Frame frame{1, true};
        CHECK(bench.leases.try_enter(frame, few).empty());
        small_order = ++order;
        bench.leases.exit(frame);
      }};
      while (bench.leases.counts().waits < 2 && order == 0) {
        std::this_thread::yield();
      }
      bench.leases.exit(first);
      small.join();
      CHECK(small_order == 2);
    }
    large.join();
    CHECK(large_order >= 1);
  }

  TEST_CASE("BufferLeases: operations whose known sizes fit together do not wait") {
    LeasesBench bench{256_KiB};
    auto* const a = bench.make(16_KiB, 1);
    for (int step = 0; step < 2; ++step) {
      bench.leases.begin_step();
      for (int i = 0; i < 20; ++i) {
        (void)bench.make(16_KiB, 2);
      }
    }
    bench.leases.begin_step();
    REQUIRE(bench.leases.is_under_pressure());
    LeasesBench::Frame first{1, true};
    REQUIRE(bench.leases.try_enter(first, {}).empty());
    LeasesBench::Frame second{1, true};
    std::array<BufferUse, 1> const uses{BufferUse{a, false}};
    REQUIRE(bench.leases.try_enter(second, uses).empty());  // on this thread: it cannot wait
    CHECK(bench.leases.counts().active_frames == 2);
    bench.leases.exit(second);
    bench.leases.exit(first);
  }

  TEST_CASE("BufferLeases: pressure ends after a step without evictions") {
    LeasesBench bench{256_KiB};
    auto* const a = bench.make(192_KiB, 1);
    auto* const b = bench.make(192_KiB, 2);
    bench.leases.begin_step();
    CHECK(bench.leases.is_under_pressure());
    CHECK(bench.leases.free(a));
    CHECK(bench.read({b}) == Bytes{2});
    bench.leases.begin_step();
    CHECK_FALSE(bench.leases.is_under_pressure());
  }

  TEST_CASE("BufferLeases: lowering the capacity evicts buffers that are not in use") {
    LeasesBench bench{8_MiB};
    auto* const a = bench.make(2_MiB, 1);
    auto* const b = bench.make(2_MiB, 2);
    auto* const c = bench.make(2_MiB, 3);
    bench.leases.set_capacity(4_MiB);
    CHECK(bench.memory.stats().capacity_bytes == 4_MiB);
    CHECK(bench.memory.stats().resident.bytes.current <= 4_MiB);
    CHECK(bench.memory.stats().reserved_bytes <= 4_MiB);
    CHECK(bench.read({a, b}) == Bytes{1, 2});
    CHECK(bench.read({c}) == Bytes{3});
    CHECK(bench.make(5_MiB, 4) == nullptr);
    CHECK(bench.leases.last_failure().find("capacity 4194304") != std::string::npos);
    CHECK(bench.memory.stats().allocated.bytes.peak == 6_MiB);  // what failed was never there
    bench.leases.set_capacity(8_MiB);
    CHECK(bench.make(5_MiB, 4) != nullptr);
    CHECK(bench.read({a, b}) == Bytes{1, 2});
  }

  TEST_CASE("BufferLeases: the capacity cannot be lowered below the bytes in use") {
    LeasesBench bench{8_MiB};
    auto* const a = bench.make(2_MiB, 1);
    LeasesBench::Frame frame{1};
    std::array<BufferUse, 1> const uses{BufferUse{a, false}};
    REQUIRE(bench.leases.try_enter(frame, uses).empty());
    CHECK_THROWS_AS(bench.leases.set_capacity(1_MiB), OutOfDeviceMemory);
    CHECK(bench.memory.stats().capacity_bytes == 8_MiB);
    CHECK(*a == 1);
    bench.leases.exit(frame);
  }

  TEST_CASE("BufferLeases: while the device is shared, the share alone sets the capacity") {
    TemporaryFolder const folder;
    LeasesBench bench{8_MiB};
    bench.leases.share({.file = folder.path() / "table", .least_bytes = 1_MiB});
    auto const shared_bytes = bench.memory.stats().capacity_bytes;
    CHECK_THROWS_AS(bench.leases.set_capacity(4_MiB), ContractViolation);
    CHECK(bench.memory.stats().capacity_bytes >= shared_bytes);  // what nobody else wants is given
    bench.leases.leave_share();
    bench.leases.set_capacity(4_MiB);
    CHECK(bench.memory.stats().capacity_bytes == 4_MiB);
  }

  TEST_CASE("BufferLeases: buffers that cannot leave are counted in fixed_bytes") {
    LeasesBench bench{8_MiB};
    auto* const kept = bench.make(1, 1);
    std::array<void*, 1> const known{kept};
    bench.leases.keep(known);
    auto const now = bench.memory.stats().resident;
    CHECK(bench.leases.unreclaimable() == Tally{1, now.bytes.current});
    CHECK(now.bytes.current == bench.memory.rounded_bytes(1));
    CHECK(now.bytes.current > 1);
  }

  TEST_CASE("BufferLeases: after park, only kept buffers stay on the device") {
    LeasesBench bench{8_MiB};
    auto* const a = bench.make(2_MiB, 1);
    auto* const b = bench.make(2_MiB, 2);
    auto* const kept = bench.make(1_MiB, 3);
    std::array<void*, 1> const known{kept};
    bench.leases.keep(known);
    CHECK(bench.leases.unreclaimable() == Tally{1, 1_MiB});
    CHECK(bench.leases.park() == 7_MiB);
    CHECK(bench.memory.stats().reserved_bytes == 1_MiB);
    CHECK(bench.memory.stats().resident.bytes.current == 1_MiB);
    CHECK(*kept == 3);
    CHECK(bench.read({a}) == Bytes{1});  // use brings it back
    CHECK(bench.memory.stats().reserved_bytes == 3_MiB);
    CHECK(bench.leases.wake() == 2_MiB);
    bench.memory.synchronize();
    CHECK(bench.leases.view(b).is_resident);
    CHECK(bench.read({a, b}) == Bytes{1, 2});
    CHECK(bench.leases.wake() == 0);
  }

  TEST_CASE("BufferLeases: after parking in the file, no buffer stays in host memory") {
    TemporaryFolder const folder;
    auto options = LeasesBench::options(8_MiB);
    options.host.slab_bytes = 1_MiB;
    options.host.file_bytes = 64_MiB;
    options.host.file = folder.path();
    LeasesBench bench{options};
    auto const host = [&](HostTier tier) { return bench.memory.host_stats().tier(tier); };
    auto* const away = bench.make(4_MiB, 1);
    auto* const clean = bench.make(4_MiB, 2);
    auto* const changed = bench.make(4_MiB, 3);
    CHECK(bench.read({clean}) == Bytes{2});
    CHECK(host(HostTier::pinned).used_bytes != 0);
    (void)bench.leases.park(HostTier::file);
    CHECK(bench.memory.stats().reserved_bytes == 0);
    CHECK(host(HostTier::pinned).reserved_bytes == 0);
    CHECK(host(HostTier::file).used_bytes == 12_MiB);
    CHECK(bench.leases.wake() == 8_MiB);
    CHECK(bench.read({away}) == Bytes{1});
    CHECK(bench.read({clean}) == Bytes{2});
    CHECK(bench.read({changed}) == Bytes{3});
    CHECK(bench.make(4_MiB, 4) != nullptr);
    CHECK(host(HostTier::file).used_bytes <= 16_MiB);
  }

  TEST_CASE("BufferLeases: parking in the file is refused without a file tier") {
    LeasesBench bench{8_MiB};
    auto* const a = bench.make(2_MiB, 1);
    CHECK_THROWS_AS(bench.leases.park(HostTier::file), ContractViolation);
    CHECK(bench.leases.view(a).is_resident);
  }

  TEST_CASE("BufferLeases: wake brings back no more than fits") {
    LeasesBench bench{4_MiB};
    for (unsigned char i = 0; i < 4; ++i) {
      REQUIRE(bench.make(2_MiB, i) != nullptr);
    }
    (void)bench.leases.park();
    CHECK(bench.memory.stats().reserved_bytes == 0);
    std::uint64_t const evicted = bench.memory.stats().evicted().count;
    CHECK(bench.leases.wake() == 4_MiB);
    CHECK(bench.memory.stats().evicted().count == evicted);
  }
}
