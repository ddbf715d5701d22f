// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/interop/leased_memory.hpp>
#include <spillway/sim.hpp>
#include <spillway/swappable_buffer.hpp>
#include <spillway/testing/device_contracts.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <support/archetypes/policy_archetypes.hpp>
#include <support/host_work.hpp>
#include <support/pager_archetype.hpp>
#include <support/stepped_policies.hpp>

using namespace spillway;
using spillway::testing::SteppedSimApi;

namespace spillway::test {

/// Has only what `LeasingAllocator` requires beyond `Pager`. It is never run.
struct LeasingArchetype : PagerArchetype {
  using device_type = DeviceArchetype;
  using stream_type = device_type::stream_type;

  explicit LeasingArchetype(device_type& device) : PagerArchetype{0}, device_{device} {}

  lease_type acquire(BlockId, Access, stream_type) { return {}; }
  std::vector<lease_type> acquire_all(std::span<LeaseRequest const>, stream_type) { return {}; }
  void copy_from_host_sync(void*, void const*, std::size_t, stream_type) {}
  void copy_to_host_sync(void*, void const*, std::size_t, stream_type) {}
  device_type& device() { return device_; }
  Fence mark(stream_type) { return {}; }
  void retire_stream(stream_type) {}

 private:
  device_type& device_;
};

}  // namespace spillway::test

namespace {

static_assert(LeasingAllocator<test::LeasingArchetype> && !LeasingAllocator<test::PagerArchetype>);
struct RetiresNothing : test::LeasingArchetype {
  void retire_stream() {}
};
static_assert(!LeasingAllocator<RetiresNothing>);

using Threaded = DeviceAllocator<SimPolicies>;
using Stepped = DeviceAllocator<support::SteppedPolicies>;

constexpr std::size_t capacity = 1_MiB;

template <class Allocator>
typename Allocator::Options small() {
  typename Allocator::Options options{};
  options.capacity_bytes = capacity;
  options.bounce_bytes = 64_KiB;
  options.host = {.pinned_bytes = 8_MiB};
  return options;
}

/// The allocator, the leased memory that is tested, and a few streams.
template <class Allocator>
struct Fixture {
  using Device = typename Allocator::device_type;

  Device device{{.capacity_bytes = 16_MiB}};
  testing::DeviceRig<Device> rig{device};
  Allocator allocator{device, small<Allocator>()};
  typename Allocator::stream_type a = rig.stream();
  typename Allocator::stream_type b = rig.stream();
  typename Allocator::stream_type c = rig.stream();
};

std::string text_of(void const* p) {
  std::ostringstream text;
  text << p;
  return text.str();
}

}  // namespace

template class spillway::LeasedMemory<spillway::test::LeasingArchetype>;

TEST_SUITE("leased_memory") {
  TEST_CASE("LeasedMemory: allocations are usable, distinct and aligned as requested") {
    Fixture<Threaded> f;
    LeasedMemory memory{f.allocator};
    std::vector<void*> all;
    for (std::size_t const alignment : {1U, 8U, 256U, 512U, 4096U, 65536U}) {
      CAPTURE(alignment);
      auto* const p = static_cast<unsigned char*>(memory.allocate(1000, alignment, f.a));
      CHECK(reinterpret_cast<std::uintptr_t>(p) % alignment == 0);
      f.device.fill(p, 1, 1000, f.a);  // refused by the device if it is not all there
      all.push_back(p);
    }
    CHECK(memory.allocation_count() == 6);
    for (void* const p : all) {
      memory.deallocate(p, f.a);
    }
    CHECK(memory.allocation_count() == 0);
    CHECK(f.allocator.stats().allocated.blocks.current == 0);
  }

  TEST_CASE("LeasedMemory: a request of 0 bytes gives null") {
    Fixture<Threaded> f;
    LeasedMemory memory{f.allocator};
    CHECK(memory.allocate(0, 256, f.a) == nullptr);
    CHECK(memory.allocate_sync(0, 256) == nullptr);
    memory.deallocate(nullptr, f.a);
    memory.deallocate_sync(nullptr);
    CHECK(f.allocator.stats().allocated.blocks.total == 0);
  }

  TEST_CASE("LeasedMemory: an alignment that is no power of two is refused") {
    Fixture<Threaded> f;
    LeasedMemory memory{f.allocator};
    CHECK_THROWS_AS((void)memory.allocate(16, 0, f.a), ContractViolation);
    CHECK_THROWS_AS((void)memory.allocate(16, 48, f.a), ContractViolation);
    CHECK_THROWS_AS((void)memory.allocate(~std::size_t{0}, 1024, f.a), ContractViolation);
  }

  TEST_CASE(
      "LeasedMemory: freeing an unknown, foreign or freed address is refused with a message") {
    Fixture<Threaded> f;
    LeasedMemory memory{f.allocator};
    void* const p = memory.allocate(100, 256, f.a);
    memory.deallocate(p, f.a);
    auto const check_refused = [&](void* q, auto deallocate) {
      try {
        deallocate(q);
        FAIL("not refused");
      } catch (ContractViolation const& violation) {
        CHECK(std::string{violation.what()}.find(text_of(q)) != std::string::npos);
      }
    };
    int foreign = 0;
    for (void* const q : {p, static_cast<void*>(&foreign)}) {
      check_refused(q, [&](void* r) { memory.deallocate(r, f.a); });
      check_refused(q, [&](void* r) { memory.deallocate(r, f.b); });
      check_refused(q, [&](void* r) { memory.deallocate_sync(r); });
    }
    CHECK(memory.allocation_count() == 0);
  }

  TEST_CASE("LeasedMemory: an allocation keeps its address while other blocks are evicted") {
    Fixture<Threaded> f;
    LeasedMemory memory{f.allocator};
    auto* const p = static_cast<unsigned char*>(memory.allocate(capacity / 2, 256, f.a));
    test::HostWork<SimApi> work{f.device};
    work.write(p, capacity / 2, 1, f.a);
    for (int i = 0; i < 8; ++i) {
      SwappableBuffer<Threaded> other{f.allocator, capacity / 4};
      auto const lease = other.acquire(Access::write, f.b);
      f.device.fill(lease.data(), 0xEE, capacity / 4, f.b);
    }
    work.check(p, capacity / 2, 1, f.a);
    f.device.synchronize(f.a);
    CHECK(work.wrong() == 0);
    memory.deallocate(p, f.a);
  }

  TEST_CASE("LeasedMemory: a request that is too large throws OutOfDeviceMemory and leaves nothing "
            "behind") {
    Fixture<Threaded> f;
    LeasedMemory memory{f.allocator};
    void* const p = memory.allocate(capacity * 3 / 4, 256, f.a);
    CHECK_THROWS_AS((void)memory.allocate(capacity / 2, 256, f.a), OutOfDeviceMemory);
    CHECK_THROWS_AS((void)memory.allocate_sync(capacity / 2, 256), OutOfDeviceMemory);
    CHECK(memory.allocation_count() == 1);
    CHECK(f.allocator.stats().allocated.blocks.current == 1);
    memory.deallocate(p, f.a);
    memory.deallocate(memory.allocate(capacity, 256, f.b), f.b);
  }

  TEST_CASE("LeasedMemory: if the lease of an allocation fails, no block is left") {
    Fixture<Threaded> f;
    LeasedMemory memory{f.allocator};
    memory.deallocate(memory.allocate(capacity, 256, f.a), f.a);
    f.device.fail(SimCall::record, 1);
    CHECK_THROWS_AS((void)memory.allocate(capacity, 256, f.b), DeviceError);
    CHECK(f.allocator.stats().allocated.blocks.current == 0);
    CHECK(memory.allocation_count() == 0);
  }

  TEST_CASE("LeasedMemory: a failed deallocation leaves the memory allocated") {
    Fixture<Threaded> f;
    LeasedMemory memory{f.allocator};
    memory.deallocate(memory.allocate(capacity, 256, f.a), f.a);
    void* const p = memory.allocate(capacity, 256, f.b);
    f.device.fail(SimCall::wait, 1);
    CHECK_THROWS_AS(memory.deallocate(p, f.c), DeviceError);
    CHECK(memory.allocation_count() == 1);
    memory.deallocate(p, f.c);
    CHECK(f.allocator.stats().allocated.blocks.current == 0);
  }

  TEST_CASE("LeasedMemory: frees at its end what was not deallocated") {
    Fixture<Threaded> f;
    std::size_t const streams = f.device.usage().streams;
    {
      LeasedMemory memory{f.allocator};
      (void)memory.allocate(100, 256, f.a);
      (void)memory.allocate_sync(100, 256);
    }
    CHECK(f.allocator.stats().allocated.blocks.current == 0);
    CHECK(f.device.usage().streams == streams);
  }

  // A range goes from `a`, where it was allocated, to `b`, where it is used last, and to `c`.
  TEST_CASE("LeasedMemory: memory freed on another stream is reused after that stream's work") {
    for (std::uint64_t seed = 1; seed <= 200; ++seed) {
      CAPTURE(seed);
      Fixture<Stepped> f;
      LeasedMemory memory{f.allocator};
      test::HostWork<SteppedSimApi> work{f.device};
      auto const event = f.rig.event();

      void* const p = memory.allocate(capacity, 256, f.a);
      work.write(p, capacity, 1, f.a);
      f.device.record(event, f.a);
      f.device.wait(f.b, event);
      work.check(p, capacity, 1, f.b);
      memory.deallocate(p, f.b);
      void* const q = memory.allocate(capacity, 256, f.c);
      REQUIRE(q == p);
      work.write(q, capacity, 2, f.c);
      work.check(q, capacity, 2, f.c);
      memory.deallocate(q, f.c);
      f.device.run_random(seed);

      CHECK(work.wrong() == 0);
    }
  }

  TEST_CASE("LeasedMemory: the stream of an allocation may be retired and destroyed before it is "
            "deallocated") {
    for (std::uint64_t seed = 1; seed <= 100; ++seed) {
      CAPTURE(seed);
      Fixture<Stepped> f;
      LeasedMemory memory{f.allocator};
      test::HostWork<SteppedSimApi> work{f.device};
      auto const event = f.rig.event();
      auto const first = f.device.create_stream();

      void* const p = memory.allocate(capacity, 256, first);
      work.write(p, capacity, 1, first);
      f.device.record(event, first);
      f.device.wait(f.b, event);
      f.allocator.retire_stream(first);
      f.device.destroy_stream(first);
      if (seed % 2 == 0) {  // the allocator may give the number of the first stream to another one
        f.device.run_all();
        (void)f.allocator.mark(f.a);
      }
      work.check(p, capacity, 1, f.b);
      seed % 3 == 0 ? memory.deallocate_sync(p) : memory.deallocate(p, f.b);
      if (seed % 3 == 0) {
        f.allocator.order_after(f.c, f.allocator.mark(f.b));
      }
      void* const q = memory.allocate(capacity, 256, f.c);
      REQUIRE(q == p);
      work.write(q, capacity, 2, f.c);
      work.check(q, capacity, 2, f.c);
      memory.deallocate(q, f.c);
      f.device.run_random(seed);

      CHECK(work.wrong() == 0);
    }
  }

  TEST_CASE("LeasedMemory: memory for any stream is handed out after all work on it has finished") {
    Fixture<Stepped> f;
    LeasedMemory memory{f.allocator};
    test::HostWork<SteppedSimApi> work{f.device};
    void* const p = memory.allocate(capacity, 256, f.a);
    work.write(p, capacity, 1, f.a);
    memory.deallocate(p, f.a);
    REQUIRE(f.device.queued_ops(f.a) > 0);

    void* const q = memory.allocate_sync(capacity, 256);

    CHECK(f.device.queued_ops(f.a) == 0);
    work.write(q, capacity, 2, f.b);
    work.check(q, capacity, 2, f.b);
    f.device.synchronize(f.b);
    CHECK(work.wrong() == 0);
    memory.deallocate_sync(q);
  }

  TEST_CASE("LeasedMemory: allocating and freeing on its own stream makes no device call") {
    Fixture<Threaded> f;
    LeasedMemory memory{f.allocator};
    memory.deallocate(memory.allocate(4096, 256, f.a), f.a);
    SimCalls const before = f.device.calls();
    for (int i = 0; i < 10; ++i) {
      memory.deallocate(memory.allocate(4096, 256, f.a), f.a);
    }
    CHECK(f.device.calls() == before);
  }

  TEST_CASE("LeasedMemory: several threads may use it, each on its own stream") {
    Fixture<Threaded> f;
    LeasedMemory memory{f.allocator};
    test::HostWork<SimApi> work{f.device};
    std::vector<SimStream> const streams{f.a, f.b, f.c};
    std::vector<std::thread> threads;
    for (std::uint32_t t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        std::minstd_rand random{t + 1};
        for (std::uint32_t i = 0; i < 200; ++i) {
          std::size_t const bytes = 1 + random() % (capacity / 8);
          void* const p = random() % 4 == 0 ? memory.allocate_sync(bytes, 512)
                                            : memory.allocate(bytes, 512, streams[t]);
          work.write(p, bytes, t * 1000 + i, streams[t]);
          work.check(p, bytes, t * 1000 + i, streams[t]);
          memory.deallocate(p, streams[t]);
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    f.allocator.synchronize();
    CHECK(work.wrong() == 0);
    CHECK(memory.allocation_count() == 0);
  }
}
