// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/core/types.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

namespace spillway::test {

/// False for a device whose addresses only name memory.
template <class D>
constexpr bool holds_bytes() {
  if constexpr (requires { D::holds_bytes; }) {
    return D::holds_bytes;
  } else {
    return true;
  }
}

/// True if work that was enqueued runs without anybody waiting for it.
template <class D>
constexpr bool runs_by_itself() {
  if constexpr (requires { typename D::executor_type; }) {
    return !D::executor_type::is_stepped && !D::executor_type::is_virtual;
  } else {
    return true;
  }
}

/// Makes streams, events and memory of a device and gives all of them back.
template <DeviceApi D>
class DeviceRig {
 public:
  explicit DeviceRig(D& device) : device_{&device} {}
  DeviceRig(DeviceRig const&) = delete;
  DeviceRig& operator=(DeviceRig const&) = delete;
  ~DeviceRig() {
    for (auto const stream : streams_) {
      device_->synchronize(stream);
      device_->destroy_stream(stream);
    }
    for (auto const event : events_) {
      device_->destroy_event(event);
    }
    for (auto const& [p, bytes] : device_memory_) {
      device_->release(p, bytes);
    }
    for (auto const& [p, bytes] : pinned_) {
      device_->free_pinned(p, bytes);
    }
  }

  [[nodiscard]] auto stream() { return streams_.emplace_back(device_->create_stream()); }
  [[nodiscard]] auto event() { return events_.emplace_back(device_->create_event()); }
  [[nodiscard]] unsigned char* device_memory(std::size_t bytes) {
    void* const p = device_->try_reserve(bytes);
    REQUIRE(p != nullptr);
    device_memory_.emplace_back(p, bytes);
    return static_cast<unsigned char*>(p);
  }
  [[nodiscard]] unsigned char* pinned(std::size_t bytes) {
    void* const p = device_->try_allocate_pinned(bytes, device_->numa_node());
    REQUIRE(p != nullptr);
    pinned_.emplace_back(p, bytes);
    return static_cast<unsigned char*>(p);
  }
  /// Pinned memory whose bytes are all `byte`.
  [[nodiscard]] unsigned char* pinned(std::size_t bytes, unsigned char byte) {
    unsigned char* const p = pinned(bytes);
    if constexpr (holds_bytes<D>()) {
      for (unsigned char& mine : std::span{p, bytes}) {
        mine = byte;
      }
    }
    return p;
  }

 private:
  D* device_;
  std::vector<typename D::stream_type> streams_;
  std::vector<typename D::event_type> events_;
  std::vector<std::pair<void*, std::size_t>> device_memory_;
  std::vector<std::pair<void*, std::size_t>> pinned_;
};

/// Holds a stream up until it is opened. Declare it after the rig, so that an exception opens it.
///
/// Only one may be closed at a time: a device may run the host calls of all streams on one thread.
class Gate {
 public:
  Gate() = default;
  Gate(Gate const&) = delete;
  Gate& operator=(Gate const&) = delete;
  ~Gate() { open(); }

  template <DeviceApi D>
  void close(D& device, typename D::stream_type stream) {
    device.launch_host(stream, &Gate::pass, new State{state_});
  }
  void open() noexcept {
    state_->store(true, std::memory_order_release);
    state_->notify_all();
  }

 private:
  using State = std::shared_ptr<std::atomic<bool>>;  // the stream may leave after the gate is gone

  static void pass(void* argument) noexcept {
    std::unique_ptr<State> const state{static_cast<State*>(argument)};
    (*state)->wait(false, std::memory_order_acquire);
  }

  State state_ = std::make_shared<std::atomic<bool>>(false);
};

/// Gives a device that is wrong time to show it; says whether `event` completed.
template <DeviceApi D>
[[nodiscard]] bool completes_soon(D& device, typename D::event_type event) {
  for (int i = 0; i < 2000; ++i) {
    if (device.is_complete(event)) {
      return true;
    }
    std::this_thread::yield();
  }
  return false;
}

}  // namespace spillway::test
