// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The library's kernels: of `CudaCopyKernel` and of `<spillway/cuda_codecs.hpp>`. Only nvcc
/// compiles this. A source file from which sources of other compilers get them says
/// `SPILLWAY_INSTANTIATE_CUDA_KERNELS;` besides.

#include <spillway/concepts/codec.hpp>
#include <spillway/core/kernel.hpp>
#include <spillway/core/types.hpp>
#include <spillway/cuda_codecs.hpp>
#include <spillway/device/cuda/copy_kernel.hpp>
#include <spillway/device/cuda/cuda_api.hpp>
#include <spillway/device/cuda/cuda_context.hpp>
#include <spillway/policy/codec/kernel_slot.hpp>
#include <spillway/policy/codec/stripe_kernels.hpp>

#include <cub/block/block_scan.cuh>

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace spillway {

namespace detail {

/// The threads of a block.
struct CudaTeam {
  static constexpr unsigned size = team_size;

  template <class Function>
  __device__ void each(Function function) const {
    function(threadIdx.x);
    __syncthreads();
  }
  template <class T>
  __device__ T exclusive_scan(T* values) const {
    using Scan = cub::BlockScan<T, size>;
    __shared__ typename Scan::TempStorage storage;
    T before{};
    T all{};
    Scan{storage}.ExclusiveSum(values[threadIdx.x], before, all);
    values[threadIdx.x] = before;
    __syncthreads();
    return all;
  }
};

template <class Kernel>
__global__ void run_teams(__grid_constant__ Kernel const kernel) {
  __shared__ typename Kernel::Memory memory;
  kernel(CudaTeam{}, memory, blockIdx.x);
}

/// Launches kernels on a stream. It asks for the status of its launches: the last error may be the
/// program's.
struct CudaLaunch {
  /// @throws CudaError
  template <class Kernel>
  void operator()(Kernel kernel, std::uint64_t teams) const {
    cuda_check(try_launch(kernel, teams));
  }
  template <class Kernel>
  [[nodiscard]] cudaError_t try_launch(Kernel& kernel, std::uint64_t teams) const noexcept {
    void* arguments[] = {&kernel};
    return cudaLaunchKernel(reinterpret_cast<void const*>(&run_teams<Kernel>),
                            dim3{static_cast<unsigned>(teams)},
                            dim3{CudaTeam::size},
                            arguments,
                            0,
                            stream);
  }

  cudaStream_t stream;
};

/// Loads kernels that CUDA would load at their first launch otherwise, which may wait until all
/// that runs on the device has ended, and which CUDA may refuse during a capture.
///
/// @returns cudaSuccess if they were all compiled for this device
template <class... Kernels>
[[nodiscard]] cudaError_t load_kernels() noexcept {
  CudaCaptureBystander const bystander;
  cudaError_t worst = cudaSuccess;
  cudaFuncAttributes attributes;
  for (auto const* const kernel : {reinterpret_cast<void const*>(&run_teams<Kernels>)...}) {
    cudaError_t const status = cudaFuncGetAttributes(&attributes, kernel);
    cuda_forgive(status);
    worst = status == cudaSuccess ? worst : status;
  }
  return worst;
}

/// A slot as kernels see it. @throws CudaError
inline KernelSlot slot_on_gpu(SlotMemory slot) {
  KernelSlot pieces;
  for (std::span<std::byte> const piece : slot) {
    void* memory = nullptr;
    cuda_check(cudaHostGetDevicePointer(&memory, piece.data(), 0));
    pieces.add(static_cast<std::byte*>(memory), piece.size());
  }
  return pieces;
}

template <class Stripe>
[[nodiscard]] cudaError_t load_stripe_kernels() noexcept {
  return load_kernels<MeasureStripes<Stripe>,
                      PlaceStripes,
                      WriteStripes<Stripe>,
                      ReadStripes<Stripe>>();
}

template <class Stripe>
bool CudaStripes<Stripe>::runs_on(CudaApi& device) {
  bool has_images = false;
  device.enqueue_kernels([&] { has_images = load_stripe_kernels<Stripe>() == cudaSuccess; });
  return has_images;
}

template <class Stripe>
std::size_t CudaStripes<Stripe>::scratch_bytes(CudaApi& device) {
  device.enqueue_kernels([] { cuda_check(load_stripe_kernels<Stripe>()); });
  return 0;
}

template <class Stripe>
void CudaStripes<Stripe>::encode_on(CudaApi& device,
                                    cudaStream_t stream,
                                    std::span<std::byte const> from,
                                    SlotMemory slot,
                                    std::span<std::byte> /*scratch*/) {
  device.enqueue_kernels(
      [&] { encode_stripes<Stripe>(CudaLaunch{stream}, from, slot_on_gpu(slot)); });
}

template <class Stripe>
void CudaStripes<Stripe>::decode_on(CudaApi& device,
                                    cudaStream_t stream,
                                    SlotMemory slot,
                                    std::span<std::byte> to,
                                    std::span<std::byte> /*scratch*/) {
  device.enqueue_kernels(
      [&] { decode_stripes<Stripe>(CudaLaunch{stream}, slot_on_gpu(slot), to); });
}

}  // namespace detail

namespace detail {

/// Copies as many as fit into one launch, from number `next` on, which it moves behind them.
template <class Blocks>
[[nodiscard]] cudaError_t launch_copies(std::span<void* const> to,
                                        std::span<void const* const> from,
                                        std::span<std::size_t const> sizes_bytes,
                                        CopyKind kind,
                                        cudaStream_t stream,
                                        std::size_t& next) noexcept {
  Blocks blocks;
  for (; next < to.size() && (sizes_bytes[next] == 0 || blocks.takes(sizes_bytes[next])); ++next) {
    if (sizes_bytes[next] != 0) {
      blocks.add(to[next], from[next], sizes_bytes[next]);
    }
  }
  if (blocks.count == 0) {
    return cudaSuccess;
  }
  std::uint32_t const teams = blocks.share_among(most_copy_teams(kind));
  return CudaLaunch{stream}.try_launch(blocks, teams);
}

}  // namespace detail

template <class T>
cudaError_t BasicCudaCopyKernel<T>::enqueue(std::span<void* const> to,
                                            std::span<void const* const> from,
                                            std::span<std::size_t const> sizes_bytes,
                                            CopyKind kind,
                                            cudaStream_t stream) noexcept {
  using detail::FewCopyBlocks;
  using detail::ManyCopyBlocks;
  if (to.empty()) {
    return detail::load_kernels<FewCopyBlocks, ManyCopyBlocks>();
  }
  cudaError_t status = cudaSuccess;
  for (std::size_t next = 0; next < to.size() && status == cudaSuccess;) {
    // Arguments take time to hand over, so few blocks do not go with the room for many.
    bool const are_few = to.size() - next <= FewCopyBlocks::most_blocks;
    status = are_few
                 ? detail::launch_copies<FewCopyBlocks>(to, from, sizes_bytes, kind, stream, next)
                 : detail::launch_copies<ManyCopyBlocks>(to, from, sizes_bytes, kind, stream, next);
  }
  return status;
}

}  // namespace spillway

#define SPILLWAY_INSTANTIATE_CUDA_KERNELS                                                          \
  template struct spillway::BasicCudaCopyKernel<>;                                                 \
  template struct spillway::detail::CudaStripes<spillway::detail::ZeroBitmapStripe>;               \
  template struct spillway::detail::CudaStripes<spillway::detail::Bfloat16Stripe>
