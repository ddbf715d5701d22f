// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace spillway {

/// The tiers of the host pool, in which swapped-out bytes are stored, fastest first.
enum class HostTier : std::uint8_t {
  pinned,    ///< page-locked memory: the device copies straight into it
  pageable,  ///< ordinary memory, reached through pinned staging
  file       ///< a file, meant for NVMe, reached through pinned staging
};
inline constexpr std::size_t host_tier_count = 3;

/// Names one slot of a `HostSwapPool` from `try_take` to `give_back`; `HostSlotId{}` names none.
///
/// The pool recognises an id that was given back, or that came from another pool.
enum class HostSlotId : std::uint64_t {};

/// Names a codec together with the tag of the blocks that it is used for, inside one
/// `HostSwapPool`. `CodingId{}` stands for no codec.
enum class CodingId : std::uint32_t {};

/// The result of a swap-out or swap-in.
struct Transfer {
  Fence device_done;  ///< after it the device range may be reused (out) or read (in)
  Fence host_done;    ///< after it the host copy is complete (out) or may be overwritten (in)
};

/// The state of one transfer among several that are enqueued together.
enum class TransferState : std::uint8_t {
  waiting,  ///< nothing was enqueued: slot and device range are as they were
  torn,     ///< some of it may have been enqueued, all of it before `done`
  enqueued
};

/// One transfer for `HostSwapPool::write_all` or `read_all`.
struct TransferRequest {
  HostSlotId slot{};
  std::byte* device = nullptr;  ///< where on the device the bytes come from, or go to
  std::size_t bytes = 0;
  /// The work for which the transfer waits before it uses the device range, besides the work that
  /// is already on its stream.
  Fence after{};
  /// Device ranges with the same number lie in one reservation, so that those that touch can be
  /// copied as one. 0: the reservation is not known.
  std::size_t reservation = 0;
  // The results, set by the pool.
  TransferState state = TransferState::waiting;
  Transfer done{};

  void forget_answer() noexcept {
    state = TransferState::waiting;
    done = {};
  }
};

/// Options of a `HostSwapPool`: which tiers it has and how large they may become. A tier of 0 bytes
/// does not exist.
struct HostPoolOptions {
  std::size_t pinned_bytes = 0;
  std::size_t pageable_bytes = 0;
  std::size_t file_bytes = 0;
  /// The path of a folder, in which a file without a name is made, or of a file that must not exist
  /// yet. The file is removed with the pool. A forked child cannot use it: reads fail there with
  /// `FileTierError`.
  std::string file{};
  /// How much of the pinned tier to reserve at construction; the rest is pinned when it is needed.
  std::size_t initial_pinned_bytes = 0;
  /// The largest slab, unless a single slot needs more. While a tier holds less than 32 times this,
  /// it grows by slabs of 1/32 of what it holds, at least 2 MiB.
  std::size_t slab_bytes = 64_MiB;
  /// Number and size of the pinned staging chunks of each direction, for the two slower tiers. With
  /// more chunks more transfers overlap; smaller ones shorten the time until the first chunk is
  /// full and the file can begin. At most 65536 chunks of at most 1 GiB.
  std::size_t staging_chunks = 12;
  std::size_t staging_bytes = 2_MiB;
  std::optional<int> numa_node{};  ///< for host memory; no value: the device's; -1: any
  /// Keep the file out of the page cache (O_DIRECT), if the file system supports that.
  bool file_direct_io = false;
  /// Compare what is read from the file with a checksum of what was written, in programs that link
  /// `spillway::checksums`.
  bool file_checksums = true;
};

/// One tier as it is now. Bytes are rounded up to the granule.
struct HostTierStats {
  std::size_t capacity_bytes = 0;
  std::size_t reserved_bytes = 0;  ///< taken from the system
  std::size_t used_bytes = 0;      ///< of which in slots
  std::size_t peak_used_bytes = 0;
  std::size_t largest_free_bytes = 0;  ///< in one piece; a slot may be made of several
  std::size_t slot_count = 0;
  std::size_t numa_bound_bytes = 0;  ///< pageable memory that the system agreed to place
  /// A write failed: slots stay, new ones go to other tiers until a write has succeeded.
  bool is_failed = false;
};

/// All tiers as they are now, and what went wrong so far.
struct HostPoolStats {
  std::array<HostTierStats, host_tier_count> tiers{};  ///< by `HostTier`
  std::size_t failed_writes = 0;                       ///< pieces kept in memory instead
  std::size_t failed_reads = 0;                        ///< pieces that are lost
  std::size_t rescued_bytes = 0;           ///< held in memory because the file refused them
  std::uint64_t encoded_raw_bytes = 0;     ///< what codecs were given so far
  std::uint64_t encoded_stored_bytes = 0;  ///< what they made of it
  std::size_t codecs_given_up = 0;         ///< pairs of codec and tag that save nothing at present
  std::uint64_t staging_waits = 0;  ///< times a thread waited for another to finish enqueueing
  bool is_file_direct = false;      ///< `file_direct_io` was asked for and is in effect
  bool is_file_checked = false;     ///< `file_checksums` was asked for and is in effect
  std::string_view file_calls{};    ///< what carries bytes to the file: "io_uring", for example

  [[nodiscard]] HostTierStats const& tier(HostTier tier) const noexcept {
    return tiers[static_cast<std::size_t>(tier)];
  }
};

}  // namespace spillway
