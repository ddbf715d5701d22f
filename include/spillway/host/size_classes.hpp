// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace spillway::detail {

/// Size classes, eight for each power of two, and the set of those that are in use.
///
/// Threads  thread-compatible.
/// Cost     a look at one to eight words.
class SizeClasses {
  static constexpr unsigned split_bits = 3;

 public:
  static constexpr std::size_t count = (64 - split_bits + 1) << split_bits;

  /// The class of a size; a larger size is never in a smaller class.
  [[nodiscard]] static constexpr std::size_t class_of(std::size_t units) noexcept {
    if (units < (std::size_t{1} << split_bits)) {
      return units;
    }
    auto const power = static_cast<unsigned>(std::bit_width(units)) - 1;
    std::size_t const part = (units >> (power - split_bits)) & ((1U << split_bits) - 1);
    return (std::size_t{power - split_bits + 1} << split_bits) + part;
  }

  void insert(std::size_t size_class) noexcept { word(size_class) |= bit(size_class); }
  void erase(std::size_t size_class) noexcept { word(size_class) &= ~bit(size_class); }

  /// The smallest class in use that is at least `from`; `count` if there is none.
  [[nodiscard]] std::size_t next(std::size_t from) const noexcept {
    for (std::size_t at = from / 64; at < words_.size(); ++at) {
      std::uint64_t const wanted =
          at == from / 64 ? ~std::uint64_t{0} << (from % 64) : ~std::uint64_t{0};
      if (std::uint64_t const found = words_[at] & wanted; found != 0) {
        return at * 64 + static_cast<std::size_t>(std::countr_zero(found));
      }
    }
    return count;
  }

  /// The largest class in use that is less than `before`; `count` if there is none.
  [[nodiscard]] std::size_t previous(std::size_t before) const noexcept {
    for (std::size_t at = (before + 63) / 64; at-- > 0;) {
      std::uint64_t const wanted =
          at == before / 64 ? (std::uint64_t{1} << (before % 64)) - 1 : ~std::uint64_t{0};
      if (std::uint64_t const found = words_[at] & wanted; found != 0) {
        return at * 64 + static_cast<std::size_t>(std::bit_width(found)) - 1;
      }
    }
    return count;
  }

 private:
  [[nodiscard]] std::uint64_t& word(std::size_t size_class) noexcept {
    return words_[size_class / 64];
  }
  [[nodiscard]] static constexpr std::uint64_t bit(std::size_t size_class) noexcept {
    return std::uint64_t{1} << (size_class % 64);
  }

  std::array<std::uint64_t, (count + 63) / 64> words_{};
};

}  // namespace spillway::detail
