// SPDX-License-Identifier: Apache-2.0
// The allocator on a GPU, with kernels in flight.
#include <spillway/cuda.hpp>
#include <spillway/page_arena.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

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

}  // namespace

TEST_SUITE("gpu") {
  TEST_CASE_TEMPLATE_INVOKE(
      allocator_load, GpuLoad<CudaPolicies>, GpuLoad<Remapping>, GpuLoad<Stable>);
}
