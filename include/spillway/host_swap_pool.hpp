// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_transfers.hpp>
#include <spillway/host/host_slot.hpp>
#include <spillway/host/host_store.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host/posix_file_io.hpp>
#include <spillway/stream/stream_order.hpp>

#include <cstddef>
#include <optional>
#include <span>
#include <utility>

namespace spillway {

/// Where swapped-out bytes live: pinned memory, then pageable memory, then a file.
///
/// Shape    a slot holds up to `size_bytes` bytes, in one piece or scattered over a tier.
/// Threads  thread-safe. One slot: several reads at once, or one write, or `give_back`.
/// Streams  `write` and `read` enqueue and return; nothing waits on the host for the device. The two
///          slower tiers go through pinned staging, piece by piece, and the memory copies and file
///          calls run as host functions on a stream of the pool, one for each direction: while one
///          piece is written to the file the next one leaves the device.
/// Order    every slot carries the fences of its own transfers, and of those of whoever had its
///          memory before; each transfer waits, on a stream, for what it must come after.
/// Failure  a write that the file refuses loses nothing: the bytes stay in memory, and the tier takes
///          no new slots. Bytes that the file does not give back are lost; `check` and the next
///          transfer of that slot say so, and all others stay intact.
template <DeviceApi Device, FileIoApi FileIo = PosixFileIo>
class HostSwapPool {
 public:
  using Options = HostPoolOptions;
  using stream_type = typename Device::stream_type;

  static constexpr bool is_thread_safe = true;

  /// Opens the file, reserves the staging and the initial pinned memory. `device` and `order` are not
  /// owned and must outlive the pool. A pinned tier that starts smaller than asked is not an error:
  /// `stats` tells.
  ///
  /// @throws FileTierError where the file cannot be made, naming it and the system's reason
  /// @throws OutOfHostMemory where a slower tier finds no pinned memory to stage through
  /// @throws ContractViolation for a file tier without a path, or a slower tier on a device that only
  ///         plans and holds no bytes; DeviceError
  HostSwapPool(Device& device,
               StreamOrder<Device>& order,
               HostPoolOptions options,
               FileIo file_io = {});
  HostSwapPool(HostSwapPool const&) = delete;
  HostSwapPool& operator=(HostSwapPool const&) = delete;
  /// Waits on the host until no copy touches the pool's memory any more.
  ~HostSwapPool();

  /// A slot for `bytes` bytes in the first tier that has room without growing. No device call.
  ///
  /// @throws std::bad_alloc, with nothing changed
  /// @cost   O(1) unless tiers are nearly exhausted, then O(free ranges)
  [[nodiscard]] std::optional<HostSlotId> try_take(std::size_t bytes) {
    return store_.try_take(bytes);
  }

  /// Makes some tier able to hold `bytes`: pins a slab, maps memory, or extends the file, whose room
  /// on the disk is then certain. One thread grows at a time and the others wait for it.
  ///
  /// @returns true if there is room now, which another thread may take first; false if no tier can
  /// @throws  DeviceError, std::bad_alloc, with nothing changed
  /// @cost    pinning or writing a slab: milliseconds. Not for the hot path
  [[nodiscard]] bool try_grow(std::size_t bytes) { return store_.try_grow(bytes); }

  /// Frees a slot. Whoever takes its memory next comes after `last_use` and after the transfers of
  /// this slot, so `last_use` needs to name only what the pool cannot know.
  ///
  /// @pre  `id` is live and no other call is using it: an invariant where those are checked, and
  ///       otherwise nothing happens
  void give_back(HostSlotId id, Fence const& last_use = {}) noexcept {
    store_.give_back(id, last_use);
  }

  /// Swap-out: copies `bytes` bytes of device memory into the slot.
  ///
  /// @throws ContractViolation if `id` is stale or foreign, the slot is smaller, or another call is
  ///         using it; FileTierError if the slot has lost bytes before; std::bad_alloc. The slot is
  ///         as it was
  /// @throws DeviceError; what was enqueued stays enqueued and is in the slot's own fences and, for
  ///         the device range, ahead of a mark on `stream`. The slot then has no contents
  /// @stream enqueues on `stream`, which the caller has ordered after the last write of the range, and
  ///         on the pool's; does not wait
  [[nodiscard]] Transfer
  write(HostSlotId id, void const* device_from, std::size_t bytes, stream_type stream) {
    // The device only reads there.  NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
    auto* const from = static_cast<std::byte*>(const_cast<void*>(device_from));
    return carrier_.transfer(id, from, bytes, stream, Direction::out);
  }

  /// Swap-in: copies the first `bytes` bytes of the slot into device memory.
  ///
  /// @throws ContractViolation as `write`, and if fewer bytes were written; FileTierError;
  ///         std::bad_alloc
  /// @throws DeviceError; as `write`, but the slot keeps its contents, and the device range has none
  /// @stream enqueues on `stream`, which the caller has ordered after the last use of the range, and
  ///         on the pool's; does not wait
  [[nodiscard]] Transfer
  read(HostSlotId id, void* device_to, std::size_t bytes, stream_type stream) {
    return carrier_.transfer(id, static_cast<std::byte*>(device_to), bytes, stream, Direction::in);
  }

  /// Several swap-outs at once, in order: as so many calls of `write`, for less.
  ///
  /// Small transfers of one tier that follow each other are enqueued together: one call of the device
  /// if it takes batches, one copy where their bytes touch on both sides, one point on the stream that
  /// all of them are done at. What a slower tier gets shares a staging chunk, and where it also lies
  /// side by side in the file, one call of the file. A transfer that would have to wait longer than
  /// those before it does not hold them up.
  ///
  /// @throws as `write`, at the first transfer that fails. `state` in each request says which were
  ///         enqueued; a transfer that is `torn` is as after a `DeviceError` of `write`, those that are
  ///         `waiting` are as they were
  /// @stream makes `stream` wait for what each request names; then as `write`
  void write_all(std::span<TransferRequest> requests, stream_type stream) {
    carrier_.transfer_all(requests, stream, Direction::out);
  }
  /// Several swap-ins at once, in order: as so many calls of `read`, for less. As `write_all`.
  void read_all(std::span<TransferRequest> requests, stream_type stream) {
    carrier_.transfer_all(requests, stream, Direction::in);
  }

  /// Learns whether transfers of the slot that have run so far have lost bytes.
  ///
  /// @throws FileTierError if so, as often as it is asked; ContractViolation if `id` names no slot
  void check(HostSlotId id) { store_.check(id); }

  /// Whether the slot has lost bytes, without telling its owner: such a slot takes no more bytes.
  ///
  /// @throws ContractViolation if `id` names no slot
  [[nodiscard]] bool has_failed(HostSlotId id) { return store_.has_failed(id); }

  /// The same as `check(id)` for slots that were given back before their last read ran.
  ///
  /// @throws FileTierError once for what has happened since the last call
  void check() { store_.check(); }

  /// @throws ContractViolation if `id` names no slot
  [[nodiscard]] HostTier tier(HostSlotId id) { return store_.tier(id); }
  /// The size asked for, rounded up. @throws ContractViolation if `id` names no slot
  [[nodiscard]] std::size_t size_bytes(HostSlotId id) { return store_.size_bytes(id); }

  [[nodiscard]] HostPoolStats stats() const {
    HostPoolStats stats = store_.stats();
    stats.staging_waits = carrier_.staging_waits();
    return stats;
  }

  /// What all tiers that take slots could still hold, growth included.
  [[nodiscard]] std::size_t free_bytes() const { return store_.free_bytes(); }

 private:
  using Carrier = detail::HostCarrier<Device, FileIo>;
  using Store = typename Carrier::Store;
  using Direction = typename Carrier::Direction;

  static constexpr bool holds_bytes = [] {
    if constexpr (requires { Device::holds_bytes; }) {
      return Device::holds_bytes;
    } else {
      return true;
    }
  }();

  [[nodiscard]] static HostPoolOptions const& checked(HostPoolOptions const& options);

  StreamOrder<Device>* order_;
  Store store_;
  Carrier carrier_;  // after the store, which its host functions use
};

template <DeviceApi Device, FileIoApi FileIo>
HostSwapPool<Device, FileIo>::HostSwapPool(Device& device,
                                           StreamOrder<Device>& order,
                                           HostPoolOptions options,
                                           FileIo file_io)
    : order_{&order},
      store_{device,
             checked(options),
             options.numa_node.value_or(device.numa_node()),
             Carrier::chunk_bytes_for(options),
             std::move(file_io)},
      carrier_{device, order, store_, options, options.numa_node.value_or(device.numa_node())} {
  store_.reserve_pinned(options.initial_pinned_bytes);  // after the staging, which nothing replaces
}

template <DeviceApi Device, FileIoApi FileIo>
HostSwapPool<Device, FileIo>::~HostSwapPool() {
  auto const wait = [](auto const& until_done) noexcept {
    try {
      until_done();
    } catch (...) {  // NOLINT(bugprone-empty-catch): a device that is gone uses no memory
    }
  };
  for (Direction const way : {Direction::out, Direction::in}) {
    wait([&] { carrier_.drain_sync(way); });
  }
  store_.for_each_fence([&](Fence const& fence) { wait([&] { order_->synchronize(fence); }); });
}

template <DeviceApi Device, FileIoApi FileIo>
HostPoolOptions const& HostSwapPool<Device, FileIo>::checked(HostPoolOptions const& options) {
  bool const is_staged = options.pageable_bytes > 0 || options.file_bytes > 0;
  expects(options.file_bytes == 0 || !options.file.empty(), "a file tier needs a path");
  expects(!is_staged || holds_bytes, "a device without bytes can have no tier but the pinned one");
  expects(!is_staged || (options.staging_chunks > 0 && options.staging_bytes > 0),
          "pageable memory and files need at least one staging chunk");
  return options;
}

}  // namespace spillway
