// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/eviction_policy.hpp>
#include <spillway/core/range.hpp>
#include <spillway/pager/arrivals.hpp>
#include <spillway/pager/blocks.hpp>
#include <spillway/pager/reclaimer.hpp>
#include <spillway/pager/transfers.hpp>
#include <spillway/schedule/use.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace spillway::detail {

/// Does ahead of need what the schedule says will be needed: brings blocks in, copies others out,
/// keeps headroom between the watermarks.
///
/// All of it is optional: where room, the host pool or the device refuse, the block waits for its
/// acquire, which reports what is wrong if it still is. Runs on the thread that has just acquired.
template <PolicySet Policies>
class LookAhead {
 public:
  using State = PagerState<Policies>;
  using Guard = typename State::Guard;
  using Turn = typename State::Turn;

  LookAhead(State& state,
            Transfers<Policies>& transfers,
            Arrivals<Policies>& arrivals,
            RoomMaker<Policies>& rooms)
      : state_{state}, transfers_{transfers}, arrivals_{arrivals}, rooms_{rooms} {}

  /// Cheap test, made on every acquire: is there anything to look ahead for?
  [[nodiscard]] bool is_due() const noexcept {
    return state_.options.swapping && !state_.is_turn_taken &&
           (state_.swapped_out_blocks != 0 || state_.is_under_pressure() || is_above_watermark());
  }

  /// Entered with the lock; does nothing if another thread is making room.
  void run(Guard& guard) {
    if (state_.is_turn_taken) {
      return;
    }
    typename State::Turn const turn{state_, guard};
    try {
      keep_headroom(guard);
      if (state_.options.prefetching) {
        prefetch(guard);
      }
      if (state_.options.early_swap_out) {
        copy_out_early(guard);
      }
    } catch (DeviceError const&) {      // NOLINT(bugprone-empty-catch): see the class comment
    } catch (FileTierError const&) {    // NOLINT(bugprone-empty-catch)
    } catch (OutOfHostMemory const&) {  // NOLINT(bugprone-empty-catch)
    }
  }

 private:
  [[nodiscard]] bool is_above_watermark() const noexcept {
    return state_.options.high_watermark < 1.0 && taken_part() > state_.options.high_watermark;
  }
  [[nodiscard]] double taken_part() const noexcept {
    auto const capacity = static_cast<double>(state_.arena.capacity_bytes());
    return static_cast<double>(state_.stats.resident.bytes.current) / capacity;
  }

  void keep_headroom(Guard& guard) {
    if (!is_above_watermark()) {
      return;
    }
    double const excess = (taken_part() - state_.options.low_watermark) *
                          static_cast<double>(state_.arena.capacity_bytes());
    auto const anyone = [](BlockId) noexcept { return true; };
    rooms_.evict(guard, static_cast<std::size_t>(excess), EvictionReason::watermark, anyone);
  }

  void prefetch(Guard& guard) {
    if (state_.swapped_out_blocks == 0) {
      return;
    }
    wanted_.clear();
    std::size_t inflight_bytes = state_.prefetched_bytes;
    std::size_t const most_bytes = state_.prefetcher.max_inflight_bytes();
    state_.prefetcher.candidates([&](BlockId id, std::uint64_t next_use) {
      BlockRecord const* const block = state_.blocks.find(id);
      if (block == nullptr || block->is_resident() || block->is_busy || !block->has_contents) {
        return true;
      }
      if constexpr (SpeculativeEvictionPolicy<typename Policies::eviction>) {
        if (!state_.eviction.may_return(state_.prefetcher.schedule(), id)) {
          return true;  // its turn comes when what is made in between has been made
        }
      }
      inflight_bytes += block->bytes;
      if (inflight_bytes > most_bytes) {
        return false;
      }
      wanted_.push_back({id, next_use});
      return true;
    });
    try {
      for (Wanted const& wanted : wanted_) {
        if (!bring_in_early(guard, wanted)) {
          break;  // what is needed later must not take the room of what is needed first
        }
      }
    } catch (...) {
      arrivals_.carry_in(guard);
      throw;
    }
    arrivals_.carry_in(guard);
  }

  // Small blocks come in together. One that takes as long as finding room for others need not wait.
  static constexpr std::size_t most_bytes_together = 256_KiB;

  struct Wanted {
    BlockId id{};
    std::uint64_t next_use = 0;
  };

  bool bring_in_early(Guard& guard, Wanted const& wanted) {
    BlockRecord* block = state_.blocks.find(wanted.id);
    if (block == nullptr || block->is_resident() || block->is_busy) {
      return true;
    }
    // If its next use overwrites it, its bytes need not come back.
    auto const& schedule = state_.prefetcher.schedule();
    if (schedule.is_overwritten_next(wanted.id)) {
      return true;
    }
    auto const needed_later = [&](BlockId other) noexcept {
      if constexpr (SpeculativeEvictionPolicy<typename Policies::eviction>) {
        if (!state_.eviction.is_leaving(other)) {
          return false;  // it would have to come back in turn: more to bring in than without prefetching
        }
      }
      std::uint64_t const next = schedule.next_use(other);
      return next != use_unknown && next > wanted.next_use;
    };
    auto const placement =
        rooms_.try_take_for_prefetch(guard, block->bytes, wanted.id, needed_later);
    if (!placement) {
      return false;
    }
    // The lock was let go meanwhile: the block may have been freed.
    block = state_.blocks.find(wanted.id);
    if (block == nullptr || block->is_resident() || block->is_busy) {
      state_.unplace(wanted.id, *placement, placement->fence);
      return true;
    }
    Use const use = schedule.use_of(wanted.id);
    if (arrivals_.begin(wanted.id, *placement, use, true) >= most_bytes_together) {
      arrivals_.carry_in(guard);
    }
    return true;
  }

  /// Copies out what the plan sends out anyway, while the outgoing link is idle; the block stays until
  /// its room is needed and then leaves for nothing.
  void copy_out_early(Guard& guard) {
    if constexpr (SpeculativeEvictionPolicy<typename Policies::eviction>) {
      auto const inspect = [this](BlockId id) noexcept -> std::optional<EvictionCandidate> {
        BlockRecord const* const block = state_.blocks.find(id);
        if (block == nullptr || !block->is_resident() || block->is_leased() || block->is_busy ||
            block->is_clean()) {
          return std::nullopt;
        }
        return EvictionCandidate{block->bytes, false, true};
      };
      while (auto const id = state_.eviction.early_victim(inspect)) {
        if (!transfers_.copy_out(guard, *id)) {
          break;
        }
      }
    }
  }

  State& state_;
  Transfers<Policies>& transfers_;
  Arrivals<Policies>& arrivals_;
  RoomMaker<Policies>& rooms_;
  std::vector<Wanted> wanted_;
};

}  // namespace spillway::detail
