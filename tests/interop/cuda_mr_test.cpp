// SPDX-License-Identifier: Apache-2.0
#include <spillway/cuda.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/interop/cuda_mr.hpp>
#include <spillway/testing/device_contracts.hpp>

#include <cuda/memory_resource>
#include <cuda/stream_ref>

#include <doctest/doctest.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>
#include <utility>

#include <support/fake_cudart.hpp>
#include <support/host_work.hpp>

using namespace spillway;

namespace {

using Allocator = DeviceAllocator<CudaPolicies>;
using Resource = CudaMemoryResource<Allocator>;

// What CCCL asks of a resource from 3.1 on. The toolkit's own spelling is asked for below.
// clang-format off
template <class R>
concept StreamOrderedResource =
    std::equality_comparable<R> && std::copyable<R> && std::is_nothrow_move_constructible_v<R> &&
    requires(R r, R const cr, void* p, std::size_t bytes, std::size_t alignment,
             cuda::stream_ref s) {
      { r.allocate_sync(bytes, alignment)      } -> std::same_as<void*>;
      { r.deallocate_sync(p, bytes, alignment) } -> std::same_as<void>;
      { r.allocate(s, bytes, alignment)        } -> std::same_as<void*>;
      { r.deallocate(s, p, bytes, alignment)   } -> std::same_as<void>;
      get_property(cr, cuda::mr::device_accessible{});
    };
// clang-format on
static_assert(StreamOrderedResource<Resource>);
static_assert(sizeof(Resource) == sizeof(void*));  // fits where type-erased resources are kept

#if CCCL_VERSION >= 3001000
static_assert(cuda::mr::resource_with<Resource, cuda::mr::device_accessible>);
#else
static_assert(cuda::mr::async_resource_with<Resource, cuda::mr::device_accessible>);
static_assert(!cuda::has_property<Resource, cuda::mr::host_accessible>);
#endif

Allocator::Options small() {
  Allocator::Options options{};
  options.capacity_bytes = 1_MiB;
  options.host.pinned_bytes = 4_MiB;
  return options;
}

struct Fixture {
  FakeCudart cuda;
  CudaApi device{0};
  cudaStream_t first = device.create_stream();
  cudaStream_t second = device.create_stream();
  Allocator allocator{device, small()};
  LeasedMemory<Allocator> memory{allocator};
  Resource resource{memory};
};

}  // namespace

TEST_SUITE("cuda_mr") {
  TEST_CASE("CudaMemoryResource: the interfaces of CCCL and of the toolkit share the memory") {
    Fixture f;
    cuda::stream_ref const stream{f.first};

    void* const p = f.resource.allocate_async(1000, 512, stream);
    CHECK(reinterpret_cast<std::uintptr_t>(p) % 512 == 0);
    f.resource.deallocate(stream, p, 1000, 512);
    void* const q = f.resource.allocate(stream, 1000);
    CHECK(reinterpret_cast<std::uintptr_t>(q) % 256 == 0);
    f.resource.deallocate_async(q, 1000, 256, cuda::stream_ref{f.second});
    void* const r = f.resource.allocate(1000, 1024);
    CHECK(reinterpret_cast<std::uintptr_t>(r) % 1024 == 0);
    f.resource.deallocate_sync(r, 1000, 1024);
    void* const s = f.resource.allocate_sync(1000);
    f.resource.deallocate(s, 1000);
    f.resource.deallocate_async(f.resource.allocate_async(8, stream), 8, stream);

    CHECK(f.memory.allocation_count() == 0);
    CHECK_THROWS_AS(f.resource.deallocate_sync(s, 1000), ContractViolation);
  }

  TEST_CASE("CudaMemoryResource: allocates leased memory") {
    Fixture f;
    Allocator& memory = f.allocator;
    // [resource]
    spillway::LeasedMemory scratch{memory};
    spillway::CudaMemoryResource resource{scratch};  // copies share scratch and compare equal
    // [resource end]
    CHECK(&resource.memory() == &scratch);
  }

  TEST_CASE("CudaMemoryResource: copies compare equal and share their memory, others do not") {
    Fixture f;
    LeasedMemory<Allocator> other{f.allocator};
    Resource copy = f.resource;
    CHECK(copy == f.resource);
    CHECK(copy != CudaMemoryResource{other});
    void* const p = f.resource.allocate_sync(64);
    copy.deallocate_sync(p, 64);
    CHECK(f.memory.allocation_count() == 0);
    CHECK(&copy.memory() == &f.memory);
  }

  TEST_CASE("CudaMemoryResource: a request that is too large throws std::bad_alloc") {
    Fixture f;
    CHECK_THROWS_AS((void)f.resource.allocate_sync(2_MiB), std::bad_alloc);
    CHECK_THROWS_AS((void)f.resource.allocate(cuda::stream_ref{f.first}, 2_MiB), std::bad_alloc);
  }

  TEST_CASE("CudaMemoryResource: a handle that is another stream in each thread is refused") {
    Fixture f;
    cuda::stream_ref const mine{cudaStreamPerThread};
    CHECK_THROWS_AS((void)f.resource.allocate(mine, 64), ContractViolation);
    CHECK(f.allocator.stats().allocated.blocks.current == 0);
  }

  TEST_CASE("CudaMemoryResource: memory passes between streams after the work that used it") {
    Fixture f;
    test::HostWork<CudaApi> work{f.device};
    for (std::uint32_t i = 0; i < 20; ++i) {
      cudaStream_t const on = i % 2 == 0 ? f.first : f.second;
      void* const p = f.resource.allocate(cuda::stream_ref{on}, 1_MiB);
      work.write(p, 1_MiB, i, on);
      work.check(p, 1_MiB, i, on);
      f.resource.deallocate(cuda::stream_ref{on}, p, 1_MiB);
    }
    f.allocator.synchronize();
    CHECK(work.wrong() == 0);
  }

  TEST_CASE("CudaMemoryResource: memory freed on a stream with the handle of a destroyed one is "
            "reused after the work of that stream") {
    Fixture f;
    testing::Gate gate;
    void* const p = f.resource.allocate(cuda::stream_ref{f.first}, 1_MiB);
    gate.close(f.device, f.first);
    f.allocator.retire_stream(f.first);
    f.device.destroy_stream(f.first);
    cudaStream_t const same = f.device.create_stream();
    REQUIRE(same == f.first);
    f.resource.deallocate(cuda::stream_ref{same}, p, 1_MiB);

    std::size_t const waits = f.cuda.calls("cudaStreamWaitEvent");
    void* const q = f.resource.allocate(cuda::stream_ref{f.second}, 1_MiB);
    REQUIRE(q == p);
    CHECK(f.cuda.calls("cudaStreamWaitEvent") - waits == 2);  // for the old stream and the new one
    gate.open();
    f.resource.deallocate(cuda::stream_ref{f.second}, q, 1_MiB);
  }

#if CCCL_VERSION < 3001000
  TEST_CASE("CudaMemoryResource: works through the toolkit's type-erased references") {
    Fixture f;
    cuda::mr::async_resource_ref<cuda::mr::device_accessible> const reference{f.resource};
    auto any = reference;
    void* const p = any.allocate_async(4096, 256, cuda::stream_ref{f.first});
    CHECK(f.memory.allocation_count() == 1);
    any.deallocate_async(p, 4096, 256, cuda::stream_ref{f.second});
    cuda::mr::resource_ref<cuda::mr::device_accessible> plain{any};
    plain.deallocate(plain.allocate(100, 256), 100, 256);
    CHECK(f.memory.allocation_count() == 0);
    CHECK(any == reference);
  }
#endif
}
