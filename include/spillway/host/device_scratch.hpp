// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>
#include <spillway/stream/stream_order.hpp>

#include <cstddef>
#include <mutex>
#include <span>
#include <utility>

namespace spillway::detail {

/// Device memory in which `StreamCodec`s work. All transfers of one direction share it; each makes
/// its stream wait for the transfer before.
///
/// It is taken from the device when a codec is chosen, so that a swap-out, which is made when
/// memory is short, does not itself need memory. The owner destroys it only after all work on the
/// memory has finished.
///
/// Threads  thread-safe. One thread at a time has a `Use`, while it enqueues one transfer.
template <DeviceApi Device>
class DeviceScratch {
 public:
  /// The arguments are not owned and must outlive this object.
  DeviceScratch(Device& device, StreamOrder<Device>& order) : device_{&device}, order_{&order} {}
  DeviceScratch(DeviceScratch const&) = delete;
  DeviceScratch& operator=(DeviceScratch const&) = delete;
  ~DeviceScratch() { release(memory_); }

  /// Makes the memory at least `bytes` long. If it has to be replaced, waits on the host for the
  /// work that uses the old memory.
  ///
  /// @throws OutOfDeviceMemory, DeviceError; the memory is then as before
  void reserve(std::size_t bytes) {
    {
      std::scoped_lock const lock{mutex_};
      if (bytes <= memory_.size()) {
        return;
      }
    }
    auto* const fresh = static_cast<std::byte*>(device_->try_reserve(bytes));
    if (fresh == nullptr) {
      MemoryInfo const info = device_->memory_info();
      throw OutOfDeviceMemory{{.requested_bytes = bytes,
                               .capacity_bytes = info.total_bytes,
                               .free_bytes = info.free_bytes,
                               .largest_free_bytes = info.free_bytes},
                              Text{"A codec needs device memory to work in, beside the "
                                   "allocator's, and the device has "} +
                                  info.free_bytes +
                                  " bytes free: lower capacity_bytes by as much, or choose the "
                                  "codec earlier."};
    }
    std::span longer{fresh, bytes};
    try {
      std::scoped_lock const lock{mutex_};
      if (bytes > memory_.size()) {
        order_->synchronize(last_use_);  // under the lock, so that no further use begins meanwhile
        std::swap(memory_, longer);
      }
    } catch (...) {
      release(longer);
      throw;
    }
    release(longer);  // what was replaced; if another thread was faster, the memory from above
  }

  /// Exclusive use while one transfer is being enqueued.
  class Use {
   public:
    /// Makes stream `at` wait for the transfer before. @throws DeviceError
    Use(DeviceScratch& scratch, StreamIndex at)
        : scratch_{&scratch}, lock_{scratch.mutex_}, at_{at} {
      scratch_->order_->wait(at, scratch_->last_use_);
    }
    Use(Use const&) = delete;
    Use& operator=(Use const&) = delete;
    ~Use() {
      if (!scratch_->memory_.empty()) {
        scratch_->last_use_ = scratch_->order_->mark(at_);  // covers all earlier uses, too
      }
    }
    [[nodiscard]] std::span<std::byte> memory() const noexcept { return scratch_->memory_; }

   private:
    DeviceScratch* scratch_;
    std::unique_lock<std::mutex> lock_;
    StreamIndex at_;
  };

 private:
  void release(std::span<std::byte> memory) noexcept {
    if (!memory.empty()) {
      device_->release(memory.data(), memory.size());
    }
  }

  Device* device_;
  StreamOrder<Device>* order_;
  std::mutex mutex_;  // guards what follows; held while a transfer is enqueued
  std::span<std::byte> memory_;
  Fence last_use_;
};

}  // namespace spillway::detail
