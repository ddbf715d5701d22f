// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/compaction_policy.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace spillway {

/// Slides the cheapest run of blocks together.
///
/// Threads  thread-compatible.
/// Cost     O(n)
class SlidingCompaction {
 public:
  static constexpr bool is_thread_safe = false;
  static constexpr bool moves_blocks = true;

  [[nodiscard]] std::optional<LayoutPlan>
  plan(Layout const& layout, std::uint32_t count, std::uint64_t budget) const {
    auto const blocks = layout.blocks;
    std::size_t const n = blocks.size();
    auto const gap_first = [&](std::size_t i) { return i == 0 ? 0 : blocks[i - 1].end(); };
    auto const gap = [&](std::size_t i) {
      return (i == n ? layout.end : blocks[i].first) - gap_first(i);
    };
    std::size_t from = 0;
    std::uint64_t room = 0;
    std::uint64_t cost = 0;
    std::size_t best_from = 0;
    std::size_t best_to = 0;
    std::uint64_t best = budget;
    bool is_found = false;
    for (std::size_t i = 0; i <= n; ++i) {  // gaps from..i, blocks from..i-1
      room += gap(i);
      while (from < i && room - gap(from) >= count) {
        room -= gap(from);
        cost -= blocks[from].count;
        ++from;
      }
      if (room >= count && (cost < best || (cost == best && !is_found))) {
        best = cost;
        best_from = from;
        best_to = i;
        is_found = true;
      }
      if (i < n) {
        cost += blocks[i].count;
        if (blocks[i].is_fixed) {
          from = i + 1;
          room = 0;
          cost = 0;
        }
      }
    }
    if (!is_found) {
      return std::nullopt;
    }
    LayoutPlan plan;
    plan.cost = best;
    std::uint32_t at = gap_first(best_from);
    for (std::size_t i = best_from; i < best_to; ++i) {
      plan.moves.push_back({static_cast<std::uint32_t>(i), at});
      at += blocks[i].count;
    }
    plan.first = at;
    plan.count = (best_to == n ? layout.end : blocks[best_to].first) - at;
    return plan;
  }
};

static_assert(CompactionPolicy<SlidingCompaction>);

}  // namespace spillway
