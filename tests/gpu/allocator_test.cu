// SPDX-License-Identifier: Apache-2.0
// The allocator on a GPU, with kernels in flight.
#include <spillway/core/tensor_view.hpp>
#include <spillway/cuda.hpp>
#include <spillway/page_arena.hpp>
#include <spillway/swappable_tensor.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "kernels.cuh"
#include <support/allocator_load.hpp>

using namespace spillway;

namespace {

struct Remapping : CudaPolicies {
  using arena = MappedPages;
};
struct Stable : CudaPolicies {
  using arena = StableAddresses;
};

struct GpuGate {
  template <class E>
  void close(E& /*gpu*/, cudaStream_t stream) {
    gate->close(stream);
  }
  void open() { gate->open(); }

  std::unique_ptr<gpu_test::KernelGate> gate;
};

template <class Policies>
struct GpuLoad {
  using policies = Policies;
  using stream_type = cudaStream_t;
  /// 16, or SPILLWAY_GPU_TEST_SCALE: under a sanitizer an access takes a hundred times as long.
  [[nodiscard]] static std::size_t scale() {
    char const* const chosen = std::getenv("SPILLWAY_GPU_TEST_SCALE");
    return chosen == nullptr ? 16 : std::stoul(chosen);
  }

  [[nodiscard]] GpuGate make_gate() {
    GpuGate made{std::make_unique<gpu_test::KernelGate>(device)};
    gate = made.gate.get();
    return made;
  }
  void write(void* p, std::size_t n, std::uint32_t tag, cudaStream_t stream) {
    gpu_test::launch_write(p, n, tag, stream);
  }
  void check(void const* p, std::size_t n, std::uint32_t tag, cudaStream_t stream) {
    gpu_test::launch_check(p, n, tag, wrong_bytes.counter(), stream);
  }
  [[nodiscard]] unsigned long long wrong() const { return wrong_bytes.value(); }
  /// Called while the last gate still exists.
  [[nodiscard]] bool is_sound() const { return gate == nullptr || !gate->gave_up(); }

  CudaApi device;
  gpu_test::WrongBytes wrong_bytes{device};
  gpu_test::KernelGate const* gate = nullptr;
};

/// Adds up the indices of each element, and the number of dimensions.
__global__ void write_sums(TensorView<float, 2> view) {
  for (std::size_t i = 0; i < view.extent(0); ++i) {
    auto const row = view.select(i);
    for (std::size_t j = 0; j < row.extent(0); ++j) {
      row(j) = static_cast<float>(i + j + view.rank());
    }
  }
}

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE_TEMPLATE_INVOKE(
      allocator_load, GpuLoad<CudaPolicies>, GpuLoad<Remapping>, GpuLoad<Stable>);

  TEST_CASE("SwappableTensor: a kernel gets a view of a tensor by value") {
    CudaApi device;
    DeviceAllocator<CudaPolicies> memory{device, {.capacity_bytes = 1_MiB}};
    auto const stream = memory.create_stream();
    auto tensor = make_tensor<float>(memory, {2, 3});
    {
      auto const lease = tensor.acquire_write(stream);
      write_sums<<<1, 1, 0, stream.get()>>>(lease.view());
      cuda_check(cudaGetLastError());
    }
    std::vector<float> values(tensor.size());
    tensor.copy_to_host_sync(values, stream);
    CHECK(values == std::vector<float>{2, 3, 4, 3, 4, 5});
  }
}
