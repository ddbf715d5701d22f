// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#  include <emmintrin.h>
#endif

namespace spillway::detail {

// Streaming stores bypass the caches, as those of a large `memcpy` do: the processor need not read
// a line before it overwrites it, which saves a third of the memory traffic of a copy, and other
// data stays in the caches. They are useful for bytes that are not read soon. On processors without
// them, `is_streamable` returns false and copies are made by `memcpy`. After streaming stores, and
// before other threads may read the bytes, `end_streaming` must be called.

/// The unit that one streaming store writes, at an address that is a multiple of its size.
inline constexpr std::size_t streaming_unit_bytes = 16;

/// How many bytes ahead of its reads a loop prefetches memory. The hardware prefetcher of a
/// processor does not go beyond the page that is being read.
inline constexpr std::size_t prefetch_bytes = 4096;

/// Returns whether `bytes` bytes at `to` should be written by streaming stores.
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

/// Copies as `memcpy` does, by streaming stores if these are useful.
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
