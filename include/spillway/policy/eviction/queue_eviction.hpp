// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/eviction_policy.hpp>
#include <spillway/core/block_list.hpp>
#include <spillway/core/types.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>

#include <cstddef>
#include <optional>

namespace spillway {

/// Evicts the block whose last use is longest ago.
///
/// Cost  O(1) for everything but `victim`, which passes over blocks that may not leave.
class LruEviction {
 public:
  void on_insert(BlockId id, std::size_t /*bytes*/, Use /*use*/) {
    order_.reserve(id);
    order_.erase(id);
    order_.push_back(id);
  }
  void on_access(BlockId id, Use /*use*/) noexcept { order_.move_to_back(id); }
  void on_erase(BlockId id) noexcept { order_.erase(id); }
  void on_misprediction() noexcept {}
  void on_step(AccessSchedule const& /*schedule*/, std::size_t /*capacity_bytes*/) noexcept {}

  template <class Inspect>
  [[nodiscard]] std::optional<BlockId> victim(std::size_t /*short_bytes*/,
                                              Inspect inspect) const noexcept {
    for (BlockId id = order_.front(); id != BlockId{}; id = order_.after(id)) {
      if (inspect(id)) {
        return id;
      }
    }
    return std::nullopt;
  }

 private:
  detail::SlotOrder order_;  // the one used longest ago first
};

static_assert(EvictionPolicy<LruEviction>);

}  // namespace spillway
