// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace spillway::detail {

/// Blocks in an order that can be changed in constant time: a doubly linked list inside a vector that
/// is indexed by slot.
///
/// Memory  16 bytes a slot; allocates only when a slot is larger than any before it.
/// Threads thread-compatible.
class SlotOrder {
 public:
  [[nodiscard]] bool contains(BlockId id) const noexcept {
    std::uint32_t const slot = slot_of(id);
    return slot < nodes_.size() && nodes_[slot].id == id && id != BlockId{};
  }
  [[nodiscard]] bool is_empty() const noexcept { return front_ == none; }

  /// Makes room for a slot. @throws std::bad_alloc, with nothing changed
  void reserve(BlockId id) {
    if (slot_of(id) >= nodes_.size()) {
      nodes_.resize(std::size_t{slot_of(id)} + 1);
    }
  }

  /// Appends a block that is not contained and whose slot was reserved.
  void push_back(BlockId id) noexcept {
    std::uint32_t const slot = slot_of(id);
    nodes_[slot] = {id, back_, none};
    (back_ == none ? front_ : nodes_[back_].next) = slot;
    back_ = slot;
  }

  /// Moves a block to the back; no effect if it is not contained.
  void move_to_back(BlockId id) noexcept {
    if (contains(id) && slot_of(id) != back_) {
      unlink(nodes_[slot_of(id)]);
      push_back(id);
    }
  }

  /// No effect on a block that is not contained.
  void erase(BlockId id) noexcept {
    if (contains(id)) {
      unlink(nodes_[slot_of(id)]);
      nodes_[slot_of(id)] = {};
    }
  }

  void clear() noexcept {
    while (front_ != none) {
      erase(nodes_[front_].id);
    }
  }

  /// The blocks from front to back and from back to front; `BlockId{}` is where they end.
  [[nodiscard]] BlockId front() const noexcept { return at(front_); }
  [[nodiscard]] BlockId back() const noexcept { return at(back_); }
  [[nodiscard]] BlockId after(BlockId id) const noexcept { return at(nodes_[slot_of(id)].next); }
  [[nodiscard]] BlockId before(BlockId id) const noexcept {
    return at(nodes_[slot_of(id)].previous);
  }

 private:
  static constexpr std::uint32_t none = ~std::uint32_t{0};

  struct Node {
    BlockId id{};
    std::uint32_t previous = none;
    std::uint32_t next = none;
  };

  [[nodiscard]] BlockId at(std::uint32_t slot) const noexcept {
    return slot == none ? BlockId{} : nodes_[slot].id;
  }

  void unlink(Node const& node) noexcept {
    (node.previous == none ? front_ : nodes_[node.previous].next) = node.next;
    (node.next == none ? back_ : nodes_[node.next].previous) = node.previous;
  }

  std::vector<Node> nodes_;
  std::uint32_t front_ = none;
  std::uint32_t back_ = none;
};

}  // namespace spillway::detail
