// SPDX-License-Identifier: Apache-2.0
#include <spillway/policy/recompute/tuned_recompute.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

using namespace spillway;

namespace {

constexpr std::size_t limit = 1024;

/// A policy that knows of the limit: the first step begins.
TunedRecompute begun() {
  TunedRecompute policy;
  policy.on_step(0, limit);
  return policy;
}

/// The largest of the policy's shares at which it makes a block again.
double share_of(TunedRecompute const& policy) {
  for (double const share : TunedRecompute::shares) {
    if (policy.prefers_recompute({.copy_ns = 100, .recompute_ns = 100 * share})) {
      return share;
    }
  }
  return -1;
}

/// Runs `steps` steps, which take `step_ns(share)` each, and returns the share of each.
template <class StepNs>
std::vector<double> run(TunedRecompute& policy, std::size_t steps, StepNs step_ns) {
  std::vector<double> shares;
  for (std::size_t step = 0; step < steps; ++step) {
    shares.push_back(share_of(policy));
    policy.on_step(step_ns(shares.back()), limit);
  }
  return shares;
}

constexpr std::size_t steps_of_trial =
    TunedRecompute::settling_steps + TunedRecompute::measured_steps;

}  // namespace

TEST_SUITE("tuned_recompute") {
  TEST_CASE("TunedRecompute: each share is tried, and the one with the fastest step stays") {
    for (double const fastest : TunedRecompute::shares) {
      CAPTURE(fastest);
      TunedRecompute policy = begun();
      auto const tried = run(policy, TunedRecompute::steps_to_tune, [&](double share) {
        return share == fastest ? 90. : 100.;
      });
      for (std::size_t step = 0; step < tried.size(); ++step) {
        CHECK(tried[step] == TunedRecompute::shares[step / steps_of_trial]);
      }
      CHECK(share_of(policy) == fastest);
      CHECK(policy.wants_recipes() == (fastest != 0));
    }
  }

  TEST_CASE("TunedRecompute: shares that make no difference leave the first") {
    TunedRecompute policy = begun();
    run(policy, TunedRecompute::steps_to_tune, [](double) { return 100.; });
    CHECK(share_of(policy) == TunedRecompute::shares.front());
  }

  TEST_CASE("TunedRecompute: steps in which a share settles are not measured") {
    TunedRecompute policy = begun();
    std::size_t step = 0;
    run(policy, TunedRecompute::steps_to_tune, [&](double share) {
      bool const is_settling = step++ % steps_of_trial < TunedRecompute::settling_steps;
      return is_settling ? 1 + share : 100 - share;
    });
    CHECK(share_of(policy) == 1);
  }

  TEST_CASE("TunedRecompute: one step that something else slows does not decide") {
    TunedRecompute policy = begun();
    std::size_t step = 0;
    run(policy, TunedRecompute::steps_to_tune, [&](double share) {
      bool const is_slowed = step++ % steps_of_trial == TunedRecompute::settling_steps;
      return (share == 0 ? 90. : 100.) + (is_slowed && share == 0 ? 1000. : 0.);
    });
    CHECK(share_of(policy) == 0);
  }

  TEST_CASE("TunedRecompute: tuning begins anew, since a program changes") {
    TunedRecompute policy = begun();
    run(policy, TunedRecompute::steps_to_tune, [](double share) { return 100 + share; });
    CHECK(share_of(policy) == 0);
    auto const kept = run(policy, TunedRecompute::steps_between, [](double) { return 100.; });
    for (double const share : kept) {
      CHECK(share == 0);
    }
    auto const tried =
        run(policy, TunedRecompute::steps_to_tune, [](double share) { return 100 - share; });
    CHECK(tried.front() == 1);
    CHECK(share_of(policy) == 1);
  }

  TEST_CASE("TunedRecompute: tuning begins anew under another limit") {
    TunedRecompute policy = begun();
    run(policy, TunedRecompute::steps_to_tune, [](double share) { return 100 + share; });
    CHECK(share_of(policy) == 0);
    policy.on_step(100, limit / 2);
    CHECK(share_of(policy) == 1);
    policy.on_step(100, limit / 2);
    CHECK(share_of(policy) == 1);
  }

  TEST_CASE("TunedRecompute: a program that says of no step keeps the first share") {
    TunedRecompute policy = begun();
    run(policy, 100, [](double) { return 0.; });
    CHECK(share_of(policy) == TunedRecompute::shares.front());
  }
}
