// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/arena/range_list.hpp>
#include <spillway/arena/search_scope.hpp>
#include <spillway/core/range_table.hpp>
#include <spillway/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace spillway::detail {

/// The window in `scope` of at least `count` granules with the lowest cost; the lowest address among
/// equals.
///
/// @param price  what evicting a block costs, as an optional number; nothing if it may not leave
/// @throws std::bad_alloc
/// @cost   O(ranges in the scope): the cheapest window that ends at a range starts as late as it can
template <class Price>
[[nodiscard]] std::optional<EvictionWindow> cheapest_eviction_window(RangeList const& list,
                                                                     SearchScope const& scope,
                                                                     std::uint32_t count,
                                                                     Price price) {
  struct Item {
    std::uint32_t node;
    std::uint64_t cost;
  };
  std::vector<Item> items;  // of the stretch between two ranges that must stay
  EvictionWindow best;
  bool is_found = false;
  for (Stretch const& stretch : scope.stretches()) {
    std::size_t from = 0;
    std::uint64_t cost = 0;
    std::uint64_t granules = 0;
    items.clear();
    for (std::uint32_t node = stretch.from; node != stretch.past; node = list.table[node].next) {
      RangeNode const& range = list.table[node];
      std::optional<std::uint64_t> const mine =
          range.state == RangeState::free    ? std::optional<std::uint64_t>{0}
          : range.state == RangeState::taken ? std::optional<std::uint64_t>{price(range.owner())}
                                             : std::nullopt;
      if (!mine) {
        items.clear();
        from = 0;
        cost = 0;
        granules = 0;
        continue;
      }
      items.push_back({node, *mine});
      cost += *mine;
      granules += range.count;
      while (granules - list.table[items[from].node].count >= count) {
        cost -= items[from].cost;
        granules -= list.table[items[from].node].count;
        ++from;
      }
      if (granules < count || (is_found && cost >= best.cost)) {
        continue;
      }
      is_found = true;
      best = {list.address(range.segment, list.table[items[from].node].first),
              static_cast<std::size_t>(granules) * granule_bytes,
              cost,
              {}};
      for (std::size_t i = from; i < items.size(); ++i) {
        if (list.table[items[i].node].state == RangeState::taken) {
          best.owners.push_back(list.table[items[i].node].owner());
        }
      }
    }
  }
  return is_found ? std::optional{best} : std::nullopt;
}

}  // namespace spillway::detail
