// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/compaction_policy.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <queue>
#include <random>
#include <utility>
#include <vector>

namespace spillway::test {

/// A layout that owns its blocks.
struct OwnedLayout {
  std::vector<LayoutBlock> blocks;
  std::uint32_t end = 0;

  [[nodiscard]] Layout view() const noexcept { return {blocks, end}; }
  [[nodiscard]] std::uint32_t room() const noexcept {
    std::uint32_t room = end;
    for (LayoutBlock const& block : blocks) {
      room -= block.count;
    }
    return room;
  }
};

/// `blocks` blocks of 1 to `most_count` granules with gaps of 0 to `most_gap` around them; one in
/// `nth_fixed` may not move, none if that is 0.
inline OwnedLayout random_layout(std::mt19937_64& random,
                                 std::size_t blocks,
                                 std::uint32_t most_count,
                                 std::uint32_t most_gap,
                                 std::uint32_t nth_fixed) {
  auto const below = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
  OwnedLayout layout;
  for (std::size_t i = 0; i < blocks; ++i) {
    layout.end += below(2) == 0 ? 0 : below(most_gap + 1);
    layout.blocks.push_back(
        {layout.end, 1 + below(most_count), nth_fixed != 0 && below(nth_fixed) == 0});
    layout.end += layout.blocks.back().count;
  }
  layout.end += below(most_gap + 1);
  return layout;
}

/// Makes the moves of a plan granule by granule, and fails where one of them may not be made: a
/// fixed block moves, a destination is not free, the cost is not the sum of the moves, or the range
/// is not free at the end.
inline void check_plan(Layout const& layout, LayoutPlan const& plan, std::uint32_t count) {
  constexpr std::uint32_t nobody = UINT32_MAX;
  std::vector<std::uint32_t> owner(layout.end, nobody);
  std::vector<std::uint32_t> at;
  for (std::uint32_t i = 0; i < layout.blocks.size(); ++i) {
    at.push_back(layout.blocks[i].first);
    std::fill_n(owner.begin() + at[i], layout.blocks[i].count, i);
  }
  std::uint64_t cost = 0;
  for (auto const [block, to] : plan.moves) {
    std::uint32_t const size = layout.blocks[block].count;
    REQUIRE_FALSE(layout.blocks[block].is_fixed);
    REQUIRE(to + size <= layout.end);
    std::fill_n(owner.begin() + at[block], size, nobody);
    for (std::uint32_t granule = to; granule < to + size; ++granule) {
      REQUIRE(owner[granule] == nobody);
      owner[granule] = block;
    }
    at[block] = to;
    cost += size;
  }
  REQUIRE(cost == plan.cost);
  REQUIRE(plan.count >= count);
  REQUIRE(plan.first + plan.count <= layout.end);
  for (std::uint32_t granule = plan.first; granule < plan.first + plan.count; ++granule) {
    REQUIRE(owner[granule] == nobody);
  }
}

/// The fewest granules that any sequence of moves has to move so that `count` are free in one
/// piece; nothing if no sequence does it. Dijkstra's algorithm over all placements, so for very few
/// blocks only.
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

}  // namespace spillway::test
