// SPDX-License-Identifier: Apache-2.0
//
// How long it takes to allocate and to free device memory, against the allocators that come with
// the device. `scripts/torch-allocate-latency.py` does the same with PyTorch's caching allocator.
//
// usage: bench_allocate_latency [--benchmark_filter=REGEX ...]      e.g. --benchmark_filter=^cuda
//
// 256 blocks of 4 KiB to 8 MiB are alive; each iteration replaces one of them, drawn at random, by
// another of a random size. No device work is enqueued.

#include <spillway/device_allocator.hpp>
#include <spillway/sim.hpp>
#if defined(SPILLWAY_WITH_CUDA) && SPILLWAY_WITH_CUDA
#  include <spillway/cuda.hpp>
#endif

#include <cmath>
#include <cstddef>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

namespace {

using namespace spillway::literals;

constexpr std::size_t live_blocks = 256;
constexpr std::size_t capacity_bytes = 1_GiB;

/// The sequence of calls, the same for every allocator: which block is replaced, and by one of how
/// many bytes.
class Replacements {
 public:
  struct Replacement {
    std::size_t block;
    std::size_t bytes;
  };
  Replacements() {
    std::mt19937_64 random{42};
    std::uniform_int_distribution<std::size_t> block{0, live_blocks - 1};
    std::uniform_real_distribution<double> exponent{12, 23};
    for (auto& one : sequence_) {
      one = {block(random), static_cast<std::size_t>(std::exp2(exponent(random)))};
    }
  }
  [[nodiscard]] Replacement next() noexcept {
    position_ = (position_ + 1) % sequence_.size();
    return sequence_[position_];
  }

 private:
  std::vector<Replacement> sequence_ = std::vector<Replacement>(1U << 14U);
  std::size_t position_ = 0;
};

/// Runs the workload over `Memory`: `free(handle, bytes)` takes what `allocate(bytes)` returned.
template <class Memory>
void replace_blocks(benchmark::State& state) {
  Memory memory;
  Replacements replacements;
  std::vector<std::pair<typename Memory::handle, std::size_t>> live;
  for (std::size_t i = 0; i < live_blocks; ++i) {
    std::size_t const bytes = replacements.next().bytes;
    live.emplace_back(memory.allocate(bytes), bytes);
  }
  for (auto _ : state) {
    auto const [block, bytes] = replacements.next();
    memory.free(live[block].first, live[block].second);
    live[block] = {memory.allocate(bytes), bytes};
  }
  for (auto const& [handle, bytes] : live) {
    memory.free(handle, bytes);
  }
}

template <class Policies>
class Ours {
 public:
  using handle = spillway::BlockId;
  [[nodiscard]] handle allocate(std::size_t bytes) { return allocator_.allocate(bytes); }
  void free(handle block, std::size_t /*bytes*/) { allocator_.deallocate(block); }

 private:
  typename Policies::device device_;
  spillway::DeviceAllocator<Policies> allocator_{device_, {.capacity_bytes = capacity_bytes}};
};

/// `cudaMalloc` and `cudaFree` on CudaApi.
template <class Policies>
class Reservations {
 public:
  using handle = void*;
  [[nodiscard]] handle allocate(std::size_t bytes) {
    void* const memory = device_.try_reserve(bytes);
    if (memory == nullptr) {
      throw std::runtime_error{"the device is full"};
    }
    return memory;
  }
  void free(handle memory, std::size_t bytes) { device_.release(memory, bytes); }

 private:
  typename Policies::device device_;
};

#if defined(SPILLWAY_WITH_CUDA) && SPILLWAY_WITH_CUDA
/// `cudaMallocAsync` from a pool that does not release memory to the device.
class CudaPool {
 public:
  using handle = void*;
  CudaPool() {
    cudaMemPool_t pool{};
    spillway::cuda_check(cudaDeviceGetDefaultMemPool(&pool, 0));
    std::uint64_t keep = UINT64_MAX;
    spillway::cuda_check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
    spillway::cuda_check(cudaStreamCreate(&stream_));
  }
  ~CudaPool() { cudaStreamDestroy(stream_); }
  CudaPool(CudaPool const&) = delete;
  CudaPool& operator=(CudaPool const&) = delete;
  [[nodiscard]] handle allocate(std::size_t bytes) {
    void* memory = nullptr;
    spillway::cuda_check(cudaMallocAsync(&memory, bytes, stream_));
    return memory;
  }
  void free(handle memory, std::size_t /*bytes*/) {
    spillway::cuda_check(cudaFreeAsync(memory, stream_));
  }

 private:
  cudaStream_t stream_{};
};
#endif

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 2;
  }
  benchmark::RegisterBenchmark("sim/spillway", replace_blocks<Ours<spillway::SimPolicies>>);
#if defined(SPILLWAY_WITH_CUDA) && SPILLWAY_WITH_CUDA
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) == cudaSuccess && gpus > 0) {
    benchmark::RegisterBenchmark("cuda/spillway", replace_blocks<Ours<spillway::CudaPolicies>>);
    benchmark::RegisterBenchmark("cuda/cudaMalloc",
                                 replace_blocks<Reservations<spillway::CudaPolicies>>);
    benchmark::RegisterBenchmark("cuda/cudaMallocAsync", replace_blocks<CudaPool>);
  }
#endif
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
