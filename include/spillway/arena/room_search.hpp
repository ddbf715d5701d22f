// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/arena/move_plan.hpp>
#include <spillway/arena/range_map.hpp>
#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/core/bits.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/range_table.hpp>
#include <spillway/core/sort.hpp>
#include <spillway/core/types.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace spillway::detail {

/// Neighbouring ranges of one segment, from `from` up to `past`, which is the first that is not
/// included or the segment's wall.
struct Stretch {
  std::uint32_t from = 0;
  std::uint32_t past = 0;
};

/// The ranges of an arena that a search for room looks at: all of them, or those around some free
/// ranges.
///
/// If there are many ranges, looking at all of them takes the host far longer than the device would
/// need to carry out a plan that is not quite the best. So a search begins with a few ranges around
/// the largest free ones, and is widened eightfold until it finds something or has seen all.
///
/// Threads  thread-compatible. Keeps its memory for later searches.
template <class = Lazily>
class BasicSearchScope {
 public:
  /// Returns the number of ranges for the first search, if searching up to `few` of the `ranges`
  /// costs little.
  [[nodiscard]] static std::size_t narrowest(std::size_t ranges, std::size_t few) noexcept {
    std::size_t const most = std::min(ranges / (4 * growth), few);
    return ranges <= few ? all_ranges : up_to(std::max(most, least_at_first), ranges);
  }
  /// Returns the number of ranges for the search after one of `most` ranges; `all_ranges` at last.
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

  /// Selects about `most` ranges around the free ranges that are the largest by `fit`.
  ///
  /// @throws std::bad_alloc
  /// @cost   O(most log most)
  template <class Fit>
  void read_around_large(RangeList const& list, Fit const& fit, std::size_t most) {
    // As many stretches as each has ranges, since both matter: the surroundings of a gap, and the
    // number of gaps.
    auto const side = static_cast<std::size_t>(square_root(most));
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

  /// Returns the stretches in order of address. They do not overlap.
  [[nodiscard]] std::span<Stretch const> stretches() const noexcept { return stretches_; }
  /// Returns false if the stretches are the whole arena.
  [[nodiscard]] bool is_part() const noexcept { return is_part_; }

 private:
  static constexpr std::size_t growth = 8;
  static constexpr std::size_t least_at_first = 8;

  // Returns `all_ranges` in place of a large part, which would cost as much and might find nothing.
  static std::size_t up_to(std::size_t most, std::size_t ranges) noexcept {
    return most > ranges / 4 ? all_ranges : most;
  }
  void add_around(RangeList const& list, std::uint32_t node, std::size_t reach) {
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

  std::vector<Stretch> stretches_;
  std::vector<std::uint32_t> seeds_;
  bool is_part_ = false;
};

using SearchScope = BasicSearchScope<>;

/// Returns the window in `scope` of at least `count` granules that costs least to evict; among
/// equals the one with the lowest address.
///
/// @param price  function that returns what evicting a block costs, nothing if it may not leave
/// @throws std::bad_alloc
/// @cost   O(ranges in the scope): the cheapest window that ends at a range starts as late as it
///         can
template <class Price>
[[nodiscard]] std::optional<EvictionWindow> cheapest_eviction_window(RangeList const& list,
                                                                     SearchScope const& scope,
                                                                     std::uint32_t count,
                                                                     Price price) {
  struct Item {
    std::uint32_t node;
    std::uint64_t cost;
  };
  struct Window {
    std::uint32_t from;
    std::uint32_t past;
    std::uint64_t granules;
    std::uint64_t cost;
  };
  std::vector<Item> items;  // the ranges between two that must stay
  std::optional<Window> best;
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
      if (granules < count || (best && cost >= best->cost)) {
        continue;
      }
      best = Window{items[from].node, range.next, granules, cost};
    }
  }
  if (!best) {
    return std::nullopt;
  }
  std::optional<EvictionWindow> window{std::in_place};
  window->address = list.address(list.table[best->from].segment, list.table[best->from].first);
  window->bytes = static_cast<std::size_t>(best->granules) * granule_bytes;
  window->cost = best->cost;
  for (std::uint32_t node = best->from; node != best->past; node = list.table[node].next) {
    if (list.table[node].state == RangeState::taken) {
      window->owners.push_back(list.table[node].owner());
    }
  }
  return window;
}

/// Converts the ranges of an arena to the `Layout` of a compaction policy, and the policy's plan
/// back to moves of ranges. Keeps its memory for the next pass.
///
/// Threads  thread-compatible.
template <class = Lazily>
class BasicLayoutSnapshot {
 public:
  static constexpr bool is_thread_safe = false;

  /// `granules_per_look` is as in `Layout`.
  explicit BasicLayoutSnapshot(double granules_per_look) : granules_per_look_{granules_per_look} {}

  /// Reads the ranges in `scope`. Everything that must stay becomes a fixed block: blocks that may
  /// not move, claimed bytes, and all that is between two stretches. The layout ends with the last
  /// stretch.
  ///
  /// @throws std::bad_alloc
  /// @cost   O(ranges in the scope)
  template <std::predicate<BlockId> CanMove>
  void read(RangeList const& list, SearchScope const& scope, CanMove can_move) {
    blocks_.clear();
    nodes_.clear();
    if (!scope.is_part()) {
      blocks_.reserve(list.table.taken_ranges + list.segments().size());
      nodes_.reserve(list.table.taken_ranges + list.segments().size());
    }
    end_ = 0;
    is_part_ = scope.is_part();
    for (auto const [from, past] : scope.stretches()) {
      if (std::uint32_t const first = list.table[from].first; first != end_) {
        add({end_, first - end_, true}, from);
      }
      for (std::uint32_t node = from; node != past; node = list.table[node].next) {
        RangeNode const& range = list.table[node];
        if (range.state != RangeState::free) {
          bool const is_fixed = range.state != RangeState::taken || !can_move(range.owner());
          add({range.first, range.count, is_fixed}, node);
        }
      }
      end_ = list.table[past].first;
    }
  }

  [[nodiscard]] Layout layout() const noexcept {
    return {blocks_, end_, is_part_, granules_per_look_};
  }

  /// Converts `answer`, a policy's plan for this layout. Call it once for each `read`.
  ///
  /// @throws std::bad_alloc
  /// @cost   O(m) for m moves in order of address, else O(m log n)
  [[nodiscard]] CompactionPlan to_plan(RangeList const& list, LayoutPlan const& answer) {
    CompactionPlan plan;
    plan.makes_bytes = std::size_t{answer.count} * granule_bytes;
    plan.cost_bytes = static_cast<std::size_t>(answer.cost) * granule_bytes;
    if (answer.moves.empty()) {
      return plan;
    }
    MoveClaims& claims = plan.claims;
    plan.moves.reserve(answer.moves.size());
    claims.steps.reserve(answer.moves.size());
    claims.pieces.reserve(answer.moves.size() + 1);
    std::size_t hint = 0;
    for (auto const [block, to] : answer.moves) {
      std::uint32_t const count = blocks_[block].count;
      std::uint32_t const before = node_before(list, to, hint);
      Move& move = plan.moves.emplace_back();  // filled in place, which saves a copy
      move.range = RangeId{nodes_[block]};
      move.owner = list.table[nodes_[block]].owner();
      move.to = list.address(to);
      move.to_segment = list.segment_at(to);
      move.bytes = std::size_t{count} * granule_bytes;
      for (std::uint32_t node = before; list.table[node].first < to + count;
           node = list.table[node].next) {
        if (list.is_free(node) && list.table[node].end() > to) {
          move.fence.add(list.fence(node));
        }
      }
      claims.steps.push_back({nodes_[block], to});
      claims.pieces.push_back({before, to, count});
    }
    MoveClaims::Piece const room{node_before(list, answer.first, hint), answer.first, answer.count};
    // Only after all moves are converted, since `node_before` needs the old places, and a block may
    // move more than once.
    for (std::size_t i = 0; i < plan.moves.size(); ++i) {
      LayoutMove const& move = answer.moves[i];
      plan.moves[i].from = list.address(blocks_[move.block].first);
      plan.moves[i].from_segment = list.segment_at(blocks_[move.block].first);
      blocks_[move.block].first = move.to;
    }

    auto const is_lower = [](MoveClaims::Piece const& a, MoveClaims::Piece const& b) {
      return a.first < b.first;
    };
    sort_runs(claims.pieces, is_lower);
    claims.pieces.insert(
        std::upper_bound(claims.pieces.begin(), claims.pieces.end(), room, is_lower), room);
    std::size_t last = 0;
    for (MoveClaims::Piece const& piece : claims.pieces) {
      MoveClaims::Piece& into = claims.pieces[last];
      if (piece.first <= into.first + into.count) {
        into.count = std::max(into.first + into.count, piece.first + piece.count) - into.first;
      } else {
        claims.pieces[++last] = piece;
      }
    }
    claims.pieces.resize(last + 1);
    return plan;
  }

 private:
  // Returns the last range that starts at or before `granule`, or the next one if a stretch starts
  // there. Updates `hint`, the number of a block beside the last result: the next call mostly looks
  // behind the same block or the one above it.
  [[nodiscard]] std::uint32_t
  node_before(RangeList const& list, std::uint32_t granule, std::size_t& hint) const {
    auto const is_after = [&](std::size_t i) {
      return (i == 0 || blocks_[i - 1].first <= granule) &&
             (i == blocks_.size() || granule < blocks_[i].first);
    };
    if (!is_after(hint)) {
      hint = hint != blocks_.size() && is_after(hint + 1) ? hint + 1 : number_after(granule);
    }
    return hint == 0 ? list.front(list.segments().front()) : nodes_[hint - 1];
  }
  // The number of the first block that starts after `granule`.
  [[nodiscard]] std::size_t number_after(std::uint32_t granule) const {
    auto const after = std::upper_bound(
        blocks_.begin(), blocks_.end(), granule, [](std::uint32_t at, LayoutBlock const& block) {
          return at < block.first;
        });
    return static_cast<std::size_t>(after - blocks_.begin());
  }

  void add(LayoutBlock block, std::uint32_t node) {
    blocks_.push_back(block);
    nodes_.push_back(node);
  }

  std::vector<LayoutBlock> blocks_;
  std::vector<std::uint32_t> nodes_;  // node of each block; between stretches, of the next range
  std::uint32_t end_ = 0;
  bool is_part_ = false;
  double granules_per_look_;
};

using LayoutSnapshot = BasicLayoutSnapshot<>;

/// Searches the ranges of an arena for a way to make room: blocks to move together, or neighbours
/// to evict. Does not change the arena; keeps its memory for the next search.
///
/// Units    granules, except in the plans and windows that it returns.
/// Threads  thread-compatible.
template <CompactionPolicy Compaction>
class RoomSearch {
 public:
  static constexpr bool is_thread_safe = false;

  /// `bytes_per_look` is as in `ArenaOptions`.
  explicit RoomSearch(Compaction compaction = Compaction(), double bytes_per_look = 0)
      : snapshot_{bytes_per_look / granule_bytes}, compaction_{std::move(compaction)} {}

  /// Returns the cheapest plan found that makes a free range of `count` by moving at most `budget`,
  /// looking at about `most_ranges` ranges. Returns nothing if there is none, or if a wider search
  /// would take less time than its moves.
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

  /// Returns a plan for about the largest free range that moving at most `budget` can make; nothing
  /// if that is not larger than the present largest one.
  ///
  /// @throws std::bad_alloc
  template <class Map, std::predicate<BlockId> CanMove>
  [[nodiscard]] std::optional<CompactionPlan>
  plan_largest(Map const& map, std::uint64_t budget, CanMove can_move) {
    std::uint64_t reached = map.largest();
    std::uint64_t missed = map.table().free_granules() + 1;
    if (reached + 1 == missed) {
      return std::nullopt;  // known without a search
    }
    look_at(map, all_ranges);
    snapshot_.read(map.list(), scope_, can_move);
    Layout layout = snapshot_.layout();
    layout.granules_per_look = 0;  // no time limit: the caller has chosen when to compact
    std::optional<LayoutPlan> best;
    // Tries the whole of it first, then bisects by ratio, since sizes differ by orders of
    // magnitude.
    for (std::uint64_t wanted = missed - 1; wanted > reached && wanted < missed;) {
      if (auto plan = compaction_.plan(layout, static_cast<std::uint32_t>(wanted), budget)) {
        reached = std::max<std::uint64_t>(wanted, plan->count);
        best = std::move(plan);
      } else {
        missed = wanted;
      }
      if (missed - reached <= reached / 16) {
        break;
      }
      wanted = square_root(std::max<std::uint64_t>(reached, 1) * missed);
    }
    return to_plan(map, best);
  }

  /// Returns a plan by which every block that may move slides down to the end of the block below,
  /// so that the free ranges join at the top; nothing if no block can move.
  ///
  /// @throws std::bad_alloc
  template <class Map, std::predicate<BlockId> CanMove>
  [[nodiscard]] std::optional<CompactionPlan> plan_slide(Map const& map, CanMove can_move) {
    look_at(map, all_ranges);
    snapshot_.read(map.list(), scope_, can_move);
    Layout const layout = snapshot_.layout();
    LayoutPlan slide;
    std::uint32_t end = 0;  // end of the blocks so far, at their new places
    for (std::uint32_t i = 0; i < layout.blocks.size(); ++i) {
      LayoutBlock const& block = layout.blocks[i];
      if (block.is_fixed || block.first == end) {
        end = block.end();
        continue;
      }
      slide.moves.push_back({i, end});
      slide.cost += block.count;
      end += block.count;
      slide.first = end;
      slide.count =
          (i + 1 < layout.blocks.size() ? layout.blocks[i + 1].first : layout.end) - slide.first;
    }
    return slide.moves.empty() ? std::nullopt : to_plan(map, slide);
  }

  /// Returns the neighbouring ranges with room for `count` whose blocks cost least to evict,
  /// looking at about `most_ranges` ranges.
  ///
  /// @param cost  function that returns what evicting a block costs, nothing if it may not leave
  /// @throws std::bad_alloc
  template <class Map, class Cost>
  [[nodiscard]] std::optional<EvictionWindow>
  cheapest_window(Map const& map, std::uint32_t count, Cost cost, std::size_t most_ranges) {
    look_at(map, most_ranges);
    return cheapest_eviction_window(map.list(), scope_, count, std::move(cost));
  }

 private:
  // The device moves 16 KiB while the host looks at one range, which takes about 20 ns.
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

SPILLWAY_COMPILED_PART(class BasicSearchScope<>);
SPILLWAY_COMPILED_PART(class BasicLayoutSnapshot<>);

}  // namespace spillway::detail
