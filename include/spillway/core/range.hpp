// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace spillway {

/// Names one taken range of an arena. Survives moves; the number is used again after `give_back`.
enum class RangeId : std::uint32_t {};

/// What a range of an arena is.
///
/// All but `free` and `taken` last from `begin_moves` to `commit_moves`: `claimed` bytes are free
/// ones that moves need, `moving` blocks are on their way, and a block given back on its way is
/// `leaving`.
enum class RangeState : std::uint8_t { free, claimed, taken, moving, leaving };

/// A range that was taken. Whoever uses it first makes its stream wait for `fence`.
struct Placement {
  RangeId range{};
  std::byte* address = nullptr;
  Fence fence;
};

/// What has to be waited for before a range is used that memory was just mapped to.
struct MappedRange {
  Fence fence;                   ///< has to come before the first use of the range
  std::uint64_t host_waits = 0;  ///< how often the host waited for the memory's last use elsewhere
};

/// What `for_each_range` shows of one range.
struct RangeView {
  std::byte* address = nullptr;
  std::size_t size_bytes = 0;
  std::size_t segment = 0;  ///< in order of address, from 0
  RangeState state = RangeState::free;
  BlockId owner{};  ///< of a range that is taken or moving
  RangeId range{};  ///< likewise
};

/// One copy inside the device. Source and destination may overlap; `enqueue_move` sees to that.
struct Move {
  RangeId range{};
  BlockId owner{};
  std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::size_t bytes = 0;
  /// Last uses of the destination. The moving stream waits for it and for the block's own last
  /// uses.
  Fence fence;
};

/// Neighbouring ranges that become one free range once their blocks are evicted.
struct EvictionWindow {
  std::byte* address = nullptr;
  std::size_t bytes = 0;
  std::uint64_t cost = 0;       ///< sum of what evicting the blocks costs
  std::vector<BlockId> owners;  ///< of the blocks in it, in order of address
};

/// Says that a search looks at all ranges, where it says at how many.
inline constexpr std::size_t all_ranges = std::numeric_limits<std::size_t>::max();

/// Scratch for moves that overlap themselves; may be empty.
struct Bounce {
  std::byte* address = nullptr;
  std::size_t bytes = 0;
};

/// A reservation that left an arena. Its memory may be released once `fence` has passed.
struct Segment {
  void* address = nullptr;
  std::size_t bytes = 0;
  Fence fence;
};

}  // namespace spillway
