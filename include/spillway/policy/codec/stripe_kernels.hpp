// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/codec.hpp>
#include <spillway/core/bits.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/types.hpp>
#include <spillway/policy/codec/as_bfloat16.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

// How a device encodes a block into a slot of pinned memory, and decodes it: what `StreamCodec`s
// have in common, without what is CUDA's.
//
// Stripes   A block is cut into stripes of 16 KiB. A team of 128 threads encodes a stripe in the
//           fast memory that it shares, and moves it to the slot 16 bytes at a time, as the link
//           wants it.
// Slot      It begins with a `SlotHeader` and a `StripeEntry` for each stripe, which says where the
//           stripe is. Stripes follow each other, each at a multiple of 16 bytes.
// Kernels   Encoding takes three, since where a stripe goes depends on how long those before it
//           are: `measure_stripe` for each stripe, `place_stripes` once, `write_stripe` for each.
//           Decoding takes one, `read_stripe`. They need no memory but the slot's.
// Teams     A `Team` has `size` threads. `team.each(f)` calls `f(thread)` for each of them, and has
//           all of them done when it returns. `team.exclusive_scan(values)` replaces the value of
//           each thread by the sum of those before it, and returns the sum of all. On a GPU each
//           thread runs the same function and comes to its own call; a test may call one after the
//           other.

#if defined(__CUDACC__)
#  define SPILLWAY_KERNEL __device__
#else
#  define SPILLWAY_KERNEL
#endif

namespace spillway::detail {

inline constexpr unsigned stripe_words = 4096;  // of 32 bits
inline constexpr unsigned stripe_bytes = 4 * stripe_words;
inline constexpr unsigned most_map_words = stripe_words / 32;

/// What a slot moves at a time.
struct alignas(16) SlotUnit {
  std::uint32_t words[4];
};

/// The front of a slot.
struct alignas(16) SlotHeader {
  static constexpr std::uint64_t known_mark = 0x53'70'69'6C'6C'77'61'79;

  std::uint64_t mark;
  std::uint64_t raw_bytes;
  std::uint64_t stored_bytes;  // of all of the slot
  std::uint64_t is_damaged;    // a kernel found something else than what is written here
};

/// Where a stripe is.
struct alignas(16) StripeEntry {
  std::uint64_t at;
  std::uint64_t stored_bytes;
};

[[nodiscard]] SPILLWAY_HOST_DEVICE constexpr std::uint64_t stripes_of(std::uint64_t bytes) {
  return (bytes + stripe_bytes - 1) / stripe_bytes;
}
/// Where the first stripe of a block of so many bytes begins.
[[nodiscard]] SPILLWAY_HOST_DEVICE constexpr std::uint64_t first_stripe_at(std::uint64_t bytes) {
  return sizeof(SlotHeader) + stripes_of(bytes) * sizeof(StripeEntry);
}
[[nodiscard]] SPILLWAY_HOST_DEVICE constexpr std::uint64_t in_units(std::uint64_t bytes) {
  return (bytes + sizeof(SlotUnit) - 1) / sizeof(SlotUnit) * sizeof(SlotUnit);
}
/// The most that a slot needs for a block, if no stripe becomes longer than it is.
[[nodiscard]] constexpr std::size_t most_striped_bytes(std::size_t bytes) noexcept {
  return static_cast<std::size_t>(first_stripe_at(bytes) + in_units(bytes));
}

/// `StreamCodec::stored_bytes` for a slot that these kernels have written.
[[nodiscard]] inline std::size_t striped_bytes(SlotMemory slot) noexcept {
  if (slot.empty() || slot.front().size() < sizeof(SlotHeader)) {
    return 0;
  }
  auto const& header = *reinterpret_cast<SlotHeader const*>(slot.front().data());
  bool const is_sound = header.mark == SlotHeader::known_mark && header.is_damaged == 0;
  return is_sound ? static_cast<std::size_t>(header.stored_bytes) : 0;
}

/// The pieces of a slot, by value, as an argument of a kernel.
class KernelSlot {
 public:
  /// `memory`: where the device finds the next piece.
  void add(std::byte* memory, std::size_t bytes) noexcept {
    end_ += bytes;
    pieces_[count_++] = {memory, end_};
  }
  [[nodiscard]] SPILLWAY_HOST_DEVICE std::uint64_t bytes() const { return end_; }
  /// The bytes from `offset` on, as many as a `SlotUnit` has at least: no piece ends within one.
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
  [[nodiscard]] SPILLWAY_HOST_DEVICE StripeEntry& entry(std::uint64_t stripe) const {
    return *reinterpret_cast<StripeEntry*>(at(sizeof(SlotHeader) + stripe * sizeof(StripeEntry)));
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

/// What the threads of a team share.
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

  /// Unpacks `stored` bytes into raw words. @returns false if those cannot be so many `bytes`
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
        // A last float32 that has none beside it has the bytes that are kept instead.
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

/// The kernels of a codec with such stripes. The head of this file says what they do.
template <class Stripe>
struct StripeKernels {
  template <class Team>
  SPILLWAY_KERNEL static void measure_stripe(Team const& team,
                                             StripeMemory& memory,
                                             std::byte const* from,
                                             std::uint64_t bytes,
                                             KernelSlot const& slot,
                                             std::uint64_t stripe) {
    unsigned const stored = pack(team, memory, from, bytes, stripe).bytes;
    team.each([&](unsigned thread) {
      if (thread == 0) {
        slot.entry(stripe).stored_bytes = stored;
      }
    });
  }

  /// `sums` is shared by the team, which adds up as many stripes at a time as it has threads.
  template <class Team>
  SPILLWAY_KERNEL static void place_stripes(Team const& team,
                                            std::uint64_t* sums,
                                            std::uint64_t bytes,
                                            KernelSlot const& slot) {
    std::uint64_t const stripes = stripes_of(bytes);
    std::uint64_t at = first_stripe_at(bytes);
    for (std::uint64_t first = 0; first < stripes; first += Team::size) {
      team.each([&](unsigned thread) {
        bool const is_there = first + thread < stripes;
        sums[thread] = is_there ? in_units(slot.entry(first + thread).stored_bytes) : 0;
      });
      std::uint64_t const all = team.exclusive_scan(sums);
      team.each([&](unsigned thread) {
        if (first + thread < stripes) {
          slot.entry(first + thread).at = at + sums[thread];
        }
      });
      at += all;
    }
    team.each([&](unsigned thread) {
      if (thread == 0) {
        slot.header() = {SlotHeader::known_mark, bytes, at, 0};
      }
    });
  }

  template <class Team>
  SPILLWAY_KERNEL static void write_stripe(Team const& team,
                                           StripeMemory& memory,
                                           std::byte const* from,
                                           std::uint64_t bytes,
                                           KernelSlot const& slot,
                                           std::uint64_t stripe) {
    Packed const packed = pack(team, memory, from, bytes, stripe);
    std::uint64_t const at = slot.entry(stripe).at;
    team.each([&](unsigned thread) {
      for (unsigned i = thread; i < in_units(packed.bytes) / sizeof(SlotUnit); i += Team::size) {
        slot.unit(at + i * sizeof(SlotUnit)) = reinterpret_cast<SlotUnit const*>(packed.words)[i];
      }
    });
  }

  /// Writes the stripe's part of the first `bytes` bytes of a block.
  template <class Team>
  SPILLWAY_KERNEL static void read_stripe(Team const& team,
                                          StripeMemory& memory,
                                          KernelSlot const& slot,
                                          std::byte* to,
                                          std::uint64_t bytes,
                                          std::uint64_t stripe) {
    if (!try_read(team, memory, slot, to, bytes, stripe)) {
      team.each([&](unsigned thread) {
        if (thread == 0) {
          slot.header().is_damaged = 1;
        }
      });
    }
  }

 private:
  struct Packed {
    std::uint32_t const* words;
    unsigned bytes;
  };
  /// What is to be stored of a stripe of a block, in the team's memory.
  template <class Team>
  SPILLWAY_KERNEL static Packed pack(Team const& team,
                                     StripeMemory& memory,
                                     std::byte const* from,
                                     std::uint64_t bytes,
                                     std::uint64_t stripe) {
    unsigned const raw = bytes_of(stripe, bytes);
    load(team, memory, from + stripe * stripe_bytes, raw);
    unsigned const packed = Stripe::pack(team, memory, raw);
    if (is_kept(packed, raw)) {
      return {memory.raw, raw};
    }
    return {memory.packed, packed};
  }

  template <class Team>
  SPILLWAY_KERNEL static bool try_read(Team const& team,
                                       StripeMemory& memory,
                                       KernelSlot const& slot,
                                       std::byte* to,
                                       std::uint64_t bytes,
                                       std::uint64_t stripe) {
    if (slot.bytes() < sizeof(SlotHeader)) {
      return false;
    }
    SlotHeader const header = slot.header();
    // The third of these keeps the sum in the last one from overflowing.
    bool const is_known = header.mark == SlotHeader::known_mark && header.raw_bytes >= bytes &&
                          header.raw_bytes / stripe_bytes <= slot.bytes() / sizeof(StripeEntry) &&
                          header.stored_bytes <= slot.bytes() &&
                          first_stripe_at(header.raw_bytes) <= header.stored_bytes;
    if (!is_known) {
      return false;
    }
    StripeEntry const entry = slot.entry(stripe);
    unsigned const raw = bytes_of(stripe, header.raw_bytes);
    bool const is_inside = entry.at % sizeof(SlotUnit) == 0 &&
                           entry.at >= first_stripe_at(header.raw_bytes) &&
                           entry.at <= header.stored_bytes && entry.stored_bytes <= raw &&
                           in_units(entry.stored_bytes) <= header.stored_bytes - entry.at;
    if (!is_inside) {
      return false;
    }
    auto const stored = static_cast<unsigned>(entry.stored_bytes);
    std::uint32_t* const words = is_kept(stored, raw) ? memory.raw : memory.packed;
    team.each([&](unsigned thread) {
      for (unsigned i = thread; i < in_units(stored) / sizeof(SlotUnit); i += Team::size) {
        reinterpret_cast<SlotUnit*>(words)[i] = slot.unit(entry.at + i * sizeof(SlotUnit));
      }
    });
    if (!is_kept(stored, raw) && !Stripe::unpack(team, memory, stored, raw)) {
      return false;
    }
    store(team, memory, to + stripe * stripe_bytes, bytes_of(stripe, bytes));
    return true;
  }

  /// How much of a block belongs to a stripe.
  [[nodiscard]] SPILLWAY_KERNEL static unsigned bytes_of(std::uint64_t stripe,
                                                         std::uint64_t bytes) {
    std::uint64_t const left = bytes - stripe * stripe_bytes;
    return left < stripe_bytes ? static_cast<unsigned>(left) : stripe_bytes;
  }
  /// Whether a stripe is kept as it is, since packing it makes it no shorter.
  [[nodiscard]] SPILLWAY_KERNEL static bool is_kept(unsigned packed, unsigned raw) {
    return Stripe::is_lossless && packed >= raw;
  }
  [[nodiscard]] SPILLWAY_KERNEL static bool is_aligned(std::byte const* p) {
    return reinterpret_cast<std::uintptr_t>(p) % 4 == 0;
  }

  /// Bytes behind the last whole word are the low ones of a word more.
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

}  // namespace spillway::detail

#undef SPILLWAY_KERNEL
