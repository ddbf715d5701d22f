// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/sim/model_api.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/testing/device_contracts.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <vector>

using namespace spillway;
using spillway::testing::DeviceRig;
using spillway::testing::SteppedSimApi;

static_assert(!std::is_copy_constructible_v<SimApi> && !std::is_move_constructible_v<SimApi>);
static_assert(SimApi::is_thread_safe && ModelApi::is_thread_safe && !SteppedSimApi::is_thread_safe);
static_assert(SimApi::holds_bytes && SteppedSimApi::holds_bytes && !ModelApi::holds_bytes);

TEST_CASE_TEMPLATE_INVOKE(device_memory_contract, SimApi, SteppedSimApi, ModelApi);
TEST_CASE_TEMPLATE_INVOKE(device_copy_contract, SimApi, SteppedSimApi, ModelApi);
TEST_CASE_TEMPLATE_INVOKE(device_order_contract, SimApi, SteppedSimApi, ModelApi);
TEST_CASE_TEMPLATE_INVOKE(device_progress_contract, SimApi);
TEST_CASE_TEMPLATE_INVOKE(virtual_memory_contract, SimApi, SteppedSimApi, ModelApi);

namespace {

/// The message with which `call` is refused; empty if it is accepted.
template <class Call>
std::string refusal(Call call) {
  try {
    call();
  } catch (DeviceError const& error) {
    return error.what();
  }
  return {};
}

bool contains(std::string const& text, std::string const& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_SUITE("sim_api") {
  TEST_CASE_TEMPLATE(
      "SimApi: the capacity is exact to the byte", D, SimApi, SteppedSimApi, ModelApi) {
    D device{{.capacity_bytes = 1_MiB, .pinned_capacity_bytes = 64_KiB}};

    void* const first = device.try_reserve(1_MiB - 100);
    REQUIRE(first != nullptr);
    CHECK(device.memory_info().free_bytes == 100);
    CHECK(device.memory_info().total_bytes == 1_MiB);
    CHECK(device.try_reserve(101) == nullptr);
    void* const second = device.try_reserve(100);
    CHECK(second != nullptr);
    CHECK(device.try_create_physical(64_KiB) == std::nullopt);

    device.release(first, 1_MiB - 100);
    CHECK(device.memory_info().free_bytes == 1_MiB - 100);
    auto const physical = device.try_create_physical(64_KiB);
    REQUIRE(physical.has_value());
    CHECK(device.memory_info().free_bytes == 1_MiB - 100 - 64_KiB);
    device.release_physical(*physical);
    device.release(second, 100);

    void* const pinned = device.try_allocate_pinned(64_KiB, -1);
    REQUIRE(pinned != nullptr);
    CHECK(device.try_allocate_pinned(1, -1) == nullptr);
    CHECK(device.usage().pinned_bytes == 64_KiB);
    device.free_pinned(pinned, 64_KiB);
    CHECK(device.usage() == SimUsage{});
  }

  TEST_CASE_TEMPLATE("SimApi: far more than the machine has can be reserved", D, SimApi, ModelApi) {
    D device{{.capacity_bytes = 256_GiB}};

    void* const p = device.try_reserve(200_GiB);

    CHECK(p != nullptr);
    CHECK(device.memory_info().free_bytes == 56_GiB);
    device.release(p, 200_GiB);
  }

  TEST_CASE_TEMPLATE(
      "SimApi: a copy outside of allocated memory is refused", D, SimApi, SteppedSimApi, ModelApi) {
    D device;
    DeviceRig<D> rig{device};
    auto const stream = rig.stream();
    unsigned char* const memory = rig.device_memory(1000);
    unsigned char* const host = rig.pinned(1000);
    SimCalls const before = device.calls();
    auto const copy = [&](void* to, void const* from, std::size_t n, CopyKind kind) {
      return refusal([&] { device.copy(to, from, n, kind, stream); });
    };
    unsigned char pageable[16] = {};

    CHECK(contains(copy(memory, pageable, 16, CopyKind::to_device), "source"));
    CHECK(contains(copy(pageable, memory, 16, CopyKind::to_host), "destination"));
    CHECK(contains(copy(memory, host, 1001, CopyKind::to_device),
                   "pinned memory, which try_allocate_pinned gives"));
    CHECK(contains(copy(memory + 1, host, 1000, CopyKind::to_device), "device memory"));
    CHECK(contains(copy(memory - 1, host, 8, CopyKind::to_device), "device memory"));
    CHECK(contains(copy(host, memory, 8, CopyKind::to_device), "pinned memory"));
    CHECK(contains(copy(memory, host, 8, CopyKind::on_device), "device memory"));
    CHECK(contains(copy(memory, nullptr, 8, CopyKind::to_device), "0x0"));
    CHECK(contains(copy(memory + 10, memory, 11, CopyKind::on_device), "overlaps"));
    CHECK(contains(copy(memory, memory + 10, 11, CopyKind::on_device), "overlaps"));
    CHECK(contains(copy(memory, memory, 1, CopyKind::on_device), "overlaps"));
    CHECK(copy(memory, memory + 10, 10, CopyKind::on_device).empty());
    CHECK_FALSE(refusal([&] { device.fill(memory + 999, 0, 2, stream); }).empty());
    CHECK_FALSE(refusal([&] { device.poison(memory + 999, 2, stream); }).empty());
    CHECK_FALSE(refusal([&] { device.use(host, 1, Access::read, stream); }).empty());

    SimCalls expected = before;
    expected.count_copy(CopyKind::on_device, 10);
    CHECK(device.calls() == expected);
  }

  TEST_CASE_TEMPLATE(
      "SimApi: released memory is refused at once", D, SimApi, SteppedSimApi, ModelApi) {
    D device;
    DeviceRig<D> rig{device};
    auto const stream = rig.stream();
    unsigned char* const host = rig.pinned(64);
    void* const memory = device.try_reserve(64);
    void* const pinned = device.try_allocate_pinned(64, -1);
    device.copy(memory, host, 64, CopyKind::to_device, stream);

    device.release(memory, 64);
    device.free_pinned(pinned, 64);

    CHECK_FALSE(
        refusal([&] { device.copy(memory, host, 64, CopyKind::to_device, stream); }).empty());
    CHECK_FALSE(
        refusal([&] { device.copy(pinned, memory, 1, CopyKind::to_host, stream); }).empty());
  }

  TEST_CASE_TEMPLATE(
      "SimApi: work may not cross from one reservation into the next", D, SimApi, ModelApi) {
    D device;
    DeviceRig<D> rig{device};
    auto const stream = rig.stream();
    std::vector<unsigned char*> all;
    for (int i = 0; i < 20; ++i) {
      all.push_back(rig.device_memory(64_KiB));
    }
    for (unsigned char* const p : all) {
      CHECK_FALSE(refusal([&] { device.fill(p, 0, 64_KiB + 1, stream); }).empty());
    }
  }

  TEST_CASE_TEMPLATE("SimApi: a launched callable runs once, in stream order, and is destroyed",
                     D,
                     SimApi,
                     SteppedSimApi,
                     ModelApi) {
    D device;
    auto const stream = device.create_stream();
    std::vector<int> order;
    auto const alive = std::make_shared<int>(0);
    for (int i = 0; i < 3; ++i) {
      device.launch(stream, [&order, alive, i] { order.push_back(i); });
    }
    device.launch(stream, [&order, mine = std::make_unique<int>(3)] { order.push_back(*mine); });
    device.synchronize(stream);
    CHECK(order == std::vector{0, 1, 2, 3});
    CHECK(alive.use_count() == 1);

    device.fail(SimCall::launch_host, 1);
    CHECK_THROWS_AS(device.launch(stream, [alive] {}), DeviceError);
    CHECK(alive.use_count() == 1);
    device.destroy_stream(stream);
  }

  TEST_CASE_TEMPLATE(
      "SimApi: null pointers and sizes of zero are refused", D, SimApi, SteppedSimApi, ModelApi) {
    D device;
    auto const stream = device.create_stream();
    CHECK_THROWS_AS((void)device.try_reserve(0), DeviceError);
    CHECK_THROWS_AS((void)device.try_allocate_pinned(0, 0), DeviceError);
    CHECK_THROWS_AS(device.launch_host(stream, nullptr, nullptr), DeviceError);
    CHECK_THROWS_AS((void)device.reserve_address(64_KiB + 1), DeviceError);
    CHECK_THROWS_AS((void)device.try_create_physical(0), DeviceError);
    device.destroy_stream(stream);
  }

  TEST_CASE_TEMPLATE("SimApi: destroyed handles and those of another device are refused",
                     D,
                     SimApi,
                     SteppedSimApi,
                     ModelApi) {
    D device;
    D other;
    auto const stream = device.create_stream();
    auto const event = device.create_event();
    auto const gone_stream = device.create_stream();
    auto const gone_event = device.create_event();
    device.destroy_stream(gone_stream);
    device.destroy_event(gone_event);
    auto const refused = [](auto call) { CHECK_THROWS_AS(call(), DeviceError); };

    for (auto const bad : {gone_stream, SimStream{}, other.create_stream()}) {
      refused([&] { device.launch_host(bad, spillway::testing::add_one, nullptr); });
      refused([&] { device.fill(nullptr, 0, 0, bad); });
      refused([&] { device.copy(nullptr, nullptr, 0, CopyKind::to_host, bad); });
      refused([&] { device.record(event, bad); });
      refused([&] { device.wait(bad, event); });
      refused([&] { device.synchronize(bad); });
      refused([&] { device.compute(bad, 1); });
    }
    for (auto const bad : {gone_event, SimEvent{}, other.create_event()}) {
      refused([&] { device.record(bad, stream); });
      refused([&] { device.wait(stream, bad); });
      refused([&] { device.synchronize(bad); });
      refused([&] { (void)device.is_complete(bad); });
    }
  }

  TEST_CASE("SimApi: a new stream never gets the handle of a destroyed one") {
    SimApi device;
    std::unordered_set<SimStream> seen;
    for (int i = 0; i < 50; ++i) {
      auto const stream = device.create_stream();
      CHECK(seen.insert(stream).second);
      device.destroy_stream(stream);
    }
  }

  TEST_CASE_TEMPLATE("SimApi: new memory is poisoned", D, SimApi, SteppedSimApi) {
    D device{{.poison_byte = 0xAB, .poison_limit_bytes = 4096}};
    DeviceRig<D> rig{device};
    unsigned char const* const memory = rig.device_memory(4096);
    unsigned char const* const large = rig.device_memory(4097);
    unsigned char const* const pinned = rig.pinned(100);

    CHECK(std::count(memory, memory + 4096, 0xAB) == 4096);
    CHECK(std::count(pinned, pinned + 100, 0xAB) == 100);
    CHECK(large[0] == 0);
  }

  TEST_CASE_TEMPLATE(
      "SimApi: poisoning is stream-ordered and not counted as a call", D, SimApi, SteppedSimApi) {
    D device{{.poison_byte = 0xAB}};
    DeviceRig<D> rig{device};
    auto const stream = rig.stream();
    unsigned char* const memory = rig.device_memory(64);
    unsigned char* const before = rig.pinned(64, 0);
    unsigned char* const after = rig.pinned(64, 0);
    device.fill(memory, 1, 64, stream);
    device.copy(before, memory, 64, CopyKind::to_host, stream);
    SimCalls const calls = device.calls();

    device.poison(memory + 16, 16, stream);

    CHECK(device.calls() == calls);
    device.copy(after, memory, 64, CopyKind::to_host, stream);
    device.synchronize(stream);
    CHECK(std::count(before, before + 64, 1) == 64);
    CHECK(std::count(after, after + 64, 1) == 48);
    CHECK(std::count(after + 16, after + 32, 0xAB) == 16);
  }

  TEST_CASE_TEMPLATE(
      "SimApi: work enqueued before a release still has its memory", D, SimApi, SteppedSimApi) {
    D device;
    DeviceRig<D> rig{device};
    auto const stream = rig.stream();
    unsigned char* const target = rig.pinned(64_KiB, 0);
    void* const memory = device.try_reserve(64_KiB);
    void* const source = device.try_allocate_pinned(64_KiB, -1);
    std::memset(source, 9, 64_KiB);
    device.copy(memory, source, 64_KiB, CopyKind::to_device, stream);
    device.copy(target, memory, 64_KiB, CopyKind::to_host, stream);

    device.release(memory, 64_KiB);
    device.free_pinned(source, 64_KiB);

    CHECK(device.memory_info().free_bytes == device.memory_info().total_bytes);
    device.synchronize(stream);
    CHECK(std::count(target, target + 64_KiB, 9) == 64_KiB);
  }

  TEST_CASE_TEMPLATE(
      "SimApi: each call is counted once, if it succeeded", D, SimApi, SteppedSimApi, ModelApi) {
    D device;
    CHECK(device.calls() == SimCalls{});
    auto const stream = device.create_stream();
    auto const event = device.create_event();
    void* const memory = device.try_reserve(1000);
    void* const host = device.try_allocate_pinned(1000, -1);
    int launched = 0;
    device.copy(memory, host, 10, CopyKind::to_device, stream);
    device.copy(host, memory, 20, CopyKind::to_host, stream);
    device.copy(static_cast<char*>(memory) + 500, memory, 30, CopyKind::on_device, stream);
    device.fill(memory, 0, 40, stream);
    device.launch_host(stream, spillway::testing::add_one, &launched);
    device.record(event, stream);
    device.wait(stream, event);
    (void)device.is_complete(event);
    device.synchronize(event);
    device.synchronize(stream);
    (void)device.memory_info();
    (void)device.clock_ns();
    (void)device.numa_node();
    void* const address = device.reserve_address(64_KiB);
    auto const physical = device.try_create_physical(64_KiB);
    REQUIRE(device.try_map(address, 64_KiB, {&*physical, 1}));
    device.unmap(address, 64_KiB);
    device.release_physical(*physical);
    device.free_address(address, 64_KiB);
    device.release(memory, 1000);
    device.free_pinned(host, 1000);
    device.destroy_event(event);
    device.destroy_stream(stream);
    CHECK_THROWS_AS(device.record(event, stream), DeviceError);
    CHECK(device.try_reserve(2_GiB) == nullptr);

    CHECK(launched == 1);
    CHECK(device.calls().copies() == 3);
    CHECK(device.calls().copied_bytes() == 60);
    CHECK(device.calls() == SimCalls{.reserves = 1,
                                     .releases = 1,
                                     .pinned_allocations = 1,
                                     .pinned_frees = 1,
                                     .copies_to_host = 1,
                                     .copies_to_device = 1,
                                     .copies_on_device = 1,
                                     .bytes_to_host = 20,
                                     .bytes_to_device = 10,
                                     .bytes_on_device = 30,
                                     .fills = 1,
                                     .filled_bytes = 40,
                                     .host_launches = 1,
                                     .streams_created = 1,
                                     .streams_destroyed = 1,
                                     .events_created = 1,
                                     .events_destroyed = 1,
                                     .records = 1,
                                     .waits = 1,
                                     .completion_queries = 1,
                                     .host_synchronizations = 2,
                                     .memory_queries = 1,
                                     .address_reservations = 1,
                                     .address_frees = 1,
                                     .physical_creations = 1,
                                     .physical_releases = 1,
                                     .maps = 1,
                                     .unmaps = 1,
                                     .mapped_pieces = 1,
                                     .unmapped_pieces = 1});
  }

  TEST_CASE_TEMPLATE("SimApi: an injected fault makes its call fail once, without effect",
                     D,
                     SimApi,
                     SteppedSimApi,
                     ModelApi) {
    D device;
    DeviceRig<D> rig{device};
    auto const stream = rig.stream();
    auto const event = rig.event();
    unsigned char* const memory = rig.device_memory(64);
    unsigned char* const host = rig.pinned(64, 1);
    void* const address = device.reserve_address(64_KiB);
    auto const physical = device.try_create_physical(64_KiB);
    SimUsage const usage = device.usage();
    int launched = 0;

    auto const strikes_second = [&](SimCall call, auto attempt) {
      device.fail(call, 2);
      attempt();
      SimCalls const calls = device.calls();
      CHECK_THROWS_AS(attempt(), DeviceError);
      CHECK(device.calls() == calls);
      attempt();
    };
    strikes_second(SimCall::copy,
                   [&] { device.copy(memory, host, 64, CopyKind::to_device, stream); });
    strikes_second(SimCall::fill, [&] { device.fill(memory, 0, 64, stream); });
    strikes_second(SimCall::record, [&] { device.record(event, stream); });
    strikes_second(SimCall::wait, [&] { device.wait(stream, event); });
    strikes_second(SimCall::synchronize, [&] { device.synchronize(stream); });
    strikes_second(SimCall::launch_host,
                   [&] { device.launch_host(stream, spillway::testing::add_one, &launched); });
    strikes_second(SimCall::create_stream, [&] { device.destroy_stream(device.create_stream()); });
    strikes_second(SimCall::create_event, [&] { device.destroy_event(device.create_event()); });
    strikes_second(SimCall::reserve_address,
                   [&] { device.free_address(device.reserve_address(64_KiB), 64_KiB); });
    strikes_second(SimCall::create_physical,
                   [&] { device.release_physical(device.try_create_physical(64_KiB).value()); });
    strikes_second(SimCall::map, [&] {
      (void)device.try_map(address, 64_KiB, {&*physical, 1});
      device.unmap(address, 64_KiB);
    });
    device.synchronize(stream);
    CHECK(launched == 2);

    device.fail_copy(1);
    CHECK_THROWS_AS(device.copy(memory, host, 64, CopyKind::to_device, stream), DeviceError);
    device.fail(SimCall::reserve, 1);
    CHECK(device.try_reserve(64) == nullptr);
    device.fail(SimCall::allocate_pinned, 1);
    CHECK(device.try_allocate_pinned(64, -1) == nullptr);
    device.fail(SimCall::copy, 1);
    device.fail(SimCall::copy, 0);
    device.copy(memory, host, 64, CopyKind::to_device, stream);
    CHECK(device.usage() == usage);

    device.release_physical(*physical);
    device.free_address(address, 64_KiB);
  }
}
