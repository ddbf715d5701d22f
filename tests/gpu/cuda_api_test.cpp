// SPDX-License-Identifier: Apache-2.0
// CudaApi on a real device, compiled without nvcc.
#include <spillway/device/cuda/cuda_api.hpp>
#include <spillway/testing/device_contracts.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <thread>
#include <vector>

#include "gpu_rig.hpp"

using namespace spillway;
using gpu_test::Gpu;

namespace {

/// Waits without spinning, takes pinned memory from anywhere.
struct PatientCudaApi : CudaApi {
  PatientCudaApi() : CudaApi{0, {.yield_in_waits = true, .numa_placement = false}} {}
};

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE_TEMPLATE_INVOKE(device_memory_contract, CudaApi, PatientCudaApi);
  TEST_CASE_TEMPLATE_INVOKE(device_copy_contract, CudaApi, PatientCudaApi);
  TEST_CASE_TEMPLATE_INVOKE(device_order_contract, CudaApi, PatientCudaApi);
  TEST_CASE_TEMPLATE_INVOKE(device_progress_contract, CudaApi, PatientCudaApi);

  TEST_CASE_FIXTURE(Gpu, "CudaApi: a failed call throws CudaError and leaves no last error") {
    CHECK_THROWS_AS(cuda_check(cudaErrorMemoryAllocation), CudaError);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    auto const stream = rig.stream();
    CHECK_THROWS_AS(api.record(nullptr, stream), CudaError);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
  }

  TEST_CASE("CudaApi: a device ordinal that does not exist is refused, and leaves no last error") {
    CHECK_THROWS_AS(CudaApi{1 << 20}, CudaError);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
  }

  TEST_CASE("CudaApi: a full device gives null and stays usable") {
    CudaApi api;
    CHECK(api.try_reserve(api.memory_info().total_bytes) == nullptr);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    void* const memory = api.try_reserve(4096);
    CHECK(memory != nullptr);
    api.release(memory, 4096);
  }

  TEST_CASE_FIXTURE(Gpu, "CudaApi: a query that is not complete leaves no last error") {
    auto const stream = rig.stream();
    auto const event = rig.event();
    testing::Gate gate;
    gate.close(api, stream);
    api.record(event, stream);
    CHECK_FALSE(api.is_complete(event));
    CHECK(cudaPeekAtLastError() == cudaSuccess);
  }

  TEST_CASE_FIXTURE(Gpu, "CudaApi: an earlier error of the caller outlives a query") {
    auto const stream = rig.stream();
    auto const event = rig.event();
    testing::Gate gate;
    gate.close(api, stream);
    api.record(event, stream);
    cudaError_t const earlier = cudaEventRecord(nullptr, stream);
    REQUIRE(earlier != cudaSuccess);
    CHECK_FALSE(api.is_complete(event));
    CHECK(cudaGetLastError() == earlier);
  }

  TEST_CASE("CudaApi: mapped memory is made for GPUDirect RDMA where the driver supports that") {
    CudaApi api;
    int has_rdma = 0;
    auto const get_attribute =
        detail::cuda_entry_point<PFN_cuDeviceGetAttribute_v2000>("cuDeviceGetAttribute", 2000);
    REQUIRE(get_attribute(&has_rdma,
                          CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
                          detail::CudaContext::device_of(0)) == CUDA_SUCCESS);
    auto const physical = api.try_create_physical(api.granularity_bytes());
    REQUIRE(physical.has_value());
    CUmemAllocationProp properties{};
    auto const get_properties =
        detail::cuda_entry_point<PFN_cuMemGetAllocationPropertiesFromHandle_v10020>(
            "cuMemGetAllocationPropertiesFromHandle", 10020);
    REQUIRE(get_properties(&properties, *physical) == CUDA_SUCCESS);
    CHECK(int{properties.allocFlags.gpuDirectRDMACapable} == has_rdma);
    api.release_physical(*physical);
  }

  TEST_CASE_FIXTURE(Gpu, "CudaApi: a batch of more copies than one call takes is copied") {
    constexpr std::size_t count = 2500;
    unsigned char* const host = rig.pinned(2 * count);
    unsigned char* const device = rig.device_memory(count);
    auto const stream = rig.stream();
    std::vector<void*> there;
    std::vector<void const*> from;
    std::vector<void*> back;
    for (std::size_t i = 0; i < count; ++i) {
      host[i] = testing::pattern(i);
      there.push_back(device + i);
      from.push_back(host + i);
      back.push_back(host + count + i);
    }
    std::vector<void const*> const from_there{there.begin(), there.end()};
    std::vector<std::size_t> const sizes(count, 1);
    api.copy_batch(there, from, sizes, CopyKind::to_device, stream);
    api.copy_batch(back, from_there, sizes, CopyKind::to_host, stream);
    api.synchronize(stream);
    CHECK(std::memcmp(host, host + count, count) == 0);
  }

  TEST_CASE_FIXTURE(
      Gpu, "CudaApi: a function on a worker does not delay host functions of another stream") {
    auto const slow = rig.stream();
    auto const other = rig.stream();
    auto const event = rig.event();
    auto const worker = api.make_host_worker(slow);
    std::atomic<bool> may_end{false};
    worker->launch(
        [](void* argument) noexcept { static_cast<std::atomic<bool>*>(argument)->wait(false); },
        &may_end);
    api.record(event, slow);

    std::atomic<bool> is_called{false};
    api.launch_host(
        other,
        [](void* argument) noexcept { *static_cast<std::atomic<bool>*>(argument) = true; },
        &is_called);
    api.synchronize(other);
    CHECK(is_called);
    CHECK_FALSE(api.is_complete(event));

    may_end = true;
    may_end.notify_all();
    api.synchronize(slow);
    CHECK(api.is_complete(event));
  }

  TEST_CASE("CudaApi: uses its own device and leaves the thread's current device unchanged") {
    int devices = 0;
    REQUIRE(cudaGetDeviceCount(&devices) == cudaSuccess);
    if (devices < 2) {
      MESSAGE("left out: needs two devices");
      return;
    }
    std::thread{[] {
      CHECK(cudaSetDevice(0) == cudaSuccess);
      CudaApi api{1};
      testing::DeviceRig<CudaApi> rig{api};
      void const* const memory = rig.device_memory(4096);
      int current = -1;
      CHECK(cudaGetDevice(&current) == cudaSuccess);
      CHECK(current == 0);
      cudaPointerAttributes attributes{};
      CHECK(cudaPointerGetAttributes(&attributes, memory) == cudaSuccess);
      CHECK(attributes.device == 1);
    }}.join();
  }

  TEST_CASE("CudaApi: CUDA knows pinned memory as pinned, near a node and anywhere") {
    CudaApi api;
    for (int const node : {-1, 0, api.numa_node()}) {
      CAPTURE(node);
      void* const memory = api.try_allocate_pinned(1 << 20, node);
      REQUIRE(memory != nullptr);
      std::memset(memory, 1, 1 << 20);
      cudaPointerAttributes attributes{};
      CHECK(cudaPointerGetAttributes(&attributes, memory) == cudaSuccess);
      CHECK(attributes.type == cudaMemoryTypeHost);
      api.free_pinned(memory, 1 << 20);
      CHECK(cudaPeekAtLastError() == cudaSuccess);
    }
  }

  TEST_CASE_FIXTURE(
      Gpu, "CudaApi: a batch gives the result of its single copies, on every kind of stream") {
    constexpr std::size_t n = 1000;
    unsigned char* const host = rig.pinned(4 * n);
    unsigned char* const back = rig.pinned(4 * n);
    unsigned char* const device = rig.device_memory(4 * n);
    std::array<cudaStream_t, 3> const streams{rig.stream(), nullptr, cudaStreamLegacy};
    for (cudaStream_t const stream : streams) {
      for (std::size_t const second : {n, std::size_t{0}}) {
        CAPTURE(second);
        for (std::size_t i = 0; i < 4 * n; ++i) {
          host[i] = testing::pattern(i + second);
        }
        std::memset(back, 0, 4 * n);
        std::array<void*, 4> const there{device + 3 * n, device + n, device, device + 2 * n};
        std::array<void const*, 4> const from_there{there[0], there[1], there[2], there[3]};
        std::array<void const*, 4> const here{host, host + n, host + 2 * n, host + 3 * n};
        std::array<void*, 4> const result{back, back + n, back + 2 * n, back + 3 * n};
        std::array<std::size_t, 4> const sizes{n, second, n, n};

        api.copy_batch(there, here, sizes, CopyKind::to_device, stream);
        api.copy_batch(result, from_there, sizes, CopyKind::to_host, stream);
        api.synchronize(stream);

        CHECK(std::memcmp(host, back, n) == 0);
        CHECK(std::memcmp(host + n, back + n, second) == 0);
        CHECK(std::memcmp(host + 2 * n, back + 2 * n, 2 * n) == 0);
      }
    }
  }

  TEST_CASE_FIXTURE(Gpu,
                    "CudaApi: calls that are not stream-ordered do not break a capture, and a "
                    "batch is captured") {
    auto const captured = rig.stream();
    auto const other = rig.stream();
    auto const event = rig.event();
    unsigned char* const memory = rig.device_memory(512);
    unsigned char* const host = rig.pinned(512, 7);
    api.record(event, other);
    CHECK_FALSE(api.is_capturing(captured));
    REQUIRE(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal) == cudaSuccess);

    CHECK(api.is_capturing(captured));
    CHECK_FALSE(api.is_capturing(other));
    api.release(api.try_reserve(4096), 4096);
    api.free_pinned(api.try_allocate_pinned(4096, api.numa_node()), 4096);
    std::size_t const n = api.granularity_bytes();
    void* const address = api.reserve_address(n);
    auto const physical = api.try_create_physical(n);
    REQUIRE(physical.has_value());
    REQUIRE(api.try_map(address, n, {&*physical, 1}));
    api.unmap(address, n);
    api.release_physical(*physical);
    api.free_address(address, n);
    api.synchronize(event);
    CHECK(api.is_complete(event));
    api.fill(memory, 9, 512, captured);
    std::array<void*, 2> const to{host, host + 256};
    std::array<void const*, 2> const from{memory, memory + 256};
    std::array<std::size_t, 2> const sizes{256, 256};
    api.copy_batch(to, from, sizes, CopyKind::to_host, captured);

    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamEndCapture(captured, &graph) == cudaSuccess);
    cudaGraphExec_t runnable = nullptr;
    REQUIRE(cudaGraphInstantiate(&runnable, graph, 0) == cudaSuccess);
    CHECK(host[0] == 7);
    REQUIRE(cudaGraphLaunch(runnable, captured) == cudaSuccess);
    api.synchronize(captured);
    CHECK(std::count(host, host + 512, 9) == 512);
    CHECK(cudaGraphExecDestroy(runnable) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  }

  TEST_CASE("CudaApi: the null stream counts as one stream unless it is per thread") {
#if defined(CUDA_API_PER_THREAD_DEFAULT_STREAM)
    CHECK_FALSE(CudaApi::is_one_stream(nullptr));
#else
    CHECK(CudaApi::is_one_stream(nullptr));
#endif
    CHECK(CudaApi::is_one_stream(cudaStreamLegacy));
    CHECK_FALSE(CudaApi::is_one_stream(cudaStreamPerThread));
  }

  // Fails on a device without virtual memory on purpose, since a skipped test would go unnoticed.
  TEST_CASE_TEMPLATE_INVOKE(virtual_memory_contract, CudaApi);
  TEST_CASE_TEMPLATE_INVOKE(batch_copy_contract, CudaApi);
}
