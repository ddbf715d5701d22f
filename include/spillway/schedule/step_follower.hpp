// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>
#include <spillway/core/types.hpp>
#include <spillway/schedule/step_record.hpp>
#include <spillway/schedule/use.hpp>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace spillway::detail {

/// A block that is alive, as `AccessSchedule` and `StepFollower` see it: its role in the record
/// that is followed, and its place in the record that is being made.
struct ScheduledBlock {
  static constexpr std::uint32_t none = StepRecord::none;

  std::uint32_t generation = 0;   ///< 0: no block has this index
  std::uint32_t role = none;      ///< the role it plays in the record that is followed
  std::uint32_t at = none;        ///< the role's entry that was its last use in this step
  std::uint32_t recorded = none;  ///< its index in the record that is made
  std::uint32_t last = none;      ///< its last entry there
  std::uint64_t bytes = 0;
  std::uint64_t spared_bytes = 0;  ///< as in `StepRecord::Block`
};

/// Follows the record of the step before while the program runs through the next one, and predicts
/// each block's next use from it. `AccessSchedule` owns one.
///
/// The cursor is the first recorded entry that has not been used yet. A use is one of these:
/// - The entry at the cursor. The cursor advances. This is the common case.
/// - An entry near the cursor (`is_near`). It was used early; the cursor stays, since the entries
///   before it may still come. They are passed over once the program is well beyond them.
/// - A stray: the use is missing from the record, or recorded far away. Up to `most_tolerated`
///   strays are tolerated; every `matches_per_tolerated` matching uses allow one more again. When
///   no more are tolerated, the position is lost and nothing is predicted.
///
/// After a loss the follower searches: it assumes a position and compares the following uses with
/// it. It predicts again after a long streak of uses that agree. Each loss makes the required
/// streak up to twice as long.
///
/// Example: the record is A B C D, and the program uses A C B X D. C is early, B moves the cursor
/// past C as well, X is a stray, and D matches.
///
/// What is used of a role is noted in its `StepRecord::Block`, so that entries which were used
/// early remain known as such when their block is freed. While a record is followed, `coming` is
/// never before the cursor: whatever moves the cursor past an entry also moves `coming` of its role
/// on.
///
/// Cost    O(1) amortised for a use while the record is followed. A search takes O(uses of the
///         block in the record) for a use, and O(length of the record) when it ends.
/// Threads thread-unsafe.
template <class = Lazily>
class BasicStepFollower {
 public:
  enum class Mode : std::uint8_t { off, following, searching };
  /// The effect of a use on the predictions made before it.
  enum class Change : std::uint8_t { none, lost, resumed };

  using Blocks = std::vector<ScheduledBlock>;  // by index

  [[nodiscard]] StepRecord& record() noexcept { return record_; }
  [[nodiscard]] StepRecord const& record() const noexcept { return record_; }
  [[nodiscard]] bool is_following() const noexcept { return mode_ == Mode::following; }
  [[nodiscard]] std::uint32_t cursor() const noexcept { return cursor_; }
  [[nodiscard]] std::uint64_t mispredictions() const noexcept { return mispredictions_; }
  Change take_change() noexcept { return std::exchange(change_, Change::none); }

  /// Ends a step of `uses` uses, and decides whether the next record is trusted from its start.
  void finish(std::uint64_t uses) noexcept {
    if (is_following() && cursor_ < record_.length()) {
      ++mispredictions_;  // the step was shorter than the one before
    }
    bool const has_agreed = 2 * std::uint64_t{matches_} >= uses;
    is_trusted_ = mode_ == Mode::off || (has_agreed && (losses_ == 0 || 8 * wrong_ <= right_));
  }

  /// Starts at the beginning of the record. A record that is not trusted is searched first: it
  /// predicts nothing until enough uses have agreed with it.
  void start(std::uint64_t position) noexcept {
    mode_ = record_.entries.empty() ? Mode::off : is_trusted_ ? Mode::following : Mode::searching;
    change_ = Change::none;
    for (StepRecord::Block& role : record_.blocks) {
      role.unused = role.first == none ? never_entry : role.first;
      role.coming = role.unused;
    }
    base_ = position;
    cursor_ = 0;
    early_ = 0;
    sequence_end_ = none;
    in_sequence_ = 0;
    matches_ = 0;
    streak_ = 0;
    needed_streak_ = first_streak;
    tolerated_ = most_tolerated;
    far_ = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(record_.mean_reuse() / 2, std::max(window, record_.length() / 32)));
    right_ = 0;
    wrong_ = 0;
    losses_ = 0;
    lost_at_ = 0;
    lost_for_ = 0;
    aligned_from_ = none;
    lost_right_ = 0;
    lost_wrong_ = 0;
  }

  /// Notes the use of a block at `position`, and predicts the block's next use.
  Use on_access(Blocks& blocks,
                StepRecord& recording,
                BlockId id,
                std::uint64_t position) noexcept {
    ScheduledBlock& block = blocks[index_of_block(id)];
    if (mode_ == Mode::off) {
      return Use{position};
    }
    if (mode_ == Mode::searching) {
      return search(blocks, recording, id, position);
    }
    if (cursor_ < record_.length() && record_.entries[cursor_].block == block.role) {
      return follow(block, position);
    }
    return diverge(blocks, recording, id, position);
  }

  /// The next use of a block as predicted now. @cost O(1)
  [[nodiscard]] Use use_of(ScheduledBlock const& block, std::uint64_t position) const noexcept {
    Use use = is_following() ? use_at(position, coming(block)) : Use{position};
    use.is_ahead = true;
    return use;
  }

  /// Whether an entry at or after the cursor has been used already.
  [[nodiscard]] bool is_past(std::uint32_t entry) const noexcept {
    return early_ != 0 && is_used(entry);
  }

  /// The position at which an entry is expected.
  [[nodiscard]] std::uint64_t position_of(std::uint32_t entry) const noexcept {
    return base_ + entry;
  }

 private:
  static constexpr std::uint32_t none = StepRecord::none;
  static constexpr std::uint32_t window = 64;                 // entries that count as near
  static constexpr std::uint32_t most_tolerated = 8;          // the largest budget of stray uses
  static constexpr std::uint32_t matches_per_tolerated = 16;  // uses that add one to the budget
  // If so many entries are used one after another, the position is certain.
  static constexpr std::uint32_t sure_sequence = 8;
  // After a loss, the position is certain after so many near uses in a row and so many far
  // predictions that came true.
  static constexpr std::uint32_t first_streak = 16;
  static constexpr std::uint32_t enough_right = 8;

  [[nodiscard]] Use use_at(std::uint64_t position, std::uint32_t entry) const noexcept {
    if (entry >= never_entry) {
      return {position, entry == none ? use_unknown : use_never, entry};
    }
    return {position, std::max(position, base_ + entry), entry};
  }

  [[nodiscard]] StepRecord::Block& role_at(std::uint32_t entry) noexcept {
    return record_.blocks[record_.entries[entry].block];
  }
  [[nodiscard]] bool is_used(std::uint32_t entry) const noexcept {
    return record_.blocks[record_.entries[entry].block].unused > entry;
  }
  /// The first entry of a block's role at or after the cursor that has not been used.
  [[nodiscard]] std::uint32_t coming(ScheduledBlock const& block) const noexcept {
    return block.role == none ? none : record_.blocks[block.role].coming;
  }
  /// The first entry of a block's role that has not been used and is no more than `window` before
  /// `place`.
  [[nodiscard]] std::uint32_t unused_near(ScheduledBlock const& block,
                                          std::uint32_t place) const noexcept {
    return block.role == none
               ? none
               : skip_to(record_.blocks[block.role].unused, place - std::min(place, window));
  }
  /// The first of `entry` and the entries after it of the same role that is not before `from`.
  [[nodiscard]] std::uint32_t skip_to(std::uint32_t entry, std::uint32_t from) const noexcept {
    while (entry < from) {
      entry = record_.entries[entry].next;
    }
    return entry;
  }

  /// Counts whether the prediction of a use came true, if it was made at least `far_` entries
  /// before. Only far predictions show that the record is good enough to evict by: a program may
  /// repeat short rows of uses exactly and still run the rows in another order.
  void count_outcome(ScheduledBlock const& block, std::uint32_t place) noexcept {
    if (block.at == none) {
      return;
    }
    std::uint32_t const next = record_.entries[block.at].next;
    if (next < record_.length() && next - block.at >= far_) {
      ++(2 * distance(next, place) <= next - block.at ? right_ : wrong_);
    }
  }

  void mark_used(ScheduledBlock& block, std::uint32_t entry) noexcept {
    StepRecord::Block& role = record_.blocks[block.role];
    role.unused = record_.entries[entry].next;
    role.coming = role.unused;
    block.at = entry;
  }

  /// Notes that a block was used as the record expects at `entry`. @returns its next entry
  std::uint32_t use(ScheduledBlock& block, std::uint32_t entry) noexcept {
    mark_used(block, entry);
    ++matches_;
    if (++streak_ % matches_per_tolerated == 0) {
      tolerated_ = std::min(tolerated_ + 1, most_tolerated);
    }
    return record_.entries[entry].next;
  }

  /// Notes a use of the entry at the cursor.
  Use follow(ScheduledBlock& block, std::uint64_t position) noexcept {
    count_outcome(block, cursor_);
    std::uint32_t const next = use(block, cursor_);
    ++cursor_;
    while (early_ != 0 && cursor_ < record_.length() && is_past(cursor_)) {
      ++cursor_;
      --early_;
    }
    base_ = position + 1 - cursor_ - early_;
    return use_at(position, next);
  }

  /// Notes a use of anything but the entry at the cursor: an early use, or a stray.
  Use diverge(Blocks& blocks, StepRecord& recording, BlockId id, std::uint64_t position) noexcept {
    ScheduledBlock& block = blocks[index_of_block(id)];
    std::uint32_t const here = block.role == none ? find_open_entry(block) : coming(block);
    if (is_near(block, here, cursor_)) {
      assign_role(blocks, recording, id, here);
      if (here == cursor_) {
        return follow(block, position);  // a new block takes its role, as recorded
      }
      ++mispredictions_;
      count_outcome(block, cursor_);
      count_in_sequence(here);
      std::uint32_t const next = use(block, here);
      ++early_;
      if (in_sequence_ == sure_sequence || here - cursor_ > window) {
        // The program has moved on to this entry. It will not use the entries that it skipped.
        pass_over(in_sequence_ == sure_sequence ? here + 1 : here - window / 2);
      }
      base_ = position + 1 - cursor_ - early_;
      return use_at(position, next);
    }
    ++mispredictions_;
    count_outcome(block, cursor_);
    streak_ = 0;
    if (tolerated_ == 0 || cursor_ == record_.length()) {
      lose();
      return search(blocks, recording, id, position);
    }
    --tolerated_;
    return use_at(position, coming(block));
  }

  /// Whether a use of `entry` is plausible while the program is at `place`. It is if the entry
  /// continues the last sequence of early uses, or if it is within `window` of `place` and off by
  /// at most half the distance from the block's last use. If it is off by more, the record says
  /// little about when the block will be used.
  [[nodiscard]] bool
  is_near(ScheduledBlock const& block, std::uint32_t entry, std::uint32_t place) const noexcept {
    if (entry >= record_.length()) {
      return false;
    }
    std::uint32_t const off = distance(entry, place);
    return entry == sequence_end_ ||
           (off <= window && (block.at == none || entry < block.at || 2 * off <= entry - block.at));
  }

  [[nodiscard]] static std::uint32_t distance(std::uint32_t a, std::uint32_t b) noexcept {
    return a > b ? a - b : b - a;
  }

  void count_in_sequence(std::uint32_t entry) noexcept {
    in_sequence_ = entry == sequence_end_ ? in_sequence_ + 1 : 1;
    sequence_end_ = entry + 1;
  }

  /// Gives up waiting for the entries before `entry` that have not been used.
  void pass_over(std::uint32_t entry) noexcept {
    for (; cursor_ < entry; ++cursor_) {
      StepRecord::Block& role = role_at(cursor_);
      if (is_past(cursor_)) {
        --early_;
      } else {
        change_ = Change::resumed;  // that block's predicted next use has changed
      }
      if (role.coming == cursor_) {
        role.coming = record_.entries[cursor_].next;
      }
    }
  }

  void lose() noexcept {
    mode_ = Mode::searching;
    change_ = Change::lost;
    losses_ += cursor_ < record_.length() ? 1U : 0U;  // at its end, all of the record came true
    needed_streak_ += std::min(needed_streak_, record_.length());
    lost_at_ = cursor_;
    lost_for_ = 0;
    aligned_from_ = none;
    lost_right_ = right_;
    lost_wrong_ = wrong_;
    streak_ = 0;
    sequence_end_ = none;
    in_sequence_ = 0;
  }

  /// Notes a use while the position is lost. `cursor_` is the supposed position. The search ends
  /// when a streak of uses and enough far predictions have agreed with it.
  Use search(Blocks& blocks, StepRecord& recording, BlockId id, std::uint64_t position) noexcept {
    ScheduledBlock& block = blocks[index_of_block(id)];
    bool const is_of_now = block.at != none && block.at >= aligned_from_;
    count_outcome(block, is_of_now ? cursor_ : lost_at_ + lost_for_);
    ++lost_for_;
    std::uint32_t here = block.role == none ? find_open_entry(block) : unused_near(block, cursor_);
    if (is_near(block, here, cursor_)) {
      assign_role(blocks, recording, id, here);
      ++streak_;
      ++matches_;
      cursor_ += here > cursor_ ? 1 + (here - cursor_) / 8 : 1 - std::min(1U, (cursor_ - here) / 8);
    } else {
      here = unused_near(block, lost_at_);
      block.at = none;
      streak_ = block.role == none ? streak_ : 0;
      if (here >= record_.length() || here > lost_at_ + window) {
        cursor_ = std::min(cursor_ + 1, record_.length());
        return Use{position};
      }
      cursor_ = here + 1;  // suppose that the program continues where the position was lost
      aligned_from_ = here;
    }
    count_in_sequence(here);
    mark_used(block, here);
    if (in_sequence_ >= sure_sequence) {
      cursor_ = here + 1;
    }
    if (streak_ < needed_streak_ || right_ - lost_right_ < enough_right ||
        right_ - lost_right_ < 4 * (wrong_ - lost_wrong_)) {
      return Use{position};
    }
    if (in_sequence_ < sure_sequence) {
      cursor_ -= std::min(cursor_, window / 4);
    }
    early_ = 0;
    base_ = position + 1 - cursor_;
    for (StepRecord::Block& role : record_.blocks) {
      role.coming = skip_to(role.unused, cursor_);
    }
    mode_ = Mode::following;
    change_ = Change::resumed;
    tolerated_ = most_tolerated / 2;
    return use_at(position, coming(block));
  }

  /// Whether a block without a role could be the one that the record expects at `entry`.
  [[nodiscard]] bool can_have_role(ScheduledBlock const& block,
                                   std::uint32_t entry) const noexcept {
    std::uint32_t const role = record_.entries[entry].block;
    StepRecord::Block const& wanted = record_.blocks[role];
    return block.role == none && wanted.bytes == block.bytes && !is_used(entry) &&
           (wanted.id == BlockId{} || (record_.is_birth(role) && wanted.first == entry));
  }

  /// The first entry from the cursor on whose role a block without a role could take, or `none`.
  [[nodiscard]] std::uint32_t find_open_entry(ScheduledBlock const& block) const noexcept {
    std::uint32_t const end = std::min(record_.length(), cursor_ + window);
    for (std::uint32_t entry = cursor_; entry < end; ++entry) {
      if (can_have_role(block, entry)) {
        return entry;
      }
    }
    return none;
  }

  void
  assign_role(Blocks& blocks, StepRecord& recording, BlockId id, std::uint32_t entry) noexcept {
    std::uint32_t const role = record_.entries[entry].block;
    ScheduledBlock& block = blocks[index_of_block(id)];
    if (block.role == role) {
      return;
    }
    StepRecord::Block& wanted = record_.blocks[role];
    if (wanted.id != BlockId{}) {
      // The block born here in the last step is still alive: the new one succeeds it.
      ScheduledBlock& old = blocks[index_of_block(wanted.id)];
      old.role = none;
      old.at = none;
    }
    std::uint32_t const before = wanted.successor_of == none
                                     ? wanted.recorded
                                     : record_.blocks[wanted.successor_of].recorded;
    if (block.recorded != none && before != none) {
      recording.blocks[block.recorded].successor_of = before;
    }
    wanted.recorded = block.recorded;
    wanted.id = id;
    block.role = role;
  }

  StepRecord record_;
  std::uint64_t base_ = 0;  // the position of entry 0, counted back from the cursor
  std::uint64_t mispredictions_ = 0;
  std::uint32_t cursor_ = 0;           // the first entry not yet used
  std::uint32_t early_ = 0;            // entries after the cursor that have been used
  std::uint32_t sequence_end_ = none;  // the entry after the last that was used out of order
  std::uint32_t in_sequence_ = 0;      // how many of those followed each other
  std::uint32_t matches_ = 0;          // uses in this step that agreed with the record
  std::uint32_t streak_ = 0;           // of them, those since the last stray use
  std::uint32_t needed_streak_ = first_streak;
  std::uint32_t tolerated_ = most_tolerated;  // the stray uses that are still tolerated
  std::uint32_t far_ = window;         // entries that a prediction must reach ahead to be judged
  std::uint32_t right_ = 0;            // far predictions that roughly came true in this step
  std::uint32_t wrong_ = 0;            // far predictions that did not
  std::uint32_t losses_ = 0;           // how often the position was lost in this step
  std::uint32_t lost_at_ = 0;          // the cursor at the last loss
  std::uint32_t lost_for_ = 0;         // uses since the last loss
  std::uint32_t aligned_from_ = none;  // the first entry used at the position supposed since
  std::uint32_t lost_right_ = 0;       // `right_` at the last loss
  std::uint32_t lost_wrong_ = 0;       // `wrong_` at the last loss
  bool is_trusted_ = true;             // whether the record predicts from the start of the step
  Mode mode_ = Mode::off;
  Change change_ = Change::none;
};

using StepFollower = BasicStepFollower<>;

SPILLWAY_COMPILED_PART(class BasicStepFollower<>);

}  // namespace spillway::detail
