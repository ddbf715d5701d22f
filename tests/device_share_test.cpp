// SPDX-License-Identifier: Apache-2.0
#include <spillway/device_share.hpp>
#include <spillway/page_arena.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <support/fork.hpp>
#include <support/small_allocator.hpp>
#include <support/syscall_filter.hpp>
#include <support/temporary_folder.hpp>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

using namespace spillway;
using namespace spillway::literals;
using namespace std::chrono_literals;
using support::SmallAllocator;
using support::SmallBench;
using support::SmallBuffer;

namespace {

/// A clock that the test sets.
struct ToldClock {
  using duration = std::chrono::steady_clock::duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<ToldClock>;
  static inline thread_local time_point time{};
  static time_point now() noexcept { return time; }
};

using Share = DeviceShare<SmallAllocator, ToldClock>;

SmallAllocator::Options shared_options(std::size_t capacity_bytes) {
  SmallAllocator::Options options = support::small_options(capacity_bytes);
  options.initial_bytes = 0;
  options.grows_in_place = true;
  options.growth_bytes = 64_KiB;
  options.paging.lease_wait = 0ms;
  return options;
}

/// A program that shares 1 MiB.
struct Program {
  explicit Program(std::filesystem::path const& file, ShareOptions options = {})
      : bench{shared_options(1_MiB)} {
    options.file = file;
    options.least_bytes = options.least_bytes == 32_MiB ? 64_KiB : options.least_bytes;
    options.period = 0ms;
    share = std::make_unique<Share>(bench.allocator, options);
  }

  /// Makes blocks of 64 KiB.
  void make(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      blocks.push_back(std::make_unique<support::KnownBytes>(
          bench, 64_KiB, static_cast<std::uint8_t>(blocks.size())));
    }
  }
  void check() {
    for (auto const& block : blocks) {
      CHECK(block->is_intact());
    }
  }

  SmallBench bench;
  std::unique_ptr<Share> share;
  std::vector<std::unique_ptr<support::KnownBytes>> blocks;
};

/// Memory of 1 MiB, all of it wanted, whose capacity cannot be lowered while `refuses` is set.
struct StubbornMemory {
  [[nodiscard]] Stats stats() const {
    Stats stats;
    stats.capacity_bytes = capacity_bytes;
    stats.allocated.bytes.current = 1_MiB;
    return stats;
  }
  void set_capacity(std::size_t bytes) {
    if (refuses && bytes < capacity_bytes) {
      ++refusals;
      throw DeviceError{"the memory refuses"};
    }
    capacity_bytes = bytes;
  }

  std::atomic<std::size_t> capacity_bytes{1_MiB};
  std::atomic<bool> refuses{false};
  std::atomic<int> refusals{0};
};

/// Memory of 1 MiB, all of it wanted, that notes how often it is looked at and the least capacity
/// that it was asked for.
struct WatchedMemory {
  [[nodiscard]] Stats stats() const {
    ++looks;
    Stats stats;
    stats.capacity_bytes = capacity_bytes;
    stats.reserved_bytes = capacity_bytes;
    stats.allocated.bytes.current = 1_MiB;
    stats.leased.bytes.current = leased_bytes;
    return stats;
  }
  void set_capacity(std::size_t bytes) {
    least_asked = std::min(least_asked, bytes);
    if (bytes < leased_bytes) {
      throw OutOfDeviceMemory{MemoryReport{.leased_bytes = leased_bytes}, "it is leased"};
    }
    capacity_bytes = bytes;
  }

  std::size_t capacity_bytes = 1_MiB;
  std::size_t leased_bytes = 0;
  std::size_t least_asked = 1_MiB;
  mutable std::atomic<int> looks{0};
};
/// The same, with leases that only the program ends.
struct LeasedMemory : WatchedMemory {
  using lease_type = int;
};

/// Calls `check(memory, share, other)` for a program that has leased 640 KiB of 1 MiB and was asked
/// for memory: another program, `other`, wants 768 KiB.
template <class Memory>
void check_when_asked(auto const& check) {
  TemporaryFolder folder;
  ToldClock::time = {};
  Memory memory;
  DeviceShare<Memory, ToldClock> share{
      memory, {.file = folder.path() / "table", .least_bytes = 64_KiB, .period = 0ms}};
  REQUIRE(share.capacity_bytes() == 1_MiB);
  ToldClock::time += 2s;  // the claim of the constructor ends
  memory.leased_bytes = 640_KiB;
  memory.least_asked = 1_MiB;
  detail::ShareTable other{folder.path() / "table", 1_MiB, 0, 1};
  (void)other.update(1_MiB, 768_KiB, true);
  share.update();
  check(memory, share, other);
}

/// Calls `action` on a thread that cannot make threads.
void on_thread_that_is_the_last(auto const& action) {
  std::thread{[&] {
    REQUIRE(support::try_fail_calls(SYS_clone3, EAGAIN));
    REQUIRE(support::try_fail_calls(SYS_clone, EAGAIN));
    action();
  }}.join();
}

/// Begins a call that cannot be repeated, while another program updates its share.
std::unique_ptr<Share::ClaimHold> begin_call(Program& program, std::size_t bytes, Program& other) {
  auto call = std::async(std::launch::async, [&program, bytes] {
    ToldClock::time = {};
    return std::make_unique<Share::ClaimHold>(*program.share, bytes);
  });
  while (call.wait_for(0ms) != std::future_status::ready) {
    other.share->update();
  }
  return call.get();
}

std::vector<SmallBuffer::lease_type> lease_all(Program& program) {
  std::vector<SmallBuffer::lease_type> leases;
  for (auto const& block : program.blocks) {
    leases.push_back(block->buffer().acquire(Access::read, program.bench.stream));
  }
  return leases;
}

/// Whether some program's fair share is at least `bytes`.
bool has_claimed(detail::ShareTable& table, std::size_t bytes) {
  auto const members = table.members();
  return std::any_of(members.begin(), members.end(), [bytes](ShareMember const& member) {
    return member.fair_bytes >= bytes;
  });
}

/// Makes a program, while another one updates its share and so gives up memory for it.
std::unique_ptr<Program> join(Program& first, std::filesystem::path const& file) {
  auto joining = std::async(std::launch::async, [&] { return std::make_unique<Program>(file); });
  while (joining.wait_for(0ms) != std::future_status::ready) {
    first.share->update();
  }
  return joining.get();
}

/// Makes a second program, and 512 KiB of blocks in each, so that each program has half the memory.
std::unique_ptr<Program> join_and_fill(Program& first, std::filesystem::path const& file) {
  auto second = join(first, file);
  first.make(8);
  second->make(8);
  second->share->update();
  first.share->update();
  second->share->update();
  return second;
}

}  // namespace

TEST_SUITE("DeviceShare") {
  static_assert(LimitedMemory<SmallAllocator>);
  static_assert(!LimitedMemory<SimApi>);

  TEST_CASE("DeviceShare: a program that is alone has all memory, and gives others their share") {
    TemporaryFolder folder;
    Program first{folder.path() / "table"};
    CHECK(first.share->capacity_bytes() == 1_MiB);
    first.make(16);
    CHECK(first.bench.allocator.stats().resident.bytes.current == 1_MiB);
    first.share->update();

    auto second = join(first, folder.path() / "table");
    CHECK(second->share->capacity_bytes() == 64_KiB);
    second->make(16);
    second->share->update();
    first.share->update();
    second->share->update();
    CHECK(first.share->capacity_bytes() == 512_KiB);
    CHECK(second->share->capacity_bytes() == 512_KiB);
    CHECK(first.bench.allocator.stats().reserved_bytes <= 512_KiB);
    CHECK(first.bench.device.usage().device_bytes <= 512_KiB);
    first.check();
    second->check();

    second->blocks.clear();
    second.reset();
    first.share->update();
    CHECK(first.share->capacity_bytes() == 1_MiB);
    first.check();
  }

  TEST_CASE("DeviceShare: an idle program gives up all but its promised memory") {
    TemporaryFolder folder;
    ToldClock::time = {};
    Program first{folder.path() / "table"};
    auto const other = join(first, folder.path() / "table");
    Program& second = *other;
    first.make(16);
    second.make(16);
    for (int i = 0; i < 3; ++i) {
      first.share->update();
      second.share->update();
    }
    CHECK(first.share->capacity_bytes() == 512_KiB);
    ToldClock::time += 2s;
    second.check();  // it is at work
    second.share->update();
    first.share->update();
    second.share->update();
    CHECK(first.share->capacity_bytes() == 64_KiB);
    CHECK(second.share->capacity_bytes() == 1_MiB - 64_KiB);

    first.check();  // it is at work again
    first.share->update();
    second.share->update();
    first.share->update();
    CHECK(first.share->capacity_bytes() == 512_KiB);
    first.check();
    second.check();
  }

  TEST_CASE("DeviceShare: a program wants the peak of its step until a whole step needs less") {
    TemporaryFolder folder;
    ToldClock::time = {};
    Program first{folder.path() / "table"};
    auto const wanted = [&] {
      ToldClock::time += 3s;
      first.share->update();
      return first.share->members().at(0).wanted_bytes;
    };
    first.bench.allocator.begin_step();
    first.make(8);
    CHECK(wanted() == 512_KiB);
    first.blocks.clear();
    for (int i = 0; i < 5; ++i) {
      CHECK(wanted() == 512_KiB);  // the step goes on
    }
    first.bench.allocator.begin_step();
    first.bench.allocator.begin_step();
    CHECK(wanted() == 512_KiB);
    first.bench.allocator.begin_step();
    first.bench.allocator.begin_step();
    CHECK(wanted() == 0);

    first.make(8);
    CHECK(wanted() == 512_KiB);
    first.blocks.clear();
    ToldClock::time += 60s;  // a step that does not end
    CHECK(wanted() == 512_KiB);
    ToldClock::time += 60s;
    CHECK(wanted() == 0);
  }

  TEST_CASE("DeviceShare: leased memory is given up when the leases have ended") {
    TemporaryFolder folder;
    Program first{folder.path() / "table"};
    first.make(16);
    first.share->update();
    std::vector<SmallBuffer::lease_type> leases;
    for (auto const& block : first.blocks) {
      leases.push_back(block->buffer().acquire(Access::read, first.bench.stream));
    }
    auto joining = std::async(std::launch::async,
                              [&] { return std::make_unique<Program>(folder.path() / "table"); });
    while (first.share->members().size() != 2) {
    }
    first.share->update();
    CHECK(first.share->capacity_bytes() == 1_MiB);
    CHECK(first.share->members().at(0).held_bytes == 1_MiB);
    leases.clear();
    while (joining.wait_for(0ms) != std::future_status::ready) {
      first.share->update();
    }
    CHECK(joining.get()->share->capacity_bytes() == 64_KiB);
    first.check();
  }

  TEST_CASE("DeviceShare: what is not leased is given up at once, without waiting for leases") {
    check_when_asked<LeasedMemory>([](auto& memory, auto& share, auto& other) {
      share.update();
      CHECK(memory.least_asked == 640_KiB);  // with less, the allocator would wait
      CHECK(share.capacity_bytes() == 640_KiB);
      CHECK(share.claim(1_MiB, true) == ClaimResult::is_in_the_way);
      CHECK(other.update(1_MiB, 768_KiB, true).held_bytes == 384_KiB);

      memory.leased_bytes = 0;
      share.update();
      CHECK(share.capacity_bytes() == 256_KiB);
      CHECK(other.update(1_MiB, 768_KiB, true).held_bytes == 768_KiB);
    });
  }

  TEST_CASE("DeviceShare: an adapter is asked for bytes that it has leased itself") {
    check_when_asked<WatchedMemory>([](auto& memory, auto& share, auto& /*other*/) {
      CHECK(memory.least_asked == 64_KiB);
      CHECK(share.capacity_bytes() == 640_KiB);  // of which it could end no lease
    });
  }

  TEST_CASE("DeviceShare: a program that is denied its promised memory cannot join") {
    TemporaryFolder folder;
    Program first{folder.path() / "table"};
    ShareOptions options;
    options.patience = 0ms;
    CHECK_THROWS_WITH_AS((Program{folder.path() / "table", options}),
                         doctest::Contains("did not give up what this one is promised"),
                         OutOfDeviceMemory);
    CHECK(first.share->members().size() == 1);
  }

  TEST_CASE("DeviceShare: a program that joins keeps what it is promised while it waits for it") {
    TemporaryFolder folder;
    detail::ShareTable other{folder.path() / "table", 1_MiB, 0, 1};
    (void)other.update(0, 0, true);
    other.shrink(960_KiB);
    WatchedMemory memory;
    memory.leased_bytes = 128_KiB;
    auto const join_within = [&](std::chrono::milliseconds patience) {
      return std::make_unique<DeviceShare<WatchedMemory>>(
          memory,
          ShareOptions{.file = folder.path() / "table",
                       .least_bytes = 128_KiB,
                       .period = 0ms,
                       .patience = patience});
    };
    CHECK_THROWS_WITH_AS(join_within(0ms),
                         doctest::Contains("did not give up what this one is promised"),
                         OutOfDeviceMemory);
    CHECK(memory.least_asked == 128_KiB);  // though only 64 KiB were free

    auto joining = std::async(std::launch::async, [&] { return join_within(1h); });
    while (other.members().size() != 2 && joining.wait_for(0ms) != std::future_status::ready) {
    }
    other.shrink(0);
    CHECK(joining.get()->capacity_bytes() == 1_MiB);
  }

  TEST_CASE("DeviceShare: a program that can have no thread leaves, and has all memory again") {
    TemporaryFolder folder;
    WatchedMemory memory;
    detail::ShareTable other{folder.path() / "table", 1_MiB, 0, 1};
    (void)other.update(512_KiB, 0, true);
    other.shrink(512_KiB);
    on_thread_that_is_the_last([&] {
      using Watched = DeviceShare<WatchedMemory>;
      ShareOptions const options{.file = folder.path() / "table", .least_bytes = 64_KiB};
      CHECK_THROWS_AS((Watched{memory, options}), std::system_error);
    });
    CHECK(memory.capacity_bytes == 1_MiB);
    CHECK(other.members().size() == 1);
  }

  TEST_CASE("DeviceShare: times may mean for ever") {
    TemporaryFolder folder;
    constexpr auto for_ever = std::chrono::milliseconds::max();
    ShareOptions const options{.file = folder.path() / "table",
                               .least_bytes = 64_KiB,
                               .period = for_ever,
                               .idle_after = for_ever,
                               .patience = for_ever};
    WatchedMemory memory;
    DeviceShare<WatchedMemory> share{memory, options};
    int const before = memory.looks;
    for (int i = 0; i < 1000; ++i) {
      share.update();
      std::this_thread::yield();
    }
    CHECK(memory.looks == before + 1000);  // the share's thread sleeps
    CHECK(share.members().at(0).is_active);

    WatchedMemory of_second;
    auto joining = std::async(std::launch::async, [&] {
      DeviceShare<WatchedMemory> const second{of_second, options};
      return second.capacity_bytes();
    });
    while (joining.wait_for(0ms) != std::future_status::ready) {
      share.update();
    }
    CHECK(joining.get() >= 64_KiB);
  }

  TEST_CASE("DeviceShare: memory that cannot be released to the device still counts as held") {
    TemporaryFolder folder;
    SmallBench bench{support::small_options(1_MiB)};  // takes all in one piece
    support::KnownBytes block{bench, 64_KiB, 1};
    auto lease = block.buffer().acquire(Access::read, bench.stream);
    DeviceShare<SmallAllocator> const share{
        bench.allocator, {.file = folder.path() / "table", .least_bytes = 64_KiB, .period = 0ms}};
    lease.release();
    ShareOptions options{.file = folder.path() / "table", .patience = 0ms};
    CHECK_THROWS_AS((Program{folder.path() / "table", options}), OutOfDeviceMemory);
    CHECK(block.is_intact());
  }

  TEST_CASE(
      "DeviceShare: retry claims the memory that a failed call needs, if the device has so much") {
    TemporaryFolder folder;
    ToldClock::time = {};
    Program first{folder.path() / "table"};
    first.make(16);
    auto const second = join(first, folder.path() / "table");
    second->make(12);
    std::vector<LeaseRequest> requests;
    for (auto const& block : second->blocks) {
      requests.push_back({block->buffer().id(), Access::read});
    }
    CHECK_THROWS_AS((void)second->bench.allocator.acquire_all(requests, second->bench.stream),
                    OutOfDeviceMemory);
    auto work = std::async(std::launch::async, [&] {
      return second->share
          ->retry(
              [&] { return second->bench.allocator.acquire_all(requests, second->bench.stream); })
          .size();
    });
    while (work.wait_for(0ms) != std::future_status::ready) {
      first.share->update();
    }
    CHECK(work.get() == 12);
    CHECK(second->share->capacity_bytes() >= 768_KiB);
    CHECK(first.share->capacity_bytes() <= 256_KiB);

    // The claim ends when nothing has been asked for a while.
    ToldClock::time += 2s;
    first.check();
    second->check();
    second->share->update();
    first.share->update();
    second->share->update();
    first.share->update();
    CHECK(first.share->capacity_bytes() == 512_KiB);
    first.check();
    second->check();
  }

  TEST_CASE("DeviceShare: of two programs that wait for each other, the later one must give way") {
    TemporaryFolder folder;
    ToldClock::time = {};
    ShareOptions options;
    options.patience = 0ms;
    Program first{folder.path() / "table", options};
    auto const second = join_and_fill(first, folder.path() / "table");
    auto const of_first = lease_all(first);
    auto of_second = lease_all(*second);

    detail::ShareTable watcher{folder.path() / "table", 1_MiB, 0, 1};
    std::atomic<bool> is_over{false};
    auto waiting = std::async(std::launch::async, [&] {
      ClaimResult result = ClaimResult::refused;
      while (result != ClaimResult::granted && !is_over) {
        result = first.share->claim(768_KiB);
      }
      return result;
    });
    while (!has_claimed(watcher, 768_KiB) ||
           second->share->claim(640_KiB, true) != ClaimResult::is_in_the_way) {
    }
    of_second.clear();
    while (waiting.wait_for(0ms) != std::future_status::ready) {
      second->share->update();
    }
    is_over = true;
    CHECK(waiting.get() == ClaimResult::granted);
    CHECK(second->share->capacity_bytes() <= 256_KiB);
    second->check();
  }

  TEST_CASE("DeviceShare: an older claim gives way to one whose call cannot give way") {
    TemporaryFolder folder;
    ToldClock::time = {};
    Program first{folder.path() / "table"};
    auto const second = join_and_fill(first, folder.path() / "table");
    auto of_first = lease_all(first);
    auto const of_second = lease_all(*second);

    detail::ShareTable watcher{folder.path() / "table", 1_MiB, 0, 1};
    std::atomic<bool> is_over{false};
    auto waiting = std::async(std::launch::async, [&] {
      ToldClock::time = {};
      ClaimResult const result = first.share->claim(768_KiB, true);
      of_first.clear();
      while (!is_over) {
        first.share->update();
      }
      return result;
    });
    while (!has_claimed(watcher, 768_KiB)) {
      std::this_thread::yield();
    }
    CHECK(second->share->claim(640_KiB) == ClaimResult::granted);
    is_over = true;
    CHECK(waiting.get() == ClaimResult::is_in_the_way);
    CHECK(first.share->capacity_bytes() <= 384_KiB);
    first.check();
  }

  TEST_CASE("DeviceShare: a claim that fits into the share already is granted") {
    TemporaryFolder folder;
    Program first{folder.path() / "table"};
    CHECK(first.share->claim(128_KiB) == ClaimResult::granted);
    CHECK(first.share->claim(1_MiB) == ClaimResult::granted);

    // A call fails for want of room, and the share has grown before the claim is made.
    int calls = 0;
    CHECK(first.share->retry([&] {
      if (++calls == 1) {
        throw OutOfDeviceMemory{MemoryReport{.requested_bytes = 128_KiB,
                                             .capacity_bytes = 64_KiB,
                                             .leased_bytes = 64_KiB},
                                "with less"};
      }
      return calls;
    }) == 2);
  }

  TEST_CASE("DeviceShare: a claim lasts until the call that it was made for has ended") {
    TemporaryFolder folder;
    ToldClock::time = {};
    ShareOptions options;
    options.idle_after = 1h;
    Program first{folder.path() / "table", options};  // at work all the time
    first.make(16);
    auto const second = join(first, folder.path() / "table");
    second->make(4);
    std::atomic<int> looks{0};  // of the first program
    auto const wait_for_looks = [&] {
      for (int const before = looks; looks < before + 3;) {
        second->share->update();
      }
    };
    auto work = std::async(std::launch::async, [&] {
      return second->share->retry([&] {
        std::size_t const bytes = second->share->capacity_bytes();
        if (bytes < 768_KiB) {
          throw OutOfDeviceMemory{MemoryReport{.requested_bytes = 768_KiB, .capacity_bytes = bytes},
                                  "with less"};
        }
        ToldClock::time += 10s;
        wait_for_looks();
        return second->share->capacity_bytes();
      });
    });
    while (work.wait_for(0ms) != std::future_status::ready) {
      first.share->update();
      ++looks;
    }
    CHECK(work.get() >= 768_KiB);
    ToldClock::time += 20s;
    second->share->update();
    first.share->update();
    second->share->update();
    CHECK(second->share->capacity_bytes() < 768_KiB);
  }

  TEST_CASE("DeviceShare: a call that cannot be repeated claims its memory before it begins") {
    TemporaryFolder folder;
    ToldClock::time = {};
    Program first{folder.path() / "table"};
    first.make(16);
    auto const second = join(first, folder.path() / "table");
    second->make(4);
    second->share->update();
    first.share->update();
    second->share->update();
    REQUIRE(second->share->capacity_bytes() < 512_KiB);
    std::size_t const before = second->share->capacity_bytes();
    { auto const promised = begin_call(*second, 64_KiB, first); }
    CHECK(second->share->capacity_bytes() == before);
    { auto const call = begin_call(*second, 768_KiB, first); }
    CHECK(second->share->capacity_bytes() >= 768_KiB);

    // A program can get all but the others' promised memory, and keeps it until its call ends.
    auto call = begin_call(*second, 2_MiB, first);
    CHECK(second->share->capacity_bytes() == 1_MiB - 64_KiB);
    ToldClock::time += 1h;
    second->share->update();
    first.share->update();
    CHECK(second->share->capacity_bytes() == 1_MiB - 64_KiB);
    call.reset();
    second->share->update();
    first.share->update();
    second->share->update();
    CHECK(second->share->capacity_bytes() < 1_MiB - 64_KiB);
  }

  TEST_CASE(
      "DeviceShare: when a program's turn is over, its next call waits for the other programs") {
    TemporaryFolder folder;
    ToldClock::time = {};
    Program first{folder.path() / "table"};
    auto const second = join(first, folder.path() / "table");
    { auto const call = begin_call(first, 640_KiB, *second); }
    { auto const call = begin_call(first, 512_KiB, *second); }  // in the same turn
    CHECK(first.share->capacity_bytes() >= 640_KiB);

    std::atomic<bool> is_over{false};
    std::atomic<std::size_t> in_turn_of_second{0};
    auto other = std::async(std::launch::async, [&] {
      {
        Share::ClaimHold const call{*second->share, 768_KiB};  // waits for the first program
        in_turn_of_second = second->share->capacity_bytes();
      }
      ToldClock::time += 1h;
      while (!is_over) {
        second->share->update();
      }
    });
    ToldClock::time += 1h;
    std::size_t in_turn_of_first = 0;
    while (in_turn_of_second == 0 || in_turn_of_first == 0) {
      Share::ClaimHold const call{*first.share, 640_KiB};
      in_turn_of_first = in_turn_of_second != 0 ? first.share->capacity_bytes() : 0;
      ToldClock::time += 1h;
    }
    is_over = true;
    other.get();
    CHECK(in_turn_of_second >= 768_KiB);
    CHECK(in_turn_of_first >= 640_KiB);
  }

  TEST_CASE("DeviceShare: retry passes on errors that more memory cannot prevent") {
    TemporaryFolder folder;
    ShareOptions options;
    options.patience = 0ms;
    Program first{folder.path() / "table", options};
    SmallBuffer small{first.bench.allocator, 64_KiB};
    auto const held = small.acquire(Access::write, first.bench.stream);
    CHECK_THROWS_AS(first.share->retry([&] {
      return SmallBuffer{first.bench.allocator, 1_MiB};
    }),
                    OutOfDeviceMemory);
    CHECK_THROWS_AS(first.share->retry([]() -> int { throw std::runtime_error{"its own"}; }),
                    std::runtime_error);
    CHECK(first.share->retry([] { return 7; }) == 7);
    CHECK(first.share->claim(2_MiB) == ClaimResult::refused);

    constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
    CHECK(first.share->claim(most) == ClaimResult::refused);
    for (std::size_t const bytes : {most, most - 64_KiB + 1}) {
      int calls = 0;
      CHECK_THROWS_AS(first.share->retry([&] {
        if (++calls > 3) {
          throw std::runtime_error{"this goes on for ever"};
        }
        throw OutOfDeviceMemory{
            MemoryReport{.requested_bytes = bytes, .capacity_bytes = 0, .leased_bytes = 64_KiB},
            "the device has less"};
      }),
                      OutOfDeviceMemory);
    }
  }

  TEST_CASE("DeviceShare: retry passes on that other memory is full") {
    TemporaryFolder folder;
    Program first{folder.path() / "table"};
    SmallBench other{support::small_options(64_KiB)};
    int calls = 0;
    CHECK_THROWS_AS((void)first.share->retry([&] {
      if (++calls > 3) {
        throw std::runtime_error{"this goes on for ever"};
      }
      return SmallBuffer{other.allocator, 128_KiB};
    }),
                    OutOfDeviceMemory);
    CHECK(calls == 2);  // the share might have grown before the first claim
  }

  TEST_CASE("DeviceShare: what is promised and claimed is whole pages of a memory of pages") {
    struct PagePolicies : support::SmallPolicies {
      using arena = MappedPages;
    };
    using PageAllocator = DeviceAllocator<PagePolicies>;
    TemporaryFolder folder;
    detail::ShareTable other{folder.path() / "table", 1_MiB, 0, 1};
    (void)other.update(0, 0, true);
    other.shrink(1_MiB - 100_KiB);
    SimApi device{{.capacity_bytes = 2_MiB}};
    PageAllocator memory{device,
                         {.capacity_bytes = 1_MiB, .initial_bytes = 0, .page_bytes = 64_KiB}};
    DeviceShare<PageAllocator> share{
        memory,
        {.file = folder.path() / "table", .least_bytes = 1_KiB, .period = 0ms, .patience = 0ms}};
    REQUIRE(memory.stats().capacity_bytes == 64_KiB);  // of 100 KiB

    int calls = 0;
    auto const allocate = [&] {
      if (++calls > 3) {
        throw std::runtime_error{"this goes on for ever"};
      }
      return SwappableBuffer<PageAllocator>{memory, 80_KiB};
    };
    CHECK_THROWS_AS((void)share.retry(allocate), OutOfDeviceMemory);
    CHECK(calls == 1);

    other.shrink(0);
    CHECK(share.retry(allocate).size_bytes() == 80_KiB);
    CHECK_THROWS_AS((detail::ShareTable{folder.path() / "table", 1_MiB, 1_MiB - 63_KiB, 1}),
                    ContractViolation);  // a whole page is promised
  }

  TEST_CASE("DeviceShare: nearly the whole range of numbers cannot be promised") {
    TemporaryFolder folder;
    ShareOptions options;
    options.least_bytes = std::numeric_limits<std::size_t>::max();
    CHECK_THROWS_WITH_AS((Program{folder.path() / "table", options}),
                         doctest::Contains("at most the capacity"),
                         ContractViolation);
  }

  TEST_CASE("DeviceShare: an error on the share's own thread is thrown by the next call") {
    TemporaryFolder folder;
    StubbornMemory memory;
    DeviceShare<StubbornMemory> share{
        memory, {.file = folder.path() / "table", .least_bytes = 64_KiB, .period = 1ms}};
    for (auto const& call : std::vector<std::function<void()>>{[&] { (void)share.members(); },
                                                               [&] { (void)share.claim(2_MiB); },
                                                               [&] { share.update(); }}) {
      while (memory.capacity_bytes != 1_MiB) {  // since the share's thread may have lowered it
        std::this_thread::yield();
      }
      // The other program lacks memory that this one does not give up.
      detail::ShareTable table{folder.path() / "table", 1_MiB, 64_KiB, 1};
      memory.refuses = true;
      table.update(1_MiB, 0, true);
      while (memory.refusals == 0) {
        std::this_thread::yield();
      }
      memory.refuses = false;
      CHECK_THROWS_WITH_AS(call(), "the memory refuses", DeviceError);
      memory.refusals = 0;
    }
  }

  TEST_CASE("DeviceShare: processes that share a device never hold more than it has") {
    TemporaryFolder folder;
    auto const file = folder.path() / "table";
    auto const run = [&](std::uint8_t seed) {
      SmallBench bench{shared_options(1_MiB)};
      DeviceShare share{bench.allocator,
                        {.file = file,
                         .least_bytes = 64_KiB,
                         .period = 1ms,
                         .idle_after = 10ms,
                         .patience = 10min}};
      std::vector<std::unique_ptr<support::KnownBytes>> blocks;
      bool is_good = true;
      for (int round = 0; round < 12; ++round) {
        for (std::size_t i = blocks.size();
             i < 4U + 12U * ((seed + static_cast<unsigned>(round) / 3) % 2);
             ++i) {
          blocks.push_back(std::make_unique<support::KnownBytes>(
              bench, 64_KiB, static_cast<std::uint8_t>(seed + i)));
        }
        std::vector<LeaseRequest> requests;
        for (std::size_t i = 0; i < 4; ++i) {
          requests.push_back({blocks[i]->buffer().id(), Access::read});
        }
        (void)share.retry([&] { return bench.allocator.acquire_all(requests, bench.stream); });
        for (auto const& block : blocks) {
          is_good = is_good && block->is_intact();
        }
        if (round % 3 == 2) {
          blocks.clear();
        }
      }
      return is_good;
    };
    std::vector<pid_t> children;
    for (int i = 0; i < 3; ++i) {
      children.push_back(::fork());
      if (children.back() == 0) {
        bool is_good = false;
        try {
          is_good = run(static_cast<std::uint8_t>(i));
        } catch (std::exception const& error) {
          MESSAGE(error.what());
        }
        ::_exit(is_good ? 0 : 1);
      }
    }
    detail::ShareTable watcher{file, 1_MiB, 0, 1};
    std::size_t most_members = 0;
    while (!children.empty()) {
      std::uint64_t held = 0;
      auto const members = watcher.members();
      for (ShareMember const& member : members) {
        held += member.held_bytes;
      }
      CHECK(held <= 1_MiB);
      most_members = std::max(most_members, members.size());
      int status = 0;
      if (pid_t const ended = ::waitpid(-1, &status, WNOHANG); ended > 0) {
        CHECK(status == 0);
        std::erase(children, ended);
      }
    }
    CHECK(most_members > 1);
  }

  TEST_CASE("DeviceShare: a forked child does not change its parent's share") {
    TemporaryFolder folder;
    SmallBench bench{shared_options(1_MiB)};
    auto share = std::make_unique<DeviceShare<SmallAllocator>>(
        bench.allocator,
        ShareOptions{.file = folder.path() / "table", .least_bytes = 64_KiB, .period = 1ms});
    spillway::test::ForkedChild const child{[&] {
      share->update();
      bool const takes_part = share->claim(1) != ClaimResult::refused || !share->members().empty();
      bool const is_kept = share->capacity_bytes() == 1_MiB;
      share.reset();
      return is_kept && !takes_part;
    }};
    CHECK(child.status() == 0);
    CHECK(share->members().at(0).held_bytes == 1_MiB);
  }

  TEST_CASE("DeviceShare: a forked child does not wait for a call that waits in its parent") {
    TemporaryFolder folder;
    detail::ShareTable other{folder.path() / "table", 1_MiB, 0, 1};
    WatchedMemory memory;
    auto share = std::make_unique<DeviceShare<WatchedMemory>>(
        memory,
        ShareOptions{
            .file = folder.path() / "table", .least_bytes = 64_KiB, .period = 0ms, .patience = 1h});
    while (other.update(1_MiB, 512_KiB, true).held_bytes < 512_KiB) {
      share->update();
    }
    auto waiting = std::async(std::launch::async, [&] { return share->claim(1_MiB); });
    while (!has_claimed(other, 1_MiB - 64_KiB)) {
      (void)other.update(0, 0, true);
    }
    (void)share->members();  // takes the lock, so the call waits
    spillway::test::ForkedChild const child{[&] { share.reset(); }};
    CHECK(child.status() == 0);
    other.shrink(0);
    CHECK(waiting.get() == ClaimResult::granted);
  }
}
