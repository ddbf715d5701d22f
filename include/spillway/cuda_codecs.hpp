// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Codecs that run on a GPU, on the stream of the copy that they replace. Any compiler takes this
/// header; a program that uses a codec has one source file for nvcc that includes
/// `<spillway/cuda_kernels.cuh>`, which has the kernels.

#include <spillway/concepts/codec.hpp>
#include <spillway/device/cuda/cuda_api.hpp>
#include <spillway/policy/codec/as_bfloat16.hpp>
#include <spillway/policy/codec/kernel_slot.hpp>
#include <spillway/policy/codec/stripe_kernels.hpp>
#include <spillway/policy/codec/zero_bitmap.hpp>

#include <cstddef>
#include <span>

namespace spillway {

namespace detail {

/// A codec of stripes as `HostSwapPool` uses it on a GPU.
template <class Stripe>
struct CudaStripes {
  [[nodiscard]] static std::size_t stream_bytes(std::size_t bytes) noexcept {
    return most_striped_bytes(bytes);
  }
  /// None: the threads that encode a stripe share all the memory that they need. The pool asks when
  /// the codec is chosen, and the kernels are loaded then. @throws CudaError
  [[nodiscard]] static std::size_t scratch_bytes(CudaApi& device);
  [[nodiscard]] static std::size_t stored_bytes(SlotMemory slot) noexcept {
    return stored_in_slot(slot);
  }
  /// Whether the kernels were compiled for this device. @throws CudaError
  [[nodiscard]] static bool runs_on(CudaApi& device);

  static void encode_on(CudaApi& device,
                        cudaStream_t stream,
                        std::span<std::byte const> from,
                        SlotMemory slot,
                        std::span<std::byte> scratch);
  static void decode_on(CudaApi& device,
                        cudaStream_t stream,
                        SlotMemory slot,
                        std::span<std::byte> to,
                        std::span<std::byte> scratch);
};

}  // namespace detail

/// `ZeroBitmap` by kernels of a GPU: on a `CudaApi` blocks are encoded on their way into pinned
/// memory, and decoded on their way back. Elsewhere it is `ZeroBitmap`.
///
/// Example: `memory.set_codec<CudaZeroBitmap>(activation, layer);`
///
/// Streams  three kernels write a block, one reads it, in place of a copy on the same stream. They
///          read and write pinned memory themselves, and use the multiprocessors that other kernels
///          want.
class CudaZeroBitmap : public ZeroBitmap, public detail::CudaStripes<detail::ZeroBitmapStripe> {};

/// `AsBfloat16` by kernels of a GPU, in the same way.
struct CudaAsBfloat16 : AsBfloat16, detail::CudaStripes<detail::Bfloat16Stripe> {};

static_assert(StreamCodec<CudaZeroBitmap, CudaApi>);
static_assert(StreamCodec<CudaAsBfloat16, CudaApi>);

}  // namespace spillway
