// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/policy/eviction/absence_search.hpp>
#include <spillway/policy/eviction/absence_set.hpp>
#include <spillway/policy/eviction/slack_tree.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace spillway::detail {

/// Chooses which blocks are away between two uses, so that what remains fits, at the fewest bytes.
///
/// Given the excess over the capacity at each moment, it picks gaps of little total size that take all
/// of the excess away. Were blocks divisible, taking the gap that ends last whenever something is
/// missing would be optimal, since every byte costs the same (Belady 1966, for pages). Blocks are not, so
/// that answer is improved: gaps that the others make superfluous are left out, largest first; gaps
/// are exchanged for smaller ones that do as well; and if the total is still far from what divisible
/// blocks would need, `GapSearch` goes on.
///
/// Cost    O(n log n) for n moments and gaps; keeps its buffers. The same input gives the same answer.
/// Threads thread-unsafe.
class GapCover {
 public:
  /// Chooses among `gaps`, which are closed and of which none is chosen: `excess[t]` bytes must be away
  /// at moment `t`. If all gaps together do not suffice at a moment, all that help there are chosen.
  ///
  /// @returns whether they suffice
  /// @throws  std::bad_alloc
  bool choose(std::vector<std::int64_t> const& excess, GapSet& gaps) {
    queue_.reserve(gaps.size());
    returning_.resize(excess.size() + 1);
    std::int64_t const bound = least_if_divisible(excess, gaps);
    std::int64_t const enough = bound + bound / good_enough;
    bool const is_covered = take_what_ends_last(excess, gaps);
    gaps.prepare_changes(excess);
    if (gaps.chosen_bytes() > enough) {
      leave_out_superfluous(gaps);
    }
    if (gaps.chosen_bytes() > enough) {
      exchange(gaps);
      if (is_covered) {
        search_.improve(gaps, enough, looks_per_gap * gaps.size());
      }
    }
    prefer_cheap(gaps);
    return is_covered;
  }

 private:
  // What bounds the time of the exchanges: the largest gaps come first and matter most.
  static constexpr std::size_t most_rounds = 4;
  static constexpr std::size_t most_tries = 256;
  static constexpr std::size_t most_tries_in_all = std::size_t{1} << 21U;
  // What bounds the time of the search: a tenth of a microsecond or two for each gap there is.
  static constexpr std::size_t looks_per_gap = 128;
  static constexpr std::int64_t good_enough = 1024;  // one part in so many above the bound

  struct Candidate {
    std::uint32_t last;
    std::uint32_t gap;
    std::int64_t bytes;  // not yet taken
    friend bool operator<(Candidate const& a, Candidate const& b) noexcept {
      return a.last != b.last ? a.last < b.last : a.gap < b.gap;
    }
  };

  /// Goes through the moments and takes from the gap that ends last whenever bytes are missing, by
  /// `take(gap, available, missing)`, which says how many. @returns false if some were still missing
  template <class Take>
  bool sweep(std::vector<std::int64_t> const& excess, GapSet const& gaps, Take take) noexcept {
    std::fill(returning_.begin(), returning_.end(), 0);
    queue_.clear();
    std::int64_t away = 0;
    std::uint32_t next = 0;
    bool is_covered = true;
    for (std::uint32_t t = 0; t < excess.size(); ++t) {
      away -= returning_[t];
      for (; next < gaps.size() && gaps[next].run.first <= t; ++next) {
        queue_.push_back({gaps[next].run.last, next, gaps[next].signed_bytes()});
        std::push_heap(queue_.begin(), queue_.end());
      }
      while (away < excess[t] && !queue_.empty() && queue_.front().last >= t) {
        Candidate& latest = queue_.front();
        std::int64_t const taken = take(latest.gap, latest.bytes, excess[t] - away);
        away += taken;
        returning_[std::size_t{latest.last} + 1] += taken;
        latest.bytes -= taken;
        if (latest.bytes == 0) {
          std::pop_heap(queue_.begin(), queue_.end());
          queue_.pop_back();
        }
      }
      is_covered = is_covered && away >= excess[t];
    }
    return is_covered;
  }

  [[nodiscard]] std::int64_t least_if_divisible(std::vector<std::int64_t> const& excess,
                                                GapSet const& gaps) noexcept {
    std::int64_t total = 0;
    sweep(excess, gaps, [&](std::uint32_t, std::int64_t available, std::int64_t missing) noexcept {
      total += std::min(available, missing);
      return std::min(available, missing);
    });
    return total;
  }

  bool take_what_ends_last(std::vector<std::int64_t> const& excess, GapSet& gaps) noexcept {
    return sweep(
        excess, gaps, [&](std::uint32_t gap, std::int64_t available, std::int64_t) noexcept {
          gaps.mark(gap);
          return available;
        });
  }

  static void leave_out_superfluous(GapSet& gaps) noexcept {
    auto const& order = gaps.by_bytes();
    for (std::size_t i = order.size(); i-- != 0;) {
      if (gaps[order[i]].is_chosen && gaps.is_superfluous(order[i])) {
        gaps.flip(order[i]);
      }
    }
  }

  static void exchange(GapSet& gaps) noexcept {
    auto const& order = gaps.by_bytes();
    std::size_t tries_left = most_tries_in_all;
    auto const anyone = [](Gap const&) { return true; };
    bool has_changed = true;
    for (std::size_t round = 0; round < most_rounds && has_changed; ++round) {
      has_changed = false;
      for (std::size_t i = order.size(); i-- != 0 && tries_left != 0;) {
        if (gaps[order[i]].is_chosen) {
          --tries_left;
          has_changed =
              replace(gaps, order[i], gaps[order[i]].bytes - 1, tries_left, anyone) || has_changed;
        }
      }
    }
  }

  /// Puts gaps that need no copy out in the place of some that do, where no more bytes come back.
  static void prefer_cheap(GapSet& gaps) noexcept {
    std::size_t tries_left = most_tries_in_all;
    for (std::uint32_t i = 0; i < gaps.size() && tries_left != 0; ++i) {
      if (gaps[i].is_chosen && gaps[i].is_dear) {
        --tries_left;
        replace(
            gaps, i, gaps[i].bytes, tries_left, [](Gap const& other) { return !other.is_dear; });
      }
    }
  }

  /// Leaves out a chosen gap, or puts the smallest one of at most `most_bytes` in its place that is
  /// away whenever it is needed.
  template <class Admits>
  static bool replace(GapSet& gaps,
                      std::uint32_t chosen,
                      std::uint64_t most_bytes,
                      std::size_t& tries_left,
                      Admits admits) noexcept {
    Gap const& gap = gaps[chosen];
    std::int64_t const slack = gaps.slack().least(gap.run);
    if (slack >= gap.signed_bytes()) {
      gaps.flip(chosen);
      return true;
    }
    auto const needed = static_cast<std::uint64_t>(gap.signed_bytes() - slack);
    if (needed > most_bytes) {
      return false;
    }
    std::uint32_t const first = gaps.slack().first_below(gap.run, gap.signed_bytes());
    std::uint32_t const last = gaps.slack().last_below(gap.run, gap.signed_bytes());
    auto const& order = gaps.by_bytes();
    auto at = std::lower_bound(
        order.begin(), order.end(), needed, [&](std::uint32_t i, std::uint64_t wanted) {
          return gaps[i].bytes < wanted;
        });
    std::size_t tries = std::min(most_tries, tries_left);
    for (; at != order.end() && tries != 0 && gaps[*at].bytes <= most_bytes;
         ++at, --tries, --tries_left) {
      Gap const& other = gaps[*at];
      if (!other.is_chosen && other.is_around(first) && other.is_around(last) && admits(other)) {
        gaps.flip(chosen);
        gaps.flip(*at);
        return true;
      }
    }
    return false;
  }

  std::vector<Candidate> queue_;
  std::vector<std::int64_t> returning_;  // bytes whose gap ended before a moment
  GapSearch search_;
};

}  // namespace spillway::detail
