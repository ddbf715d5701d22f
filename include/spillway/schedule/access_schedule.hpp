// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>
#include <spillway/core/types.hpp>
#include <spillway/schedule/step_follower.hpp>
#include <spillway/schedule/step_record.hpp>
#include <spillway/schedule/use.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace spillway {

/// Records in which order one step of a program uses its blocks and predicts the next step from it.
///
/// A block that exists when a step begins is identified by its id. A block that is made during a
/// step takes the role of the recorded block of the same size whose first use is expected when the
/// new block is first used. A use that the record did not expect is counted as a misprediction;
/// `StepFollower` says which of them end the predictions. For a program that never calls
/// `begin_step`, only uses are counted.
///
/// Units   positions count acquisitions since construction.
/// Memory  24 bytes for each acquisition of the longest step, reused from step to step.
/// Threads thread-unsafe; the pager calls it under its lock.
template <class = detail::Lazily>
class BasicAccessSchedule {
 public:
  using AccessSchedule = BasicAccessSchedule;  // what a derived class calls its base

  static constexpr bool is_thread_safe = false;

  /// The effect of an access on the predictions made before it.
  using Change = detail::StepFollower::Change;

  /// One predicted use.
  struct Upcoming {
    std::uint64_t position = 0;  ///< the present one for a use that others have come before
    std::uint32_t entry = 0;     ///< as in `Use`
    BlockId id{};                ///< `BlockId{}` if the block does not exist yet
    std::size_t bytes = 0;
    Access access = Access::read;
    bool is_birth = false;  ///< first use of a block that does not exist yet
  };

  BasicAccessSchedule() = default;
  /// @param max_step_accesses  a step with more accesses is not recorded. This bounds the memory if
  ///                           a program begins a step and never ends it
  explicit BasicAccessSchedule(std::size_t max_step_accesses)
      : max_entries_{std::min(max_step_accesses, detail::StepRecord::max_entries)} {}

  /// Marks the boundary between two steps: what was recorded since the last one predicts this one.
  ///
  /// @cost  O(blocks alive); no allocation once the buffers have grown
  void begin_step() noexcept;

  /// Notes a new block. Roles are found by `bytes`, so the caller must always round it in the same
  /// way.
  ///
  /// @throws std::bad_alloc, with nothing noted
  void on_create(BlockId id, std::size_t bytes);

  /// Notes how many of a block's bytes a plan need not count when the block leaves and comes back,
  /// since a codec or a recipe saves them. These numbers are measured and fluctuate. So that steps
  /// can be alike, a change by at most 1/16 of the block's size is ignored.
  void on_spared(BlockId id, std::uint64_t bytes) noexcept;

  /// Notes an acquisition and says what the record predicts of the block's next one.
  Use on_access(BlockId id, Access access) noexcept {
    SPILLWAY_ASSERT(is_known(id));
    return steps_ == 0 ? Use{position_++} : note_access(id, access);
  }

  /// Notes that the last lease on a block has ended: from here on it could leave the device.
  void on_release(BlockId id) noexcept {
    std::uint32_t const last = is_known(id) ? blocks_[index_of_block(id)].last : none;
    if (last != none) {
      recording_.entries[last].released = recording_.length() & detail::StepRecord::entry_mask;
    }
  }

  void on_destroy(BlockId id) noexcept;

  /// Returns how the last access has changed the predictions, and resets that. To be called once
  /// after each access.
  Change take_change() noexcept { return follower_.take_change(); }

  [[nodiscard]] bool is_predicting() const noexcept { return follower_.is_following(); }
  /// Acquisitions so far: the position of the next one.
  [[nodiscard]] std::uint64_t position() const noexcept { return position_; }
  /// Uses that the record did not expect while it was trusted, since construction.
  [[nodiscard]] std::uint64_t mispredictions() const noexcept { return follower_.mispredictions(); }
  /// Steps begun since construction.
  [[nodiscard]] std::uint64_t steps() const noexcept { return steps_; }

  /// Returns the next use of a block as predicted now, with `is_ahead` set. It is passed to
  /// policies when the block becomes resident ahead of that use. @cost O(1)
  [[nodiscard]] Use use_of(BlockId id) const noexcept {
    return follower_.use_of(is_known(id) ? blocks_[index_of_block(id)] : detail::ScheduledBlock{},
                            position_);
  }
  [[nodiscard]] std::uint64_t next_use(BlockId id) const noexcept { return use_of(id).next; }

  /// Whether the next predicted use overwrites the block, so that its bytes need not come back.
  [[nodiscard]] bool is_overwritten_next(BlockId id) const noexcept {
    std::uint32_t const entry = use_of(id).entry;
    return entry < never_entry && record().access_at(entry) == Access::write;
  }

  /// Calls `visit(Upcoming const&)` for the predicted uses among the next entries of the record,
  /// the soonest first, until it returns false or `most` entries have been looked at. It begins
  /// after `skipped` entries and ends after the length of one step. Entries that were used early,
  /// or whose block was freed, are left out, but count.
  ///
  /// @cost  O(most)
  template <class Visit>
  void upcoming(Visit visit, std::size_t skipped = 0, std::size_t most = SIZE_MAX) const;

  /// The record that predicts the current step; meaningful only while `is_predicting()`.
  [[nodiscard]] detail::StepRecord const& record() const noexcept { return follower_.record(); }
  /// The first entry of `record()` that has not been used yet.
  [[nodiscard]] std::uint32_t cursor() const noexcept { return follower_.cursor(); }

 private:
  static constexpr std::uint32_t none = detail::StepRecord::none;

  [[nodiscard]] bool is_known(BlockId id) const noexcept {
    return index_of_block(id) < blocks_.size() &&
           blocks_[index_of_block(id)].generation == generation_of(id);
  }

  Use note_access(BlockId id, Access access) noexcept;
  void record(detail::ScheduledBlock& block, Access access) noexcept;
  bool grow_record() noexcept;
  void close_record() noexcept;
  void assign_roles() noexcept;
  void open_record();
  void abandon_record() noexcept;

  std::vector<detail::ScheduledBlock> blocks_;  // by index
  detail::StepRecord recording_;
  detail::StepFollower follower_;
  std::uint64_t position_ = 0;
  std::uint64_t steps_ = 0;
  std::size_t max_entries_ = std::size_t{1} << 22U;
  bool is_recording_ = false;
};

using AccessSchedule = BasicAccessSchedule<>;

template <class Lazy>
void BasicAccessSchedule<Lazy>::on_create(BlockId id, std::size_t bytes) {
  std::uint32_t const index = index_of_block(id);
  if (index >= blocks_.size()) {
    blocks_.resize(std::size_t{index} + 1);
  }
  // Blocks that are never used leave no entries, which `note_access` counts.
  if (is_recording_ && recording_.blocks.size() - recording_.born_from >= max_entries_) {
    abandon_record();
  }
  detail::ScheduledBlock block{.generation = generation_of(id), .bytes = bytes};
  if (is_recording_) {
    block.recorded = static_cast<std::uint32_t>(recording_.blocks.size());
    recording_.blocks.push_back({.id = id, .bytes = bytes});
  }
  blocks_[index] = block;
}

template <class Lazy>
void BasicAccessSchedule<Lazy>::on_spared(BlockId id, std::uint64_t bytes) noexcept {
  detail::ScheduledBlock& block = blocks_[index_of_block(id)];
  if (block.role != none) {
    std::uint64_t const before = follower_.record().blocks[block.role].spared_bytes;
    std::uint64_t const change = std::max(bytes, before) - std::min(bytes, before);
    bytes = change <= block.bytes / 16 ? before : bytes;
  }
  block.spared_bytes = bytes;
  if (block.recorded != none) {
    recording_.blocks[block.recorded].spared_bytes = bytes;
  }
  if (block.role != none) {
    follower_.record().blocks[block.role].spared_bytes = bytes;
  }
}

template <class Lazy>
void BasicAccessSchedule<Lazy>::on_destroy(BlockId id) noexcept {
  if (!is_known(id)) {
    return;
  }
  detail::ScheduledBlock& block = blocks_[index_of_block(id)];
  if (block.recorded != none) {
    detail::StepRecord::Block& recorded = recording_.blocks[block.recorded];
    recorded.id = BlockId{};
    recorded.freed = recording_.length();
  }
  if (block.role != none) {
    follower_.record().blocks[block.role].id = BlockId{};
  }
  block = {};
}

template <class Lazy>
inline Use BasicAccessSchedule<Lazy>::note_access(BlockId id, Access access) noexcept {
  if (is_recording_) {
    record(blocks_[index_of_block(id)], access);
  }
  return follower_.on_access(blocks_, recording_, id, position_++);
}

template <class Lazy>
inline void BasicAccessSchedule<Lazy>::record(detail::ScheduledBlock& block,
                                              Access access) noexcept {
  std::uint32_t const entry = recording_.length();
  if (recording_.entries.size() == recording_.entries.capacity() && !grow_record()) {
    abandon_record();
    return;
  }
  recording_.entries.push_back(
      {block.recorded, never_entry, 0, static_cast<std::uint32_t>(access) & 3U});
  if (block.last == none) {
    recording_.blocks[block.recorded].first = entry;
  } else {
    recording_.entries[block.last].next = entry;
    ++recording_.reuses;
    recording_.reuse_sum += entry - block.last;
  }
  block.last = entry;
}

template <class Lazy>
bool BasicAccessSchedule<Lazy>::grow_record() noexcept {
  std::size_t const length = recording_.entries.size();
  if (length >= max_entries_) {
    return false;
  }
  try {
    recording_.entries.reserve(std::min(max_entries_, std::max<std::size_t>(1024, 2 * length)));
  } catch (std::bad_alloc const&) {
    return false;
  }
  return true;
}

template <class Lazy>
void BasicAccessSchedule<Lazy>::begin_step() noexcept {
  ++steps_;
  follower_.finish(recording_.entries.size());
  close_record();
  std::swap(follower_.record(), recording_);
  assign_roles();
  try {
    open_record();
  } catch (std::bad_alloc const&) {
    abandon_record();
  }
  follower_.start(position_);
}

/// Completes the record of the step that ends: finds each block's successor, and links each block's
/// last entry to its first entry in the step after.
template <class Lazy>
void BasicAccessSchedule<Lazy>::close_record() noexcept {
  std::vector<detail::StepRecord::Block>& blocks = recording_.blocks;
  // A block that was left over from the step before, and freed in this one, is succeeded by the
  // block with the same rank among the births of this step.
  for (std::uint32_t i = 0; i < recording_.born_from; ++i) {
    detail::StepRecord::Block const& old = blocks[i];
    std::uint32_t const successor = recording_.born_from + old.born_as;
    if (old.freed != none && old.born_as != none && successor < blocks.size() &&
        blocks[successor].bytes == old.bytes) {
      blocks[successor].successor_of = i;
    }
  }
  for (std::uint32_t i = 0; i < blocks.size(); ++i) {
    detail::StepRecord::Block& block = blocks[i];
    if (block.freed == none) {
      block.last = blocks_[index_of_block(block.id)].last;
    }
    std::uint32_t const old = std::exchange(block.successor_of, none);
    if (old != none && block.freed == none && !recording_.is_birth(old) &&
        blocks[old].freed != none && blocks[old].successor == none &&
        blocks[old].bytes == block.bytes) {
      block.successor_of = old;
      blocks[old].successor = i;
    }
  }
  for (std::uint32_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].freed == none && blocks[i].last != none) {
      std::uint32_t const first = blocks[recording_.role_after(i)].first;
      recording_.entries[blocks[i].last].next =
          first == none ? never_entry : recording_.length() + first;
    }
  }
}

/// Gives the blocks that are alive their roles in the record that is followed from now on.
template <class Lazy>
void BasicAccessSchedule<Lazy>::assign_roles() noexcept {
  for (detail::ScheduledBlock& block : blocks_) {
    block = detail::ScheduledBlock{
        .generation = block.generation, .bytes = block.bytes, .spared_bytes = block.spared_bytes};
  }
  detail::StepRecord& record = follower_.record();
  for (std::uint32_t i = 0; i < record.blocks.size(); ++i) {
    BlockId const id = std::exchange(record.blocks[i].id, BlockId{});
    if (id == BlockId{}) {
      continue;
    }
    std::uint32_t const role = record.role_after(i);
    detail::ScheduledBlock& block = blocks_[index_of_block(id)];
    record.blocks[role].id = id;
    record.blocks[role].spared_bytes = block.spared_bytes;
    block.role = role;
    block.at = record.is_birth(i) ? i - record.born_from : none;  // read by open_record()
  }
}

template <class Lazy>
void BasicAccessSchedule<Lazy>::open_record() {
  recording_.clear();
  is_recording_ = true;
  for (std::uint32_t index = 0; index < blocks_.size(); ++index) {
    detail::ScheduledBlock& block = blocks_[index];
    if (block.generation == 0) {
      continue;
    }
    block.recorded = static_cast<std::uint32_t>(recording_.blocks.size());
    recording_.blocks.push_back({.id = make_block_id(index, block.generation),
                                 .bytes = block.bytes,
                                 .born_as = std::exchange(block.at, none),
                                 .spared_bytes = block.spared_bytes});
    if (block.role != none) {
      follower_.record().blocks[block.role].recorded = block.recorded;
    }
  }
  recording_.born_from = static_cast<std::uint32_t>(recording_.blocks.size());
}

/// Stops recording until the next step begins; that step is then not predicted.
template <class Lazy>
void BasicAccessSchedule<Lazy>::abandon_record() noexcept {
  is_recording_ = false;
  recording_ = {};
  for (detail::ScheduledBlock& block : blocks_) {
    block.at = none;
    block.recorded = none;
    block.last = none;
  }
}

template <class Lazy>
template <class Visit>
void BasicAccessSchedule<Lazy>::upcoming(Visit visit, std::size_t skipped, std::size_t most) const {
  if (!is_predicting()) {
    return;
  }
  detail::StepRecord const& record = this->record();
  std::uint32_t const length = record.length();
  std::size_t const first = std::min<std::size_t>(skipped, length);
  std::size_t const last = first + std::min(most, length - first);
  auto const end = static_cast<std::uint32_t>(cursor() + last);
  for (auto at = static_cast<std::uint32_t>(cursor() + first); at != end; ++at) {
    bool const is_in_this_step = at < length;
    std::uint32_t const entry = is_in_this_step ? at : at - length;
    std::uint32_t const role = record.entries[entry].block;
    detail::StepRecord::Block const& block = record.blocks[role];
    BlockId const id = is_in_this_step ? block.id : record.block_after(role);
    if ((id == BlockId{} && !record.is_birth(role)) ||
        (is_in_this_step && follower_.is_past(entry))) {
      continue;  // freed sooner than in the record, or used sooner
    }
    bool const is_birth = id == BlockId{} && block.first == entry;
    std::uint64_t const expected = std::max(position_, follower_.position_of(at));
    if (!visit(Upcoming{expected, at, id, block.bytes, record.access_at(entry), is_birth})) {
      return;
    }
  }
}

SPILLWAY_COMPILED_PART(class BasicAccessSchedule<>);

}  // namespace spillway
