// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/codec.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/kernel.hpp>
#include <spillway/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

// The format of a slot of pinned memory that the kernels of a `StreamCodec` write and read, and
// functions that these kernels have in common.
//
// Slot      It begins with a `SlotHeader`, followed by a `SlotEntry` for each part of the block,
//           which says where the encoded part is. The parts follow, each at a multiple of 16 bytes,
//           since the link is fast only if 16 bytes are read or written at a time. A `Format` says
//           what the parts are: a block of `bytes` bytes has `Format::parts_of(bytes)` parts, and
//           part `part` has `Format::raw_bytes(part, bytes)` bytes before it is encoded.
//
// core/kernel.hpp says what a kernel and a team are.

namespace spillway::detail {

/// The unit in which a slot is read and written.
struct alignas(16) SlotUnit {
  std::uint32_t words[4];
};

/// The front of a slot.
struct alignas(16) SlotHeader {
  static constexpr std::uint64_t known_mark = 0x53'70'69'6C'6C'77'61'79;

  std::uint64_t mark;
  std::uint64_t raw_bytes;
  std::uint64_t stored_bytes;  // of the whole slot
  std::uint64_t is_damaged;    // set by a kernel that could not decode the slot
};

/// Where an encoded part is in the slot.
struct alignas(16) SlotEntry {
  std::uint64_t at;
  std::uint32_t stored_bytes;
  std::uint32_t checksum;  // of the encoded part, if the decoder needs valid input
};

/// Returns the offset of the first part, if there are `parts` of them.
[[nodiscard]] SPILLWAY_HOST_DEVICE constexpr std::uint64_t first_part_at(std::uint64_t parts) {
  return sizeof(SlotHeader) + parts * sizeof(SlotEntry);
}
[[nodiscard]] SPILLWAY_HOST_DEVICE constexpr std::uint64_t in_units(std::uint64_t bytes) {
  return (bytes + sizeof(SlotUnit) - 1) / sizeof(SlotUnit) * sizeof(SlotUnit);
}

/// `StreamCodec::stored_bytes` for a slot that such kernels have written.
[[nodiscard]] inline std::size_t stored_in_slot(SlotMemory slot) noexcept {
  if (slot.empty() || slot.front().size() < sizeof(SlotHeader)) {
    return 0;
  }
  auto const& header = *reinterpret_cast<SlotHeader const*>(slot.front().data());
  std::size_t bytes = 0;
  for (std::span<std::byte> const piece : slot) {
    bytes += piece.size();
  }
  bool const is_sound = header.mark == SlotHeader::known_mark && header.is_damaged == 0 &&
                        header.stored_bytes <= bytes;
  return is_sound ? static_cast<std::size_t>(header.stored_bytes) : 0;
}

/// The pieces of a slot, by value, as an argument of a kernel.
class KernelSlot {
 public:
  /// Appends a piece of the slot; `memory` is its address on the device.
  void add(std::byte* memory, std::size_t bytes) noexcept {
    end_ += bytes;
    pieces_[count_++] = {memory, end_};
  }
  [[nodiscard]] SPILLWAY_HOST_DEVICE std::uint64_t bytes() const { return end_; }
  /// Returns the address of `offset`. At least one `SlotUnit` is contiguous there, since pieces
  /// consist of whole units.
  [[nodiscard]] SPILLWAY_HOST_DEVICE std::byte* at(std::uint64_t offset) const {
    unsigned piece = 0;
    while (offset >= pieces_[piece].end) {
      ++piece;
    }
    std::uint64_t const begin = piece == 0 ? 0 : pieces_[piece - 1].end;
    return pieces_[piece].memory + (offset - begin);
  }
  [[nodiscard]] SPILLWAY_HOST_DEVICE SlotUnit& unit(std::uint64_t offset) const {
    return *reinterpret_cast<SlotUnit*>(at(offset));
  }
  [[nodiscard]] SPILLWAY_HOST_DEVICE SlotEntry& entry(std::uint64_t part) const {
    return *reinterpret_cast<SlotEntry*>(at(first_part_at(part)));
  }
  [[nodiscard]] SPILLWAY_HOST_DEVICE SlotHeader& header() const {
    return *reinterpret_cast<SlotHeader*>(at(0));
  }

 private:
  struct Piece {
    std::byte* memory;
    std::uint64_t end;  // in the slot
  };
  Piece pieces_[most_slot_pieces] = {};
  std::uint64_t end_ = 0;
  unsigned count_ = 0;
};
static_assert(granule_bytes % sizeof(SlotUnit) == 0);
static_assert(granule_bytes >= sizeof(SlotHeader));

/// Prefix sums of a team, over as many parts at a time as it has threads.
struct TeamSums {
  std::uint64_t values[team_size];
};

/// Writes the entries of `parts` parts from `first` on, which are placed one after the other from
/// offset `at` on. `stored_bytes(i)` is the length of the i-th of them. @returns the end of the
/// last
template <class Team, class StoredBytes>
SPILLWAY_KERNEL std::uint64_t place_parts(Team const& team,
                                          TeamSums& sums,
                                          KernelSlot const& slot,
                                          std::uint64_t at,
                                          std::uint64_t first,
                                          std::uint64_t parts,
                                          StoredBytes stored_bytes) {
  for (std::uint64_t done = 0; done < parts; done += Team::size) {
    team.each([&](unsigned thread) {
      bool const is_there = done + thread < parts;
      sums.values[thread] = is_there ? in_units(stored_bytes(done + thread)) : 0;
    });
    std::uint64_t const all = team.exclusive_scan(sums.values);
    team.each([&](unsigned thread) {
      if (done + thread < parts) {
        slot.entry(first + done + thread) = {
            at + sums.values[thread], static_cast<std::uint32_t>(stored_bytes(done + thread)), 0};
      }
    });
    at += all;
  }
  return at;
}

/// The result of looking up a part: where it is, and how long. `is_sound` is false if the entry
/// does not describe a part within the slot.
struct FoundPart {
  std::uint64_t at = 0;
  unsigned stored_bytes = 0;
  unsigned raw_bytes = 0;
  std::uint32_t checksum = 0;
  bool is_sound = false;
};

/// Looks up a part of a block of which the first `bytes` bytes are to be read. Checks all that it
/// reads from the slot.
template <class Format>
[[nodiscard]] SPILLWAY_KERNEL FoundPart find_part(KernelSlot const& slot,
                                                  std::uint64_t bytes,
                                                  std::uint64_t part) {
  if (slot.bytes() < sizeof(SlotHeader)) {
    return {};
  }
  SlotHeader const header = slot.header();
  // The third condition keeps the sum in the last one from overflowing.
  bool const is_known =
      header.mark == SlotHeader::known_mark && header.raw_bytes >= bytes &&
      header.raw_bytes / Format::most_raw_bytes <= slot.bytes() / sizeof(SlotEntry) &&
      header.stored_bytes <= slot.bytes() &&
      first_part_at(Format::parts_of(header.raw_bytes)) <= header.stored_bytes;
  if (!is_known) {
    return {};
  }
  SlotEntry const entry = slot.entry(part);
  unsigned const raw = Format::raw_bytes(part, header.raw_bytes);
  bool const is_inside = entry.at % sizeof(SlotUnit) == 0 &&
                         entry.at >= first_part_at(Format::parts_of(header.raw_bytes)) &&
                         entry.at <= header.stored_bytes && entry.stored_bytes <= raw &&
                         in_units(entry.stored_bytes) <= header.stored_bytes - entry.at;
  return {entry.at, entry.stored_bytes, raw, entry.checksum, is_inside};
}

/// Copies bytes to or from the slot, in whole units. `memory` is aligned to them.
template <class Team>
SPILLWAY_KERNEL void write_to_slot(Team const& team,
                                   KernelSlot const& slot,
                                   std::uint64_t at,
                                   void const* memory,
                                   std::uint64_t bytes) {
  team.each([&](unsigned thread) {
    for (std::uint64_t i = thread; i < in_units(bytes) / sizeof(SlotUnit); i += Team::size) {
      slot.unit(at + i * sizeof(SlotUnit)) = static_cast<SlotUnit const*>(memory)[i];
    }
  });
}
template <class Team>
SPILLWAY_KERNEL void read_from_slot(
    Team const& team, KernelSlot const& slot, std::uint64_t at, void* memory, std::uint64_t bytes) {
  team.each([&](unsigned thread) {
    for (std::uint64_t i = thread; i < in_units(bytes) / sizeof(SlotUnit); i += Team::size) {
      static_cast<SlotUnit*>(memory)[i] = slot.unit(at + i * sizeof(SlotUnit));
    }
  });
}

/// Returns a checksum of bytes in whole units, which begins with `seed`. A single wrong word is
/// always detected; other damage is missed with a probability of 2^-32. `memory` is aligned to
/// units.
///
/// Source: the sum of the words, each with its position and mixed by the last step of MurmurHash3
/// (A. Appleby, public domain). The order in which threads add up does not matter.
template <class Team>
[[nodiscard]] SPILLWAY_KERNEL std::uint32_t checksum_of(
    Team const& team, TeamSums& sums, void const* memory, std::uint64_t bytes, std::uint32_t seed) {
  team.each([&](unsigned thread) {
    std::uint32_t sum = 0;
    for (std::uint64_t i = thread; i < in_units(bytes) / sizeof(SlotUnit); i += Team::size) {
      SlotUnit const unit = static_cast<SlotUnit const*>(memory)[i];
      for (unsigned k = 0; k < 4; ++k) {
        std::uint32_t const position = static_cast<std::uint32_t>(4 * i) + k;
        std::uint32_t mixed = unit.words[k] + 0x9E3779B9U * (position + 1);
        mixed = (mixed ^ mixed >> 16U) * 0x85EBCA6BU;
        mixed = (mixed ^ mixed >> 13U) * 0xC2B2AE35U;
        sum += mixed ^ mixed >> 16U;
      }
    }
    sums.values[thread] = sum;
  });
  return seed + static_cast<std::uint32_t>(team.exclusive_scan(sums.values));
}

/// Marks the slot as damaged, if it has room for a header.
template <class Team>
SPILLWAY_KERNEL void note_damage(Team const& team, KernelSlot const& slot) {
  once(team, [&] {
    if (slot.bytes() >= sizeof(SlotHeader)) {
      slot.header().is_damaged = 1;
    }
  });
}

}  // namespace spillway::detail
