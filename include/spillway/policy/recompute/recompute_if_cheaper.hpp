// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/recompute_policy.hpp>

namespace spillway {

/// The default recompute policy: a block is made again if that takes at most the time of one copy,
/// and if the link is busy.
///
/// Making the bytes keeps the device from other work. A copy may hide behind that work, but takes
/// the link from other copies: while all copies of a step take a small part of its work, they
/// hide, and nothing is recomputed.
class RecomputeIfCheaper {
 public:
  void on_step(StepLoad load) noexcept {
    constexpr double small_part = 0.25;
    is_link_idle_ = load.link_ns < small_part * load.work_ns;
  }
  [[nodiscard]] bool prefers_recompute(RecomputeCosts costs) const noexcept {
    return !is_link_idle_ && costs.recompute_ns <= costs.copy_ns;
  }

 private:
  bool is_link_idle_ = false;
};

/// A recompute policy by which every block with a recipe is made again, whatever that costs. To
/// compare with.
struct AlwaysRecompute {
  void on_step(StepLoad /*load*/) noexcept {}
  [[nodiscard]] bool prefers_recompute(RecomputeCosts /*costs*/) const noexcept { return true; }
};

static_assert(RecomputePolicy<RecomputeIfCheaper>);
static_assert(RecomputePolicy<AlwaysRecompute>);

}  // namespace spillway
