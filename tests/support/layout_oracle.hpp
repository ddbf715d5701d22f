// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/policy/compaction/layout_line.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <queue>
#include <random>
#include <utility>
#include <vector>

namespace spillway::test {

constexpr std::uint64_t no_bound = std::numeric_limits<std::uint64_t>::max() / 4;

/// The best plan of a search; all plans that it finds are checked, and that each moves less than
/// the one before.
template <class Search>
std::optional<LayoutPlan> best_plan(testing::OwnedLayout const& layout,
                                    std::uint32_t count,
                                    typename Search::Limits const& limits = {},
                                    std::uint64_t bound = no_bound) {
  std::optional<LayoutPlan> best;
  Search{detail::LayoutLine{layout.view()}, limits}.search(count, bound, [&](LayoutPlan plan) {
    testing::check_plan(layout.view(), plan, count);
    REQUIRE(plan.cost < bound);
    bound = plan.cost;
    best = std::move(plan);
    return bound;
  });
  return best;
}

/// The fewest granules that must be moved so that `count` are free in one piece; nothing if that is
/// impossible. Dijkstra's algorithm over all placements, so only for very few blocks.
inline std::optional<std::uint64_t> fewest_moved(Layout const& layout, std::uint32_t count) {
  using Places = std::vector<std::uint32_t>;
  auto const size = [&](std::size_t i) { return layout.blocks[i].count; };
  auto const is_free =
      [&](Places const& places, std::size_t but, std::uint32_t first, std::uint32_t n) {
        for (std::size_t i = 0; i < places.size(); ++i) {
          if (i != but && places[i] < first + n && first < places[i] + size(i)) {
            return false;
          }
        }
        return first + n <= layout.end;
      };
  Places start;
  for (LayoutBlock const& block : layout.blocks) {
    start.push_back(block.first);
  }
  using Entry = std::pair<std::uint64_t, Places>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue;
  std::map<Places, std::uint64_t> best{{start, 0}};
  queue.push({0, start});
  while (!queue.empty()) {
    auto const [cost, places] = queue.top();
    queue.pop();
    if (best.at(places) != cost) {
      continue;
    }
    for (std::uint32_t first = 0; first + count <= layout.end; ++first) {
      if (is_free(places, places.size(), first, count)) {
        return cost;
      }
    }
    for (std::size_t i = 0; i < places.size(); ++i) {
      for (std::uint32_t to = 0; !layout.blocks[i].is_fixed && to + size(i) <= layout.end; ++to) {
        if (to != places[i] && is_free(places, i, to, size(i))) {
          Places next = places;
          next[i] = to;
          auto const [known, is_new] = best.try_emplace(next, cost + size(i));
          if (is_new || cost + size(i) < known->second) {
            known->second = cost + size(i);
            queue.push({cost + size(i), std::move(next)});
          }
        }
      }
    }
  }
  return std::nullopt;
}

/// What `find(layout, count)` moves on small random layouts of `least_blocks` to `most_blocks`
/// blocks in which something must be moved, and the minimum. Fails where it moves less than that.
struct MovedAndLeast {
  std::uint64_t moved = 0;
  std::uint64_t least = 0;
  std::size_t found = 0;
  std::size_t missed = 0;  ///< layouts where there is a plan and it found none
};
template <class Find>
MovedAndLeast compare_with_least(std::uint64_t seed, std::size_t most_blocks, Find find) {
  MESSAGE("seed ", seed);
  std::mt19937_64 random{seed};
  MovedAndLeast result;
  for (int i = 0; i < 800; ++i) {
    CAPTURE(i);
    std::size_t const blocks = 2 + random() % (most_blocks - 1);
    testing::OwnedLayout const layout = testing::random_layout(random, blocks, 3, 3, 6);
    if (layout.room() == 0 || layout.end > 15) {
      continue;
    }
    auto const count = static_cast<std::uint32_t>(1 + random() % layout.room());
    auto const least = fewest_moved(layout.view(), count);
    if (least == 0U) {
      continue;
    }
    std::optional<LayoutPlan> const plan = find(layout, count);
    REQUIRE((least.has_value() || !plan));
    if (plan) {
      testing::check_plan(layout.view(), *plan, count);
      REQUIRE(plan->cost >= *least);
      result.moved += plan->cost;
      result.least += *least;
      ++result.found;
    } else {
      result.missed += least ? 1U : 0U;
    }
  }
  return result;
}

}  // namespace spillway::test
