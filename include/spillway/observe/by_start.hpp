// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace spillway::detail {

/// Returns records or spans in the order of `start_ns`. Those that start together keep their order.
///
/// `std::stable_sort` of libstdc++ calls deprecated functions, for which clang warns in the
/// programs that use it.
///
/// @throws std::bad_alloc
/// @cost   O(n log n)
template <class T>
[[nodiscard]] std::vector<T> by_start(std::vector<T> const& all) {
  std::vector<std::pair<std::uint64_t, std::size_t>> order;
  order.reserve(all.size());
  for (T const& one : all) {
    order.emplace_back(one.start_ns, order.size());
  }
  std::sort(order.begin(), order.end());
  std::vector<T> sorted;
  sorted.reserve(all.size());
  for (auto const& [start_ns, at] : order) {
    sorted.push_back(all[at]);
  }
  return sorted;
}

}  // namespace spillway::detail
