// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>
#include <spillway/core/record.hpp>
#include <spillway/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace spillway::detail {

/// A change of who has a device range: a block took it, or gave it up.
struct RangeChange {
  std::size_t record = 0;  ///< position of the record from which this is known
  BlockId block{};
  std::uintptr_t address = 0;  ///< 0 if the range was given up and no record has told its address
  std::size_t bytes = 0;
  bool is_taken = false;
};

/// Does the work of `range_changes`, one record after the other.
template <class = Lazily>
class BasicRangeHistory {
 public:
  explicit BasicRangeHistory(std::span<Record const> records) {
    for (now_ = 0; now_ < records.size(); ++now_) {
      Record const& record = records[now_];
      bool const is_new = record.block != BlockId{} && seen_.insert(record.block).second;
      switch (record.kind) {
      case RecordKind::make_resident:
      case RecordKind::swap_in:
      case RecordKind::prefetch:
        arrive(record, true);
        break;
      case RecordKind::move:
        if (is_new) {  // it was at an address that no record has told
          changes_.push_back({now_, record.block, 0, record.bytes, false});
        }
        arrive(record, true);
        break;
      case RecordKind::copy_out:
        arrive(record, !is_new);
        break;
      case RecordKind::swap_out:
      case RecordKind::drop:
      case RecordKind::deallocate:
        leave(record, is_new);
        break;
      case RecordKind::allocate:
      case RecordKind::recompute:
      case RecordKind::grow:
      case RecordKind::trim:
      case RecordKind::host_wait:
      case RecordKind::out_of_memory:
      case RecordKind::step:
        break;
      }
    }
  }

  [[nodiscard]] std::vector<RangeChange> take_changes() && noexcept { return std::move(changes_); }

 private:
  struct Place {
    BlockId block{};
    std::size_t bytes = 0;
  };
  using Places = std::map<std::uintptr_t, Place>;

  static std::uintptr_t address_of(Record const& record) noexcept {
    return reinterpret_cast<std::uintptr_t>(record.address);
  }

  /// Notes that the block is where the record says. If `told`, the record tells of a change;
  /// otherwise the block has been there from the start.
  void arrive(Record const& record, bool told) {
    std::uintptr_t const begin = address_of(record);
    auto const known = homes_.find(record.block);
    if (known != homes_.end()) {
      if (known->second == begin) {
        return;
      }
      vacate(places_.find(known->second));
    }
    // Blocks that were known to be here must have left, and the records of that are missing.
    auto place = places_.lower_bound(begin);
    if (place != places_.begin() &&
        std::prev(place)->first + std::prev(place)->second.bytes > begin) {
      --place;
    }
    while (place != places_.end() && place->first < begin + record.bytes) {
      place = vacate(place);
    }
    places_.emplace_hint(place, begin, Place{record.block, record.bytes});
    homes_[record.block] = begin;
    if (told) {
      changes_.push_back({now_, record.block, begin, record.bytes, true});
    }
  }

  void leave(Record const& record, bool is_new) {
    auto const known = homes_.find(record.block);
    if (known != homes_.end()) {
      vacate(places_.find(known->second));
    } else if (is_new && record.address != nullptr) {
      changes_.push_back({now_, record.block, address_of(record), record.bytes, false});
    }
  }

  typename Places::iterator vacate(typename Places::iterator place) {
    changes_.push_back({now_, place->second.block, place->first, place->second.bytes, false});
    homes_.erase(place->second.block);
    return places_.erase(place);
  }

  std::size_t now_ = 0;
  Places places_;                                      // the ranges that are taken now, by address
  std::unordered_map<BlockId, std::uintptr_t> homes_;  // their addresses, by block
  std::unordered_set<BlockId> seen_;
  std::vector<RangeChange> changes_;
};

using RangeHistory = BasicRangeHistory<>;

/// Finds out from records which block had which device range, and when.
///
/// The result is consistent even if records are missing, since a `Timeline` forgets the oldest:
/// ranges that are taken at the same time do not overlap, and a block has at most one. A range that
/// is given up although it was not seen to be taken has been there from the start.
///
/// @param records  in order of time
/// @throws std::bad_alloc
/// @cost   O(n log n)
template <class = Lazily>
[[nodiscard]] std::vector<RangeChange> range_changes(std::span<Record const> records) {
  return detail::RangeHistory{records}.take_changes();
}

SPILLWAY_COMPILED_PART(class BasicRangeHistory<>);

SPILLWAY_COMPILED_PART(std::vector<RangeChange> range_changes<>(std::span<Record const>));

}  // namespace spillway::detail
