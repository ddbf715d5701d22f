// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/arena.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/concepts/policy_set.hpp>
#include <spillway/core/bits.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/pager/block_state.hpp>
#include <spillway/pager/blocks.hpp>
#include <spillway/pager/journal.hpp>
#include <spillway/pager/monitor.hpp>
#include <spillway/pager/transfers.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace spillway {

/// Options of how a pager makes room (`DeviceAllocator::Options::paging`).
struct PagerOptions {
  bool swapping = true;         ///< false: a full device is an error, as without this library
  bool compaction = true;       ///< false: only `compact` moves blocks to join gaps
  bool prefetching = true;      ///< false: blocks come in when they are acquired and never before
  bool poison_vacated = false;  ///< overwrite ranges that are given up, to find stale addresses
  bool early_swap_out = true;   ///< copy blocks that will leave by the plan to the host in advance
  /// The most bytes one compaction pass may move.
  std::size_t compaction_budget_bytes = std::numeric_limits<std::size_t>::max();
  /// Eviction ahead of need starts when this part of the capacity is in use and stops at
  /// `low_watermark`; 1 turns it off. Both have to be set: `low_watermark` must not be the higher.
  double high_watermark = 1.0;
  double low_watermark = 1.0;
  /// The most room, as a fraction of the capacity, that prefetched blocks may take up before they
  /// are used. The prefetch policy may have a lower limit.
  double prefetched_part = 1.0;
  /// The bandwidths from which plans estimate how long copies take: of the host link in one
  /// direction, and of device memory, where a copy inside the device counts as a read and a write.
  double link_bytes_per_second = 25e9;
  double device_bytes_per_second = 1.5e12;
  /// Arenas with up to this many ranges are always searched completely; larger ones only if the
  /// search takes less time than one eviction and return.
  std::size_t few_ranges = 256;
  /// How long a call may wait in all for leases of other threads, for each block that needs room.
  /// Zero: fail at once.
  std::chrono::milliseconds lease_wait{10'000};
};

}  // namespace spillway

namespace spillway::detail {

/// Finds a device range for a block, and reclaims memory for it where none is free.
///
/// A bounded loop of steps, in this order: take a free range; grow the reservation; evict by the
/// policy's choice until enough bytes are free; evict what leaves anyway and needs no copy for it;
/// make free bytes contiguous, by moving blocks or by evicting neighbours, whichever takes less
/// time; give reservations or free pieces back so that a larger one can be made; wait for leases of
/// other threads. It gives up only when every resident block is leased or the host pool is full,
/// and then says which.
///
/// Every function is called with the lock and the exclusive right.
template <PolicySet Policies>
class Reclaimer {
 public:
  using Device = typename Policies::device;
  using Arena = typename Blocks<Policies>::Arena;
  using MonitorType = Monitor<typename Policies::lock>;

  /// The blocks among which the eviction policy chooses: all, or those that need not stay until
  /// their next use (`SpeculativeEvictionPolicy`).
  enum class Victims : std::uint8_t { all, leaving };

  /// The arguments are not owned and must outlive this object.
  Reclaimer(Device& device,
            StreamOrder<Device>& order,
            Arena& arena,
            Blocks<Policies>& blocks,
            Transfers<Policies>& transfers,
            Journal<Policies>& journal,
            MonitorType& monitor,
            PagerOptions const& options)
      : device_{device},
        order_{order},
        arena_{arena},
        blocks_{blocks},
        transfers_{transfers},
        journal_{journal},
        monitor_{monitor},
        options_{options} {}
  Reclaimer(Reclaimer const&) = delete;
  Reclaimer& operator=(Reclaimer const&) = delete;
  /// All work on the memory must have finished.
  ~Reclaimer() {
    if constexpr (GrowingArena<Arena>) {
      if (leaving_) {
        arena_.release(*leaving_);
      }
    }
  }

  /// Takes a range of `bytes` for block `owner`, and reclaims memory for it if none is free. While
  /// this thread waits for leases, others have the exclusive right and may make the block resident.
  ///
  /// @returns nothing if another thread has made the block resident meanwhile
  ///
  /// @throws OutOfDeviceMemory, DeviceError, FileTierError; every block is then resident as it was
  ///         or validly swapped out
  std::optional<Placement> take_range(std::size_t bytes, BlockId owner) {
    RangeSource source = RangeSource::free_range;
    Deadline deadline;
    blocks_.free_orphans();
    // The number of rounds is bounded, since other threads may take what a round has freed. The
    // count begins anew when another thread has ended a lease: most leases do not make enough room,
    // and only the deadline bounds how many of them are waited for.
    std::size_t const most_rounds = 16 + 4 * blocks_.size();
    for (std::size_t rounds_left = most_rounds; rounds_left != 0; --rounds_left) {
      if (auto placement = blocks_.try_place(bytes, owner)) {
        journal_.range_found(source);
        return placement;
      }
      if (exceeds_capacity(bytes)) {
        break;
      }
      std::uint64_t const releases = monitor_.releases();
      auto reclaimed_by = reclaim(bytes);
      if (!reclaimed_by && wait_for_release(releases, deadline)) {
        reclaimed_by = RangeSource::retry;
        rounds_left = deadline ? most_rounds : rounds_left;
      }
      if (blocks_.at(owner).is_resident()) {
        return std::nullopt;
      }
      if (!reclaimed_by) {
        break;
      }
      source = *reclaimed_by;
    }
    journal_.out_of_memory(owner, bytes);
    throw OutOfDeviceMemory{blocks_.report(bytes), advice(bytes)};
  }

  /// Takes a range for a prefetch, if that is possible without waiting and without growing. Evicts
  /// only blocks for which `admits(id)` is true and that need not stay until their next use: others
  /// would have to be swapped in again, which takes more copies than without the prefetch.
  ///
  /// @throws as `take_range`, except OutOfDeviceMemory
  std::optional<Placement>
  try_take_range_for_prefetch(std::size_t bytes, BlockId owner, BlockFilter admits) {
    auto placement = blocks_.try_place(bytes, owner);
    RangeSource source = RangeSource::free_range;
    if (!placement && exceeds_capacity(bytes)) {
      return std::nullopt;
    }
    if (!placement && arena_.free_bytes() < bytes) {
      std::uint64_t const copies = journal_.stats().swap_outs.count;
      std::size_t const short_bytes = bytes - arena_.free_bytes();
      if (evict(short_bytes, EvictionReason::prefetch, admits, Victims::leaving) == 0) {
        return std::nullopt;
      }
      source = source_since(copies);
      placement = blocks_.try_place(bytes, owner);
    }
    if constexpr (MovingArena<Arena>) {
      if (!placement && arena_.free_bytes() >= bytes) {
        std::size_t const most_ranges = first_search(bytes);
        auto const window = cheapest_window(bytes, most_ranges);
        if (auto plan = compaction_plan(bytes, most_ranges, window, AfterCopies::no)) {
          transfers_.move(*plan);
          source = RangeSource::after_compaction;
          placement = blocks_.try_place(bytes, owner);
        }
      }
    }
    if (placement) {
      journal_.range_found(source);
    }
    return placement;
  }

  /// Adapts to a capacity that has been lowered: evicts blocks until the rest fits, and gives what
  /// is reserved beyond the capacity back to the device. If the arena gives back single pieces,
  /// blocks are first moved down, so that the rest lies together without holes, and then evicted
  /// from the top if that does not suffice. Memory of leased blocks stays reserved.
  ///
  /// @throws OutOfDeviceMemory if what cannot leave takes up more; DeviceError, FileTierError
  void fit_capacity() {
    Deadline deadline;
    while (resident_bytes() > arena_.capacity_bytes()) {
      std::uint64_t const releases = monitor_.releases();
      if (!evict_for_room(resident_bytes() - arena_.capacity_bytes()) &&
          !wait_for_release(releases, deadline)) {
        throw OutOfDeviceMemory{blocks_.report(resident_bytes()), advice_to_fit()};
      }
    }
    if constexpr (GrowingArena<Arena>) {
      bool may_slide = arena_.trims_anywhere();
      while (arena_.reserved_bytes() > arena_.capacity_bytes()) {
        if (std::exchange(may_slide, false) && slide()) {
          continue;  // other threads may have freed something meanwhile
        }
        std::size_t const excess = arena_.reserved_bytes() - arena_.capacity_bytes();
        if (trim(excess) == 0 && !(arena_.trims_anywhere() && vacate_top(excess))) {
          break;
        }
      }
    }
  }

  /// Gives about `bytes` of free memory, or all that there is, back to the device, after waiting on
  /// the host for the work that used it. @returns bytes given back
  ///
  /// @throws DeviceError
  std::size_t trim(std::size_t bytes) {
    std::size_t released = 0;
    if constexpr (GrowingArena<Arena>) {
      while (released < bytes) {
        if (!leaving_) {
          leaving_ = arena_.trim(bytes - released);
          if (!leaving_) {
            break;
          }
          journal_.trimmed(leaving_->bytes, leaving_->address);
        }
        Segment const segment = *leaving_;
        std::uint64_t const start_ns = device_.clock_ns();
        {
          Unlocked const unlocked{monitor_};
          wait_before_release(segment);
          journal_.tell_observer();  // before the release: it may have registered the memory
          arena_.release(segment);
          leaving_.reset();
        }
        journal_.host_waited(1, start_ns, device_.clock_ns());
        released += segment.bytes;
      }
    }
    return released;
  }

  /// Evicts blocks that the policy chooses among those for which `admits(id)` is true, until
  /// `wanted_bytes` have been given up.
  ///
  /// @returns bytes given up; fewer than wanted if no more blocks may leave
  std::size_t evict(std::size_t wanted_bytes,
                    EvictionReason reason,
                    BlockFilter admits,
                    Victims among = Victims::all) {
    return try_evict(wanted_bytes, reason, admits, among).value_or(0);
  }

  /// Moves blocks to join free ranges, for at most `budget_bytes`. @returns bytes moved
  std::size_t compact(std::size_t budget_bytes) {
    std::size_t bytes = 0;
    if constexpr (MovingArena<Arena>) {
      if (auto plan = arena_.plan_pass(budget_bytes, can_move()); plan && !plan->moves.empty()) {
        bytes = plan->cost_bytes;
        transfers_.move(*plan);
      }
    }
    return bytes;
  }

 private:
  /// Until when a call waits for leases of other threads: for `PagerOptions::lease_wait` from its
  /// first wait on. Empty before that, and if it may not wait.
  using Deadline = std::optional<typename MonitorType::Clock::time_point>;

  /// Whether blocks may be moved whose swap-in is in flight. Such a move has to wait for that copy
  /// and all copies before it, and so does the work that needs the room.
  enum class AfterCopies : bool { no, yes };

  [[nodiscard]] auto can_move(AfterCopies after_copies = AfterCopies::yes) const noexcept {
    return [this, after_copies](BlockId id) noexcept {
      BlockRecord const* const block = blocks_.find(id);
      return block != nullptr && block->can_move() &&
             (after_copies == AfterCopies::yes || block->state() != BlockState::prefetched);
    };
  }

  /// The aim of a search for blocks to move, and the state of the arena that it saw.
  struct Search {
    std::size_t bytes = 0;
    std::size_t most_ranges = 0;
    std::size_t free_bytes = 0;
    std::byte* window = nullptr;  // the neighbours that are cheapest to evict, and their price
    std::uint64_t price = 0;
    AfterCopies after_copies = AfterCopies::no;

    friend bool operator==(Search const&, Search const&) noexcept = default;
  };

  /// Searches for a plan that makes room by moving blocks and takes no longer than evicting
  /// `instead`; that limit also ends the search. Blocks whose swap-in is in flight are moved only
  /// if `after_copies` allows it and no other plan is found.
  ///
  /// A search delays the program, so a failed one is not repeated while the arena looks the same.
  /// Leases and places may have changed in the meantime, but most searches are for one prefetch
  /// that is tried again after each operation, and evicting `instead` costs little more than a
  /// plan.
  [[nodiscard]] auto compaction_plan(std::size_t bytes,
                                     std::size_t most_ranges,
                                     std::optional<EvictionWindow> const& instead,
                                     AfterCopies after_copies) {
    std::optional<typename Arena::plan_type> plan;
    Search search;
    Search* failed = nullptr;
    if (instead) {
      search = {
          bytes, most_ranges, arena_.free_bytes(), instead->address, instead->cost, after_copies};
      failed = &failed_searches_[place_of(search)];
    }
    if (options_.compaction && !(failed != nullptr && *failed == search)) {
      std::size_t budget_bytes = options_.compaction_budget_bytes;
      if (instead) {
        double const swap_seconds =
            static_cast<double>(instead->cost) / options_.link_bytes_per_second;
        double const most_bytes = swap_seconds * options_.device_bytes_per_second / 2;
        if (most_bytes < static_cast<double>(budget_bytes)) {
          budget_bytes = static_cast<std::size_t>(most_bytes);
        }
      }
      auto const plan_moves = [&](AfterCopies after) {
        return arena_.plan_compaction(bytes, budget_bytes, can_move(after), most_ranges);
      };
      // On a `CallerStreamApi` a copy has finished when the call that enqueued it returns.
      bool const are_copies_left = !CallerStreamApi<Device> && blocks_.prefetched_bytes() != 0;
      plan = plan_moves(are_copies_left ? AfterCopies::no : AfterCopies::yes);
      if (!plan && are_copies_left && after_copies == AfterCopies::yes) {
        plan = plan_moves(AfterCopies::yes);
      }
      if (!plan && failed != nullptr) {
        *failed = search;
      }
    }
    return plan;
  }
  /// Returns where a failed search is remembered. Does not use addresses, so that runs of a program
  /// can be repeated exactly.
  [[nodiscard]] static std::size_t place_of(Search const& search) noexcept {
    return mix_bits(search.bytes ^ mix_bits(search.free_bytes ^ mix_bits(search.price))) %
           most_failed_searches;
  }

  /// Returns up to how many ranges all of them should be searched for room for `bytes`.
  ///
  /// A search that takes longer than one block takes to be swapped out and in again saves nothing.
  /// Which block that would be is not known; its size is assumed to be the mean.
  [[nodiscard]] std::size_t few_ranges(std::size_t bytes) const noexcept {
    if (!options_.swapping) {
      return arena_.few_ranges();
    }
    constexpr double seconds_per_range = 1e-6;  // in a search that uses up its time limit
    auto const& resident = journal_.stats().resident;
    std::uint64_t const mean =
        resident.bytes.current / std::max<std::uint64_t>(1, resident.blocks.current);
    double const swap_seconds = 2.0 * static_cast<double>(std::max<std::uint64_t>(bytes, mean)) /
                                options_.link_bytes_per_second;
    return std::max(options_.few_ranges,
                    static_cast<std::size_t>(std::min(swap_seconds / seconds_per_range, 1e9)));
  }
  [[nodiscard]] std::size_t first_search(std::size_t bytes) const noexcept {
    return arena_.first_search(few_ranges(bytes));
  }

  /// Whether a block is larger than the capacity, which can have been lowered since the block was
  /// made.
  [[nodiscard]] bool exceeds_capacity(std::size_t bytes) const noexcept {
    return bytes > arena_.capacity_bytes();
  }

  /// Returns how many bytes should be evicted next to make room for `bytes`.
  ///
  /// If there are many ranges, evicting one more block costs less than a search for blocks to move,
  /// and often leaves a gap that is large enough.
  [[nodiscard]] std::size_t short_bytes(std::size_t bytes) const noexcept {
    std::size_t const free_bytes = arena_.free_bytes();
    if (free_bytes < bytes) {
      return bytes - free_bytes;
    }
    std::size_t spare_bytes = 0;
    if constexpr (MovingArena<Arena>) {
      spare_bytes = options_.swapping ? arena_.spare_bytes(few_ranges(bytes)) : 0;
    }
    return std::min(bytes, spare_bytes - std::min(spare_bytes, free_bytes - bytes));
  }

  /// Takes one step towards a free range of `bytes`. @returns the kind of step; nothing if none is
  /// left
  std::optional<RangeSource> reclaim(std::size_t bytes) {
    if constexpr (GrowingArena<Arena>) {
      if (grow(bytes)) {
        return RangeSource::growth;
      }
    }
    if (std::size_t const wanted_bytes = short_bytes(bytes); wanted_bytes != 0) {
      std::uint64_t const copies = journal_.stats().swap_outs.count;
      if (evict_for_room(wanted_bytes)) {
        return source_since(copies);
      }
    }
    if constexpr (MovingArena<Arena>) {
      if (arena_.free_bytes() >= bytes) {
        if (drop_what_leaves(bytes / 16)) {
          return RangeSource::after_drop;
        }
        if (auto const made_by = make_contiguous(bytes)) {
          return made_by;
        }
      }
    }
    if constexpr (GrowingArena<Arena> && MovingArena<Arena>) {
      if (arena_.trims_anywhere() ? join_pieces(bytes) : give_up_reservations_for(bytes)) {
        return RangeSource::retry;
      }
    }
    return std::nullopt;
  }

  /// Gives whole reservations back to the device, so that one with room for `bytes` can be made
  /// instead. Chooses those from which the fewest bytes have to be evicted. @returns whether there
  /// is more room
  bool give_up_reservations_for(std::size_t bytes) {
    struct Reservation {
      std::size_t size_bytes = 0;
      std::size_t taken_bytes = 0;
      bool can_go = true;
      std::vector<BlockId> blocks;
    };
    std::vector<Reservation> reservations;
    arena_.for_each_range([&](RangeView const& range) {
      reservations.resize(std::max(reservations.size(), range.segment + 1));
      Reservation& in = reservations[range.segment];
      in.size_bytes += range.size_bytes;
      if (range.state != RangeState::free) {
        BlockRecord const* const block = blocks_.find(range.owner);
        in.can_go = in.can_go && options_.swapping && block != nullptr && block->can_leave();
        in.taken_bytes += range.size_bytes;
        in.blocks.push_back(range.owner);
      }
    });
    std::erase_if(reservations, [](Reservation const& one) { return !one.can_go; });
    std::sort(reservations.begin(), reservations.end(), [](auto const& a, auto const& b) {
      return a.taken_bytes < b.taken_bytes;
    });
    std::size_t const left =
        arena_.capacity_bytes() - std::min(arena_.capacity_bytes(), arena_.reserved_bytes());
    // If the capacity alone would allow it, the device has refused, and must get back all `bytes`.
    std::size_t const wanted_bytes = left < bytes ? bytes - left : bytes;
    std::size_t chosen_bytes = 0;
    std::vector<BlockId> victims;
    for (Reservation const& one : reservations) {
      if (chosen_bytes >= wanted_bytes) {
        break;
      }
      chosen_bytes += one.size_bytes;
      victims.insert(victims.end(), one.blocks.begin(), one.blocks.end());
    }
    if (chosen_bytes < wanted_bytes) {
      return false;
    }
    bool const has_evicted = swap_out(victims) != 0;
    return trim(wanted_bytes) != 0 || has_evicted;
  }

  /// For free memory that is divided by leased blocks: gives free pieces back to the device, and
  /// takes as much memory again at contiguous unused addresses. Evicts blocks while too few pieces
  /// are free. @returns whether there is more room
  bool join_pieces(std::size_t bytes) {
    if (std::size_t const free_bytes = arena_.trimmable_bytes(); free_bytes < bytes) {
      return evict_for_room(bytes - free_bytes);
    }
    if (trim(bytes) < bytes) {
      return true;  // another thread has taken a part of it: try again
    }
    bool const is_enough =
        arena_.largest_bytes_after_growth(std::numeric_limits<std::size_t>::max()) >= bytes;
    while (grow(bytes) && !is_enough) {  // all of it is taken again
    }
    return is_enough;
  }

  /// Waits on the host until no work uses the memory that the arena has handed over. If the wait
  /// fails because no event can be made, it is tried once more; if that fails, too, the device is
  /// considered dead and the memory is released. If the wait is impossible now because a stream is
  /// being captured, the memory is kept for the next call of `trim`.
  void wait_before_release(Segment const& segment) {
    try {
      order_.synchronize(segment.fence);
    } catch (DeviceError const&) {
      try {
        order_.synchronize(segment.fence);
      } catch (DeviceError const&) {
        arena_.release(segment);
        leaving_.reset();
        throw;
      }
    }
  }

  /// Slides blocks down, so that the free memory is at the top. @returns whether any has moved
  bool slide() {
    if constexpr (MovingArena<Arena>) {
      if (options_.compaction) {
        if (auto plan = arena_.plan_slide(can_move())) {
          transfers_.move(*plan);
          return true;
        }
      }
    }
    return false;
  }

  /// Evicts blocks from the highest addresses down until `bytes` have left, or all that may.
  /// @returns whether any has left
  bool vacate_top(std::size_t bytes) {
    std::vector<std::pair<std::byte*, BlockId>> blocks;
    blocks_.for_each([&](BlockId id, BlockRecord const& block) {
      if (block.can_leave()) {
        blocks.emplace_back(static_cast<std::byte*>(block.address), id);
      }
    });
    std::sort(blocks.begin(), blocks.end());
    std::size_t left_bytes = 0;
    std::vector<BlockId> victims;
    while (left_bytes < bytes && !blocks.empty()) {
      victims.clear();
      for (std::size_t chosen = left_bytes; chosen < bytes && !blocks.empty(); blocks.pop_back()) {
        BlockRecord const* const block = blocks_.find(blocks.back().second);
        if (block != nullptr && block->can_leave()) {  // other threads may have changed that
          victims.push_back(blocks.back().second);
          chosen += block->bytes;
        }
      }
      left_bytes += swap_out(victims);
    }
    return left_bytes != 0;
  }

  /// Swaps out these blocks, which may leave, because room is needed. @returns bytes given up
  std::size_t swap_out(std::vector<BlockId> const& victims) {
    for (BlockId const id : victims) {
      blocks_.begin_swap_out(id);
    }
    return victims.empty() ? 0 : transfers_.swap_out(victims, EvictionReason::pressure);
  }

  /// As `evict`. @returns nothing if no block may leave
  std::optional<std::size_t> try_evict(std::size_t wanted_bytes,
                                       EvictionReason reason,
                                       BlockFilter admits,
                                       Victims among = Victims::all) {
    if (!options_.swapping) {
      return std::nullopt;
    }
    std::vector<BlockId> victims;
    victims.reserve(16);
    for (std::size_t chosen_bytes = 0; chosen_bytes < wanted_bytes;) {
      std::size_t const short_bytes = wanted_bytes - chosen_bytes;
      auto const victim = among == Victims::all ? blocks_.victim(short_bytes, admits)
                                                : blocks_.leaving_victim(short_bytes, admits);
      if (!victim) {
        break;
      }
      try {
        victims.push_back(*victim);
      } catch (std::bad_alloc const&) {
        break;  // still swaps out those that were chosen before: they are in transit
      }
      blocks_.begin_swap_out(*victim);
      chosen_bytes += blocks_.at(*victim).bytes;
    }
    return victims.empty() ? std::nullopt : std::optional{transfers_.swap_out(victims, reason)};
  }

  /// Evicts blocks by the policy's choice because room is needed. @returns whether any has left
  bool evict_for_room(std::size_t wanted_bytes) {
    auto evicted = try_evict(wanted_bytes, EvictionReason::pressure, any_block);
    // If the host pool has no room for the chosen blocks, clean or smaller ones may still leave.
    // The pool's estimate of its room can be wrong once for each tier, when the system refuses a
    // slab.
    for (std::size_t tries = 0; evicted == std::size_t{0} && tries <= host_tier_count; ++tries) {
      std::size_t const spare_bytes = transfers_.needless_host_bytes();
      auto const has_place = [&](BlockId id) noexcept {
        BlockRecord const& block = blocks_.at(id);
        return block.is_clean() || blocks_.may_drop(id) ||
               transfers_.may_take_host_slot(block, spare_bytes);
      };
      evicted = try_evict(wanted_bytes, EvictionReason::pressure, has_place);
    }
    return evicted.value_or(0) != 0;
  }
  /// Drops one or several blocks, of `bytes` in all, that will leave before their next use anyway
  /// and need no copy. That costs nothing and often joins free ranges, whereas a move may have to
  /// wait for copies of the moved blocks. @returns whether there was such a block
  bool drop_what_leaves(std::size_t bytes) {
    if constexpr (Blocks<Policies>::is_speculative) {
      auto const needs_no_copy = [this](BlockId id) noexcept { return !blocks_.needs_copy(id); };
      return evict(std::max<std::size_t>(bytes, 1),
                   EvictionReason::pressure,
                   needs_no_copy,
                   Victims::leaving) != 0;
    }
    return false;
  }
  /// Returns how room was made: by copies, if the number of copies is larger than `copies` now, or
  /// by drops.
  [[nodiscard]] RangeSource source_since(std::uint64_t copies) const noexcept {
    return journal_.stats().swap_outs.count == copies ? RangeSource::after_drop
                                                      : RangeSource::after_swap_out;
  }
  [[nodiscard]] std::size_t resident_bytes() const noexcept {
    return static_cast<std::size_t>(journal_.stats().resident.bytes.current);
  }

  /// Joins free ranges. Searches few ranges first, and more only if that finds nothing.
  std::optional<RangeSource> make_contiguous(std::size_t bytes) {
    std::size_t most_ranges = first_search(bytes);
    for (;; most_ranges = arena_.wider_search(most_ranges)) {
      auto const made_by = make_contiguous(bytes, most_ranges);
      if (made_by || most_ranges == all_ranges) {
        return made_by;
      }
    }
  }

  /// The same by a search of `most_ranges` ranges: moves blocks or evicts neighbours, whichever
  /// takes less time.
  std::optional<RangeSource> make_contiguous(std::size_t bytes, std::size_t most_ranges) {
    auto const window = cheapest_window(bytes, most_ranges);
    if (auto plan = compaction_plan(bytes, most_ranges, window, AfterCopies::yes)) {
      transfers_.move(*plan);
      return RangeSource::after_compaction;
    }
    if (window && swap_out(window->owners) != 0) {
      return RangeSource::after_swap_out;
    }
    return std::nullopt;
  }

  /// Returns the neighbours that are cheapest to evict; costs are bytes over the host link.
  [[nodiscard]] std::optional<EvictionWindow> cheapest_window(std::size_t bytes,
                                                              std::size_t most_ranges) const {
    if (!options_.swapping) {
      return std::nullopt;
    }
    auto const price = [this](BlockId id) noexcept -> std::optional<std::uint64_t> {
      BlockRecord const* const block = blocks_.find(id);
      if (block == nullptr || !block->can_leave()) {
        return std::nullopt;
      }
      std::uint64_t const out = block->is_clean() ? 0 : block->bytes;
      std::uint64_t const back = block->has_contents() ? block->bytes : 0;
      return out + back;
    };
    return arena_.cheapest_window(bytes, price, most_ranges);
  }

  /// Whether the capacity allows the arena to take any more memory from the device.
  [[nodiscard]] bool can_grow() const noexcept {
    if constexpr (GrowingArena<Arena>) {
      return arena_.growth_for(1).bytes != 0;
    } else {
      return false;
    }
  }
  /// Takes more memory from the device if the capacity allows it.
  bool grow(std::size_t bytes) {
    Segment segment = arena_.growth_for(bytes);
    if (segment.bytes == 0) {
      return false;
    }
    {
      Unlocked const unlocked{monitor_};
      if (!arena_.try_reserve(segment)) {
        return false;  // the device is full, since other programs use it, too
      }
    }
    try {
      arena_.add_segment(segment);
    } catch (...) {
      Unlocked const unlocked{monitor_};
      arena_.release(segment);
      throw;
    }
    journal_.grown(segment.bytes, segment.address, arena_.reserved_bytes());
    return true;
  }

  /// Waits until another thread ends a lease, unless that has happened since the monitor counted
  /// `seen` releases. @returns false if there is none to wait for, or if the call has waited long
  /// enough
  bool wait_for_release(std::uint64_t seen, Deadline& deadline) {
    if (options_.lease_wait.count() <= 0) {
      return monitor_.releases() != seen;
    }
    if (!deadline) {
      deadline = MonitorType::deadline_in(options_.lease_wait);
    } else if (*deadline <= MonitorType::Clock::now()) {
      return false;
    }
    std::uint64_t const start_ns = device_.clock_ns();
    auto const result = monitor_.wait_for_release(seen, *deadline);
    if (result.has_slept) {
      journal_.host_waited(1, start_ns, device_.clock_ns());
    }
    return result.is_released;
  }

  [[nodiscard]] std::string advice_to_fit() const {
    MemoryReport const now = blocks_.report(0);
    if (now.leased_bytes <= now.capacity_bytes) {
      return options_.swapping ? blocks_.advice_when_host_is_full() : swapping_is_off;
    }
    return "The capacity cannot be lowered below what leases hold: release some.";
  }
  [[nodiscard]] std::string advice(std::size_t bytes) const {
    MemoryReport const now = blocks_.report(bytes);
    if (bytes > now.capacity_bytes) {
      return "The block alone is larger than the capacity: raise the capacity or split the block.";
    }
    if (!options_.swapping) {
      return swapping_is_off;
    }
    std::size_t const most_bytes = now.free_bytes + now.reclaimable_bytes;
    std::size_t const not_given =
        now.capacity_bytes - std::min(now.capacity_bytes, now.reserved_bytes);
    if (most_bytes < bytes && most_bytes + not_given >= bytes) {
      return can_grow() ? "The device does not have the rest of the capacity: free memory that "
                          "others have there, or lower capacity_bytes."
                        : "The rest of the capacity is less than the device reserves at once: "
                          "raise the capacity, or split the block.";
    }
    if (most_bytes < bytes) {
      return "Release leases: the blocks held by them leave too little that could be swapped out.";
    }
    if (now.host_free_bytes < now.reclaimable_bytes) {
      return blocks_.advice_when_host_is_full();
    }
    return "Leases lie between the free ranges: release some, or allow compaction.";
  }

  using Unlocked = typename MonitorType::Unlocked;

  static constexpr char const* swapping_is_off =
      "Swapping is off: switch it on, raise the capacity or free blocks.";

  // A hash table of failed searches, without collision handling: a newer search replaces an older.
  static constexpr std::size_t most_failed_searches = 64;

  Device& device_;
  StreamOrder<Device>& order_;
  Arena& arena_;
  Blocks<Policies>& blocks_;
  Transfers<Policies>& transfers_;
  Journal<Policies>& journal_;
  MonitorType& monitor_;
  PagerOptions const& options_;
  std::array<Search, most_failed_searches> failed_searches_{};
  // What the arena has handed over and is not released yet. Only the thread with the exclusive
  // right uses it.
  std::optional<Segment> leaving_;
};

}  // namespace spillway::detail
