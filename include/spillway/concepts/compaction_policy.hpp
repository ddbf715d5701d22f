// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

namespace spillway {

/// One block in a `Layout`. Sizes and places are in granules.
struct LayoutBlock {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  bool is_fixed = false;  ///< must not move: leased, in transit, or not a block

  [[nodiscard]] constexpr std::uint32_t end() const noexcept { return first + count; }
};

/// The memory of an arena as a compaction policy sees it: blocks in order of address, with free
/// granules between them and up to `end`.
struct Layout {
  std::span<LayoutBlock const> blocks;
  std::uint32_t end = 0;
  /// True if this is only a part of the arena, so that a plan is found quickly. A policy should
  /// then not search long for a better plan.
  bool is_part = false;
  /// How many granules the device moves in the time in which the host looks at one block or gap; 0:
  /// the time of a search does not count.
  double granules_per_look = 0;

  /// Returns how many blocks or gaps the host can look at while the device moves `granules`.
  [[nodiscard]] constexpr std::uint64_t looks_worth(std::uint64_t granules) const noexcept {
    constexpr double most = 1e18;
    return static_cast<std::uint64_t>(
        std::min(most, static_cast<double>(granules) / std::max(granules_per_look, 1 / most)));
  }
};

/// Moves block number `block` of a layout so that it starts at granule `to`.
struct LayoutMove {
  std::uint32_t block = 0;
  std::uint32_t to = 0;

  friend bool operator==(LayoutMove const&, LayoutMove const&) noexcept = default;
};

/// A policy's plan: moves in the order in which they run, and the free range that they make.
struct LayoutPlan {
  std::vector<LayoutMove> moves;
  std::uint64_t cost = 0;   ///< granules moved
  std::uint32_t first = 0;  ///< the range that is free afterwards
  std::uint32_t count = 0;
};

/// Decides which blocks to move so that one free range becomes large enough.
///
/// Given `p` of type `P`, a layout `l`, granules `c` and a budget `b` in granules:
///
/// | expression        | must                                                               |
/// |-------------------|--------------------------------------------------------------------|
/// | `p.plan(l, c, b)` | a plan that makes a free range of `c` granules for at most `b`, or |
/// |                   | nothing                                                            |
/// | `P::moves_blocks` | a constant, false if `plan` never returns a plan: the arena then   |
/// |                   | does not ask                                                       |
///
/// When a move is made, its destination is free or overlaps the block itself. Fixed blocks do not
/// move, and the cost is the sum of the sizes moved. A model works on numbers only, may allocate,
/// and may keep scratch memory. Thread-compatible.
// clang-format off
template <class P>
concept CompactionPolicy =
    std::default_initializable<P> && std::movable<P> &&
    requires(P p, Layout const& l, std::uint32_t c, std::uint64_t b) {
      { p.plan(l, c, b)  } -> std::same_as<std::optional<LayoutPlan>>;
      { P::moves_blocks  } -> std::convertible_to<bool>;
      typename std::bool_constant<static_cast<bool>(P::moves_blocks)>;
    };
// clang-format on

}  // namespace spillway
