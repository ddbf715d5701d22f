// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>

#include <support/device_rig.hpp>

// What every model of DeviceApi owes. A device joins with, for each suite below,
// TEST_CASE_TEMPLATE_INVOKE(device_memory_contract, MyApi); it is made without arguments.
// `device_progress_contract` is for devices whose streams run by themselves.

namespace spillway::test {

inline unsigned char pattern(std::size_t i) noexcept {
  return static_cast<unsigned char>(i * 131 + i / 256 + 7);
}

inline void add_one(void* counter) noexcept {
  ++*static_cast<int*>(counter);
}

}  // namespace spillway::test

TEST_CASE_TEMPLATE_DEFINE("DeviceApi: memory, ", D, device_memory_contract) {
  using namespace spillway;
  using namespace spillway::test;
  D device;
  DeviceRig<D> rig{device};

  SUBCASE("a reservation is aligned and two never overlap") {
    unsigned char* const first = rig.device_memory(1000);
    unsigned char* const second = rig.device_memory(1000);

    CHECK(reinterpret_cast<std::uintptr_t>(first) % granule_bytes == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(second) % granule_bytes == 0);
    bool const is_apart = std::less<>{}(first + 999, second) || std::less<>{}(second + 999, first);
    CHECK(is_apart);
  }
  SUBCASE("more than the device has is answered with null, and nothing is lost") {
    MemoryInfo const info = device.memory_info();
    CHECK(info.free_bytes <= info.total_bytes);

    CHECK(device.try_reserve(info.total_bytes + 1) == nullptr);

    CHECK(rig.device_memory(4096) != nullptr);
  }
  SUBCASE("a size that no machine has is answered with null") {
    CHECK(device.try_reserve(std::numeric_limits<std::size_t>::max() - 4096) == nullptr);
  }
  SUBCASE("a reservation takes memory and releasing it gives it back") {
    std::size_t const bytes = 64_MiB;
    std::size_t const before = device.memory_info().free_bytes;
    void* const p = device.try_reserve(bytes);
    REQUIRE(p != nullptr);

    std::size_t const between = device.memory_info().free_bytes;
    device.release(p, bytes);

    CHECK(between + bytes <= before);
    CHECK(device.memory_info().free_bytes >= between + bytes);
  }
  SUBCASE("pinned memory can be had for the device's node and for any") {
    void* const p = device.try_allocate_pinned(4096, -1);
    REQUIRE(p != nullptr);
    device.free_pinned(p, 4096);
    CHECK(rig.pinned(4096) != nullptr);
  }
}

TEST_CASE_TEMPLATE_DEFINE("DeviceApi: copies, ", D, device_copy_contract) {
  using namespace spillway;
  using namespace spillway::test;
  D device;
  DeviceRig<D> rig{device};
  auto const stream = rig.stream();
  std::size_t const bytes = 1_MiB + 3;
  unsigned char* const memory = rig.device_memory(2 * bytes);
  unsigned char* const source = rig.pinned(bytes);
  unsigned char* const target = rig.pinned(bytes, 0);
  auto const check = [&](std::size_t from, std::size_t n, auto expected) {
    if constexpr (holds_bytes<D>()) {
      std::size_t wrong = 0;
      for (std::size_t i = from; i < from + n; ++i) {
        wrong += static_cast<std::size_t>(target[i] != expected(i));
      }
      CHECK(wrong == 0);
    }
  };
  if constexpr (holds_bytes<D>()) {
    for (std::size_t i = 0; i < bytes; ++i) {
      source[i] = pattern(i);
    }
  }

  SUBCASE("bytes come back as they went, at any size and offset") {
    for (std::size_t const n : {std::size_t{1}, std::size_t{255}, std::size_t{4097}, bytes - 5}) {
      CAPTURE(n);
      device.copy(memory + 3, source + 5, n, CopyKind::to_device, stream);
      device.copy(target + 1, memory + 3, n, CopyKind::to_host, stream);
      device.synchronize(stream);
      check(1, n, [](std::size_t i) { return pattern(i + 4); });
    }
  }
  SUBCASE("a copy inside the device moves bytes, and ranges may touch") {
    device.copy(memory, source, bytes, CopyKind::to_device, stream);
    device.copy(memory + bytes, memory, bytes, CopyKind::on_device, stream);
    device.copy(target, memory + bytes, bytes, CopyKind::to_host, stream);
    device.synchronize(stream);
    check(0, bytes, [](std::size_t i) { return pattern(i); });
  }
  SUBCASE("a fill writes its range and nothing beside it") {
    device.copy(memory, source, bytes, CopyKind::to_device, stream);
    device.fill(memory + 100, 0x5A, 50, stream);
    device.copy(target, memory, bytes, CopyKind::to_host, stream);
    device.synchronize(stream);
    check(100, 50, [](std::size_t) { return 0x5A; });
    check(0, 100, [](std::size_t i) { return pattern(i); });
    check(150, bytes - 150, [](std::size_t i) { return pattern(i); });
  }
  SUBCASE("a copy of no bytes does nothing") {
    device.copy(memory, source, 0, CopyKind::to_device, stream);
    device.synchronize(stream);
  }
}

TEST_CASE_TEMPLATE_DEFINE("DeviceApi: streams and events, ", D, device_order_contract) {
  using namespace spillway;
  using namespace spillway::test;
  D device;
  DeviceRig<D> rig{device};
  auto const a = rig.stream();
  auto const b = rig.stream();
  auto const event = rig.event();

  SUBCASE("handles compare and hash") {
    CHECK(a == a);
    CHECK(a != b);
    CHECK(event == event);
    std::hash<typename D::stream_type> const hash{};
    CHECK(hash(a) == hash(a));
  }
  SUBCASE("an event with nothing recorded is complete and holds nobody up") {
    CHECK(device.is_complete(event));
    device.wait(a, event);
    device.synchronize(event);
    device.synchronize(a);
  }
  SUBCASE("an event is complete once the host has waited for it") {
    int calls = 0;
    device.launch_host(a, add_one, &calls);
    device.record(event, a);
    device.synchronize(event);
    CHECK(calls == 1);
    CHECK(device.is_complete(event));
  }
  SUBCASE("host calls run in the order of their stream, between its copies") {
    unsigned char* const memory = rig.device_memory(256);
    unsigned char* const host = rig.pinned(256, 1);
    auto const overwrite = [](void* p) noexcept {
      if constexpr (holds_bytes<D>()) {
        std::fill_n(static_cast<unsigned char*>(p), 256, static_cast<unsigned char>(2));
      }
    };
    device.copy(memory, host, 256, CopyKind::to_device, a);
    device.launch_host(a, overwrite, host);
    device.copy(host, memory, 256, CopyKind::to_host, a);
    device.synchronize(a);
    if constexpr (holds_bytes<D>()) {
      CHECK(std::count(host, host + 256, 1) == 256);
    }
  }
  SUBCASE("work enqueued on a stream that is then destroyed still runs") {
    int calls = 0;
    auto const doomed = device.create_stream();
    device.launch_host(doomed, add_one, &calls);
    device.record(event, doomed);
    device.destroy_stream(doomed);
    device.synchronize(event);
    CHECK(calls == 1);
  }
  SUBCASE("an event may be destroyed while a stream waits for it") {
    int calls = 0;
    auto const doomed = device.create_event();
    device.launch_host(a, add_one, &calls);
    device.record(doomed, a);
    device.wait(b, doomed);
    device.destroy_event(doomed);
    device.synchronize(b);
    CHECK(calls == 1);
  }
  SUBCASE("a stream that waits sees what the other wrote") {
    unsigned char* const memory = rig.device_memory(64_KiB);
    unsigned char* const source = rig.pinned(64_KiB, 3);
    unsigned char* const target = rig.pinned(64_KiB, 0);
    device.copy(memory, source, 64_KiB, CopyKind::to_device, a);
    device.record(event, a);
    device.wait(b, event);
    device.copy(target, memory, 64_KiB, CopyKind::to_host, b);
    device.synchronize(b);
    if constexpr (holds_bytes<D>()) {
      CHECK(std::count(target, target + 64_KiB, 3) == 64_KiB);
    }
  }
  SUBCASE("the clock does not go backwards") {
    std::uint64_t const before = device.clock_ns();
    device.synchronize(a);
    CHECK(device.clock_ns() >= before);
  }
}

TEST_CASE_TEMPLATE_DEFINE("DeviceApi: while a stream is held up, ", D, device_progress_contract) {
  using namespace spillway;
  using namespace spillway::test;
  static_assert(runs_by_itself<D>());
  D device;
  DeviceRig<D> rig{device};
  auto const held = rig.stream();
  auto const other = rig.stream();
  auto const event = rig.event();
  auto const second = rig.event();
  unsigned char* const memory = rig.device_memory(1024);
  unsigned char* const ones = rig.pinned(1024, 1);
  unsigned char* const target = rig.pinned(1024, 0);
  Gate gate;
  gate.close(device, held);

  SUBCASE("other streams go on") {
    device.copy(memory, ones, 1024, CopyKind::to_device, other);
    device.record(event, other);
    device.synchronize(event);
    CHECK(device.is_complete(event));
  }
  SUBCASE("its events are not complete until it goes on") {
    device.record(event, held);
    CHECK_FALSE(completes_soon(device, event));
    gate.open();
    device.synchronize(event);
    CHECK(device.is_complete(event));
  }
  SUBCASE("an event stands for the work before its record, not for what comes later") {
    device.record(event, other);
    device.record(second, held);
    device.wait(other, second);
    device.fill(memory, 1, 1024, other);

    device.synchronize(event);

    CHECK(device.is_complete(event));
    CHECK_FALSE(completes_soon(device, second));
  }
  SUBCASE("whoever waits for it waits") {
    device.record(event, held);
    device.wait(other, event);
    device.copy(memory, ones, 1024, CopyKind::to_device, other);
    device.record(second, other);
    CHECK_FALSE(completes_soon(device, second));
  }
  SUBCASE("a wait is for the record before it: recording again does not set it free") {
    auto const third = rig.stream();
    device.record(event, held);
    device.wait(other, event);
    device.record(second, other);

    device.record(event, third);
    device.synchronize(event);

    CHECK(device.is_complete(event));
    CHECK_FALSE(completes_soon(device, second));
  }
  SUBCASE("a wait is for the record before it: recording again does not hold it up") {
    device.record(event, other);
    auto const third = rig.stream();
    device.wait(third, event);
    device.record(event, held);
    device.record(second, third);

    device.synchronize(second);

    CHECK(device.is_complete(second));
    CHECK_FALSE(device.is_complete(event));
  }
  SUBCASE("what it was given runs in order once it goes on") {
    device.copy(memory, ones, 1024, CopyKind::to_device, held);
    device.copy(target, memory, 1024, CopyKind::to_host, held);
    CHECK(target[0] == 0);
    gate.open();
    device.synchronize(held);
    CHECK(std::count(target, target + 1024, 1) == 1024);
  }
}
