// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/arena/move_plan.hpp>
#include <spillway/arena/range_list.hpp>
#include <spillway/arena/search_scope.hpp>
#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/core/range_table.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace spillway::detail {

/// The ranges of an arena as a planner wants them: blocks in a row, gaps implied.
///
/// Turns what a planner answers back into moves of ranges. Keeps its memory for the next pass.
/// Threads  thread-compatible.
class LayoutSnapshot {
 public:
  static constexpr bool is_thread_safe = false;

  /// Reads the ranges in `scope`. What no planner may touch becomes a fixed block: blocks that may not
  /// move, claimed bytes, and all that lies between the stretches; the line ends with the last one.
  ///
  /// @throws std::bad_alloc
  /// @cost   O(ranges in the scope)
  template <std::predicate<BlockId> CanMove>
  void read(RangeList const& list, SearchScope const& scope, CanMove can_move);

  [[nodiscard]] Layout layout() const noexcept { return {blocks_, end_, is_part_}; }

  /// The moves of `answer`, a planner's answer to this layout. Call once for each `read`.
  ///
  /// @throws std::bad_alloc
  /// @cost   O(m log n) for m moves
  [[nodiscard]] CompactionPlan to_plan(RangeList const& list, LayoutPlan const& answer);

 private:
  // The last range that starts at or before `granule`, or the one after where a stretch starts.
  [[nodiscard]] std::uint32_t node_before(RangeList const& list, std::uint32_t granule) const {
    auto const after = std::upper_bound(
        blocks_.begin(), blocks_.end(), granule, [](std::uint32_t at, LayoutBlock const& block) {
          return at < block.first;
        });
    return after == blocks_.begin() ? list.front(list.segments().front())
                                    : nodes_[static_cast<std::size_t>(after - blocks_.begin()) - 1];
  }

  void add(LayoutBlock block, std::uint32_t node) {
    blocks_.push_back(block);
    nodes_.push_back(node);
  }

  std::vector<LayoutBlock> blocks_;
  std::vector<std::uint32_t> nodes_;  // of each block; of a place between stretches what comes next
  std::uint32_t end_ = 0;
  bool is_part_ = false;
};

template <std::predicate<BlockId> CanMove>
void LayoutSnapshot::read(RangeList const& list, SearchScope const& scope, CanMove can_move) {
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

inline CompactionPlan LayoutSnapshot::to_plan(RangeList const& list, LayoutPlan const& answer) {
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
  claims.pieces.push_back({node_before(list, answer.first), answer.first, answer.count});
  for (auto const [block, to] : answer.moves) {
    std::uint32_t const count = blocks_[block].count;
    std::uint32_t const before = node_before(list, to);
    Move move;
    move.range = RangeId{nodes_[block]};
    move.owner = list.table[nodes_[block]].owner();
    move.to = list.address(to);
    move.bytes = std::size_t{count} * granule_bytes;
    for (std::uint32_t node = before; list.table[node].first < to + count;
         node = list.table[node].next) {
      if (list.is_free(node) && list.table[node].end() > to) {
        move.fence.add(list.fence(node));
      }
    }
    plan.moves.push_back(move);
    claims.steps.push_back({nodes_[block], to});
    claims.pieces.push_back({before, to, count});
  }
  // Only now, since node_before looks at the places: a block may move more than once.
  for (std::size_t i = 0; i < plan.moves.size(); ++i) {
    LayoutMove const& move = answer.moves[i];
    plan.moves[i].from = list.address(blocks_[move.block].first);
    blocks_[move.block].first = move.to;
  }

  std::sort(claims.pieces.begin(), claims.pieces.end(), [](auto const& a, auto const& b) {
    return a.first < b.first;
  });
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

}  // namespace spillway::detail
