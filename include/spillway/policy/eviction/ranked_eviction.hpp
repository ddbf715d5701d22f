// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/eviction_policy.hpp>
#include <spillway/core/block_heap.hpp>
#include <spillway/core/types.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace spillway {

/// Evicts the block that is cheapest to lose for each byte it frees, and lets values age.
///
/// GreedyDual-Size (Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms", USENIX Symposium on
/// Internet Technologies and Systems, 1997): a block is worth the price of its transfers for each
/// byte, plus the worth that the last victim had when the block was last used. Transfers are the way
/// back and, unless the host copy is valid, the way out; each has a fixed part, so small blocks are
/// dearer for each byte than large ones. With equal prices it is LRU.
///
/// Cost  O(log n); a clean block that became dirty is found out when it is about to be named.
class CostEviction {
 public:
  /// `transfer_overhead_bytes` is what could have been transferred in the time that starting a
  /// transfer takes, about 10 us on a link of 25 GB/s.
  CostEviction() = default;
  explicit CostEviction(std::size_t transfer_overhead_bytes) noexcept
      : overhead_bytes_{static_cast<double>(transfer_overhead_bytes)} {}

  void on_insert(BlockId id, std::size_t bytes, Use /*use*/) {
    ranking_.reserve(id, ranking_.size());
    ranking_.erase(id);
    ranking_.insert_reserved(id, key_of(bytes));
  }
  void on_access(BlockId id, Use /*use*/) noexcept {
    if (ranking_.contains(id)) {
      ranking_.update(id, key_of(ranking_.key(id).bytes));
    }
  }
  void on_erase(BlockId id) noexcept { ranking_.erase(id); }
  void on_misprediction() noexcept {}
  void on_step(AccessSchedule const& /*schedule*/, std::size_t /*capacity_bytes*/) noexcept {}

  template <class Inspect>
  [[nodiscard]] std::optional<BlockId> victim(std::size_t /*short_bytes*/,
                                              Inspect inspect) noexcept {
    double worth = age_;
    auto const victim = ranking_.best([&](BlockId id, Key& key) noexcept {
      std::optional<EvictionCandidate> const block = inspect(id);
      if (!block) {
        return detail::Verdict::skip;
      }
      // Ranked as if clean until looked at: whether it is changes without our being told.
      double const transfers = !block->has_contents ? 0.0 : block->is_clean ? 1.0 : 2.0;
      double const price = key.age + transfers * price_per_byte(key.bytes);
      if (price > key.worth) {
        key.worth = price;
        return detail::Verdict::key_changed;
      }
      worth = key.worth;
      return detail::Verdict::take;
    });
    age_ = std::max(age_, worth);
    return victim;
  }

 private:
  struct Key {
    double worth;
    double age;  // the worth of the last victim when the block was last used
    std::size_t bytes;
    std::uint64_t used;
    [[nodiscard]] bool is_before(Key const& other) const noexcept {
      return worth != other.worth ? worth < other.worth : used < other.used;
    }
  };

  [[nodiscard]] double price_per_byte(std::size_t bytes) const noexcept {
    return 1.0 + overhead_bytes_ / static_cast<double>(std::max<std::size_t>(bytes, 1));
  }
  [[nodiscard]] Key key_of(std::size_t bytes) noexcept {
    return {age_ + price_per_byte(bytes), age_, bytes, ++uses_};
  }

  detail::SlotHeap<Key> ranking_;
  double age_ = 0.0;
  double overhead_bytes_ = 256.0 * 1024.0;
  std::uint64_t uses_ = 0;
};

static_assert(EvictionPolicy<CostEviction>);

}  // namespace spillway
