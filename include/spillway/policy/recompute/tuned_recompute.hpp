// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/recompute_policy.hpp>
#include <spillway/core/config.hpp>
#include <spillway/policy/recompute/recompute_if_cheaper.hpp>

#include <algorithm>
#include <array>
#include <cstddef>

namespace spillway {

/// The default recompute policy: `RecomputeIfCheaper` with the share that makes the program's own
/// steps fastest.
///
/// What a copy costs depends on what else crosses the link and when, which no rule for a single
/// block can know; but steps repeat. So a few steps run with each of `shares`, and the one whose
/// fastest step was the fastest of all stays. With the last share, 0, no recipes are wanted, so
/// that recomputation is given up where it does not pay, with all that it costs. Only steps count
/// in which there was a choice. Tuning begins anew when the limit changes, and after
/// `steps_between` steps, since programs change. A program that does not say where its steps begin
/// keeps the first share.
class TunedRecompute {
 public:
  static constexpr std::array shares{1.0, 0.1, 0.05, 0.0};
  static constexpr std::size_t settling_steps = 2;  ///< of each share, until it shows in the times
  static constexpr std::size_t measured_steps = 2;  ///< of each share
  static constexpr std::size_t steps_to_tune = shares.size() * (settling_steps + measured_steps);
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
    if (trial_ == shares.size()) {
      if (steps_ == steps_between) {
        begin_trial(0);
      }
      return;
    }
    if (steps_ > settling_steps) {
      bool const is_first = steps_ == settling_steps + 1;
      fastest_ns_[trial_] = is_first ? step_ns : std::min(fastest_ns_[trial_], step_ns);
    }
    if (steps_ == settling_steps + measured_steps) {
      begin_trial(trial_ + 1);
    }
  }
  [[nodiscard]] bool prefers_recompute(RecomputeCosts costs) const noexcept {
    return rule_.prefers_recompute(costs);
  }
  [[nodiscard]] bool wants_recipes() const noexcept { return rule_.wants_recipes(); }

 private:
  /// After the last trial its best share stays.
  void begin_trial(std::size_t trial) noexcept {
    auto const best = std::min_element(fastest_ns_.begin(), fastest_ns_.end());
    auto const chosen =
        trial == shares.size() ? static_cast<std::size_t>(best - fastest_ns_.begin()) : trial;
    rule_ = RecomputeIfCheaper{shares[chosen]};
    trial_ = trial;
    steps_ = 0;
  }

  RecomputeIfCheaper rule_{shares[0]};
  std::array<double, shares.size()> fastest_ns_{};
  std::size_t limit_bytes_ = 0;
  std::size_t trial_ = 0;  // the share that is tried; past the last: tuned
  std::size_t steps_ = 0;  // that ended in this trial, or since
};

SPILLWAY_CHECK_MODEL(RecomputePolicy<TunedRecompute>);

}  // namespace spillway
