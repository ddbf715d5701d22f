// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>
#include <spillway/host/host_tier.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace bandwidth {

using namespace spillway::literals;

enum class Direction : std::uint8_t { out, in, both };

/// What carries the bytes: the host pool on the prefetcher's streams, or an allocator's `swap_out`
/// and `swap_in`, block by block.
enum class Through : std::uint8_t { streams, allocator };

/// How the blocks of one transfer lie on the device.
enum class Layout : std::uint8_t {
  one,        ///< there is only one
  packed,     ///< side by side
  scattered,  ///< in random order, with room between them
  apart       ///< scattered, and their slots lie in another random order in the file
};

/// How blocks are written while they are away.
enum class CodecName : std::uint8_t { identity, zero_bitmap, bfloat16 };

struct Settings {
  Through through = Through::streams;
  CodecName codec = CodecName::identity;
  double zeros = 0.5;  // share of zeros among the float32 elements that a codec is given
  std::size_t min_size_bytes = 4_KiB;
  std::size_t max_size_bytes = 0;    // 0: 1 GiB, and 64 MiB on the simulated device
  std::size_t total_bytes = 16_MiB;  // of one transfer, if its blocks are smaller
  std::size_t repetitions = 9;
  std::vector<Direction> directions{Direction::out, Direction::in, Direction::both};
  std::vector<spillway::HostTier> tiers{spillway::HostTier::pinned, spillway::HostTier::pageable};
  std::string file_folder;
  bool has_file_checksums = false;
  std::uint64_t seed = 1;
  std::size_t staging_bytes = spillway::HostPoolOptions{}.staging_bytes;
  std::size_t staging_chunks = spillway::HostPoolOptions{}.staging_chunks;
  // Of the simulated device; 0: as fast as it goes.
  double link_gbps = 0;
  double copy_latency_us = 0;
  // Of a GPU.
  bool has_copy_kernel = false;
};

/// 1e9 bytes a second; 0 if it was not measured.
struct Rate {
  double median = 0;
  double best = 0;  ///< the shortest of the times: what a machine with something else to do hides
  double cpu_s_per_gb = 0;  ///< processor time of all threads, at the median
};

struct Row {
  Direction direction{};
  spillway::HostTier tier{};
  Layout layout{};
  std::size_t size_bytes = 0;
  std::size_t count = 0;    ///< blocks, each way
  double stored_share = 1;  ///< of each byte that leaves, what is stored of it
  Rate ours{};              ///< both ways together
  Rate raw{};               ///< one plain copy of as many bytes, or plain file I/O
  Rate naive{};             ///< a copy and an event for each of several blocks
  Rate copies{};        ///< file tier: the device's copies between pinned memory and itself, alone
  Rate memcpy_alone{};  ///< one thread copying as many bytes between two places in memory
  bool is_file_direct = false;
  bool is_file_checked = false;
  std::string file_calls;
};

using Report = std::function<void(Row const&)>;

/// On the simulated device, with real threads and real copies.
void measure_on_sim(Settings const& settings, Report const& report);
/// On a GPU. @throws std::runtime_error where the program was built without CUDA, or without nvcc
/// and a kernel is to copy
void measure_on_cuda(Settings const& settings, Report const& report);

}  // namespace bandwidth
