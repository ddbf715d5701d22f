// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/core/config.hpp>
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
/// It tries exchanges only where the others are dear, in layouts of at most `few_blocks` that show
/// the whole arena.
///
/// Threads  thread-safe: it keeps nothing.
/// Cost     O(n) for n blocks, and a search that is bounded by constants
template <class = detail::Lazily>
class BasicSlidingCompaction {
 public:
  using SlidingCompaction = BasicSlidingCompaction;  // what a derived class calls its base

  static constexpr bool is_thread_safe = true;
  static constexpr bool moves_blocks = true;
  static constexpr std::size_t few_blocks = 4096;

  [[nodiscard]] std::optional<LayoutPlan>
  plan(Layout const& layout, std::uint32_t count, std::uint64_t budget) const {
    detail::LayoutLine const line{layout};
    if (room(line) < count) {
      return std::nullopt;
    }
    std::optional<LayoutPlan> best;
    // Only plans that move less than this are of interest.
    std::uint64_t bound = std::min(budget, std::numeric_limits<std::uint64_t>::max() / 4) + 1;
    auto const take = [&](LayoutPlan plan) {
      bound = plan.cost;
      best = std::move(plan);
      return bound;
    };
    if (detail::BlockSpan const span = cheapest_slide(line, count);
        !span.is_none() && span.cost < bound) {
      take(slide(line, span));
    }
    detail::WindowSearch{line, layout.is_part ? quick_search(line) : detail::WindowSearch::Limits{}}
        .search(count, bound, take);
    bool const is_dear = !best || 2 * best->cost > count;
    if (is_dear && line.size() <= few_blocks && !layout.is_part) {
      detail::ExchangeSearch{line, {}}.search(count, bound, take);
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
  [[nodiscard]] static detail::WindowSearch::Limits
  quick_search(detail::LayoutLine const& line) noexcept {
    return detail::WindowSearch::Limits{.tries = 12, .nested_tries = 2, .looks = 8 * line.size()};
  }
  [[nodiscard]] static LayoutPlan slide(detail::LayoutLine const& line,
                                        detail::BlockSpan const& span) {
    LayoutPlan plan;
    plan.cost = span.cost;
    std::uint32_t at = line.gap_first(span.from);
    for (std::size_t i = span.from; i < span.to; ++i) {
      plan.moves.push_back({static_cast<std::uint32_t>(i), at});
      at += line.block(i).count;
    }
    plan.first = at;
    plan.count = line.gap_end(span.to) - at;
    return plan;
  }
};

using SlidingCompaction = BasicSlidingCompaction<>;

static_assert(CompactionPolicy<SlidingCompaction>);

}  // namespace spillway
