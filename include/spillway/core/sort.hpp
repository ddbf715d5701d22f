// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <vector>

namespace spillway::detail {

/// Merges the sorted ranges [first, middle) and [middle, last) without memory, unlike
/// `std::inplace_merge`: halves the longer one, brings the lower parts of both in front of the
/// upper ones, and merges these two and those two.
///
/// @cost O(n) if one of them is short, at most O(n log n)
template <std::random_access_iterator At, class Less>
void merge_in_place(At first, At middle, At last, Less const& is_less) {
  if (first == middle || middle == last || !is_less(*middle, *std::prev(middle))) {
    return;
  }
  if (last - first == 2) {
    std::iter_swap(first, middle);
    return;
  }
  At low = first;
  At high = middle;
  if (middle - first > last - middle) {
    low += (middle - first) / 2;
    high = std::lower_bound(middle, last, *low, is_less);
  } else {
    high += (last - middle) / 2;
    low = std::upper_bound(first, middle, *high, is_less);
  }
  At const between = std::rotate(low, middle, high);
  merge_in_place(first, low, between, is_less);
  merge_in_place(between, high, last, is_less);
}

/// Sorts a sequence that is mostly sorted already, as the moves of a plan usually are, by merging
/// its ascending runs. If there are many runs, calls `std::sort`. Not stable. Allocates nothing.
///
/// @cost O(n) for a run and a few short ones, at most O(n log n)
template <class Item, class Less>
void sort_runs(std::vector<Item>& items, Less is_less) {
  constexpr std::size_t few_runs = 8;
  auto const end_of_run = [&](auto begin) {
    return std::is_sorted_until(begin, items.end(), is_less);
  };
  std::size_t runs = 0;
  for (auto at = items.begin(); at != items.end() && runs <= few_runs; ++runs) {
    at = end_of_run(at);
  }
  if (runs > few_runs) {
    std::sort(items.begin(), items.end(), is_less);
    return;
  }
  for (; runs > 1; runs = (runs + 1) / 2) {  // merges pairs of neighbouring runs
    for (auto begin = items.begin(); begin != items.end();) {
      auto const middle = end_of_run(begin);
      auto const end = middle == items.end() ? middle : end_of_run(middle);
      merge_in_place(begin, middle, end, is_less);
      begin = end;
    }
  }
}

}  // namespace spillway::detail
