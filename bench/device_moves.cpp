// SPDX-License-Identifier: Apache-2.0
//
// Measures what it takes to make one free range of many: by moving blocks inside the device, by
// swapping them out and in again, and, for comparison, a plain copy of as many bytes on the device.
// usage: bench_device_moves [--benchmark_filter=REGEX ...]      e.g. --benchmark_filter=^cuda
//
// Every other block of a full device is freed, again in each round; the first round, in which
// streams and lists are used for the first time, is not timed. `copies` is what the device alone
// takes for blocks of that size. On a GPU `cuda` enqueues batches, `cuda_one_by_one` a copy for
// each block, `cuda_kernel` kernels for many. Where there is no GPU only the simulated device is
// measured; the figures are then of memcpy on the host.

#include <spillway/device_allocator.hpp>
#include <spillway/sim.hpp>
#include <spillway/swappable_buffer.hpp>
#if defined(SPILLWAY_WITH_CUDA) && SPILLWAY_WITH_CUDA
#  include <spillway/cuda.hpp>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

namespace {

using namespace spillway::literals;
using spillway::Access;

/// An allocator that is full except for every other block, which has been freed.
template <class Policies>
class Holey {
 public:
  using Device = typename Policies::device;
  using Allocator = spillway::DeviceAllocator<Policies>;
  using Buffer = spillway::SwappableBuffer<Allocator>;

  /// Pins `host_bytes` in advance, so that pinning is not measured; 0 if nothing will be swapped
  /// out.
  Holey(std::size_t capacity_bytes, std::size_t block_bytes, std::size_t host_bytes)
      : allocator_{device_, options(capacity_bytes, host_bytes)},
        count_{capacity_bytes / block_bytes},
        block_bytes_{block_bytes} {
    make_gaps();
  }
  ~Holey() {
    kept_.clear();
    allocator_.retire_stream(stream_);
  }
  Holey(Holey const&) = delete;
  Holey& operator=(Holey const&) = delete;

  /// Fills the device with blocks and frees every other one, by address.
  void make_gaps() {
    while (kept_.size() < count_) {
      fill(kept_.emplace_back(allocator_, block_bytes_), kept_.size());
    }
    std::vector<std::pair<void const*, Buffer>> all;
    for (Buffer& buffer : kept_) {
      void const* const address = buffer.acquire(Access::read, stream_).data();
      all.emplace_back(address, std::move(buffer));
    }
    std::sort(all.begin(), all.end(), [](auto const& a, auto const& b) {
      return std::less<>{}(a.first, b.first);
    });
    kept_.clear();
    for (std::size_t i = 1; i < all.size(); i += 2) {
      kept_.push_back(std::move(all[i].second));
    }
    all.clear();
    device_.synchronize(stream_);
  }

  /// @returns the bytes moved
  std::size_t compact() {
    auto const before = allocator_.stats().moves.bytes;
    while (allocator_.compact() != 0) {
    }
    allocator_.synchronize();
    return static_cast<std::size_t>(allocator_.stats().moves.bytes - before);
  }

  /// Overwrites all blocks, so that swapping out any of them needs a copy.
  void overwrite() {
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      fill(kept_[i], i);
    }
    device_.synchronize(stream_);
  }

  /// @returns the bytes that were swapped out and in again
  std::size_t round_trip() {
    auto const before = allocator_.stats().swap_ins.bytes;
    for (Buffer& buffer : kept_) {
      buffer.swap_out();
    }
    for (Buffer& buffer : kept_) {
      buffer.swap_in();
    }
    allocator_.synchronize();
    return static_cast<std::size_t>(allocator_.stats().swap_ins.bytes - before);
  }

  [[nodiscard]] bool is_joined() const {
    auto const now = allocator_.stats();
    return now.largest_free_bytes == now.free_bytes;
  }

 private:
  static typename Allocator::Options options(std::size_t capacity_bytes, std::size_t host_bytes) {
    typename Allocator::Options options{.capacity_bytes = capacity_bytes};
    options.host.pinned_bytes = host_bytes;
    options.host.initial_pinned_bytes = host_bytes;
    options.paging.swapping = host_bytes != 0;
    return options;
  }

  void fill(Buffer& buffer, std::size_t tag) {
    auto const lease = buffer.acquire(Access::write, stream_);
    device_.fill(lease.data(), static_cast<unsigned char>(tag), buffer.size_bytes(), stream_);
  }

  Device device_;
  typename Device::stream_type stream_ = device_.create_stream();
  Allocator allocator_;
  std::size_t count_;
  std::size_t block_bytes_;
  std::vector<Buffer> kept_;
};

template <class Policies, std::size_t capacity_bytes>
void compaction(benchmark::State& state) {
  Holey<Policies> holey{capacity_bytes, static_cast<std::size_t>(state.range(0)), 0};
  (void)holey.compact();
  std::size_t bytes = 0;
  for (auto _ : state) {
    state.PauseTiming();
    holey.make_gaps();
    state.ResumeTiming();
    bytes += holey.compact();
    if (!holey.is_joined()) {
      throw std::runtime_error{"free memory is still in pieces"};
    }
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(bytes));
}

/// Uses one allocator for all rounds, since pinning gigabytes takes seconds. Every round moves as
/// many bytes as the first.
template <class Policies, std::size_t capacity_bytes>
void round_trip(benchmark::State& state) {
  Holey<Policies> holey{
      capacity_bytes, static_cast<std::size_t>(state.range(0)), capacity_bytes / 2};
  std::size_t bytes = 0;
  for (auto _ : state) {
    state.PauseTiming();
    holey.overwrite();
    state.ResumeTiming();
    bytes += holey.round_trip();
    if (!holey.is_joined()) {
      throw std::runtime_error{"free memory is still in pieces"};
    }
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(bytes));
}

/// Copies adjacent blocks one by one, a quarter of the capacity, which is what compaction moves.
/// Copying all of them as one block is the lower bound.
template <class Policies, std::size_t capacity_bytes>
void copies(benchmark::State& state) {
  typename Policies::device device;
  auto const stream = device.create_stream();
  constexpr std::size_t bytes = capacity_bytes / 4;
  auto const block_bytes = static_cast<std::size_t>(state.range(0));
  auto* const memory = static_cast<std::byte*>(device.try_reserve(2 * bytes));
  std::vector<void*> to;
  std::vector<void const*> from;
  for (std::size_t at = 0; at < bytes; at += block_bytes) {
    to.push_back(memory + bytes + at);
    from.push_back(memory + at);
  }
  std::vector<std::size_t> const sizes(to.size(), block_bytes);
  device.fill(memory, 1, 2 * bytes, stream);
  device.synchronize(stream);
  for (auto _ : state) {
    device.copy_batch(to, from, sizes, spillway::CopyKind::on_device, stream);
    device.synchronize(stream);
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(bytes));
  device.release(memory, 2 * bytes);
  device.destroy_stream(stream);
}

#if defined(SPILLWAY_WITH_CUDA) && SPILLWAY_WITH_CUDA
struct OneByOneCuda : spillway::CudaApi {
  OneByOneCuda() : CudaApi{0, {.batched_copies = false}} {}
};
struct OneByOnePolicies : spillway::PoliciesFor<OneByOneCuda> {};
#endif
#if defined(SPILLWAY_WITH_CUDA_KERNELS) && SPILLWAY_WITH_CUDA_KERNELS
struct KernelCuda : spillway::CudaApi {
  KernelCuda() : CudaApi{0, {.copy_kernel = &spillway::CudaCopyKernel::enqueue}} {
    if (!has_copy_kernel()) {
      throw std::runtime_error{"the kernels were built for another GPU"};
    }
  }
};
struct KernelPolicies : spillway::PoliciesFor<KernelCuda> {};
#endif

template <class Policies, std::size_t capacity_bytes>
void register_on(std::string const& device, bool goes_to_host = true) {
  auto const add = [&](char const* name, auto function) {
    return benchmark::RegisterBenchmark((device + "/" + name).c_str(), function)
        ->UseRealTime()
        ->Unit(benchmark::kMicrosecond);
  };
  add("plain_copy", copies<Policies, capacity_bytes>)->Arg(capacity_bytes / 4);
  for (std::size_t const block_bytes : {64_KiB, 256_KiB, 2_MiB, 16_MiB}) {
    auto const arg = static_cast<std::int64_t>(block_bytes);
    add("compaction", compaction<Policies, capacity_bytes>)->Arg(arg)->Iterations(5);
    if (goes_to_host) {
      add("round_trip", round_trip<Policies, capacity_bytes>)->Arg(arg)->Iterations(5);
    }
    add("copies", copies<Policies, capacity_bytes>)->Arg(arg);
  }
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 2;
  }
  register_on<spillway::SimPolicies, 256_MiB>("sim");
#if defined(SPILLWAY_WITH_CUDA) && SPILLWAY_WITH_CUDA
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) == cudaSuccess && gpus > 0) {
    register_on<spillway::CudaPolicies, 8_GiB>("cuda");
    register_on<OneByOnePolicies, 8_GiB>("cuda_one_by_one", false);
#  if defined(SPILLWAY_WITH_CUDA_KERNELS) && SPILLWAY_WITH_CUDA_KERNELS
    register_on<KernelPolicies, 8_GiB>("cuda_kernel", false);
#  endif
  }
#endif
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
