// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>
#include <spillway/core/kernel.hpp>
#include <spillway/core/types.hpp>
#include <spillway/policy/codec/kernel_slot.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

// Encodes blocks on a device into slots of pinned memory, and decodes them, with a compressor that
// works on batches of buffers in device memory, as those of nvCOMP do. kernel_slot.hpp describes
// slots, core/kernel.hpp kernels and teams.
//
// Planes      As in `BytePlanes`, the first bytes of all groups of four bytes are compressed
//             together, then the second ones, and so on. 64 KiB of a block are four planes of
//             16 KiB, which are the parts in the slot. The last planes are padded with zeros. A
//             plane that does not become shorter is stored unchanged.
// Checksums   A compressor may rely on its input when it decompresses: those of nvCOMP may access
//             any address if the input was not made by them. So a plane is decompressed only if its
//             checksum matches that in its entry.
// Batches     A block is processed in batches that fit into the scratch memory: it is split into
//             planes, these are compressed, placed, and written into the slot. For decoding, planes
//             are fetched from the slot, decompressed and joined.
// Compressor  `C::most_planes` is the most planes in a batch, a multiple of four.
//             `C::most_packed_bytes(n)` is the most bytes to which `n` bytes can be compressed,
//             `C::work_bytes(planes)` the working memory for a batch.
//             `C::compress(launch, batch, work)` and `C::decompress(launch, batch, work)` enqueue
//             work that writes the target of each source in a `PlaneBatch`.

namespace spillway::detail {

inline constexpr unsigned planes_of_word = 4;
inline constexpr unsigned plane_bytes = 16 * 1024;
inline constexpr unsigned split_bytes = planes_of_word * plane_bytes;

struct PlaneFormat {
  static constexpr unsigned most_raw_bytes = plane_bytes;

  /// How many pieces of 64 KiB a block has.
  [[nodiscard]] SPILLWAY_HOST_DEVICE static constexpr std::uint64_t splits_of(std::uint64_t bytes) {
    return (bytes + split_bytes - 1) / split_bytes;
  }
  [[nodiscard]] SPILLWAY_HOST_DEVICE static constexpr unsigned bytes_of_split(std::uint64_t split,
                                                                              std::uint64_t bytes) {
    std::uint64_t const left = bytes - split * split_bytes;
    return left < split_bytes ? static_cast<unsigned>(left) : split_bytes;
  }
  [[nodiscard]] SPILLWAY_HOST_DEVICE static constexpr std::uint64_t parts_of(std::uint64_t bytes) {
    return planes_of_word * splits_of(bytes);
  }
  [[nodiscard]] SPILLWAY_HOST_DEVICE static constexpr unsigned raw_bytes(std::uint64_t plane,
                                                                         std::uint64_t bytes) {
    return (bytes_of_split(plane / planes_of_word, bytes) + planes_of_word - 1) / planes_of_word;
  }
};

/// Returns the most room that a block needs in a slot, if no encoded plane is longer than the
/// plane.
[[nodiscard]] constexpr std::size_t most_planed_bytes(std::size_t bytes) noexcept {
  std::uint64_t const parts = PlaneFormat::parts_of(bytes);
  std::uint64_t const last = parts == 0 ? 0 : in_units(PlaneFormat::raw_bytes(parts - 1, bytes));
  std::uint64_t const whole = bytes / split_bytes * split_bytes;
  return static_cast<std::size_t>(first_part_at(parts) + whole +
                                  (whole == bytes ? 0 : planes_of_word * last));
}

/// A batch of buffers in device memory that a compressor works on, with its results. All arrays are
/// in device memory, too, and have one element for each buffer.
struct PlaneBatch {
  static constexpr int success = 0;

  void** from;
  std::size_t* from_bytes;
  void** to;
  std::size_t* to_bytes;    // room in each target
  std::size_t* done_bytes;  // bytes written to each target
  int* statuses;
  unsigned count;
};

/// The scratch memory, passed to kernels by value: plain planes, packed planes, and a batch, whose
/// last element is a spare one and not a plane of the block.
///
/// A decompressor must get only what the compressor has made. For a plane that was stored unchanged
/// it gets the spare element instead: a few zeros that were compressed on the same stream.
struct PlaneScratch {
  static constexpr unsigned spare_bytes = 256;
  static constexpr std::size_t alignment_bytes = 256;

  [[nodiscard]] SPILLWAY_HOST_DEVICE std::byte* raw_plane(std::uint64_t i) const {
    return raw + i * plane_bytes;
  }
  [[nodiscard]] SPILLWAY_HOST_DEVICE std::byte* packed_plane(std::uint64_t i) const {
    return packed + i * packed_bytes;
  }
  /// `count` elements of the batch from `first` on.
  [[nodiscard]] PlaneBatch part(unsigned first, unsigned count) const {
    return {batch.from + first,
            batch.from_bytes + first,
            batch.to + first,
            batch.to_bytes + first,
            batch.done_bytes + first,
            batch.statuses + first,
            count};
  }

  std::byte* raw;
  std::byte* packed;
  std::size_t packed_bytes;  // room for each
  PlaneBatch batch;
  unsigned spare;  // index of the spare element, the last one
};

/// Divides scratch memory into arrays, or only counts how much they need.
class ScratchLayout {
 public:
  explicit ScratchLayout(std::byte* memory) noexcept : memory_{memory} {}

  /// Returns an array of `count` elements; null if there is no memory and only the size is counted.
  template <class T>
  [[nodiscard]] T* take(std::size_t count) noexcept {
    T* const taken = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += round_up(count * sizeof(T), PlaneScratch::alignment_bytes);
    return taken;
  }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 private:
  std::byte* memory_;
  std::size_t bytes_ = 0;
};

/// Kernel: splits 64 KiB of a block into planes, and fills in the batch that packs them.
struct SplitPlanes {
  using Memory = NoMemory;

  template <class Team>
  SPILLWAY_KERNEL void operator()(Team const& team, Memory& /*memory*/, std::uint64_t i) const {
    unsigned const size = PlaneFormat::bytes_of_split(first + i, bytes);
    std::byte const* const source = from + (first + i) * split_bytes;
    team.each([&](unsigned thread) {
      for (unsigned unit = thread; unit * sizeof(SlotUnit) < size; unit += Team::size) {
        split(load(source, unit, size), unit, planes_of_word * i);
      }
      if (thread < planes_of_word) {
        std::uint64_t const plane = planes_of_word * i + thread;
        scratch.batch.from[plane] = scratch.raw_plane(plane);
        scratch.batch.from_bytes[plane] = (size + planes_of_word - 1) / planes_of_word;
        scratch.batch.to[plane] = scratch.packed_plane(plane);
        scratch.batch.to_bytes[plane] = scratch.packed_bytes;
      }
    });
  }

  std::byte const* from;  // the block
  std::uint64_t bytes;
  std::uint64_t first;  // of the batch, in units of 64 KiB
  PlaneScratch scratch;

 private:
  /// Bytes behind the end are zeros.
  [[nodiscard]] SPILLWAY_KERNEL static SlotUnit
  load(std::byte const* source, unsigned unit, unsigned size) {
    unsigned const at = unit * sizeof(SlotUnit);
    if (reinterpret_cast<std::uintptr_t>(source) % sizeof(SlotUnit) == 0 &&
        at + sizeof(SlotUnit) <= size) {
      return reinterpret_cast<SlotUnit const*>(source)[unit];
    }
    SlotUnit loaded{};
    for (unsigned k = 0; k < sizeof(SlotUnit) && at + k < size; ++k) {
      loaded.words[k / 4] |= static_cast<std::uint32_t>(source[at + k]) << 8 * (k % 4);
    }
    return loaded;
  }
  SPILLWAY_KERNEL void
  split(SlotUnit const& unit, unsigned index, std::uint64_t first_plane) const {
    for (unsigned plane = 0; plane < planes_of_word; ++plane) {
      std::uint32_t word = 0;
      for (unsigned k = 0; k < 4; ++k) {
        word |= (unit.words[k] >> 8 * plane & 0xFFU) << 8 * k;
      }
      reinterpret_cast<std::uint32_t*>(scratch.raw_plane(first_plane + plane))[index] = word;
    }
  }
};

/// Kernel for one team: decides which planes of a batch are stored unchanged, and writes the slot's
/// entries for all planes of the batch.
struct PlacePlanes {
  using Memory = TeamSums;

  template <class Team>
  SPILLWAY_KERNEL void operator()(Team const& team, TeamSums& sums, std::uint64_t /*i*/) const {
    std::uint64_t const begin =
        first == 0 ? first_part_at(PlaneFormat::parts_of(bytes)) : slot.header().stored_bytes;
    std::uint64_t const end =
        place_parts(team, sums, slot, begin, first, planes, [&](std::uint64_t plane) {
          std::size_t const raw = scratch.batch.from_bytes[plane];
          std::size_t const packed = scratch.batch.done_bytes[plane];
          bool const is_packed =
              scratch.batch.statuses[plane] == PlaneBatch::success && packed < raw;
          return is_packed ? packed : raw;
        });
    once(team, [&] { slot.header() = {SlotHeader::known_mark, bytes, end, 0}; });
  }

  std::uint64_t bytes;
  KernelSlot slot;
  std::uint64_t first;  // plane of the batch
  std::uint64_t planes;
  PlaneScratch scratch;
};

/// Returns the checksum of a plane as it is stored, which also covers its packed and plain length.
template <class Team>
[[nodiscard]] SPILLWAY_KERNEL std::uint32_t checksum_of_plane(Team const& team,
                                                              TeamSums& sums,
                                                              std::byte const* plane,
                                                              unsigned stored_bytes,
                                                              unsigned raw_bytes) {
  return checksum_of(team, sums, plane, stored_bytes, stored_bytes * plane_bytes + raw_bytes);
}

struct WritePlanes {
  using Memory = TeamSums;

  template <class Team>
  SPILLWAY_KERNEL void operator()(Team const& team, TeamSums& sums, std::uint64_t plane) const {
    SlotEntry const entry = slot.entry(first + plane);
    auto const raw = static_cast<unsigned>(scratch.batch.from_bytes[plane]);
    bool const is_kept = entry.stored_bytes == raw;
    std::byte const* const from = is_kept ? scratch.raw_plane(plane) : scratch.packed_plane(plane);
    write_to_slot(team, slot, entry.at, from, entry.stored_bytes);
    std::uint32_t const checksum = checksum_of_plane(team, sums, from, entry.stored_bytes, raw);
    once(team, [&] { slot.entry(first + plane).checksum = checksum; });
  }

  KernelSlot slot;
  std::uint64_t first;  // plane of the batch
  PlaneScratch scratch;
};

/// Kernel for one team: makes the spare element of the batch.
struct MakeSpare {
  using Memory = NoMemory;

  template <class Team>
  SPILLWAY_KERNEL void operator()(Team const& team, Memory& /*memory*/, std::uint64_t /*i*/) const {
    unsigned const i = scratch.spare;
    team.each([&](unsigned thread) {
      for (unsigned at = thread; at < PlaneScratch::spare_bytes; at += Team::size) {
        scratch.raw_plane(i)[at] = std::byte{0};
      }
    });
    once(team, [&] {
      scratch.batch.from[i] = scratch.raw_plane(i);
      scratch.batch.from_bytes[i] = PlaneScratch::spare_bytes;
      scratch.batch.to[i] = scratch.packed_plane(i);
      scratch.batch.to_bytes[i] = scratch.packed_bytes;
    });
  }

  PlaneScratch scratch;
};

/// Kernel: copies planes from the slot, and fills in the batch that unpacks those that are packed.
struct FetchPlanes {
  using Memory = TeamSums;

  template <class Team>
  SPILLWAY_KERNEL void operator()(Team const& team, TeamSums& sums, std::uint64_t plane) const {
    FoundPart const found = find_part<PlaneFormat>(slot, bytes, first + plane);
    bool const is_shorter = found.stored_bytes < found.raw_bytes;
    std::byte* const fetched = is_shorter ? scratch.packed_plane(plane) : scratch.raw_plane(plane);
    bool is_sound = found.is_sound && found.stored_bytes != 0;
    if (is_sound) {
      read_from_slot(team, slot, found.at, fetched, found.stored_bytes);
      is_sound = found.checksum ==
                 checksum_of_plane(team, sums, fetched, found.stored_bytes, found.raw_bytes);
    }
    if (!is_sound) {
      note_damage(team, slot);
    }
    bool const is_packed = is_sound && is_shorter;
    once(team, [&] {
      unsigned const spare = scratch.spare;
      PlaneBatch const& batch = scratch.batch;
      batch.from[plane] = is_packed ? fetched : scratch.packed_plane(spare);
      batch.from_bytes[plane] = is_packed ? found.stored_bytes : batch.done_bytes[spare];
      batch.to[plane] = is_packed ? scratch.raw_plane(plane) : scratch.packed_plane(plane);
      batch.to_bytes[plane] = is_packed ? found.raw_bytes : PlaneScratch::spare_bytes;
    });
  }

  KernelSlot slot;
  std::uint64_t bytes;
  std::uint64_t first;  // plane of the batch
  PlaneScratch scratch;
};

/// Kernel: joins planes to 64 KiB of a block, but writes at most its first `bytes` bytes.
struct JoinPlanes {
  using Memory = NoMemory;

  template <class Team>
  SPILLWAY_KERNEL void operator()(Team const& team, Memory& /*memory*/, std::uint64_t i) const {
    bool is_sound = true;
    for (unsigned k = 0; k < planes_of_word; ++k) {
      std::uint64_t const plane = planes_of_word * i + k;
      is_sound = is_sound && scratch.batch.statuses[plane] == PlaneBatch::success &&
                 scratch.batch.done_bytes[plane] == scratch.batch.to_bytes[plane];
    }
    if (!is_sound) {
      note_damage(team, slot);
      return;
    }
    unsigned const size = PlaneFormat::bytes_of_split(first + i, bytes);
    std::byte* const target = to + (first + i) * split_bytes;
    team.each([&](unsigned thread) {
      for (unsigned unit = thread; unit * sizeof(SlotUnit) < size; unit += Team::size) {
        store(join(unit, planes_of_word * i), target, unit, size);
      }
    });
  }

  KernelSlot slot;
  std::byte* to;  // the block
  std::uint64_t bytes;
  std::uint64_t first;  // of the batch, in units of 64 KiB
  PlaneScratch scratch;

 private:
  [[nodiscard]] SPILLWAY_KERNEL SlotUnit join(unsigned index, std::uint64_t first_plane) const {
    SlotUnit joined{};
    for (unsigned plane = 0; plane < planes_of_word; ++plane) {
      std::uint32_t const word =
          reinterpret_cast<std::uint32_t const*>(scratch.raw_plane(first_plane + plane))[index];
      for (unsigned k = 0; k < 4; ++k) {
        joined.words[k] |= (word >> 8 * k & 0xFFU) << 8 * plane;
      }
    }
    return joined;
  }
  SPILLWAY_KERNEL static void
  store(SlotUnit const& joined, std::byte* target, unsigned unit, unsigned size) {
    unsigned const at = unit * sizeof(SlotUnit);
    if (reinterpret_cast<std::uintptr_t>(target) % sizeof(SlotUnit) == 0 &&
        at + sizeof(SlotUnit) <= size) {
      reinterpret_cast<SlotUnit*>(target)[unit] = joined;
      return;
    }
    for (unsigned k = 0; k < sizeof(SlotUnit) && at + k < size; ++k) {
      target[at + k] = static_cast<std::byte>(joined.words[k / 4] >> 8 * (k % 4));
    }
  }
};

/// Encodes and decodes blocks with a compressor, in scratch memory that the caller provides.
template <class Compressor>
class PlaneCodec {
 public:
  [[nodiscard]] static std::size_t scratch_bytes() { return PlaneCodec{nullptr}.layout_.bytes(); }

  /// Enqueues the work that encodes a block. `scratch` has `scratch_bytes()`.
  template <class Launch>
  static void encode(Launch const& launch,
                     std::span<std::byte const> from,
                     KernelSlot const& slot,
                     std::span<std::byte> scratch) {
    PlaneCodec const codec{scratch.data()};
    if (from.empty()) {
      launch(PlacePlanes{0, slot, 0, 0, codec.scratch_}, 1);
    }
    codec.each_batch(from.size(), [&](std::uint64_t first, unsigned splits) {
      unsigned const planes = planes_of_word * splits;
      launch(SplitPlanes{from.data(), from.size(), first, codec.scratch_}, splits);
      Compressor::compress(launch, codec.scratch_.part(0, planes), codec.work_);
      std::uint64_t const plane = planes_of_word * first;
      launch(PlacePlanes{from.size(), slot, plane, planes, codec.scratch_}, 1);
      launch(WritePlanes{slot, plane, codec.scratch_}, planes);
    });
  }
  /// Enqueues the work that decodes the front of a block.
  template <class Launch>
  static void decode(Launch const& launch,
                     KernelSlot const& slot,
                     std::span<std::byte> to,
                     std::span<std::byte> scratch) {
    PlaneCodec const codec{scratch.data()};
    launch(MakeSpare{codec.scratch_}, 1);
    Compressor::compress(launch, codec.scratch_.part(codec.scratch_.spare, 1), codec.work_);
    codec.each_batch(to.size(), [&](std::uint64_t first, unsigned splits) {
      unsigned const planes = planes_of_word * splits;
      launch(FetchPlanes{slot, to.size(), planes_of_word * first, codec.scratch_}, planes);
      Compressor::decompress(launch, codec.scratch_.part(0, planes), codec.work_);
      launch(JoinPlanes{slot, to.data(), to.size(), first, codec.scratch_}, splits);
    });
  }

 private:
  static constexpr unsigned buffers = Compressor::most_planes + 1;

  explicit PlaneCodec(std::byte* memory) : layout_{memory} {
    scratch_.packed_bytes = static_cast<std::size_t>(
        round_up(Compressor::most_packed_bytes(plane_bytes), PlaneScratch::alignment_bytes));
    scratch_.raw = layout_.take<std::byte>(std::size_t{buffers} * plane_bytes);
    scratch_.packed = layout_.take<std::byte>(buffers * scratch_.packed_bytes);
    scratch_.batch.from = layout_.take<void*>(buffers);
    scratch_.batch.from_bytes = layout_.take<std::size_t>(buffers);
    scratch_.batch.to = layout_.take<void*>(buffers);
    scratch_.batch.to_bytes = layout_.take<std::size_t>(buffers);
    scratch_.batch.done_bytes = layout_.take<std::size_t>(buffers);
    scratch_.batch.statuses = layout_.take<int>(buffers);
    scratch_.spare = Compressor::most_planes;
    std::size_t const work = Compressor::work_bytes(Compressor::most_planes);
    work_ = {layout_.take<std::byte>(work), work};
  }

  template <class Use>
  static void each_batch(std::size_t bytes, Use use) {
    constexpr std::uint64_t most = Compressor::most_planes / planes_of_word;
    std::uint64_t const splits = PlaneFormat::splits_of(bytes);
    for (std::uint64_t first = 0; first < splits; first += most) {
      use(first, static_cast<unsigned>(std::min(most, splits - first)));
    }
  }

  ScratchLayout layout_;
  PlaneScratch scratch_{};
  std::span<std::byte> work_;
};

}  // namespace spillway::detail
