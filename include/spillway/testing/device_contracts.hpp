// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Contract suites for devices: doctest cases that check what every model of `DeviceApi` must do.
///
/// To test a device of your own, which must be default-constructible and have 64 MiB of memory or
/// more, write a test program:
/// ```
/// #include <doctest/doctest.h>
/// #include <spillway/testing/device_contracts.hpp>
///
/// TEST_CASE_TEMPLATE_INVOKE(device_memory_contract, MyApi);    // DeviceApi
/// TEST_CASE_TEMPLATE_INVOKE(device_copy_contract, MyApi);
/// TEST_CASE_TEMPLATE_INVOKE(device_order_contract, MyApi);
/// TEST_CASE_TEMPLATE_INVOKE(device_progress_contract, MyApi);  // if streams run by themselves
/// TEST_CASE_TEMPLATE_INVOKE(batch_copy_contract, MyApi);       // if it models BatchCopyApi
/// TEST_CASE_TEMPLATE_INVOKE(virtual_memory_contract, MyApi);   // if it models VirtualMemoryApi
/// ```
/// The suites check order and results, not speed. Their names are in the global namespace, where
/// doctest's macros put them; what they use is in `spillway::testing`.

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

namespace spillway::testing {

/// True if enqueued work runs although no thread waits for it.
template <DeviceApi D>
inline constexpr bool runs_by_itself = !SteppedApi<D> && !VirtualClockApi<D>;

/// Makes streams, events and memory of a device, and gives all of them back at the end.
template <DeviceApi D>
class DeviceRig {
 public:
  explicit DeviceRig(D& device) : device_{&device} {}
  DeviceRig(DeviceRig const&) = delete;
  DeviceRig& operator=(DeviceRig const&) = delete;
  ~DeviceRig() {
    for (auto const stream : streams_) {
      device_->synchronize(stream);
      device_->destroy_stream(stream);
    }
    for (auto const event : events_) {
      device_->destroy_event(event);
    }
    for (auto const& [p, bytes] : device_memory_) {
      device_->release(p, bytes);
    }
    for (auto const& [p, bytes] : pinned_) {
      device_->free_pinned(p, bytes);
    }
  }

  [[nodiscard]] auto stream() { return streams_.emplace_back(device_->create_stream()); }
  [[nodiscard]] auto event() { return events_.emplace_back(device_->create_event()); }
  [[nodiscard]] unsigned char* device_memory(std::size_t bytes) {
    void* const p = device_->try_reserve(bytes);
    REQUIRE(p != nullptr);
    device_memory_.emplace_back(p, bytes);
    return static_cast<unsigned char*>(p);
  }
  [[nodiscard]] unsigned char* pinned(std::size_t bytes) {
    void* const p = device_->try_allocate_pinned(bytes, device_->numa_node());
    REQUIRE(p != nullptr);
    pinned_.emplace_back(p, bytes);
    return static_cast<unsigned char*>(p);
  }
  /// Returns pinned memory that is filled with `byte`.
  [[nodiscard]] unsigned char* pinned(std::size_t bytes, unsigned char byte) {
    unsigned char* const p = pinned(bytes);
    if constexpr (ByteHoldingApi<D>) {
      for (unsigned char& mine : std::span{p, bytes}) {
        mine = byte;
      }
    }
    return p;
  }

 private:
  D* device_;
  std::vector<typename D::stream_type> streams_;
  std::vector<typename D::event_type> events_;
  std::vector<std::pair<void*, std::size_t>> device_memory_;
  std::vector<std::pair<void*, std::size_t>> pinned_;
};

/// Blocks a stream until the gate is opened. Declare it after the rig, so that an exception opens
/// it before the rig is destroyed.
///
/// Only one gate may be closed at a time, since a device may run the host functions of all streams
/// on one thread.
class Gate {
 public:
  Gate() = default;
  Gate(Gate const&) = delete;
  Gate& operator=(Gate const&) = delete;
  ~Gate() { open(); }

  template <DeviceApi D>
  void close(D& device, typename D::stream_type stream) {
    device.launch_host(stream, &Gate::pass, new State{state_});
  }
  void open() noexcept {
    state_->store(true, std::memory_order_release);
    state_->notify_all();
  }

 private:
  // shared, since the stream may pass the gate after the object is gone
  using State = std::shared_ptr<std::atomic<bool>>;

  static void pass(void* argument) noexcept {
    std::unique_ptr<State> const state{static_cast<State*>(argument)};
    (*state)->wait(false, std::memory_order_acquire);
  }

  State state_ = std::make_shared<std::atomic<bool>>(false);
};

/// Waits for a while, so that a wrong device can show its error; returns whether `event` is
/// complete.
template <DeviceApi D>
[[nodiscard]] bool completes_soon(D& device, typename D::event_type event) {
  for (int i = 0; i < 2000; ++i) {
    if (device.is_complete(event)) {
      return true;
    }
    std::this_thread::yield();
  }
  return false;
}

/// Returns byte `i` of a test's data. Neighbouring bytes differ.
inline unsigned char pattern(std::size_t i) noexcept {
  return static_cast<unsigned char>(i * 131 + i / 256 + 7);
}

inline void add_one(void* counter) noexcept {
  ++*static_cast<int*>(counter);
}

}  // namespace spillway::testing

TEST_CASE_TEMPLATE_DEFINE("DeviceApi: memory, ", D, device_memory_contract) {
  using namespace spillway;
  using namespace spillway::testing;
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
  using namespace spillway::testing;
  D device;
  DeviceRig<D> rig{device};
  auto const stream = rig.stream();
  std::size_t const bytes = 1_MiB + 3;
  unsigned char* const memory = rig.device_memory(2 * bytes);
  unsigned char* const source = rig.pinned(bytes);
  unsigned char* const target = rig.pinned(bytes, 0);
  auto const check = [&](std::size_t from, std::size_t n, auto expected) {
    if constexpr (ByteHoldingApi<D>) {
      std::size_t wrong = 0;
      for (std::size_t i = from; i < from + n; ++i) {
        wrong += static_cast<std::size_t>(target[i] != expected(i));
      }
      CHECK(wrong == 0);
    }
  };
  if constexpr (ByteHoldingApi<D>) {
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
  SUBCASE("a copy writes its range and nothing beside it") {
    auto const zero = [](std::size_t) { return 0; };
    for (std::size_t const n : {1U, 2U, 7U, 15U, 33U, 255U, 4097U}) {
      CAPTURE(n);
      device.fill(memory, 0, 2 * bytes, stream);
      device.copy(memory + 300, source + 301, n, CopyKind::to_device, stream);
      device.copy(memory + bytes + 5, memory + 300, n, CopyKind::on_device, stream);
      for (unsigned char* const copied : {memory, memory + bytes - 295}) {
        device.copy(target, copied, bytes - 5, CopyKind::to_host, stream);
        device.synchronize(stream);
        check(0, 300, zero);
        check(300, n, [](std::size_t i) { return pattern(i + 1); });
        check(300 + n, bytes - 5 - 300 - n, zero);
      }
      device.fill(memory, 0, n, stream);
      if constexpr (ByteHoldingApi<D>) {
        std::fill_n(target, bytes, static_cast<unsigned char>(0x77));
      }
      device.copy(target + 301, memory, n, CopyKind::to_host, stream);
      device.synchronize(stream);
      check(0, 301, [](std::size_t) { return 0x77; });
      check(301, n, zero);
      check(301 + n, bytes - 301 - n, [](std::size_t) { return 0x77; });
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
  using namespace spillway::testing;
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
      if constexpr (ByteHoldingApi<D>) {
        std::fill_n(static_cast<unsigned char*>(p), 256, static_cast<unsigned char>(2));
      }
    };
    device.copy(memory, host, 256, CopyKind::to_device, a);
    device.launch_host(a, overwrite, host);
    device.copy(host, memory, 256, CopyKind::to_host, a);
    device.synchronize(a);
    if constexpr (ByteHoldingApi<D>) {
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
    if constexpr (ByteHoldingApi<D>) {
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
  using namespace spillway::testing;
  static_assert(runs_by_itself<D>);
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

TEST_CASE_TEMPLATE_DEFINE("BatchCopyApi: ", D, batch_copy_contract) {
  using namespace spillway;
  using namespace spillway::testing;
  static_assert(BatchCopyApi<D>);
  D device;
  DeviceRig<D> rig{device};
  auto const stream = rig.stream();
  // Copies every third piece of 1000 bytes. The order in the batch differs from that in memory.
  constexpr std::size_t pieces = 61;
  constexpr std::size_t bytes = 1000;
  unsigned char* const memory = rig.device_memory(3 * pieces * bytes);
  unsigned char* const source = rig.pinned(3 * pieces * bytes, 0);
  unsigned char* const target = rig.pinned(3 * pieces * bytes, 0);
  std::vector<std::size_t> sizes(pieces, bytes);
  auto const places = [&](unsigned char* base) {
    std::vector<void*> all;
    for (std::size_t i = 0; i < pieces; ++i) {
      all.push_back(base + 3 * bytes * (i * 7 % pieces));
    }
    return all;
  };
  auto const const_places = [&](unsigned char* base) {
    std::vector<void*> const all = places(base);
    return std::vector<void const*>(all.begin(), all.end());
  };
  if constexpr (ByteHoldingApi<D>) {
    for (std::size_t i = 0; i < 3 * pieces * bytes; ++i) {
      source[i] = static_cast<unsigned char>(i * 131 + i / 997 + 1);
    }
  }
  auto const wrong_bytes = [&](std::size_t first, std::size_t last) {
    std::size_t wrong = 0;
    if constexpr (ByteHoldingApi<D>) {
      for (std::size_t i = first; i < last; ++i) {
        bool const is_copied = i / bytes % 3 == 0;
        wrong += target[i] != (is_copied ? source[i] : 0) ? 1U : 0U;
      }
    }
    return wrong;
  };

  SUBCASE("copies what its copies would have, and nothing beside it") {
    device.copy_batch(places(memory), const_places(source), sizes, CopyKind::to_device, stream);
    device.copy_batch(places(target), const_places(memory), sizes, CopyKind::to_host, stream);
    device.synchronize(stream);
    CHECK(wrong_bytes(0, 3 * pieces * bytes) == 0);
  }
  SUBCASE("stands in stream order: after what came before, and before what comes after") {
    unsigned char* const second = rig.device_memory(3 * pieces * bytes);
    device.copy(memory, source, 3 * pieces * bytes, CopyKind::to_device, stream);
    device.copy_batch(places(second), const_places(memory), sizes, CopyKind::on_device, stream);
    device.fill(memory, 0x11, 3 * pieces * bytes, stream);
    device.copy_batch(places(target), const_places(second), sizes, CopyKind::to_host, stream);
    device.synchronize(stream);
    CHECK(wrong_bytes(0, 3 * pieces * bytes) == 0);
  }
  SUBCASE("an event recorded after it stands for all of it") {
    auto const other = rig.stream();
    auto const event = rig.event();
    device.copy_batch(places(memory), const_places(source), sizes, CopyKind::to_device, stream);
    device.record(event, stream);
    device.wait(other, event);
    device.copy_batch(places(target), const_places(memory), sizes, CopyKind::to_host, other);
    device.synchronize(other);
    CHECK(wrong_bytes(0, 3 * pieces * bytes) == 0);
  }
  SUBCASE("empty copies and no copies do nothing") {
    std::vector<std::size_t> none(pieces, 0);
    none[3] = bytes;
    device.copy_batch({}, {}, {}, CopyKind::to_device, stream);
    device.copy_batch(places(memory), const_places(source), none, CopyKind::to_device, stream);
    device.copy_batch(places(target), const_places(memory), none, CopyKind::to_host, stream);
    device.synchronize(stream);
    std::size_t const at = 3 * bytes * (3 * 7 % pieces);
    CHECK(wrong_bytes(at, at + bytes) == 0);
    if constexpr (ByteHoldingApi<D>) {
      CHECK(target[0] == 0);
    }
  }
  SUBCASE("one copy is a batch too") {
    device.copy_batch(std::array<void*, 1>{memory},
                      std::array<void const*, 1>{source},
                      std::array{bytes},
                      CopyKind::to_device,
                      stream);
    device.copy_batch(std::array<void*, 1>{target},
                      std::array<void const*, 1>{memory},
                      std::array{bytes},
                      CopyKind::to_host,
                      stream);
    device.synchronize(stream);
    CHECK(wrong_bytes(0, bytes) == 0);
  }
  SUBCASE("spans of different lengths are refused") {
    CHECK_THROWS_AS(device.copy_batch(places(memory),
                                      const_places(source),
                                      std::span{sizes}.first(2),
                                      CopyKind::to_device,
                                      stream),
                    ContractViolation);
  }
}

TEST_CASE_TEMPLATE_DEFINE("VirtualMemoryApi: ", D, virtual_memory_contract) {
  using namespace spillway;
  using namespace spillway::testing;
  D device;
  DeviceRig<D> rig{device};
  auto const stream = rig.stream();
  std::size_t const piece = device.granularity_bytes();
  unsigned char* const base = static_cast<unsigned char*>(device.reserve_address(4 * piece));
  unsigned char* const target = rig.pinned(piece, 0);
  auto const first = device.try_create_physical(piece);
  auto const second = device.try_create_physical(piece);
  REQUIRE(first.has_value());
  REQUIRE(second.has_value());
  auto const reads = [&](unsigned char* p, unsigned char byte) {
    device.copy(target, p, piece, CopyKind::to_host, stream);
    device.synchronize(stream);
    return !ByteHoldingApi<D> ||
           std::count(target, target + piece, byte) == static_cast<std::ptrdiff_t>(piece);
  };

  SUBCASE("the granularity is a power of two and addresses are multiples of it") {
    CHECK(std::has_single_bit(piece));
    CHECK(piece % granule_bytes == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(base) % piece == 0);
  }
  SUBCASE("physical memory takes room of the device, addresses do not") {
    std::size_t const before = device.memory_info().free_bytes;
    void* const addresses = device.reserve_address(64 * piece);
    auto const memory = device.try_create_physical(64 * piece);
    REQUIRE(memory.has_value());
    CHECK(device.memory_info().free_bytes + 64 * piece <= before);
    device.release_physical(*memory);
    device.free_address(addresses, 64 * piece);
    CHECK(device.try_create_physical(round_up(device.memory_info().total_bytes, piece) + piece) ==
          std::nullopt);
  }
  SUBCASE("mapped memory is used like any other, across mappings too") {
    std::array const both{*first, *second};
    REQUIRE(device.try_map(base + piece, piece, both));
    device.fill(base + piece, 1, 2 * piece, stream);
    CHECK(reads(base + piece + piece / 2, 1));
    device.unmap(base + piece, 2 * piece);
  }
  SUBCASE("several pieces are mapped in the order in which they are named") {
    std::array const both{*second, *first};
    REQUIRE(device.try_map(base, piece, both));
    device.fill(base, 1, piece, stream);
    device.fill(base + piece, 2, piece, stream);
    device.synchronize(stream);
    device.unmap(base, 2 * piece);
    REQUIRE(device.try_map(base + 2 * piece, piece, {&*first, 1}));
    CHECK(reads(base + 2 * piece, 2));
    device.unmap(base + 2 * piece, piece);
  }
  SUBCASE("copies in a batch go across mappings, too") {
    std::array const both{*first, *second};
    REQUIRE(device.try_map(base + piece, piece, both));
    std::size_t const part = piece / 4;
    std::array const sizes{2 * part, part};
    auto const copy_both = [&](std::array<void*, 2> to,
                               std::array<void const*, 2> from,
                               CopyKind kind) { device.copy_batch(to, from, sizes, kind, stream); };
    device.fill(base + piece, 1, 2 * piece, stream);
    device.copy(base + piece, rig.pinned(piece, 2), piece, CopyKind::to_device, stream);
    // one part before the end of a piece and one behind it
    unsigned char* const middle = base + 2 * piece - part;
    unsigned char* const staged = rig.pinned(piece, 0);
    copy_both({staged, staged + 2 * part}, {middle, base + piece}, CopyKind::to_host);
    copy_both({base + 2 * piece + 2 * part, base + piece + 2 * part},
              {middle, base + 2 * piece},
              CopyKind::on_device);
    device.fill(middle, 3, 2 * part, stream);
    device.fill(base + piece, 3, part, stream);
    copy_both({middle, base + piece}, {staged, staged + 2 * part}, CopyKind::to_device);
    device.synchronize(stream);
    // By parts: 2 2 1 2, and 1 1 2 1 at the end.
    unsigned char const expected[] = {2, 2, 1, 2, 1, 1, 2, 1};
    for (std::size_t i = 0; i < std::size(expected); ++i) {
      device.copy(target, base + piece + i * part, part, CopyKind::to_host, stream);
      device.synchronize(stream);
      CHECK((!ByteHoldingApi<D> || std::all_of(target, target + part, [&](unsigned char byte) {
        return byte == expected[i];
      })));
    }
    device.unmap(base + piece, 2 * piece);
  }
  SUBCASE("bytes stay with the memory, not with the address") {
    REQUIRE(device.try_map(base, piece, {&*first, 1}));
    REQUIRE(device.try_map(base + piece, piece, {&*second, 1}));
    device.fill(base, 1, piece, stream);
    device.fill(base + piece, 2, piece, stream);
    device.synchronize(stream);

    device.unmap(base, piece);
    device.unmap(base + piece, piece);
    REQUIRE(device.try_map(base + piece, piece, {&*first, 1}));
    REQUIRE(device.try_map(base, piece, {&*second, 1}));

    CHECK(reads(base, 2));
    CHECK(reads(base + piece, 1));
    device.unmap(base, piece);
    device.unmap(base + piece, piece);
  }
  SUBCASE("an address can be mapped again after it was unmapped") {
    for (int round = 0; round < 3; ++round) {
      REQUIRE(device.try_map(base + 3 * piece, piece, {&*first, 1}));
      device.fill(base + 3 * piece, static_cast<unsigned char>(round), piece, stream);
      CHECK(reads(base + 3 * piece, static_cast<unsigned char>(round)));
      device.unmap(base + 3 * piece, piece);
    }
  }

  device.release_physical(*first);
  device.release_physical(*second);
  device.free_address(base, 4 * piece);
}
