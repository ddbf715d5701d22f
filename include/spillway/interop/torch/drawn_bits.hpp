// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <type_traits>

#if defined(__SSE2__)
#  include <emmintrin.h>
#endif

namespace spillway::torch {

/// Stores elements that are all either 0 or one other value as one bit each. The results of drawing
/// from a Bernoulli distribution are such elements.
///
/// Drawing them again would draw the same random numbers one by one, at 6 ns each from a Mersenne
/// Twister. Unpacking the bits takes a fiftieth of that. The bits take up 1/32 of elements of four
/// bytes.
class DrawnBits {
 public:
  [[nodiscard]] static constexpr bool can_keep(std::size_t element_bytes) noexcept {
    return element_bytes == 1 || element_bytes == 2 || element_bytes == 4 || element_bytes == 8;
  }
  /// @param element_bytes  size of an element, for which `can_keep` must be true
  /// @returns nothing if there are more than two values, or if neither is 0
  [[nodiscard]] static std::optional<DrawnBits>
  of(void const* elements, std::size_t count, std::size_t element_bytes) {
    DrawnBits bits{count, element_bytes};
    bool const is_packed =
        bits.with_word([&](auto word) { return bits.try_pack<decltype(word)>(elements); });
    if (!is_packed) {
      return std::nullopt;
    }
    return bits;
  }

  /// Writes the elements again.
  void unpack(void* elements) const {
    (void)with_word([&](auto word) {
      unpack<decltype(word)>(elements);
      return true;
    });
  }

 private:
  static constexpr std::size_t in_byte = 8;

  DrawnBits(std::size_t count, std::size_t element_bytes)
      : count_{count},
        element_bytes_{element_bytes},
        bits_{new std::uint8_t[(count + in_byte - 1) / in_byte]} {}

  template <class Act>
  [[nodiscard]] bool with_word(Act const& act) const {
    switch (element_bytes_) {
    case 1:
      return act(std::uint8_t{});
    case 2:
      return act(std::uint16_t{});
    case 4:
      return act(std::uint32_t{});
    default:
      return act(std::uint64_t{});
    }
  }
  template <class Word>
  [[nodiscard]] static Word word_at(void const* elements, std::size_t i) noexcept {
    Word word{};
    std::memcpy(&word, static_cast<std::byte const*>(elements) + i * sizeof(Word), sizeof(Word));
    return word;
  }

  template <class Word>
  [[nodiscard]] bool try_pack(void const* elements) noexcept {
    Word value{};
    for (std::size_t i = 0; value == 0 && i < count_; ++i) {
      value = word_at<Word>(elements, i);
    }
    value_ = value;
    std::size_t i = 0;
#if defined(__SSE2__)
    if constexpr (std::is_same_v<Word, std::uint32_t>) {
      __m128i const zero = _mm_setzero_si128();
      __m128i const the_value = _mm_set1_epi32(static_cast<int>(value));
      __m128i are_known = _mm_cmpeq_epi32(zero, zero);
      auto const four_bits = [&](std::size_t first) noexcept {
        __m128i const four = _mm_loadu_si128(reinterpret_cast<__m128i const*>(
            static_cast<std::byte const*>(elements) + first * sizeof(Word)));
        __m128i const are_value = _mm_cmpeq_epi32(four, the_value);
        are_known = _mm_and_si128(are_known, _mm_or_si128(are_value, _mm_cmpeq_epi32(four, zero)));
        return static_cast<unsigned>(_mm_movemask_ps(_mm_castsi128_ps(are_value)));
      };
      for (; i + in_byte <= count_; i += in_byte) {
        bits_[i / in_byte] = static_cast<std::uint8_t>(four_bits(i) | four_bits(i + 4) << 4U);
      }
      if (_mm_movemask_epi8(are_known) != 0xFFFF) {
        return false;
      }
    }
#endif
    bool are_known = true;
    for (; i < count_; i += in_byte) {
      unsigned byte = 0;
      std::size_t const lanes = std::min(in_byte, count_ - i);
      for (std::size_t lane = 0; lane < lanes; ++lane) {
        Word const word = word_at<Word>(elements, i + lane);
        are_known = are_known && (word == 0 || word == value);
        byte |= static_cast<unsigned>(word == value) << lane;
      }
      bits_[i / in_byte] = static_cast<std::uint8_t>(byte);
    }
    return are_known;
  }

  /// Writes eight elements at once, from a table with the elements for each value of a byte.
  template <class Word>
  void unpack(void* elements) const {
    using Eight = std::array<Word, in_byte>;
    std::array<Eight, 256> table{};
    for (std::size_t byte = 0; byte < table.size(); ++byte) {
      for (std::size_t lane = 0; lane < in_byte; ++lane) {
        table[byte][lane] = static_cast<Word>((byte >> lane & 1U) != 0 ? value_ : 0);
      }
    }
    auto* to = static_cast<std::byte*>(elements);
    std::size_t const whole = count_ / in_byte;
    for (std::size_t i = 0; i < whole; ++i, to += sizeof(Eight)) {
      std::memcpy(to, table[bits_[i]].data(), sizeof(Eight));
    }
    if (std::size_t const rest = count_ % in_byte; rest != 0) {
      std::memcpy(to, table[bits_[whole]].data(), rest * sizeof(Word));
    }
  }

  std::size_t count_ = 0;
  std::size_t element_bytes_ = 0;
  std::uint64_t value_ = 0;  // 0 if all elements are zero
  std::unique_ptr<std::uint8_t[]> bits_;
};

}  // namespace spillway::torch
