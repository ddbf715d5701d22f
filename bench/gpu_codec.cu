// SPDX-License-Identifier: Apache-2.0
//
// How fast a GPU encodes a block into pinned memory and decodes it from there, beside a plain copy
// of the same bytes over the link.
//
// usage: bench_gpu_codec [--benchmark_filter=REGEX ...]
//
// Rates are of the block's bytes. `stored` is what is stored of each byte. Of the elements, the
// last part of the name says how many in a hundred are 0.

#include <spillway/core/types.hpp>
#include <spillway/cuda_kernels.cuh>
#include <spillway/device/cuda/cuda_api.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include <benchmark/benchmark.h>
#if defined(SPILLWAY_WITH_NVCOMP) && SPILLWAY_WITH_NVCOMP
#  include <spillway/nvcomp_codecs.cuh>
#endif

namespace {

using namespace spillway;
using namespace spillway::literals;

constexpr std::size_t block_bytes = 64_MiB;

__global__ void write_elements(std::uint32_t* to, std::size_t count, unsigned zeros_percent) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    auto const random = static_cast<std::uint32_t>(i) * 2654435761U >> 8U;
    to[i] = random % 100 < zeros_percent ? 0 : 0x3F000000U | random;
  }
}

/// A block in device memory, and room for it in pinned memory.
class Rig {
 public:
  explicit Rig(unsigned zeros_percent) {
    if (block_ == nullptr || pinned_ == nullptr) {
      throw std::runtime_error{"no memory"};
    }
    write_elements<<<1024, 256, 0, stream_>>>(
        reinterpret_cast<std::uint32_t*>(block_), block_bytes / 4, zeros_percent);
    cuda_check(cudaGetLastError());
    device_.synchronize(stream_);
  }
  Rig(Rig const&) = delete;
  Rig& operator=(Rig const&) = delete;
  ~Rig() {
    if (scratch_ && !scratch_->empty()) {
      device_.release(scratch_->data(), scratch_->size());
    }
    device_.free_pinned(pinned_, room);
    device_.release(block_, block_bytes);
    device_.destroy_stream(stream_);
  }

  [[nodiscard]] SlotMemory slot() const { return slot_; }

  void copy(CopyKind kind) {
    kind == CopyKind::to_host ? device_.copy(pinned_, block_, block_bytes, kind, stream_)
                              : device_.copy(block_, pinned_, block_bytes, kind, stream_);
    device_.synchronize(stream_);
  }
  template <class Codec>
  void encode() {
    Codec::encode_on(device_, stream_, {block_, block_bytes}, slot(), scratch<Codec>());
    device_.synchronize(stream_);
  }
  template <class Codec>
  void decode() {
    Codec::decode_on(device_, stream_, slot(), {block_, block_bytes}, scratch<Codec>());
    device_.synchronize(stream_);
  }

 private:
  static constexpr std::size_t room = block_bytes + 1_MiB;  // more than any of the codecs needs

  /// What a codec works in; a rig is used with one codec.
  template <class Codec>
  [[nodiscard]] std::span<std::byte> scratch() {
    if (!scratch_) {
      std::span<std::byte> memory;
      if (std::size_t const bytes = Codec::scratch_bytes(device_); bytes != 0) {
        auto* const first = static_cast<std::byte*>(device_.try_reserve(bytes));
        if (first == nullptr) {
          throw std::runtime_error{"no memory"};
        }
        memory = {first, bytes};
      }
      scratch_ = memory;
    }
    return *scratch_;
  }

  CudaApi device_;
  cudaStream_t stream_ = device_.create_stream();
  std::byte* block_ = static_cast<std::byte*>(device_.try_reserve(block_bytes));
  std::byte* pinned_ =
      static_cast<std::byte*>(device_.try_allocate_pinned(room, device_.numa_node()));
  std::array<std::span<std::byte>, 1> slot_{std::span{pinned_, room}};
  std::optional<std::span<std::byte>> scratch_;  // empty until it is needed for the first time
};

void copy(benchmark::State& state, CopyKind kind) {
  Rig rig{0};
  for (auto _ : state) {
    rig.copy(kind);
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations() * block_bytes));
}

template <class Codec>
void encode(benchmark::State& state, unsigned zeros_percent) {
  Rig rig{zeros_percent};
  for (auto _ : state) {
    rig.encode<Codec>();
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations() * block_bytes));
  state.counters["stored"] =
      static_cast<double>(Codec::stored_bytes(rig.slot())) / static_cast<double>(block_bytes);
}

template <class Codec>
void decode(benchmark::State& state, unsigned zeros_percent) {
  Rig rig{zeros_percent};
  rig.encode<Codec>();
  for (auto _ : state) {
    rig.decode<Codec>();
  }
  if (Codec::stored_bytes(rig.slot()) == 0) {
    state.SkipWithError("what was encoded cannot be decoded");
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations() * block_bytes));
}

template <class Codec>
void add(std::string const& name, unsigned zeros_percent) {
  // Appended part by part: g++ 12 takes `"cuda/" + name` for a copy that overlaps itself.
  auto const named = [&](char const* way) {
    std::string full{"cuda/"};
    full.append(name).append(way).append(std::to_string(zeros_percent));
    return full;
  };
  benchmark::RegisterBenchmark(named("/out/").c_str(), [=](benchmark::State& state) {
    encode<Codec>(state, zeros_percent);
  })->UseRealTime();
  benchmark::RegisterBenchmark(named("/in/").c_str(), [=](benchmark::State& state) {
    decode<Codec>(state, zeros_percent);
  })->UseRealTime();
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 2;
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "bench_gpu_codec: there is no GPU\n");
    return 77;
  }
  for (auto const& [way, kind] :
       {std::pair{"out", CopyKind::to_host}, std::pair{"in", CopyKind::to_device}}) {
    benchmark::RegisterBenchmark((std::string{"cuda/plain_copy/"} + way).c_str(),
                                 [kind = kind](benchmark::State& state) { copy(state, kind); })
        ->UseRealTime();
  }
  for (unsigned const zeros : {0U, 50U, 90U}) {
    add<CudaZeroBitmap>("zero_bitmap", zeros);
  }
  add<CudaAsBfloat16>("bfloat16", 0);
#if defined(SPILLWAY_WITH_NVCOMP) && SPILLWAY_WITH_NVCOMP
  add<CudaBytePlanes<NvcompAns>>("byte_planes_ans", 0);
  add<CudaBytePlanes<NvcompLz4>>("byte_planes_lz4", 0);
#endif
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
