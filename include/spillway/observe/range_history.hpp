// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/event.hpp>
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

/// A block took a device range, or gave it up.
struct RangeChange {
  std::size_t event = 0;  ///< position of the event that tells of it
  BlockId block{};
  std::uintptr_t address = 0;  ///< 0 where a range is given up that no event has told of
  std::size_t bytes = 0;
  bool is_taken = false;
};

/// What `range_changes` keeps while it goes through the events.
class RangeHistory {
 public:
  explicit RangeHistory(std::span<Event const> events) {
    for (now_ = 0; now_ < events.size(); ++now_) {
      Event const& event = events[now_];
      bool const is_new = event.block != BlockId{} && seen_.insert(event.block).second;
      switch (event.kind) {
      case EventKind::make_resident:
      case EventKind::swap_in:
      case EventKind::prefetch:
        arrive(event, true);
        break;
      case EventKind::move:
        if (is_new) {  // it was somewhere
          changes_.push_back({now_, event.block, 0, event.bytes, false});
        }
        arrive(event, true);
        break;
      case EventKind::copy_out:
        arrive(event, !is_new);
        break;
      case EventKind::swap_out:
      case EventKind::drop:
      case EventKind::deallocate:
        leave(event, is_new);
        break;
      case EventKind::allocate:
      case EventKind::grow:
      case EventKind::trim:
      case EventKind::host_wait:
      case EventKind::out_of_memory:
      case EventKind::step:
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

  static std::uintptr_t address_of(Event const& event) noexcept {
    return reinterpret_cast<std::uintptr_t>(event.address);
  }

  /// The block is where the event says. If it is `told`, that is a change, else it was so from the start.
  void arrive(Event const& event, bool told) {
    std::uintptr_t const begin = address_of(event);
    auto const known = homes_.find(event.block);
    if (known != homes_.end()) {
      if (known->second == begin) {
        return;
      }
      vacate(places_.find(known->second));
    }
    // Whoever was here has left unseen.
    auto place = places_.lower_bound(begin);
    if (place != places_.begin() &&
        std::prev(place)->first + std::prev(place)->second.bytes > begin) {
      --place;
    }
    while (place != places_.end() && place->first < begin + event.bytes) {
      place = vacate(place);
    }
    places_.emplace_hint(place, begin, Place{event.block, event.bytes});
    homes_[event.block] = begin;
    if (told) {
      changes_.push_back({now_, event.block, begin, event.bytes, true});
    }
  }

  void leave(Event const& event, bool is_new) {
    auto const known = homes_.find(event.block);
    if (known != homes_.end()) {
      vacate(places_.find(known->second));
    } else if (is_new && event.address != nullptr) {
      changes_.push_back({now_, event.block, address_of(event), event.bytes, false});
    }
  }

  Places::iterator vacate(Places::iterator place) {
    changes_.push_back({now_, place->second.block, place->first, place->second.bytes, false});
    homes_.erase(place->second.block);
    return places_.erase(place);
  }

  std::size_t now_ = 0;
  Places places_;                                      // the ranges taken now
  std::unordered_map<BlockId, std::uintptr_t> homes_;  // the same by block
  std::unordered_set<BlockId> seen_;
  std::vector<RangeChange> changes_;
};

/// Tells from events which block lay where, and when.
///
/// What comes out is consistent even if events are missing, as they are once a `Timeline` has
/// forgotten the oldest: ranges that are taken at the same time do not overlap, and a block has at
/// most one. A range that is given up before it was seen to be taken was there from the start.
///
/// @param events  in order of time
/// @throws std::bad_alloc
/// @cost   O(n log n)
[[nodiscard]] inline std::vector<RangeChange> range_changes(std::span<Event const> events) {
  return detail::RangeHistory{events}.take_changes();
}

}  // namespace spillway::detail
