// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/bits.hpp>
#include <spillway/core/config.hpp>
#include <spillway/policy/compaction/layout_line.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace spillway::detail {

/// An index of the gaps of a layout by size class, with undo. Gaps are filled from their low ends.
/// `WindowSearch` finds in it where the blocks of a window can go.
///
/// Threads  thread-compatible.
template <class = Lazily>
class BasicGapIndex {
 public:
  struct Fill {
    std::size_t gap = 0;
    std::uint32_t count = 0;
    std::uint32_t left_class = 0;  ///< the size class of the rest of the gap
  };

  /// Indexes all gaps that are not empty. @throws std::bad_alloc. @cost O(n)
  void read(LayoutLine const& line) {
    std::size_t const n = line.size();
    undo(0);
    filled_.assign(n + 1, 0);
    looks_ = 0;
    starts_.fill(0);
    std::size_t used = 0;
    for (std::size_t i = 0; i <= n; ++i) {
      if (std::uint32_t const count = line.gap(i); count != 0) {
        ++starts_[class_of(count) + 1];
        ++used;
      }
    }
    for (std::size_t c = 0; c < classes; ++c) {
      starts_[c + 1] += starts_[c];
    }
    gaps_.resize(used);
    std::array<std::uint32_t, classes + 1> next = starts_;
    for (std::size_t i = 0; i <= n; ++i) {
      if (std::uint32_t const count = line.gap(i); count != 0) {
        gaps_[next[class_of(count)]++] = static_cast<std::uint32_t>(i);
      }
    }
  }

  /// Fills `count` granules of the smallest gap that still holds them and that `may_use` allows.
  ///
  /// @return where the filled part starts, nothing if no gap is large enough
  template <class MayUse>
  [[nodiscard]] std::optional<std::uint32_t>
  fill(LayoutLine const& line, std::uint32_t count, MayUse may_use) {
    std::size_t best = none;
    std::uint32_t best_left = 0;
    auto const look = [&](std::size_t gap) {
      std::uint32_t const left = line.gap(gap) - filled_[gap];
      if (left >= count && (best == none || left < best_left) && may_use(gap)) {
        best = gap;
        best_left = left;
      }
    };
    for (std::size_t c = class_of(count); c < classes; ++c) {
      for (std::uint32_t const gap : remnants_[c]) {
        look(gap);
        ++looks_;
      }
      for (std::uint32_t at = starts_[c]; at < starts_[c + 1]; ++at) {
        look(gaps_[at]);
        ++looks_;
      }
      if (best != none && class_of(best_left) <= c) {
        break;  // gaps of higher classes are larger
      }
    }
    if (best == none) {
      return std::nullopt;
    }
    std::uint32_t const first = line.gap_first(best) + filled_[best];
    add({best, count, static_cast<std::uint32_t>(class_of(best_left - count))});
    return first;
  }

  /// How much of gap `i` has been filled, from its low end.
  [[nodiscard]] std::uint32_t filled(std::size_t i) const noexcept { return filled_[i]; }

  /// The number of fills so far, for `undo`.
  [[nodiscard]] std::size_t mark() const noexcept { return fills_.size(); }
  /// Takes back every fill after `mark`.
  void undo(std::size_t mark) noexcept {
    for (; fills_.size() > mark; fills_.pop_back()) {
      filled_[fills_.back().gap] -= fills_.back().count;
      remnants_[fills_.back().left_class].pop_back();
    }
  }
  /// The fills after `mark`, to be done again after an undo.
  [[nodiscard]] std::vector<Fill> since(std::size_t mark) const {
    return {fills_.begin() + static_cast<std::ptrdiff_t>(mark), fills_.end()};
  }
  void redo(std::vector<Fill> const& fills) {
    for (Fill const& fill : fills) {
      add(fill);
    }
  }
  /// Gaps looked at so far.
  [[nodiscard]] std::uint64_t looks() const noexcept { return looks_; }

 private:
  static constexpr std::size_t none = std::numeric_limits<std::size_t>::max();

  static constexpr unsigned split_bits = 3;
  static constexpr std::size_t classes = size_class_count<split_bits, std::uint32_t>;
  static std::size_t class_of(std::uint32_t count) noexcept {
    return size_class_of<split_bits>(count);
  }

  void add(Fill const& fill) {
    fills_.push_back(fill);
    remnants_[fill.left_class].push_back(static_cast<std::uint32_t>(fill.gap));
    filled_[fill.gap] += fill.count;
  }

  std::array<std::uint32_t, classes + 1> starts_{};  // where each class begins in gaps_
  std::vector<std::uint32_t> gaps_;  // by class of their whole size, then by address
  std::vector<std::uint32_t> filled_;
  std::vector<Fill> fills_;
  // The fills by the size class of the rest of the gap, in their order. An entry is out of date if
  // its gap has been filled again since.
  std::array<std::vector<std::uint32_t>, classes> remnants_;
  std::uint64_t looks_ = 0;
};

using GapIndex = BasicGapIndex<>;

SPILLWAY_COMPILED_PART(class BasicGapIndex<>);

}  // namespace spillway::detail
