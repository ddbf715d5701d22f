// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/interop/torch/desk/desk_state.hpp>
#include <spillway/interop/torch/desk/frame_leases.hpp>
#include <spillway/interop/torch/desk/room_queue.hpp>
#include <spillway/interop/torch/storage_table.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

namespace spillway::torch {

/// Stands between PyTorch's storages and an allocator: gives them memory, leases it while operations
/// use it, and takes the addresses away in between.
///
/// A storage gets its memory as a block under a lease (`allocate`). When an operation has it as an
/// operand or a result for the first time, the storage is *enrolled*: the context of its `DataPtr`
/// becomes a `StorageEntry`, which owns the lease from then on. As long as memory suffices, leases are
/// simply kept. Once an allocation fails, the desk is *under pressure*: a entry that no frame
/// pins gives up its lease, and the storage's pointer becomes null, so that the block may leave, move
/// or come back early as the pager sees fit. The next frame that has the storage among its operands
/// acquires the block again. So a storage has an address exactly while a lease stands behind it.
///
/// `Site` says where the one desk of a process is, since PyTorch's deleters are plain functions:
///
/// | expression               | must                                                            |
/// |--------------------------|-----------------------------------------------------------------|
/// | `Site::allocator_type`   | a `DeviceAllocator`                                             |
/// | `Site::leases()`           | the desk; lives until the process ends                          |
/// | `Site::frames()`         | the calling thread's `Frames`                                   |
/// | `Site::current_stream()` | the stream that the calling thread's operations are enqueued on |
/// | `Site::is_capturing()`   | if there is such a thing: whether that stream is being captured |
/// | `Site::quiet_stream()`   | then: a stream that never is, waited for when a capture ends    |
/// | `Site::device()`         | the PyTorch device of tensors whose memory this is              |
/// | `Site::allocates_for(s)` | whether a storage gets new memory from this desk when it grows  |
/// | `Site::enrols(bytes)`    | whether an allocation of that size may ever leave               |
/// | `Site::drop_foreign(p)`  | free memory that is not the desk's                              |
/// | `Site::let_others_run()` | an object that gives up the interpreter's lock while it lives   |
/// | `Site::on_allocated(bytes, block)`, `Site::on_freed(bytes, block)` | be told, without throwing |
/// | `Site::on_out_of_memory(bytes)` | be told of an error before it is thrown                  |
///
/// Threads  thread-safe. The lock is held for bookkeeping alone: never while the allocator is called,
///          and never while a reference to a storage is taken or dropped, which may need the GIL.
/// Streams  see `FrameLeases`; nothing waits but a thread that needs room while other threads'
///          operations are all that holds it.
template <class Site>
class StorageLeases {
 public:
  using State = DeskState<Site>;
  using Allocator = typename State::Allocator;
  using Lease = typename State::Lease;
  using StorageEntry = typename State::StorageEntry;
  using Frames = typename State::Frames;
  using Pins = typename State::Pins;
  using View = typename StorageTable<Site>::View;
  using stream_type = typename State::stream_type;

  static constexpr bool is_thread_safe = true;

  /// `memory` is not owned and must outlive the desk. It should have `lease_wait` zero: threads wait
  /// for each other here, where it is known which of them can go on.
  explicit StorageLeases(Allocator& memory) : state_{memory} {}
  StorageLeases(StorageLeases const&) = delete;
  StorageLeases& operator=(StorageLeases const&) = delete;

  /// Memory for a storage; its context is its address, as `raw_deallocate` expects.
  ///
  /// @throws c10::OutOfMemoryError when room cannot be made
  [[nodiscard]] c10::DataPtr allocate(std::size_t bytes) {
    void* const p = bytes == 0 ? nullptr : allocate_raw(bytes, Site::current_stream());
    return {p, p, deleter(), Site::device()};
  }
  /// The same as a bare address, to be given to the deleter.
  [[nodiscard]] void* allocate_raw(std::size_t bytes, stream_type stream) {
    return allocate_raw(bytes, stream, false);
  }
  /// Memory that stays where it is until `take_back`, whatever the storages in it are used for.
  ///
  /// @throws c10::OutOfMemoryError when room cannot be made
  [[nodiscard]] void* lend(std::size_t bytes, stream_type stream) {
    return allocate_raw(bytes, stream, true);
  }
  void take_back(void* p) noexcept { (void)roll_.free_raw(p, true); }
  /// The deleter of memory that is not enrolled. Addresses of others go to `Site::drop_foreign`.
  [[nodiscard]] static c10::DeleterFnPtr deleter() noexcept { return &State::drop_raw; }
  [[nodiscard]] std::size_t raw_bytes(void* p) const { return roll_.raw_bytes(p); }

  /// Pins the operands for an operation of the calling thread and brings in those that are away.
  ///
  /// @param enrols  whether storages seen for the first time are enrolled
  /// @throws c10::OutOfMemoryError if they do not fit together; c10::Error if their bytes are lost
  void enter(Frames& frames, Pins& pins, Operands const& operands, bool enrols) {
    auto const missing = leases_.enter(frames, pins, operands, enrols);
    if (!missing.empty()) {
      attach(frames, missing);
    }
  }
  /// Ends an operation: enrols its results, and lets what it had in use leave. Never makes room.
  void leave(Frames& frames, Pins& pins, std::span<Operand const> results) noexcept {
    leases_.leave(frames, pins, results);
  }
  /// Pins operands once more, for what goes on with them after the operation that has them pinned. To be
  /// ended by `leave`, by any thread.
  void pin_also(Pins& pins, Operands const& operands) { leases_.pin_also(pins, operands); }
  /// Makes what is pinned stay for good.
  void keep(Pins const& pins) noexcept {
    Guard const guard{state_.mutex};
    for (StorageEntry* const entry : pins) {
      entry->is_kept = true;
    }
  }
  /// Between the two nobody waits for the thread to let go of something. @returns whether somebody did
  [[nodiscard]] bool suspend(Frames& frames) noexcept {
    Guard const guard{state_.mutex};
    bool const was_counted = frames.is_counted;
    state_.uncount(frames);
    return was_counted;
  }
  void resume(Frames& frames) noexcept {
    Guard const guard{state_.mutex};
    state_.count(frames);
  }

  /// Says whether operations only read this storage, so that it leaves without being copied again. An
  /// operation that says it writes it ends that; one that writes without saying so must not be used.
  void freeze(c10::StorageImpl& storage, bool is_frozen);
  /// Another stream uses the memory behind a `DataPtr` until what is enqueued there when it is freed, or
  /// leaves, is done. Addresses of others are left alone.
  /// @stream `stream` runs after what has been enqueued for this memory so far
  void note_stream(c10::DataPtr const& data, stream_type stream);
  void note_stream(Pins const& pins, stream_type stream) {
    for (StorageEntry* const entry : pins) {
      leases_.note_stream(*entry, stream);
    }
  }

  /// Lets everything that is not in use leave when room is needed. @returns bytes that may leave now
  std::size_t start_reclaim() { return leases_.start_reclaim(); }
  /// Makes everything that is not in use leave now. @returns bytes that left
  std::size_t reclaim();
  /// Marks the boundary between two steps of a program that repeats.
  void begin_step();

  /// Whether allocations may make others leave. What is away comes back when it is used either way.
  void enable(bool is_enabled) noexcept {
    state_.is_enabled = is_enabled;
    if (!is_enabled) {
      state_.is_under_pressure = false;
    }
  }
  [[nodiscard]] bool is_enabled() const noexcept { return state_.is_enabled; }
  [[nodiscard]] bool is_under_pressure() const noexcept { return state_.is_under_pressure; }
  /// For a negative control: frames end at every depth, as they must not.
  void end_frames_early(bool early) noexcept { state_.ends_frames_early = early; }
  [[nodiscard]] bool ends_frames_early() const noexcept { return state_.ends_frames_early; }

  /// The entry of a storage of ours; null for any other.
  [[nodiscard]] static StorageEntry* entry_of(c10::StorageImpl& storage) noexcept {
    return State::entry_of(storage);
  }
  /// A cheap test without the lock: might `enter` have anything to do with it?
  [[nodiscard]] static bool is_ours(c10::StorageImpl& storage) noexcept {
    auto const deleter = storage._mutable_data_ptr_no_checks().get_deleter();
    return deleter == &State::drop_entry || deleter == &State::drop_raw;
  }

  /// The same for what no operation has been seen to use.
  [[nodiscard]] static bool is_newcomer(c10::StorageImpl& storage) noexcept {
    return storage._mutable_data_ptr_no_checks().get_deleter() == &State::drop_raw;
  }
  /// The same inside of an operation: only what is enrolled matters there, and what it reads and has
  /// pinned on the current stream is in its place.
  [[nodiscard]] static bool
  is_wanted(Frames const& frames, c10::StorageImpl& storage, OperandUse use) {
    StorageEntry const* const entry = entry_of(storage);
    return entry != nullptr && (use.keeps() || use.writes() ||
                                  entry->pinner.load(std::memory_order_relaxed) != &frames.pins ||
                                  !entry->leases.is_home(Site::current_stream()));
  }

  [[nodiscard]] View view(c10::StorageImpl& storage) const { return roll_.view(storage); }
  /// What is known of all storages and allocations, largest first.
  [[nodiscard]] std::vector<View> views() const { return roll_.views(); }

  struct Counts {
    std::uint64_t frames = 0;         // outermost frames that had operands of ours
    std::uint64_t waits = 0;          // times a thread waited for other threads' frames
    std::uint64_t out_of_memory = 0;  // errors thrown
    std::uint64_t pressures = 0;      // times pressure began
    std::uint64_t strays = 0;         // storages whose pointer had been moved elsewhere
    std::size_t entries = 0;
    int active_frames = 0;
  };
  [[nodiscard]] Counts counts() const;
  [[nodiscard]] Allocator& memory() const noexcept { return *state_.memory; }

  /// Around `fork`, together with the device's own: nobody else is inside meanwhile.
  void before_fork() { state_.mutex.lock(); }
  void after_fork() noexcept { state_.mutex.unlock(); }

  /// Why nothing at all can leave, the first time that this is asked for and so; else empty.
  [[nodiscard]] std::string take_warning() {
    std::string const why = state_.has_warned ? std::string{} : roll_.why_nothing_leaves();
    return why.empty() || state_.has_warned.exchange(true) ? std::string{} : why;
  }

  /// Throws PyTorch's error, with what would have to be released. @throws c10::OutOfMemoryError
  [[noreturn]] void refuse(std::size_t bytes, std::string const& why) {
    state_.out_of_memory.fetch_add(1);
    std::string const held = roll_.holders();
    if (std::string const warning = state_.is_enabled ? take_warning() : ""; !warning.empty()) {
      TORCH_WARN(warning);
    }
    Site::on_out_of_memory(bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, false, why, held);
  }

  /// Called by deleters.
  [[nodiscard]] bool free_raw(void* p) noexcept { return roll_.free_raw(p, false); }
  void on_storage_gone(StorageEntry& entry) noexcept { roll_.on_storage_gone(entry); }

 private:
  using Guard = typename State::Guard;
  using Missing = typename FrameLeases<Site>::Missing;
  using MissingList = typename FrameLeases<Site>::MissingList;

  [[nodiscard]] void* allocate_raw(std::size_t bytes, stream_type stream, bool is_lent);
  void attach(Frames& frames, MissingList const& missing);

  /// After an allocation failed: lets go what is idle, or waits for others. @returns false if neither
  /// can help
  [[nodiscard]] bool make_room(Frames const& frames, std::uint64_t seen) {
    if (!state_.is_enabled) {
      return false;
    }
    return !state_.is_under_pressure ? (start_reclaim(), true) : queue_.await_others(frames, seen);
  }

  State state_;
  StorageTable<Site> roll_{state_};
  FrameLeases<Site> leases_{state_, roll_};
  RoomQueue<Site> queue_{state_};
  std::uint64_t evictions_seen_ = 0;
};

template <class Site>
void* StorageLeases<Site>::allocate_raw(std::size_t bytes, stream_type stream, bool is_lent) {
  for (;;) {
    std::uint64_t const seen = state_.changes();
    std::string failure;
    try {
      BlockId const block = memory().allocate(bytes);
      typename State::Leases leases;
      try {
        leases = {memory().acquire(block, Access::write, stream), stream};
        void* const p = leases.data();
        roll_.add_raw(Site::frames(), block, bytes, leases, is_lent);
        Site::on_allocated(bytes, block);
        return p;
      } catch (...) {
        leases.release();
        memory().abandon(block);
        throw;
      }
    } catch (OutOfDeviceMemory const& error) {
      failure = error.what();
    } catch (OutOfHostMemory const& error) {
      failure = error.what();
    }
    if (!make_room(Site::frames(), seen)) {
      refuse(bytes, failure);
    }
  }
}

/// Acquires blocks for entries that this thread has pinned. Each is acquired by one thread; others
/// wait for it after they have acquired theirs.
template <class Site>
void StorageLeases<Site>::attach(Frames& frames, MissingList const& missing) {
  std::vector<Missing> mine;
  for (;;) {
    std::uint64_t const seen = state_.changes();
    bool is_somebody_elses = false;
    mine.clear();
    {
      Guard guard{state_.mutex};
      for (Missing const& one : missing) {
        StorageEntry& entry = *one.entry;
        if (entry.leases) {
          continue;
        }
        if (entry.is_arriving) {
          is_somebody_elses =
              std::none_of(mine.begin(),
                           mine.end(),
                           [&](Missing const& other) { return other.entry == one.entry; }) ||
              is_somebody_elses;
        } else {
          entry.is_arriving = true;
          mine.push_back(one);
        }
      }
    }
    if (mine.empty()) {
      if (!is_somebody_elses) {
        return;
      }
      queue_.await_arrival(seen);
      continue;
    }
    std::string failure;
    if (!leases_.acquire(mine, failure) && !make_room(frames, seen + 1)) {  // one was our own
      std::size_t bytes = 0;
      for (Missing const& one : mine) {
        bytes += one.entry->bytes;
      }
      refuse(bytes, failure);
    }
  }
}

template <class Site>
void StorageLeases<Site>::note_stream(c10::DataPtr const& data, stream_type stream) {
  if (data.get_deleter() == &State::drop_entry) {
    leases_.note_stream(*static_cast<StorageEntry*>(data.get_context()), stream);
  } else if (data.get_deleter() == &State::drop_raw) {
    leases_.note_stream(data.get_context(), stream);
  }
}

template <class Site>
std::size_t StorageLeases<Site>::reclaim() {
  (void)start_reclaim();
  std::vector<BlockId> blocks;
  {
    Guard const guard{state_.mutex};
    for (StorageEntry* one = state_.all.next; one != &state_.all; one = one->next) {
      if (!one->leases) {
        blocks.push_back(one->block);
      }
    }
  }
  std::size_t const before = memory().stats().resident.bytes.current;
  for (BlockId const block : blocks) {
    try {
      memory().swap_out(block);
    } catch (ContractViolation const&) {  // NOLINT(bugprone-empty-catch): freed or in use by now
    }
  }
  std::size_t const after = memory().stats().resident.bytes.current;
  return before - std::min(before, after);
}

template <class Site>
void StorageLeases<Site>::begin_step() {
  memory().begin_step();
  Stats const now = memory().stats();
  std::uint64_t const evictions = now.evicted().count;
  bool const is_calm = evictions == std::exchange(evictions_seen_, evictions);
  if (is_calm && now.resident.bytes.current == now.allocated.bytes.current) {
    state_.is_under_pressure = false;  // leases are kept again, from the next use on
  }
}

template <class Site>
void StorageLeases<Site>::freeze(c10::StorageImpl& storage, bool is_frozen) {
  Guard const guard{state_.mutex};
  StorageEntry* entry = entry_of(storage);
  if (entry == nullptr) {
    entry = roll_.try_enrol({&storage});
  }
  if (entry != nullptr) {
    entry->is_frozen = is_frozen;
  }
}

template <class Site>
auto StorageLeases<Site>::counts() const -> Counts {
  Guard const guard{state_.mutex};
  return {.frames = state_.frames_ended,
          .waits = state_.waits,
          .out_of_memory = state_.out_of_memory,
          .pressures = state_.pressures,
          .strays = state_.strays,
          .entries = state_.entries,
          .active_frames = state_.active};
}

}  // namespace spillway::torch
