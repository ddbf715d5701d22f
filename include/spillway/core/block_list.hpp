// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace spillway::detail {

/// A doubly linked list of blocks whose nodes lie in a vector, so that a block is found in it,
/// moved and erased in constant time. Policies keep orders of blocks in it.
///
/// Memory  16 bytes for each block index up to the largest one; only `reserve` may allocate.
/// Threads thread-compatible.
class BlockList {
 public:
  [[nodiscard]] bool contains(BlockId id) const noexcept {
    std::uint32_t const index = index_of_block(id);
    return index < nodes_.size() && nodes_[index].id == id && id != BlockId{};
  }
  [[nodiscard]] bool is_empty() const noexcept { return front_ == none; }

  /// Makes room for a block. @throws std::bad_alloc, with nothing changed
  void reserve(BlockId id) {
    if (index_of_block(id) >= nodes_.size()) {
      nodes_.resize(std::size_t{index_of_block(id)} + 1);
    }
  }

  /// Appends a block that is not contained and for which room was reserved.
  void push_back(BlockId id) noexcept {
    std::uint32_t const index = index_of_block(id);
    nodes_[index] = {id, back_, none};
    (back_ == none ? front_ : nodes_[back_].next) = index;
    back_ = index;
  }

  /// Moves a block to the back; no effect if it is not contained.
  void move_to_back(BlockId id) noexcept {
    if (contains(id) && index_of_block(id) != back_) {
      unlink(nodes_[index_of_block(id)]);
      push_back(id);
    }
  }

  /// Removes a block; no effect if it is not contained.
  void erase(BlockId id) noexcept {
    if (contains(id)) {
      unlink(nodes_[index_of_block(id)]);
      nodes_[index_of_block(id)] = {};
    }
  }

  void clear() noexcept {
    while (front_ != none) {
      erase(nodes_[front_].id);
    }
  }

  /// The first block from the front for which `admits(id)` is true, or nothing.
  template <class Admits>
  [[nodiscard]] std::optional<BlockId> find_first(Admits admits) const noexcept {
    for (BlockId id = front(); id != BlockId{}; id = after(id)) {
      if (admits(id)) {
        return id;
      }
    }
    return std::nullopt;
  }

  /// The ends of the list and the neighbours of a contained block; `BlockId{}` where there is none.
  [[nodiscard]] BlockId front() const noexcept { return at(front_); }
  [[nodiscard]] BlockId back() const noexcept { return at(back_); }
  [[nodiscard]] BlockId after(BlockId id) const noexcept {
    return at(nodes_[index_of_block(id)].next);
  }
  [[nodiscard]] BlockId before(BlockId id) const noexcept {
    return at(nodes_[index_of_block(id)].previous);
  }

 private:
  static constexpr std::uint32_t none = ~std::uint32_t{0};

  struct Node {
    BlockId id{};
    std::uint32_t previous = none;
    std::uint32_t next = none;
  };

  [[nodiscard]] BlockId at(std::uint32_t index) const noexcept {
    return index == none ? BlockId{} : nodes_[index].id;
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
