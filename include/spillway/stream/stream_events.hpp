// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace spillway::detail {

/// Assigns numbers to the points on one stream: all points between two recorded events share one.
///
/// An event covers everything enqueued before it. Two points without an event between them are
/// therefore waited for by the same event, and need no numbers of their own. `StreamOrder` has one
/// epoch for each stream.
///
/// Threads  thread-safe.
class StreamEpoch {
 public:
  /// Starts with number `first`; no point has a smaller one. Must not be called concurrently with
  /// other functions.
  void start(std::uint64_t first) noexcept { state_ = 2 * first; }

  /// Returns the number of a point that stands for all work enqueued so far. @cost usually one load
  [[nodiscard]] std::uint64_t mark() noexcept {
    std::uint64_t now = state_.load();
    if (now % 2 == 0) {
      now = state_.fetch_or(1);
    }
    return now / 2;
  }

  /// Returns the greatest number of a point marked so far, or a greater one.
  [[nodiscard]] std::uint64_t last() const noexcept {
    std::uint64_t const now = state_.load();
    return now % 2 == 0 ? now / 2 - 1 : now / 2;
  }

  /// Must be called before an event is recorded. Points marked from now on get the greater number
  /// that `next()` returns; the event covers all points up to the number that this function
  /// returns. A thread enqueues its work before it marks a point, so all work of the old number is
  /// on the stream already and the event comes after it.
  template <class Next>
  [[nodiscard]] std::uint64_t close(Next next) noexcept {
    std::uint64_t now = state_.load();
    while (now % 2 != 0) {
      std::uint64_t const wanted = 2 * next();
      if (state_.compare_exchange_strong(now, wanted)) {
        now = wanted;
      }
    }
    return now / 2 - 1;
  }

 private:
  std::atomic<std::uint64_t> state_{0};  // twice the number, plus 1 once a point has it
};

/// An event of a device, with the points of a stream that it covers now.
template <class Event>
struct StreamEvent {
  Event handle{};
  std::uint64_t covers = 0;  // all points of the stream up to this sequence number
  std::uint32_t users = 0;   // threads that have claimed it and not released it yet
  bool is_listed = false;    // still in its stream's list
};

/// Creates the events of a `StreamOrder` and reuses those that no stream needs any more.
///
/// Threads  thread-unsafe, except that `make` may run at the same time as any call. Only `make`
///          calls the device.
template <DeviceApi Device>
class EventPool {
 public:
  using stream_event = StreamEvent<typename Device::event_type>;

  /// `device` is not owned and must outlive the pool.
  explicit EventPool(Device& device) : device_{&device} {}
  EventPool(EventPool const&) = delete;
  EventPool& operator=(EventPool const&) = delete;
  ~EventPool() {
    for (auto const& event : all_) {
      device_->destroy_event(event->handle);
    }
  }

  /// Takes an idle event, or returns null if there is none.
  [[nodiscard]] stream_event* try_take() noexcept {
    if (idle_.empty()) {
      return nullptr;
    }
    stream_event* const event = idle_.back();
    idle_.pop_back();
    return event;
  }

  /// Creates an event, to be handed to `add`. @throws DeviceError, std::bad_alloc
  [[nodiscard]] std::unique_ptr<stream_event> make() const {
    auto fresh = std::make_unique<stream_event>();
    fresh->handle = device_->create_event();
    return fresh;
  }

  /// Takes over an event from `make` and counts it as taken.
  ///
  /// @throws std::bad_alloc; the event is destroyed then
  [[nodiscard]] stream_event* add(std::unique_ptr<stream_event> fresh) {
    try {
      idle_.reserve(all_.size() + 1);  // so that `give_back` cannot fail
      all_.push_back(std::move(fresh));
    } catch (...) {
      device_->destroy_event(fresh->handle);
      throw;
    }
    return all_.back().get();
  }

  void give_back(stream_event* event) noexcept { idle_.push_back(event); }

 private:
  Device* device_;
  std::vector<std::unique_ptr<stream_event>> all_;
  std::vector<stream_event*> idle_;
};

/// The newest events recorded on one stream, oldest first; each covers more points than the
/// previous.
///
/// An event is in use from `try_claim` or `add` until `release`. It goes back to the pool when it
/// is neither in use nor in the list.
///
/// Threads  thread-unsafe, like the pool, which all streams of a `StreamOrder` share.
template <DeviceApi Device>
class RecordedEvents {
 public:
  using stream_event = typename EventPool<Device>::stream_event;

  static constexpr std::size_t most = 32;

  /// `pool` is not owned and must outlive this object.
  explicit RecordedEvents(EventPool<Device>& pool) : pool_{&pool} { listed_.reserve(most); }

  [[nodiscard]] bool covers(std::uint64_t sequence) const noexcept {
    return !listed_.empty() && listed_.back()->covers >= sequence;
  }

  /// Returns the earliest event that covers the point, or null. The caller must release it.
  [[nodiscard]] stream_event* try_claim(std::uint64_t sequence) noexcept {
    auto const found = std::lower_bound(
        listed_.begin(),
        listed_.end(),
        sequence,
        [](stream_event const* event, std::uint64_t wanted) { return event->covers < wanted; });
    return found == listed_.end() ? nullptr : claim(*found);
  }
  [[nodiscard]] stream_event* try_claim_newest() noexcept {
    return listed_.empty() ? nullptr : claim(listed_.back());
  }

  /// Adds an event that has been recorded. The caller uses it and must release it.
  ///
  /// If two threads recorded events at the same time, the one that covers less may not be listed.
  void add(stream_event* event, std::uint64_t covers) noexcept {
    event->covers = covers;
    event->users = 1;
    event->is_listed = !this->covers(covers);
    if (event->is_listed) {
      if (listed_.size() == most) {
        drop_oldest(1);  // its points are covered by the next one
      }
      listed_.push_back(event);
    }
  }

  void release(stream_event* event) noexcept {
    if (--event->users == 0 && !event->is_listed) {
      pool_->give_back(event);
    }
  }

  /// Removes the events that cover no more than `sequence` from the list.
  void drop(std::uint64_t sequence) noexcept {
    auto const kept = std::find_if(listed_.begin(), listed_.end(), [=](stream_event const* event) {
      return event->covers > sequence;
    });
    drop_oldest(static_cast<std::size_t>(kept - listed_.begin()));
  }

 private:
  static stream_event* claim(stream_event* event) noexcept {
    ++event->users;
    return event;
  }

  void drop_oldest(std::size_t count) noexcept {
    auto const end = listed_.begin() + static_cast<std::ptrdiff_t>(count);
    std::for_each(listed_.begin(), end, [this](stream_event* event) {
      event->is_listed = false;
      if (event->users == 0) {
        pool_->give_back(event);
      }
    });
    listed_.erase(listed_.begin(), end);
  }

  EventPool<Device>* pool_;
  std::vector<stream_event*> listed_;
};

}  // namespace spillway::detail
