// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>

namespace spillway {

/// The costs of getting the bytes of a block back, by a copy and by its recipe.
struct RecomputeCosts {
  double copy_ns = 0;       ///< time for its encoded bytes to cross the link once
  double recompute_ns = 0;  ///< time of its recipe, and of those of the dropped blocks it needs
};

/// Chooses which blocks leave the device without a copy, to be made again by their recipes. If no
/// copy can be kept, the pager drops a block with a recipe whatever the policy says.
///
/// Given `p` of type `P` (`cp` if const), `double step_ns`, `std::size_t bytes` and
/// `RecomputeCosts costs`:
///
/// | expression                    | must                                            | cost       |
/// |-------------------------------|-------------------------------------------------|------------|
/// | `p.on_step(step_ns, bytes)`   | note that a step begins: see below              | O(1)       |
/// | `cp.prefers_recompute(costs)` | return whether a block that is about to leave   | O(1)       |
/// |                               | should be made again rather than copied         |            |
/// | `cp.plan_share(costs)`        | return what part of a copy, 0 to 1, the return  | O(1)       |
/// |                               | of a block that has a recipe counts as when a   |            |
/// |                               | step is planned; 1: as the return of any other  |            |
/// | `cp.wants_recipes()`          | return whether it may prefer that at all, so    | O(1)       |
/// |                               | that recipes are worth what it takes to make    |            |
/// |                               | them                                            |            |
///
/// A step begins under a capacity of `bytes`. `step_ns` is the duration of the step before. It is 0
/// if the policy cannot learn from that step: it was the first, no block left during it, or no
/// block with a recipe has left since the capacity changed. While no recipes are wanted, a block
/// without one is enough for the last condition.
///
/// A block that is preferred is also preferred if its copy takes longer or its recipe less time,
/// and then `wants_recipes` is true. `plan_share` is 1 for a block that is not preferred, since it
/// is copied. Between two calls of `on_step` the answers do not change.
///
/// A model decides; it never copies or calls a device. Thread-unsafe: the pager calls a model under
/// its lock.
// clang-format off
template <class P>
concept RecomputePolicy =
    std::default_initializable<P> && std::movable<P> &&
    requires(P p, P const cp, double step_ns, std::size_t bytes, RecomputeCosts costs) {
      { p.on_step(step_ns, bytes)   } noexcept -> std::same_as<void>;
      { cp.prefers_recompute(costs) } noexcept -> std::same_as<bool>;
      { cp.plan_share(costs)        } noexcept -> std::same_as<double>;
      { cp.wants_recipes()          } noexcept -> std::same_as<bool>;
    };
// clang-format on

}  // namespace spillway
