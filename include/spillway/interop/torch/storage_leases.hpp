// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/interop/framework/codec_choice.hpp>
#include <spillway/interop/framework/operand_leases.hpp>
#include <spillway/interop/torch/operands.hpp>
#include <spillway/interop/torch/site.hpp>
#include <spillway/interop/torch/storage_table.hpp>
#include <spillway/interop/torch/torch_version.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/macros/Macros.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

namespace spillway::torch {

/// Where an operation that a recipe runs gets its memory. The result is made where the recipe wants
/// it. Other memory must not come from `StorageLeases::allocate`, since the allocator waits for
/// this operation.
struct RecipeMemory {
  void* result = nullptr;
  std::size_t result_bytes = 0;
  bool is_result_taken = false;
};

/// An operand of an operation whose results may get recipes.
struct RecipeOperand {
  c10::StorageImpl* storage = nullptr;
  /// `StorageEntry::grants_to_write` when the operation had run. If it has grown since, the operand
  /// may have been written.
  std::uint64_t grants_to_write = 0;
};

/// An operation in place that may extend the recipe of the storage that it changes.
struct RecipeExtension {
  /// Enqueues on a stream the change of the bytes at the last address, from the operands at the
  /// other addresses.
  using Make = std::function<void(void const*, std::span<void const* const>, void*)>;

  c10::StorageImpl* changed = nullptr;
  bool is_leased = false;  ///< the changed storage is leased in a way that keeps its recipe
  // The following are known when the operation has run.
  std::vector<RecipeOperand> operands{};
  std::chrono::nanoseconds cost{};
  Make make{};
};

/// How messages of PyTorch's own allocators begin when there is no memory. Programs look for these
/// words, for example to go on with smaller batches (accelerate, Lightning).
[[nodiscard]] inline char const* out_of_memory(c10::Device device) noexcept {
  return device.is_cuda() ? "CUDA out of memory. "
                          : "CPU out of memory. DefaultCPUAllocator: can't allocate memory. ";
}

/// Small entries that the latest operations of one thread have used, oldest first. They stay
/// resident for a while; see `ReadingSite`. The lists of all threads form a ring, so that a thread
/// that finds no room can end them all. Guarded by the lock of `StorageLeases`.
template <class Entry>
struct RecentUses {
  std::vector<Entry*> entries{};
  RecentUses* previous = nullptr;  // null if this list is not in the ring
  RecentUses* next = nullptr;
};

/// The state of one thread: which operations it is inside of, and what it has pinned for them.
template <class Entry>
struct ThreadFrames {
  using Pins = std::vector<Entry*>;

  int depth = 0;  ///< nested operations that lease their operands
  /// Composites that the thread is inside of, whose inner operations have frames of their own
  int composites = 0;
  int held = 0;             ///< holds: parts of the program that count as one operation
  int held_by_kernels = 0;  ///< holds for calls of kernels that are not operations of PyTorch
  /// Number of operations the thread is inside of that are not PyTorch's own, or that may use
  /// addresses after they have returned.
  int foreign = 0;
  bool keeps_new = false;   ///< new allocations are for code that remembers addresses
  bool is_counted = false;  ///< other threads may wait for this frame
  bool is_bounded = false;  ///< other threads wait for it without a time limit
  int suspended = 0;  ///< frames of this thread that a `Barrier` suspends and others may wait for
  /// How many holds of this thread other threads have ended; these must not touch any other member.
  /// Shared with the `Hold` objects; null before the first one.
  std::shared_ptr<std::atomic<int>> ended_elsewhere{};
  /// Size of a request that failed although enough memory was free, but in pieces. It has not been
  /// reported yet, since the operation may run once more.
  std::size_t split_bytes = 0;
  /// The capacity that such an operation needs, if another program waits for memory that it has
  /// pinned.
  std::size_t claimed_bytes = 0;
  /// Keeps what was claimed for it while the operation runs once more.
  std::shared_ptr<void> claim_hold{};
  /// Whether the outermost operation is begun again if it finds no room now.
  bool can_repeat = false;
  bool has_read_leases = false;          ///< leases for reading may be among the pins
  RecipeMemory* recipe = nullptr;        ///< of the recipe that the thread runs now
  RecipeExtension* extension = nullptr;  ///< of the outermost operation
  /// Operations draw from this in place of the program's generator
  at::Generator const* generator = nullptr;
  /// Time spent on waiting for memory, counted while operations are measured
  std::uint64_t waited_ns = 0;
  /// Called once, when an operation that is being measured has got memory for its result.
  std::function<void()> const* after_allocation = nullptr;
  Pins pins{};
  RecentUses<Entry> recent{};
  /// Other lists of pins of this thread: of composites, and of operations that a `Barrier`
  /// suspends.
  std::vector<Pins const*> further_pins{};

  [[nodiscard]] bool is_inside() const noexcept { return depth > 0 || composites > 0; }
  [[nodiscard]] int thread_frames() const noexcept { return suspended + (is_counted ? 1 : 0); }
  /// True inside of a hold, whose code is the program's, and inside of operations that are not
  /// PyTorch's own: they may run such code, or communicate with a process that waits for this one.
  /// Any operation may run such code if the program has hooks for the tensors that autograd saves.
  [[nodiscard]] bool is_open_ended() const noexcept {
    return held > 0 || foreign > 0 || !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
  }
};

/// The traits of `OperandLeases` for PyTorch's storages. A storage has an address exactly while its
/// entry has a lease.
///
/// The deleter of a storage's `DataPtr` tells whose memory it is. With `free_raw`, no operation has
/// been seen to use it, and its context is its address. With `free_enrolled`, its context is its
/// entry.
template <class Site>
struct StorageTraits {
  using allocator_type = typename Site::allocator_type;
  using Lease = typename allocator_type::lease_type;
  using stream_type = typename allocator_type::stream_type;
  using Entry = StorageEntry<Lease, stream_type>;
  using Frame = ThreadFrames<Entry>;
  using Reference = c10::intrusive_ptr<c10::StorageImpl>;
  struct Missing {
    Entry* entry = nullptr;
    c10::StorageImpl* storage = nullptr;
    bool only_reads = false;
    // if not null, the recipe of the storage will be extended
    RecipeExtension* extension = nullptr;
  };

  static constexpr bool has_references = true;
  [[nodiscard]] static bool can_repeat(Frame const& frame) noexcept { return frame.can_repeat; }

  static void free_enrolled(void* context) {
    Site::leases().on_storage_gone(*static_cast<Entry*>(context));
  }
  static void free_raw(void* p) {
    if (p != nullptr && !Site::leases().free_raw(p)) {
      Site::free_foreign(p);
    }
  }

  /// Returns the entry of a storage; null if the storage is not enrolled.
  [[nodiscard]] static Entry* entry_of(c10::StorageImpl& storage) noexcept {
    c10::DataPtr const& data = storage._mutable_data_ptr_no_checks();
    return data.get_deleter() == &free_enrolled ? static_cast<Entry*>(data.get_context()) : nullptr;
  }
  /// As `entry_of`, without the lock. The result is null or was the storage's entry at some time
  /// during the call, even if another thread exchanges the memory meanwhile: it then replaces the
  /// deleter before the context (`StorageLeases::try_exchange`).
  [[nodiscard]] static Entry* entry_without_lock(c10::StorageImpl& storage) noexcept {
    Entry* const entry = entry_of(storage);
    std::atomic_thread_fence(std::memory_order_acquire);  // so that the deleter is read once more
    return entry_of(storage) == entry ? entry : nullptr;
  }
  /// Makes a weak reference without making a strong one, for whose count the interpreter's lock
  /// might be needed.
  [[nodiscard]] static c10::weak_intrusive_ptr<c10::StorageImpl>
  weak_reference(c10::StorageImpl& storage) {
    c10::raw::weak_intrusive_ptr::incref(&storage);
    return c10::weak_intrusive_ptr<c10::StorageImpl>::reclaim(&storage);
  }
  /// Makes an entry the context of a `DataPtr`. Its context was its address or the same entry
  /// before.
  static void set_context(c10::DataPtr& data, Entry& entry, void* p) noexcept {
    c10::Device const device = data.device();
    (void)data.release_context();
    data = c10::DataPtr{p, &entry, &free_enrolled, device};
  }
  /// Sets or clears the storage's address. The caller holds the lock, and a reference to the
  /// storage.
  static void set_address(c10::StorageImpl& storage, Entry& entry, void* p) {
    set_context(storage._mutable_data_ptr_no_checks(), entry, p);
    if (p != nullptr) {
      allow_access(storage);
    } else if constexpr (PassingSite<Site> && has_access_hooks) {
      set_access_hook(storage, &Site::on_access);
    } else {
      // PyTorch itself reads the pointers at a `PassingSite`; a profiler reads them at any site.
      forbid_access(storage, PassingSite<Site> || Site::leases().is_profiled());
    }
  }

  [[nodiscard]] static bool is_granted(Missing const& one) noexcept {
    return one.entry->has_lease() && (one.only_reads || !one.entry->is_read_leased);
  }
  [[nodiscard]] static Access access(Missing const& one) noexcept {
    return one.only_reads ? Access::read : Access::read_write;
  }
  [[nodiscard]] static bool extends_recipe(Missing const& one) noexcept {
    return !one.only_reads && one.extension != nullptr;
  }
  /// If the block is leased for reading, a lease for writing replaces the one on its stream or is
  /// added. The address does not change.
  static void grant(Missing const& one, Lease& lease, stream_type stream) {
    Entry& entry = *one.entry;
    entry.is_read_leased = one.only_reads;
    entry.grants_to_write += one.only_reads ? 0 : 1;
    entry.may_have_recipe = entry.may_have_recipe && one.only_reads;
    if (extends_recipe(one)) {
      one.extension->is_leased = true;
    }
    if (!entry.leases) {
      entry.leases = {std::move(lease), stream};
      set_address(*one.storage, entry, entry.leases.data());
    } else if (entry.leases.is_first(stream)) {
      lease = entry.leases.exchange_first(std::move(lease));
    } else {
      entry.leases.add(std::move(lease), stream);
    }
  }
  [[nodiscard]] static bool is_swappable(Entry const& entry) noexcept {
    return !entry.is_kept && entry.has_lease() && !is_on_captured_stream(entry.leases);
  }
  /// Whether one of the leases is on a stream that is being captured. It must not end during the
  /// capture: others would have to wait for the stream, which is impossible then.
  [[nodiscard]] static bool is_on_captured_stream(decltype(Entry::leases) const& leases) noexcept {
    if constexpr (CapturingSite<Site>) {
      return leases.any_stream([](auto stream) { return Site::is_capturing(stream); });
    } else {
      return false;
    }
  }
  [[nodiscard]] static std::vector<Reference> references(std::span<Entry* const> entries) {
    std::vector<Reference> all;
    all.reserve(entries.size());
    for (Entry* const entry : entries) {
      all.push_back(entry->storage.lock());
    }
    return all;
  }
  [[nodiscard]] static bool
  detach(Entry& entry, c10::StorageImpl& storage, std::vector<Lease>& leases) {
    if (entry_of(storage) != &entry) {
      entry.is_kept = true;  // its pointer was moved to an unknown storage
      return false;
    }
    entry.leases.move_to(leases);
    set_address(storage, entry, nullptr);
    return true;
  }
  [[nodiscard]] static bool
  detach(Entry& entry, Reference const& reference, std::vector<Lease>& leases) {
    return detach(entry, *reference, leases);
  }
  [[nodiscard]] static auto release_interpreter() { return Site::release_interpreter(); }
  /// Called when a thread finds no room. @returns whether there may be room now
  [[nodiscard]] static bool try_make_room() noexcept { return Site::leases().try_end_all_recent(); }
};

/// Gives PyTorch's storages memory of an allocator that may be swapped out: leases it while
/// operations use it, and clears the storages' addresses in between. `FrameHook` calls it around
/// operations.
///
/// A storage gets its memory as a block with a lease (`allocate`). When an operation first has the
/// storage as an operand or a result, the storage is *enrolled*: the context of its `DataPtr`
/// becomes a `StorageEntry`, which owns the lease from then on. Under pressure an entry that no
/// frame has pinned gives up its lease, and the storage's pointer becomes null. The next frame that
/// has the storage among its operands acquires the block again. `OperandLeases` describes when that
/// happens.
///
/// `Site` gives access to the one object of this class in a process. It is static, since PyTorch's
/// deleters are plain functions:
///
/// | expression               | must                                                            |
/// |--------------------------|-----------------------------------------------------------------|
/// | `Site::allocator_type`   | a `DeviceAllocator`                                             |
/// | `Site::leases()`         | this object; lives until the process ends                       |
/// | `Site::frames()`         | the calling thread's `Frames`                                   |
/// | `Site::current_stream()` | the stream that the calling thread's operations are enqueued on |
/// | `Site::device()`         | the PyTorch device of tensors whose memory this is              |
/// | `Site::allocates_for(s)` | whether a storage gets new memory from this object when it grows |
/// | `Site::enrols(bytes)`    | whether an allocation of that size may ever leave               |
/// | `Site::allocate_foreign(n)` | memory for an operation that a recipe runs, beside its result |
/// | `Site::free_foreign(p)`  | free memory that is not this object's                           |
/// | `Site::release_interpreter()` | an object that gives up Python's lock while it lives       |
/// | `Site::on_allocated(bytes, block)` | be told, without throwing                              |
/// | `Site::on_freed(bytes, block)` | be told, without throwing                                  |
/// | `Site::on_out_of_memory(bytes)` | be told of an error before it is thrown                  |
///
/// `CapturingSite`, `JoiningSite`, `PassingSite` and `ReadingSite` say what a site may offer in
/// addition. What recipes need is listed at `OperationRecipe`.
///
/// Threads  thread-safe. The lock only guards bookkeeping. It is not held while the allocator is
///          called, nor while a reference to a storage is taken or dropped, for which the
///          interpreter's lock may be needed.
/// Streams  leases belong to the stream that is current when an operation begins. If an operation
///          runs on another stream than the entry's, a lease on its stream is added: that stream
///          first waits for the uses of the block whose leases have ended, and the next use of the
///          block's range comes after its work. It does not wait for work under a lease that is
///          still held on another stream; as without this class, the program orders that. While a
///          stream is being captured, blocks are
///          swapped in on `Site::uncaptured_stream()`. What a capture has used stays resident until
///          its storage is gone. It is then free after the work of all streams, since the graph may
///          have been launched on any of them.
template <class Site>
class StorageLeases : public framework::OperandLeases<StorageTraits<Site>> {
  using Traits = StorageTraits<Site>;
  using Base = framework::OperandLeases<Traits>;

 public:
  using Allocator = typename Base::Allocator;
  using Lease = typename Base::Lease;
  using Entry = typename Base::Entry;
  using Frames = typename Base::Frame;
  using Pins = typename Base::Pins;
  using Counts = framework::OperationCounts;
  using stream_type = typename Base::stream_type;

  /// `memory` is not owned and must outlive this object; see `OperandLeases`.
  explicit StorageLeases(Allocator& memory) : Base{memory, patience} {
    recent_.previous = recent_.next = &recent_;
  }

  // Memory

  /// Returns memory for a storage. The context is the address, as `raw_deallocate` expects.
  ///
  /// @throws c10::OutOfMemoryError when room cannot be made
  [[nodiscard]] c10::DataPtr allocate(std::size_t bytes) {
    if (RecipeMemory* const recipe = Site::frames().recipe; C10_UNLIKELY(recipe != nullptr)) {
      return allocate_for(*recipe, bytes);
    }
    void* const p = bytes == 0 ? nullptr : allocate_raw(bytes, Site::current_stream());
    return {p, p, deleter(), Site::device()};
  }
  /// As `allocate`, but returns the address alone, which the caller passes to `deleter()`.
  [[nodiscard]] void* allocate_raw(std::size_t bytes, stream_type stream) {
    return allocate_raw(bytes, stream, [] { return false; });
  }
  /// As above, with one more attempt before the failure is reported.
  ///
  /// @param try_borrow  called when there is no room; returns whether it has made some
  template <class TryBorrow>
  [[nodiscard]] void*
  allocate_raw(std::size_t bytes, stream_type stream, TryBorrow const& try_borrow) {
    return allocate_block(bytes, stream, /*is_fixed=*/false, try_borrow);
  }
  /// Returns memory that stays resident at its address until `free_fixed`, whichever storages use
  /// it.
  ///
  /// @throws c10::OutOfMemoryError when room cannot be made
  [[nodiscard]] void* allocate_fixed(std::size_t bytes, stream_type stream) {
    return allocate_block(bytes, stream, /*is_fixed=*/true, [] { return false; });
  }
  void free_fixed(void* p) noexcept { (void)free_raw(p, true); }
  /// The deleter of memory that is not enrolled. It passes addresses of other memory to
  /// `Site::free_foreign`.
  [[nodiscard]] static c10::DeleterFnPtr deleter() noexcept { return &Traits::free_raw; }
  /// Called by that deleter. @returns false if the memory is not this object's
  [[nodiscard]] bool free_raw(void* p) noexcept { return free_raw(p, false); }
  /// Called by the deleter of an enrolled storage.
  void on_storage_gone(Entry& entry) noexcept;

  // Operations

  /// Pins the operands for an operation of the calling thread, and swaps in those that are not
  /// resident.
  ///
  /// @param enrols  whether to enrol storages that are seen for the first time. In a capture they
  ///                always are, since the entry has to record that they stay resident
  /// @throws c10::OutOfMemoryError if the operands do not fit together; c10::Error if the bytes of
  ///         one are lost
  void enter(Frames& frames, Pins& pins, Operands const& operands, bool enrols);
  /// Ends an operation: enrols its results, and unpins its operands. Makes no room.
  void exit(Frames& frames, Pins& pins, std::span<Operand const> results) noexcept;
  /// To be called at the end of an outermost operation of a `ReadingSite`, before `exit`. When room
  /// is scarce, keeps the 32 small operands and results resident that the thread has used last, as
  /// long as they take up at most 1/64 of the capacity together. That ends when any thread finds no
  /// room otherwise. Nothing is kept while results get recipes, since a recipe needs a block that
  /// nobody can write.
  void keep_recent(Frames& frames, std::span<Operand const> results) noexcept;
  /// Ends that for everything that one thread has used.
  void end_recent(Frames& frames) noexcept {
    Pins ended;
    {
      Guard const guard{mutex_};
      ended.swap(frames.recent.entries);
      this->count_loan();
    }
    release_recent(ended);
  }
  /// Ends that for all threads. @returns whether anything was kept
  [[nodiscard]] bool try_end_all_recent() noexcept;
  /// To be called when a thread of a `ReadingSite` ends: ends its holds, and what it keeps.
  void end_thread(Frames& frames) noexcept {
    end_all_holds(frames);
    end_recent(frames);
    Guard const guard{mutex_};
    if (frames.recent.next != nullptr) {
      this->leave_ring(frames.recent);
      frames.recent.previous = frames.recent.next = nullptr;
    }
  }
  /// Ends an outermost operation that found room in pieces only, swaps out everything that no other
  /// operation uses, and begins the operation again. Its operands are then side by side, so that
  /// the free memory is in as few pieces as possible. If the operation had pinned what another
  /// program waits for, it first waits until that program has had it.
  ///
  /// @throws as `enter`
  void regroup(Frames& frames, Operands const& operands) {
    frames.split_bytes = 0;
    {
      Guard const guard{mutex_};
      ++this->counts_.regroups;
    }
    exit(frames, frames.pins, {});
    (void)this->reclaim();
    if (std::size_t const claimed = std::exchange(frames.claimed_bytes, 0); claimed != 0) {
      frames.claim_hold = this->hold_claim();
      (void)this->claim(claimed, /*gives_way=*/false);
    }
    enter(frames, frames.pins, operands, /*enrols=*/true);
  }
  /// Reports an allocation that failed since the free memory was in pieces, if there was one after
  /// which the operation was not begun again.
  void report_split(Frames& frames) noexcept {
    if (std::size_t const bytes = std::exchange(frames.split_bytes, 0); bytes != 0) {
      try {
        report_out_of_memory(bytes);
      } catch (...) {  // NOLINT(bugprone-empty-catch): an observer's failure is its own
      }
    }
  }
  /// Pins operands once more, for work that uses them after the operation has ended (a *loan*). Any
  /// thread may end the loan with `end_loan`.
  void lend(Pins& pins, Operands const& operands) {
    pins.reserve(pins.size() + operands.size());
    Guard const guard{mutex_};
    for (Operand const& operand : operands) {
      if (Entry* const entry = Traits::entry_of(*operand.storage)) {
        pins.push_back(entry);
        entry->is_shared = true;
        ++entry->pins;
        ++entry->loans;
      }
    }
  }
  void end_loan(Frames& frames, Pins& pins) noexcept {
    {
      Guard const guard{mutex_};
      for (Entry* const entry : pins) {
        --entry->loans;
      }
    }
    exit(frames, pins, {});
  }
  /// To be called for a loan that ends by itself, so that threads without room wait for its end.
  void begin_waiting_for_loan() noexcept {
    Guard const guard{mutex_};
    this->count_loan();
  }
  /// To be called after `end_loan`.
  void end_waiting_for_loan() noexcept {
    Guard const guard{mutex_};
    this->uncount_loan();
  }
  /// Begins a hold of the calling thread; see `FrameHook::Hold`.
  void begin_hold(Frames& frames) noexcept {
    ++frames.depth;
    ++frames.held;
    Guard const guard{mutex_};
    this->end_bound(frames);
  }
  /// Ends those holds of this thread that other threads have asked to end.
  C10_NOINLINE void end_holds(Frames& frames) noexcept {
    if (frames.held != 0 && frames.ended_elsewhere->load(std::memory_order_relaxed) != 0) {
      end_holds(frames, frames.ended_elsewhere->exchange(0));
    }
  }
  /// Ends `count` holds of the calling thread. The last frame or hold to end unpins everything that
  /// they had pinned.
  void end_holds(Frames& frames, int count) noexcept {
    frames.held -= count;
    frames.depth -= count;
    if (frames.held == 0) {
      frames.held_by_kernels = 0;  // other threads do not tell which kind of hold they have ended
    }
    if (frames.depth == 0) {
      exit(frames, frames.pins, {});
    }
  }
  /// Ends all holds of a thread that is about to end. The objects that would have ended them do
  /// nothing later.
  void end_all_holds(Frames& frames) noexcept {
    if (frames.held != 0) {
      end_holds(frames, frames.held);
    }
    frames.ended_elsewhere.reset();
  }
  /// Returns the storages that were pinned after the list had `first` entries.
  [[nodiscard]] std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>
  pinned_since(Pins const& pins, std::size_t first) {
    Guard const guard{mutex_};
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
    for (Entry const* const entry : std::span{pins}.subspan(std::min(first, pins.size()))) {
      if (!entry->is_dead) {
        storages.push_back(entry->storage);
      }
    }
    return storages;
  }
  /// Keeps everything that is pinned resident for good.
  void keep(Pins const& pins) noexcept {
    Guard const guard{mutex_};
    for (Entry* const entry : pins) {
      entry->is_kept = true;
    }
  }
  /// Keeps everything resident for good that this thread has pinned. To be called before a capture
  /// begins, since the graph may contain addresses that the thread has got before.
  void keep_for_capture(Frames const& frames) noexcept {
    Guard const guard{mutex_};
    auto const keep_all = [](Pins const& pins) {
      for (Entry* const entry : pins) {
        entry->is_kept = entry->is_captured = true;
      }
    };
    keep_all(frames.pins);
    for (Pins const* const pins : frames.further_pins) {
      keep_all(*pins);
    }
  }
  /// To be called when code of the program begins to run inside of an operation, whose operands
  /// stay pinned. Other threads wait for the operation as they do for a hold, since that code may
  /// be waiting for them.
  void begin_program(Frames& frames) noexcept {
    Guard const guard{mutex_};
    this->end_bound(frames);
  }
  /// To be called when that code has returned.
  void end_program(Frames& frames) noexcept {
    Guard const guard{mutex_};
    this->bound_again(frames);
  }

  /// Whether the calling thread has pinned a storage for a frame or a hold that is open.
  [[nodiscard]] bool has_pinned(Frames const& frames, c10::StorageImpl& storage) const {
    Guard const guard{mutex_};
    Entry const* const entry = Traits::entry_of(storage);
    auto const has = [entry](Pins const& pins) {
      return std::find(pins.begin(), pins.end(), entry) != pins.end();
    };
    return entry != nullptr &&
           (has(frames.pins) || std::any_of(frames.further_pins.begin(),
                                            frames.further_pins.end(),
                                            [&](auto* pins) { return has(*pins); }));
  }
  /// Replaces the memory of a storage by other memory. Waits for other threads and communications
  /// that use the storage, as long as threads wait for memory. Threads that begin to use it
  /// meanwhile wait for the new memory, so that no write is lost.
  ///
  /// Exception: a storage that the site does not enrol is enrolled only now. An operation that
  /// another thread has begun may use its old memory without a pin.
  ///
  /// @param memory  becomes the storage's memory; holds the old one afterwards, which the caller
  ///                destroys when no thread can use it any more
  /// @param copy    copies the bytes from the address that it is given, after the work of all
  ///                streams, and waits for the end; called without the lock
  /// @returns false, with nothing changed, if the storage is in use by then, or has to keep its
  ///          address
  /// @pre     the calling thread has pinned the storage in one frame, in which nothing else uses
  ///          it, and does not hold the interpreter's lock
  template <class Copy>
  [[nodiscard]] bool
  try_exchange(Frames& frames, c10::StorageImpl& storage, c10::DataPtr& memory, Copy const& copy);

  /// Sets whether operations only read this storage, so that its copy on the host stays valid and
  /// it is swapped out without another copy. That ends when an operation declares that it writes
  /// the storage, and when the program asks for an address to write to. The caller must not use
  /// operations that write without declaring it.
  void freeze(c10::StorageImpl& storage, bool is_frozen);
  /// Sets the codec of a storage, for as long as it keeps its memory. Memory of a private pool is
  /// never swapped out, so it has no codec.
  void set_codec(c10::StorageImpl& storage, framework::CodecChoice choice) {
    if (StorageView const seen = view(storage); seen.block != BlockId{}) {
      framework::set_codec(*memory_, seen.block, seen.bytes, choice);
    }
  }
  /// Records that another stream uses the memory behind a `DataPtr`: when it is freed or swapped
  /// out, the work that is enqueued on that stream by then comes first. Memory of other allocators
  /// is left alone.
  ///
  /// @stream `stream` runs after the uses of this memory whose leases have ended, and not after
  ///         those under a lease that is still held
  void record_stream(c10::DataPtr const& data, stream_type stream);
  void record_stream(Pins const& pins, stream_type stream) {
    for (Entry* const entry : pins) {
      record_stream(*entry, stream);
    }
  }

  /// Sets whether PyTorch's profiler records operands now. The profiler asks for the addresses of
  /// storages, to read them, before an operation has swapped them in. Where that is an error
  /// otherwise, it now gets null.
  ///
  /// @throws std::bad_alloc
  void set_profiled(bool is_profiled);
  [[nodiscard]] bool is_profiled() const noexcept { return is_profiled_; }

  /// For a test that must fail: ends frames at every depth, which is wrong.
  void end_frames_early(bool early) noexcept { ends_frames_early_ = early; }
  [[nodiscard]] bool ends_frames_early() const noexcept { return ends_frames_early_; }

  // Recipes

  /// Whether the current stream is being captured, so that operations are recorded and do not run
  /// now.
  [[nodiscard]] static bool is_captured() {
    if constexpr (CapturingSite<Site>) {
      return Site::is_capturing();
    } else {
      return false;
    }
  }
  /// Sets whether, under pressure, operands that are only read are leased for reading, so that
  /// their recipes stay valid.
  void set_recompute(bool is_on) noexcept { recomputes_ = is_on; }
  [[nodiscard]] bool recomputes() const noexcept { return recomputes_; }
  /// Whether to give recipes to results that are made now: under pressure, if recomputing is on.
  [[nodiscard]] bool gives_recipes() const noexcept {
    return this->is_under_pressure_.load(std::memory_order_relaxed) &&
           recomputes_.load(std::memory_order_relaxed) && memory_->wants_recipes();
  }
  /// Whether a request for memory has failed since the start of the program.
  [[nodiscard]] bool has_refused() const noexcept {
    return has_refused_.load(std::memory_order_relaxed);
  }
  /// The mutex of the recipes that run: each holds it shared, or exclusively if it has changed
  /// settings of the process.
  [[nodiscard]] std::shared_mutex& running_recipes() noexcept { return running_recipes_; }
  /// To be called when an operation has run, and its frame has not ended. Sets
  /// `RecipeOperand::grants_to_write`.
  ///
  /// @returns false if an operand may have been written while the operation ran: it is leased for
  ///          writing, so that other threads have been able to write it
  [[nodiscard]] bool note_unwritten(std::span<RecipeOperand> operands) const {
    Guard const guard{mutex_};
    return std::all_of(operands.begin(), operands.end(), [](RecipeOperand& operand) {
      Entry const* const entry = Traits::entry_of(*operand.storage);
      operand.grants_to_write = entry == nullptr ? 0 : entry->grants_to_write;
      return is_unchangeable(entry);
    });
  }
  /// Sets the recipe of a result. Does nothing if the result or an operand may have been written
  /// since the operation, or can be written without being acquired.
  ///
  /// @param operands  after `note_unwritten`
  /// @param make      as for `DeviceAllocator::set_recipe`
  /// @pre         the frame of the operation has ended, and the caller keeps the storages alive
  /// @throws      std::bad_alloc; ContractViolation, for example if an operand has been freed on
  ///              the device. The result has no recipe then
  template <class Make>
  void try_give_recipe(c10::StorageImpl& result,
                       std::span<RecipeOperand const> operands,
                       std::chrono::nanoseconds cost,
                       Make make);

  // As the base.

  void before_fork() {
    for (;;) {
      Base::before_fork();
      Site::operation_times().lock();
      if constexpr (LockingSite<Site>) {
        if (!Site::try_lock_for_fork()) {
          // The thread that holds such a lock may wait for one of those above.
          Site::operation_times().unlock();
          Base::after_fork_in_parent();
          std::this_thread::yield();
          continue;
        }
      }
      return;
    }
  }
  void after_fork_in_parent() noexcept {
    unlock_site();
    Base::after_fork_in_parent();
  }
  void after_fork_in_child(Frames const* frames) {
    unlock_site();
    forget_pins_of_others(*frames);
    Base::after_fork_in_child(frames);
  }

  // Cheap queries that do not take the lock.

  /// Whether a storage's memory comes from this object.
  [[nodiscard]] static bool is_ours(c10::StorageImpl& storage) noexcept {
    auto const deleter = storage._mutable_data_ptr_no_checks().get_deleter();
    return deleter == &Traits::free_enrolled || deleter == &Traits::free_raw;
  }
  /// Whether a storage's memory comes from this object, and no operation has been seen to use it.
  [[nodiscard]] static bool is_unseen(c10::StorageImpl& storage) noexcept {
    return storage._mutable_data_ptr_no_checks().get_deleter() == &Traits::free_raw;
  }
  /// Whether a nested operation has to pin an operand. It must if the operand is enrolled, and the
  /// thread has not pinned it already for this kind of use on the current stream. In a capture it
  /// pins all operands, to mark them as captured, since the frame that has pinned them may have
  /// begun before the capture.
  [[nodiscard]] static bool
  needs_pin(Frames const& frames, c10::StorageImpl& storage, OperandUse use) {
    Entry const* const entry = Traits::entry_without_lock(storage);
    return is_captured() ||
           (entry != nullptr &&
            (use.keeps() || use.writes() || (entry->is_read_leased && !use.only_reads()) ||
             entry->pinner.load(std::memory_order_relaxed) != &frames.pins ||
             !entry->leases.is_first(Site::current_stream())));
  }

  // Reports

  [[nodiscard]] StorageView view(c10::StorageImpl& storage) const {
    Guard const guard{mutex_};
    if (Entry const* const entry = Traits::entry_of(storage)) {
      return view_of(*entry);
    }
    Entry const* const raw = table_.find(storage._mutable_data_ptr_no_checks().get_context());
    return raw == nullptr ? StorageView{} : view_of_raw(*raw);
  }
  /// The size of an allocation that no operation has been seen to use; 0 if there is none at `p`.
  [[nodiscard]] std::size_t raw_bytes(void* p) const {
    Guard const guard{mutex_};
    Entry const* const raw = table_.find(p);
    return raw == nullptr ? 0 : raw->bytes;
  }
  /// All storages and allocations, largest first.
  [[nodiscard]] std::vector<StorageView> views() const;
  [[nodiscard]] Counts counts() const {
    Guard const guard{mutex_};
    return this->counts_;
  }
  /// As the base, and including memory that no operation has been seen to use.
  [[nodiscard]] Tally unreclaimable() const {
    Tally stay = Base::unreclaimable();
    Guard const guard{mutex_};
    table_.for_each([&](Entry const& raw) { stay.add(memory_->rounded_bytes(raw.bytes)); });
    return stay;
  }
  /// Returns the reason why no tensor can be swapped out, if there is one. Returns it only once.
  [[nodiscard]] std::string take_warning() {
    std::string const why = has_warned_ ? std::string{} : why_nothing_can_leave(views());
    return why.empty() || has_warned_.exchange(true) ? std::string{} : why;
  }

 private:
  using Guard = typename Base::Guard;
  using Missing = typename Base::Missing;
  using EntryLeases = decltype(Entry::leases);

  /// How long a thread waits for others while it cannot be told that they will end.
  static constexpr std::chrono::milliseconds patience = std::chrono::seconds{10};

  using Base::memory_;
  using Base::mutex_;

  /// The stream on which operands are swapped in. In a capture it is one that is not captured, so
  /// that the swap-in is not a part of the graph.
  [[nodiscard]] static stream_type arrival_stream() {
    if constexpr (CapturingSite<Site>) {
      return is_captured() ? Site::uncaptured_stream() : Site::current_stream();
    } else {
      return Site::current_stream();
    }
  }
  [[nodiscard]] static StorageView view_of(Entry const& entry) {
    return {.block = entry.block,
            .bytes = entry.bytes,
            .is_enrolled = true,
            .is_leased = entry.has_lease(),
            .is_in_use = entry.pins != 0,
            .is_kept = entry.is_kept,
            .is_lent = entry.loans != 0,
            .is_frozen = entry.is_frozen,
            .description = entry.description};
  }
  [[nodiscard]] static StorageView view_of_raw(Entry const& raw) {
    return {.block = raw.block,
            .bytes = raw.bytes,
            .is_leased = true,
            .is_in_use = true,
            .is_kept = raw.is_kept};
  }

  static void unlock_site() noexcept {
    if constexpr (LockingSite<Site>) {
      Site::unlock_after_fork();
    }
    Site::operation_times().unlock();
  }

  // The caller of the following functions up to `end_frame` holds the lock.

  static void pin(Pins& pins, Entry& entry) {
    if (entry.pinner.load(std::memory_order_relaxed) == &pins) {
      return;
    }
    pins.push_back(&entry);
    entry.is_shared = entry.pins++ != 0;
    entry.pinner.store(&pins, std::memory_order_relaxed);
  }
  /// @returns whether the entry has no pins any more
  [[nodiscard]] static bool unpin(Pins const& pins, Entry& entry) noexcept {
    if (entry.pinner.load(std::memory_order_relaxed) == &pins) {
      entry.pinner.store(nullptr, std::memory_order_relaxed);
    }
    return --entry.pins == 0;
  }
  /// For a forked child: removes all pins except those of the calling thread, and loans, whose ends
  /// do not depend on a thread. Clears `pinner`, too, since the list of a thread that begins later
  /// may get the address of another one's.
  void forget_pins_of_others(Frames const& frames) noexcept {
    this->for_each_entry([](Entry& entry) {
      entry.pins = entry.loans;
      entry.pinner.store(nullptr, std::memory_order_relaxed);
    });
    auto const count_pins = [](Pins const& pins) {
      for (Entry* const entry : pins) {
        entry->pins += entry->is_dead ? 0 : 1;
      }
    };
    count_pins(frames.pins);
    forget_recent_of_others(frames);
    count_pins(frames.recent.entries);
    for (Pins const* const pins : frames.further_pins) {
      count_pins(*pins);
    }
  }
  /// The caller has counted a loan under the same lock under which it took these entries out of
  /// their list, so that threads without room wait until their memory is released.
  void release_recent(Pins& recent) noexcept {
    if (!recent.empty()) {
      this->release_pins(
          recent,
          [](std::vector<Lease>&) {},
          [](Entry& entry) { return --entry.pins == 0; },
          [] {});
    }
    end_waiting_for_loan();
  }
  void forget_recent_of_others(Frames const& frames) noexcept {
    RecentUses<Entry>* own = nullptr;
    for (auto* one = recent_.next; one != &recent_; one = one->next) {
      own = one == &frames.recent ? one : own;
    }
    recent_.previous = recent_.next = &recent_;
    if (own != nullptr) {
      this->join_ring(recent_, *own);
    }
  }
  [[nodiscard]] Entry* try_enrol(Operand const& operand, bool has_any_size = false) noexcept;
  /// Enrols a result. @returns its entry if the storage was enrolled just now, else null
  Entry* enrol_result(Operand const& result) noexcept {
    Entry* entry = Traits::entry_of(*result.storage);
    Entry* const seen = entry;
    if (entry == nullptr) {
      entry = try_enrol(result, result.use.keeps());
    }
    if (entry != nullptr && result.use.keeps()) {
      entry->is_kept = true;
    }
    return seen == nullptr ? entry : nullptr;
  }
  /// Counts a frame that has ended. To be called after its pins have been released.
  void end_frame(Frames& frames, bool had_operands) noexcept {
    this->counts_.frames += had_operands ? 1 : 0;
    if (!frames.is_inside()) {
      frames.has_read_leases = false;
      this->uncount(frames);
    }
  }

  template <class TryBorrow>
  [[nodiscard]] void*
  allocate_block(std::size_t bytes, stream_type stream, bool is_fixed, TryBorrow const& try_borrow);
  [[nodiscard]] static c10::DataPtr allocate_for(RecipeMemory& recipe, std::size_t bytes);
  [[nodiscard]] bool free_raw(void* p, bool is_fixed) noexcept;
  /// If PyTorch's profiler records memory, reports an allocation or, if `bytes` is negative, a
  /// free.
  void report_to_profiler(void* p, std::int64_t bytes) const noexcept {
    if (C10_UNLIKELY(c10::memoryProfilingEnabled())) {
      Stats const now = memory_->stats();
      c10::reportMemoryUsageToProfiler(
          p, bytes, now.allocated.bytes.current, now.reserved_bytes, Site::device());
    }
  }
  /// Adds to `ThreadFrames::waited_ns` how long it lives, if operations are being measured.
  class WaitingTime {
   public:
    WaitingTime(StorageLeases const& leases, Frames& frames) : frames_{frames} {
      if (leases.gives_recipes()) {
        start_ = Clock::now();
      }
    }
    WaitingTime(WaitingTime const&) = delete;
    WaitingTime& operator=(WaitingTime const&) = delete;
    ~WaitingTime() {
      if (start_ != Clock::time_point{}) {
        frames_.waited_ns += static_cast<std::uint64_t>((Clock::now() - start_).count());
      }
    }

   private:
    using Clock = std::chrono::steady_clock;
    Frames& frames_;
    typename Clock::time_point start_{};
  };

  /// Whether a storage cannot be written without being acquired first. The caller holds the lock.
  [[nodiscard]] static bool is_unchangeable(Entry const* entry) noexcept {
    return entry != nullptr && !entry->is_kept && (!entry->leases || entry->is_read_leased);
  }
  /// Returns the blocks of the operands; nothing if one of them may have been written since the
  /// operation, may be written without being acquired, or is `made`. The caller holds the lock.
  [[nodiscard]] static std::optional<std::vector<BlockId>>
  operand_blocks(std::span<RecipeOperand const> operands, Entry const* made) {
    std::vector<BlockId> blocks;
    blocks.reserve(operands.size());
    for (RecipeOperand const& operand : operands) {
      Entry const* const entry = Traits::entry_of(*operand.storage);
      if (!is_unchangeable(entry) || entry->grants_to_write != operand.grants_to_write ||
          entry == made) {
        return std::nullopt;
      }
      blocks.push_back(entry->block);
    }
    return blocks;
  }
  void extend_recipe(RecipeExtension& extension,
                     std::span<BlockId const> operands,
                     BlockId changed,
                     std::span<Lease const> leases) noexcept;
  void enter_slowly(Frames& frames, Operands const& operands, stream_type stream, bool captured);
  void exit_under_pressure(Frames& frames, Pins& pins, std::span<Operand const> results) noexcept;
  void give_back(BlockId block, EntryLeases leases, bool is_captured);
  void add_stream(Entry& entry, stream_type stream);
  void record_stream(Entry& entry, stream_type stream);
  void record_stream_of_raw(void* p, stream_type stream);
  void report_out_of_memory(std::size_t bytes);
  [[noreturn]] void
  throw_out_of_memory(Frames& frames, std::size_t bytes, framework::Refusal const& refusal);

  StorageTable<Entry> table_;
  std::atomic<bool> recomputes_{false};
  std::atomic<bool> is_profiled_{false};
  RecentUses<Entry> recent_;  // the head of the ring of all threads' lists
  std::shared_mutex running_recipes_;
  std::atomic<bool> ends_frames_early_{false};
  std::atomic<bool> has_warned_{false};
  std::atomic<bool> has_refused_{false};
};

template <class Site>
template <class TryBorrow>
void* StorageLeases<Site>::allocate_block(std::size_t bytes,
                                          stream_type stream,
                                          bool is_fixed,
                                          TryBorrow const& try_borrow) {
  Frames& frames = Site::frames();
  WaitingTime const waiting{*this, frames};
  void* p = nullptr;
  framework::Refusal refusal;
  auto const try_allocate = [&] {
    return this->try_allocate_block(
        bytes, stream, &frames, refusal, [&](BlockId block, Lease& lease) {
          p = lease.data();
          {
            Guard const guard{mutex_};
            Entry& entry = table_.add(p);
            this->count_bytes(static_cast<std::ptrdiff_t>(bytes));
            entry.block = block;
            entry.bytes = bytes;
            entry.leases = {std::move(lease), stream};
            entry.is_read_leased = false;
            entry.is_kept = frames.keeps_new;
            entry.is_fixed = is_fixed;
            if (frames.is_inside()) {
              this->count(frames);
            }
          }
          Site::on_allocated(bytes, block);
          report_to_profiler(p, static_cast<std::int64_t>(bytes));
        });
  };
  if (!try_allocate() && !(try_borrow() && try_allocate())) {
    throw_out_of_memory(frames, bytes, refusal);
  }
  if (C10_UNLIKELY(frames.after_allocation != nullptr)) {
    (*std::exchange(frames.after_allocation, nullptr))();
  }
  return p;
}

template <class Site>
bool StorageLeases<Site>::free_raw(void* p, bool is_fixed) noexcept {
  EntryLeases leases;
  BlockId block{};
  std::size_t bytes = 0;
  std::unique_ptr<Entry> entry;
  {
    Guard const guard{mutex_};
    entry = table_.remove(p, [&](Entry const& raw) { return raw.is_fixed == is_fixed; });
    if (entry == nullptr) {
      return false;
    }
    block = entry->block;
    bytes = entry->bytes;
    this->count_bytes(-static_cast<std::ptrdiff_t>(bytes));
    leases = std::move(entry->leases);
    if (table_.try_recycle(*entry)) {
      (void)entry.release();
    }
  }
  report_to_profiler(leases ? leases.data() : nullptr, -static_cast<std::int64_t>(bytes));
  give_back(block, std::move(leases), /*is_captured=*/false);
  Site::on_freed(bytes, block);
  this->notify_waiters();
  return true;
}

template <class Site>
void StorageLeases<Site>::on_storage_gone(Entry& entry) noexcept {
  EntryLeases leases;
  decltype(Entry::storage) storage{c10::intrusive_ptr<c10::StorageImpl>{}};
  bool is_last = false;
  bool is_captured = false;
  BlockId const block = entry.block;
  std::size_t const bytes = entry.bytes;
  {
    Guard const guard{mutex_};
    this->unlink(entry);
    this->count_bytes(-static_cast<std::ptrdiff_t>(bytes));
    entry.is_dead = true;
    is_captured = entry.is_captured;
    leases = std::move(entry.leases);
    if (entry.pins == 0) {
      // its reference count drops later, without the lock
      storage = std::exchange(entry.storage, storage);
      is_last = !table_.try_recycle(entry);
    }
  }
  report_to_profiler(leases ? leases.data() : nullptr, -static_cast<std::int64_t>(bytes));
  give_back(block, std::move(leases), is_captured);
  Site::on_freed(bytes, block);
  if (is_last) {
    delete &entry;
  }
  this->notify_waiters();
}

/// Returns the memory of the result for the first request of its size. PyTorch's kernels allocate a
/// result before anything else. If one does not, the bytes are copied to the result afterwards.
template <class Site>
c10::DataPtr StorageLeases<Site>::allocate_for(RecipeMemory& recipe, std::size_t bytes) {
  if (bytes == recipe.result_bytes && !std::exchange(recipe.is_result_taken, true)) {
    return {recipe.result, recipe.result, [](void*) {}, Site::device()};
  }
  return Site::allocate_foreign(bytes);
}

template <class Site>
template <class Make>
void StorageLeases<Site>::try_give_recipe(c10::StorageImpl& result,
                                          std::span<RecipeOperand const> operands,
                                          std::chrono::nanoseconds cost,
                                          Make make) {
  std::optional<std::vector<BlockId>> blocks;
  BlockId block{};
  {
    Guard const guard{mutex_};
    Entry* const made = Traits::entry_of(result);
    if (!is_unchangeable(made)) {
      return;
    }
    blocks = operand_blocks(operands, made);
    if (!blocks) {
      return;
    }
    made->may_have_recipe = true;
    block = made->block;
  }
  memory_->set_recipe(block, *blocks, cost, std::move(make));
}

/// Extends a block's recipe by an operation in place, under one of the leases.
template <class Site>
void StorageLeases<Site>::extend_recipe(RecipeExtension& extension,
                                        std::span<BlockId const> operands,
                                        BlockId changed,
                                        std::span<Lease const> leases) noexcept {
  try {
    auto const make = [make = std::move(extension.make)](
                          stream_type stream, std::span<void const* const> addresses, void* bytes) {
      make(&stream, addresses, bytes);
    };
    for (Lease const& lease : leases) {
      if (!lease.empty() && lease.block() == changed && lease.access() != Access::read &&
          memory_->extend_recipe(lease, operands, extension.cost, make)) {
        return;
      }
    }
  } catch (std::exception const&) {  // NOLINT(bugprone-empty-catch): then it has no recipe
  }
}

/// Frees a block. If captured graphs use it, it is free after all launches of these graphs so far.
/// If one of its leases is on a stream that is being captured, it is freed after the capture.
template <class Site>
void StorageLeases<Site>::give_back(BlockId block, EntryLeases leases, bool is_captured) {
  if (!is_captured && !Traits::is_on_captured_stream(leases)) {
    leases.release();
    memory_->abandon(block);
    return;
  }
  if constexpr (CapturingSite<Site>) {
    auto const shared = std::make_shared<EntryLeases>(std::move(leases));
    Site::give_back_after_launches([this, block, shared] {
      TORCH_CHECK(!Traits::is_on_captured_stream(*shared), "a capture is under way");
      if (stream_type const stream = Site::uncaptured_stream(); !shared->covers(stream)) {
        shared->add(memory_->acquire(block, Access::read, stream), stream);
      }
      shared->release();
      memory_->abandon(block);
    });
  }
}

/// Enrols a storage whose memory comes from this object and is used by no other storage. The caller
/// holds the lock.
///
/// @param has_any_size  whether it is also enrolled if the site enrols no memory of its size: when
///                      the entry has to record that its address is known
/// @returns null if the storage is not of this kind
template <class Site>
auto StorageLeases<Site>::try_enrol(Operand const& operand, bool has_any_size) noexcept -> Entry* {
  c10::StorageImpl& storage = *operand.storage;
  c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  void* const p = data.get();
  if (data.get_deleter() != &Traits::free_raw || p == nullptr || p != data.get_context() ||
      !Site::allocates_for(storage)) {
    return nullptr;
  }
  Entry* const entry =
      table_
          .remove(p,
                  [&](Entry const& raw) {
                    return !raw.is_fixed && (has_any_size || Site::enrols(raw.bytes));
                  })
          .release();
  if (entry != nullptr) {
    entry->storage = Traits::weak_reference(storage);
    if (operand.tensor != nullptr) {
      entry->description.describe(*operand.tensor);
    }
    Traits::set_context(data, *entry, p);
    this->link(*entry);
  }
  return entry;
}

template <class Site>
void StorageLeases<Site>::enter(Frames& frames, Pins& pins, Operands const& operands, bool enrols) {
  stream_type const stream = Site::current_stream();
  bool const captured = is_captured();
  bool is_usual = !captured;
  {
    Guard const guard{mutex_};
    this->count(frames);
    for (Operand const& operand : operands) {
      Entry* entry = Traits::entry_of(*operand.storage);
      if (entry == nullptr && (enrols || captured)) {
        entry = try_enrol(operand, operand.use.keeps() || captured);
      }
      if (entry != nullptr) {
        pin(pins, *entry);
        is_usual = is_usual && entry->leases.is_first(stream) && entry->leases &&
                   !entry->is_frozen && !entry->is_read_leased && !operand.use.keeps();
      }
    }
  }
  if (!is_usual) {
    enter_slowly(frames, operands, stream, captured);
  }
}

/// The slow path of `enter`, after all operands have been pinned. It keeps those whose addresses
/// will be used later, adds leases on other streams, swaps in operands that are not resident, and
/// acquires those for writing that are leased for reading and may be written.
template <class Site>
void StorageLeases<Site>::enter_slowly(Frames& frames,
                                       Operands const& operands,
                                       stream_type stream,
                                       bool captured) {
  WaitingTime const waiting{*this, frames};
  c10::SmallVector<Missing, 8> missing;
  c10::SmallVector<Entry*, 2> elsewhere;  // entries that are leased on other streams only
  bool const may_only_read = gives_recipes();
  {
    Guard const guard{mutex_};
    for (Operand const& operand : operands) {
      Entry* const entry = Traits::entry_of(*operand.storage);
      if (entry == nullptr) {
        continue;
      }
      entry->is_captured = entry->is_captured || captured;
      entry->is_kept = entry->is_kept || operand.use.keeps() || captured;
      entry->is_frozen = entry->is_frozen && !operand.use.writes();
      bool const only_reads =
          entry->is_frozen || (may_only_read && operand.use.only_reads() && !entry->is_kept);
      bool const is_changed = operand.use.writes() && frames.extension != nullptr &&
                              frames.extension->changed == operand.storage &&
                              entry->may_have_recipe;
      auto* const same =
          std::find_if(missing.begin(), missing.end(), [&](auto& m) { return m.entry == entry; });
      frames.has_read_leases =
          frames.has_read_leases || (!entry->is_frozen && (only_reads || entry->is_read_leased));
      if (same != missing.end()) {
        same->only_reads = same->only_reads && only_reads;
        same->extension = is_changed ? frames.extension : same->extension;
      } else if (Missing const one{
                     entry, operand.storage, only_reads, is_changed ? frames.extension : nullptr};
                 !Traits::is_granted(one)) {
        missing.push_back(one);
      } else if (!captured && !entry->leases.covers(stream)) {
        elsewhere.push_back(entry);
      }
    }
  }
  for (Entry* const entry : elsewhere) {
    add_stream(*entry, stream);
  }
  framework::Refusal refusal;
  if (!missing.empty() &&
      !this->acquire_missing(frames, std::span{missing}, arrival_stream(), refusal)) {
    std::size_t bytes = 0;
    {
      Guard const guard{mutex_};
      for (Missing const& one : missing) {
        bytes += one.entry->leases ? 0 : one.entry->bytes;
      }
    }
    throw_out_of_memory(frames, bytes, refusal);
  }
}

/// Adds a lease on another stream. The entry is pinned and has a lease, so its address cannot
/// change.
template <class Site>
void StorageLeases<Site>::add_stream(Entry& entry, stream_type stream) {
  Access const access = entry.is_read_leased ? Access::read : Access::read_write;
  Lease lease = memory_->acquire(entry.block, access, stream);
  Guard const guard{mutex_};
  if (!entry.leases.covers(stream)) {
    entry.leases.add(std::move(lease), stream);
  }
}

template <class Site>
void StorageLeases<Site>::record_stream(c10::DataPtr const& data, stream_type stream) {
  c10::DeleterFnPtr data_deleter = nullptr;
  void* data_context = nullptr;
  {
    Guard const guard{mutex_};  // another thread may be changing the storage's `DataPtr`
    data_deleter = data.get_deleter();
    data_context = data.get_context();
  }
  if (data_deleter == &Traits::free_enrolled) {
    record_stream(*static_cast<Entry*>(data_context), stream);
  } else if (data_deleter == &Traits::free_raw) {
    record_stream_of_raw(data_context, stream);
  }
}

template <class Site>
void StorageLeases<Site>::record_stream(Entry& entry, stream_type stream) {
  {
    Guard const guard{mutex_};
    if (!entry.leases || entry.leases.covers(stream)) {
      // if it was swapped out and in again, that was ordered after all streams that had used it
      return;
    }
    ++entry.pins;
  }
  auto const unpin_entry = [&] {
    Guard const guard{mutex_};
    --entry.pins;
  };
  try {
    add_stream(entry, stream);
  } catch (...) {
    unpin_entry();
    throw;
  }
  unpin_entry();
}

template <class Site>
void StorageLeases<Site>::record_stream_of_raw(void* p, stream_type stream) {
  BlockId block{};
  {
    Guard const guard{mutex_};
    Entry const* const raw = table_.find(p);
    if (raw == nullptr || raw->leases.covers(stream)) {
      return;
    }
    block = raw->block;
  }
  Lease lease = memory_->acquire(block, Access::read_write, stream);
  Guard const guard{mutex_};
  if (Entry* const raw = table_.find(p)) {
    raw->leases.add(std::move(lease), stream);
  }
}

template <class Site>
template <class Copy>
bool StorageLeases<Site>::try_exchange(Frames& frames,
                                       c10::StorageImpl& storage,
                                       c10::DataPtr& memory,
                                       Copy const& copy) {
  using Clock = std::chrono::steady_clock;
  auto const gives_up = Clock::now() + patience;
  c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  Guard guard{mutex_};
  Entry* entry = Traits::entry_of(storage);
  if (entry == nullptr && (entry = try_enrol({&storage}, /*has_any_size=*/true)) != nullptr) {
    pin(frames.pins, *entry);
  }
  if (entry == nullptr) {
    return false;
  }
  this->end_bound(frames);
  auto const is_alone = [entry] { return entry->pins == 1; };
  if (!is_alone()) {
    ++this->counts_.waits;
    (void)this->wait_until(guard, [&] { return is_alone() || Clock::now() >= gives_up; });
  }
  if (!is_alone() || entry->is_kept || !entry->has_lease() || Traits::entry_of(storage) != entry) {
    return false;
  }
  // As if another thread were swapping it in: a thread that begins to use it waits until it is
  // there. Its address stays set, for operations that use it without a pin.
  EntryLeases leases = std::move(entry->leases);
  entry->is_arriving = true;
  auto const end_arrival = [&] {
    guard.lock();
    entry->leases = std::move(leases);
    entry->is_arriving = false;
  };
  guard.unlock();
  try {
    copy(leases.data());
  } catch (...) {
    end_arrival();
    guard.unlock();
    this->note_arrival();
    throw;
  }
  end_arrival();
  entry->is_kept = true;  // from now on it is not the entry of its storage
  c10::DataPtr old{entry->leases.data(), data.release_context(), data.get_deleter(), data.device()};
  // A thread that reads both without the lock must not see the old deleter with the new context.
  (void)data.compare_exchange_deleter(&Traits::free_enrolled, memory.get_deleter());
  std::atomic_thread_fence(std::memory_order_release);
  data = std::exchange(memory, std::move(old));
  allow_access(storage);
  guard.unlock();
  this->note_arrival();
  return true;
}

template <class Site>
void StorageLeases<Site>::freeze(c10::StorageImpl& storage, bool is_frozen) {
  Guard const guard{mutex_};
  Entry* entry = Traits::entry_of(storage);
  if (entry == nullptr) {
    entry = try_enrol({&storage});
  }
  if (entry != nullptr) {
    entry->is_frozen = is_frozen;
  }
}

template <class Site>
void StorageLeases<Site>::exit(Frames& frames,
                               Pins& pins,
                               std::span<Operand const> results) noexcept {
  bool const is_last = frames.is_counted && !frames.is_inside();
  if (pins.empty() && results.empty() && !is_last) {
    return;
  }
  if (this->is_under_pressure_ || frames.has_read_leases) {
    exit_under_pressure(frames, pins, results);
    return;
  }
  bool const had_operands = !pins.empty();
  bool has_pressure_begun = false;
  std::size_t dead = 0;
  {
    Guard const guard{mutex_};
    for (Operand const& result : results) {
      enrol_result(result);
    }
    for (Entry* const entry : pins) {
      if (unpin(pins, *entry) && entry->is_dead) {
        pins[dead++] = entry;
      }
    }
    has_pressure_begun = this->is_under_pressure_;
    if (!has_pressure_begun) {
      end_frame(frames, had_operands);
    }
  }
  for (std::size_t i = 0; i < dead; ++i) {
    delete pins[i];
  }
  pins.clear();
  if (has_pressure_begun) {
    (void)this->start_reclaim();
    Guard const guard{mutex_};
    end_frame(frames, had_operands);
  }
}

template <class Site>
void StorageLeases<Site>::keep_recent(Frames& frames, std::span<Operand const> results) noexcept {
  constexpr std::size_t most = 32;
  if (!this->is_room_scarce()) {
    return;
  }
  Pins& entries = frames.recent.entries;
  Pins ended;
  try {
    if (gives_recipes() || is_captured()) {
      end_recent(frames);
      return;
    }
    Guard const guard{mutex_};
    entries.reserve(3 * most);
    std::size_t const most_bytes = this->capacity_bytes_ / 64;
    auto const use = [&](Entry& entry) {
      auto const seen = std::find(entries.begin(), entries.end(), &entry);
      if (seen != entries.end()) {
        std::rotate(seen, seen + 1, entries.end());
      } else if (entry.bytes <= most_bytes && entry.has_lease() && !entry.is_read_leased) {
        entries.push_back(&entry);
        ++entry.pins;
        entry.is_shared = true;
      }
    };
    for (Entry* const entry : std::span{frames.pins}.last(std::min(most, frames.pins.size()))) {
      use(*entry);
    }
    for (Operand const& result : results.last(std::min(most, results.size()))) {
      if (Entry* const entry = enrol_result(result); entry != nullptr) {
        pin(frames.pins, *entry);  // so that `exit` unpins it as it does operands
      }
      if (Entry* const entry = Traits::entry_of(*result.storage); entry != nullptr) {
        use(*entry);
      }
    }
    ended.reserve(entries.size());
    std::size_t count = 0;
    std::size_t bytes = 0;
    for (std::size_t i = entries.size(); i-- > 0;) {  // the latest ones first
      Entry*& entry = entries[i];
      if (!entry->is_dead && !entry->is_read_leased && count < most &&
          bytes + entry->bytes <= most_bytes) {
        ++count;
        bytes += entry->bytes;
      } else {
        ended.push_back(std::exchange(entry, nullptr));
      }
    }
    std::erase(entries, nullptr);
    if (frames.recent.next == nullptr) {
      this->join_ring(recent_, frames.recent);
    }
    if (ended.empty()) {
      return;
    }
    this->count_loan();
  } catch (...) {
    return;  // what has not been kept may leave
  }
  release_recent(ended);
}

template <class Site>
bool StorageLeases<Site>::try_end_all_recent() noexcept {
  Pins ended;
  try {
    Guard const guard{mutex_};
    std::size_t count = 0;
    for (auto* one = recent_.next; one != &recent_; one = one->next) {
      count += one->entries.size();
    }
    ended.reserve(count);
    for (auto* one = recent_.next; one != &recent_; one = one->next) {
      ended.insert(ended.end(), one->entries.begin(), one->entries.end());
      one->entries.clear();
    }
    if (ended.empty()) {
      return false;
    }
    this->count_loan();
  } catch (std::bad_alloc const&) {
    return false;
  }
  release_recent(ended);
  return true;
}

template <class Site>
void StorageLeases<Site>::exit_under_pressure(Frames& frames,
                                              Pins& pins,
                                              std::span<Operand const> results) noexcept {
  bool const had_operands = !pins.empty();
  auto const enrol_results = [&](std::vector<Lease>& leases) {
    for (Operand const& result : results) {
      Entry* const entry = enrol_result(result);
      if (entry != nullptr && !entry->is_kept) {
        (void)this->detach(*entry, *result.storage, leases);
      }
    }
  };
  RecipeExtension* const extension = frames.extension;
  bool const extends = extension != nullptr && extension->make != nullptr;
  // of the extension; empty if the recipe cannot be extended
  std::optional<std::vector<BlockId>> operands;
  BlockId changed{};
  auto const unpin_entry = [&](Entry& entry) {
    bool const is_last = unpin(pins, entry);
    // If it was shared, other operations may have written parts of the storage under the same
    // lease.
    if (extends && is_last && !entry.is_shared && !entry.is_kept && !entry.is_dead &&
        Traits::entry_of(*extension->changed) == &entry) {
      operands = operand_blocks(extension->operands, &entry);
      changed = entry.block;
      entry.may_have_recipe = operands.has_value();
    }
    return is_last;
  };
  this->release_pins(
      pins,
      enrol_results,
      unpin_entry,
      [&](std::span<Lease const> leases) {
        if (operands) {
          extend_recipe(*extension, *operands, changed, leases);
        }
      },
      [&] { end_frame(frames, had_operands); },
      frames.has_read_leases);
}

template <class Site>
void StorageLeases<Site>::set_profiled(bool is_profiled) {
  is_profiled_ = is_profiled;
  Pins away;
  {
    Guard const guard{mutex_};
    this->for_each_entry([&](Entry& entry) {
      if (!entry.has_lease()) {
        pin(away, entry);
      }
    });
  }
  auto const storages = Traits::references(away);
  std::size_t i = 0;
  auto const set_and_unpin = [&](Entry& entry) {
    auto const& storage = storages[i++];
    if (storage && !entry.has_lease() && Traits::entry_of(*storage) == &entry) {
      Traits::set_address(*storage, entry, nullptr);
    }
    return unpin(away, entry);
  };
  this->release_pins(
      away, [](auto&) {}, set_and_unpin, [](auto) {}, [] {}, /*gives_up=*/false);
}

template <class Site>
std::vector<StorageView> StorageLeases<Site>::views() const {
  std::vector<StorageView> all;
  {
    Guard const guard{mutex_};
    all.reserve(this->counts_.entries + table_.size());
    this->for_each_entry([&](Entry const& entry) { all.push_back(view_of(entry)); });
    table_.for_each([&](Entry const& raw) { all.push_back(view_of_raw(raw)); });
  }
  std::sort(all.begin(), all.end(), [](StorageView const& a, StorageView const& b) {
    return std::pair{b.bytes, a.block} < std::pair{a.bytes, b.block};
  });
  return all;
}

/// Throws PyTorch's out-of-memory error, with a list of what would have to be released.
template <class Site>
void StorageLeases<Site>::throw_out_of_memory(Frames& frames,
                                              std::size_t bytes,
                                              framework::Refusal const& refusal) {
  has_refused_.store(true, std::memory_order_relaxed);
  std::string const held =
      (this->is_enabled_
           ? ""
           : " Support for large models is off: set_enabled_lms(True), in C++ enable(true).") +
      describe_residents(views());
  if (std::string const warning = this->is_enabled_ ? take_warning() : ""; !warning.empty()) {
    TORCH_WARN(warning);
  }
  report_split(frames);
  // inside of a hold no operation is begun again
  bool const may_repeat = frames.depth > 0 && frames.held == 0;
  if ((refusal.is_split || refusal.is_in_the_way) && this->is_enabled_ && may_repeat) {
    frames.split_bytes = bytes;
    frames.claimed_bytes = refusal.is_in_the_way ? refusal.needed_bytes : 0;
  } else {
    report_out_of_memory(bytes);
  }
  TORCH_CHECK_WITH(OutOfMemoryError, false, out_of_memory(Site::device()), refusal.why, held);
}

template <class Site>
void StorageLeases<Site>::report_out_of_memory(std::size_t bytes) {
  {
    Guard const guard{mutex_};
    ++this->counts_.out_of_memory;
  }
  Site::on_out_of_memory(bytes);
}

}  // namespace spillway::torch
