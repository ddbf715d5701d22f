// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace spillway {

/// Names one taken range of an arena. It survives moves; its number is reused after `give_back`.
enum class RangeId : std::uint32_t {};

/// The state of a range of an arena.
///
/// Three states last from `begin_moves` to `commit_moves` only: a `claimed` range is free bytes
/// that the moves need, a `moving` one has a block that is being moved, and it becomes `leaving` if
/// the block is given back meanwhile. A `hole` is addresses that have no memory behind them.
enum class RangeState : std::uint8_t { free, claimed, taken, moving, leaving, hole };

/// A range that was taken. Its first user makes its stream wait for `fence`.
struct Placement {
  RangeId range{};
  std::byte* address = nullptr;
  Fence fence;
};

/// The result of mapping memory to a range, with what must be waited for before the range is used.
struct MappedRange {
  Fence fence;                   ///< the first user of the range waits for it
  std::uint64_t host_waits = 0;  ///< how often the host waited for the memory's last use elsewhere
  bool is_refused = false;       ///< the device has not enough memory; nothing is mapped then
};

/// One range, as `for_each_range` shows it.
struct RangeView {
  std::byte* address = nullptr;
  std::size_t size_bytes = 0;
  std::size_t segment = 0;  ///< number of its segment in order of address, from 0
  RangeState state = RangeState::free;
  BlockId owner{};  ///< set if the range is taken or moving
  RangeId range{};  ///< set if the range is taken or moving
};

/// One move of a block inside the device. Source and destination may overlap, which `enqueue_moves`
/// handles.
struct Move {
  RangeId range{};
  BlockId owner{};
  std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::size_t bytes = 0;
  /// The reservations of the device that both places lie in: no copy may cross from one into
  /// another, though their addresses may touch.
  std::uint16_t from_segment = 0;
  std::uint16_t to_segment = 0;
  /// The last uses of the destination. The stream that moves waits for them and for the block's
  /// own.
  Fence fence;
};

/// Neighbouring ranges that become one free range once their blocks are evicted.
struct EvictionWindow {
  std::byte* address = nullptr;
  std::size_t bytes = 0;
  std::uint64_t cost = 0;       ///< cost of evicting all blocks in it
  std::vector<BlockId> owners;  ///< the blocks in it, in order of address
};

/// Makes a search look at all ranges, given as the number of ranges to look at.
inline constexpr std::size_t all_ranges = std::numeric_limits<std::size_t>::max();

/// Scratch memory for moves that overlap themselves. It may be empty.
struct Bounce {
  std::byte* address = nullptr;
  std::size_t bytes = 0;
};

/// Device memory that joins an arena or leaves it. What leaves may be released once `fence` has
/// passed.
struct Segment {
  void* address = nullptr;
  std::size_t bytes = 0;
  Fence fence;
};

}  // namespace spillway
