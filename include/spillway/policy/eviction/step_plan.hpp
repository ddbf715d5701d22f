// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/bits.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/types.hpp>
#include <spillway/policy/eviction/absence_cover.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/step_record.hpp>
#include <spillway/schedule/use.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace spillway::detail {

/// Options of `StepPlan`: how much more a plan may swap in so that transfers overlap with work. For
/// a block to be back before its use, others must make room for it, so they are away longer or more
/// often.
struct PlanOptions {
  std::uint32_t ahead_ops = 64;  ///< a block is planned to be back so many uses early
  double most_extra = 0.005;     ///< how much more may be swapped in for that, as a fraction
  /// If a fraction x > 0.1 of all bytes has to be away, `(x - 0.1)` times this is added to
  /// `most_extra`: the more is away, the more often the program waits for a late block, and the
  /// more bytes it is worth to avoid that.
  double most_extra_of_excess = 0.05;
  /// The same for room for the next operation only, without which nothing overlaps. In a loop that
  /// uses each block once, this costs one block in as many as are away.
  double most_extra_for_next = 0.15;
  /// The fraction of the capacity that is not used for blocks that come back ahead of need. With
  /// less free memory, allocations would have to wait until blocks were moved.
  double kept_free = 0.05;
  /// By how much the price of a block is reduced that leaves without a copy, since its bytes are on
  /// the host already: this times the fraction of all bytes that has to be away. The more is away,
  /// the busier the link to the host is, and the more bytes on the way back a saved copy is worth.
  double clean_discount = 0.35;
  /// Blocks that are smaller than this fraction of the capacity and than `most_small_bytes` stay
  /// unless the others cannot make enough room: starting a copy and waiting for it would take
  /// longer than the copy itself. A link of 50 GB/s carries `most_small_bytes` in 10 us.
  double least_part = 1.0 / 4096;
  std::size_t most_small_bytes = 512_KiB;
};

/// A plan of which blocks leave the device between which uses, for the rest of a recorded step and
/// the step after it. `ScheduleEviction` makes one at each step and takes its victims from it.
///
/// - Every block's life and absences are laid out on the moments of both steps. The step after is
///   planned too, because a block that lives on from step to step may be away across the boundary.
///   Only the decisions for the first step are used; the next boundary plans again.
/// - What is alive beyond the capacity is the excess. Absences that cost nothing are taken first:
///   the block is never used again, or its next use overwrites it.
/// - `AbsenceCover` chooses among the other absences.
/// - This is repeated with absences that end early, so that blocks are back before their use. The
///   earliest return that costs little is taken: see `PlanOptions`.
/// - The absences that are chosen overlap, so that at most moments more is away than has to be.
///   Blocks come back into that room as soon as it lasts until their use, the soonest needed first.
///
/// Example: a step uses the blocks A B C B A, all of one size, and two fit. When C comes in, A or B
/// must be away. A's absence ends last, so A leaves after its first use and returns for its last.
///
/// An absence is named by the entry of the use that ends it.
///
/// Cost    O(n log n) time for a step of n uses, about 230 bytes a use, kept for the next plan.
/// Threads thread-unsafe.
template <class = Lazily>
class BasicStepPlan {
 public:
  BasicStepPlan() = default;
  explicit BasicStepPlan(PlanOptions options) noexcept : options_{options} {}

  /// Plans for `capacity_bytes`, of which `other_bytes` are taken by blocks that the record does
  /// not know. `is_resident(id)` says whether a block is resident now. Precondition: `schedule` is
  /// predicting.
  ///
  /// @returns whether the plan was made anew; false if the one from before holds, since nothing has
  ///          changed that it depends on
  /// @throws  std::bad_alloc; the plan is to be cleared then
  template <class IsResident>
  bool make(AccessSchedule const& schedule,
            std::size_t capacity_bytes,
            std::size_t other_bytes,
            IsResident is_resident) {
    StepRecord const& record = schedule.record();
    length_ = record.length();
    start_ = schedule.cursor();
    find_standing(schedule, is_resident);
    std::size_t const room_bytes = capacity_bytes - std::min(capacity_bytes, other_bytes);
    std::uint64_t const question = digest(record, room_bytes);
    if (question == answered_) {
      return false;
    }
    clear();
    choose(record, room_bytes);
    answered_ = question;
    return true;
  }

  void clear() noexcept {
    answered_ = 0;
    leaves_.clear();
    is_free_.clear();
    returns_.clear();
  }

  /// Whether the block is to be away for a while before the use at `entry`.
  [[nodiscard]] bool must_leave(std::uint32_t entry) const noexcept {
    return entry < leaves_.size() && leaves_[entry];
  }
  /// Whether the block need not be brought back for the use at `entry`, or there is no such use.
  [[nodiscard]] bool leaves_for_nothing(std::uint32_t entry) const noexcept {
    return entry == never_entry || (entry < is_free_.size() && is_free_[entry]);
  }
  /// The moment from which on the plan has room for the block to be back for the use at `entry`; 0
  /// if nothing is planned. If it came back sooner, it would take the room of blocks that are born
  /// in between, or others would have to leave.
  ///
  /// Blocks that are away already when the plan is made take no room in it before they are due.
  [[nodiscard]] std::uint32_t returns_at(std::uint32_t entry) const noexcept {
    return entry < returns_.size() ? returns_[entry] : 0;
  }

  /// A block may always come back so many uses early, whatever the plan says: otherwise no transfer
  /// would overlap with work.
  static constexpr std::uint32_t next_ops = 2;

 private:
  static constexpr std::uint32_t none = StepRecord::none;

  /// The state of a role of the record when the plan starts.
  struct Standing {
    bool is_filled = false;     // a block that is alive, or will be born in this step, has the role
    bool is_alive = false;      // that block is alive now
    bool is_resident = false;   // that block is resident now
    bool is_written = false;    // the step writes it, so it must be swapped out to be away
    std::uint32_t next = none;  // its next entry
  };

  /// A block that is or will be away, and when it is needed again.
  struct Return {
    std::uint32_t entry;  // the use that it is needed for
    std::uint32_t from;   // the first moment of its absence
    std::uint32_t due;    // the moment at which the plan has it back
    std::size_t bytes;
  };

  [[nodiscard]] std::uint32_t horizon() const noexcept { return 2 * length_; }

  template <class IsResident>
  void find_standing(AccessSchedule const& schedule, IsResident is_resident) {
    StepRecord const& record = schedule.record();
    standing_.assign(record.blocks.size(), {});
    for (std::uint32_t i = 0; i < record.blocks.size(); ++i) {
      StepRecord::Block const& block = record.blocks[i];
      if (block.id != BlockId{}) {
        standing_[i] = Standing{.is_filled = true,
                                .is_alive = true,
                                .is_resident = is_resident(block.id),
                                .next = schedule.use_of(block.id).entry};
      } else if (record.is_birth(i) && block.coming == block.first) {
        standing_[i] = Standing{.is_filled = true, .next = block.first};
      }
    }
    for (StepRecord::Entry const& entry : record.entries) {
      Standing& standing = standing_[entry.block];
      standing.is_written =
          standing.is_written || static_cast<Access>(entry.access) != Access::read;
    }
  }

  /// A digest of all that a plan depends on. Programs repeat their steps, so that the plan of the
  /// step before often holds for the next one, and to read the record takes a fraction of the time
  /// of a plan.
  ///
  /// Roles are named by their first entries here: which index a role has depends on where the
  /// allocator has put its block, in each step anew.
  [[nodiscard]] std::uint64_t digest(StepRecord const& record,
                                     std::size_t capacity_bytes) const noexcept {
    Digest all;
    all.add(capacity_bytes);
    all.add(start_, length_);
    std::uint64_t unused = 0;  // roles without an entry, in no order
    for (std::uint32_t role = 0; role < standing_.size(); ++role) {
      if (record.blocks[role].first == none) {
        unused += digest_of(record, role);
      }
    }
    all.add(unused);
    for (std::uint32_t i = 0; i < length_; ++i) {
      StepRecord::Entry const& entry = record.entries[i];
      all.add(entry.next, std::uint32_t{entry.released} << 2U | entry.access);
      if (record.blocks[entry.block].first == i) {
        all.add(digest_of(record, entry.block));
      }
    }
    return all.value();
  }
  [[nodiscard]] std::uint64_t digest_of(StepRecord const& record,
                                        std::uint32_t role) const noexcept {
    StepRecord::Block const& block = record.blocks[role];
    Standing const& standing = standing_[role];
    auto const first_entry = [&record](std::uint32_t other) {
      return other == none ? none : record.blocks[other].first;
    };
    Digest all;
    all.add(block.bytes);
    all.add(block.spared_bytes);
    all.add(block.first, block.freed);
    all.add(first_entry(block.successor_of), first_entry(block.successor));
    all.add(standing.next,
            (record.is_birth(role) ? 1U : 0U) | (standing.is_filled ? 2U : 0U) |
                (standing.is_alive ? 4U : 0U) | (standing.is_resident ? 8U : 0U));
    return all.value();
  }

  /// The moment at which the block that has a role in this step is freed, in this step or the next.
  [[nodiscard]] std::uint32_t end_of(StepRecord const& record, std::uint32_t role) const noexcept {
    std::uint32_t const freed = record.blocks[role].freed;
    if (freed != none) {
      return std::max(freed, start_);
    }
    std::uint32_t const freed_after = record.blocks[record.role_after(role)].freed;
    return freed_after == none ? horizon() : length_ + freed_after;
  }

  /// The same for the block that has it in the step after.
  [[nodiscard]] std::uint32_t end_after(StepRecord::Block const& block) const noexcept {
    return block.freed == none ? horizon() : length_ + block.freed;
  }

  /// Whether another block has the role in every step.
  [[nodiscard]] static bool is_new_each_step(StepRecord const& record,
                                             std::uint32_t role) noexcept {
    StepRecord::Block const& block = record.blocks[role];
    return record.is_birth(role) && (block.freed != none || block.successor_of != none);
  }

  /// Whether bringing the block back for the use at `entry` costs nothing.
  [[nodiscard]] static bool is_free_to_return(StepRecord const& record,
                                              std::uint32_t entry) noexcept {
    return entry == never_entry || (entry != none && record.access_at(entry) == Access::write);
  }

  /// The end of an absence whose block is to be back early.
  [[nodiscard]] static std::uint32_t
  early_end(std::uint32_t from, std::uint32_t to, std::uint32_t ahead) noexcept {
    return from < to ? to - std::min(ahead, (to - from) / 4) : to;
  }

  /// Calls `alive(role, from, to)` for the moments [from, to) in which a block takes room unless it
  /// is away by choice.
  template <class Alive>
  void each_life(StepRecord const& record, std::uint32_t ahead, Alive alive) const {
    for (std::uint32_t i = 0; i < record.blocks.size(); ++i) {
      StepRecord::Block const& block = record.blocks[i];
      Standing const& standing = standing_[i];
      if (standing.is_resident) {
        alive(i, start_, end_of(record, i));
      } else if (standing.is_alive && standing.next < never_entry) {
        alive(i, early_end(start_, standing.next, ahead), end_of(record, i));
      } else if (standing.is_filled && standing.next < never_entry) {
        alive(i, standing.next, end_of(record, i));
      }
      if (is_new_each_step(record, i) && block.first != none) {
        alive(i, length_ + block.first, end_after(block));
      }
    }
  }

  /// Calls `visit(role, from, to, entry)` for the moments [from, to) in which a block may be away.
  /// `entry` is the use that ends them, `never_entry` if there is none, `none` if it lies beyond
  /// the plan.
  template <class Visit>
  void each_absence(StepRecord const& record, Visit visit) const {
    for (std::uint32_t i = 0; i < record.blocks.size(); ++i) {
      if (standing_[i].is_resident) {
        visit(i, start_, std::min(standing_[i].next, end_of(record, i)), standing_[i].next);
      }
    }
    for (std::uint32_t i = start_; i < length_; ++i) {
      StepRecord::Entry const& entry = record.entries[i];
      Standing const& standing = standing_[entry.block];
      bool const is_to_come = standing.is_filled && standing.next <= i;  // it was not used early
      if (is_to_come && entry.released != 0) {
        bool const is_last = entry.next == never_entry;
        visit(entry.block,
              entry.released,
              is_last ? end_of(record, entry.block) : entry.next,
              entry.next);
      }
    }
    for (std::uint32_t i = 0; i < length_; ++i) {  // the step after
      StepRecord::Entry const& entry = record.entries[i];
      if (entry.released == 0 || !is_filled_after(record, entry.block)) {
        continue;
      }
      std::uint32_t const from = length_ + entry.released;
      if (entry.next < length_) {
        visit(entry.block, from, length_ + entry.next, length_ + entry.next);
      } else if (entry.next == never_entry) {
        visit(entry.block, from, end_after(record.blocks[entry.block]), never_entry);
      } else {
        visit(entry.block, from, horizon(), none);
      }
    }
  }

  [[nodiscard]] bool is_filled_after(StepRecord const& record, std::uint32_t role) const noexcept {
    StepRecord::Block const& block = record.blocks[role];
    if (block.successor != none) {
      return standing_[block.successor].is_filled;
    }
    return is_new_each_step(record, role) || (block.freed == none && standing_[role].is_filled);
  }

  /// Computes the excess of the moments at which more is alive than fits, and numbers them. The
  /// other moments do not matter.
  void find_excess(StepRecord const& record, std::size_t capacity_bytes, std::uint32_t ahead) {
    excess_.assign(std::size_t{horizon()} + 1, 0);
    is_free_.assign(horizon(), false);
    auto const weigh = [&](std::uint32_t from, std::uint32_t to, std::int64_t bytes) {
      excess_[from] += bytes;
      excess_[std::max(from, to)] -= bytes;
    };
    auto const bytes_of = [&](std::uint32_t role) {
      return static_cast<std::int64_t>(record.blocks[role].bytes);
    };
    each_life(record, ahead, [&](std::uint32_t role, std::uint32_t from, std::uint32_t to) {
      weigh(from, to, bytes_of(role));
    });
    each_absence(
        record, [&](std::uint32_t role, std::uint32_t from, std::uint32_t to, std::uint32_t entry) {
          if (is_free_to_return(record, entry)) {
            weigh(from, to, -bytes_of(role));
            if (entry != never_entry) {
              is_free_[entry] = true;
            }
          }
        });
    auto const capacity = static_cast<std::int64_t>(capacity_bytes);
    rank_.resize(std::size_t{horizon()} + 1);
    std::uint32_t moments = 0;
    std::int64_t alive_bytes = 0;
    for (std::uint32_t t = 0; t < horizon(); ++t) {
      alive_bytes += excess_[t];
      rank_[t] = moments;
      if (t >= start_ && alive_bytes > capacity) {
        excess_[moments++] = alive_bytes - capacity;  // in place: `moments` never passes `t`
      }
    }
    rank_[horizon()] = moments;
    excess_.resize(moments);
  }

  /// Chooses among the absences, with blocks back early if that costs little.
  void choose(StepRecord const& record, std::size_t capacity_bytes) {
    least_bytes_ = std::min(
        static_cast<std::size_t>(options_.least_part * static_cast<double>(capacity_bytes)),
        options_.most_small_bytes);
    std::optional<std::int64_t> least = choose(record, capacity_bytes, 0, AbsenceCover::no_bound);
    if (!least && least_bytes_ != 0) {
      least_bytes_ = 0;
      least = choose(record, capacity_bytes, 0, AbsenceCover::no_bound);
    }
    if (!least) {
      return;
    }
    auto const costs_little = [&](std::uint32_t ahead, double extra) {
      auto const most_price =
          static_cast<std::int64_t>(static_cast<double>(*least) * (1.0 + extra));
      bool const is_taken = choose(record, capacity_bytes, ahead, most_price).has_value();
      if (is_taken) {
        find_returns(record, ahead);
      }
      return is_taken;
    };
    kept_free_bytes_ =
        static_cast<std::int64_t>(options_.kept_free * static_cast<double>(capacity_bytes));
    std::uint32_t const most_ops = options_.ahead_ops;
    double const most_extra =
        options_.most_extra + options_.most_extra_of_excess * std::max(0.0, away_part_ - 0.1);
    if (costs_little(most_ops, most_extra) || costs_little(most_ops / 4, most_extra) ||
        costs_little(std::min(most_ops, next_ops), options_.most_extra_for_next)) {
      return;
    }
    choose(record, capacity_bytes, 0, AbsenceCover::no_bound);
    find_returns(record, 0);
  }

  /// Computes from when on there is room again for the blocks that are away now and for those that
  /// the plan sends out. That is the planned early return, or the time since the last moment with
  /// an excess if that is earlier.
  void find_returns(StepRecord const& record, std::uint32_t ahead) {
    returns_.assign(horizon(), 0);
    returning_.clear();
    auto const note = [&](std::uint32_t role, std::uint32_t from, std::uint32_t entry) {
      std::uint32_t const due = early_end(from, entry, ahead);
      auto const first_free =
          std::lower_bound(rank_.begin(), rank_.begin() + entry, rank_[entry]) - rank_.begin();
      returns_[entry] = std::min(due, static_cast<std::uint32_t>(first_free));
      returning_.push_back({entry, from, due, record.blocks[role].bytes});
    };
    for (std::uint32_t i = 0; i < record.blocks.size(); ++i) {
      Standing const& standing = standing_[i];
      if (standing.is_alive && !standing.is_resident && standing.next < horizon()) {
        note(i, start_, standing.next);
      }
    }
    each_absence(record,
                 [&](std::uint32_t role, std::uint32_t from, std::uint32_t, std::uint32_t entry) {
                   if (entry < horizon() && leaves_[entry]) {
                     note(role, from, entry);
                   }
                 });
    return_into_slack();
  }

  /// Lets blocks return into what the plan sends out beyond the excess, the soonest needed first.
  /// This costs no bytes, and keeps the link busy from the moment on from which memory is left.
  void return_into_slack() {
    std::sort(returning_.begin(), returning_.end(), [](Return const& a, Return const& b) {
      return a.entry < b.entry;
    });
    for (Return const& block : returning_) {
      if (rank_[block.from] >= rank_[block.due]) {
        continue;  // nothing is in excess before it is due
      }
      SlackTree::Interval moments{rank_[block.from], rank_[block.due] - 1};
      auto const bytes = static_cast<std::int64_t>(block.bytes);
      std::uint32_t const full = absences_.slack().last_below(moments, bytes + kept_free_bytes_);
      if (full == moments.last) {
        continue;
      }
      std::uint32_t since = block.from;
      if (full != SlackTree::nowhere) {
        moments.first = full + 1;
        auto const after = std::upper_bound(rank_.begin(), rank_.end(), full) - rank_.begin();
        since = static_cast<std::uint32_t>(after);
      }
      absences_.use_slack(moments, bytes);
      returns_[block.entry] = std::min(returns_[block.entry], since);
    }
  }

  void find_away_part(std::size_t capacity_bytes) noexcept {
    auto const most = std::max_element(excess_.begin(), excess_.end());
    double const excess = most == excess_.end() ? 0.0 : static_cast<double>(*most);
    double const alive = excess + static_cast<double>(capacity_bytes);
    away_part_ = alive > 0 ? excess / alive : 0;
  }
  /// What the price of a block's return leaves out.
  [[nodiscard]] std::uint64_t spared_bytes(StepRecord const& record,
                                           std::uint32_t role) const noexcept {
    StepRecord::Block const& block = record.blocks[role];
    auto const bytes = static_cast<double>(block.bytes - block.spared_bytes);
    double const discount = standing_[role].is_written ? 0 : options_.clean_discount * away_part_;
    return block.spared_bytes + static_cast<std::uint64_t>(discount * bytes);
  }

  /// Plans with blocks back `ahead` uses early. @returns the bytes that cross the link to come
  /// back; nothing if the excess cannot be taken away, or if that takes more than `most_price`
  std::optional<std::int64_t> choose(StepRecord const& record,
                                     std::size_t capacity_bytes,
                                     std::uint32_t ahead,
                                     std::int64_t most_price) {
    find_excess(record, capacity_bytes, ahead);
    if (ahead == 0) {  // prices of all tries are compared, so all have the part of the first
      find_away_part(capacity_bytes);
    }
    absences_.clear();
    each_absence(
        record, [&](std::uint32_t role, std::uint32_t from, std::uint32_t to, std::uint32_t entry) {
          if (from < to && !is_free_to_return(record, entry) &&
              record.blocks[role].bytes >= least_bytes_) {
            to = entry == none ? to : early_end(from, to, ahead);
            if (rank_[from] < rank_[to]) {
              absences_.add({{rank_[from], rank_[to] - 1},
                             record.blocks[role].bytes,
                             entry,
                             standing_[role].is_written,
                             false,
                             spared_bytes(record, role)});
            }
          }
        });
    absences_.close(excess_.size());
    bool const is_covered = cover_.choose(excess_, absences_, most_price);
    leaves_.assign(horizon(), false);
    for (Absence const& absence : absences_) {
      if (absence.is_chosen && absence.tag != none) {
        leaves_[absence.tag] = true;
      }
    }
    std::int64_t const price = absences_.chosen_price();
    return is_covered && price <= most_price ? std::optional{price} : std::nullopt;
  }

  PlanOptions options_;
  std::vector<bool> leaves_;            // by entry, of this step and then of the one after
  std::vector<bool> is_free_;           // likewise
  std::vector<std::uint32_t> returns_;  // likewise
  std::uint32_t length_ = 0;
  std::uint32_t start_ = 0;
  std::uint64_t answered_ = 0;  // `digest` of what the plan was made for; 0: there is none
  std::int64_t kept_free_bytes_ = 0;
  std::size_t least_bytes_ = 0;     // smaller blocks stay if possible
  double away_part_ = 0;            // largest fraction of the live bytes that has to be away
  std::vector<Standing> standing_;  // by role
  std::vector<Return> returning_;
  std::vector<std::int64_t> excess_;  // bytes over the capacity, at moments that have any
  std::vector<std::uint32_t> rank_;   // how many of those come before a moment
  AbsenceSet absences_;
  AbsenceCover cover_;
};

using StepPlan = BasicStepPlan<>;

SPILLWAY_COMPILED_PART(class BasicStepPlan<>);

}  // namespace spillway::detail
