// SPDX-License-Identifier: Apache-2.0
#include <spillway/policy/recompute/tuned_recompute.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

using namespace spillway;

namespace {

constexpr std::size_t limit = 1024;

/// A policy that was told the limit, at the begin of the first step.
TunedRecompute begun() {
  TunedRecompute policy;
  policy.on_step(0, limit);
  return policy;
}

/// The rule that the policy uses now.
std::size_t rule_of(TunedRecompute const& policy) {
  for (std::size_t i = 0; i < TunedRecompute::rules.size(); ++i) {
    auto const [share, prices_plans] = TunedRecompute::rules[i];
    RecomputeIfCheaper const rule{share, prices_plans};
    RecomputeCosts const dearest{.copy_ns = 1024, .recompute_ns = 1024 * share};
    RecomputeCosts const cheap{.copy_ns = 1024, .recompute_ns = 1};
    if (policy.prefers_recompute(dearest) && policy.plan_share(cheap) == rule.plan_share(cheap)) {
      return i;
    }
  }
  return TunedRecompute::rules.size();
}

/// Runs `steps` steps, which take `step_ns(rule)` each, and returns the rule of each.
template <class StepNs>
std::vector<std::size_t> run(TunedRecompute& policy, std::size_t steps, StepNs step_ns) {
  std::vector<std::size_t> rules;
  for (std::size_t step = 0; step < steps; ++step) {
    rules.push_back(rule_of(policy));
    policy.on_step(step_ns(rules.back()), limit);
  }
  return rules;
}

constexpr std::size_t steps_of_trial =
    TunedRecompute::settling_steps + TunedRecompute::measured_steps;
constexpr std::size_t last = TunedRecompute::rules.size() - 1;

}  // namespace

TEST_SUITE("tuned_recompute") {
  TEST_CASE("TunedRecompute: each rule is tried, and the one with the fastest steps is kept") {
    for (std::size_t fastest = 0; fastest <= last; ++fastest) {
      CAPTURE(fastest);
      TunedRecompute policy = begun();
      auto const tried = run(policy, TunedRecompute::steps_to_tune, [&](std::size_t rule) {
        return rule == fastest ? 90. : 100.;
      });
      for (std::size_t step = 0; step < tried.size(); ++step) {
        CHECK(tried[step] == step / steps_of_trial);
      }
      CHECK(rule_of(policy) == fastest);
      CHECK(policy.wants_recipes() == (fastest != last));
    }
  }

  TEST_CASE("TunedRecompute: if the rules make no difference, the first is kept") {
    TunedRecompute policy = begun();
    run(policy, TunedRecompute::steps_to_tune, [](std::size_t) { return 100.; });
    CHECK(rule_of(policy) == 0);
  }

  TEST_CASE("TunedRecompute: the steps just after a change of rule are not measured") {
    TunedRecompute policy = begun();
    std::size_t step = 0;
    run(policy, TunedRecompute::steps_to_tune, [&](std::size_t rule) {
      bool const is_settling = step++ % steps_of_trial < TunedRecompute::settling_steps;
      auto const slower = static_cast<double>(rule);
      return is_settling ? 50 - slower : 100 + slower;
    });
    CHECK(rule_of(policy) == 0);

    // Times between those of the measured steps would not be left out as the slowest or fastest.
    TunedRecompute other = begun();
    step = 0;
    run(other, TunedRecompute::steps_to_tune, [&](std::size_t rule) {
      std::size_t const at = step++ % steps_of_trial;
      bool const is_slow = at < TunedRecompute::settling_steps || at % 2 != 0;
      return rule == last ? (is_slow ? 120. : 80.) : 101.;
    });
    CHECK(rule_of(other) == last);
  }

  TEST_CASE("TunedRecompute: one step slowed by something else does not decide") {
    for (std::size_t slowed = 0; slowed < TunedRecompute::measured_steps; ++slowed) {
      TunedRecompute policy = begun();
      std::size_t step = 0;
      run(policy, TunedRecompute::steps_to_tune, [&](std::size_t rule) {
        bool const is_slowed = step++ % steps_of_trial == TunedRecompute::settling_steps + slowed;
        return (rule == last ? 90. : 100.) + (is_slowed && rule == last ? 1000. : 0.);
      });
      CHECK(rule_of(policy) == last);
    }
  }

  TEST_CASE("TunedRecompute: steps that are fast and slow by turns count by their average") {
    TunedRecompute policy = begun();
    std::size_t step = 0;
    run(policy, TunedRecompute::steps_to_tune, [&](std::size_t rule) {
      return rule == last ? 95. : (step++ % 2 == 0 ? 80. : 120.);
    });
    CHECK(rule_of(policy) == last);
  }

  TEST_CASE("TunedRecompute: tuning is repeated from time to time") {
    TunedRecompute policy = begun();
    auto const fastest_last = [](std::size_t rule) { return 200 - static_cast<double>(rule); };
    run(policy, TunedRecompute::steps_to_tune, fastest_last);
    CHECK(rule_of(policy) == last);
    auto const kept = run(policy, TunedRecompute::steps_between, [](std::size_t) { return 100.; });
    for (std::size_t const rule : kept) {
      CHECK(rule == last);
    }
    auto const tried = run(policy, TunedRecompute::steps_to_tune, [](std::size_t rule) {
      return 100 + static_cast<double>(rule) / 2;  // less than the times before differed
    });
    CHECK(tried.front() == 0);
    CHECK(rule_of(policy) == 0);
  }

  TEST_CASE("TunedRecompute: tuning begins again if the limit changes") {
    TunedRecompute policy = begun();
    run(policy, TunedRecompute::steps_to_tune, [](std::size_t rule) {
      return 200 - static_cast<double>(rule);
    });
    CHECK(rule_of(policy) == last);
    policy.on_step(100, limit / 2);
    CHECK(rule_of(policy) == 0);
    policy.on_step(100, limit / 2);
    CHECK(rule_of(policy) == 0);
  }

  TEST_CASE("TunedRecompute: a program that never marks a step keeps the first rule") {
    TunedRecompute policy = begun();
    for (std::size_t const rule : run(policy, 100, [](std::size_t) { return 0.; })) {
      CHECK(rule == 0);
    }
  }
}
