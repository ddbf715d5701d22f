// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/codec.hpp>
#include <spillway/concepts/device_api.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/streaming_store.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_ledger.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host/slab_map.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <iterator>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace spillway::detail {

/// The functions of a codec, with its type erased: those of a `StreamCodec`, or else those that
/// encode and decode a stripe of 64 KiB.
struct CodecType {
  bool is_lossless = false;
  std::size_t (*worst_bytes)(std::size_t) noexcept = nullptr;  // `StreamCodec`: of a whole block
  std::shared_ptr<void> (*make)() = nullptr;
  std::size_t (*encode)(void*, std::span<std::byte const>, std::span<std::byte>) noexcept = nullptr;
  bool (*decode)(void*, std::span<std::byte const>, std::span<std::byte>) noexcept = nullptr;
  void const* on_stream = nullptr;  // points to the `StreamCodecCalls` for the pool's device
  std::size_t (*stored_bytes)(SlotMemory) noexcept = nullptr;
};

/// The functions of a `StreamCodec` that enqueue work.
template <DeviceApi Device>
struct StreamCodecCalls {
  using stream_type = typename Device::stream_type;
  void (*encode)(
      Device&, stream_type, std::span<std::byte const>, SlotMemory, std::span<std::byte>) = nullptr;
  void (*decode)(Device&, stream_type, SlotMemory, std::span<std::byte>, std::span<std::byte>) =
      nullptr;
};

template <Codec C>
inline constexpr CodecType codec_type{
    C::is_lossless,
    [](std::size_t bytes) noexcept { return C::worst_bytes(bytes); },
    []() -> std::shared_ptr<void> { return std::make_shared<C>(); },
    [](void* c, std::span<std::byte const> from, std::span<std::byte> to) noexcept {
      return static_cast<C*>(c)->encode(from, to);
    },
    [](void* c, std::span<std::byte const> from, std::span<std::byte> to) noexcept {
      return static_cast<C*>(c)->decode(from, to);
    }};

template <class C, DeviceApi Device>
  requires StreamCodec<C, Device>
inline constexpr StreamCodecCalls<Device> stream_codec_calls{
    [](Device& device,
       typename Device::stream_type stream,
       std::span<std::byte const> from,
       SlotMemory slot,
       std::span<std::byte> scratch) { C::encode_on(device, stream, from, slot, scratch); },
    [](Device& device,
       typename Device::stream_type stream,
       SlotMemory slot,
       std::span<std::byte> to,
       std::span<std::byte> scratch) { C::decode_on(device, stream, slot, to, scratch); }};

template <class C, DeviceApi Device>
  requires StreamCodec<C, Device>
inline constexpr CodecType stream_codec_type{
    .is_lossless = C::is_lossless,
    .worst_bytes = [](std::size_t bytes) noexcept { return C::stream_bytes(bytes); },
    .on_stream = &stream_codec_calls<C, Device>,
    .stored_bytes = [](SlotMemory slot) noexcept { return C::stored_bytes(slot); }};

/// Reads or writes the bytes of a slot in memory from its front to its end. `SlotIo::Cursor` does
/// the same for a slot in the file.
class PieceCursor {
 public:
  explicit PieceCursor(std::vector<HostPiece> const& pieces) noexcept : pieces_{&pieces} {
    for (HostPiece const& piece : pieces) {
      left_ += piece.bytes;
    }
  }
  [[nodiscard]] std::size_t left_bytes() const noexcept { return left_; }
  /// Returns the next `bytes` bytes if they are contiguous, else null. Does not move the cursor.
  [[nodiscard]] std::byte* in_one_piece(std::size_t bytes) noexcept {
    skip_finished();
    return bytes <= left_ && at_ + bytes <= (*pieces_)[piece_].bytes
               ? (*pieces_)[piece_].memory + at_
               : nullptr;
  }
  void write(std::byte const* from, std::size_t bytes) noexcept {
    for_each_part(bytes, [&](std::byte* memory, std::size_t part) {
      copy_streaming(memory, std::exchange(from, from + part), part);
    });
  }
  void read(std::byte* to, std::size_t bytes) noexcept {
    for_each_part(bytes, [&](std::byte const* memory, std::size_t part) {
      std::memcpy(std::exchange(to, to + part), memory, part);
    });
  }
  void skip(std::size_t bytes) noexcept {
    for_each_part(bytes, [](std::byte*, std::size_t) {});
  }
  /// Ends the last write. @returns false if a read has lost bytes, which is noted in the slot then
  [[nodiscard]] bool finish() noexcept { return true; }

 private:
  void skip_finished() noexcept {
    while (left_ > 0 && at_ == (*pieces_)[piece_].bytes) {
      ++piece_;
      at_ = 0;
    }
  }
  template <class Use>
  void for_each_part(std::size_t bytes, Use use) noexcept {
    SPILLWAY_ASSERT(bytes <= left_);
    while (bytes > 0) {
      skip_finished();
      std::size_t const part = std::min(bytes, (*pieces_)[piece_].bytes - at_);
      use((*pieces_)[piece_].memory + at_, part);
      at_ += part;
      left_ -= part;
      bytes -= part;
    }
  }

  std::vector<HostPiece> const* pieces_;
  std::size_t left_ = 0;
  std::size_t piece_ = 0;
  std::size_t at_ = 0;
};

/// Encodes blocks into slots of a host pool, and decodes them.
///
/// `HostTransfers` enqueues a host function that accesses the block in device memory and calls
/// `run` with a cursor: `run_in_memory`, or a function of `HostTransfers` for a slot in the file.
/// If the host cannot address device memory, blocks are staged part by part for the slower tiers,
/// and `encode_part` or `decode_part` is called for each part.
///
/// A block is encoded in stripes of 64 KiB, which fit into the caches. A stripe that a lossless
/// codec does not make smaller is stored unchanged, so a slot for the worst case is hardly larger
/// than the block. Each stripe has a header, by which bytes that no codec wrote are recognised and
/// refused.
///
/// When a block has been encoded its slot gives back what it does not need (`HostLedger::trim`).
///
/// Each codec is tried separately for each tag. If two blocks of a tag in a row do not become
/// smaller by an eighth, the codec is given up for that tag, and tried again with every 64th block.
///
/// A `StreamCodec` works on pinned slots only and has its own format for a whole block.
/// `HostTransfers` enqueues its work and, behind it, `note_on_stream`, which notes the result.
///
/// Threads  `run` runs on threads of the device and makes no device call. It locks the pool's mutex
///          while it uses the ledger, and a codec while it uses that. There is one instance of each
///          codec for each direction, and for memory and file, so that no thread waits for the file
///          calls of another. All other functions are called under the pool's mutex.
template <class = Lazily>
class BasicSlotCodecs {
  static constexpr std::size_t stripe_bytes = 64_KiB;
  static constexpr std::size_t least_bytes = 4_KiB;  // smaller blocks are not worth a host function
  // More than any memory. The room for so many bytes can still be counted, whatever the codec is.
  static constexpr std::size_t most_bytes = ~std::size_t{0} >> 16U;
  static constexpr std::uint32_t most_misses = 2;
  static constexpr std::uint32_t most_skipped = 64;
  static constexpr std::uint32_t as_it_is = 0x80000000;  // set in `Header::stored`: not encoded

  /// Stands before each stripe, at an address that is aligned as the slot is.
  struct Header {
    std::uint32_t raw = 0;     // bytes of the stripe
    std::uint32_t stored = 0;  // bytes that follow
    std::uint64_t place = 0;   // number of the stripe, so that a misplaced one is recognised
  };
  static_assert(sizeof(Header) == streaming_unit_bytes);
  static_assert(SlabMap::max_extents <= most_slot_pieces);

  struct Instance {
    std::mutex busy;
    std::shared_ptr<void> codec;
    std::vector<std::byte> scratch;  // room for one encoded and one plain stripe
  };
  struct Kind {
    CodecType const* type = nullptr;
    std::unordered_map<std::uint64_t, CodingId> by_tag;
    std::array<Instance, 4> instances;  // by `SlotAccess`, in memory and then in the file

    [[nodiscard]] Instance& instance_for(HostSlot const& slot, SlotAccess access) noexcept {
      return instances[static_cast<std::size_t>(access) + (slot.tier == HostTier::file ? 2 : 0)];
    }
  };
  struct Coding {
    Kind* kind = nullptr;
    std::uint64_t raw_bytes = 0;
    std::uint64_t stored_bytes = 0;
    std::uint32_t misses = 0;   // blocks in a row that did not become smaller
    std::uint32_t skipped = 0;  // blocks that were not encoded since the codec was given up
  };

 public:
  /// One transfer.
  struct Job {
    BasicSlotCodecs* owner = nullptr;
    Job* next = nullptr;  // next idle job
    HostSlot* slot = nullptr;
    std::uint32_t slot_version = 0;  // when the job was made
    Coding* coding = nullptr;
    SlotAccess access{};
    std::byte* device = nullptr;
    std::size_t bytes = 0;
    std::vector<HostPiece> pieces;
    std::vector<std::span<std::byte>> memory;  // the same, for a codec on a stream
    // For a slot in the file: the `SlotIo`, used by the host function of `HostTransfers`.
    void* io = nullptr;
    std::span<std::byte> chunk;
  };

  /// `mutex` guards `ledger` and this object. `reads_device`: the host can address device memory;
  /// otherwise `staged_bytes` of a block can be staged at once.
  BasicSlotCodecs(std::mutex& mutex,
                  HostLedger& ledger,
                  bool reads_device,
                  std::size_t staged_bytes)
      : mutex_{&mutex},
        ledger_{&ledger},
        reads_device_{reads_device},
        part_bytes_{staged_bytes / stripe_bytes * stripe_bytes} {}
  BasicSlotCodecs(BasicSlotCodecs const&) = delete;
  BasicSlotCodecs& operator=(BasicSlotCodecs const&) = delete;
  ~BasicSlotCodecs() = default;

  /// Returns the id of a codec with a tag, and makes one at first use. @throws std::bad_alloc
  [[nodiscard]] CodingId coding_of(CodecType const& type, std::uint64_t tag) {
    auto kind = std::find_if(
        kinds_.begin(), kinds_.end(), [&](Kind const& known) { return known.type == &type; });
    if (kind == kinds_.end()) {
      Kind& made = kinds_.emplace_back();
      try {
        for (Instance& instance : made.instances) {
          if (type.on_stream == nullptr) {
            instance.codec = type.make();
            instance.scratch.resize(sizeof(Header) + type.worst_bytes(stripe_bytes) + stripe_bytes);
          }
        }
      } catch (...) {
        kinds_.pop_back();
        throw;
      }
      made.type = &type;
      kind = std::prev(kinds_.end());
    }
    auto const [known, is_new] = kind->by_tag.try_emplace(tag, id_of(codings_.size()));
    if (is_new) {
      try {
        codings_.push_back({.kind = &*kind});
      } catch (...) {
        kind->by_tag.erase(known);
        throw;
      }
    }
    return known->second;
  }

  /// Returns the room that a block needs with a codec.
  [[nodiscard]] CodedRoom slot_room(CodingId id, std::size_t bytes) const noexcept {
    if (id == CodingId{} || bytes < least_bytes || bytes > most_bytes || is_given_up(at(id))) {
      return {};
    }
    CodecType const& type = *at(id).kind->type;
    if (type.on_stream != nullptr) {
      return {type.worst_bytes(bytes), HostTier::pinned, HostTier::pinned};
    }
    std::size_t const room =
        bytes / stripe_bytes * stored_bound(type, stripe_bytes) +
        (bytes % stripe_bytes == 0 ? 0 : stored_bound(type, bytes % stripe_bytes));
    if (reads_device_) {
      return {room};
    }
    return part_bytes_ == 0 ? CodedRoom{} : CodedRoom{room, HostTier::pageable, HostTier::file};
  }
  /// As `slot_room`, for a block that is about to be written: counts the block, so that a codec
  /// that was given up is tried again after a while.
  [[nodiscard]] CodedRoom try_slot_room(CodingId id, std::size_t bytes) noexcept {
    if (id != CodingId{} && is_given_up(at(id)) && ++at(id).skipped == most_skipped) {
      at(id).skipped = 0;
      at(id).misses = most_misses - 1;
    }
    return slot_room(id, bytes);
  }
  /// Returns the encoded size as a fraction of the size, as measured so far.
  [[nodiscard]] double stored_share(CodingId id) const noexcept {
    if (id == CodingId{} || is_given_up(at(id)) || at(id).raw_bytes == 0) {
      return 1;
    }
    return static_cast<double>(at(id).stored_bytes) / static_cast<double>(at(id).raw_bytes);
  }

  /// Returns which fraction of the bytes crosses the link: 1 if the codec encodes staged bytes.
  [[nodiscard]] double link_share(CodingId id) const noexcept {
    bool const is_staged =
        id != CodingId{} && !reads_device_ && at(id).kind->type->on_stream == nullptr;
    return is_staged ? 1 : stored_share(id);
  }

  /// Makes a job, which counts as unfinished for the slot until it has run or is given back.
  ///
  /// @throws std::bad_alloc, with nothing changed
  [[nodiscard]] Job& take(HostSlot& slot, TransferRequest const& request, SlotAccess access) {
    if (idle_ == nullptr) {
      idle_ = &jobs_.emplace_back();
    }
    Job& job = *idle_;
    job.pieces.clear();
    job.memory.clear();
    bool const is_on_stream = at(slot.coding).kind->type->on_stream != nullptr;
    ledger_->for_each_piece(slot, slot.bytes, [&](HostPiece const& piece) {
      job.pieces.push_back(piece);
      if (is_on_stream) {
        job.memory.emplace_back(piece.memory, piece.bytes);
      }
    });
    idle_ = std::exchange(job.next, nullptr);
    job.owner = this;
    job.slot = &slot;
    job.slot_version = slot.version;
    job.coding = &at(slot.coding);
    job.access = access;
    job.device = request.device;
    job.bytes = request.bytes;
    ++slot.jobs(access);
    return job;
  }
  /// Ends a job, whether it was enqueued or not.
  void give_back(Job& job) noexcept {
    --job.slot->jobs(job.access);
    ledger_->trim(*job.slot);
    ledger_->forget_if_unused(*job.slot);
    job.next = std::exchange(idle_, &job);
  }

  /// Returns the functions of the job's codec if that is a `StreamCodec`, else null.
  template <DeviceApi Device>
  [[nodiscard]] static StreamCodecCalls<Device> const* calls_on_stream(Job const& job) noexcept {
    return static_cast<StreamCodecCalls<Device> const*>(job.coding->kind->type->on_stream);
  }
  /// Host function that runs after the work of a `StreamCodec`. `argument` is a job.
  static void note_on_stream(void* argument) noexcept {
    auto& job = *static_cast<Job*>(argument);
    std::size_t const stored = job.coding->kind->type->stored_bytes(job.memory);
    job.owner->finish(job, stored, stored != 0);
  }

  /// Host function for a slot in memory. `argument` is a job.
  static void run_in_memory(void* argument) noexcept {
    auto& job = *static_cast<Job*>(argument);
    PieceCursor slot{job.pieces};
    run(job, slot);
  }
  /// Encodes or decodes a block, and gives the job back. `slot` is at the slot's front.
  template <class Cursor>
  static void run(Job& job, Cursor& slot) noexcept {
    job.owner->finish(job, slot);
  }

  /// How much of a block is staged at once, where the host cannot address device memory.
  [[nodiscard]] std::size_t part_bytes() const noexcept { return part_bytes_; }
  /// Whether anybody can still read what a job is to write.
  [[nodiscard]] bool is_needed(Job const& job) const noexcept {
    std::scoped_lock const lock{*mutex_};
    return !job.slot->is_unneeded();
  }
  /// Encodes the bytes of a block from `begin` on, which are at `memory`. They begin with a stripe.
  template <class Cursor>
  static void encode_part(Job& job,
                          Cursor& slot,
                          std::size_t begin,
                          std::span<std::byte const> memory) noexcept;
  /// Decodes bytes of a block in the same way. @returns false if no codec wrote what is at the
  /// cursor
  template <class Cursor>
  [[nodiscard]] static bool
  decode_part(Job& job, Cursor& slot, std::size_t begin, std::span<std::byte> memory) noexcept;
  /// Ends a job. Notes the stored size if it was a write, and a loss of bytes unless `are_sound`.
  void finish(Job& job, std::size_t stored, bool are_sound) noexcept {
    std::scoped_lock const lock{*mutex_};
    if (job.access == SlotAccess::write && stored != 0) {
      note(*job.coding, job.bytes, stored);
      job.slot->stored_bytes = stored;
    }
    if (!are_sound) {
      ++failed_reads_;
      ledger_->note_failure(*job.slot,
                            job.slot_version,
                            FileFailure{.bytes = job.bytes,
                                        .is_read = job.access == SlotAccess::read,
                                        .is_encoding = true});
    }
    give_back(job);
  }

  void add_stats(HostPoolStats& stats) const noexcept {
    stats.failed_reads += failed_reads_;
    for (Coding const& coding : codings_) {
      stats.encoded_raw_bytes += coding.raw_bytes;
      stats.encoded_stored_bytes += coding.stored_bytes;
      stats.codecs_given_up += is_given_up(coding) ? 1U : 0U;
    }
  }

 private:
  [[nodiscard]] static CodingId id_of(std::size_t index) noexcept {
    return static_cast<CodingId>(index + 1);
  }
  [[nodiscard]] Coding& at(CodingId id) noexcept {
    return codings_[static_cast<std::size_t>(id) - 1];
  }
  [[nodiscard]] Coding const& at(CodingId id) const noexcept {
    return codings_[static_cast<std::size_t>(id) - 1];
  }
  [[nodiscard]] static bool is_given_up(Coding const& coding) noexcept {
    return coding.misses >= most_misses;
  }

  /// The most that a stripe takes, with its header.
  [[nodiscard]] static std::size_t stored_bound(CodecType const& type, std::size_t raw) noexcept {
    std::size_t const worst = type.worst_bytes(raw);
    return sizeof(Header) + padded(type.is_lossless ? std::min(worst, raw) : worst);
  }
  [[nodiscard]] static std::size_t padded(std::size_t bytes) noexcept {
    return round_up(bytes, sizeof(Header));
  }

  template <class Cursor>
  void finish(Job& job, Cursor& slot) noexcept {
    std::span const block{job.device, job.bytes};
    std::size_t stored = 0;
    bool are_sound = true;
    if (job.access == SlotAccess::read) {
      are_sound = decode_part(job, slot, 0, block);
    } else if (is_needed(job)) {
      std::size_t const room = slot.left_bytes();
      encode_part(job, slot, 0, block);
      stored = room - slot.left_bytes();
    }
    bool const has_all = slot.finish();
    finish(job, stored, are_sound || !has_all);
  }

  static void note(Coding& coding, std::size_t raw, std::size_t stored) noexcept {
    coding.raw_bytes += raw;
    coding.stored_bytes += stored;
    bool const is_worth_it = stored <= raw - raw / 8;
    coding.misses = is_worth_it ? 0 : coding.misses + 1;
  }

  /// Decodes the stripe at `place` in its block to the front of `memory`, as far as that goes.
  /// @returns the bytes of the stripe, or 0 if no codec wrote it
  template <class Cursor>
  [[nodiscard]] static std::size_t decode_stripe(Job& job,
                                                 std::size_t place,
                                                 std::span<std::byte> memory,
                                                 Cursor& slot,
                                                 Instance& instance) noexcept {
    CodecType const& type = *job.coding->kind->type;
    if (slot.left_bytes() < sizeof(Header)) {
      return 0;
    }
    Header header;
    slot.read(reinterpret_cast<std::byte*>(&header), sizeof(Header));
    bool const is_kept = (header.stored & as_it_is) != 0;
    std::size_t const stored = header.stored & ~as_it_is;
    std::size_t const raw = header.raw;
    bool const is_sound =
        raw > 0 && raw <= stripe_bytes && header.place == place &&
        (is_kept ? type.is_lossless && stored == raw : stored <= type.worst_bytes(raw)) &&
        padded(stored) <= slot.left_bytes();
    if (!is_sound) {
      return 0;
    }
    std::span const scratch{instance.scratch};
    std::byte const* from = slot.in_one_piece(stored);
    if (from != nullptr) {
      slot.skip(padded(stored));
    } else {
      slot.read(scratch.data(), stored);
      slot.skip(padded(stored) - stored);
      from = scratch.data();
    }
    // A transfer of the front of a block needs only the front of its last stripe.
    std::size_t const wanted = std::min(raw, memory.size());
    std::span const to = wanted == raw ? memory.first(raw) : scratch.last(stripe_bytes).first(raw);
    if (is_kept) {
      copy_streaming(to.data(), from, raw);
    } else if (!type.decode(instance.codec.get(), {from, stored}, to)) {
      return 0;
    }
    if (wanted != raw) {
      std::memcpy(memory.data(), to.data(), wanted);
    }
    return raw;
  }

  std::mutex* mutex_;
  HostLedger* ledger_;
  bool reads_device_;
  std::size_t part_bytes_;
  std::deque<Kind> kinds_;
  std::deque<Coding> codings_;
  std::deque<Job> jobs_;
  Job* idle_ = nullptr;
  std::size_t failed_reads_ = 0;
};

using SlotCodecs = BasicSlotCodecs<>;

template <class Lazy>
template <class Cursor>
void BasicSlotCodecs<Lazy>::encode_part(Job& job,
                                        Cursor& slot,
                                        std::size_t begin,
                                        std::span<std::byte const> memory) noexcept {
  CodecType const& type = *job.coding->kind->type;
  Instance& instance = job.coding->kind->instance_for(*job.slot, job.access);
  std::scoped_lock const busy{instance.busy};
  std::span const scratch{instance.scratch};
  for (std::size_t done = 0; done < memory.size();) {
    auto const raw = memory.subspan(done, std::min(stripe_bytes, memory.size() - done));
    std::size_t const stored =
        type.encode(instance.codec.get(), raw, scratch.subspan(sizeof(Header)));
    bool const is_kept = type.is_lossless && stored >= raw.size();
    Header header{static_cast<std::uint32_t>(raw.size()),
                  static_cast<std::uint32_t>(is_kept ? raw.size() | as_it_is : stored),
                  begin + done};
    std::memcpy(scratch.data(), &header, sizeof(Header));
    if (is_kept) {
      slot.write(scratch.data(), sizeof(Header));
      slot.write(raw.data(), raw.size());
      slot.skip(padded(raw.size()) - raw.size());
    } else {
      slot.write(scratch.data(), sizeof(Header) + padded(stored));
    }
    done += raw.size();
  }
}

template <class Lazy>
template <class Cursor>
bool BasicSlotCodecs<Lazy>::decode_part(Job& job,
                                        Cursor& slot,
                                        std::size_t begin,
                                        std::span<std::byte> memory) noexcept {
  Instance& instance = job.coding->kind->instance_for(*job.slot, job.access);
  std::scoped_lock const busy{instance.busy};
  for (std::size_t done = 0; done < memory.size();) {
    std::size_t const stripe =
        decode_stripe(job, begin + done, memory.subspan(done), slot, instance);
    if (stripe == 0) {
      return false;
    }
    done += std::min(stripe, memory.size() - done);
  }
  return true;
}

SPILLWAY_COMPILED_PART(class BasicSlotCodecs<>);

}  // namespace spillway::detail
