// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/stream/event_pool.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace spillway::detail {

/// The newest events recorded on one stream: oldest first, each covering more points than the one before.
///
/// A slot is in use from `try_claim` or `add` until whoever has it says `release`, and goes back to the
/// pool when nobody uses it and it is not in the list any more.
/// Threads  thread-unsafe, like the pool that it shares with other streams.
template <DeviceApi Device>
class RecordedEvents {
 public:
  using slot_type = typename EventPool<Device>::slot_type;

  static constexpr std::size_t most = 32;

  /// `pool` is not owned and must outlive this object.
  explicit RecordedEvents(EventPool<Device>& pool) : pool_{&pool} { listed_.reserve(most); }

  [[nodiscard]] bool covers(std::uint64_t sequence) const noexcept {
    return !listed_.empty() && listed_.back()->covers >= sequence;
  }

  /// The earliest event that covers the point; null if none does.
  [[nodiscard]] slot_type* try_claim(std::uint64_t sequence) noexcept {
    auto const found = std::lower_bound(
        listed_.begin(), listed_.end(), sequence, [](slot_type const* slot, std::uint64_t wanted) {
          return slot->covers < wanted;
        });
    return found == listed_.end() ? nullptr : claim(*found);
  }
  [[nodiscard]] slot_type* try_claim_newest() noexcept {
    return listed_.empty() ? nullptr : claim(listed_.back());
  }

  /// Takes in a slot whose event has been recorded, for the caller to use and release.
  ///
  /// One that covers less than the newest, since two threads recorded at once, is not listed.
  void add(slot_type* slot, std::uint64_t covers) noexcept {
    slot->covers = covers;
    slot->users = 1;
    slot->is_listed = !this->covers(covers);
    if (slot->is_listed) {
      if (listed_.size() == most) {
        drop_oldest(1);  // its points are covered by the next one
      }
      listed_.push_back(slot);
    }
  }

  void release(slot_type* slot) noexcept {
    if (--slot->users == 0 && !slot->is_listed) {
      pool_->give_back(slot);
    }
  }

  /// Drops what covers no more than `sequence`.
  void drop(std::uint64_t sequence) noexcept {
    auto const kept = std::find_if(listed_.begin(), listed_.end(), [=](slot_type const* slot) {
      return slot->covers > sequence;
    });
    drop_oldest(static_cast<std::size_t>(kept - listed_.begin()));
  }

 private:
  static slot_type* claim(slot_type* slot) noexcept {
    ++slot->users;
    return slot;
  }

  void drop_oldest(std::size_t count) noexcept {
    auto const end = listed_.begin() + static_cast<std::ptrdiff_t>(count);
    std::for_each(listed_.begin(), end, [this](slot_type* slot) {
      slot->is_listed = false;
      if (slot->users == 0) {
        pool_->give_back(slot);
      }
    });
    listed_.erase(listed_.begin(), end);
  }

  EventPool<Device>* pool_;
  std::vector<slot_type*> listed_;
};

}  // namespace spillway::detail
