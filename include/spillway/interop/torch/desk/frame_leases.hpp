// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/pager.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/interop/torch/desk/desk_state.hpp>
#include <spillway/interop/torch/storage_table.hpp>

#include <atomic>
#include <cstddef>
#include <exception>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/SmallVector.h>

namespace spillway::torch {

/// Leases of what frames use: taken when an operation begins, given up when the outermost one ends and
/// memory is short.
///
/// Threads  thread-safe. References to storages are taken and dropped without the lock, since their
///          counts may need the interpreter's.
/// Streams  leases belong to the stream that is current when an operation begins. An operation on
///          another stream than the entry's adds a lease there: its stream then runs after what has been
///          enqueued on the others so far, and its work comes before whatever takes the range. While a
///          stream is captured, what is away comes in on `Site::quiet_stream()` and stays for good.
template <class Site>
class FrameLeases {
 public:
  using State = DeskState<Site>;
  using Guard = typename State::Guard;
  using StorageEntry = typename State::StorageEntry;
  using Frames = typename State::Frames;
  using Pins = typename State::Pins;
  using Lease = typename State::Lease;
  using stream_type = typename State::stream_type;

  struct Missing {
    StorageEntry* entry = nullptr;
    c10::StorageImpl* storage = nullptr;
  };
  using MissingList = c10::SmallVector<Missing, 8>;

  FrameLeases(State& state, StorageTable<Site>& roll) : state_{state}, roll_{roll} {}

  /// Pins the operands for one operation of the thread, and enrols those that have not been seen if asked
  /// to. @returns those that are away, to be given to `acquire`
  [[nodiscard]] MissingList
  enter(Frames& frames, Pins& pins, Operands const& operands, bool enrols);
  /// Unpins everything that an operation has pinned, and enrols its results. Under pressure what nobody
  /// pins any more may leave.
  void leave(Frames& frames, Pins& pins, std::span<Operand const> results) noexcept;

  /// Pins once more what the thread has pinned, for what goes on with it after the operation.
  void pin_also(Pins& pins, Operands const& operands);

  /// Acquires blocks that this thread marked as arriving. @returns false, with the reason, if there is no
  /// room now
  [[nodiscard]] bool acquire(std::vector<Missing> const& mine, std::string& failure);

  /// Another stream uses a storage whose pointer is known; as `Tensor.record_stream`.
  void note_stream(StorageEntry& entry, stream_type stream);
  void note_stream(void* raw, stream_type stream);

  /// Begins pressure, and lets all that is idle leave. @returns bytes that may leave now
  std::size_t start_reclaim();

 private:
  using Strong = typename State::Strong;

  [[nodiscard]] static bool is_captured() {
    if constexpr (requires { Site::is_capturing(); }) {
      return Site::is_capturing();
    } else {
      return false;
    }
  }
  /// What a capture brings in is no part of the graph.
  [[nodiscard]] static stream_type arrival_stream() {
    if constexpr (requires { Site::quiet_stream(); }) {
      return is_captured() ? Site::quiet_stream() : Site::current_stream();
    } else {
      return Site::current_stream();
    }
  }
  static void pin(Pins& pins, StorageEntry& entry) {
    if (entry.pinner.load(std::memory_order_relaxed) == &pins) {
      return;
    }
    pins.push_back(&entry);
    ++entry.pins;
    entry.pinner.store(&pins, std::memory_order_relaxed);
  }
  /// @returns whether nobody pins it any more
  [[nodiscard]] static bool unpin(Pins const& pins, StorageEntry& entry) noexcept {
    if (entry.pinner.load(std::memory_order_relaxed) == &pins) {
      entry.pinner.store(nullptr, std::memory_order_relaxed);
    }
    return --entry.pins == 0;
  }
  /// Enrols a result. @returns its entry if it has not been seen before
  StorageEntry* enrol(Operand const& result) noexcept {
    StorageEntry* entry = State::entry_of(*result.storage);
    StorageEntry* const seen = entry;
    if (entry == nullptr) {
      entry = roll_.try_enrol(result);
    }
    if (entry != nullptr && result.use.keeps()) {
      entry->is_kept = true;
    }
    return seen == nullptr ? entry : nullptr;
  }
  /// What is left to be counted, and told to others, when all that it let go of is there for them. Under the
  /// lock.
  void end(Frames& frames, bool had_operands) noexcept {
    state_.frames_ended += had_operands ? 1 : 0;
    if (!frames.is_inside()) {
      state_.uncount(frames);
    }
  }
  void leave_under_pressure(Frames& frames, Pins& pins, std::span<Operand const> results) noexcept;
  static void bury(std::span<StorageEntry* const> graves) noexcept {
    for (StorageEntry* const entry : graves) {
      delete entry;
    }
  }

  [[nodiscard]] MissingList prepare(Operands const& operands, stream_type stream, bool captured);
  void thaw(StorageEntry& entry, stream_type stream);
  void visit(StorageEntry& entry, stream_type stream);
  /// Takes the leases and the address away. @returns false if the storage is not where it was
  [[nodiscard]] bool
  detach(StorageEntry& entry, c10::StorageImpl& storage, std::vector<Lease>& leases);

  State& state_;
  StorageTable<Site>& roll_;
};

template <class Site>
auto FrameLeases<Site>::enter(Frames& frames, Pins& pins, Operands const& operands, bool enrols)
    -> MissingList {
  stream_type const stream = Site::current_stream();
  bool const captured = is_captured();
  bool is_usual = !captured;
  {
    Guard const guard{state_.mutex};
    state_.count(frames);
    for (Operand const& operand : operands) {
      StorageEntry* entry = State::entry_of(*operand.storage);
      if (entry == nullptr && enrols) {
        entry = roll_.try_enrol(operand);
      }
      if (entry != nullptr) {
        pin(pins, *entry);
        is_usual = is_usual && entry->leases.is_home(stream) && entry->leases &&
                   !entry->is_frozen && !operand.use.keeps();
      }
    }
  }
  return is_usual ? MissingList{} : prepare(operands, stream, captured);
}

/// What few operations need for operands that are pinned now. @returns those that are away
template <class Site>
auto FrameLeases<Site>::prepare(Operands const& operands, stream_type stream, bool captured)
    -> MissingList {
  MissingList missing;
  c10::SmallVector<StorageEntry*, 2> thawing;
  c10::SmallVector<StorageEntry*, 2> visited;
  {
    Guard const guard{state_.mutex};
    for (Operand const& operand : operands) {
      StorageEntry* const entry = State::entry_of(*operand.storage);
      if (entry == nullptr) {
        continue;
      }
      // A graph that is being captured will use the address whenever it is launched.
      entry->is_kept = entry->is_kept || operand.use.keeps() || captured;
      if (operand.use.writes() && entry->is_frozen) {
        thawing.push_back(entry);
      }
      if (!entry->leases) {
        missing.push_back({entry, operand.storage});
      } else if (!captured && !entry->leases.covers(stream)) {
        visited.push_back(entry);
      }
    }
  }
  for (StorageEntry* const entry : thawing) {
    thaw(*entry, stream);
  }
  for (StorageEntry* const entry : visited) {
    visit(*entry, stream);
  }
  return missing;
}

template <class Site>
void FrameLeases<Site>::pin_also(Pins& pins, Operands const& operands) {
  pins.reserve(pins.size() + operands.size());
  Guard const guard{state_.mutex};
  for (Operand const& operand : operands) {
    if (StorageEntry* const entry = State::entry_of(*operand.storage)) {
      pins.push_back(entry);
      ++entry->pins;
    }
  }
}

/// A frozen storage is leased for reading. Before it is written its lease becomes one for writing, at
/// the same address, since the first ends after the second began.
template <class Site>
void FrameLeases<Site>::thaw(StorageEntry& entry, stream_type stream) {
  {
    Guard const guard{state_.mutex};
    entry.is_frozen = false;
    if (!entry.leases) {
      return;
    }
  }
  Lease lease = state_.memory->acquire(entry.block, Access::read_write, stream);
  Guard const guard{state_.mutex};
  lease = entry.leases.exchange_home(std::move(lease));
}

/// The entry is pinned, so that its address stays.
template <class Site>
void FrameLeases<Site>::visit(StorageEntry& entry, stream_type stream) {
  Access const access = entry.is_frozen ? Access::read : Access::read_write;
  Lease lease = state_.memory->acquire(entry.block, access, stream);
  Guard const guard{state_.mutex};
  if (!entry.leases.covers(stream)) {
    entry.leases.add(std::move(lease), stream);
  }
}

template <class Site>
void FrameLeases<Site>::note_stream(StorageEntry& entry, stream_type stream) {
  {
    Guard const guard{state_.mutex};
    if (!entry.leases || entry.leases.covers(stream)) {
      return;  // what has left since was leased on every stream that used it
    }
    ++entry.pins;
  }
  auto const unpin = [&] {
    Guard const guard{state_.mutex};
    --entry.pins;
  };
  try {
    visit(entry, stream);
  } catch (...) {
    unpin();
    throw;
  }
  unpin();
}

template <class Site>
void FrameLeases<Site>::note_stream(void* raw, stream_type stream) {
  BlockId block{};
  {
    Guard const guard{state_.mutex};
    auto const found = state_.raw.find(raw);
    if (found == state_.raw.end() || found->second->leases.covers(stream)) {
      return;
    }
    block = found->second->block;
  }
  Lease lease = state_.memory->acquire(block, Access::read_write, stream);
  Guard const guard{state_.mutex};
  if (auto const found = state_.raw.find(raw); found != state_.raw.end()) {
    found->second->leases.add(std::move(lease), stream);
  }
}

template <class Site>
bool FrameLeases<Site>::acquire(std::vector<Missing> const& mine, std::string& failure) {
  std::vector<LeaseRequest> requests;
  std::vector<Lease> leases;
  std::exception_ptr error;
  stream_type const stream = arrival_stream();
  try {
    requests.reserve(mine.size());
    for (Missing const& one : mine) {
      requests.push_back(
          {one.entry->block, one.entry->is_frozen ? Access::read : Access::read_write});
    }
    leases = state_.memory->acquire_all(requests, stream);
  } catch (OutOfDeviceMemory const& out) {
    failure = out.what();
  } catch (OutOfHostMemory const& out) {
    failure = out.what();
  } catch (...) {
    error = std::current_exception();
  }
  {
    Guard const guard{state_.mutex};
    for (std::size_t i = 0; i < mine.size(); ++i) {
      StorageEntry& entry = *mine[i].entry;
      entry.is_arriving = false;
      if (!leases.empty()) {
        entry.leases = {std::move(leases[i]), stream};
        State::point(*mine[i].storage, entry, entry.leases.data());
      }
    }
  }
  state_.tell_waiters();
  if (error) {
    std::rethrow_exception(error);
  }
  return !leases.empty();
}

template <class Site>
bool FrameLeases<Site>::detach(StorageEntry& entry,
                               c10::StorageImpl& storage,
                               std::vector<Lease>& leases) {
  if (State::entry_of(storage) != &entry) {
    entry.is_kept = true;  // its pointer was moved to a storage that is not known
    state_.strays.fetch_add(1);
    return false;
  }
  entry.leases.move_to(leases);
  State::point(storage, entry, nullptr);
  return true;
}

template <class Site>
void FrameLeases<Site>::leave(Frames& frames,
                              Pins& pins,
                              std::span<Operand const> results) noexcept {
  bool const is_last = frames.is_counted && !frames.is_inside();
  if (pins.empty() && results.empty() && !is_last) {
    return;
  }
  if (state_.is_under_pressure) {
    leave_under_pressure(frames, pins, results);
    return;
  }
  bool const had_operands = !pins.empty();
  bool has_pressure_begun = false;
  std::size_t graves = 0;
  {
    Guard const guard{state_.mutex};
    for (Operand const& result : results) {
      enrol(result);
    }
    for (StorageEntry* const entry : pins) {
      if (unpin(pins, *entry) && entry->is_dead) {
        pins[graves++] = entry;
      }
    }
    has_pressure_begun = state_.is_under_pressure;
    if (!has_pressure_begun) {
      end(frames, had_operands);
    }
  }
  if (graves != 0) {
    bury(std::span{pins}.first(graves));
  }
  pins.clear();
  if (has_pressure_begun) {
    (void)start_reclaim();
    Guard const guard{state_.mutex};
    end(frames, had_operands);
  }
}

/// Addresses go, for which the storages have to be alive.
template <class Site>
void FrameLeases<Site>::leave_under_pressure(Frames& frames,
                                             Pins& pins,
                                             std::span<Operand const> results) noexcept {
  std::vector<Lease> leases;
  std::vector<StorageEntry*> graves;
  std::vector<Strong> storages;
  storages.reserve(pins.size());
  leases.reserve(pins.size() + results.size());
  for (StorageEntry* const entry : pins) {
    storages.push_back(entry->storage.lock());
  }
  {
    Guard const guard{state_.mutex};
    for (Operand const& result : results) {
      StorageEntry* const entry = enrol(result);
      if (entry != nullptr && !entry->is_kept) {
        (void)detach(*entry, *result.storage, leases);
      }
    }
    for (std::size_t i = 0; i < pins.size(); ++i) {
      StorageEntry& entry = *pins[i];
      if (!unpin(pins, entry)) {
        continue;
      }
      if (entry.is_dead) {
        graves.push_back(&entry);
      } else if (!entry.is_kept && entry.leases && storages[i]) {
        (void)detach(entry, *storages[i], leases);
      }
    }
  }
  leases.clear();
  storages.clear();
  bury(graves);
  Guard const guard{state_.mutex};
  end(frames, !pins.empty());
  pins.clear();
}

template <class Site>
std::size_t FrameLeases<Site>::start_reclaim() {
  std::vector<Lease> leases;
  std::vector<StorageEntry*> idle;
  std::vector<StorageEntry*> graves;
  std::vector<Strong> storages;
  std::size_t bytes = 0;
  {
    Guard const guard{state_.mutex};
    if (!state_.is_under_pressure.exchange(true)) {
      state_.pressures.fetch_add(1);
    }
    for (StorageEntry* one = state_.all.next; one != &state_.all; one = one->next) {
      if (one->pins == 0 && !one->is_kept && one->leases) {
        idle.push_back(one);
      }
    }
    for (StorageEntry* const one : idle) {
      ++one->pins;  // keeps the entry, not its lease
    }
  }
  storages.reserve(idle.size());
  for (StorageEntry* const one : idle) {
    storages.push_back(one->storage.lock());
  }
  {
    Guard const guard{state_.mutex};
    for (std::size_t i = 0; i < idle.size(); ++i) {
      StorageEntry& entry = *idle[i];
      if (--entry.pins != 0) {
        continue;
      }
      if (entry.is_dead) {
        graves.push_back(&entry);
      } else if (!entry.is_kept && entry.leases && storages[i] &&
                 detach(entry, *storages[i], leases)) {
        bytes += entry.bytes;
      }
    }
  }
  leases.clear();
  storages.clear();
  bury(graves);
  state_.tell_waiters();
  return bytes;
}

}  // namespace spillway::torch
