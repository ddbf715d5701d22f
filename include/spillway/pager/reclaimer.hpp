// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/arena.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/range.hpp>
#include <spillway/pager/blocks.hpp>
#include <spillway/pager/transfers.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace spillway::detail {

/// Finds a device range for a block: free, grown, vacated or made contiguous, in that order.
///
/// A bounded loop of `try_` steps, entered with the lock and the turn. It gives up only when every
/// resident block is leased or the host pool is full, and then says so.
template <PolicySet Policies>
class RoomMaker {
 public:
  using State = PagerState<Policies>;
  using Arena = typename State::Arena;
  using Guard = typename State::Guard;
  using Turn = typename State::Turn;
  using Unlocked = typename State::Unlocked;

  RoomMaker(State& state, Transfers<Policies>& transfers) : state_{state}, transfers_{transfers} {}

  /// A range of `bytes` for block `owner`. The caller has the turn.
  ///
  /// @throws OutOfDeviceMemory, DeviceError, FileTierError; every block is then resident as it was
  ///         or validly swapped out
  Placement take(Guard& guard, std::size_t bytes, BlockId owner) {
    RangeSource source = RangeSource::free_range;
    // Each round frees, moves or waits; other threads may take what a round made, so it is bounded.
    std::size_t const most_rounds = 16 + 4 * state_.blocks.size();
    for (std::size_t round = 0; round < most_rounds; ++round) {
      if (auto placement = state_.try_place(guard, bytes, owner)) {
        ++state_.stats.range_sources[static_cast<std::size_t>(source)];
        return *placement;
      }
      auto const made_by = make_room(guard, bytes);
      if (!made_by) {
        break;
      }
      source = *made_by;
    }
    ++state_.stats.out_of_memory;
    state_.log(RecordKind::out_of_memory, owner, bytes, nullptr);
    throw OutOfDeviceMemory{state_.report(bytes), advice(bytes)};
  }

  /// A range if one can be had by letting go only what `admits(id)` allows, without waiting and
  /// without growing; for prefetches.
  template <class Admits>
  std::optional<Placement>
  try_take_for_prefetch(Guard& guard, std::size_t bytes, BlockId owner, Admits admits) {
    if (auto placement = state_.try_place(guard, bytes, owner)) {
      return placement;
    }
    if (state_.arena.free_bytes() < bytes) {
      std::size_t const short_bytes = bytes - state_.arena.free_bytes();
      if (evict(guard, short_bytes, EvictionReason::prefetch, admits) == 0) {
        return std::nullopt;
      }
      if (auto placement = state_.try_place(guard, bytes, owner)) {
        return placement;
      }
    }
    if constexpr (MovingArena<Arena>) {
      if (state_.arena.free_bytes() >= bytes) {
        if (auto plan = compaction_plan(bytes, first_search(bytes))) {
          transfers_.move(guard, *plan);
          return state_.try_place(guard, bytes, owner);
        }
      }
    }
    return std::nullopt;
  }

  /// Makes blocks leave, by the eviction policy's choice, until `wanted_bytes` have been given up.
  ///
  /// @returns bytes given up; less than wanted if no more blocks may leave
  template <class Admits>
  std::size_t evict(Guard& guard, std::size_t wanted_bytes, EvictionReason reason, Admits admits) {
    std::vector<BlockId> victims;
    std::size_t chosen_bytes = 0;
    auto const inspect = [&](BlockId id) noexcept -> std::optional<EvictionCandidate> {
      BlockRecord const* const block = state_.blocks.find(id);
      if (block == nullptr || !can_leave(*block) || !admits(id)) {
        return std::nullopt;
      }
      return EvictionCandidate{block->bytes, block->is_clean(), block->has_contents};
    };
    victims.reserve(16);
    while (chosen_bytes < wanted_bytes) {
      auto const victim = state_.eviction.victim(wanted_bytes - chosen_bytes, inspect);
      if (!victim) {
        break;
      }
      victims.push_back(*victim);
      BlockRecord& block = *state_.blocks.find(*victim);
      block.is_busy = true;
      state_.eviction.on_erase(*victim);
      chosen_bytes += block.bytes;
    }
    return victims.empty() ? 0 : transfers_.send_out(guard, victims, reason);
  }

  /// Moves blocks to join free ranges, for at most `budget_bytes`. @returns bytes moved
  std::size_t compact_ahead(Guard& guard, std::size_t budget_bytes) {
    std::size_t bytes = 0;
    if constexpr (MovingArena<Arena>) {
      if (auto plan = state_.arena.plan_pass(budget_bytes, can_move());
          plan && !plan->moves.empty()) {
        bytes = plan->cost_bytes;
        transfers_.move(guard, *plan);
      }
    }
    return bytes;
  }

 private:
  [[nodiscard]] bool can_leave(BlockRecord const& block) const noexcept {
    return state_.options.swapping && block.is_resident() && !block.is_leased() && !block.is_busy;
  }

  [[nodiscard]] auto can_move() const noexcept {
    return [this](BlockId id) noexcept {
      BlockRecord const* const block = state_.blocks.find(id);
      // A block that is held for a lease may move as long as its address has not been handed out.
      return block != nullptr && block->is_resident() && block->granted == 0 && !block->is_busy;
    };
  }

  [[nodiscard]] auto compaction_plan(std::size_t bytes, std::size_t most_ranges) const {
    std::optional<typename Arena::plan_type> plan;
    if (state_.options.compaction) {
      plan = state_.arena.plan_compaction(
          bytes, state_.options.compaction_budget_bytes, can_move(), most_ranges);
    }
    return plan;
  }

  /// How many ranges are worth a search as a whole for room for `bytes`: one that takes longer than a block
  /// takes to leave and to come back saves nothing. That is decided by the size of the block that might
  /// leave instead, which is not known, and taken to be the mean.
  [[nodiscard]] std::size_t few_ranges(std::size_t bytes) const noexcept {
    if (!state_.options.swapping) {
      return state_.arena.few_ranges();
    }
    constexpr double seconds_per_range = 1e-6;  // of a search that goes on as long as it may
    auto const& resident = state_.stats.resident;
    std::uint64_t const mean =
        resident.bytes.current / std::max<std::uint64_t>(1, resident.blocks.current);
    double const swap_seconds = 2.0 * static_cast<double>(std::max<std::uint64_t>(bytes, mean)) /
                                state_.options.link_bytes_per_second;
    return std::max(state_.options.few_ranges,
                    static_cast<std::size_t>(std::min(swap_seconds / seconds_per_range, 1e9)));
  }
  [[nodiscard]] std::size_t first_search(std::size_t bytes) const noexcept {
    return state_.arena.first_search(few_ranges(bytes));
  }

  /// What is to leave next for the sake of `bytes`. Where there are many ranges, one more block that leaves
  /// by value costs less than a search for others to move, and often leaves a gap that is large enough.
  [[nodiscard]] std::size_t short_bytes(std::size_t bytes) const noexcept {
    std::size_t const free_bytes = state_.arena.free_bytes();
    if (free_bytes < bytes) {
      return bytes - free_bytes;
    }
    std::size_t spare_bytes = 0;
    if constexpr (MovingArena<Arena>) {
      spare_bytes = state_.options.swapping ? state_.arena.spare_bytes(few_ranges(bytes)) : 0;
    }
    return std::min(bytes, spare_bytes - std::min(spare_bytes, free_bytes - bytes));
  }

  /// One step towards room for `bytes`, and what kind of step it was; nothing if none is left.
  std::optional<RangeSource> make_room(Guard& guard, std::size_t bytes) {
    if constexpr (GrowingArena<Arena>) {
      if (grow(guard, bytes)) {
        return RangeSource::growth;
      }
    }
    if (std::size_t const wanted_bytes = short_bytes(bytes); wanted_bytes != 0) {
      std::uint64_t const copies = state_.stats.swap_outs.count;
      auto const anyone = [](BlockId) noexcept { return true; };
      // With the host pool full, blocks that need no room there may still leave.
      auto const the_clean = [this](BlockId id) noexcept {
        return state_.blocks.find(id)->is_clean();
      };
      if (evict(guard, wanted_bytes, EvictionReason::pressure, anyone) != 0 ||
          evict(guard, wanted_bytes, EvictionReason::pressure, the_clean) != 0) {
        return state_.stats.swap_outs.count == copies ? RangeSource::after_drop
                                                      : RangeSource::after_swap_out;
      }
    }
    if constexpr (MovingArena<Arena>) {
      if (state_.arena.free_bytes() >= bytes) {
        if (auto const made_by = make_contiguous(guard, bytes)) {
          return made_by;
        }
      }
    }
    if (wait_for_a_lease(guard)) {
      return RangeSource::retry;
    }
    return std::nullopt;
  }

  /// Enough is free, but not in one piece: moves blocks together or lets a neighbourhood leave. Looks
  /// no further than it must.
  std::optional<RangeSource> make_contiguous(Guard& guard, std::size_t bytes) {
    std::size_t most_ranges = first_search(bytes);
    for (;; most_ranges = state_.arena.wider_search(most_ranges)) {
      auto const made_by = make_contiguous(guard, bytes, most_ranges);
      if (made_by || most_ranges == all_ranges) {
        return made_by;
      }
    }
  }

  /// The same with a look at `most_ranges`, in whichever way takes less time.
  std::optional<RangeSource>
  make_contiguous(Guard& guard, std::size_t bytes, std::size_t most_ranges) {
    auto plan = compaction_plan(bytes, most_ranges);
    std::optional<EvictionWindow> window;
    if (!plan || most_ranges == all_ranges) {  // else another search saves nothing
      window = cheapest_window(bytes, most_ranges);
    }
    if (plan && window) {
      double const move_seconds =
          2.0 * static_cast<double>(plan->cost_bytes) / state_.options.device_bytes_per_second;
      double const swap_seconds =
          static_cast<double>(window->cost) / state_.options.link_bytes_per_second;
      if (swap_seconds < move_seconds) {
        plan.reset();
      } else {
        window.reset();
      }
    }
    if (plan) {
      transfers_.move(guard, *plan);
      return RangeSource::after_compaction;
    }
    if (window) {
      for (BlockId const id : window->owners) {
        state_.blocks.find(id)->is_busy = true;
        state_.eviction.on_erase(id);
      }
      if (transfers_.send_out(guard, window->owners, EvictionReason::pressure) != 0) {
        return RangeSource::after_swap_out;
      }
    }
    return std::nullopt;
  }

  /// The run of addresses that is cheapest to vacate, priced in bytes over the host link.
  [[nodiscard]] std::optional<EvictionWindow> cheapest_window(std::size_t bytes,
                                                              std::size_t most_ranges) const {
    if (!state_.options.swapping) {
      return std::nullopt;
    }
    auto const price = [this](BlockId id) noexcept -> std::optional<std::uint64_t> {
      BlockRecord const* const block = state_.blocks.find(id);
      if (block == nullptr || !can_leave(*block)) {
        return std::nullopt;
      }
      std::uint64_t const out = block->is_clean() ? 0 : block->bytes;
      std::uint64_t const back = block->has_contents ? block->bytes : 0;
      return out + back;
    };
    return state_.arena.cheapest_window(bytes, price, most_ranges);
  }

  /// Takes more memory from the device if the limit allows it.
  bool grow(Guard& guard, std::size_t bytes) {
    std::size_t const wanted = state_.arena.growth_for(bytes);
    if (wanted == 0) {
      return false;
    }
    void* segment = nullptr;
    {
      Unlocked const unlocked{guard};
      segment = state_.device.try_reserve(wanted);
    }
    if (segment == nullptr) {
      return false;  // the device itself is full: others use it too
    }
    try {
      state_.arena.add_segment(segment, wanted);
    } catch (...) {
      Unlocked const unlocked{guard};
      state_.device.release(segment, wanted);
      throw;
    }
    state_.log(RecordKind::grow, {}, wanted, segment);
    return true;
  }

  /// Waits until another thread ends a lease. @returns false if there is none to wait for
  bool wait_for_a_lease(Guard& guard) {
    using Clock = std::chrono::steady_clock;
    if (state_.options.lease_wait.count() <= 0) {
      return false;
    }
    auto const me = std::this_thread::get_id();
    state_.lease_waiters.push_back(me);
    std::uint64_t const seen = state_.releases;
    std::uint64_t const start_ns = state_.device.clock_ns();
    auto const deadline = Clock::now() + state_.options.lease_wait;
    bool has_waited = false;
    // Others need the turn to get on with what they hold leases for.
    state_.is_turn_taken = false;
    state_.notify();
    while (state_.releases == seen && others_hold_leases()) {
      has_waited = true;
      ++state_.waiters;
      bool const is_late = state_.changed.wait_until(guard, deadline) == std::cv_status::timeout;
      --state_.waiters;
      if (is_late) {
        break;
      }
    }
    state_.lease_waiters.erase(
        std::find(state_.lease_waiters.begin(), state_.lease_waiters.end(), me));
    while (state_.is_turn_taken) {
      state_.wait_for_change(guard);
    }
    state_.is_turn_taken = true;
    if (has_waited) {
      state_.count_host_waits(1, start_ns, state_.device.clock_ns());
    }
    return state_.releases != seen;
  }

  /// True if a resident block is leased by a thread that is not itself waiting for leases.
  [[nodiscard]] bool others_hold_leases() {
    bool found = false;
    auto const& waiting = state_.lease_waiters;
    state_.blocks.for_each([&](BlockId, BlockRecord const& block) {
      found = found || (block.is_resident() && block.is_leased() &&
                        std::find(waiting.begin(), waiting.end(), block.leaser) == waiting.end());
    });
    return found;
  }

  [[nodiscard]] std::string advice(std::size_t bytes) const {
    MemoryReport const now = state_.report(bytes);
    if (bytes > now.capacity_bytes) {
      return "The block alone is larger than the capacity: raise capacity_bytes or split the "
             "block.";
    }
    if (!state_.options.swapping) {
      return "Swapping is off: switch it on, raise capacity_bytes or free blocks.";
    }
    if (now.free_bytes + now.reclaimable_bytes < bytes) {
      return "Release leases: the blocks held by them leave too little that could be swapped out.";
    }
    if (now.host_free_bytes < now.reclaimable_bytes) {
      return "The host pool is full: raise its tiers' capacities or free blocks.";
    }
    return "Leases lie between the free ranges: release some, or allow compaction.";
  }

  State& state_;
  Transfers<Policies>& transfers_;
};

}  // namespace spillway::detail
