// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/prefetch_policy.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/types.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>

#include <algorithm>
#include <cstddef>

namespace spillway {

/// The default prefetch policy: prefetches the blocks that the recorded step uses next, the soonest
/// first.
///
/// A block whose next use overwrites it is left out, because its bytes need not come back. While
/// nothing is predicted, nothing is brought in.
///
/// At each use it looks at the next 64 recorded uses, and at a few of the later ones in turn: at
/// each of these once in every (n - 64) / 16 uses, where n is `lookahead_ops`, or the length of the
/// step if that is less. Looking at all of them each time would take several times as long and
/// would not keep the link busier.
template <class = detail::Lazily>
class BasicScheduleLookahead {
 public:
  using ScheduleLookahead = BasicScheduleLookahead;  // what a derived class calls its base

  BasicScheduleLookahead() = default;
  explicit BasicScheduleLookahead(PrefetchOptions options) noexcept : options_{options} {}

  void on_create(BlockId /*id*/) {}
  void on_access(BlockId /*id*/, Use /*use*/) noexcept {}
  void on_destroy(BlockId /*id*/) noexcept {}
  void on_step() noexcept {}

  template <class Visit>
  void candidates(AccessSchedule const& schedule, Visit visit) const {
    // No more than a step is in sight, and turns beyond it would be idle.
    auto const most = std::min<std::size_t>(options_.lookahead_ops, schedule.record().length());
    std::size_t const next = std::min(most, near_ops);
    if (!offer(schedule, 0, next, visit) || next == most) {
      return;
    }
    std::size_t const later = most - next;
    auto const turn = static_cast<std::size_t>(schedule.position()) * far_ops_a_use % later;
    offer(schedule, next + turn, std::min(far_ops, later - turn), visit);
  }

  [[nodiscard]] std::size_t max_inflight_bytes() const noexcept {
    return options_.max_inflight_bytes;
  }

 private:
  static constexpr std::size_t near_ops = 64;
  static constexpr std::size_t far_ops_a_use = 16;
  /// An operation has several uses, but looks ahead once.
  static constexpr std::size_t far_ops = 3 * far_ops_a_use;

  /// Names the blocks of `count` recorded uses after the next `skipped`. @returns whether to go on
  template <class Visit>
  static bool
  offer(AccessSchedule const& schedule, std::size_t skipped, std::size_t count, Visit& visit) {
    bool goes_on = true;
    schedule.upcoming(
        [&](AccessSchedule::Upcoming const& use) {
          // Only the first of a block's coming uses counts.
          bool const is_wanted = use.id != BlockId{} && use.access != Access::write &&
                                 schedule.use_of(use.id).entry == use.entry;
          goes_on = !is_wanted || visit(use.id, use.position);
          return goes_on;
        },
        skipped,
        count);
    return goes_on;
  }

  PrefetchOptions options_;
};

using ScheduleLookahead = BasicScheduleLookahead<>;

SPILLWAY_CHECK_MODEL(PrefetchPolicy<ScheduleLookahead>);

SPILLWAY_COMPILED_PART(class BasicScheduleLookahead<>);

}  // namespace spillway
