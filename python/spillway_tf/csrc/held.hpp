// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/interop/framework/buffer_leases.hpp>

#include <array>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace spillway_tf {

/// A buffer that code outside of operations uses does not fit on the device.
class OutOfMemory : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Keeps buffers leased between `__enter__` and `__exit__`.
///
/// Bytes that are written in between are kept only if `may_write` was true: else the buffer counts
/// as unchanged, and is dropped instead of being swapped out if the host still has a copy of it.
template <class Site>
class Held {
 public:
  explicit Held(std::vector<std::size_t> const& addresses, bool may_write = false) {
    for (std::size_t const address : addresses) {
      uses_.push_back({reinterpret_cast<void*>(address), may_write});
    }
  }
  Held(Held const&) = delete;
  Held& operator=(Held const&) = delete;
  ~Held() { exit(); }

  /// Swaps a buffer in and keeps it resident for good. @throws as `enter`
  static void keep(void* address, bool may_write = false) {
    Held held{{reinterpret_cast<std::size_t>(address)}, may_write};
    held.enter();
    std::array<void*, 1> const addresses{address};
    Site::leases().keep(addresses);
  }

  /// @throws OutOfMemory if the buffers do not fit, `std::exception` if one cannot be read back
  void enter() {
    if (frame_ != nullptr || !Site::is_ready()) {
      return;
    }
    auto frame = std::make_unique<typename Site::Leases::Frame>();
    std::string const why = Site::leases().try_enter(*frame, uses_);
    if (!why.empty()) {
      throw OutOfMemory{"OOM when bringing in a tensor: " + why};
    }
    frame_ = std::move(frame);
  }
  void exit() {
    if (frame_ != nullptr) {
      Site::leases().exit(*frame_);
      frame_.reset();
    }
  }

 private:
  std::vector<spillway::framework::BufferUse> uses_;
  std::unique_ptr<typename Site::Leases::Frame> frame_;
};

}  // namespace spillway_tf
