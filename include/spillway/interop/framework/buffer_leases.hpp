// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/pager.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace spillway::framework {

/// One buffer among the operands of an operation.
struct BufferUse {
  void* address = nullptr;
  bool writes = false;  ///< the operation may change it
};

/// Stands between a framework that keeps raw addresses and an allocator whose blocks keep theirs:
/// gives buffers memory, holds it while operations use it, and lets it leave in between.
///
/// A buffer begins leased. Once it has been shown as the result of an operation it may leave: as long as
/// memory suffices its lease is simply kept, and once an allocation has failed the desk is *under
/// pressure*: what no frame has in use gives its lease up, so that the pager may swap it out. The
/// next frame that has it among its operands acquires it again, at the same address.
///
/// Under pressure, and when it may not be far, operations that may run alone do so: two that are halfway
/// and wait for each other's memory could otherwise both fail.
///
/// Threads  thread-safe. The lock is held for bookkeeping alone, never while the allocator is called.
/// Streams  leases belong to the stream given to the constructor; threads wait only for frames of others.
/// Address  of a buffer: fixed for its life; to be used inside a frame that has it, only.
template <class Allocator>
class BufferLeases {
  static_assert(Allocator::State::keeps_addresses, "buffers have one address for life");

 public:
  using Lease = typename Allocator::lease_type;
  using stream_type = typename Allocator::stream_type;

  static constexpr bool is_thread_safe = true;

 private:
  struct Buffer {
    BlockId block{};
    Lease lease{};
    void* address = nullptr;
    std::size_t bytes = 0;
    std::uint32_t pins = 0;  // by frames; it is not let go before they end
    bool may_leave = false;
    bool is_kept = false;
    bool is_arriving = false;  // one thread is acquiring the lease
    bool is_dead = false;      // freed; the last pin deletes this
    Buffer* previous = this;
    Buffer* next = this;
  };

 public:
  /// What one operation has in use, from `try_enter` to `leave`.
  class Frame {
   public:
    /// @param depth      how many frames the thread is inside, with this one; 0 for one that is held by no
    ///                   thread, which others do not wait for
    /// @param runs_alone whether it may have to wait until no other such frame is open
    explicit Frame(int depth = 0, bool runs_alone = false)
        : depth_{depth}, runs_alone_{runs_alone} {}
    Frame(Frame const&) = delete;
    Frame& operator=(Frame const&) = delete;
    [[nodiscard]] int depth() const noexcept { return depth_; }
    /// The last request of this frame that could not be met; 0 if all were.
    [[nodiscard]] std::size_t refused_bytes() const noexcept { return refused_bytes_; }

   private:
    friend BufferLeases;
    int depth_;
    bool runs_alone_;
    bool is_alone_ = false;
    bool is_counted_ = false;
    std::size_t refused_bytes_ = 0;
    std::vector<Buffer*> pins_;
  };

  /// `memory` is not owned and must outlive the desk. It should have `lease_wait` zero: threads wait
  /// for each other here.
  /// @param patience  how long to wait for operations of others while nothing is released
  explicit BufferLeases(Allocator& memory,
                      stream_type stream,
                      std::chrono::milliseconds patience = std::chrono::seconds{10})
      : memory_{&memory}, stream_{stream}, patience_{patience} {}
  BufferLeases(BufferLeases const&) = delete;
  BufferLeases& operator=(BufferLeases const&) = delete;
  ~BufferLeases();

  /// A buffer, in use by `frame` if there is one. Null if room cannot be made.
  [[nodiscard]] void* try_allocate(std::size_t bytes, Frame* frame);
  /// @returns false if there is no buffer at that address
  bool free(void* address) noexcept;
  [[nodiscard]] bool owns(void* address) const;
  [[nodiscard]] std::size_t bytes_of(void* address) const;

  /// Opens a frame: pins the buffers and brings in those that are away. Other addresses are ignored.
  ///
  /// @returns why not, empty if it has; nothing is pinned otherwise
  [[nodiscard]] std::string try_enter(Frame& frame, std::span<BufferUse const> uses);
  /// Says that operations alone use these buffers from now on, or that others know their addresses.
  void show(std::span<void* const> addresses, bool is_kept);
  /// Ends a frame: what it had in use may leave.
  void leave(Frame& frame) noexcept;

  /// Lets everything that is not in use leave when room is needed. @returns bytes that may leave now
  std::size_t start_reclaim();
  /// Makes everything that is not in use leave, and waits until it is gone. @returns bytes that left
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
  /// Says how much of the capacity there really is, if somebody else has taken some.
  void set_limit(std::size_t limit_bytes) noexcept { limit_bytes_ = limit_bytes; }

  struct Counts {
    std::size_t buffers = 0;
    std::size_t bytes = 0;  // of all buffers, wherever they are
    std::size_t peak_bytes = 0;
    std::size_t largest_bytes = 0;  // of one buffer, since the peaks were reset
    std::size_t largest_ever_bytes = 0;
    std::size_t active_bytes = 0;  // in use by frames
    std::size_t peak_active_bytes = 0;
    std::size_t fixed_bytes = 0;  // never leave: not shown, or kept
    std::size_t peak_reclaimed_bytes = 0;
    std::uint64_t allocations = 0;
    std::uint64_t frames = 0;
    std::uint64_t waits = 0;          // times a thread waited for other threads' frames
    std::uint64_t out_of_memory = 0;  // requests that could not be met
    std::uint64_t pressures = 0;      // times pressure began
    std::uint64_t full_reclaims = 0;
  };
  [[nodiscard]] Counts counts() const;
  /// Why the last request could not be met; empty if all were.
  [[nodiscard]] std::string last_failure() const {
    Guard const guard{mutex_};
    return failure_;
  }
  void reset_peaks();
  /// What a buffer's state is.
  struct View {
    std::size_t bytes = 0;
    bool is_resident = false;
    bool is_in_use = false;
    bool may_leave = false;
  };
  [[nodiscard]] View view(void* address) const;
  [[nodiscard]] Allocator& memory() const noexcept { return *memory_; }

 private:
  using Guard = std::unique_lock<std::mutex>;

  [[nodiscard]] Buffer* find(void* address) const {
    auto const found = buffers_.find(address);
    return found == buffers_.end() ? nullptr : found->second;
  }
  /// Whether the lease that a buffer has is one for this use.
  [[nodiscard]] static bool allows(Buffer const& one, BufferUse const& use) noexcept {
    return one.lease && !(use.writes && one.lease.access() == Access::read);
  }
  static void merge(std::vector<BufferUse>& uses, BufferUse const& use) {
    auto const same = std::find_if(uses.begin(), uses.end(), [&use](BufferUse const& one) {
      return one.address == use.address;
    });
    if (same == uses.end()) {
      uses.push_back(use);
    } else {
      same->writes = same->writes || use.writes;
    }
  }
  /// Whether two operations at once might not fit. The lock is held.
  [[nodiscard]] bool is_tight() const noexcept {
    std::size_t const expected = counts_.bytes + 8 * counts_.largest_ever_bytes;
    return is_under_pressure_ || std::max(expected, 2 * counts_.bytes) > limit_bytes_;
  }
  [[nodiscard]] static bool can_go(Buffer const& one) noexcept {
    return one.pins == 0 && one.may_leave && !one.is_kept && one.lease;
  }
  void pin(Frame& frame, Buffer& one);
  void await_solitude(Guard& guard, Frame& frame);
  [[nodiscard]] std::string attach(Frame const& frame, std::vector<BufferUse> const& wanted);
  [[nodiscard]] bool make_room(Frame const* frame, std::uint64_t seen);
  [[nodiscard]] bool await_others(Frame const* frame, std::uint64_t seen);
  void tell_waiters() noexcept;
  void note_reclaimed();
  [[nodiscard]] std::string explain(std::string const& why);

  Allocator* memory_;
  stream_type stream_;
  std::chrono::milliseconds patience_;
  mutable std::mutex mutex_;  // guards all that is not atomic
  std::condition_variable changed_;
  std::unordered_map<void*, Buffer*> buffers_;
  Buffer all_{};  // head of a ring
  Counts counts_{};
  std::string failure_;
  bool is_alone_taken_ = false;
  std::uint64_t evictions_seen_ = 0;
  std::atomic<std::size_t> limit_bytes_{memory_->stats().capacity_bytes};
  std::atomic<bool> is_enabled_{true};
  std::atomic<bool> is_under_pressure_{false};
  std::atomic<int> active_{0};    // frames that threads are inside of
  std::atomic<int> starving_{0};  // of which wait for memory
  std::atomic<int> waiters_{0};
  std::atomic<std::uint64_t> releases_{0};
};

}  // namespace spillway::framework

#include <spillway/interop/framework/buffer_leases/frames.hpp>
#include <spillway/interop/framework/buffer_leases/room.hpp>
