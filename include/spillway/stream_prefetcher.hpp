// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/prefetch_policy.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host_swap_pool.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>
#include <spillway/stream/stream_order.hpp>

#include <cstddef>
#include <span>
#include <utility>

namespace spillway {

/// Owns the copy streams, watches the order in which blocks are used, and says what to bring in next.
///
/// One stream carries swap-outs, one swap-ins and one moves inside the device, so that the three do
/// not wait for each other where the hardware has an engine for each. The schedule records one step
/// of a program that repeats and predicts the next one from it; the policy turns that into an order
/// of blocks to bring in. Usable without a pager: `send_out` and `bring_in` are plain transfers
/// between device memory and a `HostSwapPool`.
///
/// Threads  the transfers are thread-safe; recording and `candidates` are thread-compatible.
/// Streams  the three streams are created and destroyed here; work on them is ordered by fences only.
template <DeviceApi Device, PrefetchPolicy Policy>
class StreamPrefetcher {
 public:
  using stream_type = typename Device::stream_type;
  using pool_type = HostSwapPool<Device>;

  static constexpr bool is_thread_safe = false;

  /// `device` and `order` are not owned and must outlive this object.
  StreamPrefetcher(Device& device, StreamOrder<Device>& order, Policy policy = {})
      : device_{&device}, order_{&order}, policy_{std::move(policy)} {}
  StreamPrefetcher(StreamPrefetcher const&) = delete;
  StreamPrefetcher& operator=(StreamPrefetcher const&) = delete;

  /// Copies a block's bytes to its host slot after `after`.
  ///
  /// An event is recorded at once: one that is recorded when somebody has to wait for this copy would
  /// cover all copies that were enqueued since.
  ///
  /// @throws DeviceError, FileTierError; what was already enqueued is covered by `out_ticket()`
  /// @stream enqueues on the outgoing stream; does not wait
  Transfer send_out(
      pool_type& pool, HostSlotId slot, void const* from, std::size_t bytes, Fence const& after) {
    order_->wait(out_.index, after);
    Transfer const done = pool.write(slot, from, bytes, out_.handle);
    order_->record(out_.index);
    return done;
  }

  /// Copies a block's bytes from its host slot to the device after `after`, and records an event.
  ///
  /// @throws DeviceError, FileTierError; what was already enqueued is covered by `in_ticket()`
  /// @stream enqueues on the incoming stream; does not wait
  Transfer
  bring_in(pool_type& pool, HostSlotId slot, void* to, std::size_t bytes, Fence const& after) {
    order_->wait(in_.index, after);
    Transfer const done = pool.read(slot, to, bytes, in_.handle);
    order_->record(in_.index);
    return done;
  }

  /// Several blocks at once, each after its own fence: as `HostSwapPool::write_all`. Events are recorded
  /// in between, so that the first of them can be waited for before the last has been copied.
  ///
  /// @throws as `write_all`; `state` in each request says what became of it
  /// @stream enqueues on the outgoing stream; does not wait
  void send_out_all(pool_type& pool, std::span<TransferRequest> requests) {
    carry_in_parts(requests, out_.index, [&](std::span<TransferRequest> part) {
      pool.write_all(part, out_.handle);
    });
  }
  /// The same the other way.
  /// @stream enqueues on the incoming stream; does not wait
  void bring_in_all(pool_type& pool, std::span<TransferRequest> requests) {
    carry_in_parts(requests, in_.index, [&](std::span<TransferRequest> part) {
      pool.read_all(part, in_.handle);
    });
  }

  [[nodiscard]] StreamIndex out_stream() const noexcept { return out_.index; }
  [[nodiscard]] StreamIndex in_stream() const noexcept { return in_.index; }
  [[nodiscard]] StreamIndex move_stream() const noexcept { return moves_.index; }
  [[nodiscard]] stream_type out_handle() const noexcept { return out_.handle; }
  [[nodiscard]] stream_type move_handle() const noexcept { return moves_.handle; }
  /// Everything enqueued so far on the copy stream in question.
  [[nodiscard]] Ticket out_ticket() noexcept { return order_->mark(out_.index); }
  [[nodiscard]] Ticket in_ticket() noexcept { return order_->mark(in_.index); }
  [[nodiscard]] Ticket move_ticket() noexcept { return order_->mark(moves_.index); }

  /// Marks the boundary between two steps of a program that repeats.
  void begin_step() noexcept {
    schedule_.begin_step();
    policy_.on_step();
  }

  /// Notes a new block. @throws std::bad_alloc, with nothing noted
  void on_create(BlockId id, std::size_t bytes) {
    policy_.on_create(id);
    try {
      schedule_.on_create(id, bytes);
    } catch (...) {
      policy_.on_destroy(id);
      throw;
    }
  }

  Use on_access(BlockId id, Access access) noexcept {
    Use const use = schedule_.on_access(id, access);
    policy_.on_access(id, use);
    return use;
  }

  void on_release(BlockId id) noexcept { schedule_.on_release(id); }

  void on_destroy(BlockId id) noexcept {
    schedule_.on_destroy(id);
    policy_.on_destroy(id);
  }

  /// Calls `visit(id, next_use)` for blocks in the order they should be resident, until it returns
  /// false. May name blocks that are resident already.
  template <class Visit>
  void candidates(Visit visit) const {
    policy_.candidates(schedule_, std::move(visit));
  }

  [[nodiscard]] std::size_t max_inflight_bytes() const noexcept {
    return policy_.max_inflight_bytes();
  }
  [[nodiscard]] AccessSchedule& schedule() noexcept { return schedule_; }
  [[nodiscard]] AccessSchedule const& schedule() const noexcept { return schedule_; }

 private:
  /// A stream of our own, gone with us. Its last points stay valid: `retire` records them.
  struct CopyStream {
    CopyStream(Device& device, StreamOrder<Device>& order)
        : device_{&device}, order_{&order}, handle{device.create_stream()} {
      try {
        index = order.index_of(handle);
      } catch (...) {
        device.destroy_stream(handle);
        throw;
      }
    }
    CopyStream(CopyStream const&) = delete;
    CopyStream& operator=(CopyStream const&) = delete;
    ~CopyStream() {
      try {
        order_->retire(handle);
      } catch (...) {  // NOLINT(bugprone-empty-catch): a device that is gone has no work left
      }
      device_->destroy_stream(handle);
    }

    Device* device_;
    StreamOrder<Device>* order_;
    stream_type handle;
    StreamIndex index = StreamIndex::none;
  };

  // What is carried between two events when many blocks are: at 25 GB/s some 80 us of copying, beside
  // which an event costs nothing, and not much to wait for beside what one asked for.
  static constexpr std::size_t bytes_per_event = 2_MiB;

  /// Carries all of it, with an event after each part.
  template <class Carry>
  void carry_in_parts(std::span<TransferRequest> requests, StreamIndex stream, Carry carry) {
    for (TransferRequest& request : requests) {
      request.forget_answer();
    }
    while (!requests.empty()) {
      std::size_t bytes = 0;
      std::size_t count = 0;
      do {
        bytes += requests[count++].bytes;
      } while (count < requests.size() && bytes + requests[count].bytes <= bytes_per_event);
      carry(requests.first(count));
      try {
        order_->record(stream);
      } catch (...) {  // NOLINT(bugprone-empty-catch): whoever has to wait records a later one
      }
      requests = requests.subspan(count);
    }
  }

  Device* device_;
  StreamOrder<Device>* order_;
  Policy policy_;
  AccessSchedule schedule_;
  CopyStream out_{*device_, *order_};
  CopyStream in_{*device_, *order_};
  CopyStream moves_{*device_, *order_};
};

}  // namespace spillway
