// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/policy/eviction/absence_set.hpp>
#include <spillway/policy/eviction/slack_tree.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace spillway::detail {

/// Makes a choice of gaps cheaper by trial: throws a few out, fills the hole anew, and keeps what
/// became no dearer (large neighbourhood search: Shaw, "Using Constraint Programming and Local Search
/// Methods to Solve Vehicle Routing Problems", 1998).
///
/// Its random numbers always start the same: the same gaps give the same answer.
/// Threads thread-unsafe.
class GapSearch {
 public:
  /// Goes on until the chosen bytes are at most `enough` or about `looks` gaps have been looked at. The
  /// choice must take all of the excess away, and does so afterwards.
  ///
  /// @throws std::bad_alloc, with a choice as good as before
  void improve(GapSet& gaps, std::int64_t enough, std::size_t looks) {
    flipped_.reserve(std::size_t{4} * gaps.size());
    random_ = 1;
    looks_left_ = looks;
    std::int64_t total = gaps.chosen_bytes();
    while (total > enough && looks_left_ != 0 && gaps.size() != 0) {
      flipped_.clear();
      SlackTree::Run const hole = make_hole(gaps);
      std::int64_t const saved = fill(gaps, hole) ? total - total_after(gaps, total, hole) : -1;
      if (saved >= 0) {
        total -= saved;
      } else {
        undo(gaps);
      }
    }
  }

 private:
  /// How a gap is chosen for a moment at which bytes are missing.
  enum class Taste : std::uint8_t { longest, just_enough, just_too_small, any };

  std::uint64_t random(std::uint64_t below) noexcept {  // splitmix64
    random_ += 0x9E3779B97F4A7C15U;
    std::uint64_t z = random_;
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
    return (z ^ (z >> 31U)) % below;
  }

  void spend(std::size_t looks) noexcept { looks_left_ -= std::min(looks_left_, looks); }

  void flip(GapSet& gaps, std::uint32_t gap) {
    flipped_.push_back(gap);
    gaps.flip(gap);
    spend(look_of_flip);
  }

  void undo(GapSet& gaps) noexcept {
    for (; !flipped_.empty(); flipped_.pop_back()) {
      gaps.flip(flipped_.back());
    }
  }

  /// Throws out a chosen gap and up to three that overlap it. @returns the moments concerned
  SlackTree::Run make_hole(GapSet& gaps) {
    SlackTree::Run hole{0, SlackTree::nowhere};
    std::uint64_t wanted = 1 + random(4);
    for (std::size_t tries = 32; tries != 0 && wanted != 0; --tries) {
      auto const i = static_cast<std::uint32_t>(random(gaps.size()));
      Gap const& gap = gaps[i];
      if (!gap.is_chosen || !gap.overlaps(hole)) {
        continue;
      }
      bool const is_first = flipped_.empty();
      hole = is_first ? gap.run
                      : SlackTree::Run{std::min(hole.first, gap.run.first),
                                       std::max(hole.last, gap.run.last)};
      flip(gaps, i);
      --wanted;
    }
    spend(1);
    return hole;
  }

  /// Chooses gaps until nothing is missing in the hole. @returns false if it cannot be done
  bool fill(GapSet& gaps, SlackTree::Run hole) {
    bool const is_from_left = random(2) == 0;
    for (;;) {
      std::uint32_t const moment =
          is_from_left ? gaps.slack().first_below(hole, 0) : gaps.slack().last_below(hole, 0);
      if (moment == SlackTree::nowhere) {
        return true;
      }
      auto const missing = static_cast<std::uint64_t>(-gaps.slack().least({moment, moment}));
      std::uint32_t const best = pick(gaps, moment, missing, is_from_left);
      if (best == SlackTree::nowhere) {
        return false;
      }
      flip(gaps, best);
    }
  }

  std::uint32_t pick(GapSet const& gaps,
                     std::uint32_t moment,
                     std::uint64_t missing,
                     bool is_from_left) noexcept {
    auto const taste = static_cast<Taste>(random(4));
    std::uint32_t best = SlackTree::nowhere;
    std::uint64_t best_score = 0;
    // Ordered by their first moment: later ones begin after it.
    for (std::uint32_t i = 0; i < gaps.size() && gaps[i].run.first <= moment; ++i) {
      Gap const& gap = gaps[i];
      if (gap.is_chosen || gap.run.last < moment) {
        continue;
      }
      std::uint64_t const score = score_of(gap, taste, missing, is_from_left);
      if (best == SlackTree::nowhere || score > best_score) {
        best = i;
        best_score = score;
      }
    }
    spend(gaps.size());
    return best;
  }

  [[nodiscard]] std::uint64_t
  score_of(Gap const& gap, Taste taste, std::uint64_t missing, bool is_from_left) noexcept {
    constexpr std::uint64_t suits = std::uint64_t{1} << 62U;
    switch (taste) {
    case Taste::longest:
      return is_from_left ? gap.run.last : ~gap.run.first;
    case Taste::just_enough:
      return gap.bytes >= missing ? suits - (gap.bytes - missing) : gap.bytes;
    case Taste::just_too_small:
      return gap.bytes <= missing ? suits + gap.bytes : suits - gap.bytes;
    case Taste::any:
      break;
    }
    return random(suits);
  }

  /// Leaves out what the new gaps have made superfluous. @returns the chosen bytes then
  std::int64_t total_after(GapSet& gaps, std::int64_t total, SlackTree::Run hole) {
    auto const& order = gaps.by_bytes();
    for (std::size_t i = order.size(); i-- != 0;) {
      if (gaps[order[i]].is_chosen && gaps[order[i]].overlaps(hole)) {
        spend(look_of_flip);
        if (gaps.is_superfluous(order[i])) {
          flip(gaps, order[i]);
        }
      }
    }
    spend(order.size());
    std::sort(flipped_.begin(), flipped_.end());
    for (std::size_t i = 0; i < flipped_.size(); ++i) {
      // A gap that was flipped twice is as before.
      if (i + 1 < flipped_.size() && flipped_[i] == flipped_[i + 1]) {
        ++i;
        continue;
      }
      Gap const& gap = gaps[flipped_[i]];
      total += gap.is_chosen ? gap.signed_bytes() : -gap.signed_bytes();
    }
    return total;
  }

  static constexpr std::size_t look_of_flip =
      32;  // what a walk down the tree costs beside one look

  std::vector<std::uint32_t> flipped_;
  std::uint64_t random_ = 1;
  std::size_t looks_left_ = 0;
};

}  // namespace spillway::detail
