// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>

#include <concepts>
#include <cstddef>
#include <optional>

namespace spillway {

/// What the pager says of a block that could leave.
struct EvictionCandidate {
  std::size_t bytes = 0;
  bool is_clean = false;  ///< a valid copy is on the host: leaving costs nothing
  /// False if its bytes were never written. Such a block is copied neither out nor in.
  bool has_contents = true;
};

/// Chooses which resident block leaves the device when room is needed.
///
/// Given `p` of type `P`, `id` of type `BlockId`, a `Use use`, and `inspect`, a `noexcept` function
/// from `BlockId` to `std::optional<EvictionCandidate>` that is empty for a block that cannot leave
/// now:
///
/// | expression                       | must                             | cost                   |
/// |----------------------------------|----------------------------------|------------------------|
/// | `p.on_insert(id, bytes, use)`    | start tracking a block that      | O(log n)               |
/// |                                  | became resident by this use or   |                        |
/// |                                  | ahead of it                      |                        |
/// | `p.on_access(id, use)`           | note a use of a block; do        | O(1) or O(log n)       |
/// |                                  | nothing if it is not tracked     |                        |
/// | `p.on_erase(id)`                 | forget a block; do nothing if it | O(log n)               |
/// |                                  | is not tracked                   |                        |
/// | `p.victim(short_bytes, inspect)` | name a tracked block that        | O((1 + refused) log n) |
/// |                                  | `inspect` admits, or nothing;    |                        |
/// |                                  | `short_bytes` are still wanted   |                        |
/// | `p.on_misprediction()`           | hold predictions made so far for | O(n)                   |
/// |                                  | worthless                        |                        |
/// | `p.on_step(schedule,             | a step begins or predictions     | the model's            |
/// | capacity_bytes)`                 | have resumed; what leaves and    |                        |
/// |                                  | comes back has room for          |                        |
/// |                                  | `capacity_bytes` at once         |                        |
///
/// `victim` does not forget the block it names: the caller takes it and says `on_erase`. A model
/// decides; it never copies, frees or calls a device. Only `on_insert` may throw (std::bad_alloc,
/// with nothing changed). Thread-unsafe: the pager calls a model under its lock.
// clang-format off
template <class P>
concept EvictionPolicy =
    std::default_initializable<P> && std::movable<P> &&
    requires(P p, BlockId id, std::size_t bytes, Use use, AccessSchedule const& schedule,
             std::optional<EvictionCandidate> (*inspect)(BlockId) noexcept) {
      { p.on_insert(id, bytes, use) }          -> std::same_as<void>;
      { p.on_access(id, use)        } noexcept -> std::same_as<void>;
      { p.on_erase(id)              } noexcept -> std::same_as<void>;
      { p.victim(bytes, inspect)    } noexcept -> std::same_as<std::optional<BlockId>>;
      { p.on_misprediction()        } noexcept -> std::same_as<void>;
      { p.on_step(schedule, bytes)  } noexcept -> std::same_as<void>;
    };

/// An eviction policy that knows in advance that blocks will leave before their next use.
///
/// | expression                    | must                                                        |
/// |-------------------------------|-------------------------------------------------------------|
/// | `p.early_victim(inspect)`     | name a tracked block that `inspect` admits and that is sent |
/// |                               | out before its next use anyway, or nothing                  |
/// | `cp.is_leaving(id)`           | say whether a block need not stay until its next use: it is |
/// |                               | sent out anyway, or has none                                |
/// | `cp.may_return(schedule, id)` | say whether a block that is away may come back now without  |
/// |                               | taking the room of what is made or used before its next use |
///
/// A block that `early_victim` names can be copied out while the link is idle. One that is leaving
/// can make room for a prefetch; if others do, prefetching makes the program swap in more.
template <class P>
concept SpeculativeEvictionPolicy =
    EvictionPolicy<P> &&
    requires(P p, P const cp, BlockId id,
             AccessSchedule const& schedule,
             std::optional<EvictionCandidate> (*inspect)(BlockId) noexcept) {
      { p.early_victim(inspect) } noexcept -> std::same_as<std::optional<BlockId>>;
      { cp.is_leaving(id)       } noexcept -> std::same_as<bool>;
      { cp.may_return(schedule, id) } noexcept -> std::same_as<bool>;
    };
// clang-format on

}  // namespace spillway
