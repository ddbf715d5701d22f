// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/recompute_policy.hpp>
#include <spillway/core/config.hpp>

#include <algorithm>
#include <cstddef>

namespace spillway {

/// A recompute policy by which a block is made again if that takes at most a given share of the
/// time of one copy.
///
/// Making the bytes keeps the device from other work. A copy may hide behind that work, but takes
/// the link from other copies. The share says how much of the one time is worth the other: 1 suits
/// a link that is always busy, 0 one on which every copy hides.
///
/// If the policy prices plans, the return of a block that it would make again counts, when a step
/// is planned, as what its recipe takes, so that the block leaves before blocks that would have to
/// be copied. That makes most steps faster (docs/benchmarks.md). Where blocks leave that are made
/// from each other the price is too low, since it leaves out what else will be dropped.
class RecomputeIfCheaper {
 public:
  RecomputeIfCheaper() = default;
  /// @pre `share` >= 0
  explicit constexpr RecomputeIfCheaper(double share, bool prices_plans = false) noexcept
      : share_{share}, prices_plans_{prices_plans} {}

  void on_step(double /*step_ns*/, std::size_t /*bytes*/) noexcept {}
  [[nodiscard]] bool prefers_recompute(RecomputeCosts costs) const noexcept {
    return costs.recompute_ns <= share_ * costs.copy_ns;
  }
  [[nodiscard]] double plan_share(RecomputeCosts costs) const noexcept {
    double const most_ns = share_ * costs.copy_ns;
    return prices_plans_ && most_ns > 0 ? std::min(1.0, costs.recompute_ns / most_ns) : 1;
  }
  [[nodiscard]] bool wants_recipes() const noexcept { return share_ > 0; }

 private:
  double share_ = 1;
  bool prices_plans_ = false;
};

/// A recompute policy by which every block with a recipe is made again, whatever that costs. To
/// compare with.
struct AlwaysRecompute {
  void on_step(double /*step_ns*/, std::size_t /*bytes*/) noexcept {}
  [[nodiscard]] bool prefers_recompute(RecomputeCosts /*costs*/) const noexcept { return true; }
  [[nodiscard]] double plan_share(RecomputeCosts /*costs*/) const noexcept { return 1; }
  [[nodiscard]] bool wants_recipes() const noexcept { return true; }
};

SPILLWAY_CHECK_MODEL(RecomputePolicy<RecomputeIfCheaper>);
SPILLWAY_CHECK_MODEL(RecomputePolicy<AlwaysRecompute>);

}  // namespace spillway
