// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace spillway::detail {

/// Returns the size class of a number, which encodes its leading `SplitBits` + 1 bits and how many
/// bits follow. Each number below 2^SplitBits has a class of its own, and every power of two above
/// has 2^SplitBits classes, so that numbers of one class differ by less than 1 / 2^SplitBits.
///
/// A larger number is never in a smaller class, and no class between two others is left out. For
/// `SplitBits` = 3: 7 is in class 7, 8 in 8, 15 in 15, 16 and 17 in 16, 18 and 19 in 17, 32 to 35
/// in 24.
template <unsigned SplitBits, std::unsigned_integral Number>
[[nodiscard]] constexpr Number size_class_of(Number size) noexcept {
  constexpr unsigned top = std::numeric_limits<Number>::digits - 1;
  auto const with_least = static_cast<Number>(size | (Number{1} << SplitBits));
  unsigned const rest = top - static_cast<unsigned>(std::countl_zero(with_least)) - SplitBits;
  return static_cast<Number>((Number{rest} << SplitBits) + (size >> rest));
}

/// How many classes `size_class_of` has.
template <unsigned SplitBits, std::unsigned_integral Number>
inline constexpr Number size_class_count = (std::numeric_limits<Number>::digits - SplitBits + 1)
                                           << SplitBits;

/// Returns the lowest bit that is set from bit `from` on. Bits 0 to 63 are in the first word.
///
/// @return the number of all bits if there is none
/// @cost   reads the words from that of `from` to that of the bit
[[nodiscard]] constexpr std::size_t next_bit(std::span<std::uint64_t const> words,
                                             std::size_t from) noexcept {
  std::uint64_t wanted = ~std::uint64_t{0} << (from % 64);
  for (std::size_t at = from / 64; at < words.size(); ++at, wanted = ~std::uint64_t{0}) {
    if (std::uint64_t const found = words[at] & wanted; found != 0) {
      return at * 64 + static_cast<std::size_t>(std::countr_zero(found));
    }
  }
  return words.size() * 64;
}

/// Returns the highest bit that is set below bit `before`, which is at most the number of all bits.
///
/// @return the number of all bits if there is none
/// @cost   as `next_bit`
[[nodiscard]] constexpr std::size_t previous_bit(std::span<std::uint64_t const> words,
                                                 std::size_t before) noexcept {
  for (std::size_t at = (before + 63) / 64; at-- > 0;) {
    std::uint64_t const wanted =
        at == before / 64 ? (std::uint64_t{1} << (before % 64)) - 1 : ~std::uint64_t{0};
    if (std::uint64_t const found = words[at] & wanted; found != 0) {
      return at * 64 + static_cast<std::size_t>(std::bit_width(found)) - 1;
    }
  }
  return words.size() * 64;
}

/// Mixes the bits of a number so that numbers which are close or regular, such as indices and
/// addresses, give numbers that look random (the output function of SplitMix64, Steele et al.,
/// OOPSLA 2014). It is one to one: different numbers give different ones.
[[nodiscard]] constexpr std::uint64_t mix_bits(std::uint64_t number) noexcept {
  std::uint64_t z = number + 0x9E3779B97F4A7C15U;
  z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31U);
}

/// A hash of a sequence of numbers: different numbers, or another order, most likely give another
/// hash.
class Digest {
 public:
  constexpr void add(std::uint64_t number) noexcept { value_ = mix_bits(value_ ^ number); }
  constexpr void add(std::uint32_t a, std::uint32_t b) noexcept {
    add(std::uint64_t{a} << 32U | b);
  }
  [[nodiscard]] constexpr std::uint64_t value() const noexcept { return value_; }

 private:
  std::uint64_t value_ = 1;
};

/// The square root, rounded down. Not from <cmath>, which is slow to include.
[[nodiscard]] constexpr std::uint64_t square_root(std::uint64_t number) noexcept {
  std::uint64_t root = 0;
  for (std::uint64_t bit = std::uint64_t{1} << 31U; bit != 0; bit >>= 1U) {
    std::uint64_t const larger = root | bit;
    root = larger * larger <= number ? larger : root;
  }
  return root;
}

}  // namespace spillway::detail
