// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/policy/exchange_search.hpp>
#include <spillway/policy/layout_line.hpp>
#include <spillway/policy/window_search.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace spillway {

/// Slides runs of blocks together, or empties a run into gaps elsewhere, whichever moves less.
///
/// Threads  thread-compatible.
class SlidingCompaction {
 public:
  static constexpr bool is_thread_safe = false;
  static constexpr bool moves_blocks = true;

  [[nodiscard]] std::optional<LayoutPlan>
  plan(Layout const& layout, std::uint32_t count, std::uint64_t budget) {
    LayoutLine const line{layout};
    std::optional<LayoutPlan> best;
    std::uint64_t bound = budget == ~std::uint64_t{0} ? budget : budget + 1;
    BlockRun const run = cheapest_slide(line, count);
    double best_score = 1e300;
    auto const consider = [&](LayoutPlan&& plan) {
      double const score =
          static_cast<double>(plan.cost) + 0.1 * static_cast<double>(cost_after(line, plan, count));
      if (plan.cost <= budget && score < best_score) {
        best_score = score;
        best = std::move(plan);
        bound = std::min(bound, static_cast<std::uint64_t>(score) + 1);
      }
      return bound;
    };
    if (!run.is_none() && run.cost < bound) {
      consider(slide(line, run));
    }
    WindowSearch{line, {}}.search(count, bound, consider);
    if (!best || best->cost > count) {
      ExchangeSearch{line, {}}.search(count, bound, consider);
    }
    return best;
  }

 private:
  static LayoutPlan slide(LayoutLine const& line, BlockRun const& run) {
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

  std::uint64_t cost_after(LayoutLine const& line, LayoutPlan const& plan, std::uint32_t count) {
    after_.assign(line.layout().blocks.begin(), line.layout().blocks.end());
    for (auto const [block, to] : plan.moves) {
      after_[block].first = to;
    }
    after_.push_back({plan.first, count, true});
    std::sort(after_.begin(), after_.end(), [](LayoutBlock const& a, LayoutBlock const& b) {
      return a.first < b.first;
    });
    for (auto& b : after_)
      b.is_fixed = false;
    LayoutLine const next{{after_, line.layout().end}};
    std::uint64_t room = 0;
    for (std::size_t i = 0; i <= next.size(); ++i)
      room += next.gap(i);
    return room == 0 ? 0 : cheapest_slide(next, room).cost;
  }
  std::vector<LayoutBlock> after_;
};

static_assert(CompactionPolicy<SlidingCompaction>);

}  // namespace spillway
