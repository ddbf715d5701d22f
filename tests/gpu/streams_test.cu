// SPDX-License-Identifier: Apache-2.0
// Order between real streams, with kernels in flight.
#include <spillway/core/fence.hpp>
#include <spillway/device/cuda/cuda_api.hpp>
#include <spillway/stream/stream_order.hpp>
#include <spillway/testing/device_contracts.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstring>

#include "gpu_rig.hpp"
#include "kernels.cuh"

using namespace spillway;
using namespace gpu_test;

namespace {

constexpr std::size_t copied_bytes = 1 << 20;

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE("cuda_check: a launch that cannot be made throws and leaves no last error") {
    write_bytes<<<1, 1 << 20>>>(nullptr, 0, 0);
    CHECK_THROWS_AS(cuda_check(cudaGetLastError()), CudaError);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
  }

  TEST_CASE_FIXTURE(
      Gpu, "CudaApi: copies in both directions run while a kernel holds another stream up") {
    auto const held = rig.stream();
    auto const copying = rig.stream();
    unsigned char* const memory = rig.device_memory(copied_bytes);
    unsigned char* const host = rig.pinned(copied_bytes, 5);
    unsigned char* const back = rig.pinned(copied_bytes, 0);
    KernelGate gate{api};
    gate.close(held);

    api.copy(memory, host, copied_bytes, CopyKind::to_device, copying);
    api.copy(back, memory, copied_bytes, CopyKind::to_host, copying);
    api.synchronize(copying);

    CHECK(std::memcmp(host, back, copied_bytes) == 0);
    CHECK_FALSE(gate.gave_up());
  }

  TEST_CASE_FIXTURE(
      Gpu,
      "CudaApi: a copy ordered after a kernel sees what the kernel wrote, however late it runs") {
    auto const computing = rig.stream();
    auto const copying = rig.stream();
    auto const event = rig.event();
    unsigned char* const memory = rig.device_memory(copied_bytes);
    unsigned char* const back = rig.pinned(copied_bytes, 0);
    KernelGate gate{api};
    gate.close(computing);

    launch_write(memory, copied_bytes, 3, computing);
    api.record(event, computing);
    api.wait(copying, event);
    api.copy(back, memory, copied_bytes, CopyKind::to_host, copying);
    CHECK_FALSE(api.is_complete(event));
    gate.open();
    api.synchronize(copying);

    std::size_t wrong = 0;
    for (std::size_t i = 0; i < copied_bytes; ++i) {
      wrong += back[i] != byte_of(3, i) ? 1 : 0;
    }
    CHECK(wrong == 0);
    CHECK_FALSE(gate.gave_up());
  }

  // A is held up, B takes A's range, C takes it from B. C has no ticket of A.
  TEST_CASE_FIXTURE(
      Gpu, "StreamOrder: three streams pass a range on, each after the last use before it") {
    auto const a = rig.stream();
    auto const b = rig.stream();
    auto const c = rig.stream();
    unsigned char* const memory = rig.device_memory(copied_bytes);
    WrongBytes wrong{api};
    StreamOrder<CudaApi> order{api};
    KernelGate gate{api};
    StreamIndex const on_a = order.index_of(a);
    StreamIndex const on_b = order.index_of(b);
    StreamIndex const on_c = order.index_of(c);
    gate.close(a);

    launch_write(memory, copied_bytes, 1, a);
    launch_check(memory, copied_bytes, 1, wrong.counter(), a);
    Fence fence{order.mark(on_a)};
    order.wait(on_b, fence);
    launch_write(memory, copied_bytes, 2, b);
    launch_check(memory, copied_bytes, 2, wrong.counter(), b);
    fence = order.mark(on_b);
    order.wait(on_c, fence);
    launch_write(memory, copied_bytes, 3, c);
    launch_check(memory, copied_bytes, 3, wrong.counter(), c);
    fence = order.mark(on_c);
    CHECK_FALSE(order.is_complete(fence));
    gate.open();
    order.synchronize(fence);

    CHECK(wrong.value() == 0);
    CHECK_FALSE(gate.gave_up());
  }

  TEST_CASE_FIXTURE(Gpu, "StreamOrder: a fence with folded tickets waits for all of them") {
    constexpr int count = 5;
    unsigned char* const memory = rig.device_memory(count * copied_bytes);
    auto const reader = rig.stream();
    std::array<cudaStream_t, count> streams{};
    for (cudaStream_t& stream : streams) {
      stream = rig.stream();
    }
    WrongBytes wrong{api};
    StreamOrder<CudaApi> order{api};
    KernelGate gate{api};
    Fence fence;
    for (int i = 0; i < count; ++i) {
      cudaStream_t const stream = streams[i];
      gate.close(stream);
      launch_write(memory + i * copied_bytes, copied_bytes, static_cast<std::uint32_t>(i), stream);
      fence.add(order.mark(order.index_of(stream)));
    }
    StreamIndex const on_reader = order.index_of(reader);

    order.wait(on_reader, fence);
    for (int i = 0; i < count; ++i) {
      launch_check(memory + i * copied_bytes,
                   copied_bytes,
                   static_cast<std::uint32_t>(i),
                   wrong.counter(),
                   reader);
    }
    gate.open();
    api.synchronize(reader);

    CHECK(wrong.value() == 0);
    CHECK(order.is_complete(fence));
    CHECK_FALSE(gate.gave_up());
  }
}
