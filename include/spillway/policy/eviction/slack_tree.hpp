// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace spillway::detail {

/// A number for each moment, to which a run of moments can be added at once and whose least value in a
/// run is found fast: a segment tree with additions left where they cover a whole node.
///
/// Cost    O(log n) an operation; 32 bytes a moment.
/// Threads thread-compatible.
class SlackTree {
 public:
  static constexpr std::int64_t infinite = std::numeric_limits<std::int64_t>::max() / 2;
  static constexpr std::uint32_t nowhere = ~std::uint32_t{0};

  /// The moments [first, last], both included.
  struct Run {
    std::uint32_t first;
    std::uint32_t last;
  };

  /// Makes room for `moments`. @throws std::bad_alloc
  void reserve(std::size_t moments) {
    leaves_ = std::bit_ceil(std::max<std::size_t>(moments, 1));
    minimum_.resize(2 * leaves_);
    added_.resize(2 * leaves_);
  }

  /// Starts from `values`, as many as were reserved for.
  void assign(std::vector<std::int64_t> const& values) noexcept {
    std::fill(added_.begin(), added_.end(), 0);
    auto const first = minimum_.begin() + static_cast<std::ptrdiff_t>(leaves_);
    std::fill(std::copy(values.begin(), values.end(), first), minimum_.end(), infinite);
    for (std::size_t node = leaves_ - 1; node != 0; --node) {
      minimum_[node] = std::min(minimum_[2 * node], minimum_[2 * node + 1]);
    }
  }

  void add(Run run, std::int64_t value) noexcept { add(1, 0, leaves_ - 1, run, value); }

  [[nodiscard]] std::int64_t least(Run run) const noexcept { return least(1, 0, leaves_ - 1, run); }

  /// The first and the last moment of a run with a value below `bound`, or `nowhere`.
  [[nodiscard]] std::uint32_t first_below(Run run, std::int64_t bound) const noexcept {
    return below(1, 0, leaves_ - 1, run, bound, true);
  }
  [[nodiscard]] std::uint32_t last_below(Run run, std::int64_t bound) const noexcept {
    return below(1, 0, leaves_ - 1, run, bound, false);
  }

 private:
  [[nodiscard]] static bool is_apart(std::size_t low, std::size_t high, Run run) noexcept {
    return high < run.first || run.last < low;
  }
  [[nodiscard]] static bool is_inside(std::size_t low, std::size_t high, Run run) noexcept {
    return run.first <= low && high <= run.last;
  }

  void
  add(std::size_t node, std::size_t low, std::size_t high, Run run, std::int64_t value) noexcept {
    if (is_apart(low, high, run)) {
      return;
    }
    if (is_inside(low, high, run)) {
      minimum_[node] += value;
      added_[node] += value;
      return;
    }
    std::size_t const middle = (low + high) / 2;
    add(2 * node, low, middle, run, value);
    add(2 * node + 1, middle + 1, high, run, value);
    minimum_[node] = std::min(minimum_[2 * node], minimum_[2 * node + 1]) + added_[node];
  }

  [[nodiscard]] std::int64_t
  least(std::size_t node, std::size_t low, std::size_t high, Run run) const noexcept {
    if (is_apart(low, high, run)) {
      return infinite;
    }
    if (is_inside(low, high, run)) {
      return minimum_[node];
    }
    std::size_t const middle = (low + high) / 2;
    return std::min(least(2 * node, low, middle, run), least(2 * node + 1, middle + 1, high, run)) +
           added_[node];
  }

  [[nodiscard]] std::uint32_t below(std::size_t node,
                                    std::size_t low,
                                    std::size_t high,
                                    Run run,
                                    std::int64_t bound,
                                    bool is_first) const noexcept {
    if (is_apart(low, high, run) || minimum_[node] >= bound) {
      return nowhere;
    }
    if (low == high) {
      return static_cast<std::uint32_t>(low);
    }
    std::size_t const middle = (low + high) / 2;
    bound -= added_[node];
    auto const in_half = [&](bool is_low) {
      return is_low ? below(2 * node, low, middle, run, bound, is_first)
                    : below(2 * node + 1, middle + 1, high, run, bound, is_first);
    };
    std::uint32_t const found = in_half(is_first);
    return found != nowhere ? found : in_half(!is_first);
  }

  std::size_t leaves_ = 1;
  std::vector<std::int64_t> minimum_;  // of a node's moments, its own additions included
  std::vector<std::int64_t> added_;    // to all of a node's moments
};

}  // namespace spillway::detail
