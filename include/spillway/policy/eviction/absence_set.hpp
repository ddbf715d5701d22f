// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/policy/eviction/slack_tree.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace spillway::detail {

/// Between two uses a block may be away, and takes its bytes off a run of moments.
struct Gap {
  SlackTree::Run run{};
  std::uint64_t bytes = 0;
  std::uint32_t tag = 0;  ///< the caller's
  bool is_dear = false;   ///< the bytes must be copied out, too, not only back in
  bool is_chosen = false;

  [[nodiscard]] std::int64_t signed_bytes() const noexcept {
    return static_cast<std::int64_t>(bytes);
  }
  [[nodiscard]] bool is_around(std::uint32_t moment) const noexcept {
    return run.first <= moment && moment <= run.last;
  }
  [[nodiscard]] bool overlaps(SlackTree::Run other) const noexcept {
    return run.first <= other.last && other.first <= run.last;
  }
};

/// Gaps, which of them are chosen, and how much more than necessary the chosen ones take away at each
/// moment.
///
/// Threads thread-unsafe.
class GapSet {
 public:
  /// Starts over for that many moments: gaps may be added.
  void clear() noexcept { gaps_.clear(); }
  /// @throws std::bad_alloc
  void add(Gap gap) { gaps_.push_back(gap); }

  /// Orders the gaps by their first moment; none may be added after this. @throws std::bad_alloc
  void close(std::size_t moments) {
    moments_ = moments;
    starts_.assign(moments + 1, 0);
    sorted_.resize(gaps_.size());
    for (Gap const& gap : gaps_) {
      ++starts_[std::size_t{gap.run.first} + 1];
    }
    std::partial_sum(starts_.begin(), starts_.end(), starts_.begin());
    for (Gap const& gap : gaps_) {
      sorted_[starts_[gap.run.first]++] = gap;
    }
    std::swap(gaps_, sorted_);
  }

  /// Makes `flip` and all that is named after it usable: finds out how much more than `excess` the
  /// chosen gaps take away at each moment. @throws std::bad_alloc
  void prepare_changes(std::vector<std::int64_t> const& excess) {
    slack_.reserve(moments_);
    values_.assign(moments_, 0);
    by_bytes_.resize(gaps_.size());
    keys_.resize(gaps_.size());
    for (std::uint32_t i = 0; i < size(); ++i) {
      keys_[i] = {2 * gaps_[i].bytes + (gaps_[i].is_dear ? 1U : 0U), i};
    }
    std::sort(keys_.begin(), keys_.end());
    std::transform(
        keys_.begin(), keys_.end(), by_bytes_.begin(), [](auto const& key) { return key.second; });
    find_slack(excess);
  }

  [[nodiscard]] std::uint32_t size() const noexcept {
    return static_cast<std::uint32_t>(gaps_.size());
  }
  [[nodiscard]] Gap const& operator[](std::uint32_t gap) const noexcept { return gaps_[gap]; }
  [[nodiscard]] auto begin() const noexcept { return gaps_.begin(); }
  [[nodiscard]] auto end() const noexcept { return gaps_.end(); }
  /// The gaps from the smallest to the largest; of equal ones those that are not dear come first.
  [[nodiscard]] std::vector<std::uint32_t> const& by_bytes() const noexcept { return by_bytes_; }

  /// Makes a choice before `prepare_changes`.
  void mark(std::uint32_t gap) noexcept { gaps_[gap].is_chosen = true; }

  /// Chooses a gap that is not chosen, or leaves out one that is. @cost O(log n)
  void flip(std::uint32_t gap) noexcept {
    Gap& changed = gaps_[gap];
    changed.is_chosen = !changed.is_chosen;
    slack_.add(changed.run, changed.is_chosen ? changed.signed_bytes() : -changed.signed_bytes());
  }

  [[nodiscard]] SlackTree const& slack() const noexcept { return slack_; }

  /// Whether a chosen gap could be left out. @cost O(log n)
  [[nodiscard]] bool is_superfluous(std::uint32_t gap) const noexcept {
    return slack_.least(gaps_[gap].run) >= gaps_[gap].signed_bytes();
  }

  [[nodiscard]] std::int64_t chosen_bytes() const noexcept {
    std::int64_t total = 0;
    for (Gap const& gap : gaps_) {
      total += gap.is_chosen ? gap.signed_bytes() : 0;
    }
    return total;
  }

 private:
  void find_slack(std::vector<std::int64_t> const& excess) noexcept {
    for (Gap const& gap : gaps_) {
      if (gap.is_chosen) {
        values_[gap.run.first] += gap.signed_bytes();
        if (gap.run.last + 1 < values_.size()) {
          values_[gap.run.last + 1] -= gap.signed_bytes();
        }
      }
    }
    std::int64_t away = 0;
    for (std::size_t t = 0; t < values_.size(); ++t) {
      away += values_[t];
      values_[t] = away - excess[t];
    }
    slack_.assign(values_);
  }

  std::size_t moments_ = 0;
  std::vector<Gap> gaps_;
  std::vector<Gap> sorted_;
  std::vector<std::uint32_t> starts_;
  std::vector<std::pair<std::uint64_t, std::uint32_t>> keys_;
  std::vector<std::uint32_t> by_bytes_;
  std::vector<std::int64_t> values_;
  SlackTree slack_;
};

}  // namespace spillway::detail
