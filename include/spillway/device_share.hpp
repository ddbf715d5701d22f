// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/share/share_table.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace spillway {

/// Memory whose capacity can be changed while it is used: a `DeviceAllocator`, or what an adapter
/// for a framework makes of one.
///
/// | expression                 | must                                                          |
/// |----------------------------|---------------------------------------------------------------|
/// | `m.stats()`                | return its `Stats`                                            |
/// | `m.set_capacity(bytes)`    | do as `DeviceAllocator::set_capacity` does                    |
///
/// Both may be called by any thread.
template <class M>
concept LimitedMemory = requires(M& memory, M const& constant, std::size_t bytes) {
  { constant.stats() } -> std::convertible_to<Stats>;
  memory.set_capacity(bytes);
};

/// How a program takes part in sharing a device.
struct ShareOptions {
  /// By which the programs find each other: any path that all of them can open, best in memory
  /// (`/dev/shm/NAME`). It is made if it is not there, for its owner alone, and stays.
  std::string file;
  /// Promised, whatever the others want: at least what one operation of the program needs at once,
  /// if it must never wait for others.
  std::size_t least_bytes = 32_MiB;
  /// Of two programs that both want more than there is, one with twice the weight gets twice as
  /// much.
  double weight = 1;
  /// How often the program looks what the others want. 0: whenever it calls `update`.
  std::chrono::milliseconds period{20};
  /// A program that has leased nothing for so long is not at work. What it holds beyond
  /// `least_bytes` is for those that are, if they want it.
  std::chrono::milliseconds idle_after{2000};
  /// How long `retry` waits for others to give up memory.
  std::chrono::milliseconds patience{10'000};
};

/// What became of a claim: `DeviceShare::claim`.
enum class ClaimResult : std::uint8_t {
  granted,       ///< the memory is there
  refused,       ///< there is not so much in all, or others did not give it up in time
  is_in_the_way  ///< a claim that comes first waits for what leases of this program hold
};

/// A program's share of a device that other programs use, too.
///
/// The programs divide one capacity by what each wants, so that one that is alone, or the only one
/// at work, has all of it, and two that are at work have their fair shares. A share changes while
/// the program runs: `DeviceShare` lowers and raises the capacity of its memory, so that blocks
/// leave and come back as under any other capacity. A program that holds more than its share gives
/// the excess up before others take it, so together they never use more than the capacity. One that
/// ends, however that is, gives back all it had. docs/sharing.md says how shares are found.
///
/// Every program makes its memory with the same capacity, that of all of them together, and joins
/// before it has allocated much. Memory that grows in place, or is taken in pages, is given up as
/// far as another program lacks it; other memory only where a whole reservation is free.
///
/// ```cpp
/// DeviceAllocator<> memory{
///     {.capacity_bytes = 20_GiB, .initial_bytes = 0, .grows_in_place = true}};
/// DeviceShare share{memory, {.file = "/dev/shm/gpu0"}};
/// auto const lease = share.retry([&] { return tensor.acquire_write(stream); });
/// ```
///
/// Threads  thread-safe. A thread of its own looks at the others, unless the period is 0.
/// Errors   what goes wrong on that thread is thrown by the next `update`, `claim` or `members`.
/// Fork     a child takes no part: its memory keeps the capacity that it has then.
/// @tparam Clock  tells how long the program has leased nothing
template <LimitedMemory Memory, class Clock = std::chrono::steady_clock>
class DeviceShare {
 public:
  /// Joins: what is in memory beyond `least_bytes` leaves it, until it is known how much of it this
  /// program may use. Waits for at most `patience` until there are `least_bytes`. `memory` is not
  /// owned and must outlive this object; its capacity is what the programs share.
  ///
  /// @throws ContractViolation if the programs that are there share another capacity, or are
  ///         promised so much that `least_bytes` are not left; std::system_error if the file cannot
  ///         be used; OutOfDeviceMemory if the others do not give up what this one is promised, or
  ///         if leases hold more than that in memory; and as `update`
  DeviceShare(Memory& memory, ShareOptions options)
      : memory_{memory},
        options_{std::move(options)},
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
    } catch (...) {
      memory.set_capacity(most_bytes_);
      throw;
    }
    if (options_.period.count() > 0) {
      thread_ = std::thread{[this] { run(); }};
    }
  }
  DeviceShare(DeviceShare const&) = delete;
  DeviceShare& operator=(DeviceShare const&) = delete;
  /// Leaves. The memory keeps the capacity that it has then; it should end, too.
  ~DeviceShare() {
    if (!table_.is_own()) {
      if (thread_.joinable()) {  // of the parent: the child has no such thread
        thread_.detach();
        new (&changed_) std::condition_variable;  // the old one has a waiter that does not exist
      }
      return;
    }
    {
      std::scoped_lock const guard{mutex_};
      is_ending_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) {
      thread_.join();
    }
  }

  /// Tells the others what this program wants, and follows what they want: lowers the memory's
  /// capacity if another program lacks what this one has beyond its share, and raises it to what
  /// is free of its own. Memory that leases keep from leaving is given up later.
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

  /// Calls `act`, which acquires or allocates, and returns what it does. If it finds no room, and a
  /// larger share would have it, asks the others for that and calls `act` again once it is there.
  ///
  /// @throws OutOfDeviceMemory if the whole capacity would not do, or the others did not give up
  ///         enough within `patience`; and as `act` and `update`
  template <std::invocable Act>
  std::invoke_result_t<Act&> retry(Act act) {
    std::optional<ClaimHold> hold;
    for (;;) {
      try {
        return act();
      } catch (OutOfDeviceMemory const& error) {
        if (!hold) {
          hold.emplace(*this);
        }
        if (claim(bytes_to_claim(error.report())) != ClaimResult::granted) {
          throw;
        }
      }
    }
  }

  /// Keeps what this program claims from ending while the call is under way that it is claimed for,
  /// however long that takes. Otherwise another program could have the memory before the call has
  /// used it. It must end before the share does.
  ///
  /// Cost  a mutex to begin and to end it. Does nothing in a forked child.
  class ClaimHold {
   public:
    explicit ClaimHold(DeviceShare& share) : share_{share}, lasts_longer_{true} {
      if (share.table_.is_own()) {
        std::scoped_lock const guard{share.mutex_};
        ++share.holds_;
      }
    }
    /// For a call that needs as much as `bytes` and cannot begin anew once it runs: claims them, or
    /// all that no other program is promised, before it begins, unless they are promised or claimed
    /// already, and waits until they are there, for as long as `claim` does. A claim serves calls
    /// that begin while it is younger than `idle_after`. The next call waits until these have ended
    /// and then claims after all other programs, so that programs whose calls do not fit beside
    /// each other take turns.
    ///
    /// The caller holds no leases, and no call that has begun waits for it.
    ///
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
    bool lasts_longer_ = false;  // than this object
  };

  /// What to claim for a call that has failed: room for what it had in use and asked for, and more
  /// than there was then. The share may have grown since.
  [[nodiscard]] static std::size_t bytes_to_claim(MemoryReport const& failure) noexcept {
    return std::max<std::size_t>(failure.leased_bytes + failure.requested_bytes,
                                 failure.capacity_bytes + 1);
  }

  /// Claims a share of at least `bytes`, for a call that has failed with less, and waits until it
  /// is there. The claim comes before what others merely want, after claims that are older, and
  /// ends when nothing has been claimed for `idle_after`, and no `ClaimHold` keeps it. So two
  /// programs whose operations do not fit beside each other take turns.
  ///
  /// @param gives_way  do not wait while leases of this program keep another claim from being met,
  ///                   since the caller can release them. Otherwise the claim becomes *firm* then:
  ///                   it comes before older claims that are not, so that a call that can give way
  ///                   does. If all are firm, it waits half of `patience`, so that one of two
  ///                   programs that wait for each other goes on
  /// @returns whether there are so many bytes
  /// @throws  as `update`
  ClaimResult claim(std::size_t bytes, bool gives_way = false) {
    if (!table_.is_own()) {  // before locks, which threads of the parent may have had
      return ClaimResult::refused;
    }
    std::scoped_lock const one_at_a_time{claiming_};
    std::unique_lock guard{mutex_};
    throw_noted();
    std::size_t const claimed = round_up(bytes, granule_bytes);
    if (claimed > most_bytes_) {
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
      if (std::chrono::steady_clock::now() - start >= most || is_ending_) {
        end_claim();
        return ClaimResult::refused;
      }
      changed_.wait_for(guard, pause());
    }
  }

  /// The capacity that the memory has now.
  [[nodiscard]] std::size_t capacity_bytes() const noexcept { return capacity_bytes_; }
  /// All programs that share the device; none in a forked child.
  ///
  /// @throws std::system_error, std::bad_alloc; what went wrong on the thread
  [[nodiscard]] std::vector<ShareMember> members() {
    if (!table_.is_own()) {
      return {};
    }
    std::scoped_lock const guard{mutex_};
    throw_noted();
    return table_.members();
  }

 private:
  /// @param lasts_longer  whether the claim goes on for `idle_after` from now on
  ///
  /// The caller holds the lock.
  void end_hold(bool lasts_longer) noexcept {
    if (lasts_longer) {
      claim_ends_ = Clock::now() + options_.idle_after;
    }
    if (--holds_ == 0 && waiting_calls_ != 0) {
      changed_.notify_all();
    }
  }

  /// The caller holds the lock.
  void end_claim() noexcept {
    claimed_bytes_ = 0;
    is_firm_ = false;
  }

  [[nodiscard]] std::chrono::milliseconds pause() const noexcept {
    return std::max(options_.period, std::chrono::milliseconds{1});
  }

  /// Begins a hold of a claim of at least `bytes`.
  void begin_call(std::size_t bytes) {
    std::unique_lock guard{mutex_};
    throw_noted();
    std::size_t const most = claimable_bytes_ / granule_bytes * granule_bytes;
    std::size_t const needed =
        std::min(round_up(std::min(bytes, most_bytes_), granule_bytes), most);
    if (claimed_bytes_ > most) {  // a program has joined since
      claimed_bytes_ = needed;
    }
    if (needed > least_bytes()) {
      end_turn(guard, needed);
      if (claimed_bytes_ < needed || capacity_bytes_ < needed) {
        guard.unlock();
        (void)claim(needed);  // if it is refused, what there is may do
        guard.lock();
      }
    }
    ++holds_;
  }
  /// If the claim has lasted for long enough, waits until no call uses it, and lets those of others
  /// come first. The caller holds the lock, `guard`.
  void end_turn(std::unique_lock<std::mutex>& guard, std::size_t needed_bytes) {
    auto const is_over = [&] { return claimed_bytes_ != 0 && Clock::now() >= claim_ends_; };
    auto const start = std::chrono::steady_clock::now();
    ++waiting_calls_;
    while (is_over() && holds_ != 0 &&
           std::chrono::steady_clock::now() - start < options_.patience / 2) {
      changed_.wait_for(guard, pause());
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

  [[nodiscard]] std::size_t least_bytes() const noexcept {
    return round_up(std::max<std::size_t>(options_.least_bytes, 1), granule_bytes);
  }

  void run() {
    std::unique_lock guard{mutex_};
    while (!is_ending_) {
      changed_.wait_for(guard, options_.period);
      try {
        if (!is_ending_) {
          (void)update_locked();
        }
      } catch (...) {
        error_ = std::current_exception();
      }
    }
  }

  /// Throws what went wrong on the thread, once. The caller holds the lock.
  void throw_noted() {
    if (auto const error = std::exchange(error_, nullptr)) {
      std::rethrow_exception(error);
    }
  }

  /// @returns false if another program lacks what leases of this one hold
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
      memory_.set_capacity(advice.keep_bytes);
      capacity_bytes_ = advice.keep_bytes;
    }
    return advice.keep_bytes == advice.held_bytes || give_up(advice.keep_bytes);
  }

  /// Lowers the capacity to `bytes`, or to what leases hold. A capture may keep it as it is.
  ///
  /// @returns whether all that is beyond it has been given up
  bool give_up(std::size_t bytes) {
    bool is_given_up = true;
    try {
      try {
        memory_.set_capacity(bytes);
      } catch (OutOfDeviceMemory const& error) {
        is_given_up = false;
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
    capacity_bytes_ = bytes;
    // What leases hold in place is still reserved. It is given up by a later call.
    std::size_t const held = std::max<std::size_t>(bytes, memory_.stats().reserved_bytes);
    table_.shrink(held);
    return is_given_up && held == bytes;
  }

  /// The most bytes that existed at once, wherever they were, in this stretch of time or the last.
  /// A stretch has a whole step of a program that marks its steps: what a step needs at its height
  /// is wanted in its valleys, too, or the memory would go from one program to another and back.
  [[nodiscard]] std::uint64_t find_wanted(Stats const& now, typename Clock::time_point time) {
    constexpr int most_stretches = 16;  // that a long step is waited for
    auto const passed = time - stretch_began_;
    bool const has_whole_step = now.steps == 0 || now.steps >= steps_before_ + 2;
    if (passed >= options_.idle_after &&
        (has_whole_step || passed >= most_stretches * options_.idle_after)) {
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
  std::mutex claiming_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::exception_ptr error_;
  std::size_t claimed_bytes_ = 0;
  bool is_firm_ = false;   // the claim: a call that cannot give way has waited for it
  std::size_t holds_ = 0;  // of the claim: while it is waited for, and while it is used
  std::size_t claimable_bytes_ = 0;
  std::size_t waiting_calls_ = 0;  // until there are no holds
  typename Clock::time_point claim_ends_ = Clock::now();
  std::uint64_t leases_seen_ = 0;
  typename Clock::time_point last_active_ = Clock::now();
  typename Clock::time_point stretch_began_ = Clock::now();
  std::uint64_t steps_before_ = 0;  // this stretch of time
  std::uint64_t wanted_ = 0;
  std::uint64_t wanted_before_ = 0;
  bool is_ending_ = false;
  std::thread thread_;
};

}  // namespace spillway
