// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/recompute_policy.hpp>
#include <spillway/core/config.hpp>

#include <algorithm>
#include <cstddef>

namespace spillway {

/// A recompute policy that recomputes a block if its recipe takes at most a given share of the time
/// of one copy.
///
/// Recomputing keeps the device from other work. A copy can overlap with that work, but keeps the
/// link from other copies. The share weighs the two: 1 suits a link that is always busy, 0 a link
/// on which every copy overlaps with work.
///
/// If `prices_plans` is true, plans of a step count the return of a block that would be recomputed
/// by the time of its recipe, so that such blocks leave before blocks that would have to be copied.
/// That makes most steps faster (docs/benchmarks.md). If blocks leave that are made from each
/// other, this price is too low, since it does not include blocks that will be dropped later.
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

/// A recompute policy that recomputes every block that has a recipe, whatever that costs. For
/// comparisons.
struct AlwaysRecompute {
  void on_step(double /*step_ns*/, std::size_t /*bytes*/) noexcept {}
  [[nodiscard]] bool prefers_recompute(RecomputeCosts /*costs*/) const noexcept { return true; }
  [[nodiscard]] double plan_share(RecomputeCosts /*costs*/) const noexcept { return 1; }
  [[nodiscard]] bool wants_recipes() const noexcept { return true; }
};

SPILLWAY_CHECK_MODEL(RecomputePolicy<RecomputeIfCheaper>);
SPILLWAY_CHECK_MODEL(RecomputePolicy<AlwaysRecompute>);

}  // namespace spillway
