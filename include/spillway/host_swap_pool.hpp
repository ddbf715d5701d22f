// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/codec.hpp>
#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/owned_thread.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_ledger.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host/host_transfers.hpp>
#include <spillway/host/slot_codecs.hpp>
#include <spillway/host/slot_io.hpp>
#include <spillway/host/staging.hpp>
#include <spillway/host/swap_file.hpp>
#include <spillway/host/system_file_io.hpp>
#include <spillway/host/tier_memory.hpp>
#include <spillway/stream/stream_order.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace spillway {

/// Stores swapped-out bytes on the host: in pinned memory first, then in pageable memory, then in a
/// file.
///
/// `DeviceAllocator` has one, and it can be used without any other part of the library: take a
/// slot, `write` device memory to it, `read` it back, give it back.
///
/// Shape    a slot holds up to `size_bytes` bytes, in one piece or in several pieces of one tier.
/// Threads  thread-safe. For one slot: several reads at once, or one write, or `give_back`. The
///          pool's lock is never held across a device call, a system call or a copy.
/// Streams  `write` and `read` enqueue work and return without waiting for the device. Transfers of
///          the two slower tiers go through pinned staging chunks. The memory copies and file calls
///          behind a chunk run on the host in the order of a stream of the pool, one stream for
///          each direction, so that one chunk is written to the file while the next one leaves the
///          device. They are host functions of that stream or, on a `HostWorkApi`, run on a thread
///          of their own, so that they do not delay the host functions of other streams.
/// Order    every slot has the fences of its own transfers and of those that used its memory
///          before. Each transfer makes its stream wait for the fences that it must come after.
/// Growth   when a tier has no room it grows by a slab: by 1/32 of what is in use, or by what one
///          slot lacks. On a `SlowPinningApi` a thread of the pool pins the next slab ahead of
///          need, once the pool is in use, as soon as less than half a slab, or less than 1/64 of
///          what is in use, is free. So from 64 MiB on, the pool takes at most 1.05 times the peak
///          of what was in use.
/// Codecs   a slot can have a codec (`coding`, `try_take`). It is taken with room for the worst
///          case, can be written once, and then shrinks to the encoded size. A `StreamCodec` runs
///          on the device, on the caller's stream, for slots in pinned memory. Any other codec runs
///          in a host function. On an `AddressableApi` that function accesses device memory
///          directly. It runs on the caller's stream, except that for a slot in the file it runs on
///          the pool's stream: work on any stream that then overwrites the device range must wait
///          for `Transfer::device_done`. On other devices it encodes staged bytes, in the two
///          slower tiers, if chunks have 64 KiB or more.
/// Direct   if the file's queues can access the device (`DeviceFileQueueApi`), slots of 256 KiB or
///          more without a codec are transferred between file and device without staging, unless
///          checksums are on.
/// Failure  if the file refuses a write, nothing is lost: the bytes stay in memory, and the file
///          tier takes no new slots. When all tiers are full, `try_grow` writes them to the file
///          again, and the tier takes slots again if that succeeds. If it fails, more and more
///          calls, up to 63, pass before it is tried once more. The bytes of a direct write that
///          fails, and bytes that the file does not give back, are lost. `check` and the next
///          transfer of that slot then throw; other slots are not affected. After a write has
///          failed there are no direct transfers any more.
template <DeviceApi Device, FileIoApi FileIo = SystemFileIo>
class HostSwapPool {
 public:
  using Options = HostPoolOptions;
  using stream_type = typename Device::stream_type;

  static constexpr bool is_thread_safe = true;

  /// Opens the file, and reserves the staging chunks and the initial pinned memory. `device` and
  /// `order` are not owned and must outlive the pool. It is no error if less pinned memory can be
  /// reserved than asked for: `stats` tells how much there is.
  ///
  /// @throws FileTierError if the file cannot be made, naming it and the system's reason
  /// @throws OutOfHostMemory if there is no pinned memory for the staging of a slower tier
  /// @throws ContractViolation for a file tier without a path, for a slower tier whose staging
  ///         options are out of range or whose device holds no bytes (`ByteHoldingApi`), and for a
  ///         pinned or pageable tier on a device that shares the host's memory
  ///         (`SharedMemoryApi`); DeviceError
  HostSwapPool(Device& device,
               StreamOrder<Device>& order,
               HostPoolOptions options,
               FileIo file_io = {});
  HostSwapPool(HostSwapPool const&) = delete;
  HostSwapPool& operator=(HostSwapPool const&) = delete;
  /// Waits on the host until no copy touches the pool's memory any more.
  ~HostSwapPool();

  /// Returns the id by which `try_take` is told to use codec `C` for a block with this tag. For
  /// each tag the pool measures whether a lossless codec makes blocks smaller, and stops using it
  /// if not. The id of `Identity` is `CodingId{}`.
  ///
  /// @throws std::bad_alloc; OutOfDeviceMemory and DeviceError, if the codec needs device memory
  template <Codec C>
  [[nodiscard]] CodingId coding([[maybe_unused]] std::uint64_t tag = 0) {
    if constexpr (StreamCodec<C, Device>) {
      transfers_.template reserve_scratch<C>();
      std::scoped_lock const lock{mutex_};
      return codecs_.coding_of(detail::stream_codec_type<C, Device>, tag);
    } else if constexpr (ByteHoldingApi<Device> && !IdentityCodec<C>) {
      std::scoped_lock const lock{mutex_};
      return codecs_.coding_of(detail::codec_type<C>, tag);
    } else {
      return {};
    }
  }
  /// Return the encoded size of blocks with this id as a fraction of their size, by the blocks that
  /// were encoded so far: in their slots (`stored_share`) and on the link (`link_share`). 1 if
  /// nothing is known yet.
  [[nodiscard]] double stored_share(CodingId coding) const {
    std::scoped_lock const lock{mutex_};
    return codecs_.stored_share(coding);
  }
  [[nodiscard]] double link_share(CodingId coding) const {
    std::scoped_lock const lock{mutex_};
    return codecs_.link_share(coding);
  }

  /// Takes a slot for `bytes` bytes in the first tier that has room without growing. A slot for 0
  /// bytes is as long as one for 1 byte. The slot gets the codec if that works in this tier and has
  /// not been given up. Makes no device call.
  ///
  /// @returns the slot; nothing if no tier has room
  /// @throws std::bad_alloc, with nothing changed
  /// @cost   O(1) unless tiers are nearly exhausted, then O(free ranges)
  [[nodiscard]] std::optional<HostSlotId> try_take(std::size_t bytes, CodingId coding = {}) {
    std::scoped_lock const lock{mutex_};
    auto const slot = ledger_.try_take(bytes, coding, codecs_.try_slot_room(coding, bytes));
    if (grows_ahead && is_growth_ahead_due()) {
      grower_.changed().notify_all();
    }
    return slot;
  }

  /// Makes room for a slot of `bytes` in some tier: pins a slab, maps memory, or extends the file
  /// by space that is allocated on the disk. If no tier can grow, may repeat file writes that have
  /// failed. Waits on the host while another thread grows a tier.
  ///
  /// @returns true if there is room now, which another thread may take first; false if no tier can
  /// @throws  DeviceError, std::bad_alloc, with nothing changed
  /// @cost    pinning or writing a slab: milliseconds. Not for the hot path
  [[nodiscard]] bool try_grow(std::size_t bytes, CodingId coding = {});

  /// Returns whether some tier might have room for such a slot once it has grown and `spare_bytes`
  /// of what is in use have been given back.
  [[nodiscard]] bool
  may_take(std::size_t bytes, CodingId coding = {}, std::size_t spare_bytes = 0) const {
    std::scoped_lock const lock{mutex_};
    return any_tier([&](HostTier tier) {
      return ledger_.may_take(tier, needed_bytes(tier, bytes, coding), spare_bytes);
    });
  }

  /// Sets the first tier for new slots: faster tiers take no new slots and do not grow any more.
  void set_first_tier(HostTier tier) {
    std::scoped_lock const lock{mutex_};
    ledger_.set_first_tier(tier);
  }
  [[nodiscard]] HostTier first_tier() const {
    std::scoped_lock const lock{mutex_};
    return ledger_.first_tier();
  }

  /// Gives slabs of memory and of the file that are wholly free back to the system, after waiting
  /// on the host for their last uses.
  ///
  /// @returns bytes given back
  /// @throws DeviceError where the wait fails: the next call waits for these slabs again;
  ///         std::bad_alloc
  std::size_t trim_sync();

  /// Frees a slot. The next use of its memory waits for `last_use` and for the transfers of this
  /// slot, so `last_use` need only contain work that the pool does not know.
  ///
  /// @pre  `id` is live and no other call is using it. If not, builds with assertions end the
  ///       program; others do nothing
  void give_back(HostSlotId id, Fence const& last_use = {}) noexcept {
    std::scoped_lock const lock{mutex_};
    [[maybe_unused]] bool const is_ours = ledger_.give_back(id, last_use);
    SPILLWAY_ASSERT(is_ours);
  }
  /// Frees the memory of a slot from which bytes were read that may turn out to be wrong, since
  /// reads of it have not run or have failed. The slot can be neither read nor written any more;
  /// `check` still reports the failure, until the slot is given back or replaced.
  ///
  /// @param last_use  as for `give_back`
  /// @returns false, with nothing done, if no read is unfinished and none has failed
  /// @pre     no call is using the slot
  [[nodiscard]] bool try_empty(HostSlotId id, Fence const& last_use = {}) {
    std::scoped_lock const lock{mutex_};
    detail::HostSlot const& slot = ledger_.at(id);
    if (!slot.has_unfinished_reads() && !has_lost_bytes(slot)) {
      return false;
    }
    [[maybe_unused]] bool const is_ours = ledger_.empty(id, last_use);
    SPILLWAY_ASSERT(is_ours);
    return true;
  }
  /// Gives back a slot from which bytes were read that are going to be written to the slot `heir`,
  /// or have been. If a read turns out to have failed, `check(heir)` reports it.
  void replace(HostSlotId id, HostSlotId heir) noexcept {
    std::scoped_lock const lock{mutex_};
    [[maybe_unused]] bool const are_ours = ledger_.bequeath(id, heir);
    SPILLWAY_ASSERT(are_ours);
  }
  /// Forgets failures of transfers of the slot that have been enqueued, also of those that have not
  /// run: their bytes were overwritten on the device, or are wanted no more.
  ///
  /// @param was_used  whether work that reads these bytes may have been enqueued before. Its
  ///                  results may be wrong then, so `check()` reports the failures
  void forget_failures(HostSlotId id, bool was_used) {
    std::scoped_lock const lock{mutex_};
    ledger_.forget_failures(ledger_.at(id), was_used);
  }

  /// Notes that the owner of the slot is gone although its bytes are still needed. `check()` then
  /// reports the losses of which `check(id)` has not told the owner, and all later ones.
  void disown(HostSlotId id) {
    std::scoped_lock const lock{mutex_};
    ledger_.disown(ledger_.at(id));
  }

  /// Swap-out: copies `bytes` bytes of device memory into the slot.
  ///
  /// @throws ContractViolation if `id` is stale or foreign, the slot is smaller, or another call is
  ///         using it; FileTierError if the slot has lost bytes before; std::bad_alloc. The slot is
  ///         as it was
  /// @throws DeviceError; what was enqueued stays enqueued and is in the slot's own fences and, for
  ///         the device range, ahead of a mark on `stream`. The slot then has no contents
  /// @stream enqueues on `stream`, which the caller has ordered after the last write of the range,
  ///         and on the pool's; does not wait
  [[nodiscard]] Transfer
  write(HostSlotId id, void const* device_from, std::size_t bytes, stream_type stream) {
    // The device only reads there.  NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
    auto* const from = static_cast<std::byte*>(const_cast<void*>(device_from));
    TransferRequest request{.slot = id, .device = from, .bytes = bytes};
    transfers_.enqueue(SlotAccess::write, {&request, 1}, stream);
    return request.done;
  }

  /// Swap-in: copies the first `bytes` bytes of the slot into device memory.
  ///
  /// @throws ContractViolation as `write`, and if fewer bytes were written; FileTierError;
  ///         std::bad_alloc
  /// @throws DeviceError as `write`; the slot keeps its contents, and the device range has none
  /// @stream enqueues on `stream`, which the caller has ordered after the last use of the range,
  ///         and on the pool's; does not wait
  [[nodiscard]] Transfer
  read(HostSlotId id, void* device_to, std::size_t bytes, stream_type stream) {
    auto* const to = static_cast<std::byte*>(device_to);
    TransferRequest request{.slot = id, .device = to, .bytes = bytes};
    transfers_.enqueue(SlotAccess::read, {&request, 1}, stream);
    return request.done;
  }

  /// Several swap-outs at once, in order. Has the effect of as many calls of `write` and costs
  /// less.
  ///
  /// Consecutive small transfers of one tier are enqueued together: in one call if the device takes
  /// batches (`BatchCopyApi`), as one copy if they are adjacent on both sides, and with one common
  /// fence. In a slower tier they share a staging chunk and, if they are adjacent in the file, one
  /// file call. A transfer that has to wait longer than those before it does not delay them.
  ///
  /// @throws as `write`, at the first transfer that fails. `state` in each request says which were
  ///         enqueued; a transfer that is `torn` is as after a `DeviceError` of `write`, those that
  ///         are `waiting` are as they were
  /// @stream makes `stream` wait for what each request names; then as `write`
  void write_all(std::span<TransferRequest> requests, stream_type stream) {
    transfers_.enqueue(SlotAccess::write, requests, stream);
  }
  /// Several swap-ins at once, in order. Works as `write_all`, with `read` in place of `write`.
  void read_all(std::span<TransferRequest> requests, stream_type stream) {
    transfers_.enqueue(SlotAccess::read, requests, stream);
  }

  /// Checks whether transfers of the slot that have run so far have lost bytes.
  ///
  /// @param tells_owner  whether the owner of the bytes will see the error. If not, `check()` may
  ///                     report the loss, too
  /// @throws FileTierError if so, at each call; ContractViolation if `id` names no slot
  void check(HostSlotId id, bool tells_owner = true) {
    std::scoped_lock const lock{mutex_};
    detail::HostSlot& slot = ledger_.at(id);
    if (slot.failure) {
      FileTierError const error = slot_io_.error_of(*slot.failure);  // not told if this fails
      slot.is_failure_told = slot.is_failure_told || tells_owner;
      throw error;
    }
    slot.is_failure_told = false;
  }

  /// Returns whether the slot was taken with this codec and may be written. Returns false if it has
  /// a codec and was written before, and if it has lost bytes (`check` reports that).
  ///
  /// @throws ContractViolation if `id` names no slot
  [[nodiscard]] bool takes_bytes(HostSlotId id, CodingId coding = {}) {
    std::scoped_lock const lock{mutex_};
    detail::HostSlot const& slot = ledger_.at(id);
    return !slot.failure && slot.wanted == coding && slot.takes_bytes != 0;
  }
  /// Returns whether a transfer of the slot can lose bytes after it was enqueued, so that `check`
  /// has to be called: that is so for slots in the file, for slots with a codec, and for those that
  /// have replaced such a slot.
  ///
  /// @throws ContractViolation if `id` names no slot
  [[nodiscard]] bool may_lose_bytes(HostSlotId id) {
    std::scoped_lock const lock{mutex_};
    detail::HostSlot const& slot = ledger_.at(id);
    return slot.tier == HostTier::file || slot.has_codec() || slot.has_ancestors;
  }

  /// Returns whether `check(id)` throws. @throws ContractViolation if `id` names no slot
  [[nodiscard]] bool has_failed(HostSlotId id) {
    std::scoped_lock const lock{mutex_};
    return ledger_.at(id).failure.has_value();
  }
  /// Returns whether a read of the slot has lost bytes. `check` throws then.
  ///
  /// @throws ContractViolation if `id` names no slot
  [[nodiscard]] bool has_lost_bytes(HostSlotId id) {
    std::scoped_lock const lock{mutex_};
    return has_lost_bytes(ledger_.at(id));
  }
  /// Returns whether a write of the slot has lost bytes that no read has got since. If the owner
  /// still has them, nothing is lost.
  ///
  /// @throws ContractViolation if `id` names no slot
  [[nodiscard]] bool has_lost_write(HostSlotId id) {
    std::scoped_lock const lock{mutex_};
    detail::HostSlot const& slot = ledger_.at(id);
    return slot.failure && !has_lost_bytes(slot);
  }

  /// Does what `check(id)` does for slots that were given back before their last read ran, and for
  /// failures that were forgotten although their bytes had been used.
  ///
  /// @throws FileTierError if such a slot has lost bytes since the last call, only once
  void check() {
    std::scoped_lock const lock{mutex_};
    if (ledger_.orphan_failure()) {
      FileTierError const error = slot_io_.error_of(*ledger_.orphan_failure());
      (void)ledger_.take_orphan_failure();  // not before there is an error that reports it
      throw error;
    }
  }

  /// Returns the tier that the slot is in. @throws ContractViolation if `id` names no slot
  [[nodiscard]] HostTier tier(HostSlotId id) {
    std::scoped_lock const lock{mutex_};
    return ledger_.at(id).tier;
  }
  /// Returns how many bytes the slot takes up now: the size asked for, rounded up; if it has a
  /// codec and was written, the encoded size.
  ///
  /// @throws ContractViolation if `id` names no slot
  [[nodiscard]] std::size_t size_bytes(HostSlotId id) {
    std::scoped_lock const lock{mutex_};
    return ledger_.at(id).bytes;
  }

  [[nodiscard]] HostPoolStats stats() const;

  /// Returns how many more bytes the tiers that take new slots could hold, including what they may
  /// still grow. A tier for which the system has refused the last slab does not count as growing.
  [[nodiscard]] std::size_t free_bytes() const {
    std::scoped_lock const lock{mutex_};
    return ledger_.free_bytes();
  }

  /// Returns the text for an error that no tier has room for a slot.
  [[nodiscard]] std::string advice_when_full() const {
    HostTier first{};
    bool has_tier = false;
    bool is_memory_refused = false;
    bool has_failed = false;
    int write_error = 0;
    {
      std::scoped_lock const lock{mutex_};
      first = ledger_.first_tier();
      has_failed = ledger_.has_failed(HostTier::file);
      write_error = slot_io_.write_error();
      for (auto i = static_cast<std::size_t>(first); i < host_tier_count; ++i) {
        auto const tier = static_cast<HostTier>(i);
        has_tier = has_tier || ledger_.stats(tier).capacity_bytes != 0;
        is_memory_refused =
            is_memory_refused || (tier != HostTier::file && ledger_.is_growth_refused(tier));
      }
    }
    if (!has_tier) {
      return first == HostTier::pinned
                 ? "The host pool has no tier: give one a capacity in HostPoolOptions."
             : first == HostTier::pageable
                 ? "The first host tier is set to pageable memory, and the pool has neither that "
                   "nor a file: set it to pinned, or give them a capacity in HostPoolOptions."
                 : "The first host tier is set to the file, and the pool has none: set it to a "
                   "faster one, or give HostPoolOptions a file and file_bytes.";
    }
    std::string advice = "The host pool is full: raise its tiers' capacities or free blocks.";
    if (is_memory_refused) {
      advice += " The system gave less memory than the capacities allow: raise its limit on locked "
                "memory, or leave it more memory.";
    }
    File const* const file = memory_.file();
    if (file != nullptr && has_failed) {
      advice += detail::Text{" A write to the swap file at "} + file->path() +
                " failed: " + File::reason(write_error) +
                ". It takes no more blocks until a write succeeds. While the pool is full, one is "
                "tried again from time to time.";
    } else if (file != nullptr && file->refusal() != 0) {
      advice += detail::Text{" The system gave no room for the swap file at "} + file->path() +
                ": " + File::reason(file->refusal()) + ".";
    }
    return advice;
  }

 private:
  using SlotAccess = detail::SlotAccess;
  using File = detail::SwapFile<FileIo>;
  using Memory = detail::TierMemory<Device, FileIo>;

  [[nodiscard]] static bool has_lost_bytes(detail::HostSlot const& slot) noexcept {
    return slot.failure && slot.failure->has_reached_owner();
  }

  static constexpr bool holds_bytes = ByteHoldingApi<Device>;
  static constexpr bool grows_ahead = SlowPinningApi<Device>;

  /// The right to grow the tiers, which one thread has at a time. Made and ended under the lock.
  class Growing {
   public:
    explicit Growing(HostSwapPool& pool) noexcept : pool_{&pool} { pool_->is_growing_ = true; }
    Growing(Growing const&) = delete;
    Growing& operator=(Growing const&) = delete;
    ~Growing() {
      pool_->is_growing_ = false;
      pool_->grower_.changed().notify_all();
    }

   private:
    HostSwapPool* pool_;
  };

  /// Slabs that were removed from the ledger, and the work that must finish before they are freed.
  struct Removed {
    std::vector<typename Memory::Slab> slabs;
    Fence last_uses;
    std::size_t bytes = 0;

    /// @pre `slabs` has capacity for the slabs of `more`
    void add(Removed more) noexcept {
      std::move(more.slabs.begin(), more.slabs.end(), std::back_inserter(slabs));
      last_uses.add(more.last_uses);
      bytes += more.bytes;
    }
  };

  [[nodiscard]] static HostPoolOptions const& checked(Device const& device,
                                                      HostPoolOptions const& options);
  [[nodiscard]] bool is_growth_ahead_due() const noexcept {
    return ledger_.growth_ahead(slab_bytes_) != 0;
  }
  void grow_ahead() noexcept;
  /// Returns whether `is_it(tier)` is true for any tier from the first tier on.
  template <class Predicate>
  [[nodiscard]] bool any_tier(Predicate const& is_it) const noexcept {
    auto i = static_cast<std::size_t>(ledger_.first_tier());
    while (i < host_tier_count && !is_it(static_cast<HostTier>(i))) {
      ++i;
    }
    return i < host_tier_count;
  }
  [[nodiscard]] bool has_room(std::size_t bytes, CodingId coding) const noexcept {
    return any_tier(
        [&](HostTier tier) { return ledger_.can_take(tier, needed_bytes(tier, bytes, coding)); });
  }
  /// Returns the least room that a slot needs in a tier, with the codec or without it.
  [[nodiscard]] std::size_t
  needed_bytes(HostTier tier, std::size_t bytes, CodingId coding) const noexcept {
    std::size_t const coded = codecs_.slot_room(coding, bytes).bytes_in(tier);
    return coded == 0 ? bytes : std::min(bytes, coded);
  }
  void reserve_pinned(std::size_t bytes);
  [[nodiscard]] bool
  try_grow_a_tier(std::size_t bytes, CodingId coding, std::unique_lock<std::mutex>& lock);
  [[nodiscard]] bool
  try_add_slab(HostTier tier, std::size_t bytes, std::unique_lock<std::mutex>& lock);

  StreamOrder<Device>* order_;
  std::size_t slab_bytes_;
  int numa_node_;
  mutable std::mutex mutex_;  // guards what follows, except as `memory_` and `transfers_` document
  bool is_growing_ = false;
  detail::HostLedger ledger_;
  Memory memory_;
  detail::SlotIo<FileIo> slot_io_;
  detail::SlotCodecs codecs_;
  Removed removed_;                                  // left by a `trim_sync` whose wait failed
  detail::HostTransfers<Device, FileIo> transfers_;  // its host functions use all of the above
  // Runs `grow_ahead`. It is notified when a tier has grown, and when growth ahead of need is due.
  detail::OwnedThread grower_;
};

template <DeviceApi Device, FileIoApi FileIo>
HostSwapPool<Device, FileIo>::HostSwapPool(Device& device,
                                           StreamOrder<Device>& order,
                                           HostPoolOptions options,
                                           FileIo file_io)
    : order_{&order},
      slab_bytes_{round_up(checked(device, options).slab_bytes, granule_bytes)},
      numa_node_{options.numa_node.value_or(device.numa_node())},
      memory_{device, options, numa_node_, std::move(file_io)},
      slot_io_{mutex_, ledger_, memory_.file()},
      codecs_{mutex_, ledger_, AddressableApi<Device>, options.staging_bytes},
      transfers_{device, order, mutex_, ledger_, slot_io_, codecs_, options, numa_node_} {
  bool const has_units = memory_.file() != nullptr && memory_.file()->moves_units();
  ledger_.open(HostTier::pinned, options.pinned_bytes, granule_bytes);
  ledger_.open(HostTier::pageable, options.pageable_bytes, granule_bytes);
  ledger_.open(HostTier::file, options.file_bytes, has_units ? File::unit_bytes : granule_bytes);
  reserve_pinned(options.initial_pinned_bytes);  // after the staging, which nothing replaces
  if (grows_ahead && options.pinned_bytes > options.initial_pinned_bytes) {
    try {
      grower_.start([this] { grow_ahead(); });
    } catch (
        std::system_error const&) {  // NOLINT(bugprone-empty-catch): it grows when there is need
    }
  }
}

template <DeviceApi Device, FileIoApi FileIo>
HostSwapPool<Device, FileIo>::~HostSwapPool() {
  grower_.end(mutex_);
  auto const wait = [](auto const& until_done) noexcept {
    try {
      until_done();
    } catch (...) {  // NOLINT(bugprone-empty-catch): a device that is gone uses no memory
    }
  };
  for (SlotAccess const access : {SlotAccess::write, SlotAccess::read}) {
    wait([&] { transfers_.drain_sync(access); });
  }
  ledger_.for_each_fence([&](Fence const& fence) { wait([&] { order_->synchronize(fence); }); });
  wait([&] { order_->synchronize(removed_.last_uses); });
}

template <DeviceApi Device, FileIoApi FileIo>
HostPoolOptions const& HostSwapPool<Device, FileIo>::checked(Device const& device,
                                                             HostPoolOptions const& options) {
  constexpr char const* pool = "HostSwapPool";
  if constexpr (SharedMemoryApi<Device>) {
    expects(!device.shares_host_memory() ||
                (options.pinned_bytes == 0 && options.pageable_bytes == 0),
            "the device has the host's memory, so a copy there makes no room: swap to a file only, "
            "with pinned_bytes and pageable_bytes of 0, or raise capacity_bytes",
            {},
            pool);
  }
  bool const is_staged = options.pageable_bytes > 0 || options.file_bytes > 0;
  expects(options.file_bytes == 0 || !options.file.empty(),
          "a file tier needs a path: set HostPoolOptions::file",
          {},
          pool);
  expects(!is_staged || holds_bytes,
          "a device without bytes can have no tier but the pinned one",
          {},
          pool);
  expects(!is_staged || (options.staging_chunks > 0 && options.staging_bytes > 0),
          "pageable memory and files need at least one staging chunk",
          {},
          pool);
  expects(!is_staged || options.staging_bytes <= detail::most_staging_bytes,
          "staging_bytes is the size of one staging chunk: choose at most 1 GiB",
          {},
          pool);
  expects(!is_staged || options.staging_chunks <= detail::most_staging_chunks,
          "staging_chunks is the number of staging chunks of each direction: choose at most 65536",
          {},
          pool);
  return options;
}

/// Reserves the initial pinned memory, as much of it as there is: in one slab if possible, else in
/// smaller ones.
template <DeviceApi Device, FileIoApi FileIo>
void HostSwapPool<Device, FileIo>::reserve_pinned(std::size_t bytes) {
  std::unique_lock lock{mutex_};
  bytes = std::min(bytes, ledger_.stats(HostTier::pinned).capacity_bytes) & ~(granule_bytes - 1);
  std::size_t slab = bytes;
  while (bytes > 0 && slab > 0) {
    if (try_add_slab(HostTier::pinned, slab, lock)) {
      bytes -= slab;
      slab = std::min(slab, bytes);
    } else {
      std::size_t const smaller = round_up(slab / 2, granule_bytes);
      slab = slab <= slab_bytes_ || smaller == slab ? 0 : std::max(smaller, slab_bytes_);
    }
  }
}

template <DeviceApi Device, FileIoApi FileIo>
bool HostSwapPool<Device, FileIo>::try_grow(std::size_t bytes, CodingId coding) {
  std::unique_lock lock{mutex_};
  grower_.changed().wait(lock, [this] { return !is_growing_; });
  if (has_room(bytes, coding)) {
    return true;
  }
  Growing const growing{*this};  // ends under the lock, which is declared before it
  if (try_grow_a_tier(bytes, coding, lock)) {
    return true;
  }
  if (slot_io_.is_attempt_due()) {
    lock.unlock();
    bool const is_open = slot_io_.try_again();
    lock.lock();
    if (is_open && !has_room(bytes, coding) && try_grow_a_tier(bytes, coding, lock)) {
      return true;
    }
  }
  return has_room(bytes, coding);  // another thread may have given some back meanwhile
}

template <DeviceApi Device, FileIoApi FileIo>
bool HostSwapPool<Device, FileIo>::try_grow_a_tier(std::size_t bytes,
                                                   CodingId coding,
                                                   std::unique_lock<std::mutex>& lock) {
  for (auto i = static_cast<std::size_t>(ledger_.first_tier()); i < host_tier_count; ++i) {
    auto const tier = static_cast<HostTier>(i);
    std::size_t needed = needed_bytes(tier, bytes, coding);
    if (std::size_t const coded = codecs_.slot_room(coding, bytes).bytes_in(tier);
        ledger_.growth_for(tier, coded, 0) != 0) {
      needed = std::max(needed, coded);
    }
    std::size_t refused = 0;
    for (std::size_t const least : {ledger_.slab_bytes(tier, slab_bytes_), std::size_t{0}}) {
      std::size_t const slab = ledger_.growth_for(tier, needed, least);
      if (slab == 0 || slab == refused) {
        break;
      }
      if (try_add_slab(tier, slab, lock)) {
        return true;
      }
      refused = slab;
    }
  }
  return false;
}

template <DeviceApi Device, FileIoApi FileIo>
std::size_t HostSwapPool<Device, FileIo>::trim_sync() {
  Removed removed;  // freed without the lock, since freeing is a device call
  {
    std::scoped_lock const lock{mutex_};
    std::size_t const most_slabs = removed_.slabs.size() + memory_.slab_count();
    removed_.slabs.reserve(most_slabs);
    removed.slabs.reserve(most_slabs);
    std::swap(removed, removed_);
    for (HostTier const tier : {HostTier::pinned, HostTier::pageable, HostTier::file}) {
      removed.bytes += ledger_.stats(tier).reserved_bytes;
      ledger_.remove_free_slabs(tier, [&](detail::HostSlab const& slab, Fence const& fence) {
        removed.last_uses.add(fence);
        removed.slabs.push_back(memory_.release(slab));
      });
      removed.bytes -= ledger_.stats(tier).reserved_bytes;
    }
  }
  try {
    order_->synchronize(removed.last_uses);
  } catch (...) {
    std::scoped_lock const lock{mutex_};
    removed_.add(std::move(removed));
    throw;
  }
  for (typename Memory::Slab& slab : removed.slabs) {
    memory_.give_back(std::move(slab));
  }
  return removed.bytes;
}

/// Body of the thread that pins slabs ahead of need. It ends with the pool, or when memory cannot
/// be pinned; `try_grow` then tries again when a slot is needed, and falls back to the next tier.
template <DeviceApi Device, FileIoApi FileIo>
void HostSwapPool<Device, FileIo>::grow_ahead() noexcept {
  std::unique_lock lock{mutex_};
  bool has_grown = true;
  while (has_grown) {
    grower_.changed().wait(
        lock, [this] { return grower_.is_ending() || (!is_growing_ && is_growth_ahead_due()); });
    if (grower_.is_ending()) {
      return;
    }
    Growing const growing{*this};
    try {
      has_grown = try_add_slab(HostTier::pinned, ledger_.growth_ahead(slab_bytes_), lock);
    } catch (...) {
      has_grown = false;
    }
  }
}

/// Releases the lock while it asks the system for memory.
template <DeviceApi Device, FileIoApi FileIo>
bool HostSwapPool<Device, FileIo>::try_add_slab(HostTier tier,
                                                std::size_t bytes,
                                                std::unique_lock<std::mutex>& lock) {
  std::optional<typename Memory::Slab> slab;
  lock.unlock();
  try {
    slab = memory_.try_reserve(tier, bytes);
  } catch (...) {
    lock.lock();
    throw;
  }
  lock.lock();
  if (!slab) {
    ledger_.refuse_growth(tier);
    return false;
  }
  try {
    memory_.prepare_adopt();
    ledger_.add_slab(tier, slab->place, bytes);
  } catch (...) {
    lock.unlock();  // freeing is a device call
    memory_.give_back(std::move(*slab));
    lock.lock();
    throw;
  }
  memory_.adopt(std::move(*slab));
  return true;
}

template <DeviceApi Device, FileIoApi FileIo>
HostPoolStats HostSwapPool<Device, FileIo>::stats() const {
  HostPoolStats stats;
  stats.is_file_direct = memory_.file() != nullptr && memory_.file()->is_direct();
  stats.staging_waits = transfers_.staging_waits();
  stats.is_file_checked = memory_.file() != nullptr && memory_.file()->is_checked();
  stats.file_calls = slot_io_.file_calls();
  std::scoped_lock const lock{mutex_};
  for (std::size_t i = 0; i < host_tier_count; ++i) {
    stats.tiers[i] = ledger_.stats(static_cast<HostTier>(i));
  }
  stats.failed_writes = slot_io_.failed_writes();
  stats.failed_reads = slot_io_.failed_reads();
  codecs_.add_stats(stats);
  ledger_.for_each_slot([&](detail::HostSlot const& slot) {
    for (detail::RescuedPiece const& rescued : slot.rescued) {
      stats.rescued_bytes += rescued.bytes;
    }
  });
  return stats;
}

SPILLWAY_COMPILED_PART(class detail::SlotIo<SystemFileIo>);
SPILLWAY_COMPILED_PART(class detail::SwapFile<SystemFileIo>);
SPILLWAY_COMPILED_PART(class detail::CodedParts<SystemFileIo>);

}  // namespace spillway
