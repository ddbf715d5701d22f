// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/block_list.hpp>
#include <spillway/core/types.hpp>

#include <cstdint>

namespace spillway::detail {

/// Lists the resident blocks that have a slot in the host pool. Their slots can be freed when the
/// pool is full: those that hold outdated bytes, and those that hold valid bytes, which only save a
/// copy when the block leaves.
///
/// A block that has left the device or lost its slot stays listed until `each` reaches it.
///
/// Cost     every call O(1) but `reserve` and `each`; 32 bytes for each block index.
/// Threads  thread-unsafe: `Blocks` owns it, under the lock.
class KeptCopies {
 public:
  /// What `each` does after visiting a block: keeps it listed, removes it, or ends.
  enum class Visited : std::uint8_t { stays, goes, ends_the_visit };

  /// Makes room for a block. @throws std::bad_alloc, with no effect
  void reserve(BlockId id) {
    stale_.reserve(id);
    valid_.reserve(id);
  }

  /// Lists a block for which room was reserved. @param is_valid  the slot holds the block's bytes
  void note(BlockId id, bool is_valid) noexcept {
    erase(id);
    (is_valid ? valid_ : stale_).push_back(id);
  }
  void erase(BlockId id) noexcept {
    stale_.erase(id);
    valid_.erase(id);
  }

  /// Calls `visit(id)` for the blocks whose slot holds outdated bytes, and then for those whose
  /// slot is valid, which must be copied again if they lose it. Within both, the block that was
  /// noted last comes first, since it is the likeliest to be written or freed before it leaves.
  template <class Visit>
  void each(Visit visit) {
    for (BlockList* const list : {&stale_, &valid_}) {
      for (BlockId id = list->back(); id != BlockId{};) {
        BlockId const next = list->before(id);
        Visited const visited = visit(id);
        if (visited == Visited::goes) {
          list->erase(id);
        } else if (visited == Visited::ends_the_visit) {
          return;
        }
        id = next;
      }
    }
  }

 private:
  BlockList stale_;
  BlockList valid_;
};

}  // namespace spillway::detail
