// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <new>
#include <utility>

namespace beyond {

/// Pinned host memory for `size()` elements, uninitialised.
template <class Device, class T>
class PinnedArray {
 public:
  PinnedArray(Device& device, std::size_t size)
      : device_{&device},
        size_{size},
        data_{static_cast<T*>(device.try_allocate_pinned(size * sizeof(T), device.numa_node()))} {
    if (data_ == nullptr) {
      throw std::bad_alloc{};
    }
  }
  PinnedArray(PinnedArray&& other) noexcept
      : device_{other.device_},
        size_{std::exchange(other.size_, 0)},
        data_{std::exchange(other.data_, nullptr)} {}
  PinnedArray& operator=(PinnedArray&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(size_, other.size_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~PinnedArray() {
    if (data_ != nullptr) {
      device_->free_pinned(data_, size_ * sizeof(T));
    }
  }

  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }

 private:
  Device* device_;  // not owned
  std::size_t size_;
  T* data_;
};

/// Slots of pinned memory that uploads use in turn, so that one can be filled while the last one is
/// still being copied.
template <class Device>
class Staging {
 public:
  using stream_type = typename Device::stream_type;

  class Slot {
   public:
    explicit Slot(Device& device)
        : memory_{device, 1}, device_{&device}, event_{device.create_event()} {}
    ~Slot() { device_->destroy_event(event_); }
    Slot(Slot const&) = delete;
    Slot& operator=(Slot const&) = delete;

    [[nodiscard]] void* data() const { return memory_.data(); }

    /// The memory is in use until the work enqueued on `stream` so far has run.
    void record(stream_type stream) { device_->record(event_, stream); }

   private:
    friend class Staging;
    void make_ready_sync(std::size_t bytes) {
      device_->synchronize(event_);
      if (memory_.size() < bytes) {
        memory_ = PinnedArray<Device, std::byte>{*device_, bytes};
      }
    }

    PinnedArray<Device, std::byte> memory_;
    Device* device_;  // not owned
    typename Device::event_type event_;
  };

  explicit Staging(Device& device)
      : slots_{Slot{device}, Slot{device}, Slot{device}, Slot{device}} {}

  /// A slot of at least `bytes`. Waits while it is still being copied.
  [[nodiscard]] Slot& next(std::size_t bytes) {
    Slot& slot = slots_[turn_++ % slots_.size()];
    slot.make_ready_sync(bytes);
    return slot;
  }

 private:
  std::array<Slot, 4> slots_;
  std::size_t turn_ = 0;
};

}  // namespace beyond
