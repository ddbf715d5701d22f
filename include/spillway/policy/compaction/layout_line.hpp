// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/compaction_policy.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace spillway::detail {

/// A layout as alternating gaps and blocks: gap 0, block 0, gap 1, ..., block n - 1, gap n.
///
/// Gaps may be empty. Units: granules.
class LayoutLine {
 public:
  explicit LayoutLine(Layout const& layout) noexcept : layout_{layout} {}

  /// The number of blocks; there is one gap more.
  [[nodiscard]] std::size_t size() const noexcept { return layout_.blocks.size(); }
  [[nodiscard]] LayoutBlock const& block(std::size_t i) const noexcept { return layout_.blocks[i]; }
  [[nodiscard]] std::uint32_t gap_first(std::size_t i) const noexcept {
    return i == 0 ? 0 : layout_.blocks[i - 1].end();
  }
  [[nodiscard]] std::uint32_t gap_end(std::size_t i) const noexcept {
    return i == size() ? layout_.end : layout_.blocks[i].first;
  }
  [[nodiscard]] std::uint32_t gap(std::size_t i) const noexcept {
    return gap_end(i) - gap_first(i);
  }
  [[nodiscard]] Layout const& layout() const noexcept { return layout_; }

 private:
  Layout layout_;
};

/// Neighbouring blocks, `from` to `to` - 1, with the gaps `from` to `to` around and between them.
struct BlockRun {
  std::size_t from = 0;
  std::size_t to = 0;
  std::uint64_t cost = 0;  ///< granules of its blocks
  std::uint64_t room = 0;  ///< granules of its gaps

  [[nodiscard]] bool is_none() const noexcept { return room == 0; }
};

/// The run without fixed blocks whose gaps hold `count` granules and whose blocks are fewest granules.
///
/// @return  a run without room if there is none
/// @cost    O(n): the cheapest run that ends at a gap starts as late as it can
[[nodiscard]] inline BlockRun cheapest_slide(LayoutLine const& line, std::uint64_t count) noexcept {
  BlockRun best;
  BlockRun run;
  for (std::size_t i = 0; i <= line.size(); ++i) {
    run.to = i;
    run.room += line.gap(i);
    while (run.from < i && run.room - line.gap(run.from) >= count) {
      run.room -= line.gap(run.from);
      run.cost -= line.block(run.from).count;
      ++run.from;
    }
    if (run.room >= count && (best.is_none() || run.cost < best.cost)) {
      best = run;
    }
    if (i == line.size()) {
      break;
    }
    if (line.block(i).is_fixed) {
      run = {i + 1, i + 1, 0, 0};
    } else {
      run.cost += line.block(i).count;
    }
  }
  return best;
}

}  // namespace spillway::detail
