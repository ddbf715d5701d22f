// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

namespace spillway {

/// Chooses which blocks are away between two uses, so that what remains fits, at the fewest bytes.
///
/// Given the excess over the capacity at each moment and gaps, each of which takes its bytes off a run
/// of moments, it picks gaps of little total size that take the whole excess away. Were blocks
/// divisible, taking the gap that ends last whenever something is missing would be optimal, since
/// every byte costs the same (Belady 1966 for pages). Blocks are not, so that answer is then improved:
/// gaps that the others make superfluous are left out, largest first, and gaps are exchanged for
/// smaller ones that do as well.
///
/// Cost    O(n log n) for n moments and gaps; keeps its buffers.
/// Threads thread-unsafe.
class GapCover {
 public:
  /// A block may be away during the moments [first, last], both included.
  struct Gap {
    std::uint32_t first;
    std::uint32_t last;
    std::uint64_t bytes;
    std::uint32_t tag;  ///< the caller's
    bool is_chosen = false;
  };

  /// Sets `is_chosen` and may reorder `gaps`. `excess[t]` bytes must be away at moment `t`. If all gaps
  /// together do not suffice at a moment, all that help there are chosen.
  ///
  /// @throws std::bad_alloc, with nothing chosen
  void choose(std::vector<std::int64_t> const& excess, std::vector<Gap>& gaps) {
    reserve(excess.size(), gaps.size());
    std::sort(
        gaps.begin(), gaps.end(), [](Gap const& a, Gap const& b) { return a.first < b.first; });
    take_what_ends_last(excess, gaps);
    build_slack(excess, gaps);
    std::iota(by_bytes_.begin(), by_bytes_.end(), 0U);
    std::sort(by_bytes_.begin(), by_bytes_.end(), [&](std::uint32_t a, std::uint32_t b) {
      return std::pair{gaps[a].bytes, a} < std::pair{gaps[b].bytes, b};
    });
    leave_out_superfluous(gaps);
    exchange(gaps);
  }

 private:
  static constexpr std::int64_t infinite = std::numeric_limits<std::int64_t>::max() / 2;
  static constexpr std::uint32_t nowhere = ~std::uint32_t{0};
  // What bounds the time of the exchanges: the largest gaps come first and matter most.
  static constexpr std::size_t most_rounds = 4;
  static constexpr std::size_t most_tries = 256;
  static constexpr std::size_t most_tries_in_all = std::size_t{1} << 21U;

  struct Candidate {
    std::uint32_t last;
    std::uint32_t gap;
    friend bool operator<(Candidate const& a, Candidate const& b) noexcept {
      return a.last != b.last ? a.last < b.last : a.gap < b.gap;
    }
  };

  void reserve(std::size_t moments, std::size_t gaps) {
    leaves_ = std::bit_ceil(std::max<std::size_t>(moments, 1));
    minimum_.resize(2 * leaves_);
    added_.resize(2 * leaves_);
    change_.resize(moments + 1);
    by_bytes_.resize(gaps);
    queue_.reserve(gaps);
  }

  void take_what_ends_last(std::vector<std::int64_t> const& excess,
                           std::vector<Gap>& gaps) noexcept {
    std::fill(change_.begin(), change_.end(), 0);
    queue_.clear();
    std::int64_t away = 0;
    std::size_t next = 0;
    for (std::uint32_t t = 0; t < excess.size(); ++t) {
      away -= change_[t];
      for (; next < gaps.size() && gaps[next].first <= t; ++next) {
        queue_.push_back({gaps[next].last, static_cast<std::uint32_t>(next)});
        std::push_heap(queue_.begin(), queue_.end());
      }
      while (away < excess[t] && !queue_.empty() && queue_.front().last >= t) {
        Gap& gap = gaps[queue_.front().gap];
        std::pop_heap(queue_.begin(), queue_.end());
        queue_.pop_back();
        gap.is_chosen = true;
        away += signed_bytes(gap);
        change_[std::size_t{gap.last} + 1] += signed_bytes(gap);
      }
    }
  }

  void build_slack(std::vector<std::int64_t> const& excess, std::vector<Gap> const& gaps) noexcept {
    std::fill(change_.begin(), change_.end(), 0);
    for (Gap const& gap : gaps) {
      if (gap.is_chosen) {
        change_[gap.first] += signed_bytes(gap);
        change_[std::size_t{gap.last} + 1] -= signed_bytes(gap);
      }
    }
    std::int64_t away = 0;
    for (std::size_t t = 0; t < leaves_; ++t) {
      if (t < excess.size()) {
        away += change_[t];
      }
      minimum_[leaves_ + t] = t < excess.size() ? away - excess[t] : infinite;
    }
    std::fill(added_.begin(), added_.end(), 0);
    for (std::size_t node = leaves_ - 1; node != 0; --node) {
      minimum_[node] = std::min(minimum_[2 * node], minimum_[2 * node + 1]);
    }
  }

  void leave_out_superfluous(std::vector<Gap>& gaps) noexcept {
    for (std::size_t i = by_bytes_.size(); i-- != 0;) {
      Gap& gap = gaps[by_bytes_[i]];
      if (gap.is_chosen && least(gap) >= signed_bytes(gap)) {
        set(gap, false);
      }
    }
  }

  void exchange(std::vector<Gap>& gaps) noexcept {
    std::size_t tries_left = most_tries_in_all;
    bool has_changed = true;
    for (std::size_t round = 0; round < most_rounds && has_changed; ++round) {
      has_changed = false;
      for (std::size_t i = by_bytes_.size(); i-- != 0 && tries_left != 0;) {
        Gap& gap = gaps[by_bytes_[i]];
        if (!gap.is_chosen) {
          continue;
        }
        --tries_left;
        std::int64_t const slack = least(gap);
        if (slack >= signed_bytes(gap)) {
          set(gap, false);
          has_changed = true;
        } else if (slack > 0 && replace(gaps, gap, i, slack, tries_left)) {
          has_changed = true;
        }
      }
    }
  }

  /// Puts the smallest gap in the place of `gap` that is away whenever `gap` is needed.
  bool replace(std::vector<Gap>& gaps,
               Gap& gap,
               std::size_t rank,
               std::int64_t slack,
               std::size_t& tries_left) noexcept {
    std::int64_t const bytes = signed_bytes(gap);
    std::uint32_t const first = first_below(gap, bytes);
    std::uint32_t const last = last_below(gap, bytes);
    auto const needed = static_cast<std::uint64_t>(bytes - slack);
    auto const begin = by_bytes_.begin();
    auto const end = begin + static_cast<std::ptrdiff_t>(rank);
    auto at = std::lower_bound(begin, end, needed, [&](std::uint32_t i, std::uint64_t wanted) {
      return gaps[i].bytes < wanted;
    });
    std::size_t tries = std::min(most_tries, tries_left);
    for (; at != end && tries != 0 && gaps[*at].bytes < gap.bytes; ++at, --tries, --tries_left) {
      Gap& other = gaps[*at];
      if (!other.is_chosen && other.first <= first && other.last >= last) {
        set(gap, false);
        set(other, true);
        return true;
      }
    }
    return false;
  }

  [[nodiscard]] static std::int64_t signed_bytes(Gap const& gap) noexcept {
    return static_cast<std::int64_t>(gap.bytes);
  }

  void set(Gap& gap, bool is_chosen) noexcept {
    gap.is_chosen = is_chosen;
    add(1, 0, leaves_ - 1, gap, is_chosen ? signed_bytes(gap) : -signed_bytes(gap));
  }

  // A segment tree over the slack: bytes that are away beyond what must be.
  [[nodiscard]] static bool is_apart(std::size_t low, std::size_t high, Gap const& gap) noexcept {
    return high < gap.first || gap.last < low;
  }
  [[nodiscard]] static bool is_inside(std::size_t low, std::size_t high, Gap const& gap) noexcept {
    return gap.first <= low && high <= gap.last;
  }

  void
  add(std::size_t node, std::size_t low, std::size_t high, Gap const& gap, std::int64_t bytes) {
    if (is_apart(low, high, gap)) {
      return;
    }
    if (is_inside(low, high, gap)) {
      minimum_[node] += bytes;
      added_[node] += bytes;
      return;
    }
    std::size_t const middle = (low + high) / 2;
    add(2 * node, low, middle, gap, bytes);
    add(2 * node + 1, middle + 1, high, gap, bytes);
    minimum_[node] = std::min(minimum_[2 * node], minimum_[2 * node + 1]) + added_[node];
  }

  [[nodiscard]] std::int64_t least(Gap const& gap) const noexcept {
    return least(1, 0, leaves_ - 1, gap);
  }
  [[nodiscard]] std::int64_t
  least(std::size_t node, std::size_t low, std::size_t high, Gap const& gap) const noexcept {
    if (is_apart(low, high, gap)) {
      return infinite;
    }
    if (is_inside(low, high, gap)) {
      return minimum_[node];
    }
    std::size_t const middle = (low + high) / 2;
    return std::min(least(2 * node, low, middle, gap), least(2 * node + 1, middle + 1, high, gap)) +
           added_[node];
  }

  [[nodiscard]] std::uint32_t first_below(Gap const& gap, std::int64_t bytes) const noexcept {
    return below(1, 0, leaves_ - 1, gap, bytes, true);
  }
  [[nodiscard]] std::uint32_t last_below(Gap const& gap, std::int64_t bytes) const noexcept {
    return below(1, 0, leaves_ - 1, gap, bytes, false);
  }
  /// The first or last moment of a gap with less than `bytes` of slack.
  [[nodiscard]] std::uint32_t below(std::size_t node,
                                    std::size_t low,
                                    std::size_t high,
                                    Gap const& gap,
                                    std::int64_t bytes,
                                    bool is_first) const noexcept {
    if (is_apart(low, high, gap) || minimum_[node] >= bytes) {
      return nowhere;
    }
    if (low == high) {
      return static_cast<std::uint32_t>(low);
    }
    std::size_t const middle = (low + high) / 2;
    bytes -= added_[node];
    auto const in_half = [&](bool is_low) {
      return is_low ? below(2 * node, low, middle, gap, bytes, is_first)
                    : below(2 * node + 1, middle + 1, high, gap, bytes, is_first);
    };
    std::uint32_t const found = in_half(is_first);
    return found != nowhere ? found : in_half(!is_first);
  }

  std::size_t leaves_ = 1;
  std::vector<std::int64_t> minimum_;
  std::vector<std::int64_t> added_;
  std::vector<std::int64_t> change_;
  std::vector<std::uint32_t> by_bytes_;
  std::vector<Candidate> queue_;
};

}  // namespace spillway
