// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/callable_object.hpp>
#include <spillway/core/types.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

namespace spillway {

/// How far a prefetch policy looks ahead.
struct PrefetchOptions {
  std::size_t lookahead_ops = 512;  ///< coming uses to consider
  std::size_t max_inflight_bytes = std::numeric_limits<std::size_t>::max();
};

/// Chooses which blocks come back to the device ahead of their next use, and in which order.
///
/// Given `p` of type `P` (`cp` if const), `id` of type `BlockId`, a `Use use`, and `visit`, which
/// takes a block and the position of its next use and returns whether to go on:
///
/// | expression                       | must                                     | cost           |
/// |----------------------------------|------------------------------------------|----------------|
/// | `p.on_create(id)`                | allocate what it keeps of a new block    | O(1) amortised |
/// | `p.on_access(id, use)`           | note a use, of a resident block or not   | O(1)           |
/// | `p.on_destroy(id)`               | forget a block that was freed, not       | O(1)           |
/// |                                  | evicted; do nothing if it is forgotten   |                |
/// | `p.on_step()`                    | note that a step begins                  | O(n)           |
/// | `cp.candidates(schedule, visit)` | name blocks in the order they should     | O(named)       |
/// |                                  | come in, resident ones included, until   |                |
/// |                                  | `visit` returns false                    |                |
/// | `cp.max_inflight_bytes()`        | limit the bytes that are on their way in | O(1)           |
/// |                                  | at once; the caller keeps to it          |                |
///
/// `candidates` names nothing before the first use. The positions that it passes to `visit` begin
/// at `schedule.position()` or later, and none is before the one that was passed before it.
///
/// A model decides; it never copies or calls a device. Only `on_create` may throw (std::bad_alloc,
/// with nothing changed). Thread-unsafe: the pager calls a model under its lock.
// clang-format off
template <class P>
concept PrefetchPolicy =
    std::default_initializable<P> && std::movable<P> &&
    requires(P p, P const cp, BlockId id, Use use, AccessSchedule const& schedule,
             detail::CallableObject<bool(BlockId, std::uint64_t)> visit) {
      { p.on_create(id)                           }          -> std::same_as<void>;
      { p.on_access(id, use)                      } noexcept -> std::same_as<void>;
      { p.on_destroy(id)                          } noexcept -> std::same_as<void>;
      { p.on_step()                               } noexcept -> std::same_as<void>;
      { cp.candidates(schedule, std::move(visit)) }          -> std::same_as<void>;
      { cp.max_inflight_bytes()                   } noexcept -> std::same_as<std::size_t>;
    };
// clang-format on

}  // namespace spillway
