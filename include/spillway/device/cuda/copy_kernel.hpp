// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>
#include <spillway/core/kernel.hpp>
#include <spillway/core/types.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace spillway {

namespace detail {

/// The kernel of `CudaCopyKernel`, which copies many blocks. The blocks are its arguments.
///
/// @tparam most  the most blocks that one launch copies
template <unsigned most>
struct CopyBlocks {
  using Memory = NoMemory;

  static constexpr unsigned most_blocks = most;
  static constexpr std::uint32_t piece_bytes = 8 * 1024;  // copied by one team at a time
  static constexpr std::uint32_t most_pieces = 1U << 30U;

  struct Block {
    std::byte* to;
    std::byte const* from;
    std::uint64_t bytes;
  };

  [[nodiscard]] static constexpr std::uint64_t pieces_of(std::uint64_t bytes) noexcept {
    return (bytes + piece_bytes - 1) / piece_bytes;
  }

  [[nodiscard]] bool takes(std::uint64_t bytes) const noexcept {
    return count < most_blocks && (count == 0 || pieces_of(bytes) <= most_pieces - pieces);
  }
  /// @param bytes  more than 0
  void add(void* to, void const* from, std::uint64_t bytes) noexcept {
    blocks[count] = {static_cast<std::byte*>(to), static_cast<std::byte const*>(from), bytes};
    first_piece[count++] = pieces;
    pieces += static_cast<std::uint32_t>(pieces_of(bytes));
  }
  /// To be called when all blocks have been added. @returns the number of teams to launch
  [[nodiscard]] std::uint32_t share_among(std::uint32_t most_teams) noexcept {
    teams = pieces < most_teams ? pieces : most_teams;
    return teams;
  }

  template <class Team>
  SPILLWAY_KERNEL void operator()(Team const& team, Memory& /*memory*/, std::uint64_t i) const {
    for (; i < pieces; i += teams) {
      unsigned block = 0;
      for (unsigned above = count;
           above - block > 1;) {  // the last block that begins at piece `i` or before
        unsigned const middle = (block + above) / 2;
        (first_piece[middle] <= i ? block : above) = middle;
      }
      std::uint64_t const at = (i - first_piece[block]) * piece_bytes;
      std::uint64_t const left = blocks[block].bytes - at;
      copy(team,
           blocks[block].to + at,
           blocks[block].from + at,
           left < piece_bytes ? static_cast<unsigned>(left) : piece_bytes);
    }
  }

  Block blocks[most_blocks];
  std::uint32_t first_piece[most_blocks];
  std::uint32_t pieces = 0;
  std::uint32_t teams = 0;
  unsigned count = 0;

 private:
  struct alignas(16) Unit {
    std::uint32_t words[4];
  };
  /// The units that a thread reads before it writes the first of them, so that enough reads are
  /// under way to hide the latency of memory.
  static constexpr unsigned depth = 4;

  template <class Team>
  SPILLWAY_KERNEL static void
  copy(Team const& team, std::byte* to, std::byte const* from, unsigned bytes) {
    bool const is_aligned =
        (reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from)) %
            sizeof(Unit) ==
        0;
    constexpr unsigned unit_bytes = sizeof(Unit);
    unsigned const units = is_aligned ? bytes / unit_bytes : 0;
    auto* const target = reinterpret_cast<Unit*>(to);
    auto const* const source = reinterpret_cast<Unit const*>(from);
    team.each([&](unsigned thread) {
      unsigned unit = thread;
      for (; unit + (depth - 1) * Team::size < units; unit += depth * Team::size) {
        Unit read[depth];
        for (unsigned k = 0; k < depth; ++k) {
          read[k] = source[unit + k * Team::size];
        }
        for (unsigned k = 0; k < depth; ++k) {
          target[unit + k * Team::size] = read[k];
        }
      }
      for (; unit < units; unit += Team::size) {
        target[unit] = source[unit];
      }
      for (unsigned at = units * unit_bytes + thread; at < bytes; at += Team::size) {
        to[at] = from[at];
      }
    });
  }
};
/// Fits into the 4 KiB that every GPU takes as arguments of a kernel.
using FewCopyBlocks = CopyBlocks<128>;
static_assert(sizeof(FewCopyBlocks) <= 4096);

#if CUDART_VERSION >= 13000
/// Fits into the 32764 bytes that the GPUs which CUDA 13 supports take.
using ManyCopyBlocks = CopyBlocks<1000>;
static_assert(sizeof(ManyCopyBlocks) <= 32764);
#else
using ManyCopyBlocks = FewCopyBlocks;
#endif

/// The most teams for copies of this kind. A few are enough to keep a link busy; the other
/// multiprocessors are left to other kernels.
[[nodiscard]] constexpr std::uint32_t most_copy_teams(CopyKind kind) noexcept {
  return kind == CopyKind::on_device ? std::uint32_t{1} << 30U : 64;
}

}  // namespace detail

/// Copies many blocks by a kernel, for `CudaOptions::copy_kernel`.
///
/// The kernel is in `<spillway/cuda_kernels.cuh>`, which nvcc compiles; see there how a program of
/// other compilers gets it.
///
/// Example: `CudaApi device{0, {.copy_kernel = &CudaCopyKernel::enqueue}};`
template <class = detail::Lazily>
struct BasicCudaCopyKernel {
  /// Enqueues the copies, all of one kind, on `stream` of the current device. Host memory must be
  /// pinned, and its address on the device must be that on the host. A call without copies only
  /// loads the kernels, which CUDA otherwise does at their first launch.
  ///
  /// @returns cudaSuccess; an error if the kernel was not compiled for this device, or if CUDA
  ///          refuses a launch, and then some of the copies may have been enqueued
  [[nodiscard]] static cudaError_t enqueue(std::span<void* const> to,
                                           std::span<void const* const> from,
                                           std::span<std::size_t const> sizes_bytes,
                                           CopyKind kind,
                                           cudaStream_t stream) noexcept;
};

using CudaCopyKernel = BasicCudaCopyKernel<>;

}  // namespace spillway
