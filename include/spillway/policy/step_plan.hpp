// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/access_schedule.hpp>
#include <spillway/core/step_record.hpp>
#include <spillway/core/types.hpp>
#include <spillway/core/use.hpp>
#include <spillway/policy/gap_cover.hpp>
#include <spillway/policy/gap_set.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace spillway {

/// Which blocks leave the device between which uses, for the rest of a recorded step and the step after.
///
/// The step after is planned too, because a block that lives on from step to step may be away across
/// the boundary; only the first step's decisions are used, the next boundary plans again. A gap is
/// named by the entry of the use that ends it.
///
/// Cost    O(n log n) time for a step of n uses, about 150 bytes a use while planning.
/// Threads thread-unsafe.
class StepPlan {
 public:
  /// Plans for `capacity_bytes`, of which `other_bytes` are taken by blocks that the record does not
  /// know. `is_resident(id)` tells where things stand now. `schedule` is predicting.
  ///
  /// @throws std::bad_alloc; the plan is then empty
  template <class IsResident>
  void make(AccessSchedule const& schedule,
            std::size_t capacity_bytes,
            std::size_t other_bytes,
            IsResident is_resident);

  void clear() noexcept {
    leaves_.clear();
    is_free_.clear();
  }

  /// The block must be away for a while before the use at `entry`.
  [[nodiscard]] bool must_leave(std::uint32_t entry) const noexcept {
    return entry < leaves_.size() && leaves_[entry];
  }
  /// The block need not be brought back for the use at `entry`, or has none.
  [[nodiscard]] bool leaves_for_nothing(std::uint32_t entry) const noexcept {
    return entry == never_entry || (entry < is_free_.size() && is_free_[entry]);
  }

 private:
  // Blocks are planned to be back so many moments before their use, for room to bring them in early;
  // unless the plan then swaps in one part in so many more than it could do with.
  static constexpr std::uint32_t most_ahead = 64;
  static constexpr std::int64_t worth_of_room = 200;
  static constexpr std::uint32_t none = StepRecord::none;

  /// Calls `alive(block, from, to)` for the moments [from, to) during which a block takes room unless
  /// it is away, and `gap(block, from, to, entry)` for those during which it may be; `entry` is the
  /// use that ends the gap, `never_entry` if there is none, `none` if it lies beyond the plan.
  template <class IsResident, class Alive, class Gap>
  void survey(AccessSchedule const& schedule, IsResident is_resident, Alive alive, Gap gap);

  std::vector<bool> leaves_;
  std::vector<bool> is_free_;
  std::vector<bool> is_present_;
  std::vector<std::int64_t> excess_;
  std::vector<std::uint32_t> rank_;
  GapSet gaps_;
  GapCover cover_;
};

template <class IsResident>
void StepPlan::make(AccessSchedule const& schedule,
                    std::size_t capacity_bytes,
                    std::size_t other_bytes,
                    IsResident is_resident) {
  clear();
  StepRecord const& record = schedule.record();
  std::uint32_t const horizon = 2 * record.length();
  std::vector<bool> leaves(horizon);
  std::vector<bool> is_free(horizon);
  excess_.assign(std::size_t{horizon} + 1, 0);
  auto const weigh = [&](std::uint32_t from, std::uint32_t to, std::int64_t bytes) {
    excess_[from] += bytes;
    excess_[std::max(from, to)] -= bytes;
  };
  auto const bytes_of = [&](std::uint32_t block) {
    return static_cast<std::int64_t>(record.blocks[block].bytes);
  };
  auto const costs_nothing = [&](std::uint32_t entry) {
    return entry == never_entry || (entry != none && record.access_at(entry) == Access::write);
  };
  survey(
      schedule,
      is_resident,
      [&](std::uint32_t block, std::uint32_t from, std::uint32_t to) {
        weigh(from, to, bytes_of(block));
      },
      [&](std::uint32_t block, std::uint32_t from, std::uint32_t to, std::uint32_t entry) {
        if (costs_nothing(entry)) {
          weigh(from, to, -bytes_of(block));
          if (entry != never_entry) {
            is_free[entry] = true;
          }
        }
      });

  // Only moments at which too much is alive matter: number them, and forget the others.
  auto const capacity =
      static_cast<std::int64_t>(capacity_bytes - std::min(capacity_bytes, other_bytes));
  rank_.resize(std::size_t{horizon} + 1);
  std::uint32_t moments = 0;
  std::int64_t alive_bytes = 0;
  for (std::uint32_t t = 0; t < horizon; ++t) {
    alive_bytes += excess_[t];
    rank_[t] = moments;
    if (t >= schedule.cursor() && alive_bytes > capacity) {
      excess_[moments++] = alive_bytes - capacity;  // never ahead of what is read
    }
  }
  rank_[horizon] = moments;
  excess_.resize(moments);
  if (moments != 0) {
    auto const gather = [&](std::uint32_t ahead) {
      gaps_.clear();
      survey(
          schedule,
          is_resident,
          [](std::uint32_t, std::uint32_t, std::uint32_t) {},
          [&](std::uint32_t block, std::uint32_t from, std::uint32_t to, std::uint32_t entry) {
            if (from < to && !costs_nothing(entry)) {
              to -= std::min(ahead, (to - from) / 4);
              if (rank_[from] < rank_[to]) {
                gaps_.add({{rank_[from], rank_[to] - 1}, record.blocks[block].bytes, entry});
              }
            }
          });
      gaps_.close(moments);
    };
    gather(0);
    std::int64_t const least = cover_.least_bytes(excess_, gaps_);
    gather(most_ahead);
    if (!cover_.choose(excess_, gaps_) || gaps_.chosen_bytes() > least + least / worth_of_room) {
      gather(0);
      cover_.choose(excess_, gaps_);
    }
    for (Gap const& gap : gaps_) {
      if (gap.is_chosen && gap.tag != none) {
        leaves[gap.tag] = true;
      }
    }
  }
  leaves_ = std::move(leaves);
  is_free_ = std::move(is_free);
}

template <class IsResident, class Alive, class Gap>
void StepPlan::survey(AccessSchedule const& schedule,
                      IsResident is_resident,
                      Alive alive,
                      Gap gap) {
  StepRecord const& record = schedule.record();
  std::uint32_t const length = record.length();
  std::uint32_t const horizon = 2 * length;
  std::uint32_t const start = schedule.cursor();

  is_present_.assign(record.blocks.size(), false);
  for (std::uint32_t i = 0; i < record.blocks.size(); ++i) {
    StepRecord::Block const& block = record.blocks[i];
    std::uint32_t end = block.freed;
    if (end == none) {
      std::uint32_t const freed_after = record.blocks[record.part_after(i)].freed;
      end = freed_after == none ? horizon : length + freed_after;
    }
    end = std::max(end, start);
    if (block.id != BlockId{}) {
      is_present_[i] = true;
      std::uint32_t const next = schedule.use_of(block.id).entry;
      if (is_resident(block.id)) {
        alive(i, start, end);
        gap(i, start, std::min(next, end), next);
      } else if (next < never_entry) {
        alive(i, next, end);
      }
    } else if (record.is_birth(i) && block.first != none && block.first >= start) {
      is_present_[i] = true;
      alive(i, block.first, end);
    }
  }
  for (std::uint32_t i = start; i < length; ++i) {
    StepRecord::Entry const& entry = record.entries[i];
    StepRecord::Block const& block = record.blocks[entry.block];
    if (!is_present_[entry.block] || entry.released == 0) {
      continue;
    }
    std::uint32_t end = entry.next;
    if (end == never_entry) {
      end = block.freed;
      if (end == none) {
        std::uint32_t const freed_after = record.blocks[record.part_after(entry.block)].freed;
        end = freed_after == none ? horizon : length + freed_after;
      }
    }
    gap(entry.block, entry.released, end, entry.next);
  }

  // The step after: blocks born in it, and those that live on.
  for (std::uint32_t i = 0; i < record.blocks.size(); ++i) {
    StepRecord::Block const& block = record.blocks[i];
    bool const lives_on = block.freed == none && block.successor_of == none;
    if (record.is_birth(i) && !lives_on && block.first != none) {
      alive(i, length + block.first, block.freed == none ? horizon : length + block.freed);
    }
  }
  for (std::uint32_t i = 0; i < length; ++i) {
    StepRecord::Entry const& entry = record.entries[i];
    StepRecord::Block const& block = record.blocks[entry.block];
    std::uint32_t const before = block.successor == none ? entry.block : block.successor;
    bool const is_born =
        record.is_birth(entry.block) && (block.freed != none || block.successor_of != none);
    bool const has_gone =
        !is_born && (!is_present_[before] || (before == entry.block && block.freed != none));
    if (has_gone || entry.released == 0) {
      continue;
    }
    if (entry.next < length) {
      gap(entry.block, length + entry.released, length + entry.next, length + entry.next);
    } else if (entry.next == never_entry) {
      gap(entry.block,
          length + entry.released,
          block.freed == none ? horizon : length + block.freed,
          never_entry);
    } else {
      gap(entry.block, length + entry.released, horizon, none);
    }
  }
}

}  // namespace spillway
