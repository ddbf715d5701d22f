// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/core/config.hpp>
#include <spillway/policy/compaction/layout_line.hpp>
#include <spillway/policy/compaction/move_order.hpp>
#include <spillway/policy/compaction/size_pool.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace spillway::detail {

/// Finds plans that join gaps that are far apart by exchanging blocks. This is useful if hardly
/// more is free than is asked for. `SlidingCompaction` uses it if vacating a window would cost
/// much.
///
/// The algorithm is a greedy local search with exchanges; `docs/benchmarks.md` says what each part
/// earns:
/// - It lifts a span of neighbouring blocks, one with many free granules for the cost of moving it,
///   and goes through the gaps elsewhere, large ones first. Each granule that fills a gap becomes
///   free in the span.
/// - A gap is filled with lifted blocks as exactly as possible, which is a subset sum
///   (`SizePool`). There are two more ways to fill one: one or two of its neighbours are lifted
///   too, and find a place in another gap or in the span; or the blocks between it and the next
///   gaps slide, so that the gaps become one.
/// - Of these ways it takes the one that moves least, with a price on granules that stay free
///   outside the span. There may be only as many of those as are free beyond what is asked for.
/// - Blocks that are still lifted go to one end of the span, and `MoveOrder` brings the moves into
///   an order in which they can be made.
///
/// Example: gap 1 | 1 | 4 | 4 | 2 | gap 3, and all 4 that are free are wanted. Sliding moves 11.
/// Lifting the block of 2, and the block of 1 beside the gap of 1, which together hold it, moves 3:
/// the 1 goes to the far end.
///
/// Threads  thread-compatible.
/// Cost     at most `Limits::looks`, and O(n) for n blocks for each of some twenty lengths of a
///          span
template <class = Lazily>
class BasicExchangeSearch {
 public:
  /// Bounds on the time of a search.
  struct Limits {
    std::size_t most_blocks = 4096;   ///< no search in larger layouts
    std::size_t most_lifted = 400;    ///< blocks in a span
    std::uint64_t fill_looks = 2000;  ///< for one gap and one way to fill it
    std::uint64_t looks = 400'000;    ///< for one search
  };

  BasicExchangeSearch(LayoutLine const& line, Limits const& limits)
      : line_{line}, limits_{limits} {}

  /// Calls `use(plan)` for each plan found that moves fewer than `bound` granules; `use` returns
  /// the new bound.
  ///
  /// @throws std::bad_alloc
  template <class Use>
  void search(std::uint32_t count, std::uint64_t bound, Use use) {
    list_gaps();
    looks_ = limits_.looks;
    double const least = 0.5 * std::max<std::uint32_t>(count, 1);  // more than 0, so that it grows
    for (double cost = least; cost < static_cast<double>(bound) && looks_ > 0; cost *= 1.4) {
      for (BlockSpan const& span : spans_of_at_most(static_cast<std::uint64_t>(cost), count)) {
        if (auto plan = try_span(span, count, bound)) {
          bound = use(std::move(*plan));
        }
      }
    }
  }

 private:
  // One way to fill a gap: the gaps `from` to `to` become one, which is then filled.
  struct Way {
    std::size_t from = 0;
    std::size_t to = 0;
    std::uint64_t cost = 0;  // granules of the blocks between them
    std::uint64_t room = 0;  // granules of the gaps
    bool is_lift = false;    // the blocks between are lifted, too; else they slide
    SizePool::Choice choice;

    [[nodiscard]] std::uint64_t gain() const noexcept { return choice.sum - (is_lift ? cost : 0); }
    [[nodiscard]] std::uint64_t waste() const noexcept { return room - gain(); }
  };

  void list_gaps() {
    for (std::size_t i = 0; i <= line_.size(); ++i) {
      if (line_.gap(i) != 0) {
        gaps_.push_back(static_cast<std::uint32_t>(i));
        room_ += line_.gap(i);
      }
    }
    std::sort(gaps_.begin(), gaps_.end(), [this](std::uint32_t a, std::uint32_t b) {
      return line_.gap(a) != line_.gap(b) ? line_.gap(a) > line_.gap(b) : a < b;
    });
  }

  // The spans of at most `cost` granules with the most free granules; a few that overlap little.
  [[nodiscard]] std::vector<BlockSpan> spans_of_at_most(std::uint64_t cost, std::uint32_t count) {
    std::vector<BlockSpan> spans;
    BlockSpan span;
    for (std::size_t i = 0; i < line_.size(); ++i) {
      if (span.to == span.from) {
        span.room = line_.gap(i);
      }
      span.to = i + 1;
      span.cost += line_.block(i).count;
      span.room += line_.gap(i + 1);
      if (line_.block(i).is_fixed) {
        span = {i + 1, i + 1, 0, 0};
        continue;
      }
      while (span.from < span.to && span.cost > cost) {
        span.cost -= line_.block(span.from).count;
        span.room -= line_.gap(span.from);
        ++span.from;
      }
      if (span.from < span.to && span.cost + span.room >= count) {
        spans.push_back(span);
      }
    }
    looks_ -= std::min<std::uint64_t>(looks_, line_.size());
    constexpr std::size_t most_spans = 6;
    std::vector<BlockSpan> chosen;
    while (chosen.size() < most_spans) {
      auto const best =
          std::max_element(spans.begin(), spans.end(), [](BlockSpan const& a, BlockSpan const& b) {
            return a.room < b.room;
          });
      if (best == spans.end()) {
        break;
      }
      BlockSpan const one = *best;
      chosen.push_back(one);
      std::erase_if(spans, [&](BlockSpan const& other) {
        std::size_t const from = std::max(one.from, other.from);
        std::size_t const to = std::min(one.to, other.to);
        return from < to && 2 * (to - from) > other.to - other.from;
      });
    }
    return chosen;
  }

  [[nodiscard]] std::optional<LayoutPlan>
  try_span(BlockSpan const& span, std::uint32_t count, std::uint64_t bound) {
    if (span.room >= count || room_ < count || span.to - span.from > limits_.most_lifted) {
      return std::nullopt;  // sliding alone suffices, or no exchange can suffice
    }
    std::uint64_t missing = count - span.room;
    waste_left_ = room_ - count;
    price_ = waste_left_ == 0
                 ? 0.0
                 : 0.5 * static_cast<double>(span.cost) / static_cast<double>(waste_left_);
    bound_ = bound;
    cost_ = span.cost;
    wanted_.clear();
    pool_.clear();
    is_closed_.assign(line_.size() + 1, 0);
    for (std::size_t i = span.from; i <= span.to; ++i) {
      is_closed_[i] = 1;
    }
    for (std::size_t i = span.from; i < span.to; ++i) {
      pool_.add(static_cast<std::uint32_t>(i), line_.block(i).count);
    }
    looks_ -= std::min<std::uint64_t>(looks_, line_.size() / 4 + 4 * (span.to - span.from));

    for (std::uint32_t const gap : gaps_) {
      if (missing == 0) {
        break;
      }
      if (is_closed_[gap]) {
        continue;
      }
      std::uint64_t const here = line_.gap(gap);
      auto const way = best_way(gap);
      if (!way || (here <= waste_left_ && price_ * static_cast<double>(here) < score(*way))) {
        if (here > waste_left_) {
          return std::nullopt;
        }
        waste_left_ -= here;
        continue;
      }
      missing -= std::min(missing, way->gain());
      apply(*way);
    }
    if (missing != 0) {
      return std::nullopt;
    }
    auto plan = place_rest(span, count, bound, false);
    auto other = place_rest(span, count, plan ? plan->cost : bound, true);
    return other ? std::move(other) : std::move(plan);
  }

  // Fills `way` from the pool as well as possible, and keeps it if it is better than `best`.
  void consider(Way way, std::uint64_t target, std::optional<Way>& best) {
    std::uint64_t looks = std::min(limits_.fill_looks, looks_);
    looks_ -= looks;
    way.choice = pool_.best_for(target, looks);
    looks_ += looks;
    looks_ -= std::min<std::uint64_t>(looks_, 8);
    bool const is_gain = way.choice.sum > (way.is_lift ? way.cost : 0);
    if (is_gain && way.waste() <= waste_left_ && (!best || score(way) < score(*best))) {
      best = std::move(way);
    }
  }

  // Considers filling the gap alone, and with one or two of the blocks beside it lifted.
  void lift_around(std::size_t gap, std::optional<Way>& best) {
    for (std::size_t blocks = 0; blocks <= 2 && !(blocks == 1 && best); ++blocks) {
      for (std::size_t below = 0; below <= blocks; ++below) {
        Way way;
        way.is_lift = true;
        way.from = gap - std::min(gap, below);
        way.to = way.from + blocks;
        if (gap < below || way.to > line_.size()) {
          continue;
        }
        bool is_open = !is_closed_[way.from];
        way.room = line_.gap(way.from);
        for (std::size_t i = way.from; i < way.to; ++i) {
          is_open = is_open && can_cross(i, i + 1);
          way.cost += line_.block(i).count;
          way.room += line_.gap(i + 1);
        }
        if (is_open && cost_ + way.cost < bound_) {
          consider(way, way.cost + way.room, best);
        }
      }
    }
  }

  // Considers joining the gap with the next ones above or below by sliding the blocks between.
  void slide_towards(std::size_t gap, bool is_up, std::optional<Way>& best) {
    constexpr int most_gaps = 6;
    Way way;
    way.from = gap;
    way.to = gap;
    way.room = line_.gap(gap);
    for (int gaps = 0; gaps < most_gaps;) {
      if (is_up ? way.to == line_.size() : way.from == 0) {
        return;
      }
      std::size_t const block = is_up ? way.to : way.from - 1;
      std::size_t const next = is_up ? way.to + 1 : way.from - 1;
      if (!can_cross(block, next)) {
        return;
      }
      way.cost += line_.block(block).count;
      (is_up ? way.to : way.from) = next;
      if (cost_ + way.cost >= bound_ || (best && static_cast<double>(way.cost) >= score(*best))) {
        return;
      }
      looks_ -= std::min<std::uint64_t>(looks_, 1);
      if (line_.gap(next) != 0) {
        way.room += line_.gap(next);
        ++gaps;
        consider(way, way.room, best);
      }
    }
  }

  [[nodiscard]] std::optional<Way> best_way(std::size_t gap) {
    std::optional<Way> best;
    lift_around(gap, best);
    if (!best || best->cost != 0 || best->waste() != 0) {
      slide_towards(gap, true, best);
      slide_towards(gap, false, best);
    }
    return best;
  }

  void apply(Way const& way) {
    waste_left_ -= way.waste();
    cost_ += way.cost;
    std::uint32_t at = line_.gap_first(way.from);
    auto const put = [&](std::uint32_t block) {
      wanted_.push_back({block, at});
      at += line_.block(block).count;
    };
    if (!way.is_lift) {
      for (std::size_t i = way.from; i < way.to; ++i) {
        put(static_cast<std::uint32_t>(i));
      }
    }
    pool_.take(way.choice, put);
    for (std::size_t i = way.from; way.is_lift && i < way.to; ++i) {
      pool_.add(static_cast<std::uint32_t>(i), line_.block(i).count);
    }
    std::fill(is_closed_.begin() + static_cast<std::ptrdiff_t>(way.from),
              is_closed_.begin() + static_cast<std::ptrdiff_t>(way.to) + 1,
              1);
  }

  // Puts the blocks that are left in the pool to one end of the span, and orders the moves.
  [[nodiscard]] std::optional<LayoutPlan>
  place_rest(BlockSpan const& span, std::uint32_t count, std::uint64_t bound, bool is_up) {
    std::vector<std::uint32_t> rest;
    pool_.for_each([&](std::uint32_t block) { rest.push_back(block); });
    // Blocks of the span first and in order, so that they slide and do not swap places.
    auto const is_foreign = [&](std::uint32_t block) {
      return block < span.from || block >= span.to;
    };
    std::sort(rest.begin(), rest.end(), [&](std::uint32_t a, std::uint32_t b) {
      return std::pair{is_foreign(a), is_up ? b : a} < std::pair{is_foreign(b), is_up ? a : b};
    });
    std::vector<LayoutMove> wanted = wanted_;
    std::uint32_t low = line_.gap_first(span.from);
    std::uint32_t high = line_.gap_end(span.to);
    for (std::uint32_t const block : rest) {
      std::uint32_t const size = line_.block(block).count;
      std::uint32_t const to = is_up ? high - size : low;
      (is_up ? high : low) = is_up ? to : to + size;
      wanted.push_back({block, to});
    }
    std::erase_if(wanted, [this](LayoutMove const& move) {
      return line_.block(move.block).first == move.to;
    });
    looks_ -= std::min<std::uint64_t>(looks_, line_.size() / 4 + 16 * wanted.size());
    order_.read(line_);
    auto plan = order_.order(line_, std::move(wanted), bound);
    if (plan) {
      plan->first = is_up ? high - count : low;
      plan->count = count;
    }
    return plan;
  }

  [[nodiscard]] double score(Way const& way) const noexcept {
    return static_cast<double>(way.cost) + price_ * static_cast<double>(way.waste());
  }
  // Whether a gap may be joined with `gap`, which lies beyond `block`.
  [[nodiscard]] bool can_cross(std::size_t block, std::size_t gap) const noexcept {
    return !line_.block(block).is_fixed && !is_closed_[gap];
  }

  LayoutLine line_;
  Limits limits_;
  std::vector<std::uint32_t> gaps_;  // gaps that are not empty, large ones first
  std::uint64_t room_ = 0;           // granules of all gaps
  std::uint64_t looks_ = 0;          // the looks that are left

  // The state of one try.
  SizePool pool_;
  std::vector<char> is_closed_;  // gaps of the span, and those that have been filled
  std::vector<LayoutMove> wanted_;
  std::uint64_t waste_left_ = 0;
  std::uint64_t cost_ = 0;
  std::uint64_t bound_ = 0;
  double price_ = 0;  // of a wasted granule
  MoveOrder order_;
};

using ExchangeSearch = BasicExchangeSearch<>;

SPILLWAY_COMPILED_PART(class BasicExchangeSearch<>);

}  // namespace spillway::detail
