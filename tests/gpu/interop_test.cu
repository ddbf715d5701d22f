// SPDX-License-Identifier: Apache-2.0
// cuda::mr and Thrust on a GPU, as nvcc compiles them.
#include <spillway/cuda.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/interop/cuda_mr.hpp>
#include <spillway/interop/thrust.hpp>
#include <spillway/testing/device_contracts.hpp>

#include <cuda/memory_resource>
#include <cuda/stream_ref>
#include <thrust/device_vector.h>
#include <thrust/execution_policy.h>
#include <thrust/functional.h>
#include <thrust/reduce.h>
#include <thrust/sequence.h>
#include <thrust/sort.h>
#include <thrust/system/cuda/execution_policy.h>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>

#include "kernels.cuh"

using namespace spillway;
using namespace gpu_test;

namespace {

using Allocator = DeviceAllocator<CudaPolicies>;
using Resource = CudaMemoryResource<Allocator>;
template <class T>
using Vector = thrust::device_vector<T, ThrustAllocator<T, Allocator>>;

#if CCCL_VERSION >= 3001000
static_assert(cuda::mr::resource_with<Resource, cuda::mr::device_accessible>);
#else
static_assert(cuda::mr::async_resource_with<Resource, cuda::mr::device_accessible>);
#endif

Allocator::Options interop_options() {
  Allocator::Options chosen{};
  chosen.capacity_bytes = 256_MiB;
  chosen.host.pinned_bytes = 256_MiB;
  return chosen;
}

struct Fixture {
  CudaApi device;
  testing::DeviceRig<CudaApi> rig{device};
  Allocator allocator{device, interop_options()};
  LeasedMemory<Allocator> memory{allocator};
  WrongBytes wrong{device};
};

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE("CudaMemoryResource: memory passes between streams after the kernels that use it") {
    Fixture f;
    Resource resource{f.memory};
    auto const a = f.rig.stream();
    auto const b = f.rig.stream();
    KernelGate gate{f.device};
    gate.close(a);
    for (std::uint32_t i = 0; i < 20; ++i) {
      cudaStream_t const on = i % 2 == 0 ? a : b;
      void* const p = resource.allocate(cuda::stream_ref{on}, 256_MiB);
      launch_write(p, 256_MiB, i, on);
      launch_check(p, 256_MiB, i, f.wrong.counter(), on);
      resource.deallocate(cuda::stream_ref{on}, p, 256_MiB);
    }
    gate.open();
    f.allocator.synchronize();
    CHECK(f.wrong.value() == 0);
    CHECK_FALSE(gate.gave_up());
  }

  TEST_CASE("CudaMemoryResource: memory for any stream is usable at once") {
    Fixture f;
    Resource resource{f.memory};
    auto const a = f.rig.stream();
    auto const b = f.rig.stream();
    void* p = resource.allocate(cuda::stream_ref{a}, 256_MiB);
    launch_write(p, 256_MiB, 1, a);
    resource.deallocate(cuda::stream_ref{a}, p, 256_MiB);
    p = resource.allocate_sync(256_MiB);
    launch_write(p, 256_MiB, 2, b);
    launch_check(p, 256_MiB, 2, f.wrong.counter(), b);
    f.device.synchronize(b);
    resource.deallocate_sync(p, 256_MiB);
    CHECK(f.wrong.value() == 0);
  }

  TEST_CASE("ThrustAllocator: a device_vector lives in the allocator's memory") {
    Fixture f;
    ThrustResource<Allocator> resource{f.memory};
    {
      Vector<float> v(100'000, 2.0F, &resource);
      CHECK(f.memory.allocation_count() == 1);
      CHECK(thrust::reduce(v.begin(), v.end()) == 200'000.0F);
      v.push_back(7.0F);
      Vector<float> const copy{v};
      CHECK(copy[100'000] == 7.0F);
    }
    CHECK(f.memory.allocation_count() == 0);
  }

  TEST_CASE("ThrustResource: a sort with scratch memory on a stream") {
    Fixture f;
    LeasedMemory<Allocator>& scratch = f.memory;
    auto const stream = f.rig.stream();
    auto* const first = static_cast<int*>(scratch.allocate(sizeof(int), 256, stream));
    int* const last = first + 1;
    // [scratch]
    spillway::ThrustResource resource{scratch, stream};
    thrust::sort(thrust::cuda::par_nosync(&resource).on(stream), first, last);
    // [scratch end]
    scratch.deallocate(first, stream);
    CHECK(scratch.allocation_count() == 0);
  }

  TEST_CASE("ThrustResource: an algorithm on a stream takes its scratch memory there") {
    Fixture f;
    auto const stream = f.rig.stream();
    ThrustResource<Allocator> resource{f.memory, stream};
    constexpr std::size_t n = 1'000'000;
    auto const raw = resource.allocate(n * sizeof(int), 256);
    auto* const first = static_cast<int*>(thrust::raw_pointer_cast(raw));
    auto const before = f.allocator.stats().allocated.blocks.total;

    thrust::sequence(thrust::cuda::par_nosync.on(stream), first, first + n);
    thrust::sort(
        thrust::cuda::par_nosync(&resource).on(stream), first, first + n, thrust::greater<int>{});
    int ends[2] = {-1, -1};
    cuda_check(cudaMemcpyAsync(ends, first, sizeof(int), cudaMemcpyDeviceToHost, stream));
    cuda_check(
        cudaMemcpyAsync(ends + 1, first + n - 1, sizeof(int), cudaMemcpyDeviceToHost, stream));
    f.device.synchronize(stream);

    CHECK(ends[0] == static_cast<int>(n) - 1);
    CHECK(ends[1] == 0);
    CHECK(f.allocator.stats().allocated.blocks.total > before);
    CHECK(f.memory.allocation_count() == 1);
    resource.deallocate(raw, n * sizeof(int), 256);
  }
}
