// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/testing/device_contracts.hpp>
#include <spillway/testing/order_check.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include <support/random_work.hpp>

using namespace spillway;
using spillway::test::RandomWork;
using spillway::test::WorkBench;
using spillway::test::WorkItem;
using spillway::testing::DeviceRig;
using spillway::testing::SteppedSimApi;

namespace {

struct TwoStreams {
  SteppedSimApi device;
  DeviceRig<SteppedSimApi> rig{device};
  SimStream a = rig.stream();
  SimStream b = rig.stream();
  SimEvent event = rig.event();
  unsigned char* memory = rig.device_memory(1024);
  unsigned char* host = rig.pinned(1024);

  void fill(SimStream stream, std::size_t from, std::size_t n) {
    device.fill(memory + from, 0, n, stream);
  }
  void read(SimStream stream, std::size_t from, std::size_t n) {
    device.use(memory + from, n, Access::read, stream);
  }
};

}  // namespace

TEST_SUITE("sim_order_check") {
  TEST_CASE("SteppedSimApi: unordered work on the same bytes is refused") {
    TwoStreams t;
    SUBCASE("write after write") {
      t.fill(t.a, 0, 100);
      CHECK_THROWS_AS(t.fill(t.b, 99, 100), ContractViolation);
    }
    SUBCASE("read after write") {
      t.fill(t.a, 0, 100);
      CHECK_THROWS_AS(t.read(t.b, 50, 1), ContractViolation);
    }
    SUBCASE("write after read") {
      t.read(t.a, 100, 100);
      CHECK_THROWS_AS(t.fill(t.b, 0, 101), ContractViolation);
    }
    SUBCASE("write after the second of two reads") {
      t.read(t.b, 0, 100);
      t.read(t.a, 0, 100);
      CHECK_THROWS_AS(t.fill(t.b, 0, 1), ContractViolation);
    }
    SUBCASE("in pinned memory") {
      t.device.copy(t.host, t.memory, 64, CopyKind::to_host, t.a);
      CHECK_THROWS_AS(t.device.copy(t.memory + 64, t.host, 8, CopyKind::to_device, t.b),
                      ContractViolation);
    }
    SUBCASE("poison") {
      t.read(t.a, 0, 10);
      CHECK_THROWS_AS(t.device.poison(t.memory, 100, t.b), ContractViolation);
    }
  }

  TEST_CASE("SteppedSimApi: running first does not count as order") {
    TwoStreams t;
    t.fill(t.a, 0, 100);
    t.device.run_all();
    CHECK_THROWS_AS(t.fill(t.b, 0, 100), ContractViolation);
  }

  TEST_CASE("SteppedSimApi: a refused operation has no effect") {
    TwoStreams t;
    t.fill(t.a, 0, 100);
    SimCalls const calls = t.device.calls();
    std::size_t const queued = t.device.queued_ops(t.b);

    CHECK_THROWS_AS(t.device.copy(t.host, t.memory, 8, CopyKind::to_host, t.b), ContractViolation);

    CHECK(t.device.calls() == calls);
    CHECK(t.device.queued_ops(t.b) == queued);
    t.device.copy(t.memory + 512, t.host, 8, CopyKind::to_device, t.a);
  }

  TEST_CASE("SteppedSimApi: ordered or unrelated work is accepted") {
    TwoStreams t;
    t.fill(t.a, 0, 100);
    SUBCASE("different bytes") {
      t.fill(t.b, 100, 100);
      t.read(t.b, 200, 10);
    }
    SUBCASE("two reads") {
      t.read(t.a, 200, 10);
      t.read(t.b, 200, 10);
    }
    SUBCASE("the same stream") {
      t.fill(t.a, 0, 100);
    }
    SUBCASE("order by an event") {
      t.device.record(t.event, t.a);
      t.device.wait(t.b, t.event);
      t.fill(t.b, 0, 100);
    }
    SUBCASE("order by an event through a third stream") {
      auto const c = t.rig.stream();
      t.device.record(t.event, t.a);
      t.device.wait(c, t.event);
      t.device.record(t.event, c);
      t.device.wait(t.b, t.event);
      t.fill(t.b, 0, 100);
    }
    SUBCASE("order by the host, which waited for the stream") {
      t.device.synchronize(t.a);
      t.fill(t.b, 0, 100);
    }
    SUBCASE("order by the host, which waited for an event") {
      t.device.record(t.event, t.a);
      t.device.synchronize(t.event);
      t.fill(t.b, 0, 100);
    }
    SUBCASE("order by the host, which saw that an event is complete") {
      t.device.record(t.event, t.a);
      t.device.run_all();
      REQUIRE(t.device.is_complete(t.event));
      t.fill(t.b, 0, 100);
    }
    SUBCASE("order by a host function that can signal the host") {
      t.device.launch_host(
          t.a, [](void*) noexcept {}, nullptr);
      t.device.run_all();
      t.fill(t.b, 0, 100);
    }
    SUBCASE("new memory at the address of a reservation") {
      void* old = t.device.try_reserve(64_KiB);
      for (SimStream const stream : {t.a, t.b}) {
        t.device.fill(old, 0, 64_KiB, stream);
        t.device.run_all();
        t.device.release(old, 64_KiB);
        old = t.device.try_reserve(64_KiB);  // at any address: mostly the same one
      }
      t.device.release(old, 64_KiB);
    }
    SUBCASE("new memory at an address mapped before") {
      void* const p = t.device.reserve_address(64_KiB);
      auto const physical = t.device.try_create_physical(64_KiB);
      for (SimStream const stream : {t.a, t.b}) {
        REQUIRE(t.device.try_map(p, 64_KiB, {&*physical, 1}));
        t.device.fill(p, 0, 64_KiB, stream);
        t.device.run_all();
        t.device.unmap(p, 64_KiB);
      }
      t.device.release_physical(*physical);
      t.device.free_address(p, 64_KiB);
    }
  }

  TEST_CASE("SteppedSimApi: an event recorded before the work does not order it") {
    TwoStreams t;
    t.device.record(t.event, t.a);
    t.fill(t.a, 0, 100);
    t.device.wait(t.b, t.event);
    CHECK_THROWS_AS(t.fill(t.b, 0, 100), ContractViolation);
  }

  TEST_CASE("SteppedSimApi: the refusal names both streams and both ranges") {
    TwoStreams t;
    t.fill(t.a, 0, 100);
    std::string what;
    try {
      t.read(t.b, 50, 10);
    } catch (ContractViolation const& violation) {
      what = violation.what();
    }
    CHECK(what == "SimApi: race: a kernel on stream number 2 reads " +
                      detail::describe_range(t.memory + 50, 10) +
                      " and is not ordered after the write of " +
                      detail::describe_range(t.memory, 100) + " by operation 1 of stream number 1");
  }

  TEST_CASE("OrderCheck: work on no bytes needs no order, wherever it is") {
    std::array<std::byte, 512> memory{};
    std::byte* const p = memory.data();
    testing::OrderCheck check;
    check.enqueue(1, "fill", {p, 100, true});
    CHECK_NOTHROW(check.enqueue(2, "fill", {p + 50, 0, true}));
    CHECK_NOTHROW(check.enqueue(2, "copy", {p + 50, 0, false}, {p + 200, 0, true}));

    std::array const copies{detail::SimCopy{.to = p + 100, .from = p, .bytes = 100},
                            detail::SimCopy{.to = p + 150, .from = p + 50, .bytes = 0}};
    CHECK_NOTHROW(check.enqueue_batch(1, copies));
  }

  TEST_CASE("OrderCheck: a race with the stream of number 0 is found, too") {
    std::array<std::byte, 100> memory{};
    testing::OrderCheck check;
    check.enqueue(0, "fill", {memory.data(), 100, true});
    CHECK_THROWS_AS(check.enqueue(1, "fill", {memory.data(), 100, true}), ContractViolation);
    CHECK_NOTHROW(check.enqueue(0, "fill", {memory.data(), 100, true}));
  }

  TEST_CASE("SteppedSimApi: exactly the unordered work is refused") {
    std::size_t refusals = 0;
    std::size_t wrong = 0;
    for (std::uint64_t seed = 1; seed <= 60; ++seed) {
      RandomWork const work{seed};
      SteppedSimApi device;
      WorkBench bench{device};
      for (WorkItem const& item : work.items()) {
        bool is_accepted = true;
        try {
          bench.enqueue(item);
        } catch (ContractViolation const&) {
          is_accepted = false;
          ++refusals;
        }
        wrong += static_cast<std::size_t>(is_accepted != item.is_ordered);
      }
    }
    CHECK(wrong == 0);
    CHECK(refusals > 1000);
  }
}
