// SPDX-License-Identifier: Apache-2.0
// Many threads on one allocator, on a device whose streams run concurrently.
#include <spillway/policy/codec/zero_bitmap.hpp>
#include <spillway/sim.hpp>
#include <spillway/swappable_buffer.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include <support/pattern.hpp>
#include <support/stripes_on_host.hpp>

namespace {

using namespace spillway::literals;
using spillway::Access;
using Allocator = spillway::DeviceAllocator<>;
using Buffer = spillway::SwappableBuffer<Allocator>;

/// A device whose memory the host cannot address: codecs work on what is staged.
struct RemoteApi : spillway::SimApi {
  using spillway::SimApi::BasicSimApi;
  [[maybe_unused]] static constexpr bool is_addressable = false;
};
struct RemotePolicies : spillway::PoliciesFor<RemoteApi> {};

template <class Any = Allocator>
typename Any::Options small(std::size_t capacity_bytes) {
  typename Any::Options options{.capacity_bytes = capacity_bytes};
  options.bounce_bytes = 64_KiB;
  options.host.pinned_bytes = 64_MiB;
  options.host.slab_bytes = 1_MiB;
  options.paging.poison_vacated = true;
  return options;
}

void run_threads(std::size_t count, std::function<void(std::size_t)> const& body) {
  std::vector<std::jthread> threads;
  for (std::size_t i = 0; i < count; ++i) {
    threads.emplace_back([&body, i] { body(i); });
  }
}

}  // namespace

TEST_SUITE("allocator_race") {
  TEST_CASE_TEMPLATE(
      "DeviceAllocator: threads that together need more than the device lose no byte",
      Policies,
      spillway::SimPolicies,
      RemotePolicies) {
    using OneAllocator = spillway::DeviceAllocator<Policies>;
    support::PatternKernels kernels;
    typename Policies::device device{{.capacity_bytes = 64_MiB}};
    auto options = small<OneAllocator>(640_KiB);  // less than one thread's buffers
    if constexpr (!spillway::AddressableApi<typename Policies::device>) {
      options.host.pinned_bytes = 2_MiB;
      options.host.pageable_bytes = 64_MiB;
      options.host.staging_bytes = 64_KiB;
    }
    OneAllocator allocator{device, options};
    std::atomic<std::size_t> gave_up{0};
    std::barrier start{4};

    run_threads(4, [&](std::size_t thread) {
      std::mt19937_64 random{thread + 1};
      auto const stream = device.create_stream();
      std::vector<spillway::SwappableBuffer<OneAllocator>> buffers;
      std::vector<std::uint64_t> contents;
      bool const has_codec = thread % 2 == 1;
      auto const content = [&](std::uint64_t i) {
        return thread << 32U | i << 2U | (has_codec ? 3U : 0U);  // 3: mostly zeros
      };
      start.arrive_and_wait();
      for (std::uint64_t i = 0; i < 600; ++i) {
        try {
          if (buffers.size() < 12) {
            buffers.emplace_back(allocator, 4_KiB + random() % 128_KiB);
            contents.push_back(content(i));
            if (thread == 1) {
              allocator.template set_codec<spillway::ZeroBitmap>(buffers.back().id(), random() % 2);
            } else if (thread == 3) {
              allocator.template set_codec<spillway::test::ZeroBitmapOnStream>(buffers.back().id(),
                                                                               random() % 2);
            }
            auto const lease = buffers.back().acquire(Access::write, stream);
            kernels.write(device, stream, lease.data(), lease.size_bytes(), contents.back());
          }
          std::size_t const at = random() % buffers.size();
          auto const lease = buffers[at].acquire(Access::read_write, stream);
          kernels.check(device, stream, lease.data(), lease.size_bytes(), contents[at]);
          contents[at] = content(i) | 1U << 31U;
          kernels.write(device, stream, lease.data(), lease.size_bytes(), contents[at]);
        } catch (spillway::OutOfDeviceMemory const&) {
          ++gave_up;
          buffers.clear();
          contents.clear();
        }
        if (random() % 16 == 0 && !buffers.empty()) {
          buffers.pop_back();
          contents.pop_back();
        }
        if (random() % 64 == 0) {
          allocator.compact(256_KiB);
        }
      }
      buffers.clear();
      allocator.retire_stream(stream);
      device.destroy_stream(stream);
    });
    allocator.synchronize();

    CHECK_MESSAGE(kernels.failures() == 0, kernels.first_failure());
    CHECK(kernels.checks() > 1000);
    CHECK(allocator.stats().swap_outs.count > 0);
    CHECK(allocator.host_stats().encoded_stored_bytes < allocator.host_stats().encoded_raw_bytes);
    CHECK(allocator.stats().allocated.blocks.current == 0);
    MESSAGE(allocator.stats().swap_outs.count << " swap-outs, " << allocator.stats().moves.count
                                              << " moves, " << gave_up.load() << " gave up");
  }

  TEST_CASE("DeviceAllocator: threads share buffers; each use is ordered after the last") {
    support::PatternKernels kernels;
    spillway::SimApi device{{.capacity_bytes = 64_MiB}};
    Allocator allocator{device, small(512_KiB)};
    struct Shared {
      Buffer buffer;
      std::mutex mutex;  // one use at a time: the program itself must order uses of a buffer
      std::uint64_t content = 0;
    };
    std::vector<Shared> shared(8);
    for (Shared& one : shared) {
      one.buffer = Buffer{allocator, 128_KiB};
    }

    run_threads(4, [&](std::size_t thread) {
      std::mt19937_64 random{thread + 100};
      auto const stream = device.create_stream();
      for (std::uint64_t i = 1; i <= 300; ++i) {
        Shared& one = shared[random() % shared.size()];
        std::scoped_lock const lock{one.mutex};
        auto const lease = one.buffer.acquire(Access::read_write, stream);
        if (one.content != 0) {
          kernels.check(device, stream, lease.data(), lease.size_bytes(), one.content);
        }
        one.content = thread << 32U | i;
        kernels.write(device, stream, lease.data(), lease.size_bytes(), one.content);
      }
      allocator.retire_stream(stream);
      device.destroy_stream(stream);
    });
    allocator.synchronize();

    CHECK_MESSAGE(kernels.failures() == 0, kernels.first_failure());
    CHECK(kernels.checks() > 1000);
  }

  TEST_CASE("DeviceAllocator: a thread waits for another's lease instead of failing") {
    spillway::SimApi device{{.capacity_bytes = 64_MiB}};
    Allocator::Options options = small(1_MiB);
    options.paging.lease_wait = std::chrono::hours{1};
    Allocator allocator{device, options};
    auto const stream = device.create_stream();
    Buffer held{allocator, 768_KiB};
    auto lease = held.acquire(Access::write, stream);

    {
      std::jthread const other{[&] { Buffer const needs_room{allocator, 512_KiB}; }};
      while (allocator.waiting_threads() == 0) {
        std::this_thread::yield();
      }
      lease.release();
    }

    CHECK(allocator.stats().host_waits == 1);
    CHECK(allocator.stats().out_of_memory == 0);
    held.reset();
    allocator.retire_stream(stream);
  }

  TEST_CASE("DeviceAllocator: threads that hold what the others need fail instead of waiting") {
    spillway::SimApi device{{.capacity_bytes = 64_MiB}};
    Allocator::Options options = small(1_MiB);
    options.paging.lease_wait = std::chrono::hours{1};  // a deadlock would be seen as a time-out
    Allocator allocator{device, options};
    std::atomic<std::size_t> failed{0};
    std::atomic<std::size_t> succeeded{0};
    std::barrier all_hold{2};

    run_threads(2, [&](std::size_t) {
      auto const stream = device.create_stream();
      Buffer mine{allocator, 512_KiB};
      {
        auto const lease = mine.acquire(Access::write, stream);
        all_hold.arrive_and_wait();
        try {
          Buffer const more{allocator, 256_KiB};
          ++succeeded;
        } catch (spillway::OutOfDeviceMemory const&) {
          ++failed;
        }
      }
      mine.reset();
      allocator.retire_stream(stream);
    });

    // The thread that found no other to wait for failed; its lease ended, and the other thread went
    // on.
    CHECK(failed + succeeded == 2);
    CHECK(failed >= 1);
  }

  TEST_CASE("DeviceAllocator: threads that share a block do not wait for each other's leases") {
    constexpr std::size_t threads = 3;
    spillway::SimApi device{{.capacity_bytes = 64_MiB}};
    Allocator::Options options = small(1_MiB);
    options.paging.lease_wait = std::chrono::hours{1};  // a deadlock would be seen as a time-out
    Allocator allocator{device, options};
    Buffer shared{allocator, 896_KiB};
    auto const first = device.create_stream();
    shared.acquire(Access::write, first).release();
    allocator.retire_stream(first);
    std::atomic<std::size_t> failed{0};
    std::barrier all_hold{threads};

    run_threads(threads, [&](std::size_t) {
      auto const stream = device.create_stream();
      {
        auto const lease = shared.acquire(Access::read, stream);
        all_hold.arrive_and_wait();
        try {
          Buffer const more{allocator, 256_KiB};
        } catch (spillway::OutOfDeviceMemory const&) {
          ++failed;
        }
      }
      allocator.retire_stream(stream);
    });

    CHECK(failed >= 1);
  }
}
