// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace spillway {
namespace detail {

/// What a plan holds of its arena's ranges between begin and commit. In granules.
struct MoveClaims {
  /// Free bytes the plan needs: `count` granules from `first`, at or after the start of `node`.
  struct Piece {
    std::uint32_t node = 0;
    std::uint32_t first = 0;
    std::uint32_t count = 0;
  };
  /// A step of the plan, and where a block is after the steps that were made.
  struct Step {
    std::uint32_t node = 0;
    std::uint32_t first = 0;
  };
  /// Neighbouring claimed ranges and moving blocks, with what lies around them.
  struct Section {
    std::uint32_t first = 0;
    std::uint32_t end = 0;
    std::uint32_t prev = 0;
    std::uint32_t next = 0;
    std::uint16_t segment = 0;
    Fence fence;
  };

  std::vector<Piece> pieces;  // in order of address
  std::vector<Step> steps;    // in order of execution
  std::uint64_t version = 0;  // of the arena when the plan was made
  bool is_begun = false;

  std::vector<std::uint32_t> nodes;  // claimed and moving, in order of address
  std::vector<Step> blocks;          // one for each moving block
  std::vector<Section> sections;
  std::vector<std::uint32_t> spare;  // nodes for the free ranges that will be left
};

/// How a move is copied: through scratch or not, and in pieces of how many bytes.
struct MoveCopies {
  bool is_bounced = false;
  std::size_t piece_bytes = 0;
  std::size_t count = 0;  ///< copies in all

  /// The fewest copies that never overlap. Through scratch every byte is copied twice, so that is
  /// chosen only where the pieces would be too many.
  [[nodiscard]] static MoveCopies of(Move const& move, Bounce const& bounce) noexcept {
    auto const distance =
        static_cast<std::size_t>(move.from < move.to ? move.to - move.from : move.from - move.to);
    auto const pieces_of = [&](std::size_t bytes) { return (move.bytes + bytes - 1) / bytes; };
    std::size_t const piece = std::min(move.bytes, distance);
    if (piece == 0) {
      return {};
    }
    MoveCopies const direct{false, piece, pieces_of(piece)};
    if (direct.count > most_pieces && bounce.bytes != 0) {
      std::size_t const scratch = std::min(move.bytes, bounce.bytes);
      MoveCopies const bounced{true, scratch, 2 * pieces_of(scratch)};
      return bounced.count < direct.count ? bounced : direct;
    }
    return direct;
  }

  static constexpr std::size_t most_pieces = 16;
  static constexpr std::size_t most_refusals = 8;  ///< of copies back, before a block is given up
};

}  // namespace detail

/// Blocks to move so that one free range becomes large enough, in order of execution.
///
/// A plan is begun in the critical section that made it, and committed once. In between, whoever
/// moves makes its stream wait for `fence`, then for each move waits for `move.fence` and the
/// block's last uses and enqueues the move.
struct CompactionPlan {
  std::vector<Move> moves;      ///< a block may be moved twice
  std::size_t cost_bytes = 0;   ///< sum over the moves
  std::size_t makes_bytes = 0;  ///< size of the free range afterwards
  Bounce bounce;                ///< scratch, from begin to commit; empty if another plan has it
  Fence fence;                  ///< last uses of the scratch
  detail::MoveClaims claims;    ///< the arena's own
};

/// Enqueues the copies of one move, none of which overlaps itself.
///
/// A block that slides by less than its length goes in pieces no longer than the slide, from the
/// side it moves to; where those would be more than 16, through `bounce`. If the device refuses a
/// copy, the pieces that were moved are moved back: the block stays, whole, where it was.
///
/// @pre     `stream` waits for `move.fence`, for the block's last uses and for those of `bounce`
/// @throws  DeviceError with the block where it was; BlockLost if the way back was refused too,
///          again and again
/// @stream  enqueues the copies; does not wait
/// @return  how many copies were enqueued
/// @cost    O(copies)
template <DeviceApi Device>
std::size_t enqueue_move(Device& device,
                         Move const& move,
                         typename Device::stream_type stream,
                         Bounce bounce = {}) {
  detail::MoveCopies const copies = detail::MoveCopies::of(move, bounce);
  bool const is_up = move.from < move.to;
  auto const carry = [&](std::byte* to, std::byte const* from, std::size_t bytes) {
    if (copies.is_bounced) {
      device.copy(bounce.address, from, bytes, CopyKind::on_device, stream);
      from = bounce.address;
    }
    device.copy(to, from, bytes, CopyKind::on_device, stream);
  };
  // Piece number `i` and its place in the block; the last one may be shorter.
  auto const piece = [&](std::size_t i) {
    std::size_t const done = i * copies.piece_bytes;
    std::size_t const bytes = std::min(copies.piece_bytes, move.bytes - done);
    return std::pair{is_up ? move.bytes - done - bytes : done, bytes};
  };
  std::size_t moved = 0;
  try {
    for (; copies.count != 0 && moved * copies.piece_bytes < move.bytes; ++moved) {
      auto const [at, bytes] = piece(moved);
      carry(move.to + at, move.from + at, bytes);
    }
  } catch (DeviceError const&) {
    std::size_t refusals = 0;
    while (moved != 0) {
      auto const [at, bytes] = piece(moved - 1);
      try {
        carry(move.from + at, move.to + at, bytes);
        --moved;
      } catch (DeviceError const& error) {
        if (++refusals == detail::MoveCopies::most_refusals) {
          throw BlockLost{std::string{"a block was torn while it was moved: "} + error.what()};
        }
      }
    }
    throw;
  }
  return copies.count;
}

}  // namespace spillway
