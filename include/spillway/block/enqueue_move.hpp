// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/types.hpp>

#include <algorithm>
#include <cstddef>

namespace spillway {

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
};

/// Enqueues the copies of one move, none of which overlaps itself.
///
/// A block that slides by less than its length goes in pieces no longer than the slide, from the
/// side it moves to; where those would be more than 16, through `bounce`.
///
/// @pre     `stream` waits for `move.fence`, for the block's last uses and for those of `bounce`
/// @throws  DeviceError; if some copies of a move that overlaps itself had been enqueued by then,
///          the block's bytes are lost
/// @stream  enqueues the copies; does not wait
/// @return  how many copies were enqueued
/// @cost    O(copies)
template <DeviceApi Device>
std::size_t enqueue_move(Device& device,
                         Move const& move,
                         typename Device::stream_type stream,
                         Bounce bounce = {}) {
  MoveCopies const copies = MoveCopies::of(move, bounce);
  bool const is_up = move.from < move.to;
  for (std::size_t done = 0; copies.count != 0 && done < move.bytes;) {
    std::size_t const bytes = std::min(copies.piece_bytes, move.bytes - done);
    std::size_t const at = is_up ? move.bytes - done - bytes : done;
    if (copies.is_bounced) {
      device.copy(bounce.address, move.from + at, bytes, CopyKind::on_device, stream);
      device.copy(move.to + at, bounce.address, bytes, CopyKind::on_device, stream);
    } else {
      device.copy(move.to + at, move.from + at, bytes, CopyKind::on_device, stream);
    }
    done += bytes;
  }
  return copies.count;
}

}  // namespace spillway
