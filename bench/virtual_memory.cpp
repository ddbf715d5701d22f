// SPDX-License-Identifier: Apache-2.0
//
// Measures what it costs to give a block memory by mapping pages instead of moving bytes: the
// device's calls for several sizes, and leases of address-stable blocks that take each other's
// memory.
// usage: bench_virtual_memory [--benchmark_filter=REGEX ...]      e.g. --benchmark_filter=^cuda

#include <spillway/device/host/host_paged_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/page_arena.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/sim.hpp>
#include <spillway/swappable_buffer.hpp>
#if defined(SPILLWAY_WITH_CUDA) && SPILLWAY_WITH_CUDA
#  include <spillway/cuda.hpp>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include <benchmark/benchmark.h>

namespace {

using namespace spillway::literals;
using spillway::Access;

/// Maps and unmaps `range(0)` granules, as one piece or as a piece for each granule. Only one of
/// the two is timed.
template <class Policies, bool counts_map, bool in_one_piece>
void pages(benchmark::State& state) {
  typename Policies::device device;
  std::size_t const granule = device.granularity_bytes();
  auto const count = static_cast<std::size_t>(state.range(0));
  auto* const address = static_cast<std::byte*>(device.reserve_address(count * granule));
  std::size_t const piece_bytes = in_one_piece ? count * granule : granule;
  std::vector<typename Policies::device::physical_type> pieces;
  while (pieces.size() * piece_bytes < count * granule) {
    auto const piece = device.try_create_physical(piece_bytes);
    if (!piece) {
      throw std::runtime_error{"the device is full"};
    }
    pieces.push_back(*piece);
  }
  for (auto _ : state) {
    if (!counts_map) {
      state.PauseTiming();
    }
    if (!device.try_map(address, piece_bytes, pieces)) {
      throw std::runtime_error{"the device has no memory for page tables"};
    }
    if (counts_map) {
      state.PauseTiming();
    } else {
      state.ResumeTiming();
    }
    device.unmap(address, count * granule);
    if (counts_map) {
      state.ResumeTiming();
    }
  }
  state.counters["MiB"] = static_cast<double>(count * granule) / (1U << 20U);
  for (auto const piece : pieces) {
    device.release_physical(piece);
  }
  device.free_address(address, count * granule);
}

/// Makes a device on which blocks that were never written may be leased for reading.
template <class Device>
Device make_unchecked_device() {
  if constexpr (std::is_constructible_v<Device, spillway::SimOptions>) {
    return Device{spillway::SimOptions{.check_reads = false}};
  } else {
    return Device{};
  }
}

/// Leases blocks of `range(0)` * `eighths` / 8 granules in turn. There is room for the largest
/// only, so each lease takes the memory of the others; no bytes are copied. Blocks of several sizes
/// do not find pieces of their own size.
template <class Policies, std::size_t... eighths>
void leases_in_turn(benchmark::State& state) {
  using Allocator = spillway::DeviceAllocator<Policies>;
  auto device = make_unchecked_device<typename Policies::device>();
  auto const stream = device.create_stream();
  std::size_t const granule = device.granularity_bytes();
  auto const count = static_cast<std::size_t>(state.range(0));
  {
    typename Allocator::Options options{.capacity_bytes = count * granule};
    options.host.pinned_bytes = 4_MiB;
    Allocator allocator{device, options};
    std::vector<spillway::SwappableBuffer<Allocator>> buffers;
    for (std::size_t const share : {eighths...}) {
      buffers.emplace_back(allocator, std::max<std::size_t>(1, count * share / 8) * granule);
    }
    for (auto _ : state) {  // no block has contents, so nothing is copied
      for (auto& buffer : buffers) {
        benchmark::DoNotOptimize(buffer.acquire(Access::read, stream).data());
      }
    }
    state.SetItemsProcessed(static_cast<std::int64_t>(buffers.size()) * state.iterations());
    buffers.clear();
    allocator.retire_stream(stream);
  }
  device.destroy_stream(stream);
}

template <class Base>
struct Stable : Base {
  using arena = spillway::StableAddresses;
  using eviction = spillway::LruEviction;
  using prefetch = spillway::NoPrefetch;
};

template <spillway::HostRemap how>
struct OnHost : spillway::SimPolicies {
  struct device : spillway::HostPagedApi {
    device() : HostPagedApi{{.remap = how}} {}
  };
};

template <class Policies>
void register_on(std::string const& device) {
  auto const add = [&](char const* name, auto function) {
    benchmark::RegisterBenchmark((device + "/" + name).c_str(), function)
        ->Arg(1)
        ->Arg(8)
        ->Arg(64)
        ->UseRealTime();
  };
  add("map", pages<Policies, true, true>);
  add("unmap", pages<Policies, false, true>);
  add("map_pieces", pages<Policies, true, false>);
  add("unmap_pieces", pages<Policies, false, false>);
  add("stable_lease", leases_in_turn<Stable<Policies>, 8, 8>);
  add("stable_lease_of_sizes", leases_in_turn<Stable<Policies>, 8, 6, 3, 1>);
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 2;
  }
  register_on<spillway::SimPolicies>("sim");
  register_on<OnHost<spillway::HostRemap::mappings>>("host_mappings");
  register_on<OnHost<spillway::HostRemap::pages>>("host_pages");
#if defined(SPILLWAY_WITH_CUDA) && SPILLWAY_WITH_CUDA
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) == cudaSuccess && gpus > 0) {
    register_on<spillway::CudaPolicies>("cuda");
  }
#endif
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
