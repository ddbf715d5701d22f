// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/growing_array.hpp>
#include <spillway/core/range_table.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace spillway::detail {

/// The ranges of some segments, each linked to its neighbours by address, with their fences.
///
/// All segments lie on one line of granules with at least one granule between them; no range
/// reaches across. Keeps links and places and makes no decision.
///
/// Units    granules from the start of the line; a node is the number of a range.
/// Threads  thread-compatible.
class RangeList {
 public:
  static constexpr bool is_thread_safe = false;
  static constexpr std::uint64_t line_granules = 0xFFFFFFFFU;  ///< 1 TiB, short of one

  struct Span {
    std::byte* base = nullptr;
    std::uint32_t first = 0;
    std::uint32_t count = 0;       ///< 0: not in use
    std::uint32_t wall = no_node;  ///< a node that is no range: before the first, after the last
    std::uintptr_t origin = 0;     ///< where granule 0 of the line would be, modulo 2^64

    [[nodiscard]] std::uint32_t end() const noexcept { return first + count; }
  };

  /// Adds a segment of one free range. @returns that range
  /// @throws std::bad_alloc, ContractViolation when the line is full; nothing has changed then
  [[nodiscard]] std::uint32_t add_segment(std::byte* base, std::uint32_t count);

  /// Takes out the segment of `node`, which is all there is in it, and the node.
  void remove_segment(std::uint32_t node) noexcept;

  /// A slot for a new range. @throws std::bad_alloc; nothing has changed then
  [[nodiscard]] std::uint32_t acquire() {
    if (table.idle_nodes() == 0) {
      grow();
    }
    return table.acquire();
  }

  /// Makes two ranges of a segment neighbours.
  void connect(std::uint32_t low, std::uint32_t high) noexcept {
    table[low].next = high;
    table[high].prev = low;
  }

  /// Puts a range between two others.
  void place(std::uint32_t node,
             std::uint32_t prev,
             std::uint32_t next,
             std::uint16_t segment) noexcept {
    table[node].segment = segment;
    connect(prev, node);
    connect(node, next);
  }

  /// Lets each of two neighbours know whether the other one is free.
  void introduce(std::uint32_t low, std::uint32_t high) noexcept {
    table[low].set(RangeNode::is_next_free, is_free(high));
    table[high].set(RangeNode::is_prev_free, is_free(low));
  }

  [[nodiscard]] Fence fence(std::uint32_t node) const noexcept {
    return table[node].is(RangeNode::has_fence) ? fences_[node] : Fence{};
  }

  [[gnu::always_inline]] void add_fence(std::uint32_t node, Fence const& fence) noexcept {
    if (fence.is_empty()) {
      return;
    }
    if (table[node].is(RangeNode::has_fence)) {
      join(fences_[node], fence);
    } else {
      fences_[node] = fence;
      table[node].set(RangeNode::has_fence);
    }
  }

  [[gnu::always_inline]] void take_over_fence(std::uint32_t to, std::uint32_t from) noexcept {
    if (table[from].is(RangeNode::has_fence)) {
      add_fence(to, fences_[from]);
    }
  }

  [[nodiscard]] bool is_free(std::uint32_t node) const noexcept {
    return table[node].state == RangeState::free;
  }

  /// The address of a granule that lies in `segment`.
  [[nodiscard]] std::byte* address(std::uint16_t segment, std::uint32_t granule) const noexcept {
    // In numbers, since the origin itself may lie outside all memory. It may have wrapped around; the
    // sum wraps back. NOLINTNEXTLINE(performance-no-int-to-ptr)
    return reinterpret_cast<std::byte*>(spans_[segment].origin +
                                        std::size_t{granule} * granule_bytes);
  }
  /// The address of a granule in any segment. O(log segments).
  [[nodiscard]] std::byte* address(std::uint32_t granule) const noexcept {
    auto const after = std::upper_bound(
        segments_.begin(), segments_.end(), granule, [&](std::uint32_t at, std::uint16_t segment) {
          return at < spans_[segment].first;
        });
    return address(*(after - 1), granule);
  }

  /// The lowest range of a segment.
  [[nodiscard]] std::uint32_t front(std::uint16_t segment) const noexcept {
    return table[spans_[segment].wall].next;
  }
  [[nodiscard]] Span const& span(std::uint16_t segment) const noexcept { return spans_[segment]; }
  /// The segments in use, in order of their place on the line.
  [[nodiscard]] std::vector<std::uint16_t> const& segments() const noexcept { return segments_; }

  RangeTable table;

 private:
  // Out of line, so that what is done each time stays small enough to be inlined.
  [[gnu::noinline]] static void join(Fence& into, Fence const& fence) noexcept { into.add(fence); }
  [[gnu::noinline]] void grow() {
    if (fences_.size() == table.slots()) {
      fences_.grow();
    }
    table.grow();
  }

  GrowingArray<Fence> fences_{1};  // by node; read only where the node says that it has one
  std::vector<Span> spans_;
  std::vector<std::uint16_t> segments_;
};

inline std::uint32_t RangeList::add_segment(std::byte* base, std::uint32_t count) {
  std::uint64_t first = 0;
  auto rank = segments_.begin();
  for (; rank != segments_.end() && first + count >= spans_[*rank].first; ++rank) {
    first = std::uint64_t{spans_[*rank].end()} + 1;
  }
  auto const vacant = std::find_if(
      spans_.begin(), spans_.end(), [](Span const& span) noexcept { return span.count == 0; });
  auto const segment = static_cast<std::uint16_t>(vacant - spans_.begin());
  expects(count != 0 && first + count < line_granules && segment != 0xFFFFU,
          "too many segments, or too large for the arena's line");
  if (vacant == spans_.end()) {
    spans_.emplace_back();
  }
  segments_.insert(rank, segment);
  std::uint32_t node = no_node;
  std::uint32_t wall = no_node;
  try {
    node = acquire();
    wall = acquire();
  } catch (...) {
    if (node != no_node) {
      table.release(node);
    }
    std::erase(segments_, segment);
    throw;
  }

  spans_[segment] = {base,
                     static_cast<std::uint32_t>(first),
                     count,
                     wall,
                     reinterpret_cast<std::uintptr_t>(base) - first * granule_bytes};
  table[wall] = {};
  table[wall].first = spans_[segment].end();
  table[wall].segment = segment;
  table[wall].state = RangeState::claimed;
  table[node] = {};
  table[node].first = spans_[segment].first;
  table[node].count = count;
  place(node, wall, wall, segment);
  return node;
}

inline void RangeList::remove_segment(std::uint32_t node) noexcept {
  std::uint16_t const segment = table[node].segment;
  table.release(node);
  table.release(spans_[segment].wall);
  spans_[segment] = {};
  segments_.erase(std::find(segments_.begin(), segments_.end(), segment));
}

}  // namespace spillway::detail
