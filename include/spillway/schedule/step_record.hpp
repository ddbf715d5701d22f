// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>
#include <spillway/schedule/use.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace spillway::detail {

/// The record of one step of a program: which blocks it used in which order, and from when to when
/// each of them could leave the device.
///
/// `AccessSchedule` writes it; policies that plan ahead read it. A block of the record is a role.
/// If the program allocates anew in each step, another real block plays the role in each step.
///
/// Units   entries and moments count acquisitions from the start of the step; moment `t` is when
///         the block of entry `t` is made resident.
struct StepRecord {
  static constexpr std::uint32_t none = unknown_entry;
  static constexpr std::uint32_t entry_mask = (std::uint32_t{1} << 30U) - 1;
  static constexpr std::size_t max_entries = entry_mask;

  /// One acquisition. 12 bytes, since a step may have millions of them.
  struct Entry {
    std::uint32_t block;  ///< index into `blocks`
    /// The next entry of the same block: an index into `entries`; for its last entry in the step
    /// the first one of the step after, plus the length of the step; `never_entry` if there is
    /// none.
    std::uint32_t next;
    /// The moment from which on the block could leave; 0 if it could not leave before `next`.
    std::uint32_t released : 30;
    std::uint32_t access : 2;  ///< an `Access`
  };

  struct Block {
    BlockId id{};  ///< the block that plays this role in the current step; `BlockId{}`: none (yet)
    std::uint64_t bytes = 0;
    std::uint32_t first = none;  ///< its first entry
    std::uint32_t last = none;   ///< its last entry, if it outlived the step
    std::uint32_t freed = none;  ///< the moment it was freed; `none`: it outlived the step
    /// The block whose role this one plays in the next step; `none` if it keeps its own. A block
    /// that is born in one step and freed in the next (a gradient, a loss) has one.
    std::uint32_t successor_of = none;
    std::uint32_t successor = none;  ///< the block for which this one is `successor_of`
    std::uint32_t born_as = none;    ///< its rank among the births of the step before
    std::uint32_t recorded = none;   ///< the same real block in the record of the current step
    std::uint64_t spared_bytes = 0;  ///< how many of `bytes` the price of its return does not count
    /// The entry after the last one that the current step has used of this role, as `Entry::next`
    /// names it. It outlives the block that has the role.
    std::uint32_t unused = never_entry;
    std::uint32_t coming = never_entry;  ///< the first such entry from the follower's cursor on
  };

  std::vector<Entry> entries;
  std::vector<Block> blocks;    ///< those alive at the start of the step, then those born in it
  std::uint32_t born_from = 0;  ///< index of the first block that was born in the step
  std::uint64_t reuses = 0;     ///< uses of a block that was used before in the step
  std::uint64_t reuse_sum = 0;  ///< entries between each of them and the use before, summed

  [[nodiscard]] std::uint32_t length() const noexcept {
    return static_cast<std::uint32_t>(entries.size());
  }
  [[nodiscard]] std::uint64_t mean_reuse() const noexcept {
    return reuses == 0 ? 0 : reuse_sum / reuses;
  }
  [[nodiscard]] bool is_birth(std::uint32_t block) const noexcept { return block >= born_from; }

  /// The access of the use at an entry. Entries from `length()` on belong to the step after.
  [[nodiscard]] Access access_at(std::uint32_t entry) const noexcept {
    return static_cast<Access>(entries[entry < length() ? entry : entry - length()].access);
  }

  /// The role that a block which outlived this step plays in the step after it.
  [[nodiscard]] std::uint32_t role_after(std::uint32_t block) const noexcept {
    std::uint32_t const other = blocks[block].successor_of;
    return other == none ? block : other;
  }

  /// The block that plays role `block` in the step after the current one, if it exists already.
  [[nodiscard]] BlockId block_after(std::uint32_t block) const noexcept {
    Block const& role = blocks[block];
    if (role.freed == none && role.successor_of == none) {
      return role.id;
    }
    return role.successor == none ? BlockId{} : blocks[role.successor].id;
  }

  void clear() noexcept {
    entries.clear();
    blocks.clear();
    born_from = 0;
    reuses = 0;
    reuse_sum = 0;
  }
};

static_assert(sizeof(StepRecord::Entry) == 12);

}  // namespace spillway::detail
