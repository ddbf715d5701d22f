// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/stream/stream_order.hpp>

namespace spillway::detail {

/// A stream that the library creates for itself and destroys with this object, such as a copy
/// stream of the pager.
///
/// Tickets of the stream stay valid after it is destroyed, since the `StreamOrder` records an event
/// that covers them.
///
/// Threads  thread-safe.
template <DeviceApi Device>
class OwnedStream {
 public:
  using stream_type = typename Device::stream_type;

  /// `device` and `order` are not owned and must outlive this object.
  ///
  /// @throws DeviceError; ContractViolation if `order` knows too many streams
  OwnedStream(Device& device, StreamOrder<Device>& order)
      : device_{&device}, order_{&order}, handle_{device.create_stream()} {
    try {
      index_ = order.index_of(handle_);
    } catch (...) {
      device.destroy_stream(handle_);
      throw;
    }
  }
  OwnedStream(OwnedStream const&) = delete;
  OwnedStream& operator=(OwnedStream const&) = delete;
  ~OwnedStream() {
    try {
      order_->retire(handle_);
    } catch (...) {  // NOLINT(bugprone-empty-catch): a device that failed has no work left
    }
    device_->destroy_stream(handle_);
  }

  [[nodiscard]] stream_type handle() const noexcept { return handle_; }
  [[nodiscard]] StreamIndex index() const noexcept { return index_; }
  /// Returns a ticket for all work enqueued on this stream so far.
  [[nodiscard]] Ticket mark() const noexcept { return order_->mark(index_); }

 private:
  Device* device_;
  StreamOrder<Device>* order_;
  stream_type handle_;
  StreamIndex index_ = StreamIndex::none;
};

}  // namespace spillway::detail
