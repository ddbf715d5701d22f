// SPDX-License-Identifier: Apache-2.0
// Thrust's vectors and algorithms in memory of a simulated device, whose bytes the host can touch.
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/interop/thrust.hpp>
#include <spillway/sim.hpp>
#include <spillway/testing/device_contracts.hpp>

#include <thrust/device_vector.h>
#include <thrust/execution_policy.h>
#include <thrust/mr/disjoint_pool.h>
#include <thrust/mr/new.h>
#include <thrust/mr/pool.h>
#include <thrust/reduce.h>
#include <thrust/scan.h>
#include <thrust/sequence.h>
#include <thrust/sort.h>
#include <thrust/system/cpp/execution_policy.h>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <new>
#include <utility>

#include <support/host_work.hpp>

using namespace spillway;

namespace {

using Allocator = DeviceAllocator<SimPolicies>;
using Resource = ThrustResource<Allocator>;
template <class T>
using Vector = thrust::device_vector<T, ThrustAllocator<T, Allocator>>;

Allocator::Options small() {
  Allocator::Options options{};
  options.capacity_bytes = 4_MiB;
  options.bounce_bytes = 256_KiB;
  options.host.pinned_bytes = 16_MiB;
  return options;
}

struct Fixture {
  SimApi device{{.capacity_bytes = 64_MiB}};
  testing::DeviceRig<SimApi> rig{device};
  Allocator allocator{device, small()};
  LeasedMemory<Allocator> memory{allocator};
};

}  // namespace

TEST_SUITE("thrust") {
  TEST_CASE("ThrustAllocator: a device_vector lives in the allocator's memory") {
    Fixture f;
    Resource resource{f.memory};
    {
      Vector<float> v(1000, 2.0F, &resource);
      CHECK(f.memory.allocation_count() == 1);
      CHECK(f.allocator.stats().leased.bytes.current == 4096);  // 4000 and the rest of the granule
      CHECK(thrust::reduce(v.begin(), v.end()) == 2000.0F);

      v.push_back(7.0F);
      v.resize(3000);
      v[2999] = 1.0F;
      Vector<float> copy{v};
      Vector<float> moved{std::move(v)};
      CHECK(copy == moved);
      CHECK(f.memory.allocation_count() == 2);
      copy.clear();
      copy.shrink_to_fit();
      CHECK(f.memory.allocation_count() == 1);
      CHECK(moved[1000] == 7.0F);
    }
    CHECK(f.memory.allocation_count() == 0);
  }

  TEST_CASE("ThrustAllocator: vectors of two resources keep their own when swapped and assigned") {
    Fixture f;
    LeasedMemory<Allocator> other_memory{f.allocator};
    Resource resource{f.memory};
    Resource other{other_memory};
    {
      Vector<int> a(10, 1, &resource);
      Vector<int> b(20, 2, &other);
      a.swap(b);
      CHECK(a.size() == 20);
      CHECK(b[9] == 1);
      a = std::move(b);
      CHECK(a.size() == 10);
      CHECK(f.memory.allocation_count() == 1);
      CHECK(other_memory.allocation_count() == 0);
    }
    CHECK(f.memory.allocation_count() == 0);
  }

  TEST_CASE("ThrustResource: algorithms allocate their scratch memory from it and free it") {
    Fixture f;
    Resource resource{f.memory};
    Vector<int> v(100'000, 0, &resource);
    Vector<int> keys(v.size(), 0, &resource);
    thrust::sequence(v.begin(), v.end());
    thrust::sequence(keys.begin(), keys.end());
    auto const before = f.allocator.stats().allocated.blocks.total;

    thrust::stable_sort_by_key(
        thrust::cpp::par(&resource), keys.begin(), keys.end(), v.begin(), std::greater<int>{});

    CHECK(f.allocator.stats().allocated.blocks.total > before);
    CHECK(f.memory.allocation_count() == 2);
    CHECK(v[0] == 99'999);
    CHECK(v[99'999] == 0);
  }

  TEST_CASE("ThrustResource: on a stream, memory is reused after that stream's work") {
    Fixture f;
    auto const a = f.rig.stream();
    auto const b = f.rig.stream();
    ThrustResource on_a{f.memory, a};
    ThrustResource on_b{f.memory, b};
    test::HostWork<SimApi> work{f.device};
    for (std::uint32_t i = 0; i < 20; ++i) {
      Resource& resource = i % 2 == 0 ? on_a : on_b;
      auto const stream = i % 2 == 0 ? a : b;
      auto const p = resource.allocate(4_MiB, 256);
      void* const raw = thrust::raw_pointer_cast(p);
      work.write(raw, 4_MiB, i, stream);
      work.check(raw, 4_MiB, i, stream);
      resource.deallocate(p, 4_MiB, 256);
    }
    f.allocator.synchronize();
    CHECK(work.wrong() == 0);
  }

  TEST_CASE(
      "ThrustResource: respects alignment, and a request that is too large throws std::bad_alloc") {
    Fixture f;
    Resource resource{f.memory};
    auto const p = resource.allocate(10, 4096);
    CHECK(reinterpret_cast<std::uintptr_t>(thrust::raw_pointer_cast(p)) % 4096 == 0);
    resource.deallocate(p, 10, 4096);
    CHECK_THROWS_AS(Vector<char>(8_MiB, 'x', &resource), std::bad_alloc);
    CHECK(f.memory.allocation_count() == 0);
  }

  TEST_CASE("ThrustResource: works as the upstream of Thrust's own pools") {
    Fixture f;
    ThrustResource<Allocator, void*> resource{f.memory};
    {
      thrust::mr::new_delete_resource bookkeeping;
      thrust::mr::disjoint_unsynchronized_pool_resource<ThrustResource<Allocator, void*>,
                                                        thrust::mr::new_delete_resource>
          pool{&resource, &bookkeeping};
      void* const p = pool.do_allocate(100, 16);
      f.device.fill(p, 1, 100, f.rig.stream());
      pool.do_deallocate(p, 100, 16);
      CHECK(f.memory.allocation_count() > 0);
    }
    CHECK(f.memory.allocation_count() == 0);
  }
}
