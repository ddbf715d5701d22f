// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/eviction_policy.hpp>
#include <spillway/core/block_heap.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/types.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace spillway {

namespace detail {

/// Evicts the block that a rule ranks first. It is the base of `SizeEviction` and `CostEviction`.
///
/// A `Rule` has a type `Key` with a member `bytes`. `key_of(bytes, use)` returns the key of a block
/// at its use number `use`, and `judge(key, candidate)` decides whether the block that ranks first
/// is taken.
///
/// Cost  O(log n) for a call, plus O(log n) for each block that cannot leave now.
template <class Rule>
class RankedEviction {
 public:
  RankedEviction() = default;
  explicit RankedEviction(Rule rule) noexcept : rule_{rule} {}

  void on_insert(BlockId id, std::size_t bytes, Use /*use*/) {
    ranking_.reserve(id, ranking_.size());
    ranking_.erase(id);
    ranking_.insert_reserved(id, rule_.key_of(bytes, ++uses_));
  }
  void on_access(BlockId id, Use /*use*/) noexcept {
    if (ranking_.contains(id)) {
      ranking_.update(id, rule_.key_of(ranking_.key(id).bytes, ++uses_));
    }
  }
  void on_erase(BlockId id) noexcept { ranking_.erase(id); }
  void on_misprediction() noexcept {}
  void on_step(AccessSchedule const& /*schedule*/, std::size_t /*capacity_bytes*/) noexcept {}

  template <class Inspect>
  [[nodiscard]] std::optional<BlockId> victim(std::size_t /*short_bytes*/,
                                              Inspect inspect) noexcept {
    return ranking_.best([&](BlockId id, typename Rule::Key& key) noexcept {
      std::optional<EvictionCandidate> const block = inspect(id);
      return block ? rule_.judge(key, *block) : Verdict::skip;
    });
  }

 private:
  Rule rule_;
  BlockHeap<typename Rule::Key> ranking_;
  std::uint64_t uses_ = 0;
};

/// Ranks the largest block first, and among equally large ones the least recently used.
struct SizeRule {
  struct Key {
    std::size_t bytes;
    std::uint64_t used;
    [[nodiscard]] bool is_before(Key const& other) const noexcept {
      return bytes != other.bytes ? bytes > other.bytes : used < other.used;
    }
  };

  [[nodiscard]] static Key key_of(std::size_t bytes, std::uint64_t use) noexcept {
    return {bytes, use};
  }
  [[nodiscard]] static Verdict judge(Key const& /*key*/, EvictionCandidate const& /*block*/) {
    return Verdict::take;
  }
};

/// Ranks the block first that is cheapest to lose for each byte that it frees, by the algorithm
/// GreedyDual-Size, which `CostEviction` describes.
class CostRule {
 public:
  struct Key {
    double worth;
    double age;  // the worth of the last victim when the block was last used
    std::size_t bytes;
    std::uint64_t used;
    [[nodiscard]] bool is_before(Key const& other) const noexcept {
      return worth != other.worth ? worth < other.worth : used < other.used;
    }
  };

  explicit CostRule(std::size_t overhead_bytes) noexcept
      : overhead_bytes_{static_cast<double>(overhead_bytes)} {}

  [[nodiscard]] Key key_of(std::size_t bytes, std::uint64_t use) const noexcept {
    return {age_ + price_per_byte(bytes), age_, bytes, use};
  }

  /// A block is ranked as if it were clean until it comes first, because the policy is not told
  /// when a block becomes dirty.
  [[nodiscard]] Verdict judge(Key& key, EvictionCandidate const& block) noexcept {
    double const transfers = !block.has_contents ? 0.0 : block.is_clean ? 1.0 : 2.0;
    double const worth = key.age + transfers * price_per_byte(key.bytes);
    if (worth > key.worth) {
      key.worth = worth;
      return Verdict::key_changed;
    }
    age_ = std::max(age_, key.worth);
    return Verdict::take;
  }

 private:
  [[nodiscard]] double price_per_byte(std::size_t bytes) const noexcept {
    return 1.0 + overhead_bytes_ / static_cast<double>(std::max<std::size_t>(bytes, 1));
  }

  double overhead_bytes_;
  double age_ = 0.0;  // the worth of the last victim
};

}  // namespace detail

/// Evicts the largest block; among equally large ones the one that was used least recently.
///
/// Makes room with the fewest transfers, not with the fewest bytes.
class SizeEviction : public detail::RankedEviction<detail::SizeRule> {};

/// Evicts the block that is cheapest to lose for each byte it frees, and lets values age.
///
/// GreedyDual-Size (Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms", USENIX Symposium on
/// Internet Technologies and Systems, 1997): a block is worth the price of its transfers for each
/// byte, plus the worth that the last victim had when the block was last used. The transfers are
/// the swap-in and, unless the host copy is valid, the swap-out. Each has a fixed part, so small
/// blocks cost more for each byte than large ones. With equal prices it is LRU.
class CostEviction : public detail::RankedEviction<detail::CostRule> {
 public:
  /// `transfer_overhead_bytes` is what could have been transferred in the time that starting a
  /// transfer takes, about 10 us on a link of 25 GB/s.
  explicit CostEviction(std::size_t transfer_overhead_bytes) noexcept
      : RankedEviction{detail::CostRule{transfer_overhead_bytes}} {}
  CostEviction() noexcept : CostEviction{std::size_t{256} * 1024} {}
};

SPILLWAY_CHECK_MODEL(EvictionPolicy<SizeEviction>);
SPILLWAY_CHECK_MODEL(EvictionPolicy<CostEviction>);

}  // namespace spillway
