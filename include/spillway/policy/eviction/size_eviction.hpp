// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/eviction_policy.hpp>
#include <spillway/core/block_heap.hpp>
#include <spillway/core/types.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace spillway {

/// Evicts the largest block; among equally large ones the one whose last use is longest ago.
///
/// Makes room with the fewest transfers, not with the fewest bytes. Cost  O(log n).
class SizeEviction {
 public:
  void on_insert(BlockId id, std::size_t bytes, Use /*use*/) {
    ranking_.reserve(id, ranking_.size());
    ranking_.erase(id);
    ranking_.insert_reserved(id, {bytes, ++uses_});
  }
  void on_access(BlockId id, Use /*use*/) noexcept {
    if (ranking_.contains(id)) {
      ranking_.update(id, {ranking_.key(id).bytes, ++uses_});
    }
  }
  void on_erase(BlockId id) noexcept { ranking_.erase(id); }
  void on_misprediction() noexcept {}
  void on_step(AccessSchedule const& /*schedule*/, std::size_t /*capacity_bytes*/) noexcept {}

  template <class Inspect>
  [[nodiscard]] std::optional<BlockId> victim(std::size_t /*short_bytes*/,
                                              Inspect inspect) noexcept {
    return ranking_.best([&](BlockId id, Key const&) noexcept {
      return inspect(id) ? detail::Verdict::take : detail::Verdict::skip;
    });
  }

 private:
  struct Key {
    std::size_t bytes;
    std::uint64_t used;
    [[nodiscard]] bool is_before(Key const& other) const noexcept {
      return bytes != other.bytes ? bytes > other.bytes : used < other.used;
    }
  };

  detail::SlotHeap<Key> ranking_;
  std::uint64_t uses_ = 0;
};

static_assert(EvictionPolicy<SizeEviction>);

}  // namespace spillway
