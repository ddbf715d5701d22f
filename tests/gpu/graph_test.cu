// SPDX-License-Identifier: Apache-2.0
// A graph captured over leased buffers, launched while other buffers swap and move.
#include <spillway/cuda.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/swappable_buffer.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.cuh"

using namespace spillway;
using namespace gpu_test;

namespace {

constexpr std::size_t block_bytes = 8_MiB;
constexpr std::uint32_t blocks = 24;

using Allocator = DeviceAllocator<CudaPolicies>;
using Buffer = SwappableBuffer<Allocator>;

/// One more launch, one more in every byte.
__global__ void count_up(unsigned char* bytes, std::size_t size_bytes) {
  std::size_t const stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < size_bytes;
       i += stride) {
    ++bytes[i];
  }
}

Allocator::Options graph_options() {
  Allocator::Options options{.capacity_bytes = 12 * block_bytes};
  options.host.pinned_bytes = 2 * blocks * block_bytes;
  return options;
}

cudaGraphExec_t capture(cudaStream_t stream, void* from, void* to) {
  cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  count_up<<<64, 256, 0, stream>>>(static_cast<unsigned char*>(from), block_bytes);
  cuda_check(cudaGetLastError());
  cuda_check(cudaMemcpyAsync(to, from, block_bytes, cudaMemcpyDeviceToDevice, stream));
  cudaGraph_t graph{};
  cuda_check(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable{};
  cuda_check(cudaGraphInstantiate(&executable, graph, 0));
  cuda_check(cudaGraphDestroy(graph));
  return executable;
}

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE(
      "DeviceAllocator: a graph over leased buffers replays while other blocks swap and move") {
    CudaApi device;
    WrongBytes wrong{device};
    cudaStream_t const on_graph = device.create_stream();
    cudaStream_t const on_others = device.create_stream();
    {
      Allocator allocator{device, graph_options()};
      std::vector<Buffer> others;
      for (std::uint32_t i = 0; i < blocks; ++i) {
        others.emplace_back(allocator, block_bytes);
        auto const lease = others.back().acquire(Access::write, on_others);
        launch_write(lease.data(), block_bytes, i, on_others);
      }
      Buffer from{allocator, block_bytes};
      Buffer to{allocator, block_bytes};
      auto counted = from.acquire(Access::write, on_graph);
      auto copied = to.acquire(Access::write, on_graph);
      device.fill(counted.data(), 0, block_bytes, on_graph);
      allocator.prepare_capture(on_graph);
      cudaGraphExec_t const graph = capture(on_graph, counted.data(), copied.data());

      constexpr unsigned launches = 20;
      for (unsigned launch = 0; launch < launches; ++launch) {
        cuda_check(cudaGraphLaunch(graph, on_graph));
        for (std::uint32_t i = 0; i < blocks; ++i) {
          auto const lease = others[i].acquire(Access::read, on_others);
          launch_check(lease.data(), block_bytes, i, wrong.counter(), on_others);
        }
        others[launch % blocks].reset();  // leaves a gap
        (void)allocator.compact();
        others[launch % blocks] = Buffer{allocator, block_bytes};
        auto const lease = others[launch % blocks].acquire(Access::write, on_others);
        launch_write(lease.data(), block_bytes, launch % blocks, on_others);
      }
      CHECK(allocator.stats().swap_ins.count > launches);

      counted.release();
      copied.release();
      std::vector<unsigned char> bytes(block_bytes);
      auto const result = to.acquire(Access::read, on_others);
      allocator.copy_to_host_sync(bytes.data(), result.data(), block_bytes, on_others);
      std::size_t different = 0;
      for (unsigned char const byte : bytes) {
        different += byte != launches ? 1 : 0;
      }
      CHECK(different == 0);
      cuda_check(cudaStreamSynchronize(on_others));
      CHECK(wrong.value() == 0);
      cuda_check(cudaGraphExecDestroy(graph));
      allocator.retire_stream(on_graph);
      allocator.retire_stream(on_others);
    }
    device.destroy_stream(on_graph);
    device.destroy_stream(on_others);
  }

  TEST_CASE("DeviceAllocator: a stream that is being captured is not made to wait for others") {
    CudaApi device;
    cudaStream_t const captured = device.create_stream();
    cudaStream_t const other = device.create_stream();
    {
      Allocator allocator{device, graph_options()};
      allocator.prepare_capture(captured);
      allocator.order_after_all(captured);

      cuda_check(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
      Fence const fence = allocator.mark(other);
      CHECK_THROWS_AS(allocator.order_after(captured, fence), ContractViolation);
      CHECK_THROWS_AS(allocator.order_after_all(captured), ContractViolation);
      cudaGraph_t graph{};
      CHECK(cudaStreamEndCapture(captured, &graph) == cudaSuccess);  // the capture is intact
      cuda_check(cudaGraphDestroy(graph));

      allocator.order_after(captured, fence);
      allocator.retire_stream(captured);
      allocator.retire_stream(other);
    }
    device.destroy_stream(captured);
    device.destroy_stream(other);
  }

  TEST_CASE("DeviceAllocator: on a captured stream only resident blocks without pending waits can "
            "be acquired") {
    CudaApi device;
    cudaStream_t const captured = device.create_stream();
    {
      Allocator allocator{device, graph_options()};
      Buffer away{allocator, block_bytes};
      {
        auto const lease = away.acquire(Access::write, captured);
        device.fill(lease.data(), 7, block_bytes, captured);
      }
      away.swap_out();
      allocator.prepare_capture(captured);

      cuda_check(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
      CHECK_THROWS_AS((void)away.acquire(Access::read, captured), ContractViolation);
      cudaGraph_t graph{};
      CHECK(cudaStreamEndCapture(captured, &graph) == cudaSuccess);  // nothing got into it
      std::size_t nodes = 1;
      cuda_check(cudaGraphGetNodes(graph, nullptr, &nodes));
      CHECK(nodes == 0);
      cuda_check(cudaGraphDestroy(graph));

      std::vector<unsigned char> bytes(block_bytes);
      auto const lease = away.acquire(Access::read, captured);
      allocator.copy_to_host_sync(bytes.data(), lease.data(), block_bytes, captured);
      CHECK(bytes.front() == 7);
      CHECK(bytes.back() == 7);
      allocator.retire_stream(captured);
    }
    device.destroy_stream(captured);
  }
}
