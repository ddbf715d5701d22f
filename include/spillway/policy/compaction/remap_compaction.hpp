// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/policy/compaction/no_compaction.hpp>

namespace spillway {

/// Makes room contiguous by mapping scattered pages side by side: no byte moves.
///
/// Chooses `PageArena`; the device must model `VirtualMemoryApi`. Every block takes whole pages (2 MiB
/// on today's GPUs), so this is for programs with few small blocks. A page is mapped elsewhere only
/// after its last use has finished, which may mean a wait on the host. The technique is that of
/// GMLake ("virtual memory stitching", ASPLOS 2024) and of PyTorch's expandable segments.
struct RemapCompaction : NoCompaction {
  static constexpr bool remaps = true;
  static constexpr bool keeps_addresses = false;
};

/// The same, and a block keeps its address for life: while it is swapped out nothing is mapped there.
///
/// For programs that hold raw pointers: the pointer may be used whenever the block is leased.
struct StableAddresses : RemapCompaction {
  static constexpr bool keeps_addresses = true;
};

static_assert(CompactionPolicy<RemapCompaction> && CompactionPolicy<StableAddresses>);

}  // namespace spillway
