// SPDX-License-Identifier: Apache-2.0
// CudaApi on a stand-in for the CUDA runtime: which calls it makes, and what it does when they
// fail. For tests on a real GPU see tests/gpu/.
#include <spillway/device/cuda/cuda_api.hpp>
#include <spillway/testing/device_contracts.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <support/fake_cudart.hpp>

#if defined(__linux__)
#  include <linux/mempolicy.h>
#  include <sys/syscall.h>
#  include <unistd.h>
#endif

using namespace spillway;
using namespace spillway::literals;

namespace {

std::size_t device_bytes(FakeCudart const& cuda, int device) {
  return cuda.usage(device).device_bytes;
}

struct Runtime {
  FakeCudart cuda;
};
/// A default-constructible device, whose runtime is made before it and destroyed after it.
struct FakeCudaDevice : Runtime, CudaApi {
  FakeCudaDevice() : Runtime{FakeCudart{{.capacity_bytes = 1U << 30U, .numa_node = 0}}} {}
};

}  // namespace

TEST_SUITE("cuda_api") {
  TEST_CASE_TEMPLATE_INVOKE(device_memory_contract, FakeCudaDevice);
  TEST_CASE_TEMPLATE_INVOKE(device_copy_contract, FakeCudaDevice);
  TEST_CASE_TEMPLATE_INVOKE(device_order_contract, FakeCudaDevice);
  TEST_CASE_TEMPLATE_INVOKE(device_progress_contract, FakeCudaDevice);
  TEST_CASE_TEMPLATE_INVOKE(virtual_memory_contract, FakeCudaDevice);
  TEST_CASE_TEMPLATE_INVOKE(batch_copy_contract, FakeCudaDevice);

  TEST_CASE(
      "CudaApi: without a driver or the requested device, the constructor throws CUDA's error") {
    FakeCudart cuda{{.has_driver = false}};
    try {
      CudaApi const api;
      FAIL("constructed without a driver");
    } catch (CudaError const& error) {
      CHECK(error.code() == cudaErrorInsufficientDriver);
      CHECK(std::strstr(error.what(), "cuda_context.hpp:") != nullptr);
    }
    CHECK(cudaPeekAtLastError() == cudaSuccess);
  }

  TEST_CASE("CudaApi: a device ordinal that does not exist is refused") {
    FakeCudart cuda;
    CHECK_THROWS_AS(CudaApi{2}, CudaError);
    CHECK_THROWS_AS(CudaApi{-1}, CudaError);
  }

  TEST_CASE("CudaApi: the device's context is retained while the object lives, then released") {
    FakeCudart cuda;
    {
      CudaApi const api{1};
      CHECK(cuda.context_references(1) == 1);
      CHECK(api.ordinal() == 1);
    }
    CHECK(cuda.context_references(1) == 0);
  }

  TEST_CASE("CudaApi: a failed construction retains no context") {
    FakeCudart cuda;
    cuda.fail_next("cuMemGetAllocationGranularity", cudaErrorInvalidValue);
    CHECK_THROWS_AS(CudaApi{1}, CudaError);
    CHECK(cuda.context_references(1) == 0);
  }

  TEST_CASE("CudaApi: uses its own device and leaves the thread's current device unchanged") {
    FakeCudart cuda;
    CudaApi api{1};

    void* const memory = api.try_reserve(4096);
    cudaStream_t const stream = api.create_stream();
    cudaEvent_t const event = api.create_event();
    api.fill(memory, 7, 4096, stream);
    api.record(event, stream);
    api.wait(stream, event);
    api.synchronize(event);
    api.synchronize(stream);
    CHECK(api.is_complete(event));
    CHECK(device_bytes(cuda, 1) == 4096);
    CHECK(device_bytes(cuda, 0) == 0);
    CHECK(api.memory_info().free_bytes == api.memory_info().total_bytes - 4096);
    api.destroy_event(event);
    api.destroy_stream(stream);
    api.release(memory, 4096);

    CHECK(device_bytes(cuda, 1) == 0);
    CHECK_FALSE(cuda.is_set_up(0));  // not even initialized by restoring the thread's device
    void* elsewhere = nullptr;
    REQUIRE(cudaMalloc(&elsewhere, 256) == cudaSuccess);
    CHECK(device_bytes(cuda, 0) == 256);  // the thread is still on device 0
    CHECK(cudaFree(elsewhere) == cudaSuccess);
  }

  TEST_CASE("CudaApi: pushes no context if its own is current already") {
    FakeCudart cuda;
    CudaApi api{0};
    void* elsewhere = nullptr;
    REQUIRE(cudaMalloc(&elsewhere, 256) == cudaSuccess);  // makes device 0 current
    auto const before = cuda.calls("cuCtxPushCurrent");

    api.release(api.try_reserve(256), 256);

    CHECK(cuda.calls("cuCtxPushCurrent") == before);
    CHECK(cudaFree(elsewhere) == cudaSuccess);
  }

  TEST_CASE("CudaApi: a full device gives null and leaves no error behind") {
    FakeCudart cuda{{.capacity_bytes = 1U << 20U}};
    CudaApi api;
    CHECK(api.try_reserve(2U << 20U) == nullptr);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
  }

  TEST_CASE("CudaApi: a reservation that fails for another reason throws") {
    FakeCudart cuda;
    CudaApi api;
    cuda.fail_next("cudaMalloc", cudaErrorLaunchFailure);
    try {
      (void)api.try_reserve(256);
      FAIL("no exception");
    } catch (CudaError const& error) {
      CHECK(error.code() == cudaErrorLaunchFailure);
      CHECK(error.line() > 0);
    }
    CHECK(cudaPeekAtLastError() == cudaSuccess);
  }

  TEST_CASE("CudaApi: querying an event that is not complete leaves no last error") {
    FakeCudart cuda;
    CudaApi api;
    cudaEvent_t const event = api.create_event();
    cuda.fail_next("cuEventQuery", cudaErrorNotReady);
    CHECK_FALSE(api.is_complete(event));
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    CHECK(api.is_complete(event));  // nothing recorded is complete

    cuda.fail_next("cuEventQuery", cudaErrorLaunchFailure);
    CHECK_THROWS_AS((void)api.is_complete(event), CudaError);
    api.destroy_event(event);
  }

  TEST_CASE("CudaApi: an earlier error of the caller outlives queries and failures of the driver") {
    FakeCudart cuda;
    CudaApi api;
    cudaEvent_t const event = api.create_event();
    void* memory = nullptr;
    cuda.fail_next("cudaMalloc", cudaErrorInvalidValue);
    REQUIRE(cudaMalloc(&memory, 1) == cudaErrorInvalidValue);

    cuda.fail_next("cuEventQuery", cudaErrorNotReady);
    CHECK_FALSE(api.is_complete(event));
    CHECK(cudaPeekAtLastError() == cudaErrorInvalidValue);
    cuda.fail_next("cuMemCreate", cudaErrorNotSupported);
    CHECK_THROWS_AS((void)api.try_create_physical(api.granularity_bytes()), CudaError);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue);
    api.destroy_event(event);
  }

  TEST_CASE("CudaApi: events with timing report how long the work took, once they are complete") {
    FakeCudart cuda;
    CudaApi api;
    cudaStream_t const stream = api.create_stream();
    cudaEvent_t const before = api.create_timed_event();
    cudaEvent_t const after = api.create_timed_event();
    std::atomic<bool> may_end{false};
    api.record(before, stream);
    api.launch_host(
        stream,
        [](void* flag) noexcept { static_cast<std::atomic<bool>*>(flag)->wait(false); },
        &may_end);
    api.record(after, stream);
    CHECK_THROWS_AS((void)api.elapsed_ns(before, after), CudaError);

    may_end = true;
    may_end.notify_one();
    api.synchronize(stream);
    CHECK(api.elapsed_ns(before, after) > 0);

    cudaEvent_t const without = api.create_event();
    CHECK_THROWS_AS((void)api.elapsed_ns(before, without), CudaError);
    for (cudaEvent_t const event : {before, after, without}) {
      api.destroy_event(event);
    }
    api.destroy_stream(stream);
  }

  TEST_CASE("CudaApi: copies in all directions; a wrong CopyKind is an error") {
    FakeCudart cuda;
    CudaApi api;
    constexpr std::size_t n = 100'000;
    cudaStream_t const stream = api.create_stream();
    auto* const host = static_cast<unsigned char*>(api.try_allocate_pinned(n, -1));
    auto* const back = static_cast<unsigned char*>(api.try_allocate_pinned(n, -1));
    void* const first = api.try_reserve(n);
    void* const second = api.try_reserve(n);
    for (std::size_t i = 0; i < n; ++i) {
      host[i] = static_cast<unsigned char>(i * 31);
    }

    api.copy(first, host, n, CopyKind::to_device, stream);
    api.copy(second, first, n, CopyKind::on_device, stream);
    api.copy(back, second, n, CopyKind::to_host, stream);
    api.synchronize(stream);
    CHECK(std::memcmp(host, back, n) == 0);
    CHECK_THROWS_AS(api.copy(first, host, n, CopyKind::on_device, stream), CudaError);

    api.release(first, n);
    api.release(second, n);
    api.free_pinned(host, n);
    api.free_pinned(back, n);
    api.destroy_stream(stream);
    CHECK(cuda.pinned_allocations() == 0);
  }

  TEST_CASE("CudaApi: a host function runs at its place in the stream") {
    FakeCudart cuda;
    CudaApi api;
    cudaStream_t const stream = api.create_stream();
    int calls = 0;
    api.launch_host(
        stream, [](void* counter) noexcept { ++*static_cast<int*>(counter); }, &calls);
    api.synchronize(stream);
    CHECK(calls == 1);
    api.destroy_stream(stream);
  }

  TEST_CASE("CudaApi: pinned memory near a node is registered, and unregistered when it is freed") {
    FakeCudart cuda{{.numa_node = 0}};
    CudaApi api;
    CHECK(api.numa_node() == 0);
    void* const near = api.try_allocate_pinned(1U << 20U, api.numa_node());
    void* const anywhere = api.try_allocate_pinned(1U << 20U, -1);
    CHECK(cuda.registered_ranges() == 1);
    CHECK(cuda.pinned_allocations() == 1);
#if defined(__linux__)
    int mode = -1;
    if (syscall(SYS_get_mempolicy, &mode, nullptr, 0, near, MPOL_F_ADDR) == 0) {
      CHECK(mode == MPOL_PREFERRED);
    } else {
      MESSAGE("the kernel does not tell policies here");
    }
#endif
    std::memset(near, 1, 1U << 20U);

    api.free_pinned(near, 1U << 20U);
    api.free_pinned(anywhere, 1U << 20U);
    CHECK(cuda.registered_ranges() == 0);
    CHECK(cuda.pinned_allocations() == 0);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
  }

  TEST_CASE("CudaApi: if registering memory fails, the runtime allocates it") {
    FakeCudart cuda;
    CudaApi api;
    cuda.fail_next("cudaHostRegister", cudaErrorNotSupported);
    void* const memory = api.try_allocate_pinned(4096, 0);
    REQUIRE(memory != nullptr);
    CHECK(cuda.pinned_allocations() == 1);
    api.free_pinned(memory, 4096);
    CHECK(cuda.pinned_allocations() == 0);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
  }

  TEST_CASE("CudaApi: without numa_placement no memory is registered") {
    FakeCudart cuda;
    CudaApi api{0, {.numa_placement = false}};
    void* const memory = api.try_allocate_pinned(4096, 0);
    CHECK(cuda.registered_ranges() == 0);
    api.free_pinned(memory, 4096);
  }

  TEST_CASE("CudaApi: memory is not registered if the device would use another address for it") {
    FakeCudart cuda{{.numa_node = 0, .has_host_addresses = false}};
    CudaApi api;
    void* const memory = api.try_allocate_pinned(4096, 0);
    CHECK(cuda.registered_ranges() == 0);
    api.free_pinned(memory, 4096);
  }

  TEST_CASE("CudaApi: if no pinned memory is left, the result is null") {
    FakeCudart cuda;
    CudaApi api;
    cuda.fail_next("cudaHostAlloc", cudaErrorMemoryAllocation);
    CHECK(api.try_allocate_pinned(4096, -1) == nullptr);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
  }

  TEST_CASE("CudaApi: releasing resources is no error after CUDA is unloaded") {
    FakeCudart cuda{{.numa_node = 0}};
    CudaApi api;
    cudaStream_t const stream = api.create_stream();
    cudaEvent_t const event = api.create_event();
    void* const memory = api.try_reserve(256);
    void* const pinned = api.try_allocate_pinned(256, -1);
    void* const near = api.try_allocate_pinned(4096, 0);
    void* const address = api.reserve_address(api.granularity_bytes());
    cuda.unload();

    api.unmap(address, api.granularity_bytes());
    api.free_address(address, api.granularity_bytes());
    api.release(memory, 256);
    api.free_pinned(pinned, 256);
    api.free_pinned(near, 4096);
    api.destroy_event(event);
    api.destroy_stream(stream);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
  }

  TEST_CASE("CudaApi: a kernel copies inside the device, and small copies to and from the host") {
    static std::vector<std::size_t> launches;  // how many copies each was asked to make
    static cudaError_t status;
    launches.clear();
    status = cudaSuccess;
    CudaOptions const options{.copy_kernel = [](std::span<void* const> to,
                                                std::span<void const* const>,
                                                std::span<std::size_t const>,
                                                CopyKind,
                                                cudaStream_t) noexcept {
      launches.push_back(to.size());
      return status;
    }};
    FakeCudart cuda;
    std::vector<void*> to(4);
    std::vector<void const*> from(4);
    std::vector<std::size_t> sizes(4, 1_MiB);
    auto const copy = [&](CudaApi& api, CopyKind kind) {
      cudaStream_t const stream = api.create_stream();
      auto* const host = static_cast<std::byte*>(api.try_allocate_pinned(4_MiB, -1));
      auto* const device = static_cast<std::byte*>(api.try_reserve(8_MiB));
      for (std::size_t i = 0; i < 4; ++i) {
        to[i] = (kind == CopyKind::to_host ? host : device) + i * 1_MiB;
        from[i] = (kind == CopyKind::to_device ? host : device + 4_MiB) + i * 1_MiB;
      }
      api.copy_batch(std::span{to}.first(sizes.size()),
                     std::span{from}.first(sizes.size()),
                     sizes,
                     kind,
                     stream);
      api.synchronize(stream);
      api.release(device, 8_MiB);
      api.free_pinned(host, 4_MiB);
      api.destroy_stream(stream);
    };

    SUBCASE("the kernel is loaded with the device") {
      CudaApi const api{0, options};
      CHECK(launches == std::vector<std::size_t>{0});
      CHECK(api.has_copy_kernel());
      CHECK_FALSE(CudaApi{}.has_copy_kernel());
    }
    SUBCASE("all copies inside the device") {
      CudaApi api{0, options};
      copy(api, CopyKind::on_device);
      CHECK(launches == std::vector<std::size_t>{0, 4});
    }
    SUBCASE("copies to or from the host of less than 512 KiB on average") {
      CudaApi api{0, options};
      for (CopyKind const kind : {CopyKind::to_host, CopyKind::to_device}) {
        launches.clear();
        sizes = {1_KiB, 1_MiB, 512_KiB, 512_KiB};
        copy(api, kind);
        CHECK(launches.empty());
        sizes = {1_KiB, 1_MiB, 512_KiB, 510_KiB};
        copy(api, kind);
        CHECK(launches == std::vector<std::size_t>{4});
      }
    }
    SUBCASE("a single copy does not use the kernel") {
      CudaApi api{0, options};
      sizes.resize(1);
      copy(api, CopyKind::on_device);
      CHECK(launches == std::vector<std::size_t>{0});
    }
    SUBCASE("the kernel is not used if it was not compiled for the device") {
      status = cudaErrorNoKernelImageForDevice;
      CudaApi api{0, options};
      CHECK_FALSE(api.has_copy_kernel());
      copy(api, CopyKind::on_device);
      CHECK(launches == std::vector<std::size_t>{0});
      CHECK(cuda.calls("cudaMemcpyBatchAsync") == 1);
    }
    SUBCASE("an error of the kernel is thrown to the caller") {
      CudaApi api{0, options};
      status = cudaErrorLaunchFailure;
      CHECK_THROWS_AS(copy(api, CopyKind::on_device), CudaError);
    }
  }

  TEST_CASE("CudaApi: a batch gives the result of its single copies") {
    FakeCudart cuda;
    CudaApi api;
    cudaStream_t const stream = api.create_stream();
    constexpr std::size_t n = 300;
    auto* const host = static_cast<unsigned char*>(api.try_allocate_pinned(3 * n, -1));
    auto* const back = static_cast<unsigned char*>(api.try_allocate_pinned(3 * n, -1));
    auto* const device = static_cast<unsigned char*>(api.try_reserve(3 * n));
    for (std::size_t i = 0; i < 3 * n; ++i) {
      host[i] = static_cast<unsigned char>(i * 7);
    }
    std::array<void const*, 3> const in_from{host, host + n, host + 2 * n};
    std::array<void*, 3> const in_to{device + 2 * n, device, device + n};
    std::array<void const*, 3> const out_from{device + 2 * n, device, device + n};
    std::array<void*, 3> const out_to{back, back + n, back + 2 * n};
    std::array<std::size_t, 3> sizes{n, n, n};
    std::memset(back, 0, 3 * n);

    SUBCASE("one call if CUDA supports batches") {
      api.copy_batch(in_to, in_from, sizes, CopyKind::to_device, stream);
      api.copy_batch(out_to, out_from, sizes, CopyKind::to_host, stream);
      CHECK(cuda.calls("cudaMemcpyBatchAsync") == 2);
      CHECK(cuda.calls("cudaMemcpyAsync") == 0);
      api.synchronize(stream);
      CHECK(std::memcmp(host, back, 3 * n) == 0);
    }
    SUBCASE("single copies if batches are disabled") {
      CudaApi plain{0, {.batched_copies = false}};
      plain.copy_batch(in_to, in_from, sizes, CopyKind::to_device, stream);
      CHECK(cuda.calls("cudaMemcpyBatchAsync") == 0);
      CHECK(cuda.calls("cudaMemcpyAsync") == 3);
      plain.synchronize(stream);
    }
    SUBCASE("single copies if one copy is empty") {
      sizes[1] = 0;
      api.copy_batch(in_to, in_from, sizes, CopyKind::to_device, stream);
      api.copy_batch(out_to, out_from, sizes, CopyKind::to_host, stream);
      CHECK(cuda.calls("cudaMemcpyBatchAsync") == 0);
      api.synchronize(stream);
      CHECK(std::memcmp(host, back, n) == 0);
      CHECK(back[n] == 0);
      CHECK(std::memcmp(host + 2 * n, back + 2 * n, n) == 0);
    }
    SUBCASE("single copies on the null stream and during a capture") {
      api.copy_batch(in_to, in_from, sizes, CopyKind::to_device, nullptr);
      cuda.begin_capture(stream);
      api.copy_batch(in_to, in_from, sizes, CopyKind::to_device, stream);
      cuda.end_capture(stream);
      CHECK(cuda.calls("cudaMemcpyBatchAsync") == 0);
      CHECK(cuda.calls("cudaMemcpyAsync") == 6);
      api.synchronize(static_cast<cudaStream_t>(nullptr));
    }
    SUBCASE("single copies from then on if the driver does not know batches") {
      for (cudaError_t const code : {cudaErrorCallRequiresNewerDriver, cudaErrorNotSupported}) {
        CudaApi fresh;
        cuda.fail_next("cudaMemcpyBatchAsync", code);
        fresh.copy_batch(in_to, in_from, sizes, CopyKind::to_device, stream);
        fresh.copy_batch(out_to, out_from, sizes, CopyKind::to_host, stream);
        fresh.synchronize(stream);
        CHECK(cudaPeekAtLastError() == cudaSuccess);
        CHECK(std::memcmp(host, back, 3 * n) == 0);
      }
      CHECK(cuda.calls("cudaMemcpyBatchAsync") == 2);
      CHECK(cuda.calls("cudaMemcpyAsync") == 12);
    }
    SUBCASE("any other error is thrown, and the next batch is tried again") {
      cuda.fail_next("cudaMemcpyBatchAsync", cudaErrorIllegalAddress);
      CHECK_THROWS_AS(api.copy_batch(in_to, in_from, sizes, CopyKind::to_device, stream),
                      CudaError);
      CHECK(cuda.calls("cudaMemcpyAsync") == 0);
      api.copy_batch(in_to, in_from, sizes, CopyKind::to_device, stream);
      CHECK(cuda.calls("cudaMemcpyBatchAsync") == 2);
    }
    SUBCASE("one copy is not a batch") {
      std::span const one{sizes};
      api.copy_batch(std::span{in_to}.first(1),
                     std::span{in_from}.first(1),
                     one.first(1),
                     CopyKind::to_device,
                     stream);
      CHECK(cuda.calls("cudaMemcpyBatchAsync") == 0);
      CHECK(cuda.calls("cudaMemcpyAsync") == 1);
    }
    SUBCASE("spans of different lengths are refused") {
      CHECK_THROWS_AS(
          api.copy_batch(in_to, in_from, std::span{sizes}.first(2), CopyKind::to_device, stream),
          ContractViolation);
    }
    SUBCASE("no copies make no call") {
      api.copy_batch({}, {}, {}, CopyKind::to_device, stream);
      CHECK(cuda.calls("cudaMemcpyBatchAsync") + cuda.calls("cudaMemcpyAsync") == 0);
    }
    api.release(device, 3 * n);
    api.free_pinned(host, 3 * n);
    api.free_pinned(back, 3 * n);
    api.destroy_stream(stream);
  }

  TEST_CASE("CudaApi: a long batch is made by calls of at most 1024 copies") {
    FakeCudart cuda;
    CudaApi api;
    constexpr std::size_t count = 2500;
    cudaStream_t const stream = api.create_stream();
    auto* const host = static_cast<unsigned char*>(api.try_allocate_pinned(2 * count, -1));
    auto* const device = static_cast<unsigned char*>(api.try_reserve(count));
    std::vector<void*> to;
    std::vector<void const*> from;
    std::vector<void*> back;
    std::vector<std::size_t> const sizes(count, 1);
    for (std::size_t i = 0; i < count; ++i) {
      host[i] = static_cast<unsigned char>(i * 7);
      to.push_back(device + count - 1 - i);
      from.push_back(host + i);
      back.push_back(host + count + i);
    }
    std::vector<void const*> const there{to.begin(), to.end()};

    api.copy_batch(to, from, sizes, CopyKind::to_device, stream);
    CHECK(cuda.calls("cudaMemcpyBatchAsync") == 3);
    CHECK(cuda.calls("cudaMemcpyAsync") == 0);
    api.copy_batch(back, there, sizes, CopyKind::to_host, stream);
    api.synchronize(stream);
    CHECK(std::memcmp(host, host + count, count) == 0);

    api.release(device, count);
    api.free_pinned(host, 2 * count);
    api.destroy_stream(stream);
  }

  TEST_CASE("CudaApi: an integrated GPU shares the host's memory") {
    {
      FakeCudart const cuda;
      CHECK_FALSE(CudaApi{}.shares_host_memory());
    }
    FakeCudart const cuda{{.is_integrated = true}};
    CHECK(CudaApi{}.shares_host_memory());
  }

  TEST_CASE("CudaApi: calls that are not stream-ordered do not break a capture") {
    FakeCudart cuda{{.has_rdma = true, .has_peers = true}};
    CudaApi api;
    cudaStream_t const captured = api.create_stream();
    cudaStream_t const other = api.create_stream();
    cudaEvent_t const event = api.create_event();
    api.record(event, other);
    CHECK_FALSE(api.is_capturing(captured));
    cuda.begin_capture(captured);

    CHECK(api.is_capturing(captured));
    CHECK_FALSE(api.is_capturing(other));
    CHECK_FALSE(api.is_capturing(nullptr));
    void* const memory = api.try_reserve(256);
    void* const pinned = api.try_allocate_pinned(256, -1);
    void* const near = api.try_allocate_pinned(256, 0);
    api.synchronize(event);
    CHECK(api.is_complete(event));
    api.synchronize(other);
    api.release(memory, 256);
    api.free_pinned(pinned, 256);
    api.free_pinned(near, 256);
    std::size_t const n = api.granularity_bytes();
    void* const address = api.reserve_address(n);
    auto const physical = api.try_create_physical(n);
    REQUIRE(physical.has_value());
    REQUIRE(api.try_map(address, n, {&*physical, 1}));
    api.allow_access(1);
    api.unmap(address, n);
    api.release_physical(*physical);
    api.free_address(address, n);
    CHECK_NOTHROW(CudaApi{});

    CHECK_FALSE(cuda.is_capture_broken());
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    void* theirs = nullptr;
    // The caller's capture mode is as it was.
    CHECK(cudaMalloc(&theirs, 256) == cudaErrorStreamCaptureUnsupported);
    (void)cudaGetLastError();
    cuda.end_capture(captured);
    api.destroy_event(event);
    api.destroy_stream(other);
    api.destroy_stream(captured);
  }

  TEST_CASE("CudaApi: the null stream counts as captured while any blocking stream is captured") {
    FakeCudart cuda;
    CudaApi const api;
    cudaStream_t blocking = nullptr;
    REQUIRE(cudaStreamCreate(&blocking) == cudaSuccess);

    cuda.begin_capture(blocking);
    CHECK(api.is_capturing(nullptr));
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    cuda.end_capture(blocking);

    CHECK_FALSE(api.is_capturing(nullptr));
    CHECK(cudaStreamDestroy(blocking) == cudaSuccess);
  }

  TEST_CASE("CudaApi: is_one_stream is false for a handle that is another stream in each thread") {
    CHECK(CudaApi::is_one_stream(nullptr));
    CHECK(CudaApi::is_one_stream(cudaStreamLegacy));
    CHECK_FALSE(CudaApi::is_one_stream(cudaStreamPerThread));
  }

  TEST_CASE("CudaApi: mapped memory is usable, and the same address can be mapped again") {
    FakeCudart cuda;
    CudaApi api{1};
    REQUIRE(api.has_virtual_memory());
    std::size_t const n = api.granularity_bytes();
    void* const address = api.reserve_address(2 * n);
    auto const first = api.try_create_physical(n);
    auto const second = api.try_create_physical(n);
    REQUIRE(first.has_value());
    REQUIRE(second.has_value());
    cudaStream_t const stream = api.create_stream();

    for (auto const physical : {*first, *second}) {
      REQUIRE(api.try_map(address, n, {&physical, 1}));
      api.fill(address, 3, n, stream);
      api.synchronize(stream);
      api.unmap(address, n);
    }
    CHECK_THROWS_AS(api.fill(address, 3, n, stream), CudaError);

    api.release_physical(*first);
    api.release_physical(*second);
    api.free_address(address, 2 * n);
    api.destroy_stream(stream);
    CHECK(device_bytes(cuda, 1) == 0);
    CHECK_FALSE(cuda.is_set_up(0));
  }

  TEST_CASE("CudaApi: try_create_physical returns nothing if no physical memory is left") {
    FakeCudart cuda{{.capacity_bytes = 1U << 20U}};
    CudaApi api;
    CHECK(api.try_create_physical(2U << 20U) == std::nullopt);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
  }

  TEST_CASE("CudaApi: mapped memory is made for GPUDirect RDMA where that can be mapped") {
    auto const is_rdma_capable = [](FakeCudart const& cuda) {
      CudaApi api;
      std::size_t const n = api.granularity_bytes();
      CHECK(device_bytes(cuda, 0) == 0);
      void* const address = api.reserve_address(n);
      auto const physical = api.try_create_physical(n);
      REQUIRE(physical.has_value());
      REQUIRE(api.try_map(address, n, {&*physical, 1}));
      bool const is_capable = cuda.physical.at(*physical).is_rdma_capable;
      api.unmap(address, n);
      api.release_physical(*physical);
      api.free_address(address, n);
      CHECK(cuda.reserved_addresses.empty());
      CHECK(cudaPeekAtLastError() == cudaSuccess);
      return is_capable;
    };
    CHECK_FALSE(is_rdma_capable(FakeCudart{}));
    FakeCudart cuda{{.has_rdma = true}};
    CHECK(is_rdma_capable(cuda));
    for (std::string const call :
         {"cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"}) {
      CAPTURE(call);
      cuda.fail_next(call, cudaErrorUnknown);
      CHECK_FALSE(is_rdma_capable(cuda));
    }
  }

  TEST_CASE("CudaApi: memory that could not be unmapped counts as mapped") {
    FakeCudart cuda{{.has_peers = true}};
    CudaApi api;
    std::size_t const n = api.granularity_bytes();
    void* const address = api.reserve_address(n);
    auto const physical = api.try_create_physical(n);
    REQUIRE(physical.has_value());
    REQUIRE(api.try_map(address, n, {&*physical, 1}));

    cuda.fail_next("cuMemUnmap", cudaErrorUnknown);
    api.unmap(address, n);
    std::size_t const before = cuda.calls("cuMemSetAccess");
    api.allow_access(1);
    CHECK(cuda.calls("cuMemSetAccess") == before + 1);

    api.unmap(address, n);
    api.release_physical(*physical);
    api.free_address(address, n);
    CHECK(device_bytes(cuda, 0) == 0);
  }

  TEST_CASE("CudaApi: a mapping that cannot be made accessible is undone") {
    FakeCudart cuda;
    CudaApi api;
    std::size_t const n = api.granularity_bytes();
    void* const address = api.reserve_address(n);
    auto const physical = api.try_create_physical(n);
    cuda.fail_next("cuMemSetAccess", cudaErrorNotSupported);

    CHECK_THROWS_AS((void)api.try_map(address, n, {&*physical, 1}), CudaError);
    for (std::string const call : {"cuMemMap", "cuMemSetAccess"}) {
      cuda.fail_next(call, cudaErrorMemoryAllocation);
      CHECK_FALSE(api.try_map(address, n, {&*physical, 1}));
    }
    REQUIRE(api.try_map(address, n, {&*physical, 1}));

    api.unmap(address, n);
    api.release_physical(*physical);
    api.free_address(address, n);
  }

  TEST_CASE("CudaApi: a run of pieces is made accessible by one call and unmapped by one") {
    FakeCudart cuda;
    CudaApi api;
    std::size_t const n = api.granularity_bytes();
    auto* const address = static_cast<std::byte*>(api.reserve_address(8 * n));
    std::vector<CudaApi::physical_type> pieces;
    for (int i = 0; i < 8; ++i) {
      pieces.push_back(*api.try_create_physical(n));
    }

    REQUIRE(api.try_map(address, n, pieces));
    CHECK(cuda.calls("cuMemMap") == 8);
    CHECK(cuda.calls("cuMemSetAccess") == 1);
    cudaStream_t const stream = api.create_stream();
    api.fill(address, 3, 8 * n, stream);
    api.synchronize(stream);
    api.unmap(address, 8 * n);
    CHECK(cuda.calls("cuMemUnmap") == 1);
    CHECK_THROWS_AS(api.fill(address, 3, n, stream), CudaError);

    SUBCASE("if one piece cannot be mapped, those before it are unmapped") {
      REQUIRE(api.try_map(address + 2 * n, n, std::span{pieces}.last(1)));
      CHECK_THROWS_AS((void)api.try_map(address, n, std::span{pieces}.first(4)), CudaError);
      CHECK_THROWS_AS(api.fill(address, 3, n, stream), CudaError);
      REQUIRE(api.try_map(address, n, std::span{pieces}.first(2)));
      api.fill(address, 3, 3 * n, stream);
      api.synchronize(stream);
      api.unmap(address, 3 * n);
    }

    api.destroy_stream(stream);
    for (auto const piece : pieces) {
      api.release_physical(piece);
    }
    api.free_address(address, 8 * n);
  }

  TEST_CASE("CudaApi: another device can access virtual memory once that is allowed") {
    FakeCudart cuda{{.has_peers = true}};
    CudaApi api;
    CudaApi peer{1};
    std::size_t const n = api.granularity_bytes();
    auto* const address = static_cast<std::byte*>(api.reserve_address(6 * n));
    std::vector<CudaApi::physical_type> pieces;
    for (int i = 0; i < 6; ++i) {
      pieces.push_back(*api.try_create_physical(n));
    }
    void* const elsewhere = peer.try_reserve(n);
    cudaStream_t const stream = peer.create_stream();
    auto const can_copy = [&](std::size_t piece) {
      try {
        peer.copy(elsewhere, address + piece * n, n, CopyKind::on_device, stream);
        peer.synchronize(stream);
        return true;
      } catch (CudaError const&) {
        return false;
      }
    };
    REQUIRE(api.try_map(address, n, std::span{pieces}.first(3)));
    REQUIRE(api.try_map(address + 4 * n, n, std::span{pieces}.last(1)));
    api.unmap(address + n, n);
    CHECK_FALSE(can_copy(0));

    cuda.fail_next("cuMemSetAccess", cudaErrorNotSupported);
    CHECK_THROWS_AS(api.allow_access(1), CudaError);
    CHECK_FALSE(can_copy(0));
    std::size_t const before = cuda.calls("cuMemSetAccess");
    api.allow_access(1);
    CHECK(cuda.calls("cuMemSetAccess") == before + 3);
    api.allow_access(1);
    CHECK(cuda.calls("cuMemSetAccess") == before + 3);

    for (std::size_t const piece : {0U, 2U, 4U}) {
      CHECK(can_copy(piece));
    }
    CHECK_FALSE(can_copy(1));
    REQUIRE(api.try_map(address + n, n, {&pieces[3], 1}));
    CHECK(cuda.calls("cuMemSetAccess") == before + 4);
    CHECK(can_copy(1));

    api.unmap(address, 3 * n);
    api.unmap(address + 4 * n, n);
    for (auto const piece : pieces) {
      api.release_physical(piece);
    }
    api.free_address(address, 6 * n);
    peer.destroy_stream(stream);
    peer.release(elsewhere, n);
  }

  // The thread sanitizer looks for races here.
  TEST_CASE("CudaApi: threads may let other devices access virtual memory at the same time") {
    constexpr int devices = 8;
    FakeCudart cuda{{.devices = devices, .has_peers = true}};
    for (int round = 0; round < 100; ++round) {
      CudaApi api;
      std::size_t const n = api.granularity_bytes();
      void* const address = api.reserve_address(n);
      std::barrier begin{devices - 1};
      std::vector<std::thread> threads;
      for (int other = 1; other < devices; ++other) {
        threads.emplace_back([&api, &begin, other] {
          begin.arrive_and_wait();
          api.allow_access(other);
        });
      }
      for (std::thread& thread : threads) {
        thread.join();
      }
      auto const physical = *api.try_create_physical(n);
      REQUIRE(api.try_map(address, n, {&physical, 1}));
      CHECK(cuda.ranges.at(reinterpret_cast<std::uintptr_t>(address)).accessors.size() == devices);
      api.unmap(address, n);
      api.release_physical(physical);
      api.free_address(address, n);
    }
  }

  TEST_CASE("CudaApi: the ranges that are mapped are those of a list of granules, and none spans "
            "two reservations") {
    constexpr std::size_t reserved = 8;  // granules in each reservation
    unsigned const seed = std::random_device{}();
    INFO("seed ", seed);
    std::mt19937 random{seed};
    detail::MappedRanges ranges;
    std::array<bool, 40> is_mapped{};
    for (std::size_t first = 0; first < is_mapped.size(); first += reserved) {
      ranges.begin_reservation(first);
    }
    for (int round = 0; round < 20'000; ++round) {
      std::size_t const first = random() % is_mapped.size();
      bool const adds = !is_mapped[first];
      std::size_t end = first + 1;
      while (end % reserved != 0 && is_mapped[end] != adds && random() % 4 != 0) {
        ++end;
      }
      adds ? ranges.add(first, end) : ranges.remove(first, end);
      std::fill_n(&is_mapped[first], end - first, adds);

      std::map<CUdeviceptr, CUdeviceptr> expected;
      for (std::size_t at = 0; at < is_mapped.size(); ++at) {
        if (is_mapped[at]) {
          bool const continues = at % reserved != 0 && is_mapped[at - 1];
          (continues ? std::prev(expected.end())->second : expected[at]) = at + 1;
        }
      }
      REQUIRE(ranges.all() == expected);
    }
    ranges = {};
    ranges.begin_reservation(reserved);
    ranges.end_reservation(reserved);
    ranges.add(0, reserved);
    ranges.add(reserved, 2 * reserved);
    CHECK(ranges.all() == std::map<CUdeviceptr, CUdeviceptr>{{0, 2 * reserved}});
  }

  TEST_CASE("CudaApi: works without the calls for virtual memory if the device lacks them") {
    FakeCudart cuda{{.has_virtual_memory = false}};
    CudaApi api;
    CHECK_FALSE(api.has_virtual_memory());
    CHECK(std::has_single_bit(api.granularity_bytes()));
    CHECK_THROWS_AS((void)api.reserve_address(4096), DeviceError);
    CHECK_THROWS_AS((void)api.try_create_physical(4096), DeviceError);
    api.release(api.try_reserve(256), 256);
  }

  TEST_CASE("CudaApi: threads that have set no device can use it at the same time") {
    FakeCudart cuda;
    CudaApi api{1};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&api] {
        cudaStream_t const stream = api.create_stream();
        void* const memory = api.try_reserve(4096);
        for (int k = 0; k < 50; ++k) {
          api.fill(memory, static_cast<unsigned char>(k), 4096, stream);
        }
        api.synchronize(stream);
        api.release(memory, 4096);
        api.destroy_stream(stream);
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    CHECK(device_bytes(cuda, 1) == 0);
    CHECK_FALSE(cuda.is_set_up(0));
  }
}

TEST_SUITE("cuda_check") {
  TEST_CASE("cuda_check: throws with the caller's line and clears the last error") {
    FakeCudart cuda;
    cuda.fail_next("cudaMalloc", cudaErrorMemoryAllocation);
    void* memory = nullptr;
    int const line = __LINE__ + 2;
    try {
      cuda_check(cudaMalloc(&memory, 1));
      FAIL("no exception");
    } catch (DeviceError const& error) {
      auto const& cuda_error = dynamic_cast<CudaError const&>(error);
      CHECK(cuda_error.code() == cudaErrorMemoryAllocation);
      CHECK(cuda_error.line() == line);
      CHECK(std::strstr(cuda_error.file(), "cuda_api_test.cpp") != nullptr);
      CHECK(std::strstr(error.what(), cuda_error.call()) != nullptr);
      CHECK(std::strstr(error.what(), "cudaErrorMemoryAllocation") != nullptr);
    }
    CHECK(cudaPeekAtLastError() == cudaSuccess);

    CudaApi device;
    cuda.fail_next("cudaStreamSynchronize", cudaErrorIllegalAddress);
    try {
      device.synchronize(cudaStream_t{});
      FAIL("no exception");
    } catch (CudaError const& error) {
      CHECK(std::string{error.call()} == "synchronize");
      CHECK(std::strstr(error.what(), ": synchronize: cuda") != nullptr);
    }
    CHECK_NOTHROW(cuda_check(cudaSuccess));
  }
}
