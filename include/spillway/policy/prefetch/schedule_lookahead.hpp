// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/prefetch_policy.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/types.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>

#include <cstddef>

namespace spillway {

/// Brings in the blocks that the recorded step uses next, the soonest first. The default of the
/// library.
///
/// A block whose next use overwrites it is left out, because its bytes need not come back. While
/// nothing is predicted, nothing is brought in.
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
    std::size_t left = options_.lookahead_ops;
    schedule.upcoming([&](AccessSchedule::Upcoming const& use) {
      if (left == 0) {
        return false;
      }
      --left;
      // Only the first of a block's coming uses counts.
      bool const is_wanted = use.id != BlockId{} && use.access != Access::write &&
                             schedule.next_use(use.id) == use.position;
      return !is_wanted || visit(use.id, use.position);
    });
  }

  [[nodiscard]] std::size_t max_inflight_bytes() const noexcept {
    return options_.max_inflight_bytes;
  }

 private:
  PrefetchOptions options_;
};

using ScheduleLookahead = BasicScheduleLookahead<>;

SPILLWAY_CHECK_MODEL(PrefetchPolicy<ScheduleLookahead>);

SPILLWAY_COMPILED_PART(class BasicScheduleLookahead<>);

}  // namespace spillway
