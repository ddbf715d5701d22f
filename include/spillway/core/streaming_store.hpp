// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#  include <emmintrin.h>
#endif

namespace spillway::detail {

// Streaming stores go past the caches, as those of a large `memcpy` do: the processor need not read
// a line before it is overwritten, which is a third of what a copy moves, and other data stays in
// the caches. They are worth it for bytes that are not read soon. Where the processor has no such
// stores, nothing is streamable and copies are those of `memcpy`. After streaming stores, and
// before other threads may read the bytes, `end_streaming` must be called.

/// The unit that one streaming store writes, at an address that is a multiple of its size.
inline constexpr std::size_t streaming_unit_bytes = 16;

/// How far ahead of its reads a loop asks for memory that is in no cache. By itself a processor
/// asks for nothing beyond the page that it reads.
inline constexpr std::size_t prefetch_bytes = 4096;

/// Whether `bytes` bytes at `to` are worth being stored past the caches, unit by unit.
[[nodiscard]] inline bool is_streamable([[maybe_unused]] void const* to,
                                        [[maybe_unused]] std::size_t bytes) noexcept {
#if defined(__SSE2__)
  return bytes >= 16384 && reinterpret_cast<std::uintptr_t>(to) % streaming_unit_bytes == 0;
#else
  return false;
#endif
}

inline void end_streaming() noexcept {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

/// As `memcpy`, past the caches if that is worth it.
inline void copy_streaming(std::byte* to, std::byte const* from, std::size_t bytes) noexcept {
#if defined(__SSE2__)
  std::size_t const skew = (0 - reinterpret_cast<std::uintptr_t>(to)) % streaming_unit_bytes;
  if (bytes >= skew && is_streamable(to + skew, bytes - skew)) {
    std::memcpy(to, from, skew);
    to += skew;
    from += skew;
    bytes -= skew;
    for (; bytes >= 64; bytes -= 64, to += 64, from += 64) {
      auto* const out = reinterpret_cast<__m128i*>(to);
      auto const* const in = reinterpret_cast<__m128i const*>(from);
      __m128i const a = _mm_loadu_si128(in);
      __m128i const b = _mm_loadu_si128(in + 1);
      __m128i const c = _mm_loadu_si128(in + 2);
      __m128i const d = _mm_loadu_si128(in + 3);
      _mm_stream_si128(out, a);
      _mm_stream_si128(out + 1, b);
      _mm_stream_si128(out + 2, c);
      _mm_stream_si128(out + 3, d);
    }
    end_streaming();
  }
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace spillway::detail
