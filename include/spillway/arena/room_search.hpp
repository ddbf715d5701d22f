// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/arena/eviction_window.hpp>
#include <spillway/arena/layout_snapshot.hpp>
#include <spillway/arena/move_plan.hpp>
#include <spillway/arena/search_scope.hpp>
#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/core/types.hpp>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

namespace spillway::detail {

/// Searches the ranges of an arena for a way to make room: blocks to move together, or neighbours to
/// evict. Changes nothing; keeps its memory for the next search.
///
/// Units    granules, but for what plans and windows hold.
/// Threads  thread-compatible.
template <CompactionPolicy Compaction>
class RoomSearch {
 public:
  static constexpr bool is_thread_safe = false;

  /// The cheapest plan found that makes a free range of `count` by moving at most `budget`, with a look at
  /// about `most_ranges` ranges; nothing either if a wider search would take less time than the moves.
  ///
  /// @throws std::bad_alloc
  template <class Map, std::predicate<BlockId> CanMove>
  [[nodiscard]] std::optional<CompactionPlan> plan(Map const& map,
                                                   std::uint32_t count,
                                                   std::uint64_t budget,
                                                   CanMove can_move,
                                                   std::size_t most_ranges) {
    if (most_ranges != all_ranges) {
      std::size_t const ranges = map.table().ranges();
      std::size_t const next = std::min(SearchScope::wider(most_ranges, ranges), ranges);
      budget = std::min<std::uint64_t>(budget, next * granules_per_look);
    }
    look_at(map, most_ranges);
    snapshot_.read(map.list(), scope_, can_move);
    return to_plan(map, compaction_.plan(snapshot_.layout(), count, budget));
  }

  /// A plan for about the largest free range that moving at most `budget` can make; nothing if none
  /// larger than the largest there is.
  ///
  /// @throws std::bad_alloc
  template <class Map, std::predicate<BlockId> CanMove>
  [[nodiscard]] std::optional<CompactionPlan>
  plan_largest(Map const& map, std::uint64_t budget, CanMove can_move) {
    look_at(map, all_ranges);
    snapshot_.read(map.list(), scope_, can_move);
    std::uint64_t reached = map.largest();
    std::uint64_t missed = map.table().free_granules() + 1;
    std::optional<LayoutPlan> best;
    // First all of it, then bisecting by ratio, since sizes differ by orders of magnitude.
    for (std::uint64_t wanted = missed - 1; wanted > reached && wanted < missed;) {
      if (auto plan =
              compaction_.plan(snapshot_.layout(), static_cast<std::uint32_t>(wanted), budget)) {
        reached = std::max<std::uint64_t>(wanted, plan->count);
        best = std::move(plan);
      } else {
        missed = wanted;
      }
      if (missed - reached <= reached / 16) {
        break;
      }
      wanted = static_cast<std::uint64_t>(std::sqrt(
          static_cast<double>(std::max<std::uint64_t>(reached, 1)) * static_cast<double>(missed)));
    }
    return to_plan(map, best);
  }

  /// The run of addresses with room for `count` whose blocks cost least to evict, with a look at about
  /// `most_ranges` ranges.
  ///
  /// @param cost  the price of evicting a block as an optional number, nothing if it may not leave
  /// @throws std::bad_alloc
  template <class Map, class Cost>
  [[nodiscard]] std::optional<EvictionWindow>
  cheapest_window(Map const& map, std::uint32_t count, Cost cost, std::size_t most_ranges) {
    look_at(map, most_ranges);
    return cheapest_eviction_window(map.list(), scope_, count, std::move(cost));
  }

 private:
  // What the device moves while the host looks at one range, some 20 ns: 16 KiB.
  static constexpr std::size_t granules_per_look = 64;

  template <class Map>
  void look_at(Map const& map, std::size_t most_ranges) {
    most_ranges == all_ranges ? scope_.read_all(map.list())
                              : scope_.read_around_large(map.list(), map.fit(), most_ranges);
  }

  template <class Map>
  [[nodiscard]] std::optional<CompactionPlan> to_plan(Map const& map,
                                                      std::optional<LayoutPlan> const& answer) {
    if (!answer) {
      return std::nullopt;
    }
    std::optional<CompactionPlan> plan = snapshot_.to_plan(map.list(), *answer);
    plan->claims.version = map.version();
    return plan;
  }

  SearchScope scope_;
  LayoutSnapshot snapshot_;
  [[no_unique_address]] Compaction compaction_;
};

}  // namespace spillway::detail
