// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/interop/framework/codec_choice.hpp>
#include <spillway/interop/framework/object_order.hpp>
#include <spillway/interop/framework/operand_leases.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace spillway::framework {

/// One buffer among the operands of an operation.
struct BufferUse {
  void* address = nullptr;
  bool writes = false;  ///< the operation may change it
};

/// The state of one buffer. It belongs to a `BufferLeases` and is guarded by its lock.
template <class Lease>
struct BufferEntry {
  BlockId block{};
  Lease lease{};
  void* address = nullptr;
  std::size_t bytes = 0;
  std::uint32_t pins = 0;     // by frames; the buffer is not swapped out while there are any
  bool is_swappable = false;  // only operations use it
  bool is_kept = false;       // other code knows its address: it stays resident
  bool is_arriving = false;   // one thread is acquiring the lease
  bool is_dead = false;       // freed, but still pinned; the last unpin deletes this
  BufferEntry* previous = this;
  BufferEntry* next = this;

  [[nodiscard]] bool has_lease() const noexcept { return static_cast<bool>(lease); }
  [[nodiscard]] bool is_fixed() const noexcept { return !is_swappable || is_kept; }
};

/// The buffers that one operation has in use, from `BufferLeases::try_enter` to `exit`.
template <class Lease>
class BufferFrame {
 public:
  /// @param depth     number of frames that the thread is inside of, this one included; 0 for a
  ///                  frame that belongs to no thread, for which other threads do not wait
  /// @param may_wait  whether `try_enter` may wait until other frames with this option have ended
  explicit BufferFrame(int depth = 0, bool may_wait = false) : depth_{depth}, may_wait_{may_wait} {}
  BufferFrame(BufferFrame const&) = delete;
  BufferFrame& operator=(BufferFrame const&) = delete;

  [[nodiscard]] int depth() const noexcept { return depth_; }
  [[nodiscard]] int thread_frames() const noexcept { return depth_; }
  /// Always true, since an operation may call the program's code, and may wait for operations of
  /// other threads.
  [[nodiscard]] static bool is_open_ended() noexcept { return true; }
  /// The size of the last request of this frame that could not be met; 0 if all were.
  [[nodiscard]] std::size_t refused_bytes() const noexcept { return refused_bytes_; }

  /// Whether what the operation allocates belongs to it. The framework's allocator reads this.
  bool pins_results = true;

  // The following are set by `BufferLeases`.
  bool is_counted = false;
  bool is_bounded = false;
  BufferFrame* previous = this;  // in the ring of all open frames, or of those that wait to open
  BufferFrame* next = this;

 private:
  template <class>
  friend class BufferLeases;

  int depth_;
  bool may_wait_;
  bool is_open_ = false;
  // it is open, and other frames with `may_wait` may have to wait for it
  bool is_waited_for_ = false;
  std::thread::id thread_{};  // the thread that opened it
  std::size_t refused_bytes_ = 0;
  std::size_t pinned_bytes_ = 0;
  std::shared_ptr<void> claim_hold_;  // keeps what was claimed of a shared device
  std::vector<BufferEntry<Lease>*> pins_;
};

/// The traits of `OperandLeases` for buffers. A buffer keeps its address, so no address has to be
/// set or cleared when its lease begins or ends.
template <class Allocator>
struct BufferTraits {
  using allocator_type = Allocator;
  using Lease = typename Allocator::lease_type;
  using Entry = BufferEntry<Lease>;
  using Frame = BufferFrame<Lease>;
  struct Missing {
    Entry* entry = nullptr;
    bool writes = false;
  };
  /// Empty: nobody can destroy a buffer that is pinned, so no references are needed.
  struct References {
    bool operator[](std::size_t /*i*/) const noexcept { return true; }
  };

  static constexpr bool has_references = false;
  [[nodiscard]] static bool can_repeat(Frame const& /*frame*/) noexcept { return false; }

  [[nodiscard]] static bool is_granted(Missing const& one) noexcept {
    return one.entry->lease && !(one.writes && one.entry->lease.access() == Access::read);
  }
  [[nodiscard]] static Access access(Missing const& one) noexcept {
    return one.writes ? Access::read_write : Access::read;
  }
  template <class Stream>
  static void grant(Missing const& one, Lease& lease, Stream /*stream*/) noexcept {
    // the old lease, for less access, ends later, without the lock
    std::swap(one.entry->lease, lease);
  }
  [[nodiscard]] static bool is_swappable(Entry const& entry) noexcept {
    return !entry.is_fixed() && entry.lease;
  }
  [[nodiscard]] static References references(std::span<Entry* const> /*entries*/) noexcept {
    return {};
  }
  [[nodiscard]] static bool detach(Entry& entry, bool /*is_alive*/, std::vector<Lease>& leases) {
    leases.push_back(std::move(entry.lease));
    return true;
  }
  [[nodiscard]] static int release_interpreter() noexcept { return 0; }
};

/// Leases the buffers of a framework's operations while they run, and lets them be swapped out in
/// between. It is for frameworks that keep raw addresses, so the allocator's blocks must keep
/// theirs. The adapter for TensorFlow uses this class, which itself knows nothing of TensorFlow.
///
/// A new buffer is leased. Once it is the result of an operation (`make_swappable`), it may be
/// swapped out while no frame uses it; the next frame that uses it brings it back to the same
/// address. `OperandLeases` describes when that happens.
///
/// Two operations that have each got half of their memory, and wait for the other's, would both
/// fail. To avoid that, a frame with the option `may_wait` opens while others of these are open
/// only if it fits beside them, together with what all of them may still allocate. That is
/// estimated as four buffers of the largest size seen, for each frame. The estimate is used once a
/// whole step has brought no larger buffer; until then a second frame opens only if room is not
/// scarce (`is_room_scarce`). Frames that have to wait open in the order in which they came, so
/// that a large operation does not wait behind ever more small ones. That order holds only while
/// all frames that are open have the option `may_wait`. Any other one may depend on an operation
/// that waits behind the first.
///
/// Threads  thread-safe. The lock is never held while the allocator is called.
/// Streams  leases belong to the stream given to the constructor. A thread waits on the host only
///          for other threads' frames.
/// Address  fixed as long as the buffer lives; may be accessed only inside of a frame that uses the
///          buffer.
template <class Allocator>
class BufferLeases : public OperandLeases<BufferTraits<Allocator>> {
  static_assert(Allocator::keeps_addresses, "buffers have one address for life");
  using Base = OperandLeases<BufferTraits<Allocator>>;
  using Entry = typename Base::Entry;

 public:
  using Lease = typename Base::Lease;
  using stream_type = typename Base::stream_type;
  using Frame = typename Base::Frame;

  /// `memory` is not owned and must outlive this object; see `OperandLeases`.
  ///
  /// @param patience  how long a thread waits for other threads' operations while none of them
  ///                  releases memory. If some do, it waits `most_waits` times as long at most
  explicit BufferLeases(Allocator& memory,
                        stream_type stream,
                        std::chrono::milliseconds patience = std::chrono::seconds{10})
      : Base{memory, patience}, stream_{stream} {}
  ~BufferLeases() {
    while (!buffers_.empty()) {
      (void)free(buffers_.begin()->first);
    }
  }

  /// Returns a new buffer, or null if no room can be made. If `frame` is open, it pins the buffer.
  [[nodiscard]] void* try_allocate(std::size_t bytes, Frame* frame);
  /// @returns false if there is no buffer at that address
  bool free(void* address) noexcept;
  [[nodiscard]] bool owns(void* address) const {
    Guard const guard{mutex_};
    return find(address) != nullptr;
  }
  /// Returns the address of the buffer that contains an address, or null if there is none. O(1) for
  /// the first byte of a buffer, else O(n): only code outside of operations asks for other
  /// addresses.
  [[nodiscard]] void* base_of(void* address) const {
    Guard const guard{mutex_};
    if (find(address) != nullptr) {
      return address;
    }
    auto const holds = [address](auto const& buffer) {
      auto const* const begin = static_cast<std::byte const*>(buffer.first);
      std::less_equal<> const is_before;
      return is_before(begin, static_cast<std::byte const*>(address)) &&
             !is_before(begin + buffer.second->bytes, static_cast<std::byte const*>(address));
    };
    auto const found = std::find_if(buffers_.begin(), buffers_.end(), holds);
    return found == buffers_.end() ? nullptr : found->first;
  }

  /// Sets the codec with which a buffer is swapped out. Ignored if there is no buffer at the
  /// address.
  ///
  /// @pre no other thread frees the buffer during the call
  void set_codec(void* address, CodecChoice choice) {
    BlockId block{};
    std::size_t bytes = 0;
    {
      Guard const guard{mutex_};
      Entry const* const entry = find(address);
      if (entry == nullptr) {
        return;
      }
      block = entry->block;
      bytes = entry->bytes;
    }
    framework::set_codec(*this->memory_, block, bytes, choice);
  }

  /// Opens a frame: pins the buffers and swaps in those that are not resident. Addresses at which
  /// there is no buffer are ignored.
  ///
  /// @returns an empty string if the frame is open; else the reason, and then nothing is pinned
  [[nodiscard]] std::string try_enter(Frame& frame, std::span<BufferUse const> uses);
  /// Ends a frame: its buffers may be swapped out.
  void exit(Frame& frame) noexcept;

  /// Lets buffers be swapped out, since only operations use them from now on.
  void make_swappable(std::span<void* const> addresses) { set_swappable(addresses, false); }
  /// Keeps buffers resident for good, since other code knows their addresses.
  void keep(std::span<void* const> addresses) { set_swappable(addresses, true); }

  /// Swaps out everything that no frame has pinned, and waits on the host until that is done.
  ///
  /// @returns the bytes that were swapped out
  std::size_t reclaim() {
    std::size_t const bytes = Base::reclaim();
    this->memory_->synchronize();
    {
      Guard const guard{mutex_};
      ++sizes_.full_reclaims;
    }
    update_peak_reclaimed();
    return bytes;
  }
  /// As the base. If the step has brought no larger buffer, the largest size counts as known.
  void begin_step() {
    Base::begin_step();
    Guard const guard{mutex_};
    most_pinned_.begin_step();
  }
  /// Orders operations that use the same variables; see `ObjectOrder`.
  [[nodiscard]] ObjectOrder& objects() noexcept { return objects_; }

  void before_fork() {
    objects_.before_fork();
    Base::before_fork();
  }
  void after_fork_in_parent() noexcept {
    Base::after_fork_in_parent();
    objects_.after_fork_in_parent();
  }
  void after_fork_in_child(Frame const* frame) {
    open_frames_ = 0;  // frames with `may_wait` run no code that could fork
    waiting_.previous = waiting_.next = &waiting_;  // those that wait are of other threads
    forget_frames_of_others();
    Base::after_fork_in_child(frame);
    objects_.after_fork_in_child();
  }
  /// As the base; the bytes count as those of `reclaim`.
  std::size_t park(HostTier level = HostTier::pinned) {
    return Base::park(level, [this] { (void)reclaim(); });
  }

  /// Numbers and bytes of buffers.
  struct Sizes {
    std::size_t buffers = 0;
    std::size_t bytes = 0;  // of all buffers, resident or not
    std::size_t peak_bytes = 0;
    std::size_t largest_bytes = 0;  // size of the largest buffer since the peaks were reset
    std::size_t active_bytes = 0;   // of buffers that frames have pinned
    std::size_t peak_active_bytes = 0;
    // of buffers that are never swapped out: not the result of an operation yet, or kept
    std::size_t fixed_bytes = 0;
    std::size_t peak_reclaimed_bytes = 0;
    std::uint64_t allocations = 0;
    std::uint64_t full_reclaims = 0;
  };
  struct Counts : OperationCounts, Sizes {};
  [[nodiscard]] Counts counts() const {
    Guard const guard{mutex_};
    return {this->counts_, sizes_};
  }
  /// Why the last request could not be met; empty if every request was met.
  [[nodiscard]] std::string last_failure() const {
    Guard const guard{mutex_};
    return failure_;
  }
  /// Sets the peaks to the current values, and those of swapped-out bytes and of the largest buffer
  /// to 0. Other counts continue.
  void reset_peaks();
  /// As `reset_peaks`, and sets the count of allocations to 0.
  void reset_stats() {
    reset_peaks();
    Guard const guard{mutex_};
    sizes_.allocations = 0;
  }
  /// The state of one buffer.
  struct View {
    std::size_t bytes = 0;
    bool is_resident = false;
    bool is_in_use = false;
    bool is_swappable = false;
  };
  [[nodiscard]] View view(void* address) const;

 private:
  using Guard = typename Base::Guard;
  using Missing = typename Base::Missing;
  using Base::largest_;
  using Base::mutex_;

  [[nodiscard]] Entry* find(void* address) const {
    auto const found = buffers_.find(address);
    return found == buffers_.end() ? nullptr : found->second;
  }
  /// Whether one more frame fits beside those that are open. The caller holds the lock.
  [[nodiscard]] bool fits_beside(std::span<BufferUse const> uses) const {
    if (!largest_.is_known()) {
      return false;
    }
    std::size_t const frames = static_cast<std::size_t>(open_frames_) + 1;
    std::size_t bytes = sizes_.active_bytes + sizes_.fixed_bytes + 4 * frames * largest_.value();
    for (BufferUse const& use : uses) {
      Entry const* const entry = find(use.address);
      bytes += entry != nullptr && entry->pins == 0 ? entry->bytes : 0;
    }
    return bytes <= this->capacity_bytes_;
  }
  /// The bytes that one more frame claims of a shared device, beside the frames that are open: as
  /// much as any frame has pinned so far. While that maximum is not known, four times as much: if
  /// two programs had frames that turn out to need more than there is, neither could continue.
  [[nodiscard]] std::size_t bytes_to_claim(std::span<BufferUse const> uses) const {
    Guard const guard{mutex_};
    std::size_t used = 0;
    for (BufferUse const& use : uses) {
      Entry const* const entry = find(use.address);
      used += entry != nullptr ? this->memory_->rounded_bytes(entry->bytes) : 0;
    }
    bool const is_known = most_pinned_.is_known() && used <= most_pinned_.value();
    return sizes_.active_bytes + sizes_.fixed_bytes +
           (is_known ? 1 : 4) * std::max(used, most_pinned_.value());
  }
  /// The caller holds the lock.
  void pin(Frame& frame, Entry& entry) {
    frame.pins_.push_back(&entry);
    frame.pinned_bytes_ += this->memory_->rounded_bytes(entry.bytes);
    most_pinned_.add(frame.pinned_bytes_);
    if (entry.pins++ == 0) {
      sizes_.active_bytes += entry.bytes;
      sizes_.peak_active_bytes = std::max(sizes_.peak_active_bytes, sizes_.active_bytes);
    }
  }
  /// Adds an operand whose lease has to be acquired. If it is there already, it is leased for
  /// writing if either use writes.
  static void add(std::vector<Missing>& missing, Missing one) {
    auto const same = std::find_if(missing.begin(), missing.end(), [&one](Missing const& other) {
      return other.entry == one.entry;
    });
    if (same == missing.end()) {
      missing.push_back(one);
    } else {
      same->writes = same->writes || one.writes;
    }
  }
  /// Unpins an entry. @returns whether it has no pins any more. The caller holds the lock.
  [[nodiscard]] bool unpin(Entry& entry) noexcept {
    if (--entry.pins != 0) {
      return false;
    }
    sizes_.active_bytes -= entry.is_dead ? 0 : entry.bytes;
    return true;
  }
  // The caller of the following three functions holds the lock.

  void open(Frame& frame) noexcept {
    frame.is_open_ = true;
    frame.thread_ = std::this_thread::get_id();
    Base::join_ring(all_open_, frame);
  }
  static void close(Frame& frame) noexcept {
    Base::leave_ring(frame);
    frame.previous = frame.next = &frame;
  }
  /// For a forked child: forgets the frames that other threads had opened, since these threads do
  /// not exist there.
  void forget_frames_of_others() noexcept {
    for (Frame* frame = all_open_.next; frame != &all_open_;) {
      Frame& one = *std::exchange(frame, frame->next);
      if (one.thread_ == std::this_thread::get_id()) {
        continue;
      }
      for (Entry* const entry : one.pins_) {
        if (unpin(*entry) && entry->is_dead) {
          delete entry;
        }
      }
      one.pins_.clear();
      one.is_counted = one.is_waited_for_ = false;
      close(one);
    }
  }
  /// Whether a frame that waits, or would have to, is the first of these. It need not be the first
  /// while a frame without `may_wait` is open. The caller holds the lock.
  [[nodiscard]] bool has_turn(Frame const& frame) const noexcept {
    bool const is_first = waiting_.next == &waiting_ || waiting_.next == &frame;
    return is_first || this->counts_.active_frames > open_frames_;
  }
  void wait_until_it_fits(Guard& guard, Frame& frame, std::span<BufferUse const> uses);
  void set_swappable(std::span<void* const> addresses, bool is_kept);
  void update_peak_reclaimed();
  [[nodiscard]] std::string describe_failure(std::string const& why);

  stream_type stream_;
  std::unordered_map<void*, Entry*> buffers_;
  ObjectOrder objects_;
  Sizes sizes_{};
  std::string failure_;
  Frame all_open_{};                    // the head of a ring of all open frames
  Frame waiting_{};                     // of all frames that wait to open, the first one first
  int open_frames_ = 0;                 // only those with `may_wait`
  typename Base::Largest most_pinned_;  // bytes that one frame has pinned
};

template <class Allocator>
void* BufferLeases<Allocator>::try_allocate(std::size_t bytes, Frame* frame) {
  auto entry = std::make_unique<Entry>();
  void* address = nullptr;
  Refusal refusal;
  bool const has_room =
      this->try_allocate_block(bytes, stream_, frame, refusal, [&](BlockId block, Lease& lease) {
        Guard const guard{mutex_};
        buffers_.emplace(lease.data(), entry.get());
        address = entry->address = lease.data();
        entry->block = block;
        entry->bytes = bytes;
        entry->lease = std::move(lease);
        if (frame != nullptr && frame->is_open_) {
          pin(*frame, *entry);
        }
        this->link(*entry.release());
        ++sizes_.buffers;
        ++sizes_.allocations;
        sizes_.bytes += bytes;
        sizes_.peak_bytes = std::max(sizes_.peak_bytes, sizes_.bytes);
        sizes_.largest_bytes = std::max(sizes_.largest_bytes, bytes);
        this->count_bytes(static_cast<std::ptrdiff_t>(bytes));
        sizes_.fixed_bytes += bytes;
      });
  if (!has_room) {
    (void)describe_failure(refusal.why);
    if (frame != nullptr) {
      frame->refused_bytes_ = bytes;
    }
    return nullptr;
  }
  update_peak_reclaimed();
  return address;
}

template <class Allocator>
bool BufferLeases<Allocator>::free(void* address) noexcept {
  Lease lease;
  BlockId block{};
  std::unique_ptr<Entry> unused;
  {
    Guard const guard{mutex_};
    Entry* const entry = find(address);
    if (entry == nullptr) {
      return false;
    }
    buffers_.erase(address);
    this->unlink(*entry);
    --sizes_.buffers;
    sizes_.bytes -= entry->bytes;
    this->count_bytes(-static_cast<std::ptrdiff_t>(entry->bytes));
    sizes_.fixed_bytes -= entry->is_fixed() ? entry->bytes : 0;
    block = entry->block;
    lease = std::move(entry->lease);
    entry->is_dead = true;
    if (entry->pins == 0) {
      unused.reset(entry);
    } else {
      sizes_.active_bytes -= entry->bytes;
    }
  }
  lease.release();
  this->memory_->abandon(block);
  this->notify_waiters();
  return true;
}

/// Waits while a frame with `may_wait` does not fit beside the open ones. The frame has pinned
/// nothing yet. Gives up after `patience` without any release, since an open frame may wait for an
/// asynchronous one that depends on this thread; the frame then opens at its own risk.
template <class Allocator>
void BufferLeases<Allocator>::wait_until_it_fits(Guard& guard,
                                                 Frame& frame,
                                                 std::span<BufferUse const> uses) {
  if (frame.may_wait_) {
    auto const may_begin = [&] {
      return !this->is_room_scarce() ||
             (has_turn(frame) && (open_frames_ == 0 || fits_beside(uses)));
    };
    if (!may_begin()) {
      Base::join_ring(waiting_, frame);
      for (int i = 0; i < Base::most_waits; ++i) {
        ++this->counts_.waits;
        std::uint64_t const seen = this->changes();
        if (this->wait_until(guard, may_begin) || this->changes() == seen) {
          break;
        }
      }
      close(frame);
      this->wake_waiters();  // another one is the first now
    }
    frame.is_waited_for_ = true;
    ++open_frames_;
  }
}

template <class Allocator>
std::string BufferLeases<Allocator>::try_enter(Frame& frame, std::span<BufferUse const> uses) {
  if (frame.may_wait_ && this->is_shared()) {
    frame.claim_hold_ = this->hold_claim(bytes_to_claim(uses));
  }
  std::vector<Missing> missing;
  {
    Guard guard{mutex_};
    wait_until_it_fits(guard, frame, uses);
    open(frame);
    if (frame.depth() > 0) {
      this->count(frame);
    }
    ++this->counts_.frames;
    for (BufferUse const& use : uses) {
      if (Entry* const entry = find(use.address)) {
        pin(frame, *entry);
        if (Missing const one{entry, use.writes}; !BufferTraits<Allocator>::is_granted(one)) {
          add(missing, one);
        }
      }
    }
  }
  if (missing.empty()) {
    return {};
  }
  try {
    Refusal refusal;
    if (this->acquire_missing(frame, missing, stream_, refusal)) {
      update_peak_reclaimed();
      return {};
    }
    std::string failure = describe_failure(refusal.why);
    exit(frame);
    return failure;
  } catch (...) {
    exit(frame);
    throw;
  }
}

template <class Allocator>
void BufferLeases<Allocator>::exit(Frame& frame) noexcept {
  {
    // An asynchronous operation may end before the call that began it returns. No frame would unpin
    // what that call still allocates, so it is not pinned.
    Guard const guard{mutex_};
    frame.is_open_ = false;
  }
  auto const end = [&] {
    if (std::exchange(frame.is_waited_for_, false)) {
      --open_frames_;
    }
    this->uncount(frame);
  };
  this->release_pins(
      frame.pins_,
      [&](auto const& /*leases*/) { close(frame); },
      [this](Entry& entry) { return unpin(entry); },
      end);
  frame.pinned_bytes_ = 0;
  frame.claim_hold_.reset();
  this->notify_waiters();
}

template <class Allocator>
void BufferLeases<Allocator>::set_swappable(std::span<void* const> addresses, bool is_kept) {
  std::vector<Lease> leases;  // of unused buffers: they may be swapped out at once
  Guard guard{mutex_};
  for (void* const address : addresses) {
    if (Entry* const entry = find(address)) {
      bool const was_fixed = entry->is_fixed();
      entry->is_swappable = true;
      entry->is_kept = entry->is_kept || is_kept;
      if (was_fixed && !entry->is_kept) {
        sizes_.fixed_bytes -= entry->bytes;
      } else if (!was_fixed && entry->is_kept) {
        sizes_.fixed_bytes += entry->bytes;
      }
      if (this->is_under_pressure_ && entry->pins == 0 &&
          BufferTraits<Allocator>::is_swappable(*entry)) {
        leases.push_back(std::move(entry->lease));
      }
    }
  }
  guard.unlock();
  if (!leases.empty()) {
    leases.clear();
    this->notify_waiters();
  }
}

/// Updates the peak of the swapped-out bytes, which can only grow under pressure.
template <class Allocator>
void BufferLeases<Allocator>::update_peak_reclaimed() {
  if (!this->is_under_pressure_) {
    return;
  }
  Stats const now = this->memory_->stats();
  std::size_t const away = now.allocated.bytes.current - now.resident.bytes.current;
  Guard const guard{mutex_};
  sizes_.peak_reclaimed_bytes = std::max(sizes_.peak_reclaimed_bytes, away);
}

template <class Allocator>
void BufferLeases<Allocator>::reset_peaks() {
  this->memory_->reset_peak_stats();
  Guard const guard{mutex_};
  sizes_.peak_bytes = sizes_.bytes;
  sizes_.peak_active_bytes = sizes_.active_bytes;
  sizes_.peak_reclaimed_bytes = 0;
  sizes_.largest_bytes = 0;
}

template <class Allocator>
auto BufferLeases<Allocator>::view(void* address) const -> View {
  View seen;
  BlockId block{};
  {
    Guard const guard{mutex_};
    Entry const* const entry = find(address);
    if (entry == nullptr) {
      return seen;
    }
    block = entry->block;
    seen = View{.bytes = entry->bytes,
                .is_resident = entry->has_lease(),
                .is_in_use = entry->pins != 0,
                .is_swappable = !entry->is_fixed()};
  }
  if (!seen.is_resident) {
    try {
      seen.is_resident = this->memory_->residency(block) == Residency::device;
    } catch (ContractViolation const&) {
      return {};  // freed meanwhile
    }
  }
  return seen;
}

template <class Allocator>
std::string BufferLeases<Allocator>::describe_failure(std::string const& why) {
  Guard const guard{mutex_};
  ++this->counts_.out_of_memory;
  failure_ = why + " The limit is " + std::to_string(this->capacity_bytes_) +
             " bytes: set_lms_limit. " +
             (this->is_enabled_ ? "" : "Support for large models is off: set_lms_enabled(True). ") +
             std::to_string(sizes_.active_bytes) + " bytes are in use by " +
             std::to_string(this->counts_.active_frames) + " operations, " +
             std::to_string(sizes_.fixed_bytes) + " bytes can never leave.";
  return failure_;
}

}  // namespace spillway::framework
