// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/core/config.hpp>
#include <spillway/policy/compaction/layout_line.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace spillway::detail {

/// Brings the moves of an exchange into an order in which each destination is free when its block
/// moves there. `ExchangeSearch` orders its plans with it.
///
/// It makes every move whose destination is free, repeatedly. If no such move is left, the blocks
/// form cycles of destinations: the smallest block that fits the widest gap then steps aside into
/// it, at most eight times.
///
/// Threads  thread-compatible.
template <class = Lazily>
class BasicMoveOrder {
 public:
  /// Reads where the blocks are. @throws std::bad_alloc. @cost O(n)
  void read(LayoutLine const& line) {
    end_ = line.layout().end;
    places_.clear();
    for (std::size_t i = 0; i < line.size(); ++i) {
      places_.push_back({line.block(i).first, line.block(i).count, static_cast<std::uint32_t>(i)});
    }
  }

  /// Orders `wanted`, which has the final place of each block that moves.
  ///
  /// @param wanted  is consumed
  /// @param bound   gives up when so many granules have been moved
  /// @return  nothing if a cycle cannot be broken or the bound is reached
  [[nodiscard]] std::optional<LayoutPlan>
  order(LayoutLine const& line, std::vector<LayoutMove> wanted, std::uint64_t bound) {
    LayoutPlan plan;
    now_.resize(line.size());
    for (std::size_t i = 0; i < line.size(); ++i) {
      now_[i] = line.block(i).first;
    }
    int detours = 0;
    while (!wanted.empty() && plan.cost < bound) {
      std::size_t const before = wanted.size();
      std::erase_if(wanted, [&](LayoutMove const& move) {
        bool const can_go = is_free_for(line, move);
        if (can_go) {
          apply(line, plan, move);
        }
        return can_go;
      });
      if (wanted.size() == before &&
          (++detours > most_detours || !step_aside(line, plan, wanted))) {
        return std::nullopt;
      }
    }
    return plan.cost < bound ? std::optional{std::move(plan)} : std::nullopt;
  }

 private:
  struct Place {
    std::uint32_t first;
    std::uint32_t count;
    std::uint32_t block;

    [[nodiscard]] std::uint32_t end() const noexcept { return first + count; }
  };
  static constexpr int most_detours = 8;

  // The first place that ends after `granule`.
  [[nodiscard]] typename std::vector<Place>::iterator after(std::uint32_t granule) {
    return std::lower_bound(places_.begin(),
                            places_.end(),
                            granule,
                            [](Place const& place, std::uint32_t at) { return place.end() <= at; });
  }

  bool is_free_for(LayoutLine const& line, LayoutMove const& move) {
    std::uint32_t const end = move.to + line.block(move.block).count;
    auto at = after(move.to);
    while (at != places_.end() && at->first < end && at->block == move.block) {
      ++at;
    }
    return at == places_.end() || at->first >= end;
  }

  void apply(LayoutLine const& line, LayoutPlan& plan, LayoutMove const& move) {
    std::uint32_t const count = line.block(move.block).count;
    places_.erase(after(now_[move.block]));
    places_.insert(after(move.to), {move.to, count, move.block});
    now_[move.block] = move.to;
    plan.moves.push_back(move);
    plan.cost += count;
  }

  // Moves the smallest block that fits somewhere out of the way.
  bool step_aside(LayoutLine const& line, LayoutPlan& plan, std::vector<LayoutMove> const& wanted) {
    std::uint32_t widest = 0;
    std::uint32_t widest_first = 0;
    std::uint32_t last = 0;
    for (std::size_t i = 0; i <= places_.size(); ++i) {
      std::uint32_t const end = i == places_.size() ? end_ : places_[i].first;
      if (end - last > widest) {
        widest = end - last;
        widest_first = last;
      }
      last = i == places_.size() ? end_ : places_[i].end();
    }
    std::optional<LayoutMove> best;
    for (LayoutMove const& move : wanted) {
      std::uint32_t const count = line.block(move.block).count;
      if (count <= widest && (!best || count < line.block(best->block).count)) {
        best = LayoutMove{move.block, widest_first};
      }
    }
    if (best) {
      apply(line, plan, *best);
    }
    return best.has_value();
  }

  std::vector<Place> places_;       // in order of address
  std::vector<std::uint32_t> now_;  // where each block is
  std::uint32_t end_ = 0;
};

using MoveOrder = BasicMoveOrder<>;

SPILLWAY_COMPILED_PART(class BasicMoveOrder<>);

}  // namespace spillway::detail
