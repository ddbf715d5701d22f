// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Codecs that run on a GPU, on the stream of the copy that they replace. Any C++20 compiler can
/// compile this header. A program that uses one of these codecs also needs one source file that
/// nvcc compiles and that includes `<spillway/cuda_kernels.cuh>`, which defines the kernels.

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

/// The calls by which `HostSwapPool` runs a codec on a GPU (`StreamCodec`), for a codec that
/// encodes each stripe of a block by itself. The GPU codecs below derive from it.
template <class Stripe>
struct CudaStripes {
  [[nodiscard]] static std::size_t stream_bytes(std::size_t bytes) noexcept {
    return most_striped_bytes(bytes);
  }
  /// Returns 0: the kernels work in the shared memory of their thread blocks and need no scratch
  /// memory. The pool calls this when the codec is chosen, and the call also loads the kernels.
  /// @throws CudaError
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

/// `ZeroBitmap`, run by kernels on a GPU: with `CudaApi`, blocks are encoded on their way into the
/// pinned tier of the host pool and decoded on their way back, so fewer bytes cross the link. On
/// other devices, and in the other tiers, it behaves as `ZeroBitmap`.
///
/// Example: `memory.set_codec<CudaZeroBitmap>(activation, layer);`
///
/// Streams  three kernels write a block to the host and one kernel reads it back, on the stream on
///          which it would otherwise be copied. The kernels access pinned memory directly. They
///          occupy multiprocessors, which are then not available to the program's kernels.
class CudaZeroBitmap : public ZeroBitmap, public detail::CudaStripes<detail::ZeroBitmapStripe> {};

/// `AsBfloat16`, run by kernels on a GPU in the same way as `CudaZeroBitmap`.
struct CudaAsBfloat16 : AsBfloat16, detail::CudaStripes<detail::Bfloat16Stripe> {};

static_assert(StreamCodec<CudaZeroBitmap, CudaApi>);
static_assert(StreamCodec<CudaAsBfloat16, CudaApi>);

}  // namespace spillway
