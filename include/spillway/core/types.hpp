// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>

#include <cstddef>
#include <cstdint>

namespace spillway {

/// Names one block for its whole life; stays valid when the block moves or leaves the device.
///
/// The low 32 bits are an index that is reused after the block is gone, the high 32 bits a
/// generation that never is, so a stale id is recognised. Generation 0 is never given out:
/// `BlockId{}` names nothing.
enum class BlockId : std::uint64_t {};

/// The table index of a block: small and dense, so policies can index arrays by it.
[[nodiscard]] constexpr std::uint32_t index_of_block(BlockId id) noexcept {
  return static_cast<std::uint32_t>(static_cast<std::uint64_t>(id));
}

/// Tells apart the blocks that have had the same index; 0 is never given out.
[[nodiscard]] constexpr std::uint32_t generation_of(BlockId id) noexcept {
  return static_cast<std::uint32_t>(static_cast<std::uint64_t>(id) >> 32U);
}

[[nodiscard]] constexpr BlockId make_block_id(std::uint32_t index,
                                              std::uint32_t generation) noexcept {
  return BlockId{(std::uint64_t{generation} << 32U) | index};
}

/// Where a block is.
///
/// - `device`: it has a range on the device, whether its bytes were written or not.
/// - `host`: it was swapped out; its bytes are in the host pool.
/// - `moving_out`, `moving_in`: the copy is enqueued and has not finished yet. In its decisions the
///   pager treats these as `host` and `device`.
/// - `none`: it has neither a range nor a copy on the host: it was not written yet, its recipe
///   makes its bytes, or they were lost.
enum class Residency : std::uint8_t { none, device, host, moving_out, moving_in };

/// How the holder of a lease uses the bytes. `write` discards the old contents.
enum class Access : std::uint8_t { read, write, read_write };

/// The direction of a copy. `to_host` and `to_device` expect pinned memory on the host side.
enum class CopyKind : std::uint8_t { to_host, to_device, on_device };

/// The memory of a device, as the device reports it.
struct MemoryInfo {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
};

/// A host function that a stream calls (`launch_host`), with one pointer as its argument.
using HostFunction = void (*)(void*) noexcept;

/// Rounds `n` up to a multiple of `multiple`, a power of two. `n + multiple` must not overflow.
[[nodiscard]] constexpr std::size_t round_up(std::size_t n, std::size_t multiple) noexcept {
  return (n + multiple - 1) & ~(multiple - 1);
}

/// The granule of every arena: sizes are rounded up to it and addresses are multiples of it.
inline constexpr std::size_t granule_bytes = 256;

// Not consteval: clang 14 leaves calls to consteval functions in templates for the linker.
inline namespace literals {
// NOLINTBEGIN(google-runtime-int)
constexpr std::size_t operator""_KiB(unsigned long long n) {
  return std::size_t(n) << 10U;
}
constexpr std::size_t operator""_MiB(unsigned long long n) {
  return std::size_t(n) << 20U;
}
constexpr std::size_t operator""_GiB(unsigned long long n) {
  return std::size_t(n) << 30U;
}
// NOLINTEND(google-runtime-int)
}  // namespace literals

}  // namespace spillway
