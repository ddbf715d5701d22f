// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/codec.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/streaming_store.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#if defined(__SSE2__)
#  include <emmintrin.h>
#endif

namespace spillway {

namespace detail {

/// The bits of a float32 infinity without sign. Those of NaNs are larger numbers.
inline constexpr std::uint32_t float32_infinity = 0x7F800000;

/// The bits of the bfloat16 that is nearest to a float32, ties to even. A NaN stays one.
[[nodiscard]] SPILLWAY_HOST_DEVICE constexpr std::uint16_t
bfloat16_bits(std::uint32_t bits) noexcept {
  if ((bits & 0x7FFFFFFFU) > float32_infinity) {
    return static_cast<std::uint16_t>(bits >> 16U | 0x40U);  // quiet, and not an infinity
  }
  return static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16U & 1U)) >> 16U);
}

}  // namespace detail

/// A codec that loses bits: it copies and stores float32 as bfloat16, in half the bytes.
///
/// Rounds to the nearest bfloat16, ties to even. Zeros keep their sign, infinities stay, and a NaN
/// stays a NaN. Values above the largest bfloat16 become infinite: they are within 0.4 % of the
/// largest float32. For blocks of float32 only: other bytes are changed, too.
struct AsBfloat16 {
  using element_type = float;

  static constexpr bool is_lossless = false;

  [[nodiscard]] static constexpr std::string_view name() noexcept { return "bfloat16"; }
  /// This is the exact size. Bytes after the last whole float32 are stored unchanged.
  [[nodiscard]] static constexpr std::size_t worst_bytes(std::size_t bytes) noexcept {
    return bytes / 4 * 2 + bytes % 4;
  }

  [[nodiscard]] std::size_t encode(std::span<std::byte const> from,
                                   std::span<std::byte> to) const noexcept {
    std::byte const* in = from.data();
    std::byte const* const end = in + from.size() / 4 * 4;
    std::byte* out = to.data();
#if defined(__SSE2__)
    for (; end - in >= 32; in += 32, out += 16) {
      __builtin_prefetch(in + detail::prefetch_bytes);
      store(out, _mm_packs_epi32(rounded(load(in)), rounded(load(in + 16))));
    }
#endif
    for (; in != end; in += 4, out += 2) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, in, 4);
      std::uint16_t const short_bits = detail::bfloat16_bits(bits);
      std::memcpy(out, &short_bits, 2);
    }
    std::copy(in, in + from.size() % 4, out);
    return worst_bytes(from.size());
  }

  [[nodiscard]] bool decode(std::span<std::byte const> from,
                            std::span<std::byte> to) const noexcept {
    if (from.size() != worst_bytes(to.size())) {
      return false;
    }
    std::byte const* in = from.data();
    std::byte* out = to.data();
    std::byte* const end = out + to.size() / 4 * 4;
#if defined(__SSE2__)
    auto const widen = [&](auto put) {
      for (; end - out >= 32; in += 16, out += 32) {
        __m128i const halves = load(in);
        put(out, _mm_unpacklo_epi16(_mm_setzero_si128(), halves));
        put(out + 16, _mm_unpackhi_epi16(_mm_setzero_si128(), halves));
      }
    };
    if (detail::is_streamable(out, to.size())) {
      widen([](std::byte* at, __m128i value) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(at), value);
      });
      detail::end_streaming();
    } else {
      widen([](std::byte* at, __m128i value) { store(at, value); });
    }
#endif
    for (; out != end; in += 2, out += 4) {
      std::uint16_t short_bits = 0;
      std::memcpy(&short_bits, in, 2);
      std::uint32_t const bits = std::uint32_t{short_bits} << 16U;
      std::memcpy(out, &bits, 4);
    }
    std::copy(in, in + to.size() % 4, out);
    return true;
  }

 private:
#if defined(__SSE2__)
  static __m128i load(std::byte const* from) noexcept {
    return _mm_loadu_si128(reinterpret_cast<__m128i const*>(from));
  }
  static void store(std::byte* to, __m128i value) noexcept {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), value);
  }
  /// As `bfloat16_bits`, four at once. Each result is a 16-bit number with its sign, so that
  /// packing, which saturates, changes none.
  static __m128i rounded(__m128i bits) noexcept {
    __m128i const is_nan =
        _mm_cmpgt_epi32(_mm_and_si128(bits, _mm_set1_epi32(0x7FFFFFFF)),
                        _mm_set1_epi32(static_cast<int>(detail::float32_infinity)));
    __m128i const is_odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
    __m128i const nearest = _mm_add_epi32(_mm_add_epi32(bits, _mm_set1_epi32(0x7FFF)), is_odd);
    __m128i const quiet = _mm_or_si128(bits, _mm_set1_epi32(0x400000));
    __m128i const chosen =
        _mm_or_si128(_mm_and_si128(is_nan, quiet), _mm_andnot_si128(is_nan, nearest));
    return _mm_srai_epi32(chosen, 16);
  }
#endif
};

}  // namespace spillway
