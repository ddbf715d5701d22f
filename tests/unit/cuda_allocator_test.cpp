// SPDX-License-Identifier: Apache-2.0
// The allocator on CudaApi, on a stand-in for the CUDA runtime. On a GPU: tests/gpu/.
#include <spillway/cuda_policies.hpp>
#include <spillway/policy/remap_compaction.hpp>

#include <doctest/doctest.h>

#include <support/allocator_load.hpp>
#include <support/fake_cudart.hpp>
#include <support/host_work.hpp>

using namespace spillway;

namespace {

struct FakeRuntime {
  FakeCudart cuda{{.capacity_bytes = 64U << 20U, .numa_node = 0}};
};

struct Remapping : CudaPolicies {
  using compaction = RemapCompaction;
};
struct Stable : CudaPolicies {
  using compaction = StableAddresses;
};

template <class Policies>
struct FakeCuda : FakeRuntime {
  using policies = Policies;
  using stream_type = cudaStream_t;
  static constexpr std::size_t scale = 1;

  [[nodiscard]] test::HostGate make_gate() { return {}; }
  void write(void* p, std::size_t n, std::uint32_t tag, cudaStream_t stream) {
    work.write(p, n, tag, stream);
  }
  void check(void const* p, std::size_t n, std::uint32_t tag, cudaStream_t stream) {
    work.check(p, n, tag, stream);
  }
  [[nodiscard]] std::uint64_t wrong() const { return work.wrong(); }
  [[nodiscard]] bool is_sound() const { return cudaPeekAtLastError() == cudaSuccess; }

  CudaApi device{1};
  test::HostWork<CudaApi> work{device};
};

}  // namespace

TEST_SUITE("cuda_allocator") {
  TEST_CASE_TEMPLATE_INVOKE(
      allocator_load, FakeCuda<CudaPolicies>, FakeCuda<Remapping>, FakeCuda<Stable>);
}
