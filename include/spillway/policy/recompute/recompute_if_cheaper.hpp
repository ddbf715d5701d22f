// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/recompute_policy.hpp>
#include <spillway/core/config.hpp>

#include <cstddef>

namespace spillway {

/// A recompute policy by which a block is made again if that takes at most a given share of the
/// time of one copy.
///
/// Making the bytes keeps the device from other work. A copy may hide behind that work, but takes
/// the link from other copies. The share says how much of the one time is worth the other: 1 suits
/// a link that is always busy, 0 one on which every copy hides.
class RecomputeIfCheaper {
 public:
  RecomputeIfCheaper() = default;
  /// @pre `share` >= 0
  explicit RecomputeIfCheaper(double share) noexcept : share_{share} {}

  void on_step(double /*step_ns*/, std::size_t /*bytes*/) noexcept {}
  [[nodiscard]] bool prefers_recompute(RecomputeCosts costs) const noexcept {
    return costs.recompute_ns <= share_ * costs.copy_ns;
  }
  [[nodiscard]] bool wants_recipes() const noexcept { return share_ > 0; }

 private:
  double share_ = 1;
};

/// A recompute policy by which every block with a recipe is made again, whatever that costs. To
/// compare with.
struct AlwaysRecompute {
  void on_step(double /*step_ns*/, std::size_t /*bytes*/) noexcept {}
  [[nodiscard]] bool prefers_recompute(RecomputeCosts /*costs*/) const noexcept { return true; }
  [[nodiscard]] bool wants_recipes() const noexcept { return true; }
};

SPILLWAY_CHECK_MODEL(RecomputePolicy<RecomputeIfCheaper>);
SPILLWAY_CHECK_MODEL(RecomputePolicy<AlwaysRecompute>);

}  // namespace spillway
