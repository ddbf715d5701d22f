// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/sort.hpp>
#include <spillway/core/types.hpp>
#include <spillway/stream/copy_batch.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <exception>
#include <functional>
#include <new>
#include <span>
#include <utility>
#include <vector>

namespace spillway {
namespace detail {

/// Blocks that lie side by side, move by the same distance and are copied as if they were one.
struct MergedMove {
  std::byte* to = nullptr;
  std::byte* from = nullptr;
  std::size_t bytes = 0;
  std::size_t moves = 0;  ///< number of moves of the plan that were merged, one for each block
  std::size_t after = 0;  ///< merged moves with a lower number must be in earlier batches

  [[nodiscard]] std::size_t distance() const noexcept {
    return static_cast<std::size_t>(from < to ? to - from : from - to);
  }
  [[nodiscard]] bool overlaps_itself() const noexcept { return distance() < bytes; }
};

/// How a merged move is copied: through the bounce range or not, and in pieces of how many bytes.
struct MoveCopies {
  bool is_bounced = false;
  std::size_t piece_bytes = 0;
  std::size_t count = 0;  ///< number of copies

  /// Chooses copies that do not overlap and take the least time. Through the bounce range every
  /// byte is copied twice, so that is chosen only if there would be many small pieces otherwise.
  [[nodiscard]] static MoveCopies of(MergedMove const& move, Bounce const& bounce) noexcept {
    std::size_t const piece = std::min(move.bytes, move.distance());
    if (piece == 0) {
      return {};
    }
    auto const pieces_of = [&](std::size_t bytes) { return (move.bytes + bytes - 1) / bytes; };
    MoveCopies const direct{false, piece, pieces_of(piece)};
    if (direct.count > 1 && bounce.bytes != 0) {
      std::size_t const scratch = std::min(move.bytes, bounce.bytes);
      MoveCopies const bounced{true, scratch, 2 * pieces_of(scratch)};
      bool const is_faster = 2 * move.bytes + bounced.count * bytes_for_a_call <
                             move.bytes + direct.count * bytes_for_a_call;
      return is_faster ? bounced : direct;
    }
    return direct;
  }

  /// How many bytes a device could copy in the time that a copy takes to start after the one that
  /// it waits for: 2 us at 2 TB/s.
  static constexpr std::size_t bytes_for_a_call = 4_MiB;
  static constexpr std::size_t most_refusals = 8;  ///< tries to undo a move before a block is lost
};

/// Merges the moves of a plan where possible and divides them into batches. The copies of a batch
/// may run in any order: none of them writes bytes that another one reads or writes.
///
/// Threads  thread-compatible. Keeps its memory for later plans.
template <class = detail::Lazily>
class BasicMergedMoves {
 public:
  /// Reads the moves of a plan.
  ///
  /// @param moves  in order of execution: the destination of each is free after those before it
  /// @throws std::bad_alloc
  /// @cost   O(m) for m moves if their sources and their destinations are in order of address, else
  ///         O(m log m)
  void read(std::span<Move const> moves) {
    merged_.clear();
    for (std::size_t i = 0; i < moves.size(); ++i) {
      if (i == 0 || !try_join(moves[i - 1], moves[i])) {
        merged_.push_back({moves[i].to, moves[i].from, moves[i].bytes, 1, 0});
      }
    }
    if (merged_.size() > 1) {
      find_order();
    }
  }

  [[nodiscard]] std::size_t size() const noexcept { return merged_.size(); }

  /// Returns the batch that begins with merged move number `first`. A move that overlaps itself is
  /// a batch of its own.
  [[nodiscard]] std::span<MergedMove const> batch(std::size_t first) const noexcept {
    std::size_t end = first + 1;
    while (!merged_[first].overlaps_itself() && end < merged_.size() &&
           merged_[end].after <= first && !merged_[end].overlaps_itself()) {
      ++end;
    }
    return std::span{merged_}.subspan(first, end - first);
  }

 private:
  /// The addresses that a merged move reads, or those that it writes.
  struct Side {
    std::byte const* begin;
    std::byte const* end;
    std::size_t move;
    bool is_written;
  };

  /// Tries to merge `next` into the last merged move, of which `last` is the last part.
  bool try_join(Move const& last, Move const& next) noexcept {
    if (last.from_segment != next.from_segment || last.to_segment != next.to_segment) {
      return false;
    }
    MergedMove& move = merged_.back();
    bool const is_above = next.from == move.from + move.bytes && next.to == move.to + move.bytes;
    bool const is_below = next.from + next.bytes == move.from && next.to + next.bytes == move.to;
    // True if `next` reads what the merged move writes: a block that is moved twice.
    bool const moves_on = next.from < move.to + move.bytes && move.to < next.from + next.bytes;
    if ((!is_above && !is_below) || moves_on) {
      return false;
    }
    move.from = is_below ? next.from : move.from;
    move.to = is_below ? next.to : move.to;
    move.bytes += next.bytes;
    ++move.moves;
    return true;
  }

  /// Sets `after` of each merged move: goes through all reads and writes in order of address and
  /// compares those that overlap.
  void find_order() {
    reads_.clear();
    writes_.clear();
    for (std::size_t i = 0; i < merged_.size(); ++i) {
      MergedMove const& move = merged_[i];
      reads_.push_back({move.from, move.from + move.bytes, i, false});
      writes_.push_back({move.to, move.to + move.bytes, i, true});
    }
    // Usually sorted already: blocks that slide down or go to gaps of their size are.
    auto const is_lower = [](Side const& a, Side const& b) {
      return std::less<>{}(a.begin, b.begin);
    };
    sort_runs(reads_, is_lower);
    sort_runs(writes_, is_lower);
    open_.clear();
    auto read = reads_.cbegin();
    auto write = writes_.cbegin();
    while (write != writes_.cend()) {
      bool const is_read = read != reads_.cend() && is_lower(*read, *write);
      compare_with_open(is_read ? *read++ : *write++);
    }
    std::for_each(read, reads_.cend(), [this](Side const& side) { compare_with_open(side); });
  }

  /// Compares `side` with the earlier sides that overlap it, and adds it to `open_`.
  void compare_with_open(Side const& side) {
    for (std::size_t i = 0; i < open_.size();) {
      Side const& other = open_[i];
      if (other.end <= side.begin) {
        open_[i] = open_.back();
        open_.pop_back();
        continue;
      }
      if (other.move != side.move && (other.is_written || side.is_written)) {
        auto const [first, second] = std::minmax(other.move, side.move);
        merged_[second].after = std::max(merged_[second].after, first + 1);
      }
      ++i;
    }
    open_.push_back(side);
  }

  std::vector<MergedMove> merged_;
  // Used by `find_order` only.
  std::vector<Side> reads_;
  std::vector<Side> writes_;
  std::vector<Side> open_;  // the sides that end after the beginning of the present one
};

using MergedMoves = BasicMergedMoves<>;

/// How many moves are merged at a time, which also limits a batch. The host needs about 100 us for
/// so many.
inline constexpr std::size_t moves_at_once = 8192;

/// Enqueues the copies of a move that overlaps itself. If the device refuses a copy, the pieces
/// that were moved are moved back.
///
/// @param   moved_bytes  set if BlockLost is thrown: so many bytes of the move, on the side that it
///                       moves to, are at their destination; the others are where they were
/// @throws  what the device has thrown, with the blocks where they were; BlockLost if it has also
///          refused to move pieces back, several times
template <DeviceApi Device>
void enqueue_slide(Device& device,
                   MergedMove const& move,
                   typename Device::stream_type stream,
                   Bounce const& bounce,
                   std::size_t& moved_bytes) {
  MoveCopies const copies = MoveCopies::of(move, bounce);
  // Made while there is memory: a torn block must not be taken for one that is where it was.
  BlockLost const lost{"a block was torn while it was moved, and there is no memory to say why"};
  bool const is_up = move.from < move.to;
  auto const carry = [&](std::byte* to, std::byte const* from, std::size_t bytes) {
    if (copies.is_bounced) {
      device.copy(bounce.address, from, bytes, CopyKind::on_device, stream);
      from = bounce.address;
    }
    device.copy(to, from, bytes, CopyKind::on_device, stream);
  };
  // Piece number `i` and its place in the move; the last one may be shorter.
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
  } catch (std::exception const&) {  // a device whose streams are queues may also lack memory
    std::size_t refusals = 0;
    while (moved != 0) {
      auto const [at, bytes] = piece(moved - 1);
      try {
        carry(move.from + at, move.to + at, bytes);
        --moved;
      } catch (std::exception const& error) {
        if (++refusals == MoveCopies::most_refusals) {
          moved_bytes = moved * copies.piece_bytes;
          try {
            throw BlockLost{detail::Text{"a block was torn while it was moved: "} + error.what()};
          } catch (std::bad_alloc const&) {
            throw lost;
          }
        }
      }
    }
    throw;
  }
}

}  // namespace detail

/// Enqueues the moves of a plan with few device calls, and as copies that do not overlap
/// themselves.
///
/// Adjacent blocks that move by the same distance are copied as one. Copies that may run in any
/// order are enqueued as one batch, if the device takes batches; a copy that writes where an
/// earlier one reads begins the next batch. A move by less than its length is made in pieces that
/// are no longer than the distance, beginning at the side to which it moves, or through `bounce` if
/// there would be many pieces. If the device refuses a copy, the blocks of that batch, or of that
/// move, are intact at their old addresses.
///
/// If there are very many moves, the first `detail::moves_at_once` are enqueued before the others
/// are examined, so that the device does not wait for the host.
///
/// Example: of 1024 blocks of 1 KiB every second one is gone, and the others slide down. The second
/// one goes to where the first was, so it must wait for the first; the third goes into a gap, and
/// the fourth to where the second was. These are 10 batches, each twice as long as the one before.
///
/// @param bounce  scratch that nothing else uses meanwhile; may be empty
/// @param done    set to the number of moves that are enqueued, from the front; also if this throws
/// @param before  called with the number of each move, in order, before it is enqueued: makes
///                `stream` wait for the last uses of its destination and of its block
/// @throws  DeviceError, std::bad_alloc, what `before` throws; blocks that were not moved are then
///          intact where they were. BlockLost if move number `done` was made in part and could not
///          be undone, so that its block is lost
/// @stream  enqueues the copies; does not wait
/// @cost    O(copies) and that of `detail::MergedMoves` for m moves
template <DeviceApi Device, std::invocable<std::size_t> Before>
void enqueue_moves(Device& device,
                   std::span<Move const> moves,
                   typename Device::stream_type stream,
                   Bounce bounce,
                   std::size_t& done,
                   Before before) {
  done = 0;
  detail::MergedMoves merged;
  detail::CopyBatch copies;
  while (done < moves.size()) {
    merged.read(moves.subspan(done, std::min(detail::moves_at_once, moves.size() - done)));
    for (std::size_t at = 0; at < merged.size();) {
      std::span<detail::MergedMove const> const batch = merged.batch(at);
      std::size_t end = done;
      for (detail::MergedMove const& move : batch) {
        end += move.moves;
      }
      for (std::size_t i = done; i < end; ++i) {
        before(i);
      }
      if (batch.front().overlaps_itself()) {
        std::size_t moved_bytes = 0;
        try {
          detail::enqueue_slide(device, batch.front(), stream, bounce, moved_bytes);
        } catch (BlockLost const&) {
          for (; moves[done].bytes <= moved_bytes; ++done) {
            moved_bytes -= moves[done].bytes;
          }
          if (moved_bytes == 0) {
            throw DeviceError{"a move was refused half-way, between two blocks"};  // both are whole
          }
          throw;
        }
      } else {
        copies.clear();
        for (detail::MergedMove const& move : batch) {
          copies.add(move.to, move.from, move.bytes, false);
        }
        copies.enqueue(device, CopyKind::on_device, stream);
      }
      done = end;
      at += batch.size();
    }
  }
}

SPILLWAY_COMPILED_PART(class detail::BasicMergedMoves<>);

}  // namespace spillway
