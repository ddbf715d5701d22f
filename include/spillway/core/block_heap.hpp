// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace spillway::detail {

/// What a caller of `BlockHeap::best` decides about the block that it is shown.
enum class Verdict : std::uint8_t { take, skip, key_changed };

/// A priority queue of blocks whose keys may change: a binary heap in a vector, with an index of
/// where each block is in it. Policies rank blocks in it.
///
/// `a.is_before(b)` must return whether a block with key `a` comes before one with key `b`.
///
/// Memory  one entry and 2 bytes for each block, and 4 bytes for each block index up to the largest
///         one; only `insert` and `reserve` may allocate.
/// Threads thread-compatible.
template <class Key>
class BlockHeap {
 public:
  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }
  [[nodiscard]] bool contains(BlockId id) const noexcept {
    std::uint32_t const index = index_of_block(id);
    return index < where_.size() && where_[index] != nowhere && entries_[where_[index]].id == id;
  }

  /// Makes room for a block, beside `blocks` others. @throws std::bad_alloc, with nothing changed
  void reserve(BlockId id, std::size_t blocks) {
    if (index_of_block(id) >= where_.size()) {
      where_.resize(std::size_t{index_of_block(id)} + 1, nowhere);
    }
    if (blocks >= entries_.capacity()) {
      entries_.reserve(std::max<std::size_t>(64, 2 * blocks));
    }
    // No entry of `next_` is below another one, so that there are no more than the heap has leaves.
    if (blocks / 2 >= next_.capacity()) {
      next_.reserve(entries_.capacity() / 2 + 1);
    }
  }

  /// Adds a block that is not contained. @throws std::bad_alloc, with nothing changed
  /// @cost O(log n)
  void insert(BlockId id, Key key) {
    reserve(id, entries_.size());
    insert_reserved(id, key);
  }
  /// The same for a block for which room was reserved. @cost O(log n)
  void insert_reserved(BlockId id, Key key) noexcept {
    auto const index = static_cast<std::uint32_t>(entries_.size());
    entries_.push_back({key, id});
    where_[index_of_block(id)] = index;
    sift_up(index);
  }

  /// The key of a block that is contained.
  [[nodiscard]] Key const& key(BlockId id) const noexcept {
    return entries_[where_[index_of_block(id)]].key;
  }

  /// Changes the key of a block that is contained. @cost O(log n)
  void update(BlockId id, Key key) noexcept {
    std::uint32_t const index = where_[index_of_block(id)];
    entries_[index].key = key;
    sift_up(index);
    sift_down(where_[index_of_block(id)]);
  }

  /// Removes a block; no effect if it is not contained. @cost O(log n)
  void erase(BlockId id) noexcept {
    if (!contains(id)) {
      return;
    }
    std::uint32_t const index = where_[index_of_block(id)];
    exchange(index, size32() - 1);
    entries_.pop_back();
    where_[index_of_block(id)] = nowhere;
    if (index < size32()) {
      BlockId const moved = entries_[index].id;
      sift_up(index);
      sift_down(where_[index_of_block(moved)]);
    }
  }

  void clear() noexcept {
    for (Entry const& entry : entries_) {
      where_[index_of_block(entry.id)] = nowhere;
    }
    entries_.clear();
  }

  /// Shows blocks to `judge(id, key)` in the order of their keys until it takes one. Blocks that it
  /// skips keep their place, also among those of equal keys. `judge` may make the key that it is
  /// shown come later, and must then return `Verdict::key_changed`. Blocks are neither added nor
  /// removed.
  ///
  /// @cost O((1 + shown) log n)
  template <class Judge>
  std::optional<BlockId> best(Judge judge) noexcept {
    auto const comes_later = [this](std::uint32_t a, std::uint32_t b) noexcept {
      return entries_[b].key.is_before(entries_[a].key);
    };
    auto const show_later = [&](std::uint32_t index) noexcept {
      if (index < size32()) {
        next_.push_back(index);
        std::push_heap(next_.begin(), next_.end(), comes_later);
      }
    };
    next_.clear();
    show_later(0);
    while (!next_.empty()) {
      std::pop_heap(next_.begin(), next_.end(), comes_later);
      std::uint32_t const index = next_.back();
      next_.pop_back();
      switch (judge(entries_[index].id, entries_[index].key)) {
      case Verdict::take:
        return entries_[index].id;
      case Verdict::skip:
        show_later(2 * index + 1);
        show_later(2 * index + 2);
        break;
      case Verdict::key_changed:
        sift_down(index);  // no entry below it is in `next_`
        show_later(index);
        break;
      }
    }
    return std::nullopt;
  }

 private:
  static constexpr std::uint32_t nowhere = ~std::uint32_t{0};

  struct Entry {
    Key key;
    BlockId id;
  };

  [[nodiscard]] std::uint32_t size32() const noexcept {
    return static_cast<std::uint32_t>(entries_.size());
  }

  void exchange(std::uint32_t a, std::uint32_t b) noexcept {
    std::swap(entries_[a], entries_[b]);
    where_[index_of_block(entries_[a].id)] = a;
    where_[index_of_block(entries_[b].id)] = b;
  }

  void sift_up(std::uint32_t index) noexcept {
    while (index != 0) {
      std::uint32_t const parent = (index - 1) / 2;
      if (!entries_[index].key.is_before(entries_[parent].key)) {
        return;
      }
      exchange(index, parent);
      index = parent;
    }
  }

  void sift_down(std::uint32_t index) noexcept {
    std::uint32_t const end = size32();
    for (;;) {
      std::uint32_t const left = 2 * index + 1;
      if (left >= end) {
        return;
      }
      std::uint32_t best = left;
      if (left + 1 < end && entries_[left + 1].key.is_before(entries_[left].key)) {
        best = left + 1;
      }
      if (!entries_[best].key.is_before(entries_[index].key)) {
        return;
      }
      exchange(index, best);
      index = best;
    }
  }

  std::vector<Entry> entries_;        // the heap
  std::vector<std::uint32_t> next_;   // entries that `best` may show next: a heap by their keys
  std::vector<std::uint32_t> where_;  // by block index: its entry, or nowhere
};

}  // namespace spillway::detail
