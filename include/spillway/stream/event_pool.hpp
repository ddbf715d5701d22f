// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace spillway::detail {

/// An event of a device, and what a `StreamOrder` uses it for at the moment.
template <class Event>
struct EventSlot {
  Event event{};
  std::uint64_t covers = 0;  // every ticket of the stream up to this sequence number
  std::uint32_t users = 0;   // threads between looking it up and having enqueued their wait
  bool is_listed = false;    // still in its stream's list
};

/// Makes events and keeps those that are idle for the next use.
///
/// Threads  thread-unsafe, except that `make` may run beside anything: it alone calls the device.
template <DeviceApi Device>
class EventPool {
 public:
  using slot_type = EventSlot<typename Device::event_type>;

  /// `device` is not owned and must outlive the pool.
  explicit EventPool(Device& device) : device_{&device} {}
  EventPool(EventPool const&) = delete;
  EventPool& operator=(EventPool const&) = delete;
  ~EventPool() {
    for (auto const& slot : slots_) {
      device_->destroy_event(slot->event);
    }
  }

  /// An idle slot, or null if there is none.
  [[nodiscard]] slot_type* try_take() noexcept {
    if (idle_.empty()) {
      return nullptr;
    }
    slot_type* const slot = idle_.back();
    idle_.pop_back();
    return slot;
  }

  /// A slot for `add`. @throws DeviceError, std::bad_alloc
  [[nodiscard]] std::unique_ptr<slot_type> make() const {
    auto fresh = std::make_unique<slot_type>();
    fresh->event = device_->create_event();
    return fresh;
  }

  /// Takes over what `make` gave, as if it had been taken. @throws std::bad_alloc; the event is gone then
  [[nodiscard]] slot_type* add(std::unique_ptr<slot_type> fresh) {
    try {
      idle_.reserve(slots_.size() + 1);  // so that `give_back` cannot fail
      slots_.push_back(std::move(fresh));
    } catch (...) {
      device_->destroy_event(fresh->event);
      throw;
    }
    return slots_.back().get();
  }

  void give_back(slot_type* slot) noexcept { idle_.push_back(slot); }

 private:
  Device* device_;
  std::vector<std::unique_ptr<slot_type>> slots_;
  std::vector<slot_type*> idle_;
};

}  // namespace spillway::detail
