// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/host/host_api.hpp>
#include <spillway/device/host/host_paged_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/policies.hpp>
#include <spillway/sim.hpp>
#include <spillway/testing/device_contracts.hpp>

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <future>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include <malloc.h>
#include <support/fork.hpp>
#include <unistd.h>

using namespace spillway;
using spillway::testing::DeviceRig;
using spillway::testing::Gate;

TEST_CASE_TEMPLATE_INVOKE(device_memory_contract, HostApi);
TEST_CASE_TEMPLATE_INVOKE(device_copy_contract, HostApi);
TEST_CASE_TEMPLATE_INVOKE(device_order_contract, HostApi);
TEST_CASE_TEMPLATE_INVOKE(device_progress_contract, HostApi);

namespace {

struct HostPolicies : SimPolicies {
  using device = HostApi;
};

struct TaskApi : HostApi {
  using HostApi::enqueue_task;
};

/// Bytes that the program has allocated on the heap, or 0 where that is unknown.
std::size_t bytes_in_use() {
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 33)
  return ::mallinfo2().uordblks;
#else
  return 0;
#endif
}

}  // namespace

TEST_SUITE("host_api") {
  TEST_CASE("HostApi: work on the caller's stream is finished when the call returns") {
    HostApi device;
    DeviceRig<HostApi> rig{device};
    unsigned char* const from = rig.pinned(4096, 7);
    unsigned char* const to = rig.device_memory(4096);
    auto const event = rig.event();

    device.copy(to, from, 4096, CopyKind::to_device, HostStream::caller);
    device.record(event, HostStream::caller);

    CHECK(std::memcmp(to, from, 4096) == 0);
    CHECK(device.is_complete(event));
  }

  TEST_CASE("HostApi: a simulated link rate sets a lower bound on the time of copies") {
    HostApi device;
    DeviceRig<HostApi> rig{device};
    auto const stream = rig.stream();
    unsigned char* const from = rig.pinned(1_MiB, 7);
    unsigned char* const to = rig.device_memory(1_MiB);
    device.set_link_bytes_per_second(100e6);

    std::uint64_t const start_ns = device.clock_ns();
    for (std::size_t i = 0; i < 16; ++i) {  // each is shorter than the shortest sleep
      device.copy(to + i * 8_KiB, from + i * 8_KiB, 8_KiB, CopyKind::to_device, stream);
    }
    device.copy(to, from, 1_MiB, CopyKind::to_device, stream);
    device.synchronize(stream);

    CHECK(device.clock_ns() - start_ns >= 10 * (1_MiB + 16 * 8_KiB));
    CHECK(std::memcmp(to, from, 1_MiB) == 0);
  }

  TEST_CASE("HostApi: the caller's stream blocks the thread to wait for another stream") {
    HostApi device;
    DeviceRig<HostApi> rig{device};
    auto const stream = rig.stream();
    auto const event = rig.event();
    unsigned char* const memory = rig.device_memory(64_MiB);
    device.fill(memory, 9, 64_MiB, stream);
    device.record(event, stream);

    device.wait(HostStream::caller, event);

    CHECK(device.is_complete(event));
    CHECK(memory[64_MiB - 1] == 9);
  }

  TEST_CASE("HostApi: a waiting thread runs copies that no stream's thread has started") {
    HostApi device;
    DeviceRig<HostApi> rig{device};
    auto const first = rig.stream();
    auto const second = rig.stream();
    auto const reached = rig.event();
    auto const event = rig.event();
    unsigned char* const from = rig.pinned(4096, 1);
    unsigned char* const to = rig.device_memory(4096);

    // The streams' threads sleep, since so little is enqueued.
    device.copy(to, from, 4096, CopyKind::to_device, first);
    device.record(reached, first);
    device.wait(second, reached);
    device.copy(to + 1, to, 1, CopyKind::on_device, second);
    device.record(event, second);
    CHECK_FALSE(device.is_complete(event));
    CHECK(to[0] == 0);

    device.synchronize(event);
    CHECK(to[0] == 1);
    CHECK(device.is_complete(reached));
  }

  TEST_CASE("HostApi: polling is_complete makes a stream's work run") {
    HostApi device;
    DeviceRig<HostApi> rig{device};
    auto const stream = rig.stream();
    auto const event = rig.event();
    unsigned char* const from = rig.pinned(4096, 1);
    unsigned char* const to = rig.device_memory(4096);
    device.copy(to, from, 4096, CopyKind::to_device, stream);
    device.record(event, stream);
    while (!device.is_complete(event)) {
    }
    CHECK(to[4095] == 1);
  }

  TEST_CASE("HostApi: threads that wait for different points of one stream all continue") {
    HostApi device;
    DeviceRig<HostApi> rig{device};
    constexpr int count = 64;
    auto const stream = rig.stream();
    auto const other = rig.stream();
    std::atomic<int> calls{0};
    unsigned char* const memory = rig.device_memory(64_KiB);
    std::vector<HostEvent> events;
    for (int i = 0; i < count; ++i) {
      device.fill(memory, static_cast<unsigned char>(i), 64_KiB, stream);
      if (i % 8 == 0) {
        device.launch(other, [&calls] { ++calls; });
        device.record(events.emplace_back(rig.event()), other);
        device.wait(stream, events.back());
      }
      device.record(events.emplace_back(rig.event()), stream);
    }
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < 4; ++i) {
      threads.emplace_back([&device, &events, i] {
        for (std::size_t at = i; at < events.size(); at += 4) {
          device.synchronize(events[at]);
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    CHECK(calls == count / 8);
    CHECK(memory[0] == count - 1);
    CHECK(memory[64_KiB - 1] == count - 1);
  }

  TEST_CASE("HostApi: destroying a stream finishes its work") {
    HostApi device;
    auto const event = device.create_event();
    std::atomic<int> calls{0};
    auto const count = [](void* argument) noexcept { ++*static_cast<std::atomic<int>*>(argument); };
    {
      auto const stream = device.create_stream();
      for (int i = 0; i < 100; ++i) {
        device.launch_host(stream, count, &calls);
      }
      device.record(event, stream);
      device.destroy_stream(stream);
    }
    device.synchronize(event);
    CHECK(calls == 100);
    device.destroy_event(event);
  }

  TEST_CASE("HostApi: threads of destroyed streams are joined when new streams are made") {
    // Destroyed at the end of its thread, after all other work.
    struct Ending {
      ~Ending() {
        if (has_ended != nullptr) {
          *has_ended = true;
          has_ended->notify_one();
        }
      }
      std::atomic<bool>* has_ended = nullptr;
    };
    constexpr std::size_t count = 20;
    std::array<std::atomic<bool>, count> have_ended{};
    std::set<std::thread::id> ids;
    HostApi device;
    for (std::atomic<bool>& has_ended : have_ended) {
      auto const stream = device.create_stream();
      device.launch(stream, [&] {
        static thread_local Ending ending;
        ending.has_ended = &has_ended;
        ids.insert(std::this_thread::get_id());
      });
      device.destroy_stream(stream);
      has_ended.wait(false);
    }
    // A thread that has ended keeps its id until it is joined.
    CHECK(ids.size() < count);
  }

  TEST_CASE("HostApi: a launched callable runs once, in stream order, and is destroyed") {
    HostApi device;
    auto const stream = device.create_stream();
    std::vector<int> order;
    auto const alive = std::make_shared<int>(0);
    for (int i = 0; i < 3; ++i) {
      device.launch(stream, [&order, alive, i] { order.push_back(i); });
    }
    device.synchronize(stream);
    CHECK(order == std::vector{0, 1, 2});
    CHECK(alive.use_count() == 1);
    device.destroy_stream(stream);
  }

  TEST_CASE("HostApi: null handles are refused") {
    HostApi device;
    CHECK_THROWS_AS(device.synchronize(HostStream{7}), DeviceError);
    CHECK_THROWS_AS((void)device.is_complete(HostEvent{7}), DeviceError);
  }

  TEST_CASE("HostApi: a forked child works without the parent's threads") {
    HostApi device;
    DeviceRig<HostApi> rig{device};
    auto const stream = rig.stream();
    unsigned char* const from = rig.pinned(4096, 3);
    unsigned char* const to = rig.device_memory(4096);
    device.copy(to, from, 4096, CopyKind::to_device, stream);

    device.before_fork();
    spillway::test::ForkedChild const child{[&] {
      device.after_fork_in_child();
      bool const was_done = to[4095] == 3;
      std::memset(from, 5, 4096);
      device.copy(to, from, 4096, CopyKind::to_device, stream);
      device.synchronize(stream);
      return was_done && to[4095] == 5;
    }};
    device.after_fork_in_parent();

    CHECK(child.status() == 0);
    CHECK(to[4095] == 3);
  }

  TEST_CASE("HostApi: a forked child does not wait for threads that waited in its parent") {
    for (int i = 0; i < 10; ++i) {
      auto device = std::make_unique<HostApi>();
      auto const stream = device->create_stream();
      std::promise<void> begun;
      std::promise<void> may_end;
      device->launch(stream, [&] {
        begun.set_value();
        may_end.get_future().wait();
      });
      begun.get_future().wait();
      std::atomic<int> waiting = 0;
      std::vector<std::thread> threads;
      for (int k = 0; k < 8; ++k) {
        threads.emplace_back([&] {
          ++waiting;
          device->synchronize(stream);
        });
      }
      while (waiting != 8) {
        std::this_thread::yield();
      }
      threads.emplace_back([&] { may_end.set_value(); });
      device->before_fork();  // some threads have been woken, and wait for the lock
      spillway::test::ForkedChild const child{[&] {
        device->after_fork_in_child();
        device.reset();
      }};
      device->after_fork_in_parent();
      for (std::thread& thread : threads) {
        thread.join();
      }
      REQUIRE(child.status() == 0);
    }
  }

  TEST_CASE("HostApi: before_fork waits again for a stream that got work during the wait") {
    TaskApi device;
    DeviceRig<HostApi> rig{device};
    struct Copy {
      TaskApi* device = nullptr;
      HostStream stream{};
      unsigned char* from = nullptr;
      unsigned char* to = nullptr;
    } copy{&device, rig.stream(), rig.pinned(4096, 3), rig.device_memory(4096)};
    // The thread that waits for the second stream runs this, after it has found the first one idle.
    device.enqueue_task(
        rig.stream(),
        [](void* argument) noexcept {
          auto const& [on, stream, from, to] = *static_cast<Copy*>(argument);
          on->copy(to, from, 4096, CopyKind::to_device, stream);
        },
        &copy);

    device.before_fork();
    CHECK(copy.to[4095] == 3);
    device.after_fork_in_parent();
  }

  TEST_CASE("HostApi: creating and destroying streams does not leak memory") {
    HostApi device;
    unsigned char byte = 0;
    std::vector<HostEvent> events;
    auto const use_streams = [&](unsigned char value) {
      for (int i = 0; i < 500; ++i) {
        auto const stream = device.create_stream();
        device.fill(&byte, value, 1, stream);
        if (i % 100 == 0) {
          events.push_back(device.create_event());
          device.record(events.back(), stream);
        }
        device.synchronize(stream);
        device.destroy_stream(stream);
        REQUIRE(byte == value);
      }
    };
    use_streams(1);
    std::size_t const before = bytes_in_use();
    for (unsigned char value = 2; value < 6; ++value) {
      use_streams(value);
    }
    CHECK(bytes_in_use() < before + 400 * std::size_t{2000});
    for (HostEvent const event : events) {
      CHECK(device.is_complete(event));
      device.destroy_event(event);
    }
  }

  TEST_CASE(
      "HostApi: a stream's thread is woken at the second query of an event, not at the first") {
    TaskApi device;
    DeviceRig<TaskApi> rig{device};
    auto const stream = rig.stream();
    auto const event = rig.event();
    std::thread::id ran_by;
    auto const enqueue = [&] {
      device.enqueue_task(
          stream,
          [](void* thread) noexcept {
            *static_cast<std::thread::id*>(thread) = std::this_thread::get_id();
          },
          &ran_by);
      device.record(event, stream);
    };
    for (int i = 0; i < 50; ++i) {
      enqueue();
      CHECK_FALSE(device.is_complete(event));
      for (int yields = 0; yields < 20; ++yields) {
        std::this_thread::yield();  // a thread that was woken would run it now
      }
      device.synchronize(event);
      CHECK(ran_by == std::this_thread::get_id());
    }
    enqueue();
    while (!device.is_complete(event)) {
      std::this_thread::yield();
    }
    CHECK(ran_by != std::this_thread::get_id());
  }

  TEST_CASE("HostApi: a forked child can use an allocator that other threads were using") {
    HostApi device;
    DeviceAllocator<HostPolicies> memory{
        device, {.capacity_bytes = 1_MiB, .host = {.pinned_bytes = 8_MiB}}};
    BlockId const block = memory.allocate(512_KiB);
    {
      auto const lease = memory.acquire(block, Access::write, HostStream::caller);
      std::memset(lease.data(), 7, 512_KiB);
    }
    std::jthread others{[&](std::stop_token const& stop) {
      while (!stop.stop_requested()) {
        memory.begin_step();
        (void)memory.host_stats();
        (void)memory.residency(block);
        (void)memory.mark(HostStream::caller);
      }
    }};
    for (int i = 0; i < 50; ++i) {
      memory.before_fork();
      spillway::test::ForkedChild const child{[&] {
        memory.after_fork_in_child();
        memory.swap_out(block);
        auto const lease = memory.acquire(block, Access::read, HostStream::caller);
        return static_cast<unsigned char const*>(lease.data())[512_KiB - 1] == 7;
      }};
      memory.after_fork_in_parent();
      CHECK(child.status() == 0);
    }
    others.request_stop();
    others.join();
    memory.deallocate(block);
  }

  TEST_CASE_TEMPLATE("HostApi: a forked child can use all allocators on one device",
                     Device,
                     HostApi,
                     HostPagedApi) {
    using Policies = PoliciesFor<Device>;
    Device device;
    typename DeviceAllocator<Policies>::Options const options{.capacity_bytes = 1_MiB,
                                                              .host = {.pinned_bytes = 8_MiB}};
    DeviceAllocator<Policies> first{device, options};
    DeviceAllocator<Policies> second{device, options};
    BlockId const block = first.allocate(512_KiB);
    BlockId const other = second.allocate(256_KiB);
    BlockId const busy = second.allocate(256_KiB);
    first.acquire(block, Access::write, HostStream::caller).release();
    second.acquire(other, Access::write, HostStream::caller).release();
    second.acquire(busy, Access::write, HostStream::caller).release();
    std::jthread others{[&](std::stop_token const& stop) {
      while (!stop.stop_requested()) {
        second.swap_out(busy);
        second.acquire(busy, Access::read_write, HostStream::caller).release();
      }
    }};
    for (int i = 0; i < 20; ++i) {
      first.before_fork();
      second.before_fork();
      spillway::test::ForkedChild const child{[&] {
        second.after_fork_in_child();
        first.after_fork_in_child();
        first.swap_out(block);
        first.acquire(block, Access::read, HostStream::caller).release();
        second.swap_out(other);
        second.acquire(other, Access::read, HostStream::caller).release();
      }};
      second.after_fork_in_parent();
      first.after_fork_in_parent();
      CHECK(child.status() == 0);
    }
    others.request_stop();
    others.join();
    first.deallocate(block);
    second.deallocate(other);
    second.deallocate(busy);
  }

  TEST_CASE("HostApi: an allocator swaps blocks of three times its capacity and loses no byte") {
    HostApi device;
    DeviceAllocator<HostPolicies> memory{
        device, {.capacity_bytes = 8_MiB, .host = {.pinned_bytes = 64_MiB}}};
    std::vector<BlockId> blocks;
    for (int i = 0; i < 24; ++i) {
      blocks.push_back(memory.allocate(1_MiB));
      auto const lease = memory.acquire(blocks.back(), Access::write, HostStream::caller);
      std::memset(lease.data(), i, 1_MiB);
    }
    for (int round = 0; round < 3; ++round) {
      for (int i = 0; i < 24; ++i) {
        auto const lease = memory.acquire(
            blocks[static_cast<std::size_t>(i)], Access::read_write, HostStream::caller);
        auto* const bytes = static_cast<unsigned char*>(lease.data());
        CHECK(bytes[0] == i + round);
        CHECK(bytes[1_MiB - 1] == i + round);
        std::memset(bytes, i + round + 1, 1_MiB);
      }
    }
    CHECK(memory.stats().swap_outs.count > 0);
    for (BlockId const id : blocks) {
      memory.deallocate(id);
    }
  }
}
