// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/arena/range_list.hpp>
#include <spillway/core/range.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace spillway::detail {

/// Neighbouring ranges of one segment: from `from` on up to `past`, which is a range or the segment's
/// wall and not one of them.
struct Stretch {
  std::uint32_t from = 0;
  std::uint32_t past = 0;
};

/// Which ranges of an arena are looked at to find room: all of them, or those around some free ranges.
///
/// Where there are many ranges, to look at all takes the host far longer than it takes the device to
/// move a little more than the least. A search therefore begins with a few of them, where the largest
/// free ones are, and widens eightfold until it finds something or has seen everything.
///
/// Threads  thread-compatible. Keeps its memory.
class SearchScope {
 public:
  /// The number of ranges to look at first, where up to `few` of `ranges` may be looked at without need.
  [[nodiscard]] static std::size_t narrowest(std::size_t ranges, std::size_t few) noexcept {
    std::size_t const most = std::min(ranges / (4 * growth), few);
    return ranges <= few ? all_ranges : up_to(std::max(most, least_at_first), ranges);
  }
  /// The next more than `most`, after which `all_ranges` comes at last.
  [[nodiscard]] static std::size_t wider(std::size_t most, std::size_t ranges) noexcept {
    return most > ranges / growth ? all_ranges : up_to(most * growth, ranges);
  }

  void read_all(RangeList const& list) {
    stretches_.clear();
    for (std::uint16_t const segment : list.segments()) {
      stretches_.push_back({list.front(segment), list.span(segment).wall});
    }
    is_part_ = false;
  }

  /// Takes about `most` ranges around the free ranges that `fit` says are large.
  ///
  /// @throws std::bad_alloc
  /// @cost   O(most log most)
  template <class Fit>
  void read_around_large(RangeList const& list, Fit const& fit, std::size_t most);

  /// Without overlap, in order of address.
  [[nodiscard]] std::span<Stretch const> stretches() const noexcept { return stretches_; }
  /// False if they are all there is.
  [[nodiscard]] bool is_part() const noexcept { return is_part_; }

 private:
  static constexpr std::size_t growth = 8;
  static constexpr std::size_t least_at_first = 8;

  // Not a large part, which costs as much as all and may find nothing.
  static std::size_t up_to(std::size_t most, std::size_t ranges) noexcept {
    return most > ranges / 4 ? all_ranges : most;
  }
  void add_around(RangeList const& list, std::uint32_t node, std::size_t reach);

  std::vector<Stretch> stretches_;
  std::vector<std::uint32_t> seeds_;
  bool is_part_ = false;
};

template <class Fit>
void SearchScope::read_around_large(RangeList const& list, Fit const& fit, std::size_t most) {
  // As many stretches as each has ranges: both what lies around a gap and where else there is room count.
  auto const side = static_cast<std::size_t>(std::sqrt(static_cast<double>(most)));
  stretches_.clear();
  seeds_.clear();
  is_part_ = true;
  fit.visit_large(list.table, [&](std::uint32_t node) {
    seeds_.push_back(node);
    return seeds_.size() < side;
  });
  std::sort(seeds_.begin(), seeds_.end(), [&](std::uint32_t a, std::uint32_t b) {
    return list.table[a].first < list.table[b].first;
  });
  for (std::uint32_t const node : seeds_) {
    add_around(list, node, side / 2);
  }
}

inline void SearchScope::add_around(RangeList const& list, std::uint32_t node, std::size_t reach) {
  RangeTable const& table = list.table;
  std::uint32_t const wall = list.span(table[node].segment).wall;
  auto const is_beyond_last = [&](std::uint32_t other) {
    return stretches_.empty() || table[other].first > table[stretches_.back().past].first;
  };
  std::uint32_t from = node;
  for (std::size_t i = 0; i < reach && table[from].prev != wall; ++i) {
    from = table[from].prev;
  }
  std::uint32_t past = node;
  for (std::size_t i = 0; i <= reach && past != wall; ++i) {
    past = table[past].next;
  }
  if (is_beyond_last(from)) {
    stretches_.push_back({from, past});
  } else if (is_beyond_last(past)) {
    stretches_.back().past = past;
  }
}

}  // namespace spillway::detail
