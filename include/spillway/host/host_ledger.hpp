// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/bits.hpp>
#include <spillway/core/block_table.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host/slab_map.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace spillway::detail {

/// How a transfer uses its slot: a swap-out writes it, a swap-in reads it.
enum class SlotAccess : std::uint8_t { read, write };

/// Where one slab lies: its memory, or its offset where the tier is the file.
struct HostSlab {
  std::byte* memory = nullptr;
  std::uint64_t file_offset = 0;
  std::size_t numa_bound_bytes = 0;
};

/// The room that a codec needs in a slot. If a slot cannot have so much, it gets no codec.
struct CodedRoom {
  std::size_t bytes = 0;  // in the worst case; 0: no codec
  // The codec works in the tiers from `first_tier` to `last_tier`.
  HostTier first_tier = HostTier::pinned;
  HostTier last_tier = HostTier::file;

  [[nodiscard]] std::size_t bytes_in(HostTier tier) const noexcept {
    return first_tier <= tier && tier <= last_tier ? bytes : 0;
  }
};

/// One contiguous piece of a slot.
struct HostPiece {
  std::byte* memory = nullptr;  // null in the file tier
  std::uint64_t file_offset = 0;
  std::size_t bytes = 0;
  std::uint32_t slab = 0;  // number of the slab in its tier
};

/// How bytes of a slot were lost: by a file call that failed, or by bytes that cannot be decoded.
struct FileFailure {
  int error = 0;
  std::uint64_t file_offset = 0;
  std::size_t bytes = 0;
  bool is_read = false;      // false: a write was refused, and there was no memory for its bytes
  bool was_read = false;     // after that write was refused, a read of the slot has run
  bool is_direct = false;    // a write was refused whose bytes were only on the device
  bool is_encoding = false;  // no call failed, but the encoded bytes are not what was written

  /// Whether wrong bytes have been read from the slot.
  [[nodiscard]] bool has_reached_owner() const noexcept { return is_read || was_read; }
};

/// Bytes that the file refused and that are kept in memory instead.
struct RescuedPiece {
  std::uint64_t file_offset = 0;
  std::size_t bytes = 0;
  std::shared_ptr<std::byte[]> data;  // as much as a file call transfers, and aligned for it
};

/// The ledger's record of one slot.
struct HostSlot {
  BlockId self{};  // its name in the ledger's table
  HostTier tier{};
  SlabMap::ChainId chain{};
  std::size_t bytes = 0;               // rounded up to the tier's granule
  CodingId wanted{};                   // the codec that its owner asked for
  CodingId coding{};                   // the codec that it has: the same, or none
  std::size_t takes_bytes = 0;         // the most that may be written
  std::size_t written_bytes = 0;       // by the last write that was enqueued completely
  std::size_t stored_bytes = 0;        // the encoded size of these, once it is known
  Fence written;                       // a read of the slot waits for it
  Fence used;                          // a write waits for it and for `written`
  std::uint32_t enqueueing_reads = 0;  // reads that are being enqueued right now
  bool is_enqueueing_write = false;
  std::uint32_t read_jobs = 0;  // jobs of host functions that have not finished
  std::uint32_t write_jobs = 0;
  bool is_emptied = false;     // its memory was given back; the owner may keep the record
  bool is_given_back = false;  // the record stays only until nothing is unfinished
  std::vector<RescuedPiece> rescued;
  std::optional<FileFailure> failure;
  bool is_failure_told = false;  // the failure was reported to the owner of the slot
  bool is_disowned = false;      // nobody is left to whom the slot can report
  // How often the owner has overwritten what it had read from here. Failures of transfers that were
  // enqueued before that no longer concern the owner.
  std::uint32_t version = 0;
  // Reads of versions below this one may have given wrong bytes to work that used them.
  std::uint32_t used_versions = 0;
  // The slot that took the place of this one before the reads of this one had run. If one of them
  // fails, the bytes in the heir are wrong, too. So the record of the heir stays until they have
  // run (`unfinished_ancestors`).
  HostSlot* heir = nullptr;
  std::uint32_t heir_version = 0;
  std::uint32_t unfinished_ancestors = 0;
  bool has_ancestors = false;

  /// Returns the reason why a transfer must not begin, or null if it may.
  [[nodiscard]] char const* refusal(std::size_t transfer_bytes, SlotAccess access) const noexcept {
    bool const is_write = access == SlotAccess::write;
    if (transfer_bytes > (is_write ? takes_bytes : std::max(takes_bytes, written_bytes))) {
      return "a transfer is larger than its host slot";
    }
    if (is_enqueueing_write) {
      return "a host slot is used while another call writes it";
    }
    if (is_write) {
      return enqueueing_reads == 0 ? nullptr : "a host slot is written while another call reads it";
    }
    return transfer_bytes <= written_bytes ? nullptr : "more bytes are read than were swapped out";
  }

  /// Returns the work for which a transfer must wait before it accesses the slot.
  [[nodiscard]] Fence fence_before(SlotAccess access) const noexcept {
    return access == SlotAccess::read ? written : last_uses();
  }
  /// All enqueued uses of the slot.
  [[nodiscard]] Fence last_uses() const noexcept {
    Fence all = written;
    all.add(used);
    return all;
  }

  void begin_transfer(SlotAccess access) noexcept {
    if (access == SlotAccess::read) {
      ++enqueueing_reads;
    } else {
      is_enqueueing_write = true;
    }
  }
  /// Notes the end of a call that enqueues a transfer.
  ///
  /// @param host_done       the enqueued work that uses the slot; empty, too, if it has run already
  ///                        on a caller's stream
  /// @param has_begun       whether any of the transfer was enqueued; if not, the slot is as before
  /// @param finished_bytes  by a write that was enqueued completely; 0 by any other one
  void end_transfer(SlotAccess access,
                    Fence const& host_done,
                    bool has_begun,
                    std::size_t finished_bytes) noexcept {
    if (access == SlotAccess::read) {
      --enqueueing_reads;
      used.add(host_done);
      return;
    }
    is_enqueueing_write = false;
    if (has_begun) {
      if (!host_done.is_empty()) {  // a write of no bytes enqueues no work
        written = host_done;  // covers all earlier uses, since the write waited for `fence_before`
        used.clear();
      }
      written_bytes = finished_bytes;
      takes_bytes = has_codec() ? 0 : takes_bytes;  // it will shrink and cannot be written again
    }
  }
  [[nodiscard]] bool has_codec() const noexcept { return coding != CodingId{}; }
  /// Whether a transfer that has been enqueued may still fail and so make the bytes wrong that the
  /// owner has read from here, or from a slot that this one replaced.
  [[nodiscard]] bool has_unfinished_reads() const noexcept {
    return read_jobs != 0 || unfinished_ancestors != 0;
  }
  /// Whether nobody can read what is to be written here. The bytes of a slot without memory are
  /// needed only by reads that have been enqueued.
  [[nodiscard]] bool is_unneeded() const noexcept { return is_emptied && read_jobs == 0; }

  /// The number of unfinished jobs that read, or write, the slot.
  [[nodiscard]] std::uint32_t& jobs(SlotAccess access) noexcept {
    return access == SlotAccess::read ? read_jobs : write_jobs;
  }
};

/// The table of a host pool's slots: in which tier and where each is, and which fences guard it.
///
/// `HostSwapPool` takes and frees slots here, `HostTransfers` begins and ends transfers, and
/// `SlotIo` notes what the file did. The ledger makes no system or device call.
///
/// Threads  thread-compatible: used under the pool's lock.
template <class = Lazily>
class BasicHostLedger {
 public:
  BasicHostLedger() = default;
  BasicHostLedger(BasicHostLedger const&) = delete;
  BasicHostLedger& operator=(BasicHostLedger const&) = delete;
  ~BasicHostLedger() = default;

  /// Gives a tier its capacity. `granule` is a power of two; the capacity is rounded down to it.
  void open(HostTier tier, std::size_t capacity_bytes, std::size_t granule) {
    at(tier).map = SlabMap{granule};
    at(tier).capacity_bytes = capacity_bytes & ~(granule - 1);
  }

  /// Returns the least size of the next slab of `tier`: 1/32 of what is in use, between 2 MiB and
  /// `most_bytes`. So a large tier has few slabs, and a small one reserves little that it does not
  /// use.
  [[nodiscard]] std::size_t slab_bytes(HostTier tier, std::size_t most_bytes) const noexcept {
    std::size_t const part = at(tier).used_bytes() / 32 / 2_MiB * 2_MiB;
    return std::min(most_bytes, std::max(2_MiB, part));
  }

  /// Returns the size of a slab that together with the largest free ranges of `tier` holds `bytes`;
  /// 0 if the capacity does not allow one. It is at least `least_bytes`, or all that is left of the
  /// capacity.
  [[nodiscard]] std::size_t
  growth_for(HostTier tier, std::size_t bytes, std::size_t least_bytes) const noexcept {
    constexpr std::size_t most_pieces = 8;  // few, since each piece is copied separately
    if (bytes > at(tier).capacity_bytes) {
      return 0;
    }
    std::size_t const most = at(tier).growth_bytes();
    std::size_t const missing =
        at(tier).map.missing_bytes(std::max(bytes, std::size_t{1}), most_pieces);
    std::size_t const slab =
        std::min(round_up(std::max(missing, least_bytes), granule(tier)), most);
    return slab > 0 && can_take(tier, bytes, slab) ? slab : 0;
  }

  /// Returns the size of the slab by which the pinned tier should grow ahead of need, or 0.
  ///
  /// If the tier is in use it should have half a slab, and 1/64 of what is in use, free. Together
  /// with one more slab that is less than 1/20 of what is in use, if 64 MiB or more are in use.
  [[nodiscard]] std::size_t growth_ahead(std::size_t most_bytes) const noexcept {
    auto const& pinned = at(HostTier::pinned);
    std::size_t const used = pinned.used_bytes();
    std::size_t const slab = slab_bytes(HostTier::pinned, most_bytes);
    bool const is_due = first_tier_ == HostTier::pinned && used != 0 &&
                        pinned.map.free_bytes() < std::max(slab / 2, used / 64);
    return is_due ? std::min(slab, pinned.growth_bytes()) : 0;
  }

  /// Whether `try_take` would find `bytes` in `tier` if it had one more slab of `extra_bytes`.
  [[nodiscard]] bool
  can_take(HostTier tier, std::size_t bytes, std::size_t extra_bytes = 0) const noexcept {
    return !at(tier).is_failed &&
           at(tier).map.can_take(std::max(bytes, std::size_t{1}), extra_bytes);
  }

  /// The same once the tier has grown as far as it may, and `spare_bytes` of what is in use are
  /// free. A tier does not grow where the system refused the last slab.
  [[nodiscard]] bool
  may_take(HostTier tier, std::size_t bytes, std::size_t spare_bytes) const noexcept {
    Tier const& now = at(tier);
    std::size_t const growth = now.is_refused ? 0 : now.growth_bytes();
    return can_take(tier, bytes, growth + std::min(spare_bytes, now.used_bytes()));
  }

  /// @throws std::bad_alloc, with nothing changed
  void add_slab(HostTier tier, HostSlab slab, std::size_t bytes) {
    Tier& grown = at(tier);
    SPILLWAY_ASSERT(bytes <= grown.growth_bytes());
    grown.slabs.reserve(grown.slabs.size() + 1);
    grown.map.add_slab(bytes);
    grown.slabs.push_back(slab);
    grown.is_refused = false;
    grown.numa_bound_bytes += slab.numa_bound_bytes;
  }
  /// Removes every slab of `tier` that is wholly free, and calls
  /// `visit(HostSlab const&, Fence const&)` for each: its memory may be freed after the fence.
  template <class Visit>
  void remove_free_slabs(HostTier tier, Visit visit) {
    Tier& shrunk = at(tier);
    shrunk.map.remove_free_slabs([&](std::uint32_t slab, std::size_t, Fence const& fence) {
      visit(std::as_const(shrunk.slabs[slab]), fence);
      shrunk.numa_bound_bytes -= shrunk.slabs[slab].numa_bound_bytes;
      shrunk.slabs[slab] = {};
    });
  }

  /// Sets the first tier for new slots; faster tiers get no more.
  void set_first_tier(HostTier tier) noexcept { first_tier_ = tier; }
  [[nodiscard]] HostTier first_tier() const noexcept { return first_tier_; }
  /// Takes a slot in the first tier that has room, in several pieces if need be. It gets the wanted
  /// codec if there is room for that, else none. A slot for 0 bytes is as long as one for 1 byte.
  ///
  /// @throws std::bad_alloc, with nothing changed
  [[nodiscard]] std::optional<HostSlotId>
  try_take(std::size_t bytes, CodingId wanted = {}, CodedRoom const& coded = {});
  /// Frees the part of a slot with a codec that its encoded bytes do not need. No effect until
  /// their size is known, and while the slot is being written.
  void trim(HostSlot& slot) noexcept {
    if (slot.stored_bytes != 0 && !slot.is_enqueueing_write && slot.write_jobs == 0 &&
        !slot.is_emptied) {
      slot.bytes = at(slot.tier).map.trim(slot.chain, slot.stored_bytes, slot.last_uses());
    }
  }

  /// Frees a slot. @returns false if `id` names none, or one that a call is using
  bool give_back(HostSlotId id, Fence const& last_use) noexcept;
  /// Frees the memory of a slot, and keeps its record, so that failures of reads that have been
  /// enqueued can still be reported to the owner. @returns false as `give_back`
  bool empty(HostSlotId id, Fence const& last_use) noexcept;
  /// Frees a slot whose owner has taken `heir` in its place, for bytes that it read from the first.
  /// @returns false as `give_back`
  bool bequeath(HostSlotId id, HostSlotId heir) noexcept;

  /// The slot, or null for an id that is stale or from another pool. The reference stays valid.
  [[nodiscard]] HostSlot* find(HostSlotId id) noexcept {
    if (id == HostSlotId{}) {
      return nullptr;
    }
    HostSlot* const slot = slots_.find(table_id_of(id));
    return slot == nullptr || slot->is_given_back ? nullptr : slot;
  }

  /// As `find`. @throws ContractViolation, with the name of the calling function, if `id` names no
  /// slot
  [[nodiscard]] HostSlot& at(HostSlotId id, char const* call = __builtin_FUNCTION()) {
    HostSlot* const slot = find(id);
    expects(slot != nullptr, "a host slot id is stale or from another pool", {}, call);
    return *slot;
  }

  /// Calls `visit(HostPiece const&)` for each piece of the first `bytes` bytes of a slot.
  template <class Visit>
  void for_each_piece(HostSlot const& slot, std::size_t bytes, Visit visit) const {
    Tier const& tier = at(slot.tier);
    tier.map.for_each_extent(slot.chain, [&](Extent const& extent) {
      std::size_t const part = std::min(bytes, extent.bytes);
      if (part == 0) {
        return;
      }
      HostSlab const& slab = tier.slabs[extent.slab];
      std::byte* const memory = slab.memory == nullptr ? nullptr : slab.memory + extent.offset;
      visit(HostPiece{memory, slab.file_offset + extent.offset, part, extent.slab});
      bytes -= part;
    });
  }

  /// Forgets a slot that was given back, once its last job has finished.
  void forget_if_unused(HostSlot& slot) noexcept {
    HostSlot* unused = &slot;
    while (unused != nullptr && unused->is_given_back && !unused->has_unfinished_reads() &&
           unused->write_jobs == 0) {
      HostSlot* const heir = unused->heir;
      slots_.erase(unused->self);
      if (heir != nullptr) {
        --heir->unfinished_ancestors;
      }
      unused = heir;
    }
  }

  /// Notes that a slot lost bytes.
  ///
  /// @param version  that of the slot when the transfer was enqueued
  void note_failure(HostSlot& slot, std::uint32_t version, FileFailure const& failure) noexcept {
    HostSlot* loser = &slot;
    while (version == loser->version) {
      loser->failure = failure;
      if (loser->is_disowned) {
        disown(*loser);
      }
      if (!loser->is_given_back) {
        return;
      }
      if (loser->heir == nullptr) {
        note_orphan_failure(failure, *loser);
        return;
      }
      version = loser->heir_version;
      loser = loser->heir;
    }
    if (version < loser->used_versions && (failure.has_reached_owner() || loser->read_jobs != 0)) {
      orphan_failure_ = failure;
    }
  }
  /// Forgets the failures of all transfers of a slot that have been enqueued, since the owner has
  /// overwritten what it read. If work may have used that before, a failure is still a loss.
  void forget_failures(HostSlot& slot, bool was_used) noexcept {
    ++slot.version;
    if (was_used) {
      slot.used_versions = slot.version;
      if (slot.failure && !slot.is_failure_told) {
        note_orphan_failure(*slot.failure, slot);
      }
    }
    slot.failure.reset();
    slot.is_failure_told = false;
  }
  /// Notes that nobody is left to whom the failures of a slot, which is still needed, can be
  /// reported. Those that were not reported, and all later ones, are losses.
  void disown(HostSlot& slot) noexcept {
    slot.is_disowned = true;
    if (slot.failure && !slot.is_failure_told) {
      slot.is_failure_told = note_orphan_failure(*slot.failure, slot);
    }
  }
  /// Returns the last loss that was not reported to the owner of a slot.
  [[nodiscard]] std::optional<FileFailure> const& orphan_failure() const noexcept {
    return orphan_failure_;
  }
  /// Does the same, and forgets it.
  [[nodiscard]] std::optional<FileFailure> take_orphan_failure() noexcept {
    return std::exchange(orphan_failure_, std::nullopt);
  }

  /// Notes that `tier` has failed: it takes no new slots until `recover`.
  void fail(HostTier tier) noexcept { at(tier).is_failed = true; }
  void recover(HostTier tier) noexcept { at(tier).is_failed = false; }
  [[nodiscard]] bool has_failed(HostTier tier) const noexcept { return at(tier).is_failed; }
  [[nodiscard]] std::size_t granule(HostTier tier) const noexcept { return at(tier).map.granule(); }

  /// Notes that the system gave no memory for a slab, until it gives some.
  void refuse_growth(HostTier tier) noexcept { at(tier).is_refused = true; }
  [[nodiscard]] bool is_growth_refused(HostTier tier) const noexcept { return at(tier).is_refused; }

  /// Free bytes of all tiers that take new slots, and how much these may grow: not at all where the
  /// system refused the last slab.
  [[nodiscard]] std::size_t free_bytes() const noexcept {
    std::size_t total = 0;
    for (auto i = static_cast<std::size_t>(first_tier_); i < host_tier_count; ++i) {
      Tier const& tier = tiers_[i];
      if (!tier.is_failed) {
        std::size_t const growth = tier.is_refused ? 0 : tier.growth_bytes();
        std::size_t const rest = std::numeric_limits<std::size_t>::max() - total;
        total += std::min(rest, growth + tier.map.free_bytes());
      }
    }
    return total;
  }

  [[nodiscard]] HostTierStats stats(HostTier tier) const noexcept {
    Tier const& now = at(tier);
    return {.capacity_bytes = now.capacity_bytes,
            .reserved_bytes = now.map.reserved_bytes(),
            .used_bytes = now.used_bytes(),
            .peak_used_bytes = now.peak_used_bytes,
            .largest_free_bytes = now.map.largest_free_bytes(),
            .slot_count = now.slot_count,
            .numa_bound_bytes = now.numa_bound_bytes,
            .is_failed = now.is_failed};
  }

  /// Calls `visit(Fence const&)` for everything that may still be using memory of the pool.
  template <class Visit>
  void for_each_fence(Visit visit) const {
    for_each_slot([&](HostSlot const& slot) { visit(slot.last_uses()); });
    for (Tier const& tier : tiers_) {
      tier.map.for_each_free([&](Extent const&, Fence const& fence) { visit(fence); });
    }
  }

  /// Call `visit(slot)` for every slot, also for one with jobs left after `give_back`.
  template <class Visit>
  void for_each_slot(Visit visit) {
    slots_.for_each([&](BlockId, HostSlot& slot) { visit(slot); });
  }
  template <class Visit>
  void for_each_slot(Visit visit) const {
    slots_.for_each([&](BlockId, HostSlot const& slot) { visit(slot); });
  }

 private:
  /// Keeps a failure of a slot whose owner will not be told. A write that failed is no loss if
  /// nobody has read the slot since: the owner still had the bytes, or did not need them any more.
  ///
  /// @returns whether it is a loss
  bool note_orphan_failure(FileFailure const& failure, HostSlot const& slot) noexcept {
    bool const is_loss = failure.has_reached_owner() || slot.has_unfinished_reads();
    if (is_loss) {
      orphan_failure_ = failure;
    }
    return is_loss;
  }
  /// Frees the memory of a slot that has some.
  void free_memory(HostSlot& slot, Fence const& last_use) noexcept;

  struct Tier {
    SlabMap map{granule_bytes};
    std::vector<HostSlab> slabs;
    std::size_t capacity_bytes = 0;
    std::size_t peak_used_bytes = 0;
    std::size_t numa_bound_bytes = 0;
    std::size_t slot_count = 0;
    bool is_failed = false;
    bool is_refused = false;  // the system had no memory for the last slab

    [[nodiscard]] std::size_t used_bytes() const noexcept {
      return map.reserved_bytes() - map.free_bytes();
    }
    [[nodiscard]] std::size_t growth_bytes() const noexcept {
      return capacity_bytes - map.reserved_bytes();
    }
  };

  [[nodiscard]] Tier& at(HostTier tier) noexcept { return tiers_[static_cast<std::size_t>(tier)]; }
  [[nodiscard]] Tier const& at(HostTier tier) const noexcept {
    return tiers_[static_cast<std::size_t>(tier)];
  }

  // The table counts slots from 0, ids from 1, so that no id is 0 whatever the salt is.
  [[nodiscard]] HostSlotId id_of(BlockId slot) const noexcept {
    return static_cast<HostSlotId>(std::uint64_t{generation_of(slot) ^ salt_} << 32U |
                                   (index_of_block(slot) + 1));
  }
  [[nodiscard]] BlockId table_id_of(HostSlotId id) const noexcept {
    auto const plain = BlockId{static_cast<std::uint64_t>(id)};
    return make_block_id(index_of_block(plain) - 1, generation_of(plain) ^ salt_);
  }

  /// A part of every id, made from the address of the ledger, so that a pool recognises the ids of
  /// other pools.
  std::uint32_t salt_ =
      static_cast<std::uint32_t>(mix_bits(reinterpret_cast<std::uintptr_t>(this)) >> 32U);
  std::array<Tier, host_tier_count> tiers_{};
  HostTier first_tier_ = HostTier::pinned;
  std::optional<FileFailure> orphan_failure_;
  BlockTable<HostSlot> slots_;
};

using HostLedger = BasicHostLedger<>;

template <class Lazy>
inline std::optional<HostSlotId>
BasicHostLedger<Lazy>::try_take(std::size_t bytes, CodingId wanted, CodedRoom const& coded) {
  for (auto i = static_cast<std::size_t>(first_tier_); i < host_tier_count; ++i) {
    Tier& tier = tiers_[i];
    if (tier.is_failed) {
      continue;
    }
    std::optional<SlabMap::Chain> chain;
    if (std::size_t const room = coded.bytes_in(static_cast<HostTier>(i)); room != 0) {
      chain = tier.map.try_take(room);
    }
    bool const is_coded = chain.has_value();
    if (!is_coded) {
      chain = tier.map.try_take(std::max(bytes, std::size_t{1}));
    }
    if (!chain) {
      continue;
    }
    BlockId id{};
    try {
      id = slots_.emplace(HostSlot{});
    } catch (...) {
      tier.map.give_back(chain->id, chain->fence);
      throw;
    }
    HostSlot& slot = *slots_.find(id);
    slot.self = id;
    slot.tier = static_cast<HostTier>(i);
    slot.chain = chain->id;
    slot.bytes = chain->bytes;
    slot.wanted = wanted;
    slot.coding = is_coded ? wanted : CodingId{};
    slot.takes_bytes = is_coded ? bytes : chain->bytes;
    slot.written = chain->fence;
    ++tier.slot_count;
    tier.peak_used_bytes = std::max(tier.peak_used_bytes, tier.used_bytes());
    return id_of(id);
  }
  return std::nullopt;
}

template <class Lazy>
inline bool BasicHostLedger<Lazy>::give_back(HostSlotId id, Fence const& last_use) noexcept {
  if (!empty(id, last_use)) {
    return false;
  }
  HostSlot* const slot = find(id);
  slot->is_given_back = true;
  if (slot->failure && !slot->is_failure_told) {
    note_orphan_failure(*slot->failure, *slot);
  }
  forget_if_unused(*slot);
  return true;
}

template <class Lazy>
inline bool BasicHostLedger<Lazy>::empty(HostSlotId id, Fence const& last_use) noexcept {
  HostSlot* const slot = find(id);
  if (slot == nullptr || slot->enqueueing_reads > 0 || slot->is_enqueueing_write) {
    return false;
  }
  if (!slot->is_emptied) {
    free_memory(*slot, last_use);
    slot->is_emptied = true;
  }
  return true;
}

template <class Lazy>
inline bool BasicHostLedger<Lazy>::bequeath(HostSlotId id, HostSlotId heir_id) noexcept {
  HostSlot* const slot = find(id);
  HostSlot* const heir = find(heir_id);
  if (slot == nullptr || heir == nullptr) {
    return false;
  }
  heir->has_ancestors = true;
  if (slot->has_unfinished_reads()) {
    ++heir->unfinished_ancestors;
    slot->heir = heir;
    slot->heir_version = heir->version;
  }
  if (slot->failure && !slot->is_failure_told) {
    heir->failure = slot->failure;
    slot->is_failure_told = true;
  }
  if (slot->is_disowned) {
    disown(*heir);
  }
  return give_back(id, {});
}

template <class Lazy>
inline void BasicHostLedger<Lazy>::free_memory(HostSlot& slot, Fence const& last_use) noexcept {
  // The slot's own fences must be included: if its owner has never used the bytes, copies of the
  // previous owner may still be in flight, and `last_use` does not cover them.
  Fence fence = slot.last_uses();
  fence.add(last_use);
  at(slot.tier).map.give_back(slot.chain, fence);
  --at(slot.tier).slot_count;
  slot.chain = {};
  slot.bytes = slot.takes_bytes = slot.written_bytes = 0;  // enqueued reads need `stored_bytes`
}

SPILLWAY_COMPILED_PART(class BasicHostLedger<>);

}  // namespace spillway::detail
