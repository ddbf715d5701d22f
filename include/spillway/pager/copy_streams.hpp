// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host_swap_pool.hpp>
#include <spillway/stream/owned_stream.hpp>
#include <spillway/stream/stream_order.hpp>

#include <cstddef>
#include <span>

namespace spillway::detail {

/// The three copy streams of a pager: one for swap-outs, one for swap-ins, one for moves inside the
/// device. So the three kinds of copies can run at the same time if the hardware has a copy engine
/// for each.
///
/// Threads  thread-safe.
/// Streams  work on the three streams is ordered by fences only.
template <DeviceApi Device, FileIoApi FileIo>
class CopyStreams {
 public:
  using Pool = HostSwapPool<Device, FileIo>;

  /// The arguments are not owned and must outlive this object. @throws DeviceError
  CopyStreams(Device& device, StreamOrder<Device>& order, Pool& pool)
      : order_{order},
        pool_{pool},
        out_{device, order},
        in_{device, order},
        moves_{device, order} {}

  /// Copies several blocks to their host slots, each after its own fence, as
  /// `HostSwapPool::write_all`.
  ///
  /// An event is recorded every `bytes_per_event`, so that whoever waits for one of the first
  /// copies need not wait for all that were enqueued after it.
  ///
  /// @throws as `write_all`; `state` in each request says how far it got
  /// @stream enqueues on the stream for swap-outs; does not wait
  void swap_out(std::span<TransferRequest> requests) {
    forget_answers(requests);
    while (!requests.empty()) {
      auto const part = first_part(requests);
      pool_.write_all(part, out_.handle());
      record(out_);
      requests = requests.subspan(part.size());
    }
  }

  /// The same in the other direction, as `HostSwapPool::read_all`.
  ///
  /// @throws as `read_all`
  /// @stream enqueues on the stream for swap-ins; does not wait
  void swap_in(std::span<TransferRequest> requests) {
    forget_answers(requests);
    while (!requests.empty()) {
      auto const part = first_part(requests);
      pool_.read_all(part, in_.handle());
      record(in_);
      requests = requests.subspan(part.size());
    }
  }

  [[nodiscard]] OwnedStream<Device> const& out() const noexcept { return out_; }
  [[nodiscard]] OwnedStream<Device> const& in() const noexcept { return in_; }
  [[nodiscard]] OwnedStream<Device> const& moves() const noexcept { return moves_; }

 private:
  // At 50 GB/s, copying 8 MiB takes 160 us. Beside that, the 3 us for an event and for starting the
  // next copy are small, and work that needs one block does not wait long for the others.
  static constexpr std::size_t bytes_per_event = 8_MiB;

  static void forget_answers(std::span<TransferRequest> requests) noexcept {
    for (TransferRequest& request : requests) {
      request.forget_answer();
    }
  }

  /// Returns the requests at the front that share one event: up to `bytes_per_event`, at least one.
  static std::span<TransferRequest> first_part(std::span<TransferRequest> requests) noexcept {
    std::size_t bytes = 0;
    std::size_t count = 0;
    do {
      bytes += requests[count++].bytes;
    } while (count < requests.size() && bytes + requests[count].bytes <= bytes_per_event);
    return requests.first(count);
  }

  void record(OwnedStream<Device> const& stream) noexcept {
    try {
      order_.record(stream.index());
    } catch (...) {  // NOLINT(bugprone-empty-catch): whoever waits will record an event instead
    }
  }

  StreamOrder<Device>& order_;
  Pool& pool_;
  OwnedStream<Device> out_;
  OwnedStream<Device> in_;
  OwnedStream<Device> moves_;
};

}  // namespace spillway::detail
