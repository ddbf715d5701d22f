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
    std::uint32_t gap = 0;
    std::uint32_t gaps = 1;        ///< number of gaps, from `gap` on, that leave their lists
    std::uint32_t count = 0;       ///< granules filled; 0: the gaps were closed
    std::uint32_t left_class = 0;  ///< size class of what is left of a gap that is filled
  };

  /// Indexes all gaps that are not empty. @throws std::bad_alloc. @cost O(n)
  void read(LayoutLine const& line) {
    std::size_t const n = line.size();
    undo(0);
    filled_.assign(n + 1, 0);
    looks_ = 0;
    next_.resize(n + 1 + classes);
    previous_.resize(n + 1 + classes);
    for (std::size_t c = 0; c < classes; ++c) {
      next_[head(c)] = previous_[head(c)] = head(c);
    }
    for (std::uint32_t gap = 0; gap <= n; ++gap) {
      std::uint32_t const count = line.gap(gap);
      std::uint32_t const after = count != 0 ? head(class_of(count)) : gap;  // else in no list
      next_[gap] = after;
      previous_[gap] = count != 0 ? previous_[after] : gap;
      next_[previous_[gap]] = gap;
      previous_[after] = gap;
    }
  }

  /// Fills `count` granules of the smallest gap that has room for them and that `may_use` allows.
  ///
  /// @return where the filled part starts; nothing if no gap is large enough, or if all looks so
  ///         far exceed `most_looks`
  template <class MayUse>
  [[nodiscard]] std::optional<std::uint32_t>
  fill(LayoutLine const& line,
       std::uint32_t count,
       MayUse may_use,
       std::uint64_t most_looks = std::numeric_limits<std::uint64_t>::max()) {
    std::size_t best = none;
    std::uint32_t best_left = 0;
    bool is_exhausted = false;
    auto const look = [&](std::size_t gap) {
      is_exhausted = looks_ >= most_looks;
      if (is_exhausted) {
        return false;
      }
      ++looks_;
      std::uint32_t const left = line.gap(gap) - filled_[gap];
      if (left >= count && (best == none || left < best_left) && may_use(gap)) {
        best = gap;
        best_left = left;
      }
      return best_left != count;  // no gap is smaller than one that is filled to its end
    };
    bool goes_on = true;
    for (std::size_t c = class_of(count); goes_on && c < classes; ++c) {
      for (std::size_t i = 0; goes_on && i < remnants_[c].size(); ++i) {
        goes_on = look(remnants_[c][i]);
      }
      for (std::uint32_t gap = next_[head(c)]; goes_on && gap != head(c); gap = next_[gap]) {
        goes_on = look(gap);
      }
      goes_on = goes_on && best == none;  // gaps of higher classes are larger
    }
    if (best == none || is_exhausted) {
      return std::nullopt;
    }
    std::uint32_t const first = line.gap_first(best) + filled_[best];
    add({static_cast<std::uint32_t>(best),
         1,
         count,
         static_cast<std::uint32_t>(class_of(best_left - count))});
    return first;
  }

  /// Closes the gaps from `first` to `last`: `fill` no longer looks at them, except at those that
  /// are partly filled. A window that is vacated has many gaps, and looking at all of them for each
  /// of its blocks would take most of the time.
  void close(std::size_t first, std::size_t last) {
    add({static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(last - first + 1), 0, 0});
  }

  /// How much of gap `i` has been filled, from its low end.
  [[nodiscard]] std::uint32_t filled(std::size_t i) const noexcept { return filled_[i]; }

  /// The number of fills so far, and of gaps closed, for `undo`.
  [[nodiscard]] std::size_t mark() const noexcept { return fills_.size(); }
  /// Takes back every fill after `mark`, and opens the gaps that were closed.
  void undo(std::size_t mark) noexcept {
    for (; fills_.size() > mark; fills_.pop_back()) {
      Fill const& fill = fills_.back();
      filled_[fill.gap] -= fill.count;
      if (fill.count != 0) {
        remnants_[fill.left_class].pop_back();
      }
      for (std::uint32_t gap = fill.gap + fill.gaps; gap-- > fill.gap;) {
        if (filled_[gap] == 0) {
          next_[previous_[gap]] = gap;
          previous_[next_[gap]] = gap;
        }
      }
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
    if (fill.count != 0) {
      remnants_[fill.left_class].push_back(fill.gap);
    }
    for (std::uint32_t gap = fill.gap; gap != fill.gap + fill.gaps; ++gap) {
      if (filled_[gap] == 0) {
        next_[previous_[gap]] = next_[gap];
        previous_[next_[gap]] = previous_[gap];
      }
    }
    filled_[fill.gap] += fill.count;
  }
  /// The place of the list of a class, behind those of the gaps.
  [[nodiscard]] std::uint32_t head(std::size_t size_class) const noexcept {
    return static_cast<std::uint32_t>(filled_.size() + size_class);
  }

  // The gaps of which nothing is filled: a circular list for each size class, by address. A gap
  // that is filled or closed keeps its links. Since fills are undone in the opposite order, undo
  // can relink it by these.
  std::vector<std::uint32_t> next_;
  std::vector<std::uint32_t> previous_;
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
