// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/callable_object.hpp>
#include <spillway/core/types.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>

#include <concepts>
#include <cstddef>
#include <optional>
#include <utility>

namespace spillway {

/// A block that could leave the device, as the pager describes it to a policy.
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
/// now. `inspect` is any callable object: make `victim` (and the others that get it) a template.
///
/// | expression                | must                                    | cost                   |
/// |---------------------------|-----------------------------------------|------------------------|
/// | `p.on_insert(id, n, use)` | start tracking a block of `n` bytes,    | O(log n)               |
/// |                           | which became resident by this use or    |                        |
/// |                           | ahead of it                             |                        |
/// | `p.on_access(id, use)`    | note a use of a block; do nothing if it | O(log n)               |
/// |                           | is not tracked                          |                        |
/// | `p.on_erase(id)`          | forget a block; do nothing if it is not | O(log n)               |
/// |                           | tracked                                 |                        |
/// | `p.victim(n, inspect)`    | name a tracked block that `inspect`     | O((1 + refused) log n) |
/// |                           | admits, or nothing; `n` bytes are still |                        |
/// |                           | wanted                                  |                        |
/// | `p.on_misprediction()`    | discard the predictions made so far     | O(n)                   |
/// | `p.on_step(schedule, n)`  | make a new plan: see below              | the model's            |
///
/// `on_step` is called at the beginning of a step, when predictions resume and when the capacity
/// changes. `n` is the number of bytes that all blocks of the schedule may occupy together.
///
/// `victim` does not forget the block it names: the caller evicts it and calls `on_erase`. Asked
/// again with nothing changed, it names the same block, and refused blocks keep their place in the
/// order. Models that were told the same give the same answers, so none chooses at random. While
/// nothing is predicted, `on_misprediction` and `on_step` change nothing.
///
/// A model decides; it never copies, frees or calls a device. Only `on_insert` may throw
/// (std::bad_alloc, with nothing changed). Thread-unsafe: the pager calls a model under its lock.
// clang-format off
template <class P>
concept EvictionPolicy =
    std::default_initializable<P> && std::movable<P> &&
    requires(P p, BlockId id, std::size_t bytes, Use use, AccessSchedule const& schedule,
             detail::CallableObject<std::optional<EvictionCandidate>(BlockId) noexcept> inspect) {
      { p.on_insert(id, bytes, use)         }          -> std::same_as<void>;
      { p.on_access(id, use)                } noexcept -> std::same_as<void>;
      { p.on_erase(id)                      } noexcept -> std::same_as<void>;
      { p.victim(bytes, std::move(inspect)) } noexcept -> std::same_as<std::optional<BlockId>>;
      { p.on_misprediction()                } noexcept -> std::same_as<void>;
      { p.on_step(schedule, bytes)          } noexcept -> std::same_as<void>;
    };

/// An eviction policy that knows in advance that blocks will leave before their next use.
///
/// | expression                    | must                                                         |
/// |-------------------------------|--------------------------------------------------------------|
/// | `p.early_victim(inspect)`     | name a tracked block that `inspect` admits, that is not      |
/// |                               | clean, and that will leave before its next use anyway; or    |
/// |                               | nothing                                                      |
/// | `p.leaving_victim(inspect)`   | name a tracked block that `inspect` admits and that need not |
/// |                               | stay until its next use, as it will leave before it anyway   |
/// |                               | or has no next use; or nothing. Does not consider all        |
/// |                               | blocks, since the pager asks at each acquire                 |
/// | `cp.may_return(schedule, id)` | say whether an absent block may come back now without taking |
/// |                               | the room of blocks that are made or used before its next use |
///
/// A block that `early_victim` names can be copied out while the link is idle. The pager prefetches
/// only into free room and the room of leaving blocks; evicting others for a prefetch would make
/// the program swap in more.
template <class P>
concept SpeculativeEvictionPolicy =
    EvictionPolicy<P> &&
    requires(P p, P const cp, BlockId id,
             AccessSchedule const& schedule,
             detail::CallableObject<std::optional<EvictionCandidate>(BlockId) noexcept> inspect) {
      { p.early_victim(std::move(inspect))   } noexcept -> std::same_as<std::optional<BlockId>>;
      { p.leaving_victim(std::move(inspect)) } noexcept -> std::same_as<std::optional<BlockId>>;
      { cp.may_return(schedule, id)          } noexcept -> std::same_as<bool>;
    };
// clang-format on

}  // namespace spillway
