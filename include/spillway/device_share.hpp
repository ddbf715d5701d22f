// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/core/owned_thread.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/share/share_table.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace spillway {

/// Memory whose capacity can be changed while it is in use: a `DeviceAllocator`, or an adapter that
/// wraps one for a framework.
///
/// | expression                 | must                                                          |
/// |----------------------------|---------------------------------------------------------------|
/// | `m.stats()`                | return its `Stats`                                            |
/// | `m.set_capacity(bytes)`    | do as `DeviceAllocator::set_capacity` does                    |
/// | `M::lease_type`, optional  | be the type of leases that only the program ends              |
/// | `m.rounded_bytes(bytes)`,  | return `bytes` rounded up to the unit in which it uses its    |
/// | optional                   | capacity, such as a page; without it the unit is 256 bytes    |
///
/// The functions must be thread-safe. A memory that has `lease_type` is not asked for a capacity
/// below what is leased. An adapter that keeps leases which it ends when its capacity is lowered
/// must not have that name, since it would never be asked to end them.
template <class M>
concept LimitedMemory = requires(M& memory, M const& constant, std::size_t bytes) {
  { constant.stats() } -> std::convertible_to<Stats>;
  memory.set_capacity(bytes);
};

/// Options of `DeviceShare`: how a program takes part in sharing a device. Times below 0 mean 0,
/// those above 100 years mean 100 years.
struct ShareOptions {
  /// The file by which the programs find each other: any path that all of them can open, best in
  /// memory (`/dev/shm/NAME`). A file that does not exist is created with permissions for its owner
  /// only. It is not removed at the end.
  std::string file;
  /// The bytes that this program is promised, whatever the others want, rounded up to whole pages
  /// if its memory consists of pages. If the program must never wait for others, this is at least
  /// what one of its operations needs at once.
  std::size_t least_bytes = 32_MiB;
  /// If two programs together want more than there is, the one with twice the weight gets twice as
  /// much. From 1e-6 to 1e6.
  double weight = 1;
  /// How often the program's thread checks what the others want. 0: there is no thread, and the
  /// program checks when it calls `update`. A call that waits for others checks every 20 ms or more
  /// often.
  std::chrono::milliseconds period{20};
  /// A program that has leased nothing for this time counts as idle. What it holds beyond
  /// `least_bytes` goes to programs that are not idle, if they want it.
  std::chrono::milliseconds idle_after{2000};
  /// How long the constructor, `retry` and `claim` wait for others to give up memory.
  std::chrono::milliseconds patience{10'000};
};

/// The result of `DeviceShare::claim`.
enum class ClaimResult : std::uint8_t {
  granted,       ///< the capacity is at least the claim now
  refused,       ///< the claim exceeds the whole capacity, or others did not give it up in time
  is_in_the_way  ///< another program lacks memory that leases of this program hold
};

/// Lets several programs share one device: adjusts the capacity of this program's memory to its
/// share while the program runs.
///
/// The programs divide one capacity by what each of them wants. A program that is alone, or the
/// only one that is not idle, has all of it; otherwise each has its fair share. When a share
/// shrinks, `DeviceShare` lowers the capacity of the memory, and blocks are swapped out. A program
/// gives up what exceeds its share before others take it, so together they never use more than the
/// capacity. A program that ends, even by a crash, gives back all that it had. docs/sharing.md says
/// how shares are computed.
///
/// Every program must make its memory with the same capacity, which is that of all programs
/// together, and should make its `DeviceShare` before it has allocated much. Memory that grows in
/// place or maps pages can be given up in any amount; other memory only in whole free reservations.
///
/// ```cpp
/// DeviceAllocator<> memory{
///     {.capacity_bytes = 20_GiB, .initial_bytes = 0, .grows_in_place = true}};
/// DeviceShare share{memory, {.file = "/dev/shm/gpu0"}};
/// auto const lease = share.retry([&] { return tensor.acquire_write(stream); });
/// ```
///
/// Threads  thread-safe. The object runs a thread that calls `update`, unless the period is 0.
/// Errors   an exception on that thread is rethrown by the next `update`, `claim` or `members`.
/// Leases   memory under leases is given up when they end; nothing waits for that. But a lease that
///          begins while the capacity is being lowered, or a full host pool, can make
///          `set_capacity` wait, for at most `PagerOptions::lease_wait`. The calls of this object
///          wait meanwhile, so a program whose threads hold leases for long should make its memory
///          with a `lease_wait` of 0.
/// Fork     a forked child takes no part: its memory keeps the capacity that it had at the fork.
/// @tparam Clock  measures how long the program has leased nothing
template <LimitedMemory Memory, class Clock = std::chrono::steady_clock>
class DeviceShare {
 public:
  /// Joins the programs that share `options.file`. The present capacity of `memory` is what the
  /// programs share. The constructor lowers it to `least_bytes`, so blocks beyond that are swapped
  /// out, and waits on the host for at most `patience` until the others have left `least_bytes` to
  /// this program. `memory` is not owned and must outlive this object.
  ///
  /// @throws ContractViolation if the other programs share another capacity, or are promised so
  ///         much that `least_bytes` are not left; if the weight is not allowed; if the file has
  ///         other contents or 64 programs share it already; std::system_error if the file cannot
  ///         be used, for example because it is a symbolic link, or if there can be no thread;
  ///         OutOfDeviceMemory if the others do not give up what this program is promised, or if
  ///         its leases hold more than that; and as `update`
  DeviceShare(Memory& memory, ShareOptions options)
      : memory_{memory},
        options_{limited(std::move(options))},
        most_bytes_{memory.stats().capacity_bytes},
        table_{options_.file, most_bytes_, least_bytes(), options_.weight} {
    std::size_t const least = least_bytes();
    memory.set_capacity(least);
    try {
      std::size_t const first = std::max<std::size_t>(least, memory.stats().reserved_bytes);
      if (claim(first) != ClaimResult::granted) {
        throw OutOfDeviceMemory{
            MemoryReport{.requested_bytes = first, .capacity_bytes = most_bytes_},
            "The programs that share the device did not give up what this one is promised."};
      }
      if (options_.period.count() > 0) {
        updater_.start([this] { run(); });
      }
    } catch (...) {
      memory.set_capacity(most_bytes_);
      throw;
    }
  }
  DeviceShare(DeviceShare const&) = delete;
  DeviceShare& operator=(DeviceShare const&) = delete;
  /// Leaves: what this program held is free for the others. The memory keeps its present capacity
  /// and should be destroyed, too, since the others now count on that memory.
  ~DeviceShare() { updater_.end(mutex_); }

  /// Tells the other programs what this one wants, and adjusts the capacity of the memory: lowers
  /// it if another program lacks what this one has beyond its share, and raises it to what this
  /// program may use now. Memory of leased blocks is given up by a later call.
  ///
  /// @throws std::system_error, DeviceError, FileTierError: the share is then as it was
  /// @stream as `DeviceAllocator::set_capacity`
  void update() {
    if (!table_.is_own()) {
      return;
    }
    std::scoped_lock const guard{mutex_};
    throw_noted();
    (void)update_locked();
  }

  /// Calls `act`, which acquires or allocates, and returns its result. If `act` throws
  /// OutOfDeviceMemory and a larger share could help, claims that share, waits on the host until
  /// the others have given it up, and calls `act` again.
  ///
  /// @throws OutOfDeviceMemory if the whole capacity would not do, the others did not give up
  ///         enough within `patience`, or the memory that `act` lacks is not that of this share;
  ///         and as `act` and `update`
  template <std::invocable Act>
  std::invoke_result_t<Act&> retry(Act act) {
    std::optional<ClaimHold> hold;
    for (std::optional<std::uint64_t> seen;;) {
      try {
        return act();
      } catch (OutOfDeviceMemory const& error) {
        if (!hold) {
          hold.emplace(*this);
        }
        bool const is_granted = claim(bytes_to_claim(error.report())) == ClaimResult::granted;
        std::uint64_t const changes = capacity_changes_;
        if (!is_granted || std::exchange(seen, changes) == changes) {
          throw;  // if granted, `act` has failed with this capacity before
        }
      }
    }
  }

  /// Scope guard around the call for which this program has made a claim: the claim does not expire
  /// while the guard exists. Without it another program could get the memory before the call has
  /// used it. It must be destroyed before the `DeviceShare`.
  ///
  /// Cost  locks a mutex at its beginning and its end. Does nothing in a forked child.
  class ClaimHold {
   public:
    explicit ClaimHold(DeviceShare& share) : share_{share}, lasts_longer_{true} {
      if (share.table_.is_own()) {
        std::scoped_lock const guard{share.mutex_};
        ++share.holds_;
      }
    }
    /// For a call that needs up to `bytes` and cannot be repeated once it has begun: claims them in
    /// advance, and waits on the host until they are there, at most as long as `claim` does. It
    /// claims less if other programs are promised the rest, and nothing if this program is promised
    /// or has claimed as much already.
    ///
    /// One claim serves all calls that begin within `idle_after`. The next call waits until these
    /// have ended and then claims behind all other programs. So programs whose calls do not fit
    /// beside each other take turns.
    ///
    /// @pre    the caller holds no leases, and no call that has begun waits for this one
    /// @throws as `update`
    ClaimHold(DeviceShare& share, std::size_t bytes) : share_{share} {
      if (share.table_.is_own()) {
        share.begin_call(bytes);
      }
    }
    ClaimHold(ClaimHold const&) = delete;
    ClaimHold& operator=(ClaimHold const&) = delete;
    ~ClaimHold() {
      if (share_.table_.is_own()) {
        std::scoped_lock const guard{share_.mutex_};
        share_.end_hold(lasts_longer_);
      }
    }

   private:
    DeviceShare& share_;
    bool lasts_longer_ = false;  // the claim goes on for `idle_after` when this object ends
  };

  /// Returns how much to claim for a call that has failed: the bytes that were leased plus those
  /// requested, but at least more than the capacity was then. The share may have grown since.
  [[nodiscard]] static std::size_t bytes_to_claim(MemoryReport const& failure) noexcept {
    std::size_t const most = std::numeric_limits<std::size_t>::max() - failure.leased_bytes;
    return std::max<std::size_t>(failure.leased_bytes + std::min(failure.requested_bytes, most),
                                 failure.capacity_bytes + 1);
  }

  /// Claims a share of at least `bytes`, for a call that has failed with less, and waits on the
  /// host for at most `patience` until it is there. Claims are served in the order of their age,
  /// before what programs merely want. A claim expires `idle_after` after the last one was made,
  /// unless a `ClaimHold` exists. So two programs whose operations do not fit beside each other
  /// take turns.
  ///
  /// @param gives_way  what to do if leases of this program keep another program from getting its
  ///                   share. True: return `is_in_the_way` at once, so that the caller can release
  ///                   them. False: the claim becomes *firm*, that is, it comes before older claims
  ///                   that are not, so that calls that can give way do so. If the other claim is
  ///                   firm, too, and older, wait for half of `patience` only, so that two programs
  ///                   do not wait for each other for long
  /// @returns `granted` if the capacity is at least `bytes` now; `refused` in a forked child, too
  /// @throws  as `update`
  ClaimResult claim(std::size_t bytes, bool gives_way = false) {
    if (!table_.is_own()) {  // before any lock: the parent's threads may have held it at the fork
      return ClaimResult::refused;
    }
    std::scoped_lock const one_at_a_time{claiming_};
    std::unique_lock guard{mutex_};
    throw_noted();
    std::size_t const claimed = round_up(std::min(bytes, most_bytes_), unit_bytes());
    if (bytes > most_bytes_ || claimed > most_bytes_) {
      return ClaimResult::refused;
    }
    claimed_bytes_ = std::max(claimed_bytes_, claimed);
    ++holds_;
    struct End {
      DeviceShare& share;
      ~End() { share.end_hold(true); }
    } const end{*this};
    auto const start = std::chrono::steady_clock::now();
    for (;;) {
      bool const is_in_the_way = !update_locked();
      if (capacity_bytes_ >= claimed) {
        return ClaimResult::granted;
      }
      if (is_in_the_way && gives_way) {
        return ClaimResult::is_in_the_way;
      }
      is_firm_ = is_firm_ || is_in_the_way;
      auto const most = is_in_the_way ? options_.patience / 2 : options_.patience;
      if (std::chrono::steady_clock::now() - start >= most || updater_.is_ending()) {
        end_claim();
        return ClaimResult::refused;
      }
      updater_.changed().wait_for(guard, pause());
    }
  }

  /// Returns the capacity that the memory has now. Does not wait for other calls.
  [[nodiscard]] std::size_t capacity_bytes() const noexcept { return capacity_bytes_; }
  /// Returns all programs that share the device; none in a forked child.
  ///
  /// @throws std::system_error, std::bad_alloc; the exception of the thread, if there was one
  [[nodiscard]] std::vector<ShareMember> members() {
    if (!table_.is_own()) {
      return {};
    }
    std::scoped_lock const guard{mutex_};
    throw_noted();
    return table_.members();
  }

 private:
  /// Limits times, which may mean 'for ever': adding those to a clock would overflow.
  [[nodiscard]] static ShareOptions limited(ShareOptions options) noexcept {
    constexpr std::chrono::milliseconds least{0};
    constexpr std::chrono::milliseconds most = std::chrono::hours{100 * 365 * 24};
    for (auto* const time : {&options.period, &options.idle_after, &options.patience}) {
      *time = std::clamp(*time, least, most);
    }
    return options;
  }

  /// Ends a hold of the claim. The caller holds the lock.
  ///
  /// @param lasts_longer  whether the claim goes on for `idle_after` from now on
  void end_hold(bool lasts_longer) noexcept {
    if (lasts_longer) {
      claim_ends_ = Clock::now() + options_.idle_after;
    }
    if (--holds_ == 0 && waiting_calls_ != 0) {
      updater_.changed().notify_all();
    }
  }

  /// The caller holds the lock.
  void end_claim() noexcept {
    claimed_bytes_ = 0;
    is_firm_ = false;
  }

  /// Returns how long a call that waits for others sleeps before it checks again.
  [[nodiscard]] std::chrono::milliseconds pause() const noexcept {
    return std::clamp(options_.period, std::chrono::milliseconds{1}, std::chrono::milliseconds{20});
  }

  /// Claims `bytes` if need be, as the constructor of `ClaimHold` says, and begins a hold.
  void begin_call(std::size_t bytes) {
    std::unique_lock guard{mutex_};
    throw_noted();
    std::size_t const unit = unit_bytes();
    std::size_t const most = claimable_bytes_ / unit * unit;
    std::size_t const needed = std::min(round_up(std::min(bytes, most_bytes_), unit), most);
    if (claimed_bytes_ > most) {  // a program has joined since, and is promised a part of it
      claimed_bytes_ = needed;
    }
    if (needed > least_bytes()) {
      end_turn(guard, needed);
      if (claimed_bytes_ < needed || capacity_bytes_ < needed) {
        guard.unlock();
        (void)claim(needed);  // if it is refused, the present capacity may still suffice
        guard.lock();
      }
    }
    ++holds_;
  }
  /// If the claim is older than `idle_after`, waits until no call uses it and renews it behind the
  /// claims of all other programs. The caller holds the lock, `guard`.
  void end_turn(std::unique_lock<std::mutex>& guard, std::size_t needed_bytes) {
    auto const is_over = [&] { return claimed_bytes_ != 0 && Clock::now() >= claim_ends_; };
    auto const start = std::chrono::steady_clock::now();
    ++waiting_calls_;
    while (is_over() && holds_ != 0 &&
           std::chrono::steady_clock::now() - start < options_.patience / 2) {
      updater_.changed().wait_for(guard, pause());
    }
    --waiting_calls_;
    if (is_over() && holds_ == 0) {
      table_.requeue();
      is_firm_ = false;
      claimed_bytes_ = needed_bytes;
      claim_ends_ = Clock::now() + options_.idle_after;
      (void)update_locked();
    }
  }

  /// Returns the unit in which the memory uses its capacity. A capacity that is no multiple of it
  /// has the use of the multiple below, so what is promised or claimed must be one.
  [[nodiscard]] std::size_t unit_bytes() const noexcept {
    if constexpr (requires { std::as_const(memory_).rounded_bytes(std::size_t{1}); }) {
      return std::as_const(memory_).rounded_bytes(std::size_t{1});
    } else {
      return granule_bytes;
    }
  }
  [[nodiscard]] std::size_t least_bytes() const noexcept {
    std::size_t const unit = unit_bytes();
    std::size_t const most = std::numeric_limits<std::size_t>::max() - unit;
    return round_up(std::clamp<std::size_t>(options_.least_bytes, 1, most), unit);
  }

  void run() {
    std::unique_lock guard{mutex_};
    while (!updater_.is_ending()) {
      updater_.changed().wait_for(guard, options_.period);
      try {
        if (!updater_.is_ending()) {
          (void)update_locked();
        }
      } catch (...) {
        error_ = std::current_exception();
      }
    }
  }

  /// Rethrows the exception of the thread, if there was one, once. The caller holds the lock.
  void throw_noted() {
    if (auto const error = std::exchange(error_, nullptr)) {
      std::rethrow_exception(error);
    }
  }

  /// As `update`. The caller holds the lock. @returns false if another program lacks memory that
  /// leases of this one hold
  bool update_locked() {
    Stats const now = memory_.stats();
    auto const time = Clock::now();
    if (std::exchange(leases_seen_, now.leased.blocks.total) != now.leased.blocks.total) {
      last_active_ = time;
    }
    if (holds_ == 0 && time >= claim_ends_) {
      end_claim();
    }
    bool const is_active = claimed_bytes_ != 0 || time - last_active_ < options_.idle_after;
    std::uint64_t const wanted = std::max<std::uint64_t>(find_wanted(now, time), claimed_bytes_);
    auto const advice = table_.update(wanted, claimed_bytes_, is_active, is_firm_);
    claimable_bytes_ = advice.claimable_bytes;
    if (advice.keep_bytes > capacity_bytes_) {
      // While the constructor waits, the memory has `least_bytes`, which may be in use.
      memory_.set_capacity(std::max<std::size_t>(advice.keep_bytes, least_bytes()));
      note_capacity(advice.keep_bytes);
    }
    return advice.keep_bytes == advice.held_bytes || give_up(advice.keep_bytes);
  }

  /// Lowers the capacity to `keep_bytes`, or to what leases hold if that is more. While a stream is
  /// being captured the capacity may stay as it is.
  ///
  /// @returns whether all memory beyond `keep_bytes` has been given up
  bool give_up(std::size_t keep_bytes) {
    std::size_t bytes = keep_bytes;
    if constexpr (requires { typename Memory::lease_type; }) {
      // With less, `set_capacity` could wait for leases, and what can leave at once would stay.
      bytes = std::max<std::size_t>(bytes,
                                    round_up(memory_.stats().leased.bytes.current, granule_bytes));
      if (bytes > keep_bytes && bytes >= capacity_bytes_) {
        return false;
      }
    }
    try {
      try {
        memory_.set_capacity(bytes);
      } catch (OutOfDeviceMemory const& error) {
        bytes = round_up(std::max(bytes, error.report().leased_bytes), granule_bytes);
        if (bytes >= capacity_bytes_) {
          return false;
        }
        memory_.set_capacity(bytes);
      }
    } catch (OutOfDeviceMemory const&) {
      return false;
    } catch (OutOfHostMemory const&) {
      return false;
    } catch (ContractViolation const&) {
      return false;
    }
    note_capacity(bytes);
    // Leased blocks may keep memory beyond the capacity reserved. A later call gives it up.
    std::size_t const held = std::max<std::size_t>(bytes, memory_.stats().reserved_bytes);
    table_.shrink(held);
    return held == keep_bytes;
  }

  void note_capacity(std::size_t bytes) noexcept {
    capacity_bytes_ = bytes;
    ++capacity_changes_;
  }

  /// Returns how many bytes this program wants: the peak of its allocated bytes, on the device or
  /// not, in the present and the last stretch of time. A stretch contains a whole step if the
  /// program marks its steps. So the program also wants the peak of a step while it needs less;
  /// otherwise memory would be handed back and forth within each step.
  [[nodiscard]] std::uint64_t find_wanted(Stats const& now, typename Clock::time_point time) {
    constexpr int most_stretches = 16;  // a longer step is not waited for
    auto const passed = time - stretch_began_;
    bool const has_whole_step = now.steps == 0 || now.steps >= steps_before_ + 2;
    if (passed >= options_.idle_after &&
        (has_whole_step || passed / most_stretches >= options_.idle_after)) {
      stretch_began_ = time;
      steps_before_ = now.steps;
      wanted_before_ = std::exchange(wanted_, 0);
    }
    wanted_ = std::max(wanted_, now.allocated.bytes.current);
    return std::max(wanted_, wanted_before_);
  }

  Memory& memory_;
  ShareOptions options_;
  std::size_t most_bytes_;
  detail::ShareTable table_;
  std::atomic<std::size_t> capacity_bytes_{0};
  std::atomic<std::uint64_t> capacity_changes_{0};  // how often it has been set
  std::mutex claiming_;
  std::mutex mutex_;  // guards what follows
  std::exception_ptr error_;
  std::size_t claimed_bytes_ = 0;
  bool is_firm_ = false;   // whether a call that cannot give way has waited for the claim
  std::size_t holds_ = 0;  // calls that wait for the claim or use it
  std::size_t claimable_bytes_ = 0;
  std::size_t waiting_calls_ = 0;  // calls that wait in `end_turn` until there are no holds
  typename Clock::time_point claim_ends_ = Clock::now();
  std::uint64_t leases_seen_ = 0;
  typename Clock::time_point last_active_ = Clock::now();
  typename Clock::time_point stretch_began_ = Clock::now();
  std::uint64_t steps_before_ = 0;  // steps when this stretch of time began
  std::uint64_t wanted_ = 0;
  std::uint64_t wanted_before_ = 0;
  detail::OwnedThread updater_;  // notified also when a call may go on
};

}  // namespace spillway
