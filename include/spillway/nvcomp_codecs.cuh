// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A lossless codec for GPUs by NVIDIA's nvCOMP (5.1 or newer), for programs that link
/// `spillway::nvcomp`. Only nvcc compiles this.

#include <spillway/concepts/codec.hpp>
#include <spillway/core/error.hpp>
#include <spillway/cuda_kernels.cuh>
#include <spillway/device/cuda/cuda_api.hpp>
#include <spillway/policy/codec/identity.hpp>
#include <spillway/policy/codec/kernel_slot.hpp>
#include <spillway/policy/codec/plane_kernels.hpp>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include <nvcomp/ans.h>
#include <nvcomp/lz4.h>
#include <nvcomp/version.h>

#if NVCOMP_VER_MAJOR < 5 || (NVCOMP_VER_MAJOR == 5 && NVCOMP_VER_MINOR < 1)
#  error "spillway: codecs by nvCOMP need version 5.1 of it or a newer one"
#endif

namespace spillway {

namespace detail {

static_assert(sizeof(nvcompStatus_t) == sizeof(int) && nvcompSuccess == PlaneBatch::success);

/// @throws DeviceError
inline void nvcomp_check(nvcompStatus_t status) {
  if (status != nvcompSuccess) {
    throw DeviceError{"nvCOMP refused a call with its status " + std::to_string(status)};
  }
}

/// Asks how much memory a batch needs. Since nvCOMP 6 the functions have another name, and take a
/// stream, on which they enqueue nothing.
template <class Function, class... Arguments>
nvcompStatus_t nvcomp_work_bytes(Function function, Arguments... arguments) {
  if constexpr (std::is_invocable_v<Function, Arguments..., cudaStream_t>) {
    return function(arguments..., cudaStreamLegacy);
  } else {
    return function(arguments...);
  }
}
#if NVCOMP_VER_MAJOR >= 6
#  define SPILLWAY_NVCOMP_WORK_BYTES(algorithm, way) nvcompBatched##algorithm##way##GetTempSize
#else
#  define SPILLWAY_NVCOMP_WORK_BYTES(algorithm, way) nvcompBatched##algorithm##way##GetTempSizeAsync
#endif

/// A compressor of nvCOMP for `PlaneCodec`. `Calls` has its functions and options.
///
/// Batches are of 16 MiB: a GPU is busy with as many planes at a time, and larger ones would only
/// take more memory. All functions throw DeviceError.
template <class Calls>
struct NvcompCompressor {
  static constexpr unsigned most_planes = planes_of_word * 256;

  [[nodiscard]] static std::size_t most_packed_bytes(std::size_t bytes) {
    std::size_t most = 0;
    nvcomp_check(Calls::most_output(bytes, Calls::compress_options(), &most));
    return most;
  }
  [[nodiscard]] static std::size_t work_bytes(std::size_t planes) {
    std::size_t in = 0;
    std::size_t out = 0;
    std::size_t const all = planes * plane_bytes;
    nvcomp_check(nvcomp_work_bytes(
        Calls::compress_work, planes, plane_bytes, Calls::compress_options(), &out, all));
    nvcomp_check(nvcomp_work_bytes(
        Calls::decompress_work, planes, plane_bytes, Calls::decompress_options(), &in, all));
    return std::max(in, out);
  }
  static void
  compress(CudaLaunch const& launch, PlaneBatch const& batch, std::span<std::byte> work) {
    nvcomp_check(Calls::compress(batch.from,
                                 batch.from_bytes,
                                 plane_bytes,
                                 batch.count,
                                 work.data(),
                                 work.size(),
                                 batch.to,
                                 batch.done_bytes,
                                 Calls::compress_options(),
                                 statuses(batch),
                                 launch.stream));
  }
  static void
  decompress(CudaLaunch const& launch, PlaneBatch const& batch, std::span<std::byte> work) {
    nvcomp_check(Calls::decompress(batch.from,
                                   batch.from_bytes,
                                   batch.to_bytes,
                                   batch.done_bytes,
                                   batch.count,
                                   work.data(),
                                   work.size(),
                                   batch.to,
                                   Calls::decompress_options(),
                                   statuses(batch),
                                   launch.stream));
  }

 private:
  [[nodiscard]] static nvcompStatus_t* statuses(PlaneBatch const& batch) {
    return reinterpret_cast<nvcompStatus_t*>(batch.statuses);
  }
};

/// For buffers that no engine of its own can reach: scratch memory is plain device memory.
template <class Options>
[[nodiscard]] Options by_kernels(Options options) {
  options.backend = NVCOMP_DECOMPRESS_BACKEND_CUDA;
  return options;
}

struct NvcompAnsCalls {
  static constexpr auto most_output = &nvcompBatchedANSCompressGetMaxOutputChunkSize;
  static constexpr auto compress_work = &SPILLWAY_NVCOMP_WORK_BYTES(ANS, Compress);
  static constexpr auto decompress_work = &SPILLWAY_NVCOMP_WORK_BYTES(ANS, Decompress);
  static constexpr auto compress = &nvcompBatchedANSCompressAsync;
  static constexpr auto decompress = &nvcompBatchedANSDecompressAsync;
  static auto compress_options() { return nvcompBatchedANSCompressDefaultOpts; }
  static auto decompress_options() { return by_kernels(nvcompBatchedANSDecompressDefaultOpts); }
};

struct NvcompLz4Calls {
  static constexpr auto most_output = &nvcompBatchedLZ4CompressGetMaxOutputChunkSize;
  static constexpr auto compress_work = &SPILLWAY_NVCOMP_WORK_BYTES(LZ4, Compress);
  static constexpr auto decompress_work = &SPILLWAY_NVCOMP_WORK_BYTES(LZ4, Decompress);
  static constexpr auto compress = &nvcompBatchedLZ4CompressAsync;
  static constexpr auto decompress = &nvcompBatchedLZ4DecompressAsync;
  static auto compress_options() { return nvcompBatchedLZ4CompressDefaultOpts; }
  static auto decompress_options() { return by_kernels(nvcompBatchedLZ4DecompressDefaultOpts); }
};

#undef SPILLWAY_NVCOMP_WORK_BYTES

}  // namespace detail

/// For `CudaBytePlanes`: asymmetric numeral systems, an entropy coder. What `BytePlanes` leaves to
/// compress are exponents, of which some are frequent and few come in a row.
struct NvcompAns : detail::NvcompCompressor<detail::NvcompAnsCalls> {
  [[nodiscard]] static constexpr std::string_view name() noexcept {
    return "byte_planes_nvcomp_ans";
  }
};

/// For `CudaBytePlanes`: LZ4, which finds repeated bytes only.
struct NvcompLz4 : detail::NvcompCompressor<detail::NvcompLz4Calls> {
  [[nodiscard]] static constexpr std::string_view name() noexcept {
    return "byte_planes_nvcomp_lz4";
  }
};

/// A lossless codec for float32 and bfloat16, as `BytePlanes`, on a `CudaApi`: blocks are encoded
/// on their way into pinned memory and decoded on their way back, by a compressor of nvCOMP. What
/// it makes is no format of `BytePlanes`. Elsewhere blocks are copied.
///
/// Example: `memory.set_codec<CudaBytePlanes<NvcompAns>>(weights, layer);`
///
/// Streams  a block is encoded and decoded in batches of 16 MiB by a few kernels each, in place of
///          a copy on the same stream, which use the multiprocessors that other kernels want.
/// Cost     41 MiB of device memory for each direction with `NvcompAns`, 65 MiB with `NvcompLz4`,
///          beside the allocator's capacity, from the time on that it is first chosen.
template <class Compressor>
struct CudaBytePlanes : Identity {
  [[nodiscard]] static constexpr std::string_view name() noexcept { return Compressor::name(); }
  [[nodiscard]] static std::size_t stream_bytes(std::size_t bytes) noexcept {
    return detail::most_planed_bytes(bytes);
  }
  /// @throws DeviceError
  [[nodiscard]] static std::size_t scratch_bytes(CudaApi& device) {
    std::size_t bytes = 0;
    device.enqueue_kernels([&] {
      cuda_check(detail::load_kernels<detail::MakeSpare,
                                      detail::SplitPlanes,
                                      detail::PlacePlanes,
                                      detail::WritePlanes,
                                      detail::FetchPlanes,
                                      detail::JoinPlanes>());
      bytes = Planes::scratch_bytes();
    });
    return bytes;
  }
  [[nodiscard]] static std::size_t stored_bytes(SlotMemory slot) noexcept {
    return detail::stored_in_slot(slot);
  }

  static void encode_on(CudaApi& device,
                        cudaStream_t stream,
                        std::span<std::byte const> from,
                        SlotMemory slot,
                        std::span<std::byte> scratch) {
    device.enqueue_kernels([&] {
      Planes::encode(detail::CudaLaunch{stream}, from, detail::slot_on_gpu(slot), scratch);
    });
  }
  static void decode_on(CudaApi& device,
                        cudaStream_t stream,
                        SlotMemory slot,
                        std::span<std::byte> to,
                        std::span<std::byte> scratch) {
    device.enqueue_kernels([&] {
      Planes::decode(detail::CudaLaunch{stream}, detail::slot_on_gpu(slot), to, scratch);
    });
  }

 private:
  using Planes = detail::PlaneCodec<Compressor>;
};

static_assert(StreamCodec<CudaBytePlanes<NvcompAns>, CudaApi>);
static_assert(StreamCodec<CudaBytePlanes<NvcompLz4>, CudaApi>);

}  // namespace spillway
