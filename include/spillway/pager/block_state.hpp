// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/fence.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_tier.hpp>

#include <cstddef>
#include <cstdint>
#include <thread>

namespace spillway::detail {

/// All that a pager knows of one block.
struct BlockRecord {
  std::size_t requested_bytes = 0;
  std::size_t bytes = 0;         // rounded up to the granule
  std::byte* address = nullptr;  // null exactly while the block is not resident
  RangeId range{};               // valid while resident
  HostSlotId host{};  // kept while the block lives, so that swapping again costs no search
  // What has to come before a read of the bytes, and, on top of that, before they are overwritten or
  // their range is given away.
  Fence written{};
  Fence used{};
  std::uint32_t leases = 0;        // given out or about to be: the block must not leave
  std::uint32_t granted = 0;       // of which given out: the block must not move either
  std::uint32_t lease_serial = 0;  // counts leases ever given
  // The group of requests that has taken a range to overwrite it and has not been granted it yet: the
  // host copy is still the only one.
  void const* filler = nullptr;
  std::thread::id leaser{};    // who acquired last; no thread while several hold leases
  bool has_contents = false;   // somebody may have written
  bool is_host_valid = false;  // the host slot holds the same bytes
  bool is_busy = false;        // one thread is enqueueing its copy or move outside the lock
  bool is_arriving = false;    // swapped in and not used since
  bool is_prefetched = false;  // brought in ahead of need and not used since
  bool is_parked = false;      // not resident, and `range` is kept for its address
  bool is_unproven = false;    // read back from a file, and not yet known to have been read in full
  bool is_lost = false;        // the device lost the bytes: only a write makes it whole
  bool is_orphan = false;      // abandoned while leased: freed when the last lease ends

  [[nodiscard]] bool is_resident() const noexcept { return address != nullptr; }
  [[nodiscard]] bool is_leased() const noexcept { return leases != 0; }
  /// Leaving costs no transfer.
  [[nodiscard]] bool is_clean() const noexcept { return is_host_valid || !has_contents; }
  /// Everything that must come before the range is used for something else.
  [[nodiscard]] Fence last_uses() const noexcept {
    Fence all = written;
    all.add(used);
    return all;
  }
};

}  // namespace spillway::detail
