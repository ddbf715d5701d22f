// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>
#include <spillway/core/step_record.hpp>
#include <spillway/core/types.hpp>
#include <spillway/core/use.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace spillway {

/// Records in which order one step of a program uses its blocks and predicts the next step from it.
///
/// A block that is alive when a step begins is known again by its identity. A block that is born in a
/// step takes over the part of the recorded block of the same size whose first use is due when it is
/// first used. A use that the record did not expect is counted as a misprediction; small ones (a use
/// more, a few less, two changed round) are tolerated and the place in the record is found again
/// nearby, but when they become frequent the schedule stops predicting until a long run of uses
/// agrees with the record again, longer each time. A program that never calls `begin_step` pays for
/// one counter.
///
/// Units   positions count acquisitions since construction.
/// Memory  24 bytes for each acquisition of the longest step, reused from step to step.
/// Threads thread-unsafe; the pager calls it under its lock.
class AccessSchedule {
 public:
  static constexpr bool is_thread_safe = false;

  /// What an access did to the predictions made before it.
  enum class Change : std::uint8_t { none, lost, resumed };

  /// One predicted use.
  struct Upcoming {
    std::uint64_t position = 0;
    BlockId id{};  ///< `BlockId{}` if the block does not exist yet
    std::size_t bytes = 0;
    Access access = Access::read;
    bool is_birth = false;  ///< first use of a block that does not exist yet
  };

  AccessSchedule() = default;
  /// `max_step_accesses` bounds the memory of a program that never ends a step it began; a longer
  /// step is not recorded.
  explicit AccessSchedule(std::size_t max_step_accesses)
      : max_entries_{std::min(max_step_accesses, StepRecord::max_entries)} {}

  /// Marks the boundary between two steps: what was recorded since the last one predicts this one.
  ///
  /// @cost  O(blocks alive); no allocation once the buffers have grown
  void begin_step() noexcept;

  /// Notes a new block. `bytes` identifies its part in the record: round it always the same way.
  ///
  /// @throws std::bad_alloc, with nothing noted
  void on_create(BlockId id, std::size_t bytes);

  /// Notes an acquisition and says what the record predicts of the block's next one.
  Use on_access(BlockId id, Access access) noexcept;

  /// Notes that the last lease on a block has ended: from here on it could leave the device.
  void on_release(BlockId id) noexcept {
    Slot const& slot = slots_[slot_of(id)];
    if (slot.last != StepRecord::none) {
      recording_.entries[slot.last].released = recording_.length() & StepRecord::entry_mask;
    }
  }

  void on_destroy(BlockId id) noexcept;

  /// What the last access did to the predictions; asked once after each access.
  Change take_change() noexcept { return std::exchange(change_, Change::none); }

  [[nodiscard]] bool is_predicting() const noexcept { return mode_ == Mode::following; }
  /// Acquisitions so far: the position of the next one.
  [[nodiscard]] std::uint64_t position() const noexcept { return position_; }
  /// Uses that the record did not expect while it was trusted, since construction.
  [[nodiscard]] std::uint64_t mispredictions() const noexcept { return mispredictions_; }
  /// Steps begun since construction.
  [[nodiscard]] std::uint64_t steps() const noexcept { return steps_; }

  /// The next use of a block as predicted now. @cost O(1)
  [[nodiscard]] Use use_of(BlockId id) const noexcept {
    return is_predicting() ? use_at(position_, next_entry(slots_[slot_of(id)])) : Use{position_};
  }
  [[nodiscard]] std::uint64_t next_use(BlockId id) const noexcept { return use_of(id).next; }

  /// Whether the next predicted use overwrites the block, so that its bytes need not come back.
  [[nodiscard]] bool is_overwritten_next(BlockId id) const noexcept {
    std::uint32_t const entry = use_of(id).entry;
    return entry < never_entry && access_at(entry) == Access::write;
  }

  /// Calls `visit(Upcoming const&)` for each predicted use, the next one first, until it returns false
  /// or one step's length has been visited.
  template <class Visit>
  void upcoming(Visit visit) const;

  /// What the current step is predicted from; meaningful only while `is_predicting()`.
  [[nodiscard]] StepRecord const& record() const noexcept { return followed_; }
  /// The entry of `record()` that is expected next.
  [[nodiscard]] std::uint32_t cursor() const noexcept { return cursor_; }

 private:
  static constexpr std::uint32_t none = StepRecord::none;
  static constexpr std::uint32_t window = 64;                 // how far off the place is looked for
  static constexpr std::uint32_t most_tolerated = 8;          // mispredictions in a row
  static constexpr std::uint32_t matches_per_tolerated = 16;  // what earns one back
  static constexpr std::uint32_t first_run = 16;  // matches in a row before trust returns

  enum class Mode : std::uint8_t { off, following, searching };

  struct Slot {
    std::uint32_t generation = 0;   // 0: free
    std::uint32_t part = none;      // index into followed_.blocks
    std::uint32_t next = none;      // the part's next entry as of its last use
    std::uint32_t recorded = none;  // index into recording_.blocks
    std::uint32_t last = none;      // its last entry in recording_
    std::uint64_t bytes = 0;
  };

  [[nodiscard]] static Access access_of(StepRecord::Entry const& entry) noexcept {
    return static_cast<Access>(entry.access);
  }
  [[nodiscard]] Access access_at(std::uint32_t entry) const noexcept {
    return access_of(followed_.entries[entry % followed_.length()]);
  }
  [[nodiscard]] Use use_at(std::uint64_t now, std::uint32_t entry) const noexcept {
    if (entry >= never_entry) {
      return {now, entry == none ? use_unknown : use_never, entry};
    }
    return {now, base_ + entry, entry};
  }
  /// The first entry of a block's part at or after `from`.
  [[nodiscard]] std::uint32_t next_entry(Slot const& slot, std::uint32_t from) const noexcept {
    std::uint32_t entry = slot.next;
    while (entry < from) {
      entry = followed_.entries[entry].next;
    }
    return entry;
  }
  [[nodiscard]] std::uint32_t next_entry(Slot const& slot) const noexcept {
    return next_entry(slot, cursor_);
  }

  void record(Slot& slot, Access access) noexcept;
  void finish_record() noexcept;
  void cast_parts() noexcept;
  void start_record();
  void stop_record() noexcept;

  [[nodiscard]] bool is_expected(Slot const& slot, std::uint32_t entry) const noexcept {
    return entry < followed_.length() &&
           (followed_.entries[entry].block == slot.part || can_take_part(slot, entry));
  }
  [[nodiscard]] bool can_take_part(Slot const& slot, std::uint32_t entry) const noexcept;
  void take_part(Slot& slot, BlockId id, std::uint32_t entry) noexcept;
  Use follow(Slot& slot) noexcept;
  Use diverge(Slot& slot, BlockId id) noexcept;
  Use search(Slot& slot, BlockId id) noexcept;
  void lose() noexcept;

  std::size_t max_entries_ = std::size_t{1} << 22U;
  std::vector<Slot> slots_;
  StepRecord recording_;
  StepRecord followed_;
  std::uint64_t position_ = 0;
  std::uint64_t base_ = 0;  // position of followed_'s entry 0, were the step in time with it
  std::uint64_t mispredictions_ = 0;
  std::uint64_t steps_ = 0;
  std::uint32_t cursor_ = 0;
  std::uint32_t ahead_ = none;  // where the record goes on if the last misprediction was a skip
  std::uint32_t matches_ = 0;   // in this step
  std::uint32_t run_ = 0;       // matches since the last misprediction
  std::uint32_t needed_run_ = first_run;
  std::uint32_t tolerated_ = most_tolerated;
  std::uint32_t elapsed_ = 0;  // accesses since predictions stopped
  Mode mode_ = Mode::off;
  Change change_ = Change::none;
  bool is_recording_ = false;
};

inline void AccessSchedule::on_create(BlockId id, std::size_t bytes) {
  std::uint32_t const index = slot_of(id);
  if (index >= slots_.size()) {
    slots_.resize(std::size_t{index} + 1);
  }
  Slot slot{.generation = generation_of(id), .bytes = bytes};
  if (is_recording_) {
    slot.recorded = static_cast<std::uint32_t>(recording_.blocks.size());
    recording_.blocks.push_back({.id = id, .bytes = bytes});
  }
  slots_[index] = slot;
}

inline void AccessSchedule::on_destroy(BlockId id) noexcept {
  if (slot_of(id) >= slots_.size() || slots_[slot_of(id)].generation != generation_of(id)) {
    return;
  }
  Slot& slot = slots_[slot_of(id)];
  if (slot.recorded != none) {
    StepRecord::Block& block = recording_.blocks[slot.recorded];
    block.id = BlockId{};
    block.last = slot.last;
    block.freed = recording_.length();
  }
  if (slot.part != none) {
    followed_.blocks[slot.part].id = BlockId{};
  }
  slot = Slot{};
}

inline Use AccessSchedule::on_access(BlockId id, Access access) noexcept {
  SPILLWAY_ASSERT(slot_of(id) < slots_.size() &&
                  slots_[slot_of(id)].generation == generation_of(id));
  Slot& slot = slots_[slot_of(id)];
  ++position_;
  if (is_recording_) {
    record(slot, access);
  }
  switch (mode_) {
  case Mode::off:
    return Use{position_ - 1};
  case Mode::searching:
    return search(slot, id);
  case Mode::following:
    break;
  }
  if (cursor_ < followed_.length() && followed_.entries[cursor_].block == slot.part) {
    return follow(slot);
  }
  return diverge(slot, id);
}

inline void AccessSchedule::record(Slot& slot, Access access) noexcept {
  std::uint32_t const entry = recording_.length();
  if (recording_.entries.size() == recording_.entries.capacity()) {
    try {
      if (entry >= max_entries_) {
        throw std::bad_alloc{};
      }
      recording_.entries.reserve(std::min(max_entries_, std::max<std::size_t>(1024, 2UL * entry)));
    } catch (...) {
      stop_record();
      return;
    }
  }
  recording_.entries.push_back(
      {slot.recorded, never_entry, 0, static_cast<std::uint32_t>(access) & 3U});
  if (slot.last == none) {
    recording_.blocks[slot.recorded].first = entry;
  } else {
    recording_.entries[slot.last].next = entry;
  }
  slot.last = entry;
}

/// The expected use has come.
inline Use AccessSchedule::follow(Slot& slot) noexcept {
  StepRecord::Entry const& entry = followed_.entries[cursor_];
  slot.next = entry.next;
  base_ = position_ - 1 - cursor_;
  ++cursor_;
  ++matches_;
  if (++run_ % matches_per_tolerated == 0) {
    tolerated_ = std::min(tolerated_ + 1, most_tolerated);
  }
  return use_at(position_ - 1, entry.next);
}

/// Another use than the expected one has come: a block that was born, a known small deviation, or the
/// end of what the record is good for.
inline Use AccessSchedule::diverge(Slot& slot, BlockId id) noexcept {
  if (is_expected(slot, cursor_)) {
    take_part(slot, id, cursor_);
    return follow(slot);
  }
  if (ahead_ != none && is_expected(slot, ahead_)) {
    take_part(slot, id, ahead_);
    cursor_ = std::exchange(ahead_, none);
    change_ = Change::resumed;
    return follow(slot);
  }
  ++mispredictions_;
  run_ = 0;
  if (tolerated_ == 0 || cursor_ == followed_.length()) {
    lose();
    return search(slot, id);
  }
  --tolerated_;
  std::uint32_t const here = next_entry(slot);
  ahead_ = none;
  if (here < followed_.length() && here - cursor_ <= window) {
    ahead_ = here + 1;
    slot.next = followed_.entries[here].next;
  }
  return use_at(position_ - 1, next_entry(slot));
}

inline void AccessSchedule::lose() noexcept {
  mode_ = Mode::searching;
  change_ = Change::lost;
  ahead_ = none;
  run_ = 0;
  elapsed_ = 0;
}

/// Looks for the place in the record. `ahead_` is where it would be if the last uses were no accident.
inline Use AccessSchedule::search(Slot& slot, BlockId id) noexcept {
  ++elapsed_;
  if (ahead_ == none || !is_expected(slot, ahead_)) {
    run_ = 0;
    std::uint32_t const here = next_entry(slot, cursor_ - std::min(cursor_, window));
    bool const is_near = here < followed_.length() && here <= cursor_ + elapsed_ + window;
    ahead_ = is_near ? here : none;
    if (!is_near) {
      return Use{position_ - 1};
    }
  }
  slot.next = followed_.entries[ahead_].next;
  if (++run_ < needed_run_) {
    ++ahead_;
    return Use{position_ - 1};
  }
  take_part(slot, id, ahead_);
  cursor_ = std::exchange(ahead_, none);
  mode_ = Mode::following;
  change_ = Change::resumed;
  needed_run_ = std::min(2 * needed_run_, StepRecord::none / 4);
  tolerated_ = most_tolerated / 4;
  return follow(slot);
}

/// Whether the block could be the one that the record expects at `entry` under another id.
inline bool AccessSchedule::can_take_part(Slot const& slot, std::uint32_t entry) const noexcept {
  std::uint32_t const part = followed_.entries[entry].block;
  StepRecord::Block const& block = followed_.blocks[part];
  return slot.part == none && block.bytes == slot.bytes &&
         (block.id == BlockId{} || (followed_.is_birth(part) && block.first == entry));
}

inline void AccessSchedule::take_part(Slot& slot, BlockId id, std::uint32_t entry) noexcept {
  std::uint32_t const part = followed_.entries[entry].block;
  if (slot.part == part) {
    return;
  }
  StepRecord::Block& block = followed_.blocks[part];
  if (block.id != BlockId{}) {
    // The block born at this point in the last step is still there: the new one succeeds it.
    Slot& old = slots_[slot_of(block.id)];
    old.part = none;
    old.next = none;
  }
  if (is_recording_ && block.recorded != none) {
    recording_.blocks[slot.recorded].successor_of = block.recorded;
  }
  block.recorded = slot.recorded;
  block.id = id;
  slot.part = part;
}

inline void AccessSchedule::begin_step() noexcept {
  if (is_predicting() && cursor_ < followed_.length()) {
    ++mispredictions_;  // the step was shorter than the one before
  }
  bool const was_followed_well =
      mode_ == Mode::off || 2 * std::uint64_t{matches_} >= recording_.length();
  ++steps_;
  if (is_recording_) {
    finish_record();
  } else {
    recording_.clear();
  }
  std::swap(followed_, recording_);
  cast_parts();
  try {
    start_record();
  } catch (...) {
    stop_record();
  }
  cursor_ = 0;
  base_ = position_;
  ahead_ = none;
  matches_ = 0;
  run_ = 0;
  elapsed_ = 0;
  needed_run_ = first_run;
  tolerated_ = most_tolerated;
  change_ = Change::none;
  mode_ = followed_.entries.empty() ? Mode::off
          : was_followed_well       ? Mode::following
                                    : Mode::searching;
}

/// Completes the record of the step that ends: last entries, and how they go on in the step after.
inline void AccessSchedule::finish_record() noexcept {
  std::vector<StepRecord::Block>& blocks = recording_.blocks;
  for (std::uint32_t i = 0; i < blocks.size(); ++i) {
    StepRecord::Block& block = blocks[i];
    if (block.freed == none) {
      block.last = slots_[slot_of(block.id)].last;
    }
    std::uint32_t const old = block.successor_of;
    if (old != none) {
      bool const is_valid = block.freed == none && !recording_.is_birth(old) &&
                            blocks[old].freed != none && blocks[old].bytes == block.bytes;
      block.successor_of = is_valid ? old : none;
      if (is_valid) {
        blocks[old].successor = i;
      }
    }
  }
  for (std::uint32_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].freed == none && blocks[i].last != none) {
      std::uint32_t const first = blocks[recording_.part_after(i)].first;
      recording_.entries[blocks[i].last].next =
          first == none ? never_entry : recording_.length() + first;
    }
  }
}

/// Gives the blocks that are alive their parts in the record that is followed from now on.
inline void AccessSchedule::cast_parts() noexcept {
  for (Slot& slot : slots_) {
    slot.part = none;
    slot.next = none;
    slot.last = none;
    slot.recorded = none;
  }
  for (std::uint32_t i = 0; i < followed_.blocks.size(); ++i) {
    BlockId const id = followed_.blocks[i].id;
    if (id == BlockId{}) {
      continue;
    }
    std::uint32_t const part = followed_.part_after(i);
    followed_.blocks[i].id = BlockId{};
    followed_.blocks[part].id = id;
    Slot& slot = slots_[slot_of(id)];
    slot.part = part;
    slot.next = followed_.blocks[part].first;
    if (slot.next == none) {
      slot.next = never_entry;
    }
  }
}

inline void AccessSchedule::start_record() {
  recording_.clear();
  is_recording_ = true;
  for (std::uint32_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.generation == 0) {
      continue;
    }
    slot.recorded = static_cast<std::uint32_t>(recording_.blocks.size());
    recording_.blocks.push_back({.id = make_block_id(i, slot.generation), .bytes = slot.bytes});
    if (slot.part != none) {
      followed_.blocks[slot.part].recorded = slot.recorded;
    }
  }
  recording_.born_from = static_cast<std::uint32_t>(recording_.blocks.size());
}

inline void AccessSchedule::stop_record() noexcept {
  is_recording_ = false;
  recording_ = StepRecord{};
  for (Slot& slot : slots_) {
    slot.last = none;
    slot.recorded = none;
  }
  for (StepRecord::Block& block : followed_.blocks) {
    block.recorded = none;
  }
}

template <class Visit>
void AccessSchedule::upcoming(Visit visit) const {
  if (!is_predicting()) {
    return;
  }
  std::uint32_t const length = followed_.length();
  for (std::uint32_t i = 0; i < length; ++i) {
    std::uint32_t const at = cursor_ + i;
    std::uint32_t const entry = at < length ? at : at - length;
    std::uint32_t const part = followed_.entries[entry].block;
    StepRecord::Block const& block = followed_.blocks[part];
    BlockId const id = at < length ? block.id : followed_.player_after(part);
    bool const is_birth = id == BlockId{} && followed_.is_birth(part) && block.first == entry;
    if (id == BlockId{} && !followed_.is_birth(part)) {
      continue;  // freed sooner than in the record
    }
    if (!visit(
            Upcoming{base_ + at, id, block.bytes, access_of(followed_.entries[entry]), is_birth})) {
      return;
    }
  }
}

}  // namespace spillway
