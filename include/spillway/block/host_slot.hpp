// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/block/slab_map.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/host_tier.hpp>
#include <spillway/core/types.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace spillway {

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

}  // namespace spillway
