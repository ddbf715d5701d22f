// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The kernels of `<spillway/cuda_codecs.hpp>`. Only nvcc compiles this. A source file from which
/// sources of other compilers get them says `SPILLWAY_INSTANTIATE_CUDA_CODECS;` besides.

#include <spillway/concepts/codec.hpp>
#include <spillway/cuda_codecs.hpp>
#include <spillway/device/cuda/cuda_api.hpp>
#include <spillway/device/cuda/cuda_context.hpp>
#include <spillway/policy/codec/stripe_kernels.hpp>

#include <cub/block/block_scan.cuh>

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace spillway {

namespace detail {

/// The threads of a block.
struct CudaTeam {
  static constexpr unsigned size = most_map_words;

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

template <class Stripe>
__global__ void measure_stripes(std::byte const* from, std::uint64_t bytes, KernelSlot slot) {
  __shared__ StripeMemory memory;
  StripeKernels<Stripe>::measure_stripe(CudaTeam{}, memory, from, bytes, slot, blockIdx.x);
}
template <class Stripe>
__global__ void place_stripes(std::uint64_t bytes, KernelSlot slot) {
  __shared__ std::uint64_t sums[CudaTeam::size];
  StripeKernels<Stripe>::place_stripes(CudaTeam{}, sums, bytes, slot);
}
template <class Stripe>
__global__ void write_stripes(std::byte const* from, std::uint64_t bytes, KernelSlot slot) {
  __shared__ StripeMemory memory;
  StripeKernels<Stripe>::write_stripe(CudaTeam{}, memory, from, bytes, slot, blockIdx.x);
}
template <class Stripe>
__global__ void read_stripes(KernelSlot slot, std::byte* to, std::uint64_t bytes) {
  __shared__ StripeMemory memory;
  StripeKernels<Stripe>::read_stripe(CudaTeam{}, memory, slot, to, bytes, blockIdx.x);
}

/// Launches a kernel of teams. It asks for the status of this launch: the last error may be the
/// program's. @throws CudaError
template <class... Parameters>
void launch_teams(void (*kernel)(Parameters...),
                  std::uint64_t teams,
                  cudaStream_t stream,
                  std::type_identity_t<Parameters>... arguments) {
  void* pointers[] = {&arguments...};
  cuda_check(cudaLaunchKernel(reinterpret_cast<void const*>(kernel),
                              dim3{static_cast<unsigned>(teams)},
                              dim3{CudaTeam::size},
                              pointers,
                              0,
                              stream));
}

template <class Stripe>
bool CudaStripes<Stripe>::runs_on(CudaApi& device) {
  bool has_image = false;
  device.enqueue_kernels([&] {
    cudaFuncAttributes attributes;
    cudaError_t const status = cudaFuncGetAttributes(&attributes, &read_stripes<Stripe>);
    cuda_forgive(status);
    has_image = status == cudaSuccess;
  });
  return has_image;
}

template <class Stripe>
void CudaStripes<Stripe>::encode_on(CudaApi& device,
                                    cudaStream_t stream,
                                    std::span<std::byte const> from,
                                    SlotMemory slot) {
  device.enqueue_kernels([&] {
    KernelSlot const pieces = pieces_of(slot);
    std::uint64_t const stripes = stripes_of(from.size());
    if (stripes != 0) {
      launch_teams(&measure_stripes<Stripe>, stripes, stream, from.data(), from.size(), pieces);
    }
    launch_teams(&place_stripes<Stripe>, 1, stream, from.size(), pieces);
    if (stripes != 0) {
      launch_teams(&write_stripes<Stripe>, stripes, stream, from.data(), from.size(), pieces);
    }
  });
}

template <class Stripe>
void CudaStripes<Stripe>::decode_on(CudaApi& device,
                                    cudaStream_t stream,
                                    SlotMemory slot,
                                    std::span<std::byte> to) {
  device.enqueue_kernels([&] {
    std::uint64_t const stripes = stripes_of(to.size());
    if (stripes != 0) {
      launch_teams(&read_stripes<Stripe>, stripes, stream, pieces_of(slot), to.data(), to.size());
    }
  });
}

template <class Stripe>
KernelSlot CudaStripes<Stripe>::pieces_of(SlotMemory slot) {
  KernelSlot pieces;
  for (std::span<std::byte> const piece : slot) {
    void* memory = nullptr;
    cuda_check(cudaHostGetDevicePointer(&memory, piece.data(), 0));
    pieces.add(static_cast<std::byte*>(memory), piece.size());
  }
  return pieces;
}

}  // namespace detail

}  // namespace spillway

#define SPILLWAY_INSTANTIATE_CUDA_CODECS                                                           \
  template class spillway::detail::CudaStripes<spillway::detail::ZeroBitmapStripe>;                \
  template class spillway::detail::CudaStripes<spillway::detail::Bfloat16Stripe>
