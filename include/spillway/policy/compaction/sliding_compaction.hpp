// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/sort.hpp>
#include <spillway/policy/compaction/exchange_search.hpp>
#include <spillway/policy/compaction/layout_line.hpp>
#include <spillway/policy/compaction/window_search.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace spillway {

/// The default compaction policy: makes a free range with the cheapest plan that it finds.
///
/// It tries three kinds of plans: sliding neighbouring blocks together (`cheapest_slide`), emptying
/// a window into gaps elsewhere (`WindowSearch`), and exchanging blocks so that gaps that are far
/// apart come together (`ExchangeSearch`).
///
/// Plans are compared by the bytes that they move plus a tenth of the bytes that they leave between
/// free ranges, so a plan that keeps the free ranges close together may be preferred to one that
/// moves less. That is done only in layouts of at most `few_blocks` that show the whole arena.
/// Exchanges are tried only there, too, and only if the other two kinds of plans move much.
///
/// Threads  thread-compatible.
/// Cost     O(n) for n blocks, and a search of at most as many looks as a constant says, or of 4 n
///          if that is more
template <class = detail::Lazily>
class BasicSlidingCompaction {
 public:
  using SlidingCompaction = BasicSlidingCompaction;  // what a derived class calls its base

  static constexpr bool is_thread_safe = false;
  static constexpr bool moves_blocks = true;
  static constexpr std::size_t few_blocks = 4096;

  [[nodiscard]] std::optional<LayoutPlan>
  plan(Layout const& layout, std::uint32_t count, std::uint64_t budget) {
    detail::LayoutLine const line{layout};
    if (room(line) < count) {
      return std::nullopt;
    }
    std::optional<LayoutPlan> best;
    // Only plans that move less than this are of interest.
    std::uint64_t bound = std::min(budget, std::numeric_limits<std::uint64_t>::max() / 4) + 1;
    std::uint64_t best_score = 0;
    auto const take = [&](LayoutPlan plan) {
      if (std::uint64_t const mine = score(line, plan, count); !best || mine < best_score) {
        bound = std::min({bound, mine, plan.cost + 1});
        best_score = mine;
        best = std::move(plan);
      }
      return bound;
    };
    if (detail::BlockSpan const span = cheapest_slide(line, count);
        !span.is_none() && span.cost < bound) {
      take(slide(line, span));
    }
    detail::WindowSearch{line, layout.is_part ? quick_search(line) : full_search(line)}.search(
        count, bound, take);
    bool const is_dear = !best || 2 * best->cost > count;
    if (is_dear && is_searched_long(layout)) {
      detail::ExchangeSearch::Limits limits;
      limits.looks = std::min(limits.looks, layout.looks_worth(bound));
      detail::ExchangeSearch{line, limits}.search(count, bound, take);
    }
    return best;
  }

 private:
  [[nodiscard]] static std::uint64_t room(detail::LayoutLine const& line) noexcept {
    std::uint64_t room = line.layout().end;
    for (LayoutBlock const& block : line.layout().blocks) {
      room -= block.count;
    }
    return room;
  }
  [[nodiscard]] static bool is_searched_long(Layout const& layout) noexcept {
    return layout.blocks.size() <= few_blocks && !layout.is_part;
  }
  [[nodiscard]] static detail::WindowSearch::Limits
  quick_search(detail::LayoutLine const& line) noexcept {
    return detail::WindowSearch::Limits{.tries = 12, .nested_tries = 2, .looks = 8 * line.size()};
  }
  /// Returns the limits of the window search. With very many blocks they suffice for vacating a
  /// window of half of the blocks, which still takes less time than sliding all of them.
  [[nodiscard]] static detail::WindowSearch::Limits
  full_search(detail::LayoutLine const& line) noexcept {
    detail::WindowSearch::Limits limits;
    limits.looks = std::max<std::uint64_t>(limits.looks, 4 * line.size());
    return limits;
  }
  [[nodiscard]] static LayoutPlan slide(detail::LayoutLine const& line,
                                        detail::BlockSpan const& span) {
    LayoutPlan plan;
    plan.cost = span.cost;
    plan.moves.reserve(span.to - span.from);
    std::uint32_t at = line.gap_first(span.from);
    for (std::size_t i = span.from; i < span.to; ++i) {
      plan.moves.push_back({static_cast<std::uint32_t>(i), at});
      at += line.block(i).count;
    }
    plan.first = at;
    plan.count = line.gap_end(span.to) - at;
    return plan;
  }

  /// The granules that the plan moves, plus a tenth of those that then lie between free granules.
  [[nodiscard]] std::uint64_t
  score(detail::LayoutLine const& line, LayoutPlan const& plan, std::uint32_t count) {
    if (!is_searched_long(line.layout())) {
      return plan.cost;
    }
    place_.resize(line.size());
    for (std::size_t i = 0; i < line.size(); ++i) {
      place_[i] = line.block(i).first;
    }
    for (auto const [block, to] : plan.moves) {
      place_[block] = to;
    }
    arrived_.assign(1, {plan.first, count, false});  // the block that the room is made for
    for (auto const [block, to] : plan.moves) {
      if (place_[block] == to) {
        arrived_.push_back({to, line.block(block).count, false});
      }
    }
    detail::sort_runs(arrived_,
                      [](LayoutBlock const& a, LayoutBlock const& b) { return a.first < b.first; });
    std::uint64_t taken = count;
    for (std::size_t i = 0; i < line.size(); ++i) {
      taken += line.block(i).count;
    }
    // Finds the first gap from the low end and from the high end.
    std::uint32_t low = 0;
    for (std::size_t i = 0, j = 0;;) {
      while (i < line.size() && place_[i] != line.block(i).first) {
        ++i;
      }
      if (i < line.size() && place_[i] == low) {
        low = line.block(i++).end();
      } else if (j < arrived_.size() && arrived_[j].first == low) {
        low = arrived_[j++].end();
      } else {
        break;
      }
    }
    std::uint32_t high = line.layout().end;
    for (std::size_t i = line.size(), j = arrived_.size();;) {
      while (i > 0 && place_[i - 1] != line.block(i - 1).first) {
        --i;
      }
      if (i > 0 && line.block(i - 1).end() == high) {
        high = line.block(--i).first;
      } else if (j > 0 && arrived_[j - 1].end() == high) {
        high = arrived_[--j].first;
      } else {
        break;
      }
    }
    std::uint64_t const room = line.layout().end - taken;
    return plan.cost + (room == 0 ? 0 : (high - low - room) / 10);
  }

  std::vector<std::uint32_t> place_;  // where each block is after a plan
  std::vector<LayoutBlock> arrived_;  // the blocks that a plan moves, by their new places
};

using SlidingCompaction = BasicSlidingCompaction<>;

SPILLWAY_CHECK_MODEL(CompactionPolicy<SlidingCompaction>);

SPILLWAY_COMPILED_PART(class BasicSlidingCompaction<>);

}  // namespace spillway
