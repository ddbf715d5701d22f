// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/recompute_policy.hpp>
#include <spillway/core/config.hpp>
#include <spillway/policy/recompute/recompute_if_cheaper.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>

namespace spillway {

/// The default recompute policy: `RecomputeIfCheaper` with the share that makes the program's own
/// steps fastest, and with or without recipes' prices in the plans of steps.
///
/// The real cost of a copy depends on what else crosses the link and when, which a rule for a
/// single block cannot know. But steps repeat, so the policy measures: it runs a few steps with
/// each of `rules` and keeps the rule with the shortest mean time of a step. In each trial the
/// slowest step is left out, since something else may have slowed it down, and so is the fastest,
/// since work that a step leaves behind slows down the next one. Under the last rule no recipes are
/// wanted, so that a program for which recomputation does not pay does not bear its cost. A step is
/// measured if blocks left in it and if, since the capacity changed, there was a choice between
/// copy and recipe. Tuning begins anew when the capacity changes, and after `steps_between` steps,
/// since programs change. A program that does not call `begin_step` keeps the first rule.
class TunedRecompute {
 public:
  struct Rule {
    double share;       ///< the part of a copy's time that a recipe may take
    bool prices_plans;  ///< see `RecomputeIfCheaper`
  };
  static constexpr std::array rules{Rule{1, true}, Rule{1, false}, Rule{0.1, true}, Rule{0, false}};
  static constexpr std::size_t settling_steps = 2;  ///< steps of each rule that are not measured
  static constexpr std::size_t measured_steps = 4;  ///< steps of each rule that are measured
  static constexpr std::size_t steps_to_tune = rules.size() * (settling_steps + measured_steps);
  static constexpr std::size_t steps_between = 2000;

  void on_step(double step_ns, std::size_t bytes) noexcept {
    if (bytes != limit_bytes_) {
      limit_bytes_ = bytes;
      begin_trial(0);
      return;
    }
    if (step_ns == 0) {
      return;
    }
    ++steps_;
    if (trial_ == rules.size()) {
      if (steps_ == steps_between) {
        begin_trial(0);
      }
      return;
    }
    if (steps_ > settling_steps) {
      total_ns_[trial_] += step_ns;
      slowest_ns_ = std::max(slowest_ns_, step_ns);
      fastest_ns_ = std::min(fastest_ns_, step_ns);
    }
    if (steps_ == settling_steps + measured_steps) {
      total_ns_[trial_] -= slowest_ns_ + fastest_ns_;
      begin_trial(trial_ + 1);
    }
  }
  [[nodiscard]] bool prefers_recompute(RecomputeCosts costs) const noexcept {
    return rule_.prefers_recompute(costs);
  }
  [[nodiscard]] double plan_share(RecomputeCosts costs) const noexcept {
    return rule_.plan_share(costs);
  }
  [[nodiscard]] bool wants_recipes() const noexcept { return rule_.wants_recipes(); }

 private:
  /// Begins the trial of a rule. After the last one the best rule is kept.
  void begin_trial(std::size_t trial) noexcept {
    auto const best = std::min_element(total_ns_.begin(), total_ns_.end());
    Rule const rule =
        rules[trial == rules.size() ? static_cast<std::size_t>(best - total_ns_.begin()) : trial];
    rule_ = RecomputeIfCheaper{rule.share, rule.prices_plans};
    if (trial < rules.size()) {
      total_ns_[trial] = 0;
    }
    slowest_ns_ = 0;
    fastest_ns_ = std::numeric_limits<double>::max();
    trial_ = trial;
    steps_ = 0;
  }

  RecomputeIfCheaper rule_{rules[0].share, rules[0].prices_plans};
  // Sums of the measured steps of each trial without the two extremes, and the state of this trial.
  std::array<double, rules.size()> total_ns_{};
  double slowest_ns_ = 0;
  double fastest_ns_ = std::numeric_limits<double>::max();
  std::size_t limit_bytes_ = 0;
  std::size_t trial_ = 0;  // the rule that is tried; past the last one: tuning has ended
  std::size_t steps_ = 0;  // steps that ended in this trial, or since tuning has ended
};

SPILLWAY_CHECK_MODEL(RecomputePolicy<TunedRecompute>);

}  // namespace spillway
