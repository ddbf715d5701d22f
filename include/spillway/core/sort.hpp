// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace spillway::detail {

/// Sorts what is in order already but for a few places, as moves and the ranges that they need
/// mostly are: they are found in order of address. Ascending runs are merged then, else it is
/// `std::sort`. What is equal may change places.
///
/// @cost O(n) for a few runs, at most O(n log n)
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
  for (; runs > 1; runs = (runs + 1) / 2) {  // two and two become one
    for (auto begin = items.begin(); begin != items.end();) {
      auto const middle = end_of_run(begin);
      auto const end = middle == items.end() ? middle : end_of_run(middle);
      std::inplace_merge(begin, middle, end, is_less);
      begin = end;
    }
  }
}

}  // namespace spillway::detail
