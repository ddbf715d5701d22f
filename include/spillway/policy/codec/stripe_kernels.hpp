// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>
#include <spillway/core/kernel.hpp>
#include <spillway/policy/codec/as_bfloat16.hpp>
#include <spillway/policy/codec/kernel_slot.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

// Encodes blocks on a device into slots of pinned memory, and decodes them, by codecs that need no
// memory except the shared memory of a team. kernel_slot.hpp describes slots, core/kernel.hpp
// kernels and teams.
//
// Stripes   The parts of a block are stripes of 16 KiB. A team encodes a stripe in its shared
//           memory and copies it to the slot.
// Kernels   Encoding takes three kernels, since the place of a stripe depends on the lengths of
//           those before it: `MeasureStripes`, `PlaceStripes`, `WriteStripes`. Decoding takes one,
//           `ReadStripes`.

namespace spillway::detail {

inline constexpr unsigned stripe_words = 4096;  // of 32 bits
inline constexpr unsigned stripe_bytes = 4 * stripe_words;
inline constexpr unsigned most_map_words = stripe_words / 32;
static_assert(most_map_words == team_size);

struct StripeFormat {
  static constexpr unsigned most_raw_bytes = stripe_bytes;

  [[nodiscard]] SPILLWAY_HOST_DEVICE static constexpr std::uint64_t parts_of(std::uint64_t bytes) {
    return (bytes + stripe_bytes - 1) / stripe_bytes;
  }
  [[nodiscard]] SPILLWAY_HOST_DEVICE static constexpr unsigned raw_bytes(std::uint64_t stripe,
                                                                         std::uint64_t bytes) {
    std::uint64_t const left = bytes - stripe * stripe_bytes;
    return left < stripe_bytes ? static_cast<unsigned>(left) : stripe_bytes;
  }
};

/// Returns the most room that a block needs in a slot, if no encoded stripe is longer than the
/// stripe.
[[nodiscard]] constexpr std::size_t most_striped_bytes(std::size_t bytes) noexcept {
  return static_cast<std::size_t>(first_part_at(StripeFormat::parts_of(bytes)) + in_units(bytes));
}

/// Memory that the threads of a team share.
struct alignas(16) StripeMemory {
  std::uint32_t raw[stripe_words];
  std::uint32_t packed[most_map_words + stripe_words];
  std::uint32_t counts[most_map_words];
};

/// Encodes the stripes of `ZeroBitmap`: a bitmap says which words are not 0, and those follow it.
struct ZeroBitmapStripe {
  static constexpr bool is_lossless = true;

  /// Packs the raw words. @returns the bytes that they become
  template <class Team>
  SPILLWAY_KERNEL static unsigned pack(Team const& team, StripeMemory& memory, unsigned bytes) {
    unsigned const words = (bytes + 3) / 4;
    unsigned const map_words = (words + 31) / 32;
    team.each([&](unsigned thread) {
      std::uint32_t map = 0;
      std::uint32_t count = 0;
      for (unsigned i = 0; i < 32; ++i) {
        // Threads begin at different words, or they would all want the same bank of the memory.
        unsigned const bit = (i + thread) % 32;
        unsigned const word = 32 * thread + bit;
        bool const is_there = word < words && memory.raw[word] != 0;
        map |= std::uint32_t{is_there} << bit;
        count += is_there ? 1 : 0;
      }
      if (thread < map_words) {
        memory.packed[thread] = map;
      }
      memory.counts[thread] = count;
    });
    std::uint32_t const count = team.exclusive_scan(memory.counts);
    team.each([&](unsigned thread) {
      std::uint32_t* to = memory.packed + map_words + memory.counts[thread];
      for (unsigned word = 32 * thread; word < 32 * thread + 32 && word < words; ++word) {
        if (memory.raw[word] != 0) {
          *to++ = memory.raw[word];
        }
      }
    });
    return 4 * (map_words + count);
  }

  /// Unpacks `stored` bytes into raw words. @returns false if they do not encode `bytes` bytes
  template <class Team>
  SPILLWAY_KERNEL static bool
  unpack(Team const& team, StripeMemory& memory, unsigned stored, unsigned bytes) {
    unsigned const words = (bytes + 3) / 4;
    unsigned const map_words = (words + 31) / 32;
    if (stored < 4 * map_words) {
      return false;
    }
    team.each([&](unsigned thread) {
      std::uint32_t map = thread < map_words ? memory.packed[thread] : 0;
      std::uint32_t count = 0;
      for (; map != 0; map &= map - 1) {
        ++count;
      }
      memory.counts[thread] = count;
    });
    std::uint32_t const count = team.exclusive_scan(memory.counts);
    bool const ends_early = words % 32 == 0 || memory.packed[map_words - 1] >> words % 32 == 0;
    if (!ends_early || stored != 4 * (map_words + count)) {
      return false;
    }
    team.each([&](unsigned thread) {
      std::uint32_t const* from = memory.packed + map_words + memory.counts[thread];
      for (unsigned bit = 0; bit < 32 && 32 * thread + bit < words; ++bit) {
        bool const is_there = (memory.packed[thread] >> bit & 1U) != 0;
        memory.raw[32 * thread + bit] = is_there ? *from++ : 0;
      }
    });
    return true;
  }
};

/// Encodes the stripes of `AsBfloat16`: two words become one. Bytes behind the last whole float32
/// are kept.
struct Bfloat16Stripe {
  static constexpr bool is_lossless = false;

  template <class Team>
  SPILLWAY_KERNEL static unsigned pack(Team const& team, StripeMemory& memory, unsigned bytes) {
    unsigned const words = bytes / 4;
    team.each([&](unsigned thread) {
      for (unsigned word = 2 * thread; word < words; word += 2 * Team::size) {
        std::uint32_t const low = bfloat16_bits(memory.raw[word]);
        // If the last float32 has no partner, the bytes that are kept take its place.
        std::uint32_t const high =
            word + 1 < words ? bfloat16_bits(memory.raw[word + 1]) : kept(memory, bytes);
        memory.packed[word / 2] = low | high << 16U;
      }
      if (thread == 0) {
        std::uint32_t const tail = kept(memory, bytes);
        memory.packed[(words + 1) / 2] = words % 2 == 0 ? tail : tail >> 16U;
      }
    });
    return stored_for(bytes);
  }

  template <class Team>
  SPILLWAY_KERNEL static bool
  unpack(Team const& team, StripeMemory& memory, unsigned stored, unsigned bytes) {
    if (stored != stored_for(bytes)) {
      return false;
    }
    unsigned const words = bytes / 4;
    team.each([&](unsigned thread) {
      for (unsigned i = thread; i < words; i += Team::size) {
        memory.raw[i] = memory.packed[i / 2] >> (i % 2 == 0 ? 0 : 16U) << 16U;
      }
      if (thread == 0 && bytes % 4 != 0) {
        std::uint32_t const* const end = memory.packed + words / 2;
        memory.raw[words] = words % 2 == 0 ? end[0] : end[0] >> 16U | end[1] << 16U;
      }
    });
    return true;
  }

 private:
  [[nodiscard]] SPILLWAY_KERNEL static unsigned stored_for(unsigned bytes) {
    return bytes / 4 * 2 + bytes % 4;
  }
  /// The bytes behind the last whole word.
  [[nodiscard]] SPILLWAY_KERNEL static std::uint32_t kept(StripeMemory const& memory,
                                                          unsigned bytes) {
    return bytes % 4 == 0 ? 0 : memory.raw[bytes / 4];
  }
};

/// The work of a team on one stripe.
template <class Stripe>
struct StripeWork {
  struct Packed {
    std::uint32_t const* words;
    unsigned bytes;
  };
  /// Encodes a stripe of a block in the team's memory.
  template <class Team>
  SPILLWAY_KERNEL static Packed pack(Team const& team,
                                     StripeMemory& memory,
                                     std::byte const* from,
                                     std::uint64_t bytes,
                                     std::uint64_t stripe) {
    unsigned const raw = StripeFormat::raw_bytes(stripe, bytes);
    load(team, memory, from + stripe * stripe_bytes, raw);
    unsigned const packed = Stripe::pack(team, memory, raw);
    if (is_kept(packed, raw)) {
      return {memory.raw, raw};
    }
    return {memory.packed, packed};
  }
  /// Whether a stripe is kept as it is, since packing it makes it no shorter.
  [[nodiscard]] SPILLWAY_KERNEL static bool is_kept(unsigned packed, unsigned raw) {
    return Stripe::is_lossless && packed >= raw;
  }
  [[nodiscard]] SPILLWAY_KERNEL static bool is_aligned(std::byte const* p) {
    return reinterpret_cast<std::uintptr_t>(p) % 4 == 0;
  }

  /// Bytes after the last whole word become the low bytes of one more word.
  template <class Team>
  SPILLWAY_KERNEL static void
  load(Team const& team, StripeMemory& memory, std::byte const* from, unsigned bytes) {
    team.each([&](unsigned thread) {
      for (unsigned i = thread; 4 * i < bytes; i += Team::size) {
        if (is_aligned(from) && 4 * i + 4 <= bytes) {
          memory.raw[i] = reinterpret_cast<std::uint32_t const*>(from)[i];
          continue;
        }
        std::uint32_t word = 0;
        for (unsigned at = 4 * i; at < 4 * i + 4 && at < bytes; ++at) {
          word |= static_cast<std::uint32_t>(from[at]) << 8 * (at % 4);
        }
        memory.raw[i] = word;
      }
    });
  }
  template <class Team>
  SPILLWAY_KERNEL static void
  store(Team const& team, StripeMemory const& memory, std::byte* to, unsigned bytes) {
    team.each([&](unsigned thread) {
      for (unsigned i = thread; 4 * i < bytes; i += Team::size) {
        if (is_aligned(to) && 4 * i + 4 <= bytes) {
          reinterpret_cast<std::uint32_t*>(to)[i] = memory.raw[i];
          continue;
        }
        for (unsigned at = 4 * i; at < 4 * i + 4 && at < bytes; ++at) {
          to[at] = static_cast<std::byte>(memory.raw[i] >> 8 * (at % 4));
        }
      }
    });
  }
};

template <class Stripe>
struct MeasureStripes {
  using Memory = StripeMemory;

  template <class Team>
  SPILLWAY_KERNEL void
  operator()(Team const& team, StripeMemory& memory, std::uint64_t stripe) const {
    unsigned const stored = StripeWork<Stripe>::pack(team, memory, from, bytes, stripe).bytes;
    once(team, [&] { slot.entry(stripe).stored_bytes = stored; });
  }

  std::byte const* from;
  std::uint64_t bytes;
  KernelSlot slot;
};

/// Kernel for one team: writes the slot's header and the entries of all stripes.
struct PlaceStripes {
  using Memory = TeamSums;

  template <class Team>
  SPILLWAY_KERNEL void operator()(Team const& team, TeamSums& sums, std::uint64_t /*team*/) const {
    std::uint64_t const stripes = StripeFormat::parts_of(bytes);
    std::uint64_t const end = place_parts(
        team, sums, slot, first_part_at(stripes), 0, stripes, [&](std::uint64_t stripe) {
          return slot.entry(stripe).stored_bytes;
        });
    once(team, [&] { slot.header() = {SlotHeader::known_mark, bytes, end, 0}; });
  }

  std::uint64_t bytes;
  KernelSlot slot;
};

template <class Stripe>
struct WriteStripes {
  using Memory = StripeMemory;

  template <class Team>
  SPILLWAY_KERNEL void
  operator()(Team const& team, StripeMemory& memory, std::uint64_t stripe) const {
    auto const packed = StripeWork<Stripe>::pack(team, memory, from, bytes, stripe);
    write_to_slot(team, slot, slot.entry(stripe).at, packed.words, packed.bytes);
  }

  std::byte const* from;
  std::uint64_t bytes;
  KernelSlot slot;
};

/// Kernel: decodes the first `bytes` bytes of a block.
template <class Stripe>
struct ReadStripes {
  using Memory = StripeMemory;

  template <class Team>
  SPILLWAY_KERNEL void
  operator()(Team const& team, StripeMemory& memory, std::uint64_t stripe) const {
    FoundPart const found = find_part<StripeFormat>(slot, bytes, stripe);
    if (!found.is_sound) {
      note_damage(team, slot);
      return;
    }
    bool const is_kept = StripeWork<Stripe>::is_kept(found.stored_bytes, found.raw_bytes);
    read_from_slot(team, slot, found.at, is_kept ? memory.raw : memory.packed, found.stored_bytes);
    if (!is_kept && !Stripe::unpack(team, memory, found.stored_bytes, found.raw_bytes)) {
      note_damage(team, slot);
      return;
    }
    StripeWork<Stripe>::store(
        team, memory, to + stripe * stripe_bytes, StripeFormat::raw_bytes(stripe, bytes));
  }

  KernelSlot slot;
  std::byte* to;
  std::uint64_t bytes;
};

/// Enqueues the kernels that encode a block.
template <class Stripe, class Launch>
void encode_stripes(Launch const& launch, std::span<std::byte const> from, KernelSlot const& slot) {
  std::uint64_t const stripes = StripeFormat::parts_of(from.size());
  if (stripes != 0) {
    launch(MeasureStripes<Stripe>{from.data(), from.size(), slot}, stripes);
  }
  launch(PlaceStripes{from.size(), slot}, 1);
  if (stripes != 0) {
    launch(WriteStripes<Stripe>{from.data(), from.size(), slot}, stripes);
  }
}
/// Enqueues the kernel that decodes the front of a block.
template <class Stripe, class Launch>
void decode_stripes(Launch const& launch, KernelSlot const& slot, std::span<std::byte> to) {
  if (!to.empty()) {
    launch(ReadStripes<Stripe>{slot, to.data(), to.size()}, StripeFormat::parts_of(to.size()));
  }
}

}  // namespace spillway::detail
