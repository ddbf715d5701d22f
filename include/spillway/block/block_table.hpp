// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace spillway {

/// A table of records named by `BlockId`: dense slots, recognisable stale ids, stable references.
///
/// Threads  thread-compatible.
/// Cost     every call O(1); `emplace` allocates when the table has never been this large.
template <class Record>
class BlockTable {
 public:
  /// @throws std::bad_alloc, with nothing changed
  BlockId emplace(Record record) {
    if (vacant_.empty()) {
      vacant_.reserve(entries_.size() + 1);  // so that `erase` cannot fail
      entries_.push_back({});
      vacant_.push_back(static_cast<std::uint32_t>(entries_.size() - 1));
    }
    std::uint32_t const slot = vacant_.back();
    vacant_.pop_back();
    Entry& entry = entries_[slot];
    entry.record = std::move(record);
    entry.is_live = true;
    ++size_;
    return make_block_id(slot, entry.generation);
  }

  void erase(BlockId id) noexcept {
    Entry& entry = entries_[slot_of(id)];
    entry.is_live = false;
    entry.record = Record{};
    // Generation 0 is kept for BlockId{}, which names nothing.
    entry.generation = entry.generation == UINT32_MAX ? 1 : entry.generation + 1;
    vacant_.push_back(slot_of(id));
    --size_;
  }

  /// The record, or null for an id that was never given out or whose block is gone.
  [[nodiscard]] Record* find(BlockId id) noexcept {
    std::uint32_t const slot = slot_of(id);
    if (slot >= entries_.size() || !entries_[slot].is_live ||
        entries_[slot].generation != generation_of(id)) {
      return nullptr;
    }
    return &entries_[slot].record;
  }
  [[nodiscard]] Record const* find(BlockId id) const noexcept {
    return const_cast<BlockTable*>(this)->find(
        id);  // NOLINT(cppcoreguidelines-pro-type-const-cast)
  }

  [[nodiscard]] std::size_t size() const noexcept { return size_; }

  /// Calls `visit(id, record)` for every block, in slot order.
  template <class Visit>
  void for_each(Visit visit) {
    for (std::uint32_t slot = 0; slot < entries_.size(); ++slot) {
      if (entries_[slot].is_live) {
        visit(make_block_id(slot, entries_[slot].generation), entries_[slot].record);
      }
    }
  }
  template <class Visit>
  void for_each(Visit visit) const {
    const_cast<BlockTable*>(this)->for_each(  // NOLINT(cppcoreguidelines-pro-type-const-cast)
        [&](BlockId id, Record const& record) { visit(id, record); });
  }

 private:
  struct Entry {
    Record record{};
    std::uint32_t generation = 1;
    bool is_live = false;
  };

  std::deque<Entry> entries_;  // a deque, so that references survive growth
  std::vector<std::uint32_t> vacant_;
  std::size_t size_ = 0;
};

}  // namespace spillway
