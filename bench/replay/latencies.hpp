// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace replay {

/// A histogram of times, from which percentiles are read.
///
/// Memory   59 KB, however many times are added.
/// Units    nanoseconds. Times below 256 ns are counted exactly, longer ones are rounded down by
///          less than 1/128 of them.
class Latencies {
 public:
  Latencies() : counts_(bin_of(~std::uint64_t{0}) + 1) {}

  void add(std::uint64_t ns) noexcept {
    ++counts_[bin_of(ns)];
    ++count_;
  }

  /// Returns the time that the share `part` of the others do not exceed; 0 if there are no times.
  [[nodiscard]] std::uint64_t percentile(double part) const noexcept {
    if (count_ == 0) {
      return 0;
    }
    auto left = static_cast<std::uint64_t>(part * static_cast<double>(count_ - 1));
    std::size_t bin = 0;
    while (bin + 1 < counts_.size() && counts_[bin] <= left) {
      left -= counts_[bin++];
    }
    return least_of(bin);
  }

 private:
  // 128 bins for each power of two from 2^8 on. A time is shifted until it has eight bits; with
  // `shift` of them, the bins 128 * shift + (128 .. 255) follow those of the power below.
  static constexpr std::size_t bits = 8;
  static constexpr std::size_t half = std::size_t{1} << (bits - 1);

  static std::size_t bin_of(std::uint64_t ns) noexcept {
    auto const width = static_cast<std::size_t>(std::bit_width(ns));
    std::size_t const shift = width > bits ? width - bits : 0;
    return shift * half + static_cast<std::size_t>(ns >> shift);
  }
  static std::uint64_t least_of(std::size_t bin) noexcept {
    std::size_t const shift = bin < 2 * half ? 0 : bin / half - 1;
    return std::uint64_t{bin - shift * half} << shift;
  }

  std::vector<std::uint64_t> counts_;
  std::uint64_t count_ = 0;
};

}  // namespace replay
