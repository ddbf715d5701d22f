// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/eviction_policy.hpp>
#include <spillway/core/types.hpp>
#include <spillway/schedule/use.hpp>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

namespace spillway::testing {

/// The block in index `index`, first generation.
inline BlockId block(std::uint32_t index) {
  return make_block_id(index, 1);
}

/// Admits every block, as a dirty one of 64 bytes.
inline constexpr auto anyone = [](BlockId) noexcept -> std::optional<EvictionCandidate> {
  return EvictionCandidate{64, false, true};
};

/// Admits only the named blocks.
inline auto only(std::vector<BlockId> admitted) {
  return [admitted = std::move(admitted)](BlockId id) noexcept -> std::optional<EvictionCandidate> {
    for (BlockId const other : admitted) {
      if (other == id) {
        return EvictionCandidate{64, false, true};
      }
    }
    return std::nullopt;
  };
}

/// All victims, in the order in which a policy names them when each is taken at once.
template <EvictionPolicy P, class Inspect>
std::vector<BlockId> drain(P& policy, Inspect inspect) {
  std::vector<BlockId> victims;
  while (auto const id = policy.victim(1, inspect)) {
    victims.push_back(*id);
    policy.on_erase(*id);
  }
  return victims;
}

}  // namespace spillway::testing
