// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/policy/exchange_search.hpp>
#include <spillway/policy/layout_line.hpp>
#include <spillway/policy/window_search.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace spillway {

/// Moves as few bytes as it can find a way to: slides runs of blocks together, empties runs into
/// gaps elsewhere, and exchanges blocks so that far-off gaps come together.
///
/// Of plans that move about as much it takes the one after which the rest of the free bytes lies
/// closer together. Exchanges, and that look ahead, are for layouts of at most `few_blocks`.
///
/// Threads  thread-compatible.
/// Cost     O(n) for n blocks, and a search that is bounded by constants
class SlidingCompaction {
 public:
  static constexpr bool is_thread_safe = false;
  static constexpr bool moves_blocks = true;
  static constexpr std::size_t few_blocks = 4096;

  [[nodiscard]] std::optional<LayoutPlan>
  plan(Layout const& layout, std::uint32_t count, std::uint64_t budget);

 private:
  struct Best {
    std::optional<LayoutPlan> plan;
    std::uint64_t score = 0;
  };

  [[nodiscard]] static LayoutPlan slide(LayoutLine const& line, BlockRun const& run);
  [[nodiscard]] std::uint64_t
  score(LayoutLine const& line, LayoutPlan const& plan, std::uint32_t count);

  std::vector<LayoutBlock> after_;
};

inline std::optional<LayoutPlan>
SlidingCompaction::plan(Layout const& layout, std::uint32_t count, std::uint64_t budget) {
  LayoutLine const line{layout};
  Best best;
  // A plan is worth looking for while it moves less than this.
  std::uint64_t bound = std::min(budget, std::numeric_limits<std::uint64_t>::max() / 4) + 1;
  auto const consider = [&](LayoutPlan plan) {
    std::uint64_t const mine = score(line, plan, count);
    if (plan.cost <= budget && (!best.plan || mine < best.score)) {
      best = {std::move(plan), mine};
      bound = std::min(bound, mine);
    }
    return bound;
  };
  if (BlockRun const run = cheapest_slide(line, count); run.room >= count && run.cost < bound) {
    consider(slide(line, run));
  }
  WindowSearch{line, {}}.search(count, bound, consider);
  if (line.size() <= few_blocks) {
    ExchangeSearch{line, {}}.search(count, bound, consider);
  }
  return std::move(best.plan);
}

inline LayoutPlan SlidingCompaction::slide(LayoutLine const& line, BlockRun const& run) {
  LayoutPlan plan;
  plan.cost = run.cost;
  std::uint32_t at = line.gap_first(run.from);
  for (std::size_t i = run.from; i < run.to; ++i) {
    plan.moves.push_back({static_cast<std::uint32_t>(i), at});
    at += line.block(i).count;
  }
  plan.first = at;
  plan.count = line.gap_end(run.to) - at;
  return plan;
}

// What the plan moves, and a tenth of what it would then take to join all free bytes.
inline std::uint64_t
SlidingCompaction::score(LayoutLine const& line, LayoutPlan const& plan, std::uint32_t count) {
  if (line.size() > few_blocks) {
    return plan.cost;
  }
  after_.assign(line.layout().blocks.begin(), line.layout().blocks.end());
  for (auto const [block, to] : plan.moves) {
    after_[block].first = to;
  }
  after_.push_back({plan.first, count, false});  // the one the room is made for
  std::sort(after_.begin(), after_.end(), [](LayoutBlock const& a, LayoutBlock const& b) {
    return a.first < b.first;
  });
  LayoutLine const next{{after_, line.layout().end}};
  std::uint64_t room = 0;
  for (std::size_t i = 0; i <= next.size(); ++i) {
    room += next.gap(i);
  }
  return plan.cost + (room == 0 ? 0 : cheapest_slide(next, room).cost / 10);
}

static_assert(CompactionPolicy<SlidingCompaction>);

}  // namespace spillway
