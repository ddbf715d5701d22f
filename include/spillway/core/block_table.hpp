// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace spillway::detail {

/// A table of records named by `BlockId`. Indices are dense, stale ids are recognised, and
/// references to records stay valid while the table grows. The pager keeps its blocks in one, the
/// host pool its slots, and a simulated device its streams and events.
///
/// Threads  thread-compatible.
/// Cost     every call O(1), amortised where `emplace` has to allocate: for 256 records at a time.
template <class Record>
class BlockTable {
 public:
  BlockTable() = default;
  /// A table whose ids begin with another generation than 1, so that they are not valid in other
  /// tables.
  explicit BlockTable(std::uint32_t first_generation) noexcept
      : first_generation_{first_generation} {}

  /// Adds a record. @throws std::bad_alloc, with nothing changed
  BlockId emplace(Record record) {
    if (vacant_.empty()) {
      add_chunk();
    }
    std::uint32_t const index = vacant_.back();
    vacant_.pop_back();
    Entry& entry = at(index);
    entry.record = std::move(record);
    entry.is_live = true;
    ++size_;
    return make_block_id(index, entry.generation);
  }

  void erase(BlockId id) noexcept {
    Entry& entry = at(index_of_block(id));
    entry.is_live = false;
    entry.record = Record{};
    // Generation 0 is reserved for `BlockId{}`, which names nothing.
    entry.generation = entry.generation == UINT32_MAX ? 1 : entry.generation + 1;
    vacant_.push_back(index_of_block(id));
    --size_;
  }

  /// Returns the record, or null for an id that was never given out or whose record was erased.
  [[nodiscard]] Record* find(BlockId id) noexcept {
    std::uint32_t const index = index_of_block(id);
    if (index >= chunks_.size() * chunk_entries) {
      return nullptr;
    }
    Entry& entry = at(index);
    return entry.is_live && entry.generation == generation_of(id) ? &entry.record : nullptr;
  }
  [[nodiscard]] Record const* find(BlockId id) const noexcept {
    // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
    return const_cast<BlockTable*>(this)->find(id);
  }

  [[nodiscard]] std::size_t size() const noexcept { return size_; }

  /// Calls `visit(id, record)` for every block, in index order.
  template <class Visit>
  void for_each(Visit visit) {
    for (std::uint32_t index = 0; index < chunks_.size() * chunk_entries; ++index) {
      Entry& entry = at(index);
      if (entry.is_live) {
        visit(make_block_id(index, entry.generation), entry.record);
      }
    }
  }
  template <class Visit>
  void for_each(Visit visit) const {
    // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
    const_cast<BlockTable*>(this)->for_each(
        [&](BlockId id, Record const& record) { visit(id, record); });
  }

 private:
  struct Entry {
    Record record{};
    std::uint32_t generation = 1;
    bool is_live = false;
  };

  static constexpr std::uint32_t chunk_entries = 256;

  [[nodiscard]] Entry& at(std::uint32_t index) noexcept {
    return chunks_[index / chunk_entries][index % chunk_entries];
  }

  void add_chunk() {
    auto const first = static_cast<std::uint32_t>(chunks_.size() * chunk_entries);
    vacant_.reserve(std::size_t{first} + chunk_entries);  // so that `erase` cannot fail
    chunks_.push_back(std::make_unique<Entry[]>(chunk_entries));
    for (std::uint32_t i = chunk_entries; i-- > 0;) {  // the lowest is given out first
      chunks_.back()[i].generation = first_generation_;
      vacant_.push_back(first + i);
    }
  }

  std::vector<std::unique_ptr<Entry[]>> chunks_;  // references survive growth
  std::vector<std::uint32_t> vacant_;
  std::size_t size_ = 0;
  std::uint32_t first_generation_ = 1;
};

}  // namespace spillway::detail
