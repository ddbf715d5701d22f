// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/prefetch_policy.hpp>
#include <spillway/core/types.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>

#include <cstddef>

namespace spillway {

/// Brings nothing in ahead of need.
class NoPrefetch {
 public:
  void on_create(BlockId /*id*/) {}
  void on_access(BlockId /*id*/, Use /*use*/) noexcept {}
  void on_destroy(BlockId /*id*/) noexcept {}
  void on_step() noexcept {}

  template <class Visit>
  void candidates(AccessSchedule const& /*schedule*/, Visit /*visit*/) const {}

  [[nodiscard]] std::size_t max_inflight_bytes() const noexcept { return 0; }
};

static_assert(PrefetchPolicy<NoPrefetch>);

}  // namespace spillway
