// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/pager/leases.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/sim.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include <support/small_allocator.hpp>

TEST_SUITE("pager") {
  namespace {

  using namespace spillway::literals;
  using spillway::Access;
  using spillway::BlockId;
  using spillway::LeaseRequest;
  using spillway::Residency;
  using support::SmallAllocator;
  using support::SmallBench;
  using Leases = std::vector<SmallAllocator::lease_type>;

  constexpr std::size_t block_bytes = 64_KiB;

  /// An allocator with room for four blocks, and blocks of known bytes.
  struct FourBlocks : SmallBench {
    FourBlocks() : SmallBench{options()} {}

    static SmallAllocator::Options options() {
      SmallAllocator::Options options = support::small_options(4 * block_bytes);
      options.paging.lease_wait = std::chrono::minutes{10};  // longer waits are deadlocks
      return options;
    }
    BlockId make(std::uint8_t value, std::size_t bytes = block_bytes) {
      BlockId const id = allocator.allocate(bytes);
      auto const lease = allocator.acquire(id, Access::write, stream);
      device.launch(stream, [at = lease.data(), bytes, value] { std::memset(at, value, bytes); });
      return id;
    }
    BlockId make_away(std::uint8_t value, std::size_t bytes = block_bytes) {
      BlockId const id = make(value, bytes);
      allocator.swap_out(id);
      return id;
    }
    /// Leases on new blocks that fill the device.
    Leases fill_device() {
      Leases held;
      for (int i = 0; i < 4; ++i) {
        blocks.push_back(allocator.allocate(block_bytes));
        held.push_back(allocator.acquire(blocks.back(), Access::write, stream));
      }
      return held;
    }
    void wait_for_waiting_threads(std::size_t count) const {
      while (allocator.waiting_threads() < count) {
        std::this_thread::yield();
      }
    }
    void free_all() {
      for (BlockId const id : std::exchange(blocks, {})) {
        allocator.deallocate(id);
      }
    }

    std::vector<BlockId> blocks;
  };

  /// A device that calls the test at its next copy.
  struct CallingDevice : spillway::SimApi {
    using spillway::SimApi::BasicSimApi;
    void copy(void* to,
              void const* from,
              std::size_t bytes,
              spillway::CopyKind kind,
              stream_type stream) {
      if (auto const act = std::exchange(at_next_copy, nullptr)) {
        act();
      }
      spillway::SimApi::copy(to, from, bytes, kind, stream);
    }
    std::function<void()> at_next_copy;
  };
  struct CallingPolicies : spillway::PoliciesFor<CallingDevice> {
    using eviction = spillway::LruEviction;
    using prefetch = spillway::NoPrefetch;
  };

  }  // namespace

  TEST_CASE("Leases: threads that wait for room for one block make it resident once") {
    FourBlocks bench;
    BlockId const wanted = bench.make_away(7);
    Leases held = bench.fill_device();
    std::atomic<int> right{0};
    auto const read = [&] {
      auto const stream = bench.allocator.create_stream();
      auto const lease = bench.allocator.acquire(wanted, Access::read, stream);
      bench.device.launch(stream, [&right, at = lease.data()] {
        auto const* const bytes = static_cast<std::uint8_t const*>(at);
        right += bytes[0] == 7 && std::memcmp(bytes, bytes + 1, block_bytes - 1) == 0 ? 1 : 0;
      });
      stream.synchronize();
    };
    std::thread one{read};
    std::thread other{read};
    bench.wait_for_waiting_threads(2);
    held.resize(2);
    one.join();
    other.join();
    held.clear();

    CHECK(right == 2);
    bench.free_all();
    bench.allocator.deallocate(wanted);
    auto const stats = bench.allocator.stats();
    CHECK(stats.resident.bytes.current == 0);
    CHECK(stats.free_bytes == stats.reserved_bytes);
  }

  TEST_CASE("Leases: a block may be freed while it is made again as an operand") {
    FourBlocks bench;
    BlockId const operand = bench.make(1);
    for (int round = 0; round < 200; ++round) {  // the owner's thread has to be quick to matter
      BlockId const made = bench.make(2);
      std::atomic<bool> is_making{false};
      bench.allocator.set_recipe(made, {operand}, std::chrono::nanoseconds{1}, [&](auto&&...) {
        is_making = true;
        bench.wait_for_waiting_threads(1);
      });
      bench.allocator.swap_out(made);
      REQUIRE(bench.allocator.residency(made) == Residency::none);
      std::thread owner{[&] {
        while (!is_making) {
          std::this_thread::yield();
        }
        bench.allocator.deallocate(made);  // waits until the block has its bytes
      }};
      (void)bench.allocator.acquire(operand, Access::write, bench.stream);
      owner.join();
    }
    CHECK(bench.allocator.stats().allocated.blocks.current == 1);
    bench.allocator.deallocate(operand);
  }

  TEST_CASE("Leases: groups that overwrite the same blocks do not block each other") {
    FourBlocks bench;
    BlockId const x = bench.make_away(1);
    BlockId const y = bench.make_away(2);
    BlockId const p = bench.make_away(3, 2 * block_bytes);
    BlockId const q = bench.make_away(4, 2 * block_bytes);
    Leases held = bench.fill_device();
    auto const overwrite = [&](std::vector<LeaseRequest> const& requests) {
      auto const stream = bench.allocator.create_stream();
      CHECK(bench.allocator.acquire_all(requests, stream).size() == 3);
    };
    std::thread one{
        overwrite,
        std::vector<LeaseRequest>{{x, Access::write}, {p, Access::write}, {y, Access::write}}};
    bench.wait_for_waiting_threads(1);
    std::thread other{
        overwrite,
        std::vector<LeaseRequest>{{y, Access::write}, {q, Access::write}, {x, Access::write}}};
    bench.wait_for_waiting_threads(2);
    while (!held.empty()) {  // room comes piece by piece, and each thread may take some
      held.pop_back();
      std::this_thread::yield();
    }
    one.join();
    other.join();

    bench.free_all();
    for (BlockId const id : {x, y, p, q}) {
      bench.allocator.deallocate(id);
    }
  }

  TEST_CASE("Leases: groups that overwrite a block which is just leaving do not block each other") {
    using Calling = spillway::DeviceAllocator<CallingPolicies>;
    CallingDevice device{{.capacity_bytes = 64_MiB}};
    Calling::Options options{.capacity_bytes = 6 * block_bytes};
    options.host.pinned_bytes = 16_MiB;
    options.paging.lease_wait = std::chrono::minutes{10};
    Calling allocator{device, options};
    auto const stream = allocator.create_stream();
    auto const make = [&](std::size_t bytes) {
      BlockId const id = allocator.allocate(bytes);
      (void)allocator.acquire(id, Access::write, stream);
      return id;
    };
    auto const make_away = [&](std::size_t bytes) {
      BlockId const id = make(bytes);
      allocator.swap_out(id);
      return id;
    };
    auto const wait_until = [](auto const& is_so) {
      while (!is_so()) {
        std::this_thread::yield();
      }
    };
    auto const is_resident = [&](BlockId id) {
      return allocator.residency(id) == Residency::device;
    };
    auto const overwrite = [&](std::vector<LeaseRequest> const& requests) {
      auto const other_stream = allocator.create_stream();
      CHECK(allocator.acquire_all(requests, other_stream).size() == requests.size());
    };
    BlockId const x = make_away(block_bytes);
    BlockId const big = make_away(3 * block_bytes);
    BlockId const next = make_away(2 * block_bytes);
    BlockId const small_leased = make(block_bytes);
    BlockId const big_leased = make(3 * block_bytes);
    auto small_lease = allocator.acquire(small_leased, Access::read, stream);
    auto big_lease = allocator.acquire(big_leased, Access::read, stream);
    BlockId const y = make(2 * block_bytes);

    // The first group asks for `y` while it is leaving, the second one when it is away. Both then
    // want to fill `x` and `y`.
    std::thread one;
    device.at_next_copy = [&] {
      one =
          std::thread{overwrite, std::vector<LeaseRequest>{{y, Access::write}, {x, Access::write}}};
      wait_until([&] {
        bool is_wanted = false;
        allocator.for_each_block([&](BlockId id, auto const& block) {
          is_wanted = is_wanted || (id == y && block.is_leased());
        });
        return is_wanted;
      });
    };
    auto next_lease = allocator.acquire(next, Access::read, stream);  // evicts `y`
    wait_until([&] { return allocator.waiting_threads() == 1; });
    std::thread other{
        overwrite,
        std::vector<LeaseRequest>{{x, Access::write}, {big, Access::write}, {y, Access::write}}};
    wait_until([&] { return allocator.waiting_threads() == 2; });
    small_lease.release();  // makes room for `x`
    wait_until([&] { return is_resident(x); });
    next_lease.release();  // makes room for `y`, which a group that waits for `x` must not take
    for (int i = 0; i < 1000 && !is_resident(y); ++i) {
      std::this_thread::yield();
    }
    big_lease.release();
    one.join();
    other.join();

    for (BlockId const id : {x, big, next, small_leased, big_leased, y}) {
      allocator.deallocate(id);
    }
  }

  TEST_CASE("Leases: an acquire that finds no room fails, also if its block was freed meanwhile") {
    FourBlocks bench;
    BlockId const operand = bench.make(1, block_bytes / 2);
    BlockId const other = bench.make(2, block_bytes / 2);
    BlockId const freed = bench.make(3, 3 * block_bytes);
    for (BlockId const made : {other, freed}) {
      bench.allocator.set_recipe(
          made, {operand}, std::chrono::nanoseconds{1}, [](auto const&...) {});
    }
    std::vector<LeaseRequest> requests{{freed, Access::read}};
    SUBCASE("the block is on the host") {
      bench.allocator.set_recipe(freed, {operand}, std::chrono::hours{1}, [](auto const&...) {});
    }
    SUBCASE("the block was dropped") {}
    SUBCASE("another block of the group could be made again without its lease") {
      requests.push_back({other, Access::read});
    }
    bench.allocator.swap_out(freed);
    bench.allocator.swap_out(other);
    BlockId const leased = bench.make(4);
    auto lease = bench.allocator.acquire(leased, Access::read, bench.stream);
    std::thread thread{[&] {
      auto const stream = bench.allocator.create_stream();
      if (requests.size() == 1) {
        CHECK_THROWS_AS((void)bench.allocator.acquire_all(requests, stream),
                        spillway::OutOfDeviceMemory);
      } else {
        CHECK_THROWS_AS((void)bench.allocator.acquire_all(requests, stream),
                        spillway::ContractViolation);
      }
    }};
    bench.wait_for_waiting_threads(1);
    bench.allocator.abandon(freed);
    bench.allocator.set_capacity(2 * block_bytes);  // less than the block needs
    thread.join();

    CHECK(bench.allocator.stats().allocated.blocks.current == 3);
    lease.release();
    for (BlockId const id : {operand, other, leased}) {
      bench.allocator.deallocate(id);
    }
  }

  TEST_CASE("Leases: a thread waits for room however many leases end that do not make it") {
    FourBlocks bench;
    BlockId const wanted = bench.make_away(1, 4 * block_bytes);
    BlockId const leased = bench.make(2);
    BlockId const busy = bench.make(3);
    auto lease = bench.allocator.acquire(leased, Access::read, bench.stream);
    std::atomic<bool> has_ended{false};
    std::thread other{[&] {
      auto const stream = bench.allocator.create_stream();
      CHECK_NOTHROW((void)bench.allocator.acquire(wanted, Access::read, stream));
      has_ended = true;
    }};
    bench.wait_for_waiting_threads(1);
    for (int i = 0; i < 100 && !has_ended; ++i) {
      auto const waits = bench.allocator.stats().host_waits;
      (void)bench.allocator.acquire(busy, Access::read, bench.stream);
      while (bench.allocator.stats().host_waits == waits && !has_ended) {
        std::this_thread::yield();
      }
    }
    lease.release();
    other.join();

    for (BlockId const id : {wanted, leased, busy}) {
      bench.allocator.deallocate(id);
    }
  }

  TEST_CASE("DeviceAllocator: if two threads fail to lower the capacity, it is as it was") {
    for (int round = 0; round < 20; ++round) {  // the first thread to begin has to fail first
      CallingDevice device{{.capacity_bytes = 64_MiB}};
      spillway::DeviceAllocator<CallingPolicies>::Options options{.capacity_bytes =
                                                                      4 * block_bytes};
      options.host.pinned_bytes = 16_MiB;
      options.paging.lease_wait = std::chrono::minutes{10};
      spillway::DeviceAllocator<CallingPolicies> allocator{device, options};
      auto const stream = allocator.create_stream();
      BlockId const large = allocator.allocate(2 * block_bytes);
      BlockId const small = allocator.allocate(block_bytes);
      auto large_lease = allocator.acquire(large, Access::write, stream);
      auto small_lease = allocator.acquire(small, Access::write, stream);
      auto const lower = [&](std::size_t bytes) {
        CHECK_THROWS_AS(allocator.set_capacity(bytes), spillway::DeviceError);
      };
      std::vector<std::thread> threads;
      for (std::size_t const bytes : {2 * block_bytes, block_bytes}) {
        threads.emplace_back(lower, bytes);
        while (allocator.waiting_threads() != threads.size()) {
          std::this_thread::yield();
        }
      }
      std::function<void()> const refuse = [&] {
        device.at_next_copy = refuse;
        throw spillway::DeviceError{"no more copies"};
      };
      device.at_next_copy = refuse;
      small_lease.release();
      for (std::thread& thread : threads) {
        thread.join();
      }

      CHECK(allocator.stats().capacity_bytes == 4 * block_bytes);
      large_lease.release();
      allocator.deallocate(large);
      allocator.deallocate(small);
    }
  }

  TEST_CASE("Leases: raising the capacity lets threads that wait for room continue") {
    FourBlocks bench;
    bench.allocator.set_capacity(2 * block_bytes);
    BlockId const leased = bench.make(1, 2 * block_bytes);
    auto lease = bench.allocator.acquire(leased, Access::read, bench.stream);
    std::thread other{[&] { bench.allocator.deallocate(bench.allocator.allocate(block_bytes)); }};
    bench.wait_for_waiting_threads(1);
    bench.allocator.set_capacity(4 * block_bytes);
    other.join();

    lease.release();
    bench.allocator.deallocate(leased);
  }
}
