// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>
#include <spillway/core/growing_array.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/types.hpp>

#include <cstddef>
#include <cstdint>

namespace spillway {

/// One range: where it lies, its neighbours by address, and what its state needs. In granules.
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
  std::uint8_t flags = 0;  ///< of the values below

  static constexpr std::uint8_t has_fence = 1;
  /// Of a range that is not free: whether its neighbours are, so that joining them needs no look at
  /// them. A free range has no free neighbours.
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

/// Names no range. Its slot exists and is no range, so links can be written there without asking.
inline constexpr std::uint32_t no_node = 0;

/// The nodes of all ranges of an arena, in slots that are used again, and what they add up to.
///
/// A fit policy sees this much of an arena. Sizes and places are in granules.
/// Threads  thread-compatible.
class RangeTable {
 public:
  static constexpr bool is_thread_safe = false;

  /// @throws std::bad_alloc
  RangeTable() : nodes_(1), idle_(1) {}

  [[nodiscard]] RangeNode& operator[](std::uint32_t node) noexcept { return nodes_[node]; }
  [[nodiscard]] RangeNode const& operator[](std::uint32_t node) const noexcept {
    return nodes_[node];
  }

  /// Makes one more slot. @throws std::bad_alloc; nothing has changed then
  void grow() {
    idle_.push_back(no_node);
    nodes_.push_back({});
    release(static_cast<std::uint32_t>(nodes_.size() - 1));
  }

  /// A slot for a new node, of which there must be one; what was in it is left there.
  [[nodiscard]] std::uint32_t acquire() noexcept {
    SPILLWAY_ASSERT(idle_nodes_ != 0);
    return idle_[--idle_nodes_];
  }

  void release(std::uint32_t node) noexcept { idle_[idle_nodes_++] = node; }

  /// Slots that have been made, in use or not, `no_node` among them.
  [[nodiscard]] std::size_t slots() const noexcept { return nodes_.size(); }
  [[nodiscard]] std::size_t idle_nodes() const noexcept { return idle_nodes_; }

  [[nodiscard]] std::size_t ranges() const noexcept { return taken_ranges + free_ranges; }
  [[nodiscard]] std::uint64_t free_granules() const noexcept { return granules - taken_granules; }

  std::uint64_t granules = 0;  ///< of all segments
  std::size_t taken_ranges = 0;
  std::size_t free_ranges = 0;
  std::uint64_t taken_granules = 0;  ///< claimed ones too

 private:
  detail::GrowingArray<RangeNode> nodes_;
  detail::GrowingArray<std::uint32_t> idle_;  // a stack with a place for every slot
  std::size_t idle_nodes_ = 0;
};

}  // namespace spillway
