// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "residency_model.hpp"

namespace spillway::bench {

/// How the steps of a program differ from each other, so that the record of the last step is of
/// little use.
enum class OrderChange : std::uint8_t {
  shuffled,       ///< every step has another order
  rows_shuffled,  ///< rows of 50 operations stay together, in another order each step
  left_out,       ///< each operation is left out of three steps in ten
  alternating,    ///< two orders alternate
  growing,        ///< each step does a little more than the one before
};

inline constexpr std::array<std::pair<OrderChange, char const*>, 5> order_changes{
    {{OrderChange::shuffled, "shuffled"},
     {OrderChange::rows_shuffled, "rows shuffled"},
     {OrderChange::left_out, "left out"},
     {OrderChange::alternating, "alternating"},
     {OrderChange::growing, "growing"}}};

/// Returns the step with groups of `row` operations in random order.
inline Step rows_in_random_order(Step const& step, std::size_t row, std::mt19937_64& random) {
  std::vector<std::size_t> rows((step.size() + row - 1) / row);
  for (std::size_t k = 0; k < rows.size(); ++k) {
    rows[k] = k * row;
  }
  std::shuffle(rows.begin(), rows.end(), random);
  Step shuffled;
  for (std::size_t const first : rows) {
    std::size_t const last = std::min(step.size(), first + row);
    shuffled.insert(shuffled.end(),
                    step.begin() + static_cast<std::ptrdiff_t>(first),
                    step.begin() + static_cast<std::ptrdiff_t>(last));
  }
  return shuffled;
}

/// Makes `count` steps from `step` that differ as `change` says. The same seed makes the same
/// steps.
inline std::vector<Step>
changing_steps(Step const& step, OrderChange change, std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random{seed};
  Step const other = rows_in_random_order(step, 1, random);
  std::vector<Step> steps;
  for (std::size_t i = 0; i < count; ++i) {
    switch (change) {
    case OrderChange::shuffled:
      steps.push_back(rows_in_random_order(step, 1, random));
      break;
    case OrderChange::rows_shuffled:
      steps.push_back(rows_in_random_order(step, 50, random));
      break;
    case OrderChange::left_out:
      steps.push_back(step);
      std::erase_if(steps.back(), [&](auto const&) { return random() % 10 < 3; });
      break;
    case OrderChange::alternating:
      steps.push_back(i % 2 == 0 ? step : other);
      break;
    case OrderChange::growing:
      steps.push_back(step);
      steps.back().resize((step.size() * (count + i)) / (2 * count - 1));
      break;
    }
  }
  return steps;
}

}  // namespace spillway::bench
