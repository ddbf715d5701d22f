// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/policy_set.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/pager/block_state.hpp>
#include <spillway/pager/blocks.hpp>
#include <spillway/pager/journal.hpp>
#include <spillway/pager/monitor.hpp>
#include <spillway/pager/reclaimer.hpp>
#include <spillway/pager/transfers.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <vector>

namespace spillway::detail {

/// Works ahead of the program by the predictions of the schedule: swaps blocks in, copies others to
/// the host, and keeps the free bytes between the watermarks.
///
/// All of this is optional. If there is no room, or the host pool or the device refuses, the block
/// is left for its acquire, which reports the error if it persists. Runs on the thread that has
/// just acquired, under the lock.
template <PolicySet Policies>
class LookAhead {
 public:
  using Arena = typename Blocks<Policies>::Arena;
  using Prefetcher = typename Blocks<Policies>::Prefetcher;
  using MonitorType = Monitor<typename Policies::lock>;

  /// The arguments are not owned and must outlive this object.
  LookAhead(Arena const& arena,
            Prefetcher const& prefetcher,
            Blocks<Policies>& blocks,
            Transfers<Policies>& transfers,
            Reclaimer<Policies>& reclaimer,
            Journal<Policies> const& journal,
            MonitorType& monitor,
            PagerOptions const& options)
      : arena_{arena},
        prefetcher_{prefetcher},
        blocks_{blocks},
        transfers_{transfers},
        reclaimer_{reclaimer},
        journal_{journal},
        monitor_{monitor},
        options_{options} {}
  LookAhead(LookAhead const&) = delete;
  LookAhead& operator=(LookAhead const&) = delete;

  /// Whether there may be something to do. Called at every acquire, so it costs a few loads only.
  [[nodiscard]] bool is_due() const noexcept {
    return options_.swapping && !monitor_.is_exclusive_taken() &&
           (blocks_.on_host_count() != 0 || journal_.is_under_pressure() || is_above_watermark());
  }

  /// Does the work, or nothing if another thread has the exclusive right.
  void run();

 private:
  // Small blocks are swapped in together, up to this size. Copying so many bytes takes as long as
  // finding room for the next block, so waiting for more would gain nothing.
  static constexpr std::size_t most_bytes_together = 256_KiB;

  struct Wanted {
    BlockId id{};
    std::uint64_t next_use = 0;
  };

  [[nodiscard]] bool is_above_watermark() const noexcept {
    return options_.high_watermark < 1.0 && resident_part() > options_.high_watermark;
  }
  [[nodiscard]] double resident_part() const noexcept {
    return static_cast<double>(journal_.stats().resident.bytes.current) / capacity_bytes();
  }
  [[nodiscard]] double capacity_bytes() const noexcept {
    return static_cast<double>(arena_.capacity_bytes());
  }

  void keep_headroom() {
    if (is_above_watermark()) {
      double const excess = (resident_part() - options_.low_watermark) * capacity_bytes();
      reclaimer_.evict(static_cast<std::size_t>(excess), EvictionReason::watermark, any_block);
    }
  }

  void prefetch() {
    if (blocks_.on_host_count() == 0) {
      return;
    }
    list_wanted();
    try {
      for (Wanted const& wanted : wanted_) {
        if (!stage(wanted)) {
          break;  // blocks that are needed later must not take the room of this one
        }
      }
    } catch (...) {
      transfers_.swap_in();
      throw;
    }
    transfers_.swap_in();
  }

  /// Notes the blocks on the host that the prefetch policy names, within its bound.
  void list_wanted() {
    wanted_.clear();
    std::size_t inflight_bytes = blocks_.prefetched_bytes();
    std::size_t most_bytes = prefetcher_.max_inflight_bytes();
    if (options_.prefetched_part < 1.0) {
      double const part = options_.prefetched_part * capacity_bytes();
      most_bytes = std::min(most_bytes, static_cast<std::size_t>(part));
    }
    auto const want = [&](BlockId id, std::uint64_t next_use) {
      BlockRecord const* const block = blocks_.find(id);
      if (block == nullptr || block->state() != BlockState::on_host || !blocks_.may_return(id) ||
          transfers_.has_failed(*block)) {
        return true;
      }
      if (block->bytes > most_bytes) {
        return true;  // it never comes in ahead of need, so later blocks do not wait for it
      }
      inflight_bytes += block->bytes;
      if (inflight_bytes > most_bytes) {
        return false;
      }
      wanted_.push_back({id, next_use});
      return true;
    };
    prefetcher_.candidates([&](BlockId id, std::uint64_t next_use) {
      // What a dropped block is made from is needed when that block is.
      BlockRecord const* const block = blocks_.find(id);
      if (block != nullptr && block->state() == BlockState::dropped) {
        return blocks_.recipes().all_below(
            id, [&](BlockId operand) { return want(operand, next_use); });
      }
      return want(id, next_use);
    });
  }

  /// Stages the swap-in of a block. @returns false if there is no room for it
  bool stage(Wanted const& wanted) {
    BlockRecord const* const block = blocks_.find(wanted.id);
    if (block == nullptr || block->state() != BlockState::on_host) {
      return true;  // while the lock was released the block was freed or swapped in
    }
    // If its next use overwrites it, its bytes need not come back.
    AccessSchedule const& schedule = prefetcher_.schedule();
    if (schedule.is_overwritten_next(wanted.id)) {
      return true;
    }
    auto const is_needed_later = [&](BlockId other) noexcept {
      std::uint64_t const next = schedule.next_use(other);
      return next != use_unknown && next > wanted.next_use;
    };
    blocks_.begin_swap_in(wanted.id);  // from now on no thread frees or acquires it
    std::optional<Placement> placement;
    try {
      placement = reclaimer_.try_take_range_for_prefetch(block->bytes, wanted.id, is_needed_later);
    } catch (...) {
      blocks_.cancel_swap_in(wanted.id);
      throw;
    }
    if (!placement) {
      blocks_.cancel_swap_in(wanted.id);
      return false;
    }
    Use const use = schedule.use_of(wanted.id);
    if (transfers_.stage_swap_in(wanted.id, *placement, use, true) >= most_bytes_together) {
      transfers_.swap_in();
    }
    return true;
  }

  /// While the link is idle, copies to the host blocks that will leave by the plan. Each stays
  /// resident until its room is needed, and then leaves without a copy.
  void copy_out_early() {
    if constexpr (Blocks<Policies>::is_speculative) {
      while (auto const id = blocks_.early_victim()) {
        if (!blocks_.needs_copy(*id) || !transfers_.copy_out(*id)) {
          break;
        }
      }
    }
  }

  Arena const& arena_;
  Prefetcher const& prefetcher_;
  Blocks<Policies>& blocks_;
  Transfers<Policies>& transfers_;
  Reclaimer<Policies>& reclaimer_;
  Journal<Policies> const& journal_;
  MonitorType& monitor_;
  PagerOptions const& options_;
  std::vector<Wanted> wanted_;
};

template <PolicySet Policies>
[[gnu::noinline]] void LookAhead<Policies>::run() {
  if (monitor_.is_exclusive_taken()) {
    return;
  }
  typename MonitorType::Exclusive const exclusive{monitor_};
  try {
    keep_headroom();
    if (options_.prefetching) {
      prefetch();
    }
    if (options_.early_swap_out) {
      copy_out_early();
    }
  } catch (DeviceError const&) {        // NOLINT(bugprone-empty-catch): see the class comment
  } catch (FileTierError const&) {      // NOLINT(bugprone-empty-catch)
  } catch (OutOfHostMemory const&) {    // NOLINT(bugprone-empty-catch)
  } catch (std::bad_alloc const&) {     // NOLINT(bugprone-empty-catch)
  } catch (ContractViolation const&) {  // NOLINT(bugprone-empty-catch): a stream that is captured
  }
}

}  // namespace spillway::detail
