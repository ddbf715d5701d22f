// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host/slab_map.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace spillway::detail {

/// Where one slab lies: memory, or for the file tier an offset.
struct HostSlab {
  std::byte* memory = nullptr;
  std::uint64_t file_offset = 0;
};

/// One contiguous piece of a slot.
struct HostPiece {
  std::byte* memory = nullptr;
  std::uint64_t file_offset = 0;
  std::size_t bytes = 0;
  std::uint32_t slab = 0;  // of its tier
};

/// What the file tier could not do, where nothing is left that could make up for it.
struct FileFailure {
  int error = 0;
  std::uint64_t file_offset = 0;
  std::size_t bytes = 0;
  bool is_read = false;  // otherwise a write whose bytes found no room in memory either
};

/// Bytes that the file refused, kept in memory instead.
struct RescuedPiece {
  std::uint64_t file_offset = 0;
  std::size_t bytes = 0;
  std::unique_ptr<std::byte[]> data;
};

/// All that the pool knows of one slot.
struct HostSlot {
  BlockId self{};  // its name in the table
  HostTier tier{};
  SlabMap::RunId run{};
  std::size_t bytes = 0;          // rounded up to the tier's granule
  std::size_t written_bytes = 0;  // of the last write that was wholly enqueued
  // What comes before a read of these bytes, and, on top of that, before they are overwritten.
  Fence written;
  Fence used;
  std::uint32_t reads_in_call = 0;  // threads that are enqueueing a read right now
  bool is_write_in_call = false;
  std::uint32_t read_jobs = 0;  // host functions enqueued and not finished
  std::uint32_t write_jobs = 0;
  bool is_given_back = false;  // kept only until the last job has finished
  std::vector<RescuedPiece> rescued;
  std::optional<FileFailure> failure;
  bool is_failure_told = false;  // somebody was thrown it

  /// Why a transfer may not begin, or null.
  [[nodiscard]] char const* refusal(std::size_t transfer_bytes, bool is_read) const noexcept {
    if (transfer_bytes > bytes) {
      return "a transfer is larger than its host slot";
    }
    if (is_write_in_call) {
      return "a host slot is used while another call writes it";
    }
    if (!is_read) {
      return reads_in_call == 0 ? nullptr : "a host slot is written while another call reads it";
    }
    return transfer_bytes <= written_bytes ? nullptr : "more bytes are read than were swapped out";
  }
  /// What the first access of a transfer comes after.
  [[nodiscard]] Fence before(bool is_read) const noexcept {
    return is_read ? written : last_uses();
  }

  void begin_call(bool is_read, std::uint32_t jobs) noexcept {
    if (is_read) {
      ++reads_in_call;
      read_jobs += jobs;
    } else {
      is_write_in_call = true;
      write_jobs += jobs;
    }
  }
  /// Books what was enqueued: up to `host_done`, and with `unused_jobs` of the jobs left over.
  void end_call(bool is_read,
                std::uint32_t unused_jobs,
                Fence const& host_done,
                std::size_t finished_bytes) noexcept {
    if (is_read) {
      --reads_in_call;
      read_jobs -= unused_jobs;
      used.add(host_done);
      return;
    }
    is_write_in_call = false;
    write_jobs -= unused_jobs;
    if (!host_done.is_empty()) {
      written = host_done;  // which comes after `before`, and so after all earlier uses
      used.clear();
      written_bytes = finished_bytes;
    }
  }

  [[nodiscard]] Fence last_uses() const noexcept {
    Fence all = written;
    all.add(used);
    return all;
  }
};

/// A slot's place, resolved once so that transfers need no lock to walk it.
struct HostRoute {
  HostSlot* slot = nullptr;
  std::array<HostPiece, SlabMap::max_extents> pieces{};
  std::size_t piece_count = 0;
};

}  // namespace spillway::detail
