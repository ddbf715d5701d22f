// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/compaction_policy.hpp>

#include <cstdint>
#include <optional>

namespace spillway {

/// Never moves a block.
struct NoCompaction {
  static constexpr bool is_thread_safe = true;
  static constexpr bool moves_blocks = false;

  [[nodiscard]] std::optional<LayoutPlan>
  plan(Layout const& /*layout*/, std::uint32_t /*count*/, std::uint64_t /*budget*/) const noexcept {
    return std::nullopt;
  }
};

static_assert(CompactionPolicy<NoCompaction>);

}  // namespace spillway
