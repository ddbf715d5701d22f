// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/arena.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/concepts/eviction_policy.hpp>
#include <spillway/concepts/pager.hpp>
#include <spillway/concepts/policy_set.hpp>
#include <spillway/concepts/recompute_policy.hpp>
#include <spillway/core/block_table.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host_swap_pool.hpp>
#include <spillway/pager/block_state.hpp>
#include <spillway/pager/journal.hpp>
#include <spillway/pager/kept_copies.hpp>
#include <spillway/pager/monitor.hpp>
#include <spillway/pager/recipes.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>
#include <spillway/stream_prefetcher.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>

namespace spillway::detail {

/// A non-owning reference to a predicate on `BlockId`, which must outlive it. Functions that take a
/// `BlockFilter` need not be templates, so they are compiled only once.
class BlockFilter {
 public:
  template <class Admits>
  BlockFilter(Admits const& admits) noexcept  // NOLINT(google-explicit-constructor)
      : admits_{&admits}, ask_{[](void const* asked, BlockId id) noexcept -> bool {
          return (*static_cast<Admits const*>(asked))(id);
        }} {}

  [[nodiscard]] bool operator()(BlockId id) const noexcept { return ask_(admits_, id); }

 private:
  void const* admits_;
  bool (*ask_)(void const*, BlockId) noexcept;
};

inline constexpr auto any_block = [](BlockId) noexcept { return true; };

/// The table of a pager's blocks, with the eviction policy that orders the resident ones.
///
/// Each function that changes a block's state also updates what depends on it: the range in the
/// arena, what the eviction policy tracks, the statistics. No function enqueues a copy; `Transfers`
/// does that. Every function is called under the lock. Only `try_place` releases it meanwhile, if
/// the arena maps pages.
template <PolicySet Policies>
class Blocks {
 public:
  using Device = typename Policies::device;
  using Arena = ArenaOf<Policies>;
  using Pool = HostSwapPool<Device, typename Policies::file_io>;
  using Eviction = typename Policies::eviction;
  using Recompute = typename Policies::recompute;
  using Prefetcher = StreamPrefetcher<typename Policies::prefetch>;
  using MonitorType = Monitor<typename Policies::lock>;

  static constexpr bool maps_pages = MappingArena<Arena>;
  static constexpr bool keeps_addresses = StableAddressArena<Arena>;
  /// Blocks keep their addresses, and the device unmaps swapped-out blocks in stream order.
  static constexpr bool vacates = keeps_addresses && VacatingApi<Device>;
  static constexpr bool is_speculative = SpeculativeEvictionPolicy<Eviction>;

  /// The arguments are not owned and must outlive this object.
  Blocks(Device& device,
         Arena& arena,
         Pool& pool,
         Prefetcher& prefetcher,
         Journal<Policies>& journal,
         MonitorType& monitor,
         Eviction eviction = Eviction(),
         Recompute recompute = Recompute(),
         double link_bytes_per_second = 25e9)
      : device_{device},
        arena_{arena},
        pool_{pool},
        prefetcher_{prefetcher},
        journal_{journal},
        monitor_{monitor},
        eviction_{std::move(eviction)},
        recompute_{std::move(recompute)},
        link_bytes_per_second_{link_bytes_per_second} {}
  Blocks(Blocks const&) = delete;
  Blocks& operator=(Blocks const&) = delete;

  // The table.

  /// Adds a block that has neither a range nor contents. The caller then calls `count`, which makes
  /// it part of the statistics, or `refuse`, which removes it.
  ///
  /// @param call  the name of the public call, for errors; by default that of the caller
  /// @throws ContractViolation for 0 bytes; OutOfDeviceMemory if it exceeds the capacity;
  ///         std::bad_alloc
  BlockId add(std::size_t size_bytes, char const* call = __builtin_FUNCTION()) {
    expects(size_bytes != 0, "a block must have at least one byte", {}, call);
    // Rounding must not overflow.
    bool const is_absurd = size_bytes > std::numeric_limits<std::size_t>::max() / 2;
    if (is_absurd || arena_.rounded_bytes(size_bytes) > arena_.capacity_bytes()) {
      journal_.refused_block();
      throw OutOfDeviceMemory{
          report(size_bytes),
          "The block alone is larger than the capacity: raise the capacity or split the block."};
    }
    std::size_t const bytes = arena_.rounded_bytes(size_bytes);
    BlockId const id = table_.emplace({.requested_bytes = size_bytes, .bytes = bytes});
    try {
      kept_copies_.reserve(id);
      prefetcher_.on_create(id, bytes);
    } catch (...) {
      table_.erase(id);
      throw;
    }
    journal_.block_added(id, at(id));
    return id;
  }
  void count(BlockId id) noexcept { journal_.block_counted(at(id)); }
  /// Removes a block that was added and for which no room was found.
  void refuse(BlockId id) noexcept {
    journal_.block_refused(id, at(id));
    prefetcher_.on_destroy(id);
    kept_copies_.erase(id);
    table_.erase(id);
  }

  /// Frees a block that is not in transit, with its range and its host slot. If other blocks are
  /// made from it, it may stay as an orphan (see `Recipes`).
  void free(BlockId id, BlockRecord& block) noexcept {
    if (recipes_.may_go(id)) {
      erase(id, block);
    } else if (block.host != HostSlotId{}) {
      pool_.disown(block.host);
    }
    free_orphans();
  }
  /// Frees orphans that no block needs any more, and the bytes of orphans of which no block needs
  /// the bytes. Called whenever that may have changed.
  void free_orphans() noexcept {
    while (auto const orphan = recipes_.take_orphan()) {
      BlockRecord& block = at(orphan->id);
      if (orphan->is_for_good) {
        erase(orphan->id, block);
      } else {
        drop_orphan(orphan->id, block);
      }
    }
  }

  [[nodiscard]] BlockRecord* find(BlockId id) noexcept { return table_.find(id); }
  /// The record of a block that is known to exist.
  [[nodiscard]] BlockRecord& at(BlockId id) noexcept { return *table_.find(id); }
  /// @param call  as for `add`
  /// @throws ContractViolation for an id that names no block
  [[nodiscard]] BlockRecord const& expect(BlockId id,
                                          char const* call = __builtin_FUNCTION()) const {
    BlockRecord const* const found = table_.find(id);
    expects(found != nullptr && !found->is_abandoned,
            "no such block: it was freed, or the id is another allocator's",
            {},
            call);
    return *found;
  }
  [[nodiscard]] BlockRecord& expect(BlockId id, char const* call = __builtin_FUNCTION()) {
    (void)std::as_const(*this).expect(id, call);
    return at(id);
  }
  [[nodiscard]] std::size_t size() const noexcept { return table_.size(); }
  /// Calls `visit(id, record)` for every block.
  template <class Visit>
  void for_each(Visit visit) {
    table_.for_each(visit);
  }
  template <class Visit>
  void for_each(Visit visit) const {
    table_.for_each(visit);
  }

  /// Returns the number of swapped-out blocks.
  [[nodiscard]] std::size_t on_host_count() const noexcept { return on_host_count_; }
  /// The resident blocks that have a host slot.
  [[nodiscard]] KeptCopies& kept_copies() noexcept { return kept_copies_; }
  /// Adds a resident block to `kept_copies` if it has a host slot.
  void note_host_slot(BlockId id, BlockRecord const& block) noexcept {
    if (block.host != HostSlotId{}) {
      kept_copies_.note(id, block.is_host_valid);
    }
  }
  /// Bytes that were swapped in ahead of need and not used yet.
  [[nodiscard]] std::size_t prefetched_bytes() const noexcept { return prefetched_bytes_; }

  /// Waits while the block is in transit in another thread, or is being filled by another acquire
  /// (`BlockState::filling`). If the caller holds no lease on the block, its owner may free it
  /// meanwhile.
  ///
  /// @param group  the acquire that calls: it does not wait for a block that it fills itself
  /// @returns whether it had to wait; the lock was then released meanwhile
  bool wait_until_settled(BlockId id, void const* group) {
    auto const is_carried = [&] {
      BlockRecord const* const block = find(id);
      return block != nullptr && block->is_in_transit();
    };
    auto const is_filled = [&] {
      BlockRecord const* const block = find(id);
      return block != nullptr && block->state() == BlockState::filling && block->filler != group;
    };
    bool has_waited = false;
    while (is_carried() || is_filled()) {
      has_waited = true;
      // A thread that has a block in transit does not wait for leases. One that fills it may.
      monitor_.sleep_while(is_carried);
      (void)monitor_.wait_while(is_filled);
    }
    return has_waited;
  }

  // Ranges.

  /// Takes a range for a block if one is free. If the arena maps pages, the lock is released while
  /// it does so, and the caller must have the exclusive right.
  ///
  /// @throws DeviceError if pages cannot be mapped; nothing is taken then
  [[nodiscard]] std::optional<Placement> try_place(std::size_t bytes, BlockId owner) {
    if constexpr (!maps_pages) {
      return arena_.try_take(bytes, owner);
    } else {
      for (;;) {  // ends, since memory that the device has refused is no longer counted as free
        std::optional<Placement> placement = try_take_unmapped(bytes, owner);
        if (!placement || try_map(*placement, owner)) {
          return placement;
        }
      }
    }
  }

  /// Gives back a range that `try_place` found and no block got.
  void unplace(BlockId owner, Placement const& placement, Fence const& after) noexcept {
    if constexpr (keeps_addresses) {
      if (at(owner).is_parked) {
        return arena_.park(placement.range, after);
      }
    }
    arena_.give_back(placement.range, after);
  }

  /// Returns a summary of memory now, for an error.
  [[nodiscard]] MemoryReport report(std::size_t requested_bytes) const {
    Stats const& stats = journal_.stats();
    return {.requested_bytes = requested_bytes,
            .capacity_bytes = arena_.capacity_bytes(),
            .reserved_bytes = arena_.reserved_bytes(),
            .free_bytes = arena_.free_bytes(),
            .largest_free_bytes = arena_.largest_free_bytes(),
            .leased_bytes = static_cast<std::size_t>(stats.leased.bytes.current),
            .reclaimable_bytes = static_cast<std::size_t>(stats.inactive_bytes()),
            .host_free_bytes = pool_.free_bytes()};
  }
  [[nodiscard]] std::string advice_when_host_is_full() const { return pool_.advice_when_full(); }

  // Uses. They are passed on to the schedule and the policies.

  /// Records an access, and tells the eviction policy if it made predictions fail or resume.
  [[nodiscard]] Use record_access(BlockRecord& block, LeaseRequest request) noexcept;
  /// Tells the eviction policy of a use of a resident block.
  void touch(BlockId id, Use use) noexcept { eviction_.on_access(id, use); }

  void begin_step() {
    if (has_codings_) {
      table_.for_each([this](BlockId id, BlockRecord& block) { note_price(id, block); });
    }
    prefetcher_.begin_step();
    report_step_time();
    plan_ = &Blocks::plan_step;
    count_stuck_bytes();
    plan();
  }
  /// Lets the eviction policy plan the step for the capacity as it is now.
  void plan() noexcept {
    if (plan_ != nullptr) {
      (this->*plan_)();
    }
  }

  /// Chooses how a block is written in the host pool from now on.
  ///
  /// @throws ContractViolation if the block is unknown
  void set_coding(BlockId id, CodingId coding) {
    BlockRecord& block = expect(id, "set_codec");
    block.coding = coding;
    has_codings_ = true;
    note_price(id, block);
  }

  // Which blocks may leave.

  /// Returns the recipes: which blocks can be made again from which others.
  [[nodiscard]] Recipes& recipes() noexcept { return recipes_; }

  /// Whether a dirty block could leave without a copy, since its recipe can make its bytes again.
  [[nodiscard]] bool may_drop(BlockId id) const noexcept {
    return table_.find(id)->recipe != nullptr && recipes_.may_drop(id, plannable_bytes());
  }
  /// Whether the program should give recipes: the recompute policy wants them, or the host pool may
  /// become full, so that only blocks with recipes can leave. Thread-safe.
  [[nodiscard]] bool wants_recipes() const noexcept {
    return wants_recipes_.load(std::memory_order_relaxed);
  }
  /// Whether the block may leave without a copy and the recompute policy prefers that.
  [[nodiscard]] bool should_drop(BlockId id) noexcept {
    if (!may_drop(id)) {
      has_chosen_ = has_chosen_ || !wants_recipes();
      return false;
    }
    has_chosen_ = true;
    return recompute_.prefers_recompute(costs_of(id, *table_.find(id)));
  }
  /// Whether a block that leaves now must be copied. Also notes, for the recompute policy, that a
  /// block has left in this step.
  [[nodiscard]] bool must_copy(BlockId id) noexcept {
    has_left_ = true;
    return needs_copy(id);
  }
  /// Whether the block would have to be copied if it left. Notes nothing.
  [[nodiscard]] bool needs_copy(BlockId id) noexcept {
    return !table_.find(id)->is_clean() && !should_drop(id);
  }
  /// Tells the schedule the price at which plans count the return of a block. It is less than the
  /// block's bytes if a codec encodes them or a recipe makes them.
  void note_price(BlockId id, BlockRecord& block) noexcept {
    double share = std::min(1.0, link_share(block));
    block.is_recipe_priced = block.has_recipe();
    if (block.is_recipe_priced) {
      share *= recompute_.plan_share(costs_of(id, block));
    }
    prefetcher_.on_spared(
        id, static_cast<std::uint64_t>((1 - share) * static_cast<double>(block.bytes)));
  }

  /// Returns the block that the eviction policy chooses among those that can leave and for which
  /// `admits(id)` is true.
  [[nodiscard]] std::optional<BlockId> victim(std::size_t short_bytes,
                                              BlockFilter admits) noexcept {
    return eviction_.victim(short_bytes, inspecting(admits));
  }
  /// Does the same among the blocks that need not stay until their next use. If the eviction policy
  /// does not know them, all blocks are considered.
  [[nodiscard]] std::optional<BlockId> leaving_victim(std::size_t short_bytes,
                                                      BlockFilter admits) noexcept {
    if constexpr (is_speculative) {
      return eviction_.leaving_victim(inspecting(admits));
    }
    return victim(short_bytes, admits);
  }
  /// Returns a block that the eviction policy wants copied to the host ahead of need, if any.
  [[nodiscard]] std::optional<BlockId> early_victim() noexcept requires is_speculative {
    return eviction_.early_victim([&](BlockId id) noexcept -> std::optional<EvictionCandidate> {
      BlockRecord const* const block = find(id);
      if (block == nullptr || !block->can_leave()) {
        return std::nullopt;
      }
      return EvictionCandidate{block->bytes, !needs_copy(id), block->has_contents()};
    });
  }
  /// Whether the block may come back without taking the room of blocks that are needed earlier.
  [[nodiscard]] bool may_return(BlockId id) const noexcept {
    if constexpr (is_speculative) {
      return eviction_.may_return(prefetcher_.schedule(), id);
    }
    return true;
  }

  // Changes of state.

  /// Gives a block its range. No bytes are swapped in: there are none, or the acquire `filler` will
  /// overwrite them.
  ///
  /// @throws std::bad_alloc; the range is then back in the arena
  void place(BlockId id, Placement const& placement, Use use, void const* filler = nullptr) {
    try {
      track(id, use);
    } catch (...) {
      unplace(id, placement, placement.fence);
      throw;
    }
    BlockRecord& block = at(id);
    BlockState const before = block.state();
    take_range(block, placement);
    if (before == BlockState::on_host || before == BlockState::dropped) {
      block.status.become(BlockState::filling);
      block.filler = filler;
      on_host_count_ -= before == BlockState::on_host ? 1 : 0;
    } else {
      block.status.become(before == BlockState::vacant ? BlockState::blank : BlockState::lost);
    }
    note_host_slot(id, block);
    journal_.made_resident(id, block);
  }

  /// Undoes `place` when the acquire that was to overwrite the block has failed: the bytes are
  /// where they were before.
  void undo_filling(BlockId id, BlockRecord& block) noexcept {
    eviction_.on_erase(id);
    journal_.range_lost(id, block);
    leave_device(block, block.last_uses(), Leaves::parked);
  }

  /// Notes that a lease was granted. If it allows writing, the copy on the host becomes invalid.
  void use(BlockId id, BlockRecord& block, Access access) noexcept {
    BlockState const state = block.state();
    if (access != Access::read) {
      if (state != BlockState::resident) {
        block.status.become(BlockState::resident);
      }
      if (std::exchange(block.is_host_valid, false)) {
        note_host_slot(id, block);
      }
      if (access == Access::write && std::exchange(block.is_read_unchecked, false)) {
        // The bytes that were swapped in matter only if a lease before this one could read them.
        bool const is_first = state == BlockState::prefetched || state == BlockState::arriving;
        pool_.forget_failures(block.host, !is_first);
      }
      if (state == BlockState::filling) {
        block.filler = nullptr;
        monitor_.notify();
      }
    } else if (state == BlockState::arriving) {
      block.status.become(BlockState::resident);
    }
  }

  /// Notes that the block's recipe has been enqueued; it has run at `done`.
  void commit_recompute(BlockId id, BlockRecord& block, Ticket done, std::uint64_t ns) noexcept {
    block.status.become(BlockState::arriving);
    block.filler = nullptr;
    block.written = done;
    block.used.clear();
    recipes_.on_recompute(id);
    journal_.recomputed(id, block, ns);
    monitor_.notify();
  }

  /// Notes the first use of a prefetched block.
  void use_prefetched(BlockRecord& block) noexcept {
    block.status.become(BlockState::arriving);
    prefetched_bytes_ -= block.bytes;
  }

  /// Puts a block into transit for a swap-in.
  void begin_swap_in(BlockId id) noexcept { at(id).status.become(BlockState::swapping_in); }
  /// Makes the eviction policy track a block that gets a range. @throws std::bad_alloc
  void track(BlockId id, Use use) { eviction_.on_insert(id, at(id).bytes, use); }
  /// Ends the transit of a swap-in: the copy is enqueued and will have finished at `done`.
  void commit_swap_in(BlockId id, Placement const& placement, Fence const& done, bool is_prefetch) {
    BlockRecord& block = at(id);
    take_range(block, placement);
    --on_host_count_;
    block.status.become(is_prefetch ? BlockState::prefetched : BlockState::arriving);
    prefetched_bytes_ += is_prefetch ? block.bytes : 0;
    block.written = done;
    block.is_read_unchecked = pool_.may_lose_bytes(block.host);
    note_host_slot(id, block);
    journal_.swapped_in(id, block, is_prefetch);
  }
  /// Ends the transit of a swap-in for which no range was found.
  void cancel_swap_in(BlockId id) noexcept {
    at(id).status.go_back();
    monitor_.notify();
  }
  /// Ends the transit of a swap-in that failed; `after` covers what may have been enqueued of it.
  void cancel_swap_in(BlockId id, Placement const& placement, Fence const& after) noexcept {
    eviction_.on_erase(id);
    unplace(id, placement, after);
    cancel_swap_in(id);
  }

  /// Puts a block into transit for a swap-out, so that no other thread chooses it.
  void begin_swap_out(BlockId id) noexcept {
    at(id).status.become(BlockState::swapping_out);
    eviction_.on_erase(id);
  }
  /// Notes that a dirty block that is `swapping_out` will not be copied: it needs its recipe.
  void begin_drop(BlockId id) noexcept { at(id).status.become(BlockState::dropping); }
  /// Ends the transit of a swap-out; `copy` has the fences of the copy to the host, if there is
  /// one.
  void commit_swap_out(
      BlockId id, bool is_copied, Transfer const& copy, bool is_vacated, EvictionReason reason) {
    BlockRecord& block = at(id);
    Fence after = block.last_uses();
    after.add(copy.device_done);
    if (is_copied) {
      block.is_host_valid = true;
      journal_.swapped_out(id, block);
    } else {
      journal_.dropped(id, block, !block.is_clean());
    }
    Leaves const how = is_vacated ? Leaves::vacated : Leaves::parked;
    if (block.has_contents()) {
      leave_device(block, after, how);
    } else {
      BlockState const next = block.is_lost() ? BlockState::lost_away : BlockState::vacant;
      leave_range(block, after, how);
      block.status.become(next);
    }
    block.written = copy.host_done;  // `residency` asks whether it has passed
    block.used.clear();
    journal_.evicted(block, reason);
  }
  /// Ends the transit of a swap-out that is not made: the block stays. @throws std::bad_alloc; the
  /// eviction policy then does not track the block
  void cancel_swap_out(BlockId id) {
    BlockRecord& block = at(id);
    block.status.go_back();
    recipes_.on_need_ended(block);
    note_host_slot(id, block);
    eviction_.on_insert(id, block.bytes, prefetcher_.schedule().use_of(id));
  }

  /// Notes that a move has destroyed the block's bytes on the device. Only a valid host copy, or a
  /// recipe, can give them back.
  void lose_bytes(BlockId id, BlockRecord& block) noexcept {
    if (block.is_host_valid || block.status.settled() == BlockState::filling) {
      eviction_.on_erase(id);
      journal_.range_lost(id, block);
      leave_device(block, block.last_uses(), Leaves::parked);
    } else {
      forget_prefetch(block);
      block.status.become(BlockState::lost);
    }
  }

 private:
  /// What the eviction policy is told about blocks of which it may name one.
  [[nodiscard]] auto inspecting(BlockFilter admits) noexcept {
    return [this, admits](BlockId id) noexcept -> std::optional<EvictionCandidate> {
      BlockRecord const* const block = find(id);
      if (block == nullptr || !block->can_leave() || !admits(id)) {
        return std::nullopt;
      }
      return EvictionCandidate{block->bytes, block->is_clean(), block->has_contents()};
    };
  }
  void erase(BlockId id, BlockRecord& block) noexcept {
    journal_.block_freed(id, block);
    if (block.is_resident()) {
      eviction_.on_erase(id);
    }
    leave_memory(id, block);
    kept_copies_.erase(id);
    table_.erase(id);
    monitor_.notify_release();
  }
  /// Frees the memory of an orphan and keeps its recipe, for the blocks that are made from it.
  void drop_orphan(BlockId id, BlockRecord& block) noexcept {
    journal_.orphan_dropped(id, block);
    if (block.is_resident()) {
      begin_swap_out(id);
      begin_drop(id);
    }
    leave_memory(id, block);
    if (block.state() != BlockState::dropped) {
      block.status.become(BlockState::dropped);
    }
    block.is_uncounted = true;
    block.is_host_valid = false;
    block.is_read_unchecked = false;
    block.host = HostSlotId{};
    block.written.clear();
    block.used.clear();
    monitor_.notify_release();
  }
  /// Frees a block's device range and its host slot.
  void leave_memory(BlockId id, BlockRecord& block) noexcept {
    if (block.is_resident()) {
      leave_range(block, block.last_uses(), Leaves::for_good);
    } else if (block.state() == BlockState::on_host) {
      --on_host_count_;
    }
    if constexpr (keeps_addresses) {
      if (block.is_parked) {
        arena_.release(block.range);
        block.is_parked = false;
      }
    }
    if (block.host != HostSlotId{}) {
      pool_.give_back(block.host);
    }
    prefetcher_.on_destroy(id);
  }

  /// Returns which fraction of a block's bytes crosses the link, as measured for its codec so far.
  [[nodiscard]] double link_share(BlockRecord const& block) const noexcept {
    return block.coding == CodingId{} ? 1 : pool_.link_share(block.coding);
  }
  /// @pre the block has a recipe
  [[nodiscard]] RecomputeCosts costs_of(BlockId id, BlockRecord const& block) const noexcept {
    double const copy_ns = 1e9 * static_cast<double>(block.bytes) / link_bytes_per_second_;
    return {.copy_ns = copy_ns * link_share(block),
            .recompute_ns = static_cast<double>(recipes_.cost_ns(id))};
  }

  /// How a block leaves its range: the range is freed, or parked for the block's return, or parked
  /// and unmapped by the device (`VacatingApi`).
  enum class Leaves : std::uint8_t { for_good, parked, vacated };

  [[nodiscard]] std::optional<Placement> try_take_unmapped(std::size_t bytes, BlockId owner) {
    if constexpr (keeps_addresses) {
      if (BlockRecord const& block = at(owner); block.is_parked) {
        return arena_.try_retake(block.range);
      }
    }
    return arena_.try_take(bytes, owner);
  }

  /// Maps memory to a range. @returns false if the device has refused it
  /// @throws DeviceError. Without memory the range is given back
  [[nodiscard]] bool try_map(Placement& placement, BlockId owner) requires maps_pages {
    MappedRange mapped;
    std::uint64_t start_ns = 0;
    std::uint64_t end_ns = 0;
    try {
      typename MonitorType::Unlocked const unlocked{monitor_};
      start_ns = device_.clock_ns();
      mapped = arena_.map(placement.range);
      end_ns = device_.clock_ns();
    } catch (...) {
      unplace_unmapped(owner, placement);
      throw;
    }
    journal_.host_waited(mapped.host_waits, start_ns, end_ns);
    placement.fence = mapped.fence;
    if (mapped.is_refused) {
      unplace_unmapped(owner, placement);
    }
    return !mapped.is_refused;
  }
  /// Gives back, or parks, a range that could not be mapped. Memory that the device has refused is
  /// then no longer reserved.
  void unplace_unmapped(BlockId owner, Placement const& placement) noexcept requires maps_pages {
    std::size_t const before = arena_.reserved_bytes();
    unplace(owner, placement, {});
    if (std::size_t const now = arena_.reserved_bytes(); now != before) {
      journal_.trimmed(before - now, nullptr);
    }
  }

  void take_range(BlockRecord& block, Placement const& placement) noexcept {
    block.is_parked = false;
    block.address = placement.address;
    block.range = placement.range;
    block.written = placement.fence;
    block.used.clear();
    journal_.range_taken(block);
  }

  /// Gives a block's range back to the arena; `after` are its last uses. If the arena keeps
  /// addresses, a block that will come back only parks its range.
  void leave_range(BlockRecord& block, Fence const& after, Leaves how) noexcept {
    if constexpr (keeps_addresses) {
      block.is_parked = how != Leaves::for_good;
      if (how == Leaves::parked) {
        arena_.park(block.range, after);
      } else if (how == Leaves::vacated) {
        arena_.park_vacated(block.range, after);
      } else {
        arena_.give_back(block.range, after);
      }
    } else {
      arena_.give_back(block.range, after);
    }
    block.address = nullptr;
    journal_.range_left(block);
    forget_prefetch(block);
  }

  void leave_device(BlockRecord& block, Fence const& after, Leaves how) noexcept {
    leave_range(block, after, how);
    block.status.become(block.is_host_valid ? BlockState::on_host : BlockState::dropped);
    block.filler = nullptr;
    on_host_count_ += block.is_host_valid ? 1 : 0;
  }

  /// Counts a prefetched block that leaves or is freed without having been used.
  void forget_prefetch(BlockRecord const& block) noexcept {
    if (block.status.settled() == BlockState::prefetched) {
      prefetched_bytes_ -= block.bytes;
      journal_.prefetch_wasted();
    }
  }

  /// Counts the leased bytes that the predicted step does not use: they take room that its plan
  /// must leave them. This is done once for each step, so that leases do not cause new plans.
  void count_stuck_bytes() noexcept {
    stuck_bytes_ = 0;
    AccessSchedule const& schedule = prefetcher_.schedule();
    if (schedule.is_predicting()) {
      table_.for_each([&](BlockId id, BlockRecord const& block) {
        if (block.is_leased() && block.is_resident() && schedule.use_of(id).entry == never_entry) {
          stuck_bytes_ += block.bytes;
        }
      });
    }
  }
  /// Tells the recompute policy how long the step that ends has taken, if the policy can learn from
  /// it: blocks have left in it, and since the capacity changed there was a block that could be
  /// copied or recomputed. That block may have left in an earlier step, since the rule that the
  /// policy tries may lead to steps without such blocks.
  void report_step_time() noexcept {
    std::uint64_t const now_ns = work_clock_ns();
    bool const has_left = std::exchange(has_left_, false);
    bool const is_measured = has_left && has_chosen_ && step_start_ns_.has_value();
    recompute_.on_step(is_measured ? static_cast<double>(now_ns - *step_start_ns_) : 0,
                       arena_.capacity_bytes());
    has_chosen_ = has_chosen_ && step_capacity_bytes_ == arena_.capacity_bytes();
    step_capacity_bytes_ = arena_.capacity_bytes();
    step_start_ns_ = now_ns;
    wants_recipes_.store(recompute_.wants_recipes() || pool_.free_bytes() < arena_.capacity_bytes(),
                         std::memory_order_relaxed);
  }
  /// Returns the time at which a step begins: on the host's clock or, if the device has a virtual
  /// clock, the time at which the work enqueued before it ends.
  [[nodiscard]] std::uint64_t work_clock_ns() const noexcept {
    if constexpr (VirtualClockApi<Device>) {
      return device_.finish_time_ns();
    } else {
      return device_.clock_ns();
    }
  }
  void plan_step() noexcept { eviction_.on_step(prefetcher_.schedule(), plannable_bytes()); }
  /// Returns how many bytes the blocks of the schedule may take up together.
  [[nodiscard]] std::size_t plannable_bytes() const noexcept {
    return arena_.capacity_bytes() - std::min(arena_.capacity_bytes(), stuck_bytes_);
  }

  Device& device_;
  Arena& arena_;
  Pool& pool_;
  Prefetcher& prefetcher_;
  Journal<Policies>& journal_;
  MonitorType& monitor_;
  BlockTable<BlockRecord> table_;
  Recipes recipes_{table_};
  KeptCopies kept_copies_;
  Eviction eviction_;
  Recompute recompute_;
  std::atomic<bool> wants_recipes_{true};
  double link_bytes_per_second_;
  std::size_t on_host_count_ = 0;
  std::size_t prefetched_bytes_ = 0;
  std::size_t stuck_bytes_ = 0;
  std::optional<std::uint64_t> step_start_ns_;
  std::size_t step_capacity_bytes_ = 0;
  bool has_left_ = false;    // a block has left in this step
  bool has_chosen_ = false;  // since the capacity changed, a block with a recipe has left
  bool has_codings_ = false;
  // Set by the first `begin_step`, so that programs without steps do not contain the planning code.
  void (Blocks::*plan_)() noexcept = nullptr;
};

template <PolicySet Policies>
Use Blocks<Policies>::record_access(BlockRecord& block, LeaseRequest request) noexcept {
  if (block.is_recipe_priced && !block.has_recipe()) {
    note_price(request.id, block);  // what it was to be made from is gone
  }
  Use const use = prefetcher_.on_access(request.id, request.access);
  AccessSchedule& schedule = prefetcher_.schedule();
  switch (schedule.take_change()) {
  case AccessSchedule::Change::none:
    break;
  case AccessSchedule::Change::lost:
    eviction_.on_misprediction();
    break;
  case AccessSchedule::Change::resumed:
    plan();
    break;
  }
  return use;
}

}  // namespace spillway::detail
