// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/file_io_api.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/slot_io.hpp>
#include <spillway/host/host_ledger.hpp>
#include <spillway/host/tier_memory.hpp>
#include <spillway/host/host_slot.hpp>
#include <spillway/host/host_tier.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>

namespace spillway::detail {

template <DeviceApi Device, FileIoApi FileIo>
class HostBatch;

/// The memory of a host pool and its books, under one lock: everything but the transfers.
///
/// Threads  thread-safe. The lock is held for bookkeeping only, never across a device call, a system
///          call or a copy.
template <DeviceApi Device, FileIoApi FileIo>
class HostStore {
 public:
  using jobs_type = HostJobs<FileIo>;
  using job_type = HostJob<FileIo>;
  enum class Direction : std::uint8_t { out, in };

  /// What one transfer holds while it is being enqueued. On the way out it books what was enqueued.
  class Call {
   public:
    /// @throws ContractViolation, FileTierError, std::bad_alloc, with nothing changed
    Call(HostStore& owner, HostSlotId id, std::size_t transfer_bytes, Direction way);
    Call(Call const&) = delete;
    Call& operator=(Call const&) = delete;
    ~Call();

    [[nodiscard]] HostTier tier() const noexcept { return route.slot->tier; }
    [[nodiscard]] std::span<HostPiece const> pieces() const noexcept {
      return {route.pieces.data(), route.piece_count};
    }
    /// The pieces, cut into what one staging chunk holds.
    template <class Use>
    void for_each_chunk(Use use) const;

    HostStore* store;
    Direction direction;
    std::size_t bytes;
    HostRoute route;
    Fence before;              // what the first access to the slot comes after
    job_type* jobs = nullptr;  // one for each chunk that is still to be enqueued
    Transfer done;
    bool is_finished = false;
  };

  /// `chunk_bytes` is what a staging chunk holds.
  ///
  /// @throws FileTierError, DeviceError
  HostStore(Device& device,
            HostPoolOptions const& options,
            int numa_node,
            std::size_t chunk_bytes,
            FileIo file_io);
  HostStore(HostStore const&) = delete;
  HostStore& operator=(HostStore const&) = delete;
  ~HostStore() = default;

  [[nodiscard]] std::optional<HostSlotId> try_take(std::size_t bytes) {
    std::scoped_lock const lock{mutex_};
    return ledger_.try_take(bytes);
  }
  [[nodiscard]] bool try_grow(std::size_t bytes);
  /// Reserves pinned memory to begin with, as far as there is any. @throws DeviceError
  void reserve_pinned(std::size_t bytes);
  void give_back(HostSlotId id, Fence const& last_use) noexcept {
    std::scoped_lock const lock{mutex_};
    [[maybe_unused]] bool const is_ours = ledger_.give_back(id, last_use);
    SPILLWAY_ASSERT(is_ours);
  }

  void check(HostSlotId id);
  void check();
  [[nodiscard]] bool has_failed(HostSlotId id);
  [[nodiscard]] HostTier tier(HostSlotId id) {
    std::scoped_lock const lock{mutex_};
    return live(id).tier;
  }
  [[nodiscard]] std::size_t size_bytes(HostSlotId id) {
    std::scoped_lock const lock{mutex_};
    return live(id).bytes;
  }
  [[nodiscard]] HostPoolStats stats() const;
  [[nodiscard]] std::size_t free_bytes() const {
    std::scoped_lock const lock{mutex_};
    return ledger_.free_bytes();
  }

  /// Calls `visit(Fence const&)` for everything that may be using the memory. Not under the lock:
  /// nobody else is using the store any more.
  template <class Visit>
  void for_each_fence(Visit visit) const {
    ledger_.for_each_fence(visit);
  }

 private:
  friend class HostBatch<Device, FileIo>;
  using Memory = HostMemory<Device, FileIo>;

  [[nodiscard]] HostSlot& live(HostSlotId id);
  void throw_if_failed(HostSlot& slot);
  [[noreturn]] void throw_lost(FileFailure const& failure) const;
  [[nodiscard]] std::uint32_t salt() const noexcept;
  [[nodiscard]] bool has_room(std::size_t bytes) const noexcept;
  [[nodiscard]] bool try_add(HostTier tier, std::size_t bytes, std::unique_lock<std::mutex>& lock);

  std::size_t slab_bytes_;
  std::size_t chunk_bytes_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable grown_;
  bool is_growing_ = false;
  HostLedger ledger_;
  Memory memory_;
  jobs_type jobs_;
};

template <DeviceApi Device, FileIoApi FileIo>
HostStore<Device, FileIo>::HostStore(Device& device,
                                     HostPoolOptions const& options,
                                     int numa_node,
                                     std::size_t chunk_bytes,
                                     FileIo file_io)
    : slab_bytes_{round_up(options.slab_bytes, granule_bytes)},
      chunk_bytes_{chunk_bytes},
      ledger_{salt()},
      memory_{device, options, numa_node, std::move(file_io)},
      jobs_{mutex_, ledger_, memory_.file()} {
  bool const is_direct = memory_.file() != nullptr && memory_.file()->is_direct();
  ledger_.open(HostTier::pinned, options.pinned_bytes, granule_bytes);
  ledger_.open(HostTier::pageable, options.pageable_bytes, granule_bytes);
  ledger_.open(HostTier::file,
               options.file_bytes,
               is_direct ? SwapFile<FileIo>::direct_alignment_bytes : granule_bytes);
}

/// In one piece if it can be had, else in smaller ones.
template <DeviceApi Device, FileIoApi FileIo>
void HostStore<Device, FileIo>::reserve_pinned(std::size_t bytes) {
  std::unique_lock lock{mutex_};
  bytes = std::min(bytes, ledger_.stats(HostTier::pinned).capacity_bytes) & ~(granule_bytes - 1);
  std::size_t slab = bytes;
  while (bytes > 0 && slab > 0) {
    if (try_add(HostTier::pinned, slab, lock)) {
      bytes -= slab;
      slab = std::min(slab, bytes);
    } else {
      std::size_t const smaller = round_up(slab / 2, granule_bytes);
      slab = slab <= slab_bytes_ || smaller == slab ? 0 : std::max(smaller, slab_bytes_);
    }
  }
}

template <DeviceApi Device, FileIoApi FileIo>
bool HostStore<Device, FileIo>::try_grow(std::size_t bytes) {
  std::unique_lock lock{mutex_};
  grown_.wait(lock, [this] { return !is_growing_; });
  if (has_room(bytes)) {
    return true;
  }
  is_growing_ = true;
  struct Turn {  // ends under the lock, which is declared before it
    HostStore* store;
    ~Turn() {
      store->is_growing_ = false;
      store->grown_.notify_all();
    }
  } const turn{this};
  for (HostTier const tier : {HostTier::pinned, HostTier::pageable, HostTier::file}) {
    std::size_t refused = 0;
    for (std::size_t const least : {slab_bytes_, std::size_t{0}}) {
      std::size_t const slab = ledger_.growth_for(tier, bytes, least);
      if (slab == 0 || slab == refused) {
        break;
      }
      if (try_add(tier, slab, lock)) {
        return true;
      }
      refused = slab;
    }
  }
  return has_room(bytes);  // somebody may have given some back meanwhile
}

template <DeviceApi Device, FileIoApi FileIo>
bool HostStore<Device, FileIo>::has_room(std::size_t bytes) const noexcept {
  return ledger_.can_take(HostTier::pinned, bytes) || ledger_.can_take(HostTier::pageable, bytes) ||
         ledger_.can_take(HostTier::file, bytes);
}

/// Lets go of the lock while the system is asked.
template <DeviceApi Device, FileIoApi FileIo>
bool HostStore<Device, FileIo>::try_add(HostTier tier,
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
    return false;
  }
  try {
    memory_.provide();
    ledger_.add_slab(tier, slab->place, bytes, slab->numa_bound_bytes);
  } catch (...) {
    lock.unlock();  // freeing is a device call
    slab.reset();
    lock.lock();
    throw;
  }
  memory_.adopt(std::move(*slab));
  return true;
}

template <DeviceApi Device, FileIoApi FileIo>
HostStore<Device, FileIo>::Call::Call(HostStore& owner,
                                      HostSlotId id,
                                      std::size_t transfer_bytes,
                                      Direction way)
    : store{&owner}, direction{way}, bytes{transfer_bytes} {
  std::scoped_lock const lock{store->mutex_};
  HostSlot& slot = store->live(id);
  store->throw_if_failed(slot);
  bool const is_read = direction == Direction::in;
  char const* const refusal = slot.refusal(bytes, is_read);
  expects(refusal == nullptr, refusal);
  route = store->ledger_.route(slot, bytes);
  before = slot.before(is_read);
  std::uint32_t count = 0;
  if (slot.tier != HostTier::pinned) {
    for_each_chunk([&](HostPiece const&) { ++count; });
    jobs = store->jobs_.take(count);
  }
  slot.begin_call(is_read, count);
}

template <DeviceApi Device, FileIoApi FileIo>
HostStore<Device, FileIo>::Call::~Call() {
  std::scoped_lock const lock{store->mutex_};
  HostSlot& slot = *route.slot;
  std::uint32_t unused = 0;
  for (; jobs != nullptr; ++unused) {
    job_type* const job = jobs;
    jobs = job->next;
    store->jobs_.give_back(job);
  }
  slot.end_call(direction == Direction::in, unused, done.host_done, is_finished ? bytes : 0);
}

template <DeviceApi Device, FileIoApi FileIo>
template <class Use>
void HostStore<Device, FileIo>::Call::for_each_chunk(Use use) const {
  for (HostPiece piece : pieces()) {
    for (std::size_t left = piece.bytes; left > 0; left -= piece.bytes) {
      piece.bytes = std::min(left, store->chunk_bytes_);
      use(piece);
      piece.memory = piece.memory == nullptr ? nullptr : piece.memory + piece.bytes;
      piece.file_offset += piece.bytes;
    }
  }
}

/// @pre the lock is held
template <DeviceApi Device, FileIoApi FileIo>
HostSlot& HostStore<Device, FileIo>::live(HostSlotId id) {
  HostSlot* const slot = ledger_.find(id);
  expects(slot != nullptr, "a host slot id is stale or from another pool");
  return *slot;
}

template <DeviceApi Device, FileIoApi FileIo>
void HostStore<Device, FileIo>::throw_if_failed(HostSlot& slot) {
  if (slot.failure) {
    slot.is_failure_told = true;
    throw_lost(*slot.failure);
  }
}

template <DeviceApi Device, FileIoApi FileIo>
void HostStore<Device, FileIo>::throw_lost(FileFailure const& failure) const {
  throw FileTierError{std::string{"spillway: "} + (failure.is_read ? "reading " : "writing ") +
                      std::to_string(failure.bytes) + " bytes at offset " +
                      std::to_string(failure.file_offset) + " of the swap file at " +
                      memory_.file()->path().string() +
                      " failed: " + std::generic_category().message(failure.error) +
                      (failure.is_read ? "" : "; there was no memory to keep them in either") +
                      ". These swapped-out bytes are lost; all other slots are intact."};
}

template <DeviceApi Device, FileIoApi FileIo>
void HostStore<Device, FileIo>::check(HostSlotId id) {
  std::scoped_lock const lock{mutex_};
  throw_if_failed(live(id));
}

template <DeviceApi Device, FileIoApi FileIo>
bool HostStore<Device, FileIo>::has_failed(HostSlotId id) {
  std::scoped_lock const lock{mutex_};
  return live(id).failure.has_value();
}

template <DeviceApi Device, FileIoApi FileIo>
void HostStore<Device, FileIo>::check() {
  std::scoped_lock const lock{mutex_};
  if (auto const failure = ledger_.take_orphan_failure()) {
    throw_lost(*failure);
  }
}

template <DeviceApi Device, FileIoApi FileIo>
HostPoolStats HostStore<Device, FileIo>::stats() const {
  HostPoolStats stats;
  stats.is_file_direct = memory_.file() != nullptr && memory_.file()->is_direct();
  std::scoped_lock const lock{mutex_};
  for (std::size_t i = 0; i < host_tier_count; ++i) {
    stats.tiers[i] = ledger_.stats(static_cast<HostTier>(i));
  }
  stats.failed_writes = jobs_.failed_writes();
  stats.failed_reads = jobs_.failed_reads();
  ledger_.for_each_slot([&](HostSlot const& slot) {
    for (RescuedPiece const& rescued : slot.rescued) {
      stats.rescued_bytes += rescued.bytes;
    }
  });
  return stats;
}

/// Ids of one pool mean nothing to another one, which lies somewhere else.
template <DeviceApi Device, FileIoApi FileIo>
std::uint32_t HostStore<Device, FileIo>::salt() const noexcept {
  auto const address = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(this));
  return static_cast<std::uint32_t>((address * 0x9E3779B97F4A7C15U) >> 32U);
}

}  // namespace spillway::detail
