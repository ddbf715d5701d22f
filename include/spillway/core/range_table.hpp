// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>
#include <spillway/core/growing_array.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/types.hpp>

#include <cstddef>
#include <cstdint>

namespace spillway {

/// One range in a `RangeTable`: its place and size in granules, its neighbours, and its state.
struct RangeNode {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  std::uint32_t prev = 0;    ///< neighbour at lower addresses, or the segment's wall
  std::uint32_t next = 0;    ///< neighbour at higher addresses, or the segment's wall
  std::uint32_t link_a = 0;  ///< free: the fit policy's; taken: the owner's low half
  std::uint32_t link_b = 0;  ///< free: the fit policy's; taken: the owner's high half
  std::uint32_t tag = 0;     ///< free: the fit policy's
  std::uint16_t segment = 0;
  RangeState state = RangeState::free;
  std::uint8_t flags = 0;  ///< a sum of the values below

  static constexpr std::uint8_t has_fence = 1;
  /// Set on a range that is not free if its neighbour is free. Freeing the range then needs no look
  /// at the neighbour. A free range has no free neighbours.
  static constexpr std::uint8_t is_prev_free = 2;
  static constexpr std::uint8_t is_next_free = 4;

  [[nodiscard]] bool is(std::uint8_t flag) const noexcept { return (flags & flag) != 0; }
  void set(std::uint8_t flag) noexcept { flags = static_cast<std::uint8_t>(flags | flag); }
  void clear(std::uint8_t flag) noexcept { flags = static_cast<std::uint8_t>(flags & ~flag); }
  void set(std::uint8_t flag, bool value) noexcept { value ? set(flag) : clear(flag); }
  [[nodiscard]] std::uint32_t end() const noexcept { return first + count; }
  [[nodiscard]] BlockId owner() const noexcept { return make_block_id(link_a, link_b); }
  void set_owner(BlockId id) noexcept {
    link_a = index_of_block(id);
    link_b = generation_of(id);
  }
};
static_assert(sizeof(RangeNode) == 32, "two nodes a cache line");

/// Names no range. The table has a node of this number, so links can be written there without a
/// check.
inline constexpr std::uint32_t no_node = 0;

/// The table of the nodes of all ranges of an arena, which are reused, with totals of their sizes.
///
/// This is all that a fit policy sees of an arena. Sizes and places are in granules.
/// Threads  thread-compatible.
template <class = detail::Lazily>
class BasicRangeTable {
 public:
  static constexpr bool is_thread_safe = false;

  /// @throws std::bad_alloc
  BasicRangeTable() : nodes_(1), idle_(1) {}

  [[nodiscard]] RangeNode& operator[](std::uint32_t node) noexcept { return nodes_[node]; }
  [[nodiscard]] RangeNode const& operator[](std::uint32_t node) const noexcept {
    return nodes_[node];
  }

  /// Adds an idle node. @throws std::bad_alloc; nothing has changed then
  void grow() {
    idle_.push_back(no_node);
    nodes_.push_back({});
    release(static_cast<std::uint32_t>(nodes_.size() - 1));
  }

  /// Takes an idle node, whose contents are unspecified. @pre there is one
  [[nodiscard]] std::uint32_t acquire() noexcept {
    SPILLWAY_ASSERT(idle_nodes_ != 0);
    return idle_[--idle_nodes_];
  }

  void release(std::uint32_t node) noexcept { idle_[idle_nodes_++] = node; }

  /// Returns the number of all nodes, in use or idle, including `no_node`.
  [[nodiscard]] std::size_t nodes() const noexcept { return nodes_.size(); }
  [[nodiscard]] std::size_t idle_nodes() const noexcept { return idle_nodes_; }

  [[nodiscard]] std::size_t ranges() const noexcept { return taken_ranges + free_ranges; }
  [[nodiscard]] std::uint64_t free_granules() const noexcept { return granules - taken_granules; }

  std::uint64_t granules = 0;  ///< in all segments, without holes
  std::size_t taken_ranges = 0;
  std::size_t free_ranges = 0;
  std::uint64_t taken_granules = 0;  ///< including claimed ones

 private:
  detail::GrowingArray<RangeNode> nodes_;
  detail::GrowingArray<std::uint32_t> idle_;  // a stack with room for every node
  std::size_t idle_nodes_ = 0;
};

using RangeTable = BasicRangeTable<>;

SPILLWAY_COMPILED_PART(class BasicRangeTable<>);

}  // namespace spillway
