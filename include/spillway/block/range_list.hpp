// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/range_table.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace spillway {

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

  struct Span {
    std::byte* base = nullptr;
    std::uint32_t first = 0;
    std::uint32_t count = 0;  ///< 0: not in use
    std::uint32_t head = no_node;

    [[nodiscard]] std::uint32_t end() const noexcept { return first + count; }
  };

  /// Adds a segment of one free range. @returns that range
  /// @throws std::bad_alloc, ContractViolation when the line is full; nothing has changed then
  [[nodiscard]] std::uint32_t add_segment(std::byte* base, std::uint32_t count);

  /// Takes out the segment of `node`, which is all there is in it, and the node.
  void remove_segment(std::uint32_t node) noexcept;

  /// A slot for a new range. @throws std::bad_alloc; nothing has changed then
  [[nodiscard]] std::uint32_t acquire() {
    if (table.idle_nodes() == 0 && fences_.size() == table.slots()) {
      fences_.emplace_back();
    }
    return table.acquire();
  }

  /// Makes two ranges of a segment neighbours; `no_node` stands for the segment's end.
  void connect(std::uint32_t low, std::uint32_t high, std::uint16_t segment) noexcept {
    if (low != no_node) {
      table[low].next = high;
    } else {
      spans_[segment].head = high;
    }
    if (high != no_node) {
      table[high].prev = low;
    }
  }

  /// Puts a range between two others.
  void place(std::uint32_t node,
             std::uint32_t prev,
             std::uint32_t next,
             std::uint16_t segment) noexcept {
    table[node].segment = segment;
    connect(prev, node, segment);
    connect(node, next, segment);
  }

  [[nodiscard]] Fence fence(std::uint32_t node) const noexcept {
    return table[node].has_fence ? fences_[node] : Fence{};
  }

  void add_fence(std::uint32_t node, Fence const& fence) noexcept {
    if (fence.is_empty()) {
      return;
    }
    if (table[node].has_fence) {
      fences_[node].add(fence);
    } else {
      fences_[node] = fence;
      table[node].has_fence = true;
    }
  }

  void take_over_fence(std::uint32_t to, std::uint32_t from) noexcept {
    if (table[from].has_fence) {
      add_fence(to, fences_[from]);
    }
  }

  [[nodiscard]] bool is_free(std::uint32_t node) const noexcept {
    return node != no_node && table[node].state == RangeState::free;
  }

  /// The address of a granule that lies in `segment`.
  [[nodiscard]] std::byte* address(std::uint16_t segment, std::uint32_t granule) const noexcept {
    Span const& span = spans_[segment];
    return span.base + std::size_t{granule - span.first} * granule_bytes;
  }
  /// The address of a granule in any segment. O(log segments).
  [[nodiscard]] std::byte* address(std::uint32_t granule) const noexcept {
    auto const after = std::upper_bound(
        segments_.begin(), segments_.end(), granule, [&](std::uint32_t at, std::uint16_t segment) {
          return at < spans_[segment].first;
        });
    return address(*(after - 1), granule);
  }

  [[nodiscard]] Span const& span(std::uint16_t segment) const noexcept { return spans_[segment]; }
  /// The segments in use, in order of their place on the line.
  [[nodiscard]] std::vector<std::uint16_t> const& segments() const noexcept { return segments_; }

  RangeTable table;

 private:
  std::vector<Fence> fences_;  // by node; read only where the node says that it has one
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
  expects(count != 0 && first + count < no_node && segment != 0xFFFFU,
          "too many segments, or too large for the arena's line");
  if (vacant == spans_.end()) {
    spans_.emplace_back();
  }
  segments_.insert(rank, segment);
  std::uint32_t node = no_node;
  try {
    node = acquire();
  } catch (...) {
    std::erase(segments_, segment);
    throw;
  }

  spans_[segment] = {base, static_cast<std::uint32_t>(first), count, node};
  table[node] = {};
  table[node].first = static_cast<std::uint32_t>(first);
  table[node].count = count;
  place(node, no_node, no_node, segment);
  return node;
}

inline void RangeList::remove_segment(std::uint32_t node) noexcept {
  std::uint16_t const segment = table[node].segment;
  table.release(node);
  spans_[segment] = {};
  segments_.erase(std::find(segments_.begin(), segments_.end(), segment));
}

}  // namespace spillway
