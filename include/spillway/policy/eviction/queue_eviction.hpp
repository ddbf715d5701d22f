// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/eviction_policy.hpp>
#include <spillway/core/block_list.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/types.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>

#include <cstddef>
#include <optional>

namespace spillway {

namespace detail {

/// Evicts blocks in the order of a queue. It is the base of `LruEviction` and `FifoEviction`, which
/// differ in whether a use moves the block to the end of the queue.
///
/// Cost  O(1) for everything but `victim`, which passes over blocks that cannot leave now.
template <bool use_moves_to_end>
class QueueEviction {
 public:
  void on_insert(BlockId id, std::size_t /*bytes*/, Use /*use*/) {
    queue_.reserve(id);
    queue_.erase(id);
    queue_.push_back(id);
  }
  void on_access(BlockId id, Use /*use*/) noexcept {
    if constexpr (use_moves_to_end) {
      queue_.move_to_back(id);
    }
  }
  void on_erase(BlockId id) noexcept { queue_.erase(id); }
  void on_misprediction() noexcept {}
  void on_step(AccessSchedule const& /*schedule*/, std::size_t /*capacity_bytes*/) noexcept {}

  template <class Inspect>
  [[nodiscard]] std::optional<BlockId> victim(std::size_t /*short_bytes*/,
                                              Inspect inspect) const noexcept {
    return queue_.find_first([&](BlockId id) { return inspect(id).has_value(); });
  }

 private:
  BlockList queue_;  // the next victim is at the front
};

}  // namespace detail

/// Evicts the block that was used least recently.
class LruEviction : public detail::QueueEviction<true> {};

/// Evicts the block that has been resident longest, used or not.
class FifoEviction : public detail::QueueEviction<false> {};

SPILLWAY_CHECK_MODEL(EvictionPolicy<LruEviction>);
SPILLWAY_CHECK_MODEL(EvictionPolicy<FifoEviction>);

}  // namespace spillway
