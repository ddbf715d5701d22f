// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/interop/torch/holding.hpp>
#include <spillway/interop/torch/torch_version.hpp>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

namespace spillway::pytorch {

/// What one thread has in use: the holdings pinned by its outermost operation.
template <class Holding>
struct Frames {
  int depth = 0;   ///< of operations that hold their operands
  int beside = 0;  ///< of operations that hold some of them beside the frames of those inside
  int held = 0;    ///< of pieces of a program that count as one operation whatever is called inside
  bool keeps_new = false;  ///< what is allocated now is for code that remembers addresses
  std::vector<Holding*> pins;
};

/// What an operation does with an operand beside reading it.
struct OperandUse {
  bool keeps = false;   ///< its address is used outside of operations, too
  bool writes = false;  ///< the operation says that it writes it
};

/// A storage among the operands of an operation, and a tensor that uses it.
struct Operand {
  c10::StorageImpl* storage = nullptr;
  c10::TensorImpl const* tensor = nullptr;
  OperandUse use{};
};
using Operands = c10::SmallVector<Operand, 12>;

/// Stands between PyTorch's storages and an allocator: gives them memory, leases it while operations
/// use it, and takes the addresses away in between.
///
/// A storage gets its memory as a block under a lease (`allocate`). When an operation has it as an
/// operand or a result for the first time, the storage is *enrolled*: the context of its `DataPtr`
/// becomes a `Holding`, which owns the lease from then on. As long as memory suffices, leases are
/// simply kept. Once an allocation fails, the desk is *under pressure*: a holding that no frame
/// pins gives up its lease, and the storage's pointer becomes null, so that the block may leave, move
/// or come back early as the pager sees fit. The next frame that has the storage among its operands
/// acquires the block again. So a storage has an address exactly while a lease stands behind it.
///
/// `Site` says where the one desk of a process is, since PyTorch's deleters are plain functions:
///
/// | expression               | must                                                            |
/// |--------------------------|-----------------------------------------------------------------|
/// | `Site::allocator_type`   | a `DeviceAllocator`                                             |
/// | `Site::desk()`           | the desk; lives until the process ends                          |
/// | `Site::frames()`         | the calling thread's `Frames`                                   |
/// | `Site::current_stream()` | the stream that the calling thread's operations are enqueued on |
/// | `Site::device()`         | the PyTorch device of tensors whose memory this is              |
/// | `Site::allocates_for(s)` | whether a storage gets new memory from this desk when it grows  |
/// | `Site::drop_foreign(p)`  | free memory that is not the desk's                              |
/// | `Site::let_others_run()` | an object that gives up the interpreter's lock while it lives   |
/// | `Site::on_out_of_memory()` | be told of an error before it is thrown                       |
///
/// Threads  thread-safe. The lock is held for bookkeeping alone: never while the allocator is called,
///          and never while a reference to a storage is taken or dropped, which may need the GIL.
/// Streams  leases belong to `Site::current_stream()`; nothing waits but a thread that needs room
///          while other threads' operations are all that holds it.
template <class Site>
class StorageDesk {
 public:
  using Allocator = typename Site::allocator_type;
  using Lease = typename Allocator::lease_type;
  using Holding = pytorch::Holding<Lease>;
  using Frames = pytorch::Frames<Holding>;
  using stream_type = typename Allocator::stream_type;

  static constexpr bool is_thread_safe = true;

  /// `memory` is not owned and must outlive the desk. It should have `lease_wait` zero: threads wait
  /// for each other here, where it is known which of them can go on.
  explicit StorageDesk(Allocator& memory) : memory_{&memory} {}
  StorageDesk(StorageDesk const&) = delete;
  StorageDesk& operator=(StorageDesk const&) = delete;

  /// Memory for a storage; its context is its address, as `raw_deallocate` expects.
  ///
  /// @throws c10::OutOfMemoryError when room cannot be made
  [[nodiscard]] c10::DataPtr allocate(std::size_t bytes) {
    if (bytes == 0) {
      return {nullptr, nullptr, &drop_raw, Site::device()};
    }
    void* const p = allocate_raw(bytes);
    return {p, p, &drop_raw, Site::device()};
  }
  /// The same as a bare address, to be given to `drop_raw`.
  [[nodiscard]] void* allocate_raw(std::size_t bytes);
  /// The deleter of memory that is not enrolled. Addresses of others go to `Site::drop_foreign`.
  static void drop_raw(void* p) {
    if (p != nullptr && !Site::desk().free_raw(p)) {
      Site::drop_foreign(p);
    }
  }
  /// Size of an allocation that is not enrolled; 0 if there is none at that address.
  [[nodiscard]] std::size_t raw_bytes(void* p) const {
    std::scoped_lock const lock{mutex_};
    auto const found = raw_.find(p);
    return found == raw_.end() ? 0 : found->second.bytes;
  }

  /// Pins the operands for the calling thread's frame and brings in those that are away.
  ///
  /// @param enrols  whether storages seen for the first time are enrolled
  /// @throws c10::OutOfMemoryError if they do not fit together; c10::Error if their bytes are lost
  void enter(Frames& frames, Operands const& operands, bool enrols);
  /// Enrols results and pins them until the frame ends. Never makes room.
  void enrol(Frames& frames, Operands const& results);
  /// Ends the outermost frame: what it had in use may leave.
  void leave(Frames& frames) noexcept;
  void count_frame() noexcept { active_.fetch_add(1); }
  void uncount_frame() noexcept {
    active_.fetch_sub(1);
    tell_waiters();
  }

  /// Brings a storage in for good: code that knows its address is not told when it goes.
  void keep(Frames& frames, c10::StorageImpl& storage);
  /// Says whether operations only read this storage, so that it leaves without being copied again. An
  /// operation that says it writes it ends that; one that writes without saying so must not be used.
  void freeze(c10::StorageImpl& storage, bool is_frozen);

  /// Lets everything that is not in use leave when room is needed. @returns bytes that may leave now
  std::size_t relieve();
  /// Makes everything that is not in use leave now. @returns bytes that left
  std::size_t reclaim();
  /// Marks the boundary between two steps of a program that repeats.
  void begin_step();

  /// Whether allocations may make others leave. What is away comes back when it is used either way.
  void enable(bool is_enabled) noexcept {
    is_enabled_ = is_enabled;
    if (!is_enabled) {
      is_under_pressure_ = false;
    }
  }
  [[nodiscard]] bool is_enabled() const noexcept { return is_enabled_; }
  [[nodiscard]] bool is_under_pressure() const noexcept { return is_under_pressure_; }
  /// For a negative control: frames end at every depth, as they must not.
  void end_frames_early(bool early) noexcept { ends_frames_early_ = early; }
  [[nodiscard]] bool ends_frames_early() const noexcept { return ends_frames_early_; }

  /// The holding of a storage of ours; null for any other.
  [[nodiscard]] static Holding* holding_of(c10::StorageImpl& storage) noexcept {
    c10::DataPtr const& data = storage._mutable_data_ptr_no_checks();
    return data.get_deleter() == &drop_holding ? static_cast<Holding*>(data.get_context())
                                               : nullptr;
  }
  /// A cheap test without the lock: might `enter` have anything to do with it?
  [[nodiscard]] static bool is_ours(c10::StorageImpl& storage) noexcept {
    auto const deleter = storage._mutable_data_ptr_no_checks().get_deleter();
    return deleter == &drop_holding || deleter == &drop_raw;
  }

  /// What is known of one storage or allocation.
  struct View {
    BlockId block{};
    std::size_t bytes = 0;
    bool is_enrolled = false;
    bool is_leased = false;
    bool is_in_use = false;
    bool is_kept = false;
    bool is_frozen = false;
    Likeness likeness{};
  };
  [[nodiscard]] View view(c10::StorageImpl& storage) const;
  /// All of them, largest first.
  [[nodiscard]] std::vector<View> views() const;

  struct Counts {
    std::uint64_t frames = 0;         // outermost frames that had operands of ours
    std::uint64_t waits = 0;          // times a thread waited for other threads' frames
    std::uint64_t out_of_memory = 0;  // errors thrown
    std::uint64_t pressures = 0;      // times pressure began
    std::uint64_t strays = 0;         // storages whose pointer had been moved elsewhere
    std::size_t holdings = 0;
    int active_frames = 0;
  };
  [[nodiscard]] Counts counts() const;
  [[nodiscard]] Allocator& memory() const noexcept { return *memory_; }

  /// Around `fork`, together with the device's own: nobody else is inside meanwhile.
  void before_fork() { mutex_.lock(); }
  void after_fork() noexcept { mutex_.unlock(); }

 private:
  struct Raw {
    BlockId block{};
    Lease lease;
    std::size_t bytes = 0;
    bool is_kept = false;
  };
  struct Missing {
    Holding* holding = nullptr;
    c10::StorageImpl* storage = nullptr;
  };
  using MissingList = c10::SmallVector<Missing, 8>;
  using Guard = std::unique_lock<std::mutex>;
  using Strong = c10::intrusive_ptr<c10::StorageImpl>;
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

  /// Made without a strong one, whose count might need the interpreter's lock.
  [[nodiscard]] static Weak weak_reference(c10::StorageImpl& storage) {
    c10::raw::weak_intrusive_ptr::incref(&storage);
    return Weak::reclaim(&storage);
  }

  static void drop_holding(void* context) {
    Site::desk().on_storage_gone(*static_cast<Holding*>(context));
  }

  [[nodiscard]] bool free_raw(void* p) noexcept;
  void on_storage_gone(Holding& holding) noexcept;
  [[nodiscard]] Holding* try_enrol(Operand const& operand);
  void pin(Frames& frames, Holding& holding);
  void thaw(Holding& holding);
  void attach(Frames& frames, MissingList const& missing);
  [[nodiscard]] bool acquire(std::vector<Missing> const& mine, std::string& failure);
  [[nodiscard]] bool make_room(Frames const& frames, std::uint64_t seen);
  [[nodiscard]] bool await_others(Frames const& frames, std::uint64_t seen);
  void await_arrival(std::uint64_t seen);
  /// Takes the lease and the address away. @returns false if the storage is not where it was
  [[nodiscard]] bool detach(Holding& holding, Strong const& storage, std::vector<Lease>& leases);
  static void point(c10::StorageImpl& storage, Holding& holding, void* p);
  void tell_waiters() noexcept {
    releases_.fetch_add(1);
    if (waiters_.load() != 0) {
      std::scoped_lock const lock{mutex_};
      changed_.notify_all();
    }
  }
  void link(Holding& holding) noexcept;
  void unlink(Holding& holding) noexcept;
  [[noreturn]] void refuse(std::string const& why);
  [[nodiscard]] std::string holders() const;

  Allocator* memory_;
  mutable std::mutex mutex_;  // guards holdings, `raw_` and `all_`
  std::condition_variable changed_;
  std::unordered_map<void*, Raw> raw_;
  Holding all_{Weak{Strong{}}};  // head of a ring
  std::size_t holdings_ = 0;
  std::uint64_t frames_ended_ = 0;
  std::atomic<bool> is_enabled_{true};
  std::atomic<bool> is_under_pressure_{false};
  std::atomic<bool> ends_frames_early_{false};
  std::atomic<int> active_{0};    // threads inside an outermost frame
  std::atomic<int> waiters_{0};   // threads that sleep here
  std::atomic<int> starving_{0};  // of which inside a frame
  std::atomic<std::uint64_t> releases_{0};
  std::atomic<std::uint64_t> waits_{0};
  std::atomic<std::uint64_t> out_of_memory_{0};
  std::atomic<std::uint64_t> pressures_{0};
  std::atomic<std::uint64_t> strays_{0};
  std::uint64_t evictions_seen_ = 0;
};

template <class Site>
void* StorageDesk<Site>::allocate_raw(std::size_t bytes) {
  for (;;) {
    std::uint64_t const seen = releases_.load();
    std::string failure;
    try {
      Raw raw{.block = memory_->allocate(bytes),
              .lease = {},
              .bytes = bytes,
              .is_kept = Site::frames().keeps_new};
      try {
        raw.lease = memory_->acquire(raw.block, Access::write, Site::current_stream());
        void* const p = raw.lease.data();
        Guard const guard{mutex_};
        raw_.emplace(p, std::move(raw));
        return p;
      } catch (...) {
        raw.lease.release();
        memory_->abandon(raw.block);
        throw;
      }
    } catch (OutOfDeviceMemory const& error) {
      failure = error.what();
    } catch (OutOfHostMemory const& error) {
      failure = error.what();
    }
    if (!make_room(Site::frames(), seen)) {
      refuse(failure);
    }
  }
}

template <class Site>
bool StorageDesk<Site>::free_raw(void* p) noexcept {
  Raw raw;
  {
    Guard const guard{mutex_};
    auto const found = raw_.find(p);
    if (found == raw_.end()) {
      return false;
    }
    raw = std::move(found->second);
    raw_.erase(found);
  }
  raw.lease.release();
  memory_->abandon(raw.block);
  tell_waiters();
  return true;
}

template <class Site>
void StorageDesk<Site>::on_storage_gone(Holding& holding) noexcept {
  Lease lease;
  bool is_last = false;
  BlockId const block = holding.block;
  {
    Guard const guard{mutex_};
    unlink(holding);
    holding.is_dead = true;
    lease = std::move(holding.lease);
    is_last = holding.pins == 0;
  }
  lease.release();
  memory_->abandon(block);
  if (is_last) {
    delete &holding;
  }
  tell_waiters();
}

/// Changes only the pointer; the context stays. The desk's lock is held, and a reference to the
/// storage.
template <class Site>
void StorageDesk<Site>::point(c10::StorageImpl& storage, Holding& holding, void* p) {
  c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  (void)data.release_context();
  data = c10::DataPtr{p, &holding, &drop_holding, holding.device};
  if constexpr (has_named_access_error) {
    p == nullptr ? forbid_access(storage) : allow_access(storage);
  }
}

/// Wraps a storage that has its memory from here and nothing else to do with it. Under the lock.
template <class Site>
auto StorageDesk<Site>::try_enrol(Operand const& operand) -> Holding* {
  c10::StorageImpl& storage = *operand.storage;
  c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  if (data.get_deleter() != &drop_raw || data.get() == nullptr ||
      data.get() != data.get_context() || !Site::allocates_for(storage)) {
    return nullptr;
  }
  auto const found = raw_.find(data.get());
  if (found == raw_.end()) {
    return nullptr;
  }
  auto holding = std::make_unique<Holding>(weak_reference(storage));
  holding->block = found->second.block;
  holding->lease = std::move(found->second.lease);
  holding->bytes = found->second.bytes;
  holding->is_kept = found->second.is_kept;
  holding->device = data.device();
  if (operand.tensor != nullptr) {
    holding->likeness = Likeness::of(*operand.tensor);
  }
  raw_.erase(found);
  (void)data.release_context();
  data = c10::DataPtr{holding->lease.data(), holding.get(), &drop_holding, holding->device};
  link(*holding);
  return holding.release();
}

template <class Site>
void StorageDesk<Site>::pin(Frames& frames, Holding& holding) {
  if (holding.pins != 0 && holding.pinner == &frames) {
    return;
  }
  frames.pins.push_back(&holding);
  ++holding.pins;
  holding.pinner = &frames;
}

/// A frozen storage is leased for reading. Before it is written its lease becomes one for writing, at
/// the same address, since the first ends after the second began.
template <class Site>
void StorageDesk<Site>::thaw(Holding& holding) {
  Lease lease;
  {
    Guard const guard{mutex_};
    holding.is_frozen = false;
    if (!holding.lease) {
      return;
    }
  }
  lease = memory_->acquire(holding.block, Access::read_write, Site::current_stream());
  Guard const guard{mutex_};
  std::swap(lease, holding.lease);
}

template <class Site>
void StorageDesk<Site>::enter(Frames& frames, Operands const& operands, bool enrols) {
  MissingList missing;
  c10::SmallVector<Holding*, 2> thawing;
  {
    Guard const guard{mutex_};
    for (Operand const& operand : operands) {
      Holding* holding = holding_of(*operand.storage);
      if (holding == nullptr && enrols) {
        holding = try_enrol(operand);
      }
      if (holding != nullptr) {
        pin(frames, *holding);
        holding->is_kept = holding->is_kept || operand.use.keeps;
        if (operand.use.writes && holding->is_frozen) {
          thawing.push_back(holding);
        }
        if (!holding->lease) {
          missing.push_back({holding, operand.storage});
        }
      }
    }
  }
  for (Holding* const holding : thawing) {
    thaw(*holding);
  }
  if (!missing.empty()) {
    attach(frames, missing);
  }
}

template <class Site>
void StorageDesk<Site>::enrol(Frames& frames, Operands const& results) {
  Guard const guard{mutex_};
  for (Operand const& operand : results) {
    Holding* holding = holding_of(*operand.storage);
    if (holding == nullptr) {
      holding = try_enrol(operand);
      if (holding != nullptr) {
        pin(frames, *holding);
      }
    }
    if (holding != nullptr && operand.use.keeps) {
      holding->is_kept = true;
    }
  }
}

/// Acquires blocks for holdings that this thread has pinned. Each is acquired by one thread; others
/// wait for it after they have acquired theirs.
template <class Site>
void StorageDesk<Site>::attach(Frames& frames, MissingList const& missing) {
  std::vector<Missing> mine;
  for (;;) {
    std::uint64_t const seen = releases_.load();
    bool is_somebody_elses = false;
    mine.clear();
    {
      Guard guard{mutex_};
      for (Missing const& one : missing) {
        Holding& holding = *one.holding;
        if (holding.lease) {
          continue;
        }
        if (holding.is_arriving) {
          is_somebody_elses =
              std::none_of(mine.begin(),
                           mine.end(),
                           [&](Missing const& other) { return other.holding == one.holding; }) ||
              is_somebody_elses;
        } else {
          holding.is_arriving = true;
          mine.push_back(one);
        }
      }
    }
    if (mine.empty()) {
      if (!is_somebody_elses) {
        return;
      }
      await_arrival(seen);
      continue;
    }
    std::string failure;
    if (!acquire(mine, failure) && !make_room(frames, seen + 1)) {  // one was our own
      refuse(failure);
    }
  }
}

/// @returns false, with the reason, if there is no room now
template <class Site>
bool StorageDesk<Site>::acquire(std::vector<Missing> const& mine, std::string& failure) {
  std::vector<LeaseRequest> requests;
  std::vector<Lease> leases;
  std::exception_ptr error;
  try {
    requests.reserve(mine.size());
    for (Missing const& one : mine) {
      requests.push_back(
          {one.holding->block, one.holding->is_frozen ? Access::read : Access::read_write});
    }
    leases = memory_->acquire_all(requests, Site::current_stream());
  } catch (OutOfDeviceMemory const& out) {
    failure = out.what();
  } catch (OutOfHostMemory const& out) {
    failure = out.what();
  } catch (...) {
    error = std::current_exception();
  }
  {
    Guard const guard{mutex_};
    for (std::size_t i = 0; i < mine.size(); ++i) {
      Holding& holding = *mine[i].holding;
      holding.is_arriving = false;
      if (!leases.empty()) {
        holding.lease = std::move(leases[i]);
        point(*mine[i].storage, holding, holding.lease.data());
      }
    }
  }
  tell_waiters();
  if (error) {
    std::rethrow_exception(error);
  }
  return !leases.empty();
}

/// After an allocation failed: lets go what is idle, or waits for others. @returns false if neither
/// can help
template <class Site>
bool StorageDesk<Site>::make_room(Frames const& frames, std::uint64_t seen) {
  if (!is_enabled_) {
    return false;
  }
  return !is_under_pressure_ ? (relieve(), true) : await_others(frames, seen);
}

/// Sleeps until another thread has acquired what it is acquiring, or failed to. It waits for no frame.
template <class Site>
void StorageDesk<Site>::await_arrival(std::uint64_t seen) {
  [[maybe_unused]] auto const polite = Site::let_others_run();
  Guard guard{mutex_};
  waiters_.fetch_add(1);
  changed_.wait(guard, [&] { return releases_.load() != seen; });
  waiters_.fetch_sub(1);
}

/// Sleeps until something is let go. @returns false if every thread inside a frame waits
template <class Site>
bool StorageDesk<Site>::await_others(Frames const& frames, std::uint64_t seen) {
  [[maybe_unused]] auto const polite = Site::let_others_run();
  Guard guard{mutex_};
  int const self = frames.depth > 0 || frames.beside > 0 ? 1 : 0;
  waiters_.fetch_add(1);
  starving_.fetch_add(self);
  auto const is_hopeless = [&] { return active_.load() - starving_.load() <= 0; };
  bool const must_wait = releases_.load() == seen;
  if (must_wait && !is_hopeless()) {
    waits_.fetch_add(1);
    changed_.wait(guard, [&] { return releases_.load() != seen || is_hopeless(); });
  }
  starving_.fetch_sub(self);
  waiters_.fetch_sub(1);
  bool const has_changed = releases_.load() != seen;
  changed_.notify_all();
  return has_changed;
}

template <class Site>
bool StorageDesk<Site>::detach(Holding& holding,
                               Strong const& storage,
                               std::vector<Lease>& leases) {
  if (holding_of(*storage) != &holding) {
    holding.is_kept = true;  // its pointer was moved to a storage that is not known
    strays_.fetch_add(1);
    return false;
  }
  leases.push_back(std::move(holding.lease));
  point(*storage, holding, nullptr);
  return true;
}

template <class Site>
void StorageDesk<Site>::leave(Frames& frames) noexcept {
  std::vector<Lease> leases;
  std::vector<Holding*> graves;
  std::vector<Strong> storages;
  // Under pressure the addresses go, for which the storages have to be alive. References to them are
  // taken and dropped without the lock.
  bool const lets_go = is_under_pressure_;
  if (lets_go) {
    storages.reserve(frames.pins.size());
    leases.reserve(frames.pins.size());
    for (Holding* const holding : frames.pins) {
      storages.push_back(holding->storage.lock());
    }
  }
  {
    Guard const guard{mutex_};
    frames_ended_ += frames.pins.empty() ? 0U : 1U;
    for (std::size_t i = 0; i < frames.pins.size(); ++i) {
      Holding& holding = *frames.pins[i];
      if (holding.pinner == &frames) {
        holding.pinner = nullptr;
      }
      if (--holding.pins != 0) {
        continue;
      }
      if (holding.is_dead) {
        graves.push_back(&holding);
      } else if (lets_go && !holding.is_kept && holding.lease && storages[i]) {
        (void)detach(holding, storages[i], leases);
      }
    }
    frames.pins.clear();
  }
  leases.clear();
  storages.clear();
  for (Holding* const holding : graves) {
    delete holding;
  }
  if (!lets_go && is_under_pressure_) {
    (void)relieve();  // pressure began meanwhile
  }
}

template <class Site>
std::size_t StorageDesk<Site>::relieve() {
  std::vector<Lease> leases;
  std::vector<Holding*> idle;
  std::vector<Holding*> graves;
  std::vector<Strong> storages;
  std::size_t bytes = 0;
  {
    Guard const guard{mutex_};
    if (!is_under_pressure_.exchange(true)) {
      pressures_.fetch_add(1);
    }
    for (Holding* one = all_.next; one != &all_; one = one->next) {
      if (one->pins == 0 && !one->is_kept && one->lease) {
        idle.push_back(one);
      }
    }
    for (Holding* const one : idle) {
      ++one->pins;  // keeps the holding, not its lease
    }
  }
  storages.reserve(idle.size());
  for (Holding* const one : idle) {
    storages.push_back(one->storage.lock());
  }
  {
    Guard const guard{mutex_};
    for (std::size_t i = 0; i < idle.size(); ++i) {
      Holding& holding = *idle[i];
      if (--holding.pins != 0) {
        continue;
      }
      if (holding.is_dead) {
        graves.push_back(&holding);
      } else if (!holding.is_kept && holding.lease && storages[i] &&
                 detach(holding, storages[i], leases)) {
        bytes += holding.bytes;
      }
    }
  }
  leases.clear();
  storages.clear();
  for (Holding* const holding : graves) {
    delete holding;
  }
  tell_waiters();
  return bytes;
}

template <class Site>
std::size_t StorageDesk<Site>::reclaim() {
  (void)relieve();
  std::vector<BlockId> blocks;
  {
    Guard const guard{mutex_};
    for (Holding* one = all_.next; one != &all_; one = one->next) {
      if (!one->lease) {
        blocks.push_back(one->block);
      }
    }
  }
  std::size_t const before = memory_->stats().resident.bytes.current;
  for (BlockId const block : blocks) {
    try {
      memory_->swap_out(block);
    } catch (ContractViolation const&) {  // NOLINT(bugprone-empty-catch): freed or in use by now
    }
  }
  std::size_t const after = memory_->stats().resident.bytes.current;
  return before - std::min(before, after);
}

template <class Site>
void StorageDesk<Site>::begin_step() {
  memory_->begin_step();
  Stats const now = memory_->stats();
  std::uint64_t evictions = 0;
  for (Tally const& tally : now.evictions) {
    evictions += tally.count;
  }
  bool const is_calm = evictions == std::exchange(evictions_seen_, evictions);
  if (is_calm && now.resident.bytes.current == now.allocated.bytes.current) {
    is_under_pressure_ = false;  // leases are kept again, from the next use on
  }
}

template <class Site>
void StorageDesk<Site>::keep(Frames& frames, c10::StorageImpl& storage) {
  Operands const operands{Operand{&storage, nullptr, OperandUse{.keeps = true, .writes = false}}};
  enter(frames, operands, true);
}

template <class Site>
void StorageDesk<Site>::freeze(c10::StorageImpl& storage, bool is_frozen) {
  Guard const guard{mutex_};
  Holding* holding = holding_of(storage);
  if (holding == nullptr) {
    holding = try_enrol({&storage});
  }
  if (holding != nullptr) {
    holding->is_frozen = is_frozen;
  }
}

template <class Site>
void StorageDesk<Site>::link(Holding& holding) noexcept {
  holding.previous = all_.previous;
  holding.next = &all_;
  all_.previous->next = &holding;
  all_.previous = &holding;
  ++holdings_;
}

template <class Site>
void StorageDesk<Site>::unlink(Holding& holding) noexcept {
  holding.previous->next = holding.next;
  holding.next->previous = holding.previous;
  --holdings_;
}

template <class Site>
auto StorageDesk<Site>::view(c10::StorageImpl& storage) const -> View {
  Guard const guard{mutex_};
  if (Holding const* const holding = holding_of(storage)) {
    return {.block = holding->block,
            .bytes = holding->bytes,
            .is_enrolled = true,
            .is_leased = static_cast<bool>(holding->lease),
            .is_in_use = holding->pins != 0,
            .is_kept = holding->is_kept,
            .is_frozen = holding->is_frozen,
            .likeness = holding->likeness};
  }
  auto const found = raw_.find(storage._mutable_data_ptr_no_checks().get_context());
  if (found == raw_.end()) {
    return {};
  }
  return {.block = found->second.block,
          .bytes = found->second.bytes,
          .is_leased = true,
          .is_in_use = true};
}

template <class Site>
auto StorageDesk<Site>::views() const -> std::vector<View> {
  std::vector<View> all;
  {
    Guard const guard{mutex_};
    all.reserve(holdings_ + raw_.size());
    for (Holding const* one = all_.next; one != &all_; one = one->next) {
      all.push_back({.block = one->block,
                     .bytes = one->bytes,
                     .is_enrolled = true,
                     .is_leased = static_cast<bool>(one->lease),
                     .is_in_use = one->pins != 0,
                     .is_kept = one->is_kept,
                     .is_frozen = one->is_frozen,
                     .likeness = one->likeness});
    }
    for (auto const& [p, raw] : raw_) {
      all.push_back({.block = raw.block, .bytes = raw.bytes, .is_leased = true, .is_in_use = true});
    }
  }
  std::stable_sort(
      all.begin(), all.end(), [](View const& a, View const& b) { return a.bytes > b.bytes; });
  return all;
}

template <class Site>
auto StorageDesk<Site>::counts() const -> Counts {
  Guard const guard{mutex_};
  return {.frames = frames_ended_,
          .waits = waits_,
          .out_of_memory = out_of_memory_,
          .pressures = pressures_,
          .strays = strays_,
          .holdings = holdings_,
          .active_frames = active_};
}

template <class Site>
void StorageDesk<Site>::refuse(std::string const& why) {
  out_of_memory_.fetch_add(1);
  std::string const held = holders();
  Site::on_out_of_memory();
  TORCH_CHECK_WITH(OutOfMemoryError, false, why, held);
}

/// What would have to be released, largest first.
template <class Site>
std::string StorageDesk<Site>::holders() const {
  std::string text = is_enabled_ ? "" : " Support for large models is off: set_enabled_lms(True).";
  std::size_t shown = 0;
  std::size_t bytes = 0;
  for (View const& one : views()) {
    if (!one.is_leased && !one.is_in_use) {
      continue;
    }
    bytes += one.bytes;
    if (++shown <= 5) {
      text +=
          (shown == 1 ? " In use together or held, largest first: " : "; ") +
          std::to_string(one.bytes) + " bytes " +
          (one.is_enrolled ? one.likeness.text() : std::string{"not yet seen by an operation"}) +
          (one.is_kept     ? " (kept: its address is known outside of operations)"
           : one.is_in_use ? " (an operation needs it)"
                           : "");
    }
  }
  return text + (shown == 0 ? "" : "; " + std::to_string(bytes) + " bytes in all.");
}

}  // namespace spillway::pytorch
