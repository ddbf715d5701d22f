// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_tier.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace spillway::detail {

/// Where a block's bytes are, whether there are any, and whether they are in transit.
///
/// | state          | device range | meaning                      | may become                   |
/// |----------------|--------------|------------------------------|------------------------------|
/// | `vacant`       | no           | nothing was written yet      | `blank`                      |
/// | `on_host`      | no           | the only valid copy is in    | `swapping_in`, `filling`,    |
/// |                |              | the host pool                | `dropped`                    |
/// | `dropped`      | no           | the bytes are nowhere; the   | `filling`                    |
/// |                |              | block's recipe makes them    |                              |
/// | `lost_away`    | no           | the device lost the bytes; a | `lost`                       |
/// |                |              | write makes the block whole  |                              |
/// | `swapping_in`  | no           | a thread enqueues the copy   | `arriving`, `prefetched`, or |
/// |                |              | to a range that the block    | back                         |
/// |                |              | will get                     |                              |
/// | `blank`        | yes          | nothing was written yet      | `resident`, `swapping_out`,  |
/// |                |              |                              | `moving`                     |
/// | `resident`     | yes          | the bytes are on the device  | `swapping_out`,              |
/// |                |              | and have been used there     | `copying_out`, `moving`      |
/// | `arriving`     | yes          | swapped in and not used      | `resident`, `swapping_out`,  |
/// |                |              | since; the copy may be in    | `copying_out`, `moving`      |
/// |                |              | flight                       |                              |
/// | `prefetched`   | yes          | as `arriving`, but swapped   | `arriving`, `swapping_out`,  |
/// |                |              | in ahead of need             | `copying_out`, `moving`      |
/// | `filling`      | yes          | to be overwritten; until it  | `resident`, `arriving`,      |
/// |                |              | is, the host has the only    | `on_host`, `dropped`,        |
/// |                |              | copy, or only the recipe can | `moving`                     |
/// |                |              | make the bytes               |                              |
/// | `lost`         | yes          | the device lost the bytes; a | `resident`, `swapping_out`,  |
/// |                |              | write makes the block whole  | `moving`                     |
/// | `swapping_out` | yes          | a thread takes the block off | `on_host`, `vacant`,         |
/// |                |              | the device; dirty bytes are  | `lost_away`, `dropping`, or  |
/// |                |              | copied to the host           | back                         |
/// | `dropping`     | yes          | a thread takes the block off | `dropped` or back            |
/// |                |              | the device; its recipe will  |                              |
/// |                |              | make the bytes               |                              |
/// | `copying_out`  | yes          | a thread enqueues a copy to  | back                         |
/// |                |              | the host ahead of need       |                              |
/// | `moving`       | yes          | a thread enqueues a move     | `lost`, `on_host`,           |
/// |                |              | inside the device            | `dropped`, or back           |
///
/// *Back* is the last state that was not in transit. A state in transit lasts only while one thread
/// makes device calls without the lock; other threads leave the block alone or wait. States are
/// decided when work is enqueued, not when it has run: fences order what follows.
///
/// The order of the enumerators matters to the functions below.
enum class BlockState : std::uint8_t {
  vacant,
  on_host,
  dropped,
  lost_away,
  swapping_in,
  blank,
  resident,
  arriving,
  prefetched,
  filling,
  lost,
  swapping_out,
  dropping,
  copying_out,
  moving
};
inline constexpr std::size_t block_state_count = 15;

/// Whether a block in this state has a device range.
[[nodiscard]] constexpr bool is_resident(BlockState state) noexcept {
  return state >= BlockState::blank;
}
/// Whether a thread is making device calls for a block in this state without the lock.
[[nodiscard]] constexpr bool is_in_transit(BlockState state) noexcept {
  return state >= BlockState::swapping_out || state == BlockState::swapping_in;
}
/// Whether a lease on a block in this state can be given at once, with nothing to swap in, check or
/// count first.
[[nodiscard]] constexpr bool is_at_hand(BlockState state) noexcept {
  return state >= BlockState::blank && state <= BlockState::arriving;
}
/// Whether a block in this state has bytes somewhere, or a recipe that makes them. Not for states
/// in transit: there it depends on the state before.
[[nodiscard]] constexpr bool has_contents(BlockState state) noexcept {
  return state == BlockState::on_host || state == BlockState::dropped ||
         (state >= BlockState::resident && state <= BlockState::filling);
}

/// Holds the state of one block. Only `become` changes it, and checks it against the table above
/// if assertions are enabled.
class BlockStatus {
 public:
  [[nodiscard]] BlockState state() const noexcept { return state_; }
  /// Returns the state, or the one before the transit if the block is in transit.
  [[nodiscard]] BlockState settled() const noexcept {
    return is_in_transit(state_) ? before_ : state_;
  }

  void become(BlockState next) noexcept {
    SPILLWAY_ASSERT(may_become(next));
    if (is_in_transit(next) && !is_in_transit(state_)) {
      before_ = state_;
    }
    state_ = next;
  }
  /// Ends a transit that changed nothing.
  void go_back() noexcept { become(before_); }

  [[nodiscard]] constexpr bool may_become(BlockState next) const noexcept {
    bool const goes_back = is_in_transit(state_) && next == before_;
    return goes_back || (next_states(state_) & bit(next)) != 0;
  }

  /// The states that may follow `state`, one bit each; going back from a transit is left out.
  [[nodiscard]] static constexpr std::uint32_t next_states(BlockState state) noexcept {
    using enum BlockState;
    switch (state) {
    case vacant:
      return bit(blank);
    case on_host:
      return bit(swapping_in) | bit(filling) | bit(dropped);
    case dropped:
      return bit(filling);
    case lost_away:
      return bit(lost);
    case swapping_in:
      return bit(arriving) | bit(prefetched);
    case blank:
      return bit(resident) | bit(swapping_out) | bit(moving);
    case resident:
      return bit(swapping_out) | bit(copying_out) | bit(moving);
    case arriving:
      return bit(resident) | bit(swapping_out) | bit(copying_out) | bit(moving);
    case prefetched:
      return bit(arriving) | bit(swapping_out) | bit(copying_out) | bit(moving);
    case filling:
      return bit(resident) | bit(arriving) | bit(on_host) | bit(dropped) | bit(moving);
    case lost:
      return bit(resident) | bit(swapping_out) | bit(moving);
    case swapping_out:
      return bit(on_host) | bit(vacant) | bit(lost_away) | bit(dropping);
    case dropping:
      return bit(dropped);
    case copying_out:
      return 0;
    case moving:
      return bit(lost) | bit(on_host) | bit(dropped);
    }
    return 0;
  }
  [[nodiscard]] static constexpr std::uint32_t bit(BlockState state) noexcept {
    return std::uint32_t{1} << static_cast<unsigned>(state);
  }

 private:
  BlockState state_ = BlockState::vacant;
  BlockState before_ = BlockState::vacant;  // the state before the present or the last transit
};

/// How a block's bytes are made again, and which blocks are made again from them. Only blocks that
/// have a recipe or are an operand of one have this.
struct Recipe {
  using Make =
      std::function<void(void const* stream, std::span<void const* const> operands, void* result)>;

  /// A block and its operand: each names the other, and says where the other names it.
  struct Link {
    static constexpr std::uint32_t nowhere = ~std::uint32_t{0};

    BlockId block{};
    std::uint32_t place = nowhere;  // `nowhere`: an operand that the recipe names once more
  };

  Make make;  // empty: the block has no recipe of its own
  std::vector<Link> operands;
  std::vector<Link> dependents;  // blocks whose recipes read this one, in no order
  std::uint64_t cost_ns = 0;
  std::uint32_t needed_by = 0;       // place of the dependent that was last seen to need the bytes
  std::uint32_t readers = 0;         // recomputations that hold the block now
  std::uint32_t changing_lease = 0;  // while suspended: the serial of the lease that may extend it
  std::uint8_t extensions = 0;       // changes in place that `make` repeats
  bool is_suspended = false;         // the block is being changed: `make` makes its old bytes
  bool is_orphan = false;            // freed by its owner, and kept for its dependents
  bool is_looked_at = false;         // listed as an orphan that may no longer be needed
  bool has_parted = false;           // an orphan whose memory was given back
  bool passes_need_on = false;       // an operand may be kept only because this orphan is in need
};

/// All that the pager knows about one block. The parts of the pager read and write it under the
/// lock.
///
/// `Blocks` owns the records. It makes every change of a block's state but two, since `Transfers`
/// begins and ends `copying_out` and `moving`. Beside it, `Transfers` writes the host slot, and the
/// address and the fences of what it has copied or moved; `Leases` writes the counts of leases,
/// and the fences when a lease ends; `Recipes` writes the recipe and counts the writers.
struct BlockRecord {
  std::size_t requested_bytes = 0;
  std::size_t bytes = 0;         // rounded up to the granule
  std::byte* address = nullptr;  // null exactly while the block is not resident
  RangeId range{};               // valid while resident or parked
  HostSlotId host{};             // kept while the block lives: swapping out again needs no search
  Fence written{};               // a read of the bytes must wait for it
  Fence used{};  // overwriting the bytes or reusing the range must wait for it and for `written`
  std::uint32_t leases = 0;        // given out or about to be: the block must not leave
  std::uint32_t granted = 0;       // those given out: the block must not move either
  std::uint32_t lease_serial = 0;  // counts leases that began, and ends while others were held
  std::uint32_t writers = 0;       // acquires under way that end the recipes that make or read it
  CodingId coding{};               // how it is written in the host pool from now on
  void const* filler = nullptr;    // while `filling`: the acquire that will overwrite the block
  BlockStatus status{};
  bool is_host_valid = false;        // the host slot holds the same bytes
  bool is_parked = false;            // not resident, and `range` is kept for its address
  bool is_read_unchecked = false;    // whether the swap-in has lost bytes is not checked yet
  bool is_abandoned = false;         // to be freed when the last lease ends
  bool is_uncounted = false;         // a dropped orphan, which the statistics do not count
  bool is_recipe_priced = false;     // the schedule knows what its recipe costs
  std::unique_ptr<Recipe> recipe{};  // null for most blocks

  [[nodiscard]] BlockState state() const noexcept { return status.state(); }
  [[nodiscard]] bool is_resident() const noexcept { return detail::is_resident(state()); }
  [[nodiscard]] bool is_in_transit() const noexcept { return detail::is_in_transit(state()); }
  /// Whether the block has bytes: a lease may have written some, and they are not lost.
  [[nodiscard]] bool has_contents() const noexcept {
    return detail::has_contents(status.settled());
  }
  [[nodiscard]] bool is_lost() const noexcept {
    return status.settled() == BlockState::lost || status.settled() == BlockState::lost_away;
  }
  [[nodiscard]] bool has_recipe() const noexcept {
    return recipe != nullptr && recipe->make && !recipe->is_suspended;
  }
  /// Whether the bytes exist nowhere, or may soon exist nowhere, so that only the recipe can make
  /// them. A block that is copied to the host does not need its recipe: if the copy fails, the
  /// block stays on the device.
  [[nodiscard]] bool needs_recipe() const noexcept {
    BlockState const now = state();
    return now == BlockState::dropped || now == BlockState::dropping ||
           (status.settled() == BlockState::filling && !is_host_valid);
  }
  /// Whether the block can leave the device without a copy to the host.
  [[nodiscard]] bool is_clean() const noexcept { return is_host_valid || !has_contents(); }
  [[nodiscard]] bool is_leased() const noexcept { return leases != 0; }
  /// The number of leases without those of recomputations, which the block's owner does not know
  /// of.
  [[nodiscard]] std::uint32_t owner_leases() const noexcept {
    return leases - (recipe == nullptr ? 0 : recipe->readers);
  }
  [[nodiscard]] bool can_leave() const noexcept {
    return is_resident() && !is_leased() && !is_in_transit();
  }
  /// Whether the block may move: its address has not been handed out by a lease.
  [[nodiscard]] bool can_move() const noexcept {
    return is_resident() && granted == 0 && !is_in_transit();
  }
  /// Returns the work that must finish before the range is used for something else.
  [[nodiscard]] Fence last_uses() const noexcept {
    Fence all = written;
    all.add(used);
    return all;
  }
};

}  // namespace spillway::detail
