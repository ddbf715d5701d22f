// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/sim/model_api.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <array>
#include <csignal>
#include <cstddef>
#include <cstring>

#include <support/death.hpp>

using namespace spillway;
using spillway::test::Death;
using spillway::test::death_of;
using spillway::testing::SteppedSimApi;

namespace {

template <class Act>
void check_misuse(char const* expected, Act act) {
  Death const death = death_of(act);
  CAPTURE(death.message);
  CHECK(death.signal == SIGABRT);
  CHECK(death.message.find("spillway SimApi misused: ") != std::string::npos);
  CHECK(death.message.find(expected) != std::string::npos);
}

struct HostCall {
  SteppedSimApi* device;
  SimStream stream;
};

}  // namespace

TEST_SUITE("sim_misuse") {
  TEST_CASE("SimApi: releasing memory that is not reserved ends the program with a message") {
    SteppedSimApi device;
    void* const memory = device.try_reserve(1000);
    void* const pinned = device.try_allocate_pinned(1000, -1);
    auto* const address = static_cast<std::byte*>(device.reserve_address(128_KiB));
    auto const physical = device.try_create_physical(64_KiB);
    REQUIRE(device.try_map(address, 64_KiB, {&*physical, 1}));
    auto const stream = device.create_stream();
    auto const event = device.create_event();

    check_misuse("no live reservation", [&] { device.release(pinned, 1000); });
    check_misuse("no live reservation", [&] { device.release(memory, 999); });
    check_misuse("no live reservation", [&] { device.release(address, 64_KiB); });
    check_misuse("no live allocation", [&] { device.free_pinned(memory, 1000); });
    check_misuse("no live reservation", [&] {
      device.release(memory, 1000);
      device.release(memory, 1000);
    });
    check_misuse("stream that was destroyed", [&] {
      device.destroy_stream(stream);
      device.destroy_stream(stream);
    });
    check_misuse("event handle that names nothing", [&] { device.destroy_event({}); });
    check_misuse("mapped 1 times", [&] { device.release_physical(*physical); });
    check_misuse("memory is mapped", [&] { device.free_address(address, 128_KiB); });
    check_misuse("no address range", [&] { device.free_address(address, 64_KiB); });
    check_misuse("whole mappings", [&] { device.unmap(address + 64_KiB, 64_KiB); });
    check_misuse("whole mappings", [&] { device.unmap(memory, 1000); });
    check_misuse("still uses it", [&] {
      device.fill(address + 100, 0, 100, stream);
      device.unmap(address, 64_KiB);
    });
    check_misuse("called by a function that a stream launched", [&] {
      HostCall call{&device, stream};
      auto const misbehave = [](void* p) noexcept {
        auto* const c = static_cast<HostCall*>(p);
        c->device->record(c->device->create_event(), c->stream);
      };
      device.record(event, stream);
      device.launch_host(stream, misbehave, &call);
      device.run(stream);
    });

    device.unmap(address, 64_KiB);
    device.release_physical(*physical);
    device.free_address(address, 128_KiB);
  }

  TEST_CASE("SimApi: access to released memory faults") {
    SteppedSimApi device;
    auto* const memory = static_cast<unsigned char volatile*>(device.try_reserve(4096));
    auto* const pinned = static_cast<unsigned char volatile*>(device.try_allocate_pinned(4096, -1));
    auto* const address = static_cast<unsigned char volatile*>(device.reserve_address(64_KiB));
    auto const physical = device.try_create_physical(64_KiB);
    auto const forget = [](unsigned char volatile* p) { return const_cast<unsigned char*>(p); };
    REQUIRE(device.try_map(forget(address), 64_KiB, {&*physical, 1}));
    memory[0] = 1;
    pinned[0] = 1;
    address[0] = 1;
    device.release(forget(memory), 4096);
    device.free_pinned(forget(pinned), 4096);
    device.unmap(forget(address), 64_KiB);

    for (unsigned char volatile* const p : {memory, pinned, address}) {
      CHECK(death_of([p] { p[0] = 2; }).signal == SIGSEGV);
    }
    device.release_physical(*physical);
    device.free_address(forget(address), 64_KiB);
  }

  TEST_CASE("SimApi: access beyond the end of a reservation faults") {
    SteppedSimApi device;
    auto* const p = static_cast<unsigned char volatile*>(device.try_reserve(4096));
    CHECK(death_of([p] { p[4096] = 1; }).signal == SIGSEGV);
    CHECK(death_of([p] { p[-1] = 1; }).signal == SIGSEGV);
    device.release(const_cast<unsigned char*>(p), 4096);
  }

  TEST_CASE("ModelApi: access to its addresses faults") {
    ModelApi device;
    auto* const p = static_cast<unsigned char volatile*>(device.try_reserve(4096));
    CHECK(death_of([p] { p[0] = 1; }).signal == SIGSEGV);
  }
}
