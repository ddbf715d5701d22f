// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/concepts/pager.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device_share.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/interop/framework/codec_choice.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace spillway::framework {

/// Counts of a framework's operations; every adapter keeps them.
struct OperationCounts {
  std::uint64_t frames = 0;         ///< operations that used memory of the allocator
  std::uint64_t waits = 0;          ///< how often a thread waited for other threads' operations
  std::uint64_t out_of_memory = 0;  ///< requests that could not be met
  std::uint64_t pressures = 0;      ///< how often pressure began
  /// Storages whose address was found in another owner (`Traits::detach`)
  std::uint64_t strays = 0;
  std::size_t entries = 0;  ///< storages that operations have been seen to use
  /// Operations that were begun again, with their operands side by side
  std::uint64_t regroups = 0;
  int active_frames = 0;  ///< frames that are open now in any thread
};

/// Why a request for memory could not be met.
struct Refusal {
  std::string why;
  /// Whether there is enough memory that is not leased, but in pieces that leased blocks separate.
  bool is_split = false;
  /// Whether it would need more than the capacity even if nothing else were leased.
  bool is_too_large = false;
  /// The least capacity with which it may be met; 0 if no capacity would do
  std::size_t needed_bytes = 0;
  /// Whether another program, which has claimed memory earlier, waits for what this operation has
  /// pinned.
  bool is_in_the_way = false;
};

/// Leases the memory of a framework's operations while they run, and lets it be swapped out in
/// between. It is the base of the adapters for PyTorch (`StorageLeases`) and for frameworks whose
/// buffers keep their addresses (`BufferLeases`).
///
/// An *entry* stands for one storage of the framework, which is one block of the allocator. A
/// *frame* stands for an operation that runs. It *pins* the entries of its operands and results
/// until it ends.
///
/// - As long as memory suffices, an entry keeps its lease after the operation, so a frame makes no
///   call to the allocator. The first allocation that fails begins *pressure* (`start_reclaim`).
///   Under pressure an entry that is not pinned has no lease, so that the pager may swap out its
///   block: entries that are not pinned when pressure begins give up their leases at once, the
///   others with their last pin. Pressure ends with a step in which nothing was evicted and at
///   whose end everything is resident (`begin_step`).
/// - When a frame begins, the missing leases of its operands are acquired together. Only one thread
///   acquires an entry. Other threads that need the entry wait until that thread has succeeded or
///   failed.
/// - A thread that finds no room under pressure sleeps until another thread releases memory. It
///   gives up on a deadlock: when all frames belong to threads that sleep here, so that none of
///   them can release any. A frame in which the program's own code runs is *open-ended*: that code
///   may wait for the very thread that sleeps here, which cannot be detected. When only such frames
///   are left, the thread gives up once nothing has been released for the time `patience`. The same
///   holds for *loans*: pins that end by themselves, for example when a communication completes.
///   If other threads release memory again and again, but never enough, it gives up after
///   `most_waits` times as long. It does not wait for more than the capacity.
///
/// `Traits` describes the storages of a framework. It has these types and static functions:
///
/// - `allocator_type`: a `DeviceAllocator`.
/// - `Entry`: a default-constructible class with the members `block`, `bytes`, `pins`, `is_kept`,
///   `is_arriving`, `is_dead`, `previous` and `next`, which begin as its own address, and
///   `has_lease()`.
/// - `Frame`: a class with `is_counted` and `is_bounded`, which begin as false;
///   `is_open_ended()`, whether code that may wait for other threads runs inside of it; and
///   `thread_frames()`, the number of counted frames that the calling thread is inside of.
/// - `Missing`: an operand whose lease has to be acquired, with the member `entry`.
/// - `is_granted(missing)`: whether the entry has a lease that allows this use.
/// - `access(missing)`: the `Access` to acquire. `extends_recipe(missing)`, optional: the value of
///   the member of that name in `LeaseRequest`.
/// - `grant(missing, lease, stream)`: gives the lease to the entry and sets the storage's address.
/// - `is_swappable(entry)`: whether the entry has a lease that it may give up.
/// - `has_references`: whether a reference must keep a storage alive while its address is cleared.
/// - `references(entries)`: a list of references to the storages. An element converts to `bool`,
///   and is false if its storage does not exist any more. The list is made and destroyed without
///   the lock.
/// - `detach(entry, reference, leases)`: clears the storage's address and appends the entry's
///   leases to `leases`. If the address has another owner, returns false and sets `is_kept`.
/// - `try_make_room()`, optional: called when a thread finds no room under pressure, before it
///   waits for others, and before the capacity is lowered; returns whether there may be room now.
/// - `can_repeat(frame)`: whether the operation will be begun again if it finds no room now.
/// - `release_interpreter()`: an object that gives up the lock of the Python interpreter while it
///   lives.
///
/// Threads  thread-safe. The lock only guards bookkeeping. It is not held while the allocator is
///          called, nor while a reference to a storage is taken or dropped.
/// Streams  nothing waits on the host, except a thread that needs room which other threads' frames
///          hold.
template <class Traits>
class OperandLeases {
 public:
  using Allocator = typename Traits::allocator_type;
  using Lease = typename Allocator::lease_type;
  using stream_type = typename Allocator::stream_type;
  using Entry = typename Traits::Entry;
  using Frame = typename Traits::Frame;
  using Pins = std::vector<Entry*>;

  static constexpr bool is_thread_safe = true;
  /// Whether storages may have a codec, for which the host must be able to address the device's
  /// memory.
  static constexpr bool can_encode = AddressableApi<typename Allocator::device_type>;
  /// How many times `patience` a thread waits at most, even if others release memory all the time.
  static constexpr int most_waits = 60;

  OperandLeases(OperandLeases const&) = delete;
  OperandLeases& operator=(OperandLeases const&) = delete;

  /// Begins pressure: every entry that is not pinned gives up its lease. Does nothing while that is
  /// switched off (`enable`).
  ///
  /// @returns the bytes of these entries
  /// @throws  std::bad_alloc; all entries keep their leases then
  std::size_t start_reclaim();
  /// Swaps out everything that is not pinned, as far as the host pool has room.
  ///
  /// @returns the bytes that were swapped out
  std::size_t reclaim();
  /// Swaps out everything that is not pinned, and releases device memory that is free then to the
  /// system. A block is swapped in again when an operation uses it.
  ///
  /// @param level  the tier to swap out to. With `HostTier::file`, blocks that are in host memory
  ///               go to the file, too, as far as it has room, and that host memory is released
  /// @returns the bytes of device memory that were released
  /// @throws  ContractViolation if there is no such tier; as `DeviceAllocator::trim_host_sync`.
  ///          Blocks that do not fit into the tier stay where they are
  std::size_t park(HostTier level = HostTier::pinned) {
    return park(level, [this] { (void)reclaim(); });
  }
  /// Swaps in what is swapped out, in the order of enrolment, as far as the capacity allows.
  ///
  /// @returns the bytes that were swapped in
  std::size_t wake();
  /// Changes the allocator's capacity. If less than what is reserved is wanted, entries that are
  /// not pinned give up their leases, so that their blocks can be moved or swapped out.
  ///
  /// @throws as `DeviceAllocator::set_capacity`; ContractViolation if the device is shared, since
  ///         the share sets the capacity then. The capacity is then as it was
  void set_capacity(std::size_t bytes) {
    expects(!is_shared(), "the device is shared, and the limit is this program's share");
    change_capacity(bytes);
  }
  /// Begins to share the device with other programs; see `DeviceShare`. From now on the share sets
  /// the capacity. A thread that finds no room, and for which no other thread of this program could
  /// release any, claims a larger share.
  ///
  /// @throws as the constructor of `DeviceShare`; ContractViolation if it is shared already
  void share(ShareOptions options) {
    expects(!is_shared(), "the device is shared already");
    auto shared = std::make_shared<Share>(limited_, std::move(options));
    Guard const guard{mutex_};
    share_ = std::move(shared);
  }
  /// Leaves the group of programs that share the device. To be called before the process ends,
  /// since the share has a thread of its own.
  void leave_share() {
    std::shared_ptr<Share> leaving;  // destroyed without the lock, which its thread may need
    Guard const guard{mutex_};
    std::swap(leaving, share_);
  }
  [[nodiscard]] bool is_shared() const {
    Guard const guard{mutex_};
    return share_ != nullptr;
  }
  /// The programs that share the device, this one among them; none if it is not shared.
  [[nodiscard]] std::vector<ShareMember> share_members() const {
    auto const shared = share_if_any();
    return shared ? shared->members() : std::vector<ShareMember>{};
  }
  /// The entries that have a lease and cannot give it up now, with the bytes that they take up on
  /// the device: they are pinned, or other code knows their addresses.
  [[nodiscard]] Tally unreclaimable() const {
    Guard const guard{mutex_};
    Tally stay;
    for_each_entry([&](Entry const& entry) {
      bool const is_reclaimable = entry.pins == 0 && Traits::is_swappable(entry);
      if (entry.has_lease() && !is_reclaimable) {
        stay.add(memory_->rounded_bytes(entry.bytes));
      }
    });
    return stay;
  }
  /// Sets the codec of storages that are allocated from now on.
  void set_default_codec(CodecChoice choice) noexcept { default_codec_ = choice; }
  /// Marks the boundary between two steps of a program that repeats.
  void begin_step();

  /// These are to be called by a thread that forks, before and after `fork`. The child has none of
  /// the parent's other threads: an acquisition that one of them had begun is made again when the
  /// child uses the entry. A derived class removes the pins of these threads before it calls
  /// `after_fork_in_child`, with the lock held.
  ///
  /// @param frame  the frame that the calling thread is inside of; null for none
  void before_fork() {
    // In this order, since a recipe runs inside of a call to the allocator and may take the lock.
    memory_->before_fork();
    mutex_.lock();
  }
  void after_fork_in_parent() noexcept {
    mutex_.unlock();
    memory_->after_fork_in_parent();
  }
  void after_fork_in_child(Frame const* frame) {
    is_in_child_ = true;
    memory_->after_fork_in_child();
    for_each_entry([](Entry& entry) { entry.is_arriving = false; });
    counts_.active_frames = frame == nullptr ? 0 : frame->thread_frames();
    bounded_frames_ = frame != nullptr && frame->is_bounded ? 1 : 0;
    starving_frames_ = 0;
    loans_ = 0;
    waiters_ = 0;
    // so that it begins again, with the entries that other threads had pinned
    is_under_pressure_ = false;
    // the threads that the old one knows do not exist here
    new (&changed_) std::condition_variable;
    mutex_.unlock();
  }

  /// Whether this process was forked from one that had these leases.
  [[nodiscard]] bool is_in_child() const noexcept { return is_in_child_; }

  /// Sets whether an allocation that fails may swap out other blocks. Whatever is set, a block that
  /// is swapped out already is swapped in when it is used.
  void enable(bool is_enabled) noexcept {
    // so that no thread that has read the old value begins pressure after this
    Guard const guard{mutex_};
    is_enabled_ = is_enabled;
    if (!is_enabled) {
      is_under_pressure_ = false;
    }
  }
  [[nodiscard]] bool is_enabled() const noexcept { return is_enabled_; }
  [[nodiscard]] bool is_under_pressure() const noexcept { return is_under_pressure_; }
  /// Whether operations that run now might find no room: under pressure, and shortly before it
  /// (`update_nearness`).
  [[nodiscard]] bool is_room_scarce() const noexcept {
    return is_under_pressure_ || is_pressure_near_.load(std::memory_order_relaxed);
  }
  [[nodiscard]] Allocator& memory() const noexcept { return *memory_; }

 protected:
  using Guard = std::unique_lock<std::mutex>;
  using Missing = typename Traits::Missing;

  /// Keeps the maximum of numbers. The maximum counts as known after a whole step in which it has
  /// not grown.
  class Largest {
   public:
    void add(std::size_t number) noexcept {
      if (number > value_) {
        value_ = number;
        has_grown_ = true;
        is_known_ = false;
      }
    }
    void begin_step() noexcept { is_known_ = !std::exchange(has_grown_, false); }
    [[nodiscard]] std::size_t value() const noexcept { return value_; }
    [[nodiscard]] bool is_known() const noexcept { return is_known_; }

   private:
    std::size_t value_ = 0;
    bool has_grown_ = true;  // since the last step began; the first step is taken to be incomplete
    bool is_known_ = false;
  };

  /// `memory` is not owned and must outlive this object. Its option `lease_wait` should be zero:
  /// threads wait for each other in this class, which knows which of them can continue.
  ///
  /// @param patience  how long a thread waits for open-ended frames while nothing is released
  explicit OperandLeases(Allocator& memory,
                         std::chrono::milliseconds patience = std::chrono::seconds{10})
      : memory_{&memory}, patience_{patience} {}
  ~OperandLeases() = default;

  /// Implements the public `park`; `reclaim` swaps out everything that is not pinned.
  template <class Reclaim>
  std::size_t park(HostTier level, Reclaim const& reclaim) {
    bool const spares_memory = level != HostTier::pinned;
    expects(!spares_memory || memory_->host_stats().tier(level).capacity_bytes != 0,
            "what is parked has no such tier to go to");
    {
      struct FirstTier {
        Allocator& memory;
        ~FirstTier() { memory.set_first_host_tier(HostTier::pinned); }
      };
      memory_->set_first_host_tier(level);
      FirstTier const restored_at_the_end{*memory_};
      reclaim();
      memory_->synchronize();
      if (spares_memory) {
        (void)memory_->trim_host_sync();
      }
    }
    return memory_->trim_sync();
  }

  // The table of entries. The caller of these functions holds the lock.

  void link(Entry& entry) noexcept {
    join_ring(all_, entry);
    ++counts_.entries;
  }
  void unlink(Entry& entry) noexcept {
    leave_ring(entry);
    --counts_.entries;
  }
  /// Doubly linked rings whose links are members of the nodes, so that adding a node allocates
  /// nothing.
  template <class Node>
  static void join_ring(Node& head, Node& node) noexcept {
    node.previous = head.previous;
    node.next = &head;
    head.previous->next = &node;
    head.previous = &node;
  }
  template <class Node>
  static void leave_ring(Node& node) noexcept {
    node.previous->next = node.next;
    node.next->previous = node.previous;
  }
  template <class Visit>
  void for_each_entry(Visit const& visit) const {
    for (Entry* entry = all_.next; entry != &all_; entry = entry->next) {
      visit(*entry);
    }
  }

  // Frames.

  /// Counts the frame among those that other threads may wait for. The caller holds the lock.
  void count(Frame& frame) noexcept {
    if (!frame.is_counted) {
      frame.is_counted = true;
      frame.is_bounded = !frame.is_open_ended();
      ++counts_.active_frames;
      bounded_frames_ += frame.is_bounded ? 1 : 0;
    }
  }
  /// Makes a frame open-ended. To be called when code begins to run in the frame that may wait for
  /// other threads. The caller holds the lock.
  void end_bound(Frame& frame) noexcept {
    if (std::exchange(frame.is_bounded, false)) {
      --bounded_frames_;
      // threads that wait for this frame do so for at most `patience` from now on
      changed_.notify_all();
    }
  }
  /// Ends `end_bound`, when that code has returned. The caller holds the lock.
  void bound_again(Frame& frame) noexcept {
    if (frame.is_counted && !frame.is_bounded && !frame.is_open_ended()) {
      frame.is_bounded = true;
      ++bounded_frames_;
    }
  }
  /// Ends `count`, and wakes waiting threads so that they look at what was released and which
  /// frames are left. The caller holds the lock and has released what the frame had pinned.
  void uncount(Frame& frame) noexcept {
    if (frame.is_counted) {
      frame.is_counted = false;
      --counts_.active_frames;
      bounded_frames_ -= std::exchange(frame.is_bounded, false) ? 1 : 0;
      note_end();
    }
  }
  /// Counts a loan, so that threads without room wait for its end. The caller holds the lock.
  void count_loan() noexcept { ++loans_; }
  /// Ends `count_loan` and wakes waiting threads. The caller holds the lock and has released what
  /// was pinned. A loan of the parent may also end in a forked child, which does not count it.
  void uncount_loan() noexcept {
    loans_ -= loans_ > 0 ? 1 : 0;
    note_end();
  }
  /// Unpins what a frame has pinned. Under pressure, entries that have no other pins give up their
  /// leases. Clears `pins`.
  ///
  /// @param prepare   called first, with the list of leases that will be ended
  /// @param unpin     called with each entry; unpins it and returns whether that was the last pin
  /// @param end       called after the leases have been ended
  /// @param gives_up  whether entries give up their leases even if there is no pressure
  ///
  /// `prepare`, `unpin` and `end` are called with the lock held and must not throw.
  template <class Prepare, class Unpin, class End>
  void release_pins(Pins& pins, Prepare prepare, Unpin unpin, End end, bool gives_up = false) {
    release_pins(
        pins, prepare, unpin, [](std::span<Lease const>) {}, end, gives_up);
  }
  /// @param part  called without the lock, with the leases that are about to be ended; must not
  ///              throw
  template <class Prepare, class Unpin, class Part, class End>
  void release_pins(Pins& pins, Prepare prepare, Unpin unpin, Part part, End end, bool gives_up);
  /// Clears the storage's address and moves the entry's leases to `leases`. The caller holds the
  /// lock.
  template <class Storage>
  bool detach(Entry& entry, Storage&& storage, std::vector<Lease>& leases) {
    bool const is_detached = Traits::detach(entry, std::forward<Storage>(storage), leases);
    counts_.strays += is_detached ? 0 : 1;
    return is_detached;
  }

  // Allocations and acquisitions.

  /// Counts an allocation; if `bytes` is negative, one that was freed. The caller holds the lock.
  void count_bytes(std::ptrdiff_t bytes) noexcept {
    all_bytes_ += static_cast<std::size_t>(bytes);
    largest_.add(static_cast<std::size_t>(std::max<std::ptrdiff_t>(bytes, 0)));
    update_nearness();
  }
  /// Allocates a block and leases it for writing. Tries again as long as room can be made.
  ///
  /// @param adopt    called with the block and the lease; takes the lease or throws
  /// @param refusal  receives the reason if the result is false
  template <class Adopt>
  [[nodiscard]] bool try_allocate_block(std::size_t bytes,
                                        stream_type stream,
                                        Frame const* frame,
                                        Refusal& refusal,
                                        Adopt const& adopt);
  /// Acquires the leases that the operands of a frame lack. The caller has pinned their entries.
  ///
  /// @param refusal  receives the reason if the result is false
  [[nodiscard]] bool acquire_missing(Frame const& frame,
                                     std::span<Missing const> missing,
                                     stream_type stream,
                                     Refusal& refusal);

  // Waiting.

  /// A number that grows whenever memory may have been released or an acquisition has ended. A
  /// thread reads it before it looks for room. If the number has changed when the thread is about
  /// to sleep, it does not sleep, so that it misses no release.
  [[nodiscard]] std::uint64_t changes() const noexcept { return releases() + arrivals_.load(); }
  /// Records that memory was released. The caller does not hold the lock.
  void notify_waiters() noexcept { note_change(releases_); }
  /// Records that the acquisition of an entry has ended, whether it has succeeded or not. The
  /// caller does not hold the lock.
  void note_arrival() noexcept { note_change(arrivals_); }
  /// Lets waiting threads look again at what they wait for, though no memory was released. The
  /// caller holds the lock.
  void wake_waiters() noexcept {
    if (waiters_.load() != 0) {
      changed_.notify_all();
    }
  }
  /// Says that a frame or a loan has ended. The caller holds the lock.
  void note_end() noexcept {
    ends_.store(ends_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    wake_waiters();
  }
  /// Blocks until `is_true()` holds, or gives up: it waits as long as a bounded frame runs, and at
  /// most `patience` while only open-ended frames do. The caller holds the lock.
  ///
  /// @returns `is_true()`
  template <class Predicate>
  bool wait_until(Guard& guard, Predicate const& is_true) {
    waiters_.fetch_add(1);
    bool is_patient = true;
    while (is_patient && !is_true()) {
      if (bounded_frames_ > 0) {
        changed_.wait(guard, [&] { return is_true() || bounded_frames_ == 0; });
      } else {
        is_patient =
            changed_.wait_for(guard, patience_, [&] { return is_true() || bounded_frames_ > 0; });
      }
    }
    waiters_.fetch_sub(1);
    return is_true();
  }

  /// Keeps what an operation has claimed of a shared device until the returned object is destroyed,
  /// for an operation that is begun again.
  ///
  /// @param needed  optional, for an operation that cannot be begun again: the bytes to claim
  ///                first; see `DeviceShare::ClaimHold`
  /// @returns null if the device is not shared
  template <std::same_as<std::size_t>... Needed>
  [[nodiscard]] std::shared_ptr<void> hold_claim(Needed... needed) {
    struct Hold {
      std::shared_ptr<Share> share;
      typename Share::ClaimHold hold;
      explicit Hold(std::shared_ptr<Share> held, Needed... bytes)
          : share{std::move(held)}, hold{*share, bytes...} {}
    };
    auto shared = share_if_any();
    return shared ? std::make_shared<Hold>(std::move(shared), needed...) : nullptr;
  }
  /// Claims a larger share of the device, as `DeviceShare::claim` does. Refused if the device is
  /// not shared.
  [[nodiscard]] ClaimResult claim(std::size_t needed_bytes, bool gives_way) {
    auto const shared = share_if_any();
    if (!shared || needed_bytes == 0) {
      return ClaimResult::refused;
    }
    [[maybe_unused]] auto const others_run = Traits::release_interpreter();
    return shared->claim(needed_bytes, gives_way);
  }

  Allocator* memory_;
  mutable std::mutex mutex_;  // guards all members that are not atomic, here and in derived classes
  std::size_t capacity_bytes_{memory_->stats().capacity_bytes};
  Largest largest_;  // bytes of one allocation
  OperationCounts counts_{};
  std::atomic<CodecChoice> default_codec_{CodecChoice::none};
  std::atomic<bool> is_enabled_{true};
  std::atomic<bool> is_under_pressure_{false};

 private:
  /// The part of this class that `DeviceShare` uses.
  class Limited {
   public:
    explicit Limited(OperandLeases& leases) noexcept : leases_{&leases} {}
    [[nodiscard]] Stats stats() const { return leases_->memory_->stats(); }
    void set_capacity(std::size_t bytes) { leases_->change_capacity(bytes); }
    [[nodiscard]] std::size_t rounded_bytes(std::size_t bytes) const noexcept {
      return leases_->memory_->rounded_bytes(bytes);
    }

   private:
    OperandLeases* leases_;
  };
  using Share = DeviceShare<Limited>;

  void change_capacity(std::size_t bytes);
  [[nodiscard]] std::shared_ptr<Share> share_if_any() const {
    Guard const guard{mutex_};
    return share_;
  }

  /// Decides whether pressure is near: if twice the bytes that are allocated, or eight more
  /// allocations of the largest size, would not fit. The caller holds the lock.
  void update_nearness() noexcept {
    is_pressure_near_.store(all_bytes_ + std::max(all_bytes_, 8 * largest_.value()) >
                                capacity_bytes_,
                            std::memory_order_relaxed);
  }
  /// What is remembered of a request for room from one try to the next.
  struct Request {
    bool has_asked = false;      ///< `try_make_room` has been called
    std::uint64_t releases = 0;  ///< before the last try, as the following two
    std::uint64_t arrivals = 0;
    int tries = 0;  ///< since memory was released
    std::optional<std::chrono::steady_clock::time_point> first_wait;
  };
  /// A thread that has no room tries again when an acquisition of another thread was in vain, since
  /// its own may have been so because of that one. But threads without room must not wake each
  /// other for ever, so that is done only so often.
  static constexpr int most_tries = 16;

  /// To be called before each try.
  void begin_try(Request& request) const noexcept {
    std::uint64_t const now = releases();
    request.tries = now == request.releases ? request.tries + 1 : 1;
    request.releases = now;
    request.arrivals = arrivals_.load();
  }
  /// Makes room after a try has failed. @returns whether to try again
  [[nodiscard]] bool make_room(Frame const* frame, Refusal& refusal, Request& request) {
    if (!is_enabled_) {
      return false;
    }
    if (!is_under_pressure_) {
      (void)start_reclaim();
      return true;
    }
    if (!std::exchange(request.has_asked, true) && try_make_room()) {
      return true;
    }
    // Otherwise a request that no release could help would wait as long as other threads work.
    bool const may_wait = !refusal.is_too_large && !is_overdue(request);
    if (may_wait && wait_for_release(frame, request)) {
      return true;
    }
    bool const gives_way = frame != nullptr && Traits::can_repeat(*frame);
    ClaimResult const result = claim(refusal.needed_bytes, gives_way);
    refusal.is_in_the_way = result == ClaimResult::is_in_the_way;
    return result == ClaimResult::granted;
  }
  /// Whether a request has waited as long as it may. Called before each wait.
  [[nodiscard]] bool is_overdue(Request& request) const {
    auto const now = std::chrono::steady_clock::now();
    if (!request.first_wait) {
      request.first_wait = now;
    }
    return now - *request.first_wait > most_waits * patience_;
  }
  bool try_make_room() {
    if constexpr (requires { Traits::try_make_room(); }) {
      return Traits::try_make_room();
    }
    return false;
  }
  [[nodiscard]] bool wait_for_release(Frame const* frame, Request const& request);
  /// A number that grows whenever memory may have been released.
  [[nodiscard]] std::uint64_t releases() const noexcept { return releases_.load() + ends_.load(); }
  void note_change(std::atomic<std::uint64_t>& number) noexcept {
    number.fetch_add(1);
    if (waiters_.load() != 0) {
      Guard const guard{mutex_};
      changed_.notify_all();
    }
  }
  /// Blocks until the number of ended acquisitions is no longer `seen`.
  void wait_for_arrival(std::uint64_t seen) {
    [[maybe_unused]] auto const others_run = Traits::release_interpreter();
    Guard guard{mutex_};
    waiters_.fetch_add(1);
    changed_.wait(guard, [&] { return arrivals_.load() != seen; });
    waiters_.fetch_sub(1);
  }
  [[nodiscard]] bool
  acquire_all(std::span<Missing const> mine, stream_type stream, Refusal& refusal);
  /// Runs `act`, which calls the allocator. @returns false if there is no room; `refusal` has the
  /// reason then
  template <class Act>
  [[nodiscard]] static bool has_room(Refusal& refusal, Act const& act) {
    try {
      act();
      return true;
    } catch (OutOfDeviceMemory const& error) {
      MemoryReport const& report = error.report();
      refusal = {error.what(),
                 report.leased_bytes + report.requested_bytes <= report.capacity_bytes,
                 report.requested_bytes > report.capacity_bytes,
                 Share::bytes_to_claim(report)};
    } catch (OutOfHostMemory const& error) {
      refusal = {error.what()};
    }
    return false;
  }

  /// The blocks of entries without a lease, which may be swapped out, in the order of enrolment.
  [[nodiscard]] std::vector<BlockId> unleased_blocks() const {
    std::vector<BlockId> blocks;
    Guard const guard{mutex_};
    for_each_entry([&](Entry const& entry) {
      if (!entry.has_lease()) {
        blocks.push_back(entry.block);
      }
    });
    return blocks;
  }

  std::chrono::milliseconds patience_;
  Limited limited_{*this};
  std::shared_ptr<Share> share_;
  bool is_in_child_ = false;
  std::condition_variable changed_;
  Entry all_{};                // the head of a ring of all entries
  std::size_t all_bytes_ = 0;  // of all allocations, resident or not
  std::atomic<bool> is_pressure_near_{false};
  std::uint64_t evictions_seen_ = 0;
  int starving_frames_ = 0;  // active frames of threads that wait for memory here
  // active frames that are not open-ended and whose threads do not wait here
  int bounded_frames_ = 0;
  int loans_ = 0;  // loans that are counted; a loan may also depend on a thread that waits here
  std::atomic<int> waiters_{0};  // number of threads that sleep
  std::atomic<std::uint64_t> releases_{0};
  std::atomic<std::uint64_t> arrivals_{0};
  std::atomic<std::uint64_t> ends_{0};  // counts ended frames and loans; written under the lock
};

template <class Traits>
std::size_t OperandLeases<Traits>::start_reclaim() {
  std::vector<Lease> leases;
  std::vector<Entry*> idle;
  std::vector<Entry*> dead;
  std::exception_ptr error;  // thrown when the entries are unpinned and the dead ones deleted
  std::size_t bytes = 0;
  {
    Guard guard{mutex_};
    if (!is_enabled_) {
      return 0;
    }
    if (!is_under_pressure_.exchange(true)) {
      ++counts_.pressures;
    }
    for_each_entry([&](Entry& entry) {
      if (entry.pins == 0 && Traits::is_swappable(entry)) {
        idle.push_back(&entry);
      }
    });
    dead.reserve(idle.size());
    // The pin keeps the entry from being deleted while a reference to its storage is taken, which
    // happens without the lock.
    if constexpr (Traits::has_references) {
      for (Entry* const entry : idle) {
        ++entry->pins;
      }
      guard.unlock();
    }
    decltype(Traits::references(idle)) references;
    try {
      references = Traits::references(idle);
      leases.reserve(idle.size());
    } catch (std::bad_alloc const&) {
      error = std::current_exception();
    }
    if constexpr (Traits::has_references) {
      guard.lock();
      for (Entry* const entry : idle) {
        --entry->pins;
      }
    }
    for (std::size_t i = 0; i < idle.size(); ++i) {
      Entry& entry = *idle[i];
      if (entry.pins != 0) {
        continue;
      }
      if (entry.is_dead) {
        dead.push_back(&entry);
      } else if (!error && Traits::is_swappable(entry) && references[i] &&
                 detach(entry, references[i], leases)) {
        bytes += entry.bytes;
      }
    }
    guard.unlock();
    memory_->release_all(leases);
  }
  for (Entry* const entry : dead) {
    delete entry;
  }
  if (bytes != 0 || !dead.empty()) {  // otherwise the patience of waiting threads would begin anew
    notify_waiters();
  }
  if (error) {
    std::rethrow_exception(error);
  }
  return bytes;
}

template <class Traits>
std::size_t OperandLeases<Traits>::reclaim() {
  (void)start_reclaim();
  std::size_t const before = memory_->stats().resident.bytes.current;
  for (BlockId const block : unleased_blocks()) {
    try {
      memory_->swap_out(block);
    } catch (ContractViolation const&) {  // NOLINT(bugprone-empty-catch): freed or in use by now
    } catch (OutOfHostMemory const&) {    // NOLINT(bugprone-empty-catch): others may need less
    }
  }
  std::size_t const after = memory_->stats().resident.bytes.current;
  return before - std::min(before, after);
}

template <class Traits>
std::size_t OperandLeases<Traits>::wake() {
  std::size_t const before = memory_->stats().resident.bytes.current;
  for (BlockId const block : unleased_blocks()) {
    Stats const now = memory_->stats();
    if (now.resident.bytes.current == now.allocated.bytes.current ||
        now.resident.bytes.current >= now.capacity_bytes) {
      break;
    }
    try {
      memory_->swap_in(block);
    } catch (ContractViolation const&) {  // NOLINT(bugprone-empty-catch): freed by now
    } catch (OutOfDeviceMemory const&) {
      break;
    }
  }
  std::size_t const after = memory_->stats().resident.bytes.current;
  return after - std::min(before, after);
}

template <class Traits>
void OperandLeases<Traits>::change_capacity(std::size_t bytes) {
  if (is_enabled_ && memory_->stats().reserved_bytes > bytes) {
    (void)try_make_room();
    (void)start_reclaim();
  }
  memory_->set_capacity(bytes);
  Guard const guard{mutex_};
  capacity_bytes_ = bytes;
  update_nearness();
}

template <class Traits>
void OperandLeases<Traits>::begin_step() {
  memory_->begin_step();
  Stats const now = memory_->stats();
  std::uint64_t const evictions = now.evicted().count;
  Guard const guard{mutex_};
  largest_.begin_step();
  bool const is_calm = evictions == std::exchange(evictions_seen_, evictions);
  if (is_calm && now.resident.bytes.current == now.allocated.bytes.current) {
    is_under_pressure_ = false;  // leases are kept again, from the next use on
  }
}

template <class Traits>
template <class Prepare, class Unpin, class Part, class End>
void OperandLeases<Traits>::release_pins(
    Pins& pins, Prepare prepare, Unpin unpin, Part part, End end, bool gives_up) {
  std::vector<Lease> leases;
  std::vector<Entry*> dead;
  {
    auto const references = Traits::references(pins);
    // seldom more are needed: for results, and for leases on other streams
    leases.reserve(pins.size() + 1);
    Guard guard{mutex_};
    prepare(leases);
    gives_up = gives_up || is_under_pressure_;
    for (std::size_t i = 0; i < pins.size(); ++i) {
      Entry& entry = *pins[i];
      if (!unpin(entry)) {
        continue;
      }
      if (entry.is_dead) {
        dead.push_back(&entry);
      } else if (gives_up && Traits::is_swappable(entry) && references[i]) {
        (void)detach(entry, references[i], leases);
      }
    }
    if (!leases.empty()) {
      guard.unlock();
      part(std::span<Lease const>{leases});
      memory_->release_all(leases);
      guard.lock();
    }
    end();
    pins.clear();  // dropping a reference may run code of the program, whose operations use `pins`
  }                // the lock is released before the references are dropped
  for (Entry* const entry : dead) {
    delete entry;
  }
}

template <class Traits>
template <class Adopt>
bool OperandLeases<Traits>::try_allocate_block(std::size_t bytes,
                                               stream_type stream,
                                               Frame const* frame,
                                               Refusal& refusal,
                                               Adopt const& adopt) {
  Request request;
  for (;;) {
    begin_try(request);
    bool const is_there = has_room(refusal, [&] {
      BlockId const block = memory_->allocate(bytes);
      Lease lease;
      try {
        if (auto const codec = default_codec_.load(std::memory_order_relaxed);
            codec != CodecChoice::none) {
          set_codec(*memory_, block, bytes, codec);
        }
        lease = memory_->acquire(block, Access::write, stream);
        adopt(block, lease);
      } catch (...) {
        lease.release();
        memory_->abandon(block);
        throw;
      }
    });
    if (is_there) {
      return true;
    }
    if (!make_room(frame, refusal, request)) {
      return false;
    }
  }
}

template <class Traits>
bool OperandLeases<Traits>::acquire_missing(Frame const& frame,
                                            std::span<Missing const> missing,
                                            stream_type stream,
                                            Refusal& refusal) {
  std::vector<Missing> mine;
  Request request;
  for (;;) {
    begin_try(request);
    bool is_elsewhere = false;  // whether another thread is acquiring one of them
    mine.clear();
    {
      Guard const guard{mutex_};
      for (Missing const& one : missing) {
        Entry& entry = *one.entry;
        if (entry.is_dead || Traits::is_granted(one)) {
          continue;
        }
        if (!std::exchange(entry.is_arriving, true)) {
          mine.push_back(one);
        } else if (std::none_of(mine.begin(), mine.end(), [&](Missing const& other) {
                     return other.entry == one.entry;
                   })) {
          is_elsewhere = true;
        }
      }
    }
    if (mine.empty()) {
      if (!is_elsewhere) {
        return true;
      }
      wait_for_arrival(request.arrivals);
      continue;
    }
    if (!acquire_all(mine, stream, refusal)) {
      ++request.arrivals;  // its own
      if (!make_room(&frame, refusal, request)) {
        return false;
      }
    }
  }
}

/// Acquires entries that this thread has marked as arriving. @returns false if there is no room
/// now; `refusal` has the reason then
template <class Traits>
bool OperandLeases<Traits>::acquire_all(std::span<Missing const> mine,
                                        stream_type stream,
                                        Refusal& refusal) {
  std::vector<Lease> leases;
  std::exception_ptr error;
  try {
    std::vector<LeaseRequest> requests;
    requests.reserve(mine.size());
    for (Missing const& one : mine) {
      requests.push_back({one.entry->block, Traits::access(one)});
      if constexpr (requires { Traits::extends_recipe(one); }) {
        requests.back().extends_recipe = Traits::extends_recipe(one);
      }
    }
    (void)has_room(refusal, [&] { leases = memory_->acquire_all(requests, stream); });
  } catch (...) {
    error = std::current_exception();
  }
  {
    Guard const guard{mutex_};
    for (std::size_t i = 0; i < mine.size(); ++i) {
      mine[i].entry->is_arriving = false;
      if (!leases.empty()) {
        Traits::grant(mine[i], leases[i], stream);
      }
    }
  }
  bool const has_arrived = !leases.empty();
  leases.clear();  // the leases that were replaced
  note_arrival();
  if (error) {
    std::rethrow_exception(error);
  }
  return has_arrived;
}

/// Blocks until there is a reason to try again. @returns false if no thread is left that could
/// release memory, or after `patience`
template <class Traits>
bool OperandLeases<Traits>::wait_for_release(Frame const* frame, Request const& request) {
  [[maybe_unused]] auto const others_run = Traits::release_interpreter();
  Guard guard{mutex_};
  int const own_frames = frame != nullptr ? frame->thread_frames() : 0;
  // code of the program runs inside of a thread's other frames, so these are open-ended
  int const own_bounded = frame != nullptr && frame->is_bounded ? 1 : 0;
  starving_frames_ += own_frames;
  bounded_frames_ -= own_bounded;
  auto const has_changed = [&] {
    return releases() != request.releases ||
           (request.tries < most_tries && arrivals_.load() != request.arrivals);
  };
  auto const is_deadlock = [&] { return counts_.active_frames <= starving_frames_ && loans_ == 0; };
  if (!has_changed() && !is_deadlock()) {
    ++counts_.waits;
    // this thread's frame may now depend on others, so it does not count as bounded
    changed_.notify_all();
    wait_until(guard, [&] { return has_changed() || is_deadlock(); });
  }
  starving_frames_ -= own_frames;
  bounded_frames_ += own_bounded;
  // waiting threads check again whether one that could release memory still runs
  changed_.notify_all();
  return has_changed();
}

}  // namespace spillway::framework
