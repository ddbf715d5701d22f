// SPDX-License-Identifier: Apache-2.0
#include <spillway/stream.hpp>
#include <spillway/swappable_buffer.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <csignal>
#include <string>
#include <type_traits>
#include <utility>

#include <support/death.hpp>
#include <support/small_allocator.hpp>

using namespace spillway;
using namespace spillway::literals;
using spillway::test::Death;
using spillway::test::death_of;
using spillway::testing::SteppedSimApi;
using support::SmallAllocator;
using support::SmallBuffer;

using SmallStream = Stream<SmallAllocator>;
static_assert(!std::is_copy_constructible_v<SmallStream>);
static_assert(std::is_nothrow_move_constructible_v<SmallStream>);

TEST_SUITE("stream") {
  TEST_CASE("Stream: its end makes the allocator forget it, then destroys it") {
    SimApi device{{.capacity_bytes = 64_MiB}};
    SmallAllocator memory{device, support::small_options(1_MiB)};
    auto const streams_before = device.usage().streams;
    SmallBuffer buffer{memory, 1000};
    for (int i = 0; i < 600; ++i) {  // more than an allocator knows at once
      SmallStream const stream = memory.create_stream();
      (void)buffer.acquire(Access::write, stream);
      device.synchronize(stream);  // an index is free again once its stream's work has finished
    }
    CHECK(device.usage().streams == streams_before);
    auto const stream = memory.create_stream();
    CHECK(device.usage().streams == streams_before + 1);
    CHECK_NOTHROW(buffer.acquire_read(stream).release());
  }

  TEST_CASE("Stream: work enqueued before its end is ordered before later uses on other streams") {
    SteppedSimApi device{{.capacity_bytes = 64_MiB}};
    struct Policies : support::SmallPolicies {
      using device = SteppedSimApi;
    };
    DeviceAllocator<Policies> memory{device, {.capacity_bytes = 1_MiB, .bounce_bytes = 0}};
    SwappableBuffer<DeviceAllocator<Policies>> buffer{memory, 1000};
    auto const later = memory.create_stream();
    {
      auto const stream = memory.create_stream();
      device.fill(buffer.acquire_write(stream).data(), 1, 1000, stream);
    }
    // The simulated device refuses work that races with earlier work.
    CHECK_NOTHROW(device.fill(buffer.acquire_write(later).data(), 2, 1000, later));
    device.run_all();
  }

  TEST_CASE("Stream: a move transfers the stream and leaves an empty object") {
    SimApi device{{.capacity_bytes = 64_MiB}};
    SmallAllocator memory{device, support::small_options(1_MiB)};
    auto const streams_before = device.usage().streams;
    {
      SmallStream first = memory.create_stream();
      SimStream const handle = first;
      SmallStream second{std::move(first)};
      CHECK(first.empty());
      CHECK_FALSE(first);
      CHECK(first.get() == SimStream{});
      CHECK_THROWS_AS(first.synchronize(), ContractViolation);
      CHECK(second.get() == handle);
      first = memory.create_stream();
      CHECK(device.usage().streams == streams_before + 2);
      first = std::move(second);
      CHECK(first.get() == handle);
      CHECK(second.empty());
      CHECK(device.usage().streams == streams_before + 1);
    }
    CHECK(device.usage().streams == streams_before);
  }

  TEST_CASE("Stream: an empty one is refused by every call that takes a stream") {
    SimApi device{{.capacity_bytes = 64_MiB}};
    SmallAllocator memory{device, support::small_options(1_MiB)};
    SmallBuffer buffer{memory, 1000};
    SmallStream moved = memory.create_stream();
    SmallStream const stream = std::move(moved);
    SmallStream const never_made;
    for (SmallStream const* const empty : {&std::as_const(moved), &never_made}) {
      CHECK_THROWS_WITH_AS((void)buffer.acquire_write(*empty),
                           doctest::Contains("Stream: the stream is empty"),
                           ContractViolation);
      CHECK_THROWS_AS((void)memory.acquire_all(*empty, writes(buffer)), ContractViolation);
      CHECK_THROWS_AS((void)memory.mark(*empty), ContractViolation);
      CHECK_THROWS_AS(device.launch(*empty, [] {}), ContractViolation);
    }
    CHECK(memory.stats().leased.blocks.current == 0);
    CHECK_NOTHROW((void)buffer.acquire_write(stream));
  }

  TEST_CASE("Stream: an allocator that ends before a stream ends the program and says so") {
    Death const death = death_of([] {
      SimApi device{{.capacity_bytes = 64_MiB}};
      SmallStream longest;
      SmallAllocator memory{device, support::small_options(1_MiB)};
      SmallStream moved = memory.create_stream();
      longest = std::move(moved);
      (void)memory.create_stream();
      memory.close();  // no block is left
    });
    CAPTURE(death.message);
    CHECK(death.signal == SIGABRT);
    CHECK(death.message.find("streams from its create_stream exist") != std::string::npos);
  }

  TEST_CASE("Stream: a lease that outlives its stream delays nobody") {
    SimApi device{{.capacity_bytes = 64_MiB}};
    SmallAllocator memory{device, support::small_options(1_MiB)};
    SmallBuffer buffer{memory, 1000};
    auto const later = memory.create_stream();
    auto lease = buffer.acquire_write(memory.create_stream());
    lease.release();
    CHECK_NOTHROW((void)buffer.acquire_read_write(later));
    later.synchronize();
  }

  TEST_CASE("Stream: synchronize waits for enqueued work") {
    SimApi device{{.capacity_bytes = 64_MiB, .on_device_bytes_per_second = 100'000'000}};
    SmallAllocator memory{device, support::small_options(1_MiB)};
    SmallBuffer buffer{memory, 500'000};
    auto const stream = memory.create_stream();
    auto const lease = buffer.acquire_write(stream);
    device.fill(lease.data(), 7, 500'000, stream);
    stream.synchronize();
    CHECK(static_cast<unsigned char const*>(lease.data())[499'999] == 7);
  }
}
