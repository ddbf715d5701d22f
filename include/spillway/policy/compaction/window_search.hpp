// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/core/bits.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/sort.hpp>
#include <spillway/policy/compaction/gap_index.hpp>
#include <spillway/policy/compaction/layout_line.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace spillway::detail {

/// Finds plans that vacate a window of blocks: some of them go to gaps elsewhere, the others slide
/// together. `SlidingCompaction` searches with it, once for each object.
///
/// A window is a row of neighbouring blocks with the gaps around and between them. The algorithm is
/// a best-first search over windows, with best fit decreasing inside each (Johnson, "Near-optimal
/// bin packing algorithms", 1973):
/// - For each gap, the shortest window that begins there and spans the granules asked for goes into
///   a heap, ordered by the granules of its blocks. Each window that is taken out is tried. It is
///   also put back with one more block, since a longer window has more gaps of its own and fewer of
///   its blocks have to leave.
/// - A try sends the blocks of a window, large ones first, to the smallest gap elsewhere that
///   holds each, until the remaining blocks leave enough room. If a block fits no gap, a place is
///   made for it in the same way, one level deep, or by the cheapest slide.
/// - The search ends when the next window would move as much as the best plan, when it has taken
///   as long as the moves of the best plan, or at its limits.
///
/// Example: 4 | gap 2 | 3 | gap 2 | 9 | gap 3, and 7 are wanted. The window of the block of 3 spans
/// 7; the block goes into the gap of 3, and 3 granules moved make 7 free.
///
/// Threads  thread-compatible.
/// Cost     O(n log n) for n blocks to list the windows, then at most `Limits::looks`
template <class = Lazily>
class BasicWindowSearch {
 public:
  /// Bounds on the time of a search. With larger ones it may find cheaper plans.
  struct Limits {
    int tries = 50;                 ///< windows, for the range that is asked for
    int nested_tries = 6;           ///< windows, for a block that fits nowhere
    std::uint64_t looks = 200'000;  ///< blocks and gaps looked at, beside one pass
  };

  BasicWindowSearch(LayoutLine const& line, Limits const& limits) : line_{line}, limits_{limits} {
    gaps_.read(line_);
  }

  /// Calls `use(plan)` for each plan found that moves fewer than `bound` granules; `use` returns
  /// the bound from then on.
  ///
  /// @throws std::bad_alloc
  template <class Use>
  void search(std::uint32_t count, std::uint64_t bound, Use use) {
    Trial trial;
    limit_looks(bound);
    try_windows(trial, count, false, bound, [&](std::uint32_t first) {
      LayoutPlan plan;
      plan.moves = trial.moves;
      plan.cost = trial.cost;
      plan.first = first;
      plan.count = count;
      std::uint64_t const next = use(std::move(plan));
      limit_looks(next);
      return next;
    });
  }

 private:
  struct Window {
    std::size_t from = 0;
    std::size_t to = 0;
    std::uint64_t cost = 0;

    // Puts the cheapest window at the front of a heap, and the lowest among equals, so that results
    // do not depend on the heap.
    friend bool operator<(Window const& a, Window const& b) noexcept {
      return std::pair{a.cost, a.from} > std::pair{b.cost, b.from};
    }
    friend bool operator>(Window const& a, Window const& b) noexcept { return b < a; }
  };
  struct Trial {
    std::vector<LayoutMove> moves;
    std::uint64_t cost = 0;
    std::vector<Window> closed;  // windows that are vacated: no block may be put there
  };

  [[nodiscard]] std::uint32_t start(std::size_t gap) const noexcept {
    return line_.gap_first(gap) + gaps_.filled(gap);
  }
  [[nodiscard]] std::uint32_t end(std::size_t gap) const noexcept {
    return gaps_.filled(gap) == 0 ? line_.gap_end(gap) : line_.gap_first(gap);
  }
  [[nodiscard]] std::uint64_t span(Window const& window) const noexcept {
    return end(window.to) - start(window.from);
  }
  // A hash of the sizes of a window's blocks and gaps, which does not depend on their order.
  [[nodiscard]] std::uint64_t sizes_of(Window const& window) {
    std::uint64_t sum = mix_bits(line_.gap(window.from));
    for (std::size_t i = window.from; i < window.to; ++i) {
      sum +=
          mix_bits((std::uint64_t{line_.block(i).count} << 32U) + 1) + mix_bits(line_.gap(i + 1));
    }
    looks_ += window.to - window.from;
    return sum;
  }
  // No search is worth more than the moves that it may save.
  void limit_looks(std::uint64_t bound) noexcept {
    most_looks_ = line_.size() + std::min(limits_.looks, line_.layout().looks_worth(bound));
  }
  [[nodiscard]] bool is_exhausted() const noexcept { return looks_ + gaps_.looks() >= most_looks_; }
  // Whether a block has been put into `gap`, so that no window may extend across it.
  [[nodiscard]] bool is_wall(std::size_t gap) const noexcept { return gaps_.filled(gap) != 0; }
  [[nodiscard]] static bool is_closed(Trial const& trial, std::size_t gap) noexcept {
    return std::any_of(trial.closed.begin(), trial.closed.end(), [gap](Window const& window) {
      return gap >= window.from && gap <= window.to;
    });
  }

  // Lists the shortest window of at least `count` granules from each gap on; if there are very
  // many, only the cheapest.
  //
  // `IsUntouched` says that no window is closed and no gap filled, as in the first listing. That
  // one looks at the whole layout and must be fast.
  template <bool IsUntouched>
  void list_windows(Trial const& trial,
                    std::uint32_t count,
                    std::uint64_t bound,
                    std::vector<Window>& heap) {
    std::size_t const n = line_.size();
    auto const granules = [&](Window const& window) noexcept {
      return IsUntouched ? line_.gap_end(window.to) - line_.gap_first(window.from) : span(window);
    };
    Window window;
    looks_ += n;
    for (; window.from < n; ++window.from) {
      if (window.to <= window.from) {
        window.to = window.from;
        window.cost = 0;
      }
      bool is_open = IsUntouched || !is_closed(trial, window.from);
      while (is_open && (window.to == window.from || granules(window) < count)) {
        bool const is_blocked =
            window.to == n || line_.block(window.to).is_fixed ||
            (!IsUntouched &&
             ((window.to != window.from && is_wall(window.to)) || is_closed(trial, window.to + 1)));
        if (is_blocked) {
          is_open = false;
        } else {
          window.cost += line_.block(window.to).count;
          ++window.to;
        }
      }
      if (is_open && window.cost < bound) {
        heap.push_back(window);
        if (heap.size() == 2 * std::size_t{many_windows}) {
          auto const last = heap.begin() + many_windows;
          std::nth_element(heap.begin(), last, heap.end(), std::greater<>{});
          bound = last->cost;
          heap.erase(last, heap.end());
        }
      }
      if (window.to > window.from) {
        window.cost -= line_.block(window.from).count;
      }
    }
    std::make_heap(heap.begin(), heap.end());
  }

  void push(std::vector<Window>& heap, Window const& window, std::uint64_t bound) const {
    if (window.cost < bound) {
      heap.push_back(window);
      std::push_heap(heap.begin(), heap.end());
    }
  }
  // The window whose own gaps hold `count` granules and whose blocks are smallest in total.
  [[nodiscard]] std::optional<Window> cheapest_slide_for(Trial const& trial, std::uint32_t count) {
    std::optional<Window> best;
    Window window;
    looks_ += line_.size();
    for (std::size_t i = 0; i < line_.size(); ++i) {
      bool const is_blocked = line_.block(i).is_fixed || is_closed(trial, i) ||
                              is_closed(trial, i + 1) || (i != window.from && is_wall(i));
      if (is_blocked) {
        // A window may start at a gap that is partly filled, above the filled part.
        bool const can_start =
            !line_.block(i).is_fixed && !is_closed(trial, i) && !is_closed(trial, i + 1);
        window = {can_start ? i : i + 1, can_start ? i : i + 1, 0};
        if (!can_start) {
          continue;
        }
      }
      window.to = i + 1;
      window.cost += line_.block(i).count;
      while (window.from < i) {
        Window const shorter{
            window.from + 1, window.to, window.cost - line_.block(window.from).count};
        if (span(shorter) < shorter.cost + count) {
          break;
        }
        window = shorter;
      }
      if (span(window) >= window.cost + count && (!best || window.cost < best->cost)) {
        best = window;
      }
    }
    return best;
  }

  template <class Use>
  void
  try_windows(Trial& trial, std::uint32_t count, bool is_nested, std::uint64_t bound, Use use) {
    std::vector<Window> heap;
    if (trial.closed.empty() && gaps_.mark() == 0) {
      list_windows<true>(trial, count, bound - trial.cost, heap);
    } else {
      list_windows<false>(trial, count, bound - trial.cost, heap);
    }
    int tries = is_nested ? limits_.nested_tries : limits_.tries;
    std::vector<std::uint64_t> tried;
    while (!heap.empty() && tries > 0 && !is_exhausted()) {
      std::pop_heap(heap.begin(), heap.end());
      Window const window = heap.back();
      heap.pop_back();
      if (trial.cost + window.cost >= bound) {
        break;
      }
      // A longer window has more gaps of its own, and fewer of its blocks have to leave.
      bool const can_grow = window.to < line_.size() && !line_.block(window.to).is_fixed &&
                            !is_wall(window.to) && !is_closed(trial, window.to + 1) &&
                            span(window) - window.cost < count;
      if (can_grow) {
        push(heap,
             {window.from, window.to + 1, window.cost + line_.block(window.to).count},
             bound - trial.cost);
      }
      std::uint64_t const sizes = sizes_of(window);
      if (std::find(tried.begin(), tried.end(), sizes) != tried.end()) {
        continue;  // a window with the same sizes has failed before; tensors have few sizes
      }
      tried.push_back(sizes);
      --tries;
      std::size_t const moves = trial.moves.size();
      std::size_t const fills = gaps_.mark();
      std::size_t const closed = trial.closed.size();
      std::uint64_t const cost = trial.cost;
      auto const first = vacate(trial, window, count, is_nested, bound);
      if (first && trial.cost < bound) {
        bound = use(*first);
      }
      trial.moves.resize(moves);
      trial.closed.resize(closed);
      trial.cost = cost;
      gaps_.undo(fills);
    }
  }

  // Makes room for `count` granules in `window`. @returns where they start
  [[nodiscard]] std::optional<std::uint32_t> vacate(Trial& trial,
                                                    Window const& window,
                                                    std::uint32_t count,
                                                    bool is_nested,
                                                    std::uint64_t bound) {
    std::uint64_t const slack = span(window) - count;
    std::uint64_t must_leave = window.cost > slack ? window.cost - slack : 0;
    std::vector<std::uint32_t> blocks(window.to - window.from);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      blocks[i] = static_cast<std::uint32_t>(window.from + i);
    }
    auto const by_size = [this](std::uint32_t a, std::uint32_t b) {
      return line_.block(a).count != line_.block(b).count
                 ? line_.block(a).count > line_.block(b).count
                 : a < b;
    };
    sort_runs(blocks, by_size);
    looks_ += 4 * blocks.size();

    trial.closed.push_back(window);
    gaps_.close(window.from, window.to);
    trial.cost += window.cost;
    trial.moves.reserve(trial.moves.size() + blocks.size());
    std::vector<std::uint32_t> stay;
    std::vector<std::uint32_t> unplaced;
    auto const leave = [&](std::uint32_t block, std::uint32_t to) {
      trial.moves.push_back({block, to});
      must_leave -= std::min<std::uint64_t>(must_leave, line_.block(block).count);
    };
    for (std::uint32_t const block : blocks) {
      if (must_leave == 0) {
        stay.push_back(block);
      } else if (auto const to = gaps_.fill(
                     line_,
                     line_.block(block).count,
                     [&](std::size_t gap) { return !is_closed(trial, gap); },
                     most_looks_ - std::min(most_looks_, looks_))) {
        leave(block, *to);
      } else {
        unplaced.push_back(block);
      }
    }
    for (std::uint32_t const block : unplaced) {
      std::optional<std::uint32_t> to;
      if (must_leave != 0 && !is_nested && trial.cost < bound && !is_exhausted()) {
        to = make_place(trial, line_.block(block).count, bound);
      }
      if (to) {
        leave(block, *to);
      } else {
        stay.push_back(block);
      }
    }
    if (must_leave != 0) {
      return std::nullopt;
    }

    std::sort(stay.begin(), stay.end());
    std::uint32_t at = start(window.from);
    for (std::uint32_t const block : stay) {
      if (line_.block(block).first != at) {
        trial.moves.push_back({block, at});
      } else {
        trial.cost -= line_.block(block).count;
      }
      at += line_.block(block).count;
    }
    return at;
  }

  // Makes room for a block outside the windows being vacated, in the cheapest way found.
  [[nodiscard]] std::optional<std::uint32_t>
  make_place(Trial& trial, std::uint32_t count, std::uint64_t bound) {
    std::optional<std::uint32_t> place;
    Trial best;
    std::vector<GapIndex::Fill> fills;
    std::size_t const mark = gaps_.mark();
    if (auto const window = cheapest_slide_for(trial, count);
        window && trial.cost + window->cost < bound) {
      Trial slid = trial;
      place = vacate(slid, *window, count, true, bound);
      fills = gaps_.since(mark);
      gaps_.undo(mark);
      best = std::move(slid);
      bound = best.cost;
    }
    try_windows(trial, count, true, bound, [&](std::uint32_t first) {
      place = first;
      best = trial;
      fills = gaps_.since(mark);
      return trial.cost;
    });
    if (place) {
      trial = std::move(best);
      gaps_.redo(fills);
    }
    return place;
  }

  // More windows than are ever taken out of the heap, those of equal sizes included.
  static constexpr std::ptrdiff_t many_windows = 4096;

  LayoutLine line_;
  Limits limits_;
  GapIndex gaps_;
  std::uint64_t looks_ = 0;
  std::uint64_t most_looks_ = 0;
};

using WindowSearch = BasicWindowSearch<>;

SPILLWAY_COMPILED_PART(class BasicWindowSearch<>);

}  // namespace spillway::detail
