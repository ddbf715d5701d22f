// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/copy_batch.hpp>
#include <spillway/host/host_batch.hpp>
#include <spillway/host/host_slot.hpp>
#include <spillway/host/host_store.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host/staging.hpp>
#include <spillway/stream/stream_order.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

namespace spillway::detail {

/// Carries bytes between the device and the slots of a host store: the transfers of a host pool.
///
/// Threads  thread-safe.
/// Streams  the device's copies run on the caller's stream, memory copies and file calls of the slower
///          tiers as host functions on a stream of this object, one for each direction.
template <DeviceApi Device, FileIoApi FileIo>
class HostCarrier {
 public:
  using Store = HostStore<Device, FileIo>;
  using Direction = typename Store::Direction;
  using stream_type = typename Device::stream_type;

  /// None of them is owned. Without slower tiers there is no staging.
  ///
  /// @throws OutOfHostMemory where there is no pinned memory to stage through; DeviceError
  HostCarrier(Device& device,
              StreamOrder<Device>& order,
              Store& store,
              HostPoolOptions const& options,
              int numa_node)
      : device_{&device}, order_{&order}, store_{&store} {
    if (options.pageable_bytes > 0 || options.file_bytes > 0) {
      open_lanes(options, numa_node);
    }
  }

  /// What a staging chunk holds.
  [[nodiscard]] static constexpr std::size_t
  chunk_bytes_for(HostPoolOptions const& options) noexcept {
    return Lane::chunk_bytes_for(options.staging_bytes);
  }

  /// One transfer. @throws as `HostSwapPool::write` and `read`
  Transfer
  transfer(HostSlotId id, std::byte* device, std::size_t bytes, stream_type stream, Direction way) {
    StreamIndex const at = order_->index_of(stream);
    Call call{*store_, id, bytes, way};
    transfer(call, device, stream, at);
    return call.done;
  }
  /// Several. @throws as `HostSwapPool::write_all` and `read_all`
  void transfer_all(std::span<TransferRequest> requests, stream_type stream, Direction way);

  /// Waits on the host until no host function runs and no chunk is in use. @throws DeviceError
  void drain_sync(Direction way) {
    if (std::optional<Lane>& lane = way == Direction::out ? out_ : in_; lane) {
      lane->drain_sync();
    }
  }

  /// How often a thread waited for another one's chunk.
  [[nodiscard]] std::uint64_t staging_waits() const {
    return (out_ ? out_->waits() : 0) + (in_ ? in_->waits() : 0);
  }

 private:
  using Lane = StagingLane<Device>;
  using Call = typename Store::Call;
  using Batch = HostBatch<Device, FileIo>;

  // A larger batch would keep the first of its transfers waiting for the last; a larger transfer costs
  // so much itself that there is nothing to gain.
  static constexpr std::size_t most_batch_bytes = 1_MiB;
  static constexpr std::size_t most_batch_requests = 512;
  // Up to here transfers wait for each other's fences.
  static constexpr std::size_t patient_bytes = 256_KiB;

  [[nodiscard]] static CopyKind kind_of(Direction way) noexcept {
    return way == Direction::out ? CopyKind::to_host : CopyKind::to_device;
  }
  void open_lanes(HostPoolOptions const& options, int numa_node);
  void transfer(Call& call, std::byte* device, stream_type stream, StreamIndex at);
  void transfer_pinned(Call& call, std::byte* device, stream_type stream, StreamIndex at);
  void write_staged(Call& call, std::byte const* from, stream_type stream, StreamIndex at);
  void read_staged(Call& call, std::byte* to, stream_type stream, StreamIndex at);
  void transfer_one(TransferRequest& request, stream_type stream, StreamIndex at, Direction way);
  [[nodiscard]] std::size_t length_of_run(std::span<TransferRequest const> requests,
                                          StreamIndex at) const;
  [[nodiscard]] Transfer transfer_batch(
      Batch& batch, CopyBatch& copies, stream_type stream, StreamIndex at, Direction way);
  [[nodiscard]] Transfer transfer_batch_staged(
      Batch& batch, CopyBatch& copies, stream_type stream, StreamIndex at, Direction way);
  void
  launch(Call& call, Lane& lane, HostFunction function, HostPiece const& piece, std::byte* chunk);

  Device* device_;
  StreamOrder<Device>* order_;
  Store* store_;
  std::optional<Lane> out_;
  std::optional<Lane> in_;
};

/// Both directions with as many chunks as there is pinned memory for.
template <DeviceApi Device, FileIoApi FileIo>
void HostCarrier<Device, FileIo>::open_lanes(HostPoolOptions const& options, int numa_node) {
  for (std::size_t chunks = options.staging_chunks; !in_; --chunks) {
    try {
      out_.emplace(*device_, *order_, chunks, options.staging_bytes, numa_node);
      in_.emplace(*device_, *order_, chunks, options.staging_bytes, numa_node);
    } catch (OutOfHostMemory const&) {
      out_.reset();
      if (chunks == 1) {
        throw;
      }
    }
  }
}

template <DeviceApi Device, FileIoApi FileIo>
void HostCarrier<Device, FileIo>::transfer(Call& call,
                                           std::byte* device,
                                           stream_type stream,
                                           StreamIndex at) {
  if (call.tier() == HostTier::pinned) {
    transfer_pinned(call, device, stream, at);
  } else if (call.direction == Direction::out) {
    write_staged(call, device, stream, at);
  } else {
    read_staged(call, device, stream, at);
  }
  call.is_finished = true;
}

template <DeviceApi Device, FileIoApi FileIo>
void HostCarrier<Device, FileIo>::transfer_pinned(Call& call,
                                                  std::byte* device,
                                                  stream_type stream,
                                                  StreamIndex at) {
  bool const is_out = call.direction == Direction::out;
  order_->wait(at, call.before);
  for (HostPiece const& piece : call.pieces()) {
    std::byte* const to = is_out ? piece.memory : device;
    std::byte const* const from = is_out ? device : piece.memory;
    device_->copy(to, from, piece.bytes, kind_of(call.direction), stream);
    call.done.device_done = call.done.host_done = order_->mark(at);
    device += piece.bytes;
  }
}

template <DeviceApi Device, FileIoApi FileIo>
void HostCarrier<Device, FileIo>::transfer_all(std::span<TransferRequest> requests,
                                               stream_type stream,
                                               Direction way) {
  StreamIndex const at = order_->index_of(stream);
  for (TransferRequest& request : requests) {
    request.forget_answer();
  }
  Batch batch{*store_, way};
  CopyBatch copies{kind_of(way)};
  while (!requests.empty()) {
    std::size_t count = batch.open(requests.first(length_of_run(requests, at)));
    if (count == 0) {
      transfer_one(requests.front(), stream, at, way);
      count = 1;
    } else {
      for (TransferRequest const& request : requests.first(count)) {
        order_->wait(at, request.after);
      }
      batch.answer(TransferState::enqueued, transfer_batch(batch, copies, stream, at, way));
      batch.close();
    }
    requests = requests.subspan(count);
  }
}

template <DeviceApi Device, FileIoApi FileIo>
void HostCarrier<Device, FileIo>::transfer_one(TransferRequest& request,
                                               stream_type stream,
                                               StreamIndex at,
                                               Direction way) {
  order_->wait(at, request.after);
  Call call{*store_, request.slot, request.bytes, way};
  try {
    transfer(call, request.device, stream, at);
  } catch (...) {
    request.state = TransferState::torn;
    request.done = call.done;
    request.done.device_done.add(order_->mark(at));
    throw;
  }
  request.state = TransferState::enqueued;
  request.done = call.done;
}

/// How many of the transfers should be enqueued together.
template <DeviceApi Device, FileIoApi FileIo>
std::size_t HostCarrier<Device, FileIo>::length_of_run(std::span<TransferRequest const> requests,
                                                       StreamIndex at) const {
  std::size_t bytes = 0;
  std::size_t count = 0;
  for (TransferRequest const& next :
       requests.first(std::min(requests.size(), most_batch_requests))) {
    bytes += next.bytes;
    if (bytes > most_batch_bytes ||
        (bytes > patient_bytes && !order_->is_ordered(next.after, at))) {
      break;
    }
    ++count;
  }
  return std::max<std::size_t>(count, 1);
}

/// What fails in between leaves nothing out: all that may have been enqueued comes before the mark.
template <DeviceApi Device, FileIoApi FileIo>
Transfer HostCarrier<Device, FileIo>::transfer_batch(
    Batch& batch, CopyBatch& copies, stream_type stream, StreamIndex at, Direction way) {
  if (batch.tier() != HostTier::pinned) {
    return transfer_batch_staged(batch, copies, stream, at, way);
  }
  copies.clear();
  std::size_t reservation = 0;
  std::uint32_t slab = 0;
  batch.for_each_piece([&](TransferRequest const& r, std::byte* device, HostPiece const& piece) {
    bool const may_join = r.reservation != 0 && r.reservation == reservation && piece.slab == slab;
    way == Direction::out ? copies.add(piece.memory, device, piece.bytes, may_join)
                          : copies.add(device, piece.memory, piece.bytes, may_join);
    reservation = r.reservation;
    slab = piece.slab;
  });
  batch.for_each_fence([&](Fence const& fence) { order_->wait(at, fence); });
  try {
    copies.enqueue(*device_, stream);
  } catch (...) {
    Ticket const reached = order_->mark(at);
    batch.answer(TransferState::torn, {reached, reached});
    throw;
  }
  Ticket const done = order_->mark(at);
  return {done, done};
}

/// All of it in one chunk: the device copies to or from places in it, and one host function does the
/// rest.
template <DeviceApi Device, FileIoApi FileIo>
Transfer HostCarrier<Device, FileIo>::transfer_batch_staged(
    Batch& batch, CopyBatch& copies, stream_type stream, StreamIndex at, Direction way) {
  bool const is_out = way == Direction::out;
  Lane& lane = is_out ? *out_ : *in_;
  typename Lane::Chunk chunk{lane};
  copies.clear();
  std::size_t reservation = 0;
  auto offset = batch.chunk_offsets().begin();
  auto* job = batch.jobs();
  batch.for_each_piece([&](TransferRequest const& r, std::byte* device, HostPiece const& piece) {
    bool const may_join = r.reservation != 0 && r.reservation == reservation;
    std::byte* const place = chunk.data() + *offset++;
    is_out ? copies.add(place, device, piece.bytes, may_join)
           : copies.add(device, place, piece.bytes, may_join);
    reservation = r.reservation;
    job->chunk = place;
    job = job->next;
  });
  auto const copy = [&] {
    order_->wait(at, chunk.fence());
    copies.enqueue(*device_, stream);
    chunk.fence() = order_->mark(at);
  };
  auto const carry = [&] {
    order_->wait(lane.index(), chunk.fence());
    HostFunction const run = is_out ? &Store::jobs_type::run_write : &Store::jobs_type::run_read;
    device_->launch_host(lane.stream(), run, batch.jobs());
    batch.forget_jobs();
    chunk.fence() = order_->mark(lane.index());
  };
  Transfer done;
  batch.for_each_fence([&](Fence const& fence) { order_->wait(lane.index(), fence); });
  try {
    if (is_out) {
      copy();
      done.device_done = chunk.fence();
      carry();
      done.host_done = chunk.fence();
    } else {
      carry();
      done.host_done = chunk.fence();
      copy();
      done.device_done = chunk.fence();
    }
    order_->record(is_out ? lane.index() : at);
  } catch (...) {
    chunk.fence().add(order_->mark(at));
    done.device_done.add(order_->mark(at));
    batch.answer(TransferState::torn, done);
    throw;
  }
  return done;
}

/// Device to chunk on `stream`, chunk to slot on the lane's, in turns: the next piece leaves the device
/// while this one is put away. Each fence is assigned as soon as what it stands for is enqueued, so
/// that a failure in between leaves nothing out.
///
/// Events are recorded at once: an event recorded when a chunk comes round again would cover the
/// pieces enqueued since, and the ring would stand still for them.
template <DeviceApi Device, FileIoApi FileIo>
void HostCarrier<Device, FileIo>::write_staged(Call& call,
                                               std::byte const* from,
                                               stream_type stream,
                                               StreamIndex at) {
  order_->wait(out_->index(), call.before);
  call.for_each_chunk([&](HostPiece const& piece) {
    typename Lane::Chunk chunk{*out_};
    order_->wait(at, chunk.fence());
    device_->copy(chunk.data(), from, piece.bytes, CopyKind::to_host, stream);
    call.done.device_done = chunk.fence() = order_->mark(at);
    order_->wait(out_->index(), chunk.fence());
    launch(call, *out_, &Store::jobs_type::run_write, piece, chunk.data());
    call.done.host_done = chunk.fence() = order_->mark(out_->index());
    order_->record(out_->index());
    from += piece.bytes;
  });
}

/// The same the other way round.
template <DeviceApi Device, FileIoApi FileIo>
void HostCarrier<Device, FileIo>::read_staged(Call& call,
                                              std::byte* to,
                                              stream_type stream,
                                              StreamIndex at) {
  order_->wait(in_->index(), call.before);
  call.for_each_chunk([&](HostPiece const& piece) {
    typename Lane::Chunk chunk{*in_};
    order_->wait(in_->index(), chunk.fence());
    launch(call, *in_, &Store::jobs_type::run_read, piece, chunk.data());
    call.done.host_done = chunk.fence() = order_->mark(in_->index());
    order_->wait(at, chunk.fence());
    device_->copy(to, chunk.data(), piece.bytes, CopyKind::to_device, stream);
    call.done.device_done = chunk.fence() = order_->mark(at);
    order_->record(at);
    to += piece.bytes;
  });
}

template <DeviceApi Device, FileIoApi FileIo>
void HostCarrier<Device, FileIo>::launch(
    Call& call, Lane& lane, HostFunction function, HostPiece const& piece, std::byte* chunk) {
  auto* const job = call.jobs;
  job->slot = call.route.slot;
  job->piece = piece;
  job->chunk = chunk;
  auto* const rest = std::exchange(job->next, nullptr);
  try {
    device_->launch_host(lane.stream(), function, job);
  } catch (...) {
    job->next = rest;
    throw;
  }
  call.jobs = rest;
}

}  // namespace spillway::detail
