// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/codec.hpp>
#include <spillway/core/streaming_store.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#if defined(__x86_64__)
#  include <tmmintrin.h>
#endif

namespace spillway {

#if defined(__x86_64__)
namespace detail {

/// Byte shuffles (`pshufb`) for four elements of 32 bits, one of each kind for every value of the
/// four bits that say which elements are not 0. `pack` moves those to the front, `unpack` moves
/// them back and makes the others 0, and `bytes` says how many bytes they are.
struct PackShuffles {
  std::array<std::array<std::uint8_t, 16>, 16> pack{};
  std::array<std::array<std::uint8_t, 16>, 16> unpack{};
  std::array<std::uint8_t, 16> bytes{};

  constexpr PackShuffles() noexcept {
    for (unsigned set = 0; set < 16; ++set) {
      pack[set].fill(0x80);  // a shuffle makes such a byte 0
      unpack[set].fill(0x80);
      std::uint8_t packed = 0;
      for (std::uint8_t at = 0; at < 16; ++at) {
        if ((set >> at / 4U & 1U) != 0) {
          pack[set][packed] = at;
          unpack[set][at] = packed++;
        }
      }
      bytes[set] = packed;
    }
  }
};

}  // namespace detail
#endif

/// A lossless codec for 32-bit elements of which many are 0, such as activations after ReLU: it
/// stores a bitmap of which elements are not 0, and then these elements. A -0.0 counts as not 0 and
/// is preserved.
///
/// After Rhu et al., Compressing DMA Engine (HPCA 2018). With a share `z` of zeros, n bytes become
/// n (1 - z + 1/32). Where that is more than n, the pool keeps the bytes as they are.
///
/// Example: the elements 0 7 0 0 5 become the bits 01001 and the elements 7 5.
class ZeroBitmap {
 public:
  static constexpr bool is_lossless = true;

  [[nodiscard]] static constexpr std::string_view name() noexcept { return "zero_bitmap"; }
  /// The bitmap is made of whole words, and elements are stored four at once.
  [[nodiscard]] static constexpr std::size_t worst_bytes(std::size_t bytes) noexcept {
    return bitmap_bytes(bytes) + bytes + store_bytes;
  }

  [[nodiscard]] std::size_t encode(std::span<std::byte const> from,
                                   std::span<std::byte> to) const noexcept {
    std::byte const* in = from.data();
    std::byte* out = to.data() + bitmap_bytes(from.size());
    std::byte* map = to.data();
    std::size_t elements = from.size() / element_bytes;
    Packing const& packing = Packing::of_machine();
    for (; elements >= 64; elements -= 64, in += 64 * element_bytes, map += word_bytes) {
      std::uint64_t const word = packing.pack(in, out);
      std::memcpy(map, &word, word_bytes);
      out += element_bytes * static_cast<std::size_t>(std::popcount(word));
    }
    if (elements > 0) {
      std::uint64_t word = 0;
      for (unsigned i = 0; i < elements; ++i, in += element_bytes) {
        word |= std::uint64_t{append(in, out)} << i;
      }
      std::memcpy(map, &word, word_bytes);
    }
    std::copy(in, in + from.size() % element_bytes, out);
    return static_cast<std::size_t>(out - to.data()) + from.size() % element_bytes;
  }

  [[nodiscard]] bool decode(std::span<std::byte const> from,
                            std::span<std::byte> to) const noexcept {
    std::size_t const elements = to.size() / element_bytes;
    std::size_t const tail = to.size() % element_bytes;
    if (from.size() < bitmap_bytes(to.size()) + tail) {
      return false;
    }
    std::byte const* map = from.data();
    std::byte const* in = map + bitmap_bytes(to.size());
    std::byte const* const end = from.data() + from.size() - tail;
    if (!matches(map, elements, static_cast<std::size_t>(end - in))) {
      return false;
    }
    std::byte* out = to.data();
    Packing const& packing = Packing::of_machine();
    auto* const unpack =
        detail::is_streamable(out, to.size()) ? packing.unpack_streaming : packing.unpack;
    for (std::size_t left = elements; left > 0; map += word_bytes) {
      std::uint64_t word = 0;
      std::memcpy(&word, map, word_bytes);
      std::size_t const bytes = element_bytes * static_cast<std::size_t>(std::popcount(word));
      if (left >= 64 && static_cast<std::size_t>(end - in) >= bytes + store_bytes) {
        unpack(word, in, out);
        in += bytes;
        out += 64 * element_bytes;
        left -= 64;
        continue;
      }
      for (unsigned i = 0; i < 64 && left > 0; ++i, --left, out += element_bytes) {
        bool const is_there = (word >> i & 1U) != 0;
        std::uint32_t element = 0;
        std::memcpy(&element, is_there ? in : zeros.data(), element_bytes);
        std::memcpy(out, &element, element_bytes);
        in += is_there ? element_bytes : 0;
      }
    }
    std::copy(in, in + tail, out);
    detail::end_streaming();
    return true;
  }

 private:
  static constexpr std::size_t element_bytes = 4;
  static constexpr std::size_t word_bytes = 8;    // of the bitmap, for 64 elements
  static constexpr std::size_t store_bytes = 16;  // four elements
  static constexpr std::array<std::byte, element_bytes> zeros{};

  [[nodiscard]] static constexpr std::size_t bitmap_bytes(std::size_t bytes) noexcept {
    return (bytes / element_bytes + 63) / 64 * word_bytes;
  }

  /// Whether as many elements follow the bitmap as it has bits set, and no bit is set after the
  /// last element.
  [[nodiscard]] static bool
  matches(std::byte const* map, std::size_t elements, std::size_t stored_bytes) noexcept {
    std::size_t count = 0;
    for (std::size_t left = elements; left > 0; map += word_bytes) {
      std::uint64_t word = 0;
      std::memcpy(&word, map, word_bytes);
      if (left < 64 && word >> left != 0) {
        return false;
      }
      count += static_cast<std::size_t>(std::popcount(word));
      left -= left < 64 ? left : 64;
    }
    return stored_bytes == count * element_bytes;
  }

  /// Copies an element to `out`, and moves that on if the element is not 0.
  static bool append(std::byte const* in, std::byte*& out) noexcept {
    std::uint32_t element = 0;
    std::memcpy(&element, in, element_bytes);
    std::memcpy(out, &element, element_bytes);
    out += element != 0 ? element_bytes : 0;
    return element != 0;
  }

  /// Packs 64 elements, and returns which of them are not 0; the reverse. Both may write or read
  /// `store_bytes` more than they need.
  struct Packing {
    std::uint64_t (*pack)(std::byte const* in, std::byte* out) noexcept;
    void (*unpack)(std::uint64_t word, std::byte const* in, std::byte* out) noexcept;
    void (*unpack_streaming)(std::uint64_t word, std::byte const* in, std::byte* out) noexcept;

    [[nodiscard]] static Packing const& of_machine() noexcept {
#if defined(__x86_64__)
      static constexpr Packing by_four{
          &pack_by_four, &unpack_by_four<false>, &unpack_by_four<true>};
      if (__builtin_cpu_supports("ssse3") != 0) {
        return by_four;
      }
#endif
      static constexpr Packing by_one{&pack_by_one, &unpack_by_one, &unpack_by_one};
      return by_one;
    }
  };

  static std::uint64_t pack_by_one(std::byte const* in, std::byte* out) noexcept {
    std::uint64_t word = 0;
    for (unsigned i = 0; i < 64; ++i, in += element_bytes) {
      word |= std::uint64_t{append(in, out)} << i;
    }
    return word;
  }
  static void unpack_by_one(std::uint64_t word, std::byte const* in, std::byte* out) noexcept {
    for (unsigned i = 0; i < 64; ++i, word >>= 1U, out += element_bytes) {
      std::uint32_t element = 0;
      std::memcpy(&element, in, element_bytes);
      element &= 0U - static_cast<std::uint32_t>(word & 1U);
      std::memcpy(out, &element, element_bytes);
      in += element_bytes * (word & 1U);
    }
  }

#if defined(__x86_64__)
  static constexpr detail::PackShuffles shuffles{};

  static __m128i load(void const* from) noexcept {
    return _mm_loadu_si128(static_cast<__m128i const*>(from));
  }
  [[gnu::target("ssse3")]] static std::uint64_t pack_by_four(std::byte const* in,
                                                             std::byte* out) noexcept {
    std::uint64_t word = 0;
    for (unsigned i = 0; i < 64; i += 4, in += store_bytes) {
      __builtin_prefetch(in + detail::prefetch_bytes);
      __m128i const four = load(in);
      __m128i const is_zero = _mm_cmpeq_epi32(four, _mm_setzero_si128());
      auto const set = 15U ^ static_cast<unsigned>(_mm_movemask_ps(_mm_castsi128_ps(is_zero)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                       _mm_shuffle_epi8(four, load(shuffles.pack[set].data())));
      out += shuffles.bytes[set];
      word |= std::uint64_t{set} << i;
    }
    return word;
  }
  template <bool is_streaming>
  [[gnu::target("ssse3")]] static void
  unpack_by_four(std::uint64_t word, std::byte const* in, std::byte* out) noexcept {
    for (unsigned i = 0; i < 64; i += 4, word >>= 4U, out += store_bytes) {
      auto const set = static_cast<unsigned>(word & 15U);
      __m128i const four = _mm_shuffle_epi8(load(in), load(shuffles.unpack[set].data()));
      if constexpr (is_streaming) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(out), four);
      } else {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), four);
      }
      in += shuffles.bytes[set];
    }
  }
#endif
};

}  // namespace spillway
