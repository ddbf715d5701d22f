// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/fence.hpp>
#include <spillway/core/range.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace spillway {
namespace detail {

/// The arena's data about a plan: the ranges that it claims between begin and commit. Sizes and
/// places are in granules.
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
  std::uint64_t version = 0;  // version of the arena when the plan was made
  bool is_begun = false;

  std::vector<std::uint32_t> nodes;  // claimed and moving ranges, in order of address
  std::vector<Step> blocks;          // one for each moving block
  std::vector<Section> sections;
  std::vector<std::uint32_t> spare;  // nodes for the free ranges that will be left
};

}  // namespace detail

/// A plan for compaction: which blocks to move, in order of execution, so that one free range
/// becomes large enough.
///
/// A plan must be begun in the critical section in which it was made, and committed once. In
/// between, the thread that moves the blocks makes its stream wait for `fence` and calls
/// `enqueue_moves`.
struct CompactionPlan {
  std::vector<Move> moves;      ///< a block may be moved twice
  std::size_t cost_bytes = 0;   ///< sum of the bytes moved
  std::size_t makes_bytes = 0;  ///< size of the free range afterwards
  Bounce bounce;                ///< scratch, from begin to commit; empty if another plan has it
  Fence fence;                  ///< last uses of the scratch
  detail::MoveClaims claims;    ///< internal data of the arena
};

}  // namespace spillway
