// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/core/config.hpp>

#include <cstddef>
#include <cstdint>

namespace spillway::detail {

/// A view of a layout for the searches for compaction plans, as alternating gaps and blocks: gap 0,
/// block 0, gap 1, ..., block n - 1, gap n.
///
/// Gaps may be empty. Units: granules.
template <class = Lazily>
class BasicLayoutLine {
 public:
  explicit BasicLayoutLine(Layout const& layout) noexcept : layout_{layout} {}

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

using LayoutLine = BasicLayoutLine<>;

/// Neighbouring blocks, `from` to `to` - 1, with the gaps `from` to `to` around and between them.
struct BlockSpan {
  std::size_t from = 0;
  std::size_t to = 0;
  std::uint64_t cost = 0;  ///< granules of its blocks
  std::uint64_t room = 0;  ///< granules of its gaps

  [[nodiscard]] bool is_none() const noexcept { return room == 0; }
};

/// Returns the span, without fixed blocks, whose gaps hold `count` granules and whose blocks are
/// smallest in total: the cheapest range that sliding can make.
///
/// @return  a span without room if there are none
/// @cost    O(n): the cheapest span that ends at a gap starts as late as it can
[[nodiscard]] inline BlockSpan cheapest_slide(LayoutLine const& line,
                                              std::uint64_t count) noexcept {
  BlockSpan best;
  BlockSpan span;
  for (std::size_t i = 0; i <= line.size(); ++i) {
    span.to = i;
    span.room += line.gap(i);
    while (span.from < i && span.room - line.gap(span.from) >= count) {
      span.room -= line.gap(span.from);
      span.cost -= line.block(span.from).count;
      ++span.from;
    }
    if (span.room >= count && (best.is_none() || span.cost < best.cost)) {
      best = span;
    }
    if (i == line.size()) {
      break;
    }
    if (line.block(i).is_fixed) {
      span = {i + 1, i + 1, 0, 0};
    } else {
      span.cost += line.block(i).count;
    }
  }
  return best;
}

SPILLWAY_COMPILED_PART(class BasicLayoutLine<>);

}  // namespace spillway::detail
