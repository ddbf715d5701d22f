// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/prefetch_policy.hpp>
#include <spillway/policy/prefetch/schedule_lookahead.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

namespace spillway::framework {

/// A limit that may change while others go by it.
///
/// Threads  thread-safe.
using SharedLimit = std::shared_ptr<std::atomic<std::size_t>>;

/// `ScheduleLookahead` that brings in no more at once than a sixth of a limit, as it is at the time:
/// for memory whose limit is lowered below the capacity that its allocator was made with.
class LimitedLookahead : public ScheduleLookahead {
 public:
  LimitedLookahead() noexcept {}  // NOLINT(modernize-use-equals-default): as ScheduleLookahead's
  LimitedLookahead(PrefetchOptions options, SharedLimit limit_bytes) noexcept
      : ScheduleLookahead{options}, limit_bytes_{std::move(limit_bytes)} {}

  [[nodiscard]] std::size_t max_inflight_bytes() const noexcept {
    std::size_t const most = ScheduleLookahead::max_inflight_bytes();
    return limit_bytes_ == nullptr ? most : std::min(most, limit_bytes_->load() / 6);
  }

 private:
  SharedLimit limit_bytes_;
};

static_assert(PrefetchPolicy<LimitedLookahead>);

}  // namespace spillway::framework
