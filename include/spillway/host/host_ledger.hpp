// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/block_table.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/host/host_slot.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host/slab_map.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace spillway::detail {

/// The books of a host pool: which slot lies where in which tier, and what must come before its use.
///
/// Threads  thread-compatible: the pool locks.
class HostLedger {
 public:
  /// `salt` goes into every id, so that pools do not take each other's ids for their own.
  explicit HostLedger(std::uint32_t salt) : salt_{salt} {}

  /// Gives a tier its capacity. `granule` is a power of two; the capacity is rounded down to it.
  void open(HostTier tier, std::size_t capacity_bytes, std::size_t granule);

  /// The slab by which `tier` should grow to hold `bytes`; 0 if it cannot. Not less than `least_bytes`
  /// unless the capacity ends before.
  [[nodiscard]] std::size_t
  growth_for(HostTier tier, std::size_t bytes, std::size_t least_bytes) const noexcept;

  /// Whether `try_take` would find `bytes` in `tier`, if that tier had one more slab of `extra_bytes`.
  [[nodiscard]] bool
  can_take(HostTier tier, std::size_t bytes, std::size_t extra_bytes = 0) const noexcept;

  /// @throws std::bad_alloc, with nothing changed
  void add_slab(HostTier tier, HostSlab slab, std::size_t bytes, std::size_t numa_bound_bytes);

  /// A slot in the first tier that has room, scattered if need be.
  ///
  /// @throws std::bad_alloc, with nothing changed
  [[nodiscard]] std::optional<HostSlotId> try_take(std::size_t bytes);

  /// Frees a slot that no call is using. @returns false if `id` names none
  bool give_back(HostSlotId id, Fence const& last_use) noexcept;

  /// The slot, or null for an id that is stale or not ours.
  [[nodiscard]] HostSlot* find(HostSlotId id) noexcept;

  /// Where the first `bytes` bytes of a slot are.
  [[nodiscard]] HostRoute route(HostSlot& slot, std::size_t bytes) const noexcept;
  /// Calls `visit(HostPiece const&)` for each piece of them.
  template <class Visit>
  void for_each_piece(HostSlot const& slot, std::size_t bytes, Visit visit) const;

  /// Forgets a slot that was given back, once its last job has finished.
  void forget_if_unused(HostSlot& slot) noexcept {
    if (slot.is_given_back && slot.read_jobs == 0 && slot.write_jobs == 0) {
      slots_.erase(slot.self);
    }
  }

  /// Remembers that a slot lost bytes, or that one did which was given back already.
  void note_failure(HostSlot& slot, FileFailure const& failure) noexcept {
    slot.failure = failure;
    if (slot.is_given_back) {
      orphan_failure_ = failure;
    }
  }
  /// The last loss that no owner of a slot was told of; told with this.
  [[nodiscard]] std::optional<FileFailure> take_orphan_failure() noexcept {
    return std::exchange(orphan_failure_, std::nullopt);
  }

  /// Takes no new slots in `tier` from now on.
  void fail(HostTier tier) noexcept { at(tier).is_failed = true; }
  [[nodiscard]] bool has_failed(HostTier tier) const noexcept { return at(tier).is_failed; }
  [[nodiscard]] std::size_t granule(HostTier tier) const noexcept { return at(tier).map.granule(); }

  /// Free bytes and growth of all tiers that take new slots.
  [[nodiscard]] std::size_t free_bytes() const noexcept;
  [[nodiscard]] HostTierStats stats(HostTier tier) const noexcept;

  /// Calls `visit(Fence const&)` for everything that may still be using memory of the pool.
  template <class Visit>
  void for_each_fence(Visit visit) const {
    slots_.for_each([&](BlockId, HostSlot const& slot) { visit(slot.last_uses()); });
    for (Tier const& tier : tiers_) {
      tier.map.for_each_free([&](Extent const&, Fence const& fence) { visit(fence); });
    }
  }

  /// Calls `visit(HostSlot const&)` for every slot, those with jobs left after `give_back` included.
  template <class Visit>
  void for_each_slot(Visit visit) const {
    slots_.for_each([&](BlockId, HostSlot const& slot) { visit(slot); });
  }

 private:
  struct Tier {
    SlabMap map{granule_bytes};
    std::vector<HostSlab> slabs;
    std::size_t capacity_bytes = 0;
    std::size_t peak_used_bytes = 0;
    std::size_t numa_bound_bytes = 0;
    std::size_t slots = 0;
    bool is_failed = false;
  };

  [[nodiscard]] Tier& at(HostTier tier) noexcept { return tiers_[static_cast<std::size_t>(tier)]; }
  [[nodiscard]] Tier const& at(HostTier tier) const noexcept {
    return tiers_[static_cast<std::size_t>(tier)];
  }

  // The table counts slots from 0; ids count from 1, so that none is 0 whatever the salt.
  [[nodiscard]] HostSlotId id_of(BlockId slot) const noexcept {
    return static_cast<HostSlotId>(std::uint64_t{generation_of(slot) ^ salt_} << 32U |
                                   (slot_of(slot) + 1));
  }
  [[nodiscard]] BlockId table_id_of(HostSlotId id) const noexcept {
    auto const plain = BlockId{static_cast<std::uint64_t>(id)};
    return make_block_id(slot_of(plain) - 1, generation_of(plain) ^ salt_);
  }

  std::uint32_t salt_;
  std::array<Tier, host_tier_count> tiers_{};
  std::optional<FileFailure> orphan_failure_;
  BlockTable<HostSlot> slots_;
};

inline void HostLedger::open(HostTier tier, std::size_t capacity_bytes, std::size_t granule) {
  at(tier).map = SlabMap{granule};
  at(tier).capacity_bytes = capacity_bytes & ~(granule - 1);
}

inline std::size_t
HostLedger::growth_for(HostTier tier, std::size_t bytes, std::size_t least_bytes) const noexcept {
  Tier const& books = at(tier);
  std::size_t const most = books.capacity_bytes - books.map.reserved_bytes();
  std::size_t const wanted = std::min(std::max(bytes, least_bytes), most);
  std::size_t const slab = std::min(round_up(wanted, books.map.granule()), most);
  return slab > 0 && can_take(tier, bytes, slab) ? slab : 0;
}

inline bool
HostLedger::can_take(HostTier tier, std::size_t bytes, std::size_t extra_bytes) const noexcept {
  return !at(tier).is_failed && at(tier).map.can_take(std::max(bytes, std::size_t{1}), extra_bytes);
}

inline void HostLedger::add_slab(HostTier tier,
                                 HostSlab slab,
                                 std::size_t bytes,
                                 std::size_t numa_bound_bytes) {
  Tier& books = at(tier);
  SPILLWAY_ASSERT(bytes <= books.capacity_bytes - books.map.reserved_bytes());
  books.slabs.reserve(books.slabs.size() + 1);
  books.map.add_slab(bytes);
  books.slabs.push_back(slab);
  books.numa_bound_bytes += numa_bound_bytes;
}

inline std::optional<HostSlotId> HostLedger::try_take(std::size_t bytes) {
  for (std::size_t i = 0; i < host_tier_count; ++i) {
    Tier& books = tiers_[i];
    if (books.is_failed) {
      continue;
    }
    auto const run = books.map.try_take(std::max(bytes, std::size_t{1}));
    if (!run) {
      continue;
    }
    BlockId id{};
    try {
      id = slots_.emplace(HostSlot{});
    } catch (...) {
      books.map.give_back(run->id, run->fence);
      throw;
    }
    HostSlot& slot = *slots_.find(id);
    slot.self = id;
    slot.tier = static_cast<HostTier>(i);
    slot.run = run->id;
    slot.bytes = run->bytes;
    slot.written = run->fence;
    ++books.slots;
    books.peak_used_bytes =
        std::max(books.peak_used_bytes, books.map.reserved_bytes() - books.map.free_bytes());
    return id_of(id);
  }
  return std::nullopt;
}

inline bool HostLedger::give_back(HostSlotId id, Fence const& last_use) noexcept {
  HostSlot* const slot = find(id);
  if (slot == nullptr || slot->reads_in_call > 0 || slot->is_write_in_call) {
    return false;
  }
  // The slot's own fences too: an owner that never touched the bytes does not know of the owner
  // before, whose copies may still be running.
  Fence fence = slot->last_uses();
  fence.add(last_use);
  at(slot->tier).map.give_back(slot->run, fence);
  --at(slot->tier).slots;
  slot->is_given_back = true;
  if (slot->failure && !slot->is_failure_told) {
    orphan_failure_ = slot->failure;
  }
  forget_if_unused(*slot);
  return true;
}

inline HostSlot* HostLedger::find(HostSlotId id) noexcept {
  if (id == HostSlotId{}) {
    return nullptr;
  }
  HostSlot* const slot = slots_.find(table_id_of(id));
  return slot == nullptr || slot->is_given_back ? nullptr : slot;
}

inline HostRoute HostLedger::route(HostSlot& slot, std::size_t bytes) const noexcept {
  HostRoute route;
  route.slot = &slot;
  for_each_piece(
      slot, bytes, [&](HostPiece const& piece) { route.pieces[route.piece_count++] = piece; });
  return route;
}

template <class Visit>
void HostLedger::for_each_piece(HostSlot const& slot, std::size_t bytes, Visit visit) const {
  Tier const& books = at(slot.tier);
  books.map.for_each_extent(slot.run, [&](Extent const& extent) {
    std::size_t const part = std::min(bytes, extent.bytes);
    if (part == 0) {
      return;
    }
    HostSlab const& slab = books.slabs[extent.slab];
    std::byte* const memory = slab.memory == nullptr ? nullptr : slab.memory + extent.offset;
    visit(HostPiece{memory, slab.file_offset + extent.offset, part, extent.slab});
    bytes -= part;
  });
}

inline std::size_t HostLedger::free_bytes() const noexcept {
  std::size_t total = 0;
  for (Tier const& books : tiers_) {
    if (!books.is_failed) {
      total += books.capacity_bytes - books.map.reserved_bytes() + books.map.free_bytes();
    }
  }
  return total;
}

inline HostTierStats HostLedger::stats(HostTier tier) const noexcept {
  Tier const& books = at(tier);
  return {.capacity_bytes = books.capacity_bytes,
          .reserved_bytes = books.map.reserved_bytes(),
          .used_bytes = books.map.reserved_bytes() - books.map.free_bytes(),
          .peak_used_bytes = books.peak_used_bytes,
          .largest_free_bytes = books.map.largest_free_bytes(),
          .slots = books.slots,
          .numa_bound_bytes = books.numa_bound_bytes,
          .is_failed = books.is_failed};
}

}  // namespace spillway::detail
