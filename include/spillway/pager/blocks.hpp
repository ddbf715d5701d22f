// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/arena.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/concepts/policy_set.hpp>
#include <spillway/core/block_table.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/record.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host_swap_pool.hpp>
#include <spillway/pager/block_state.hpp>
#include <spillway/pager/copy_streams.hpp>
#include <spillway/pager/pager_options.hpp>
#include <spillway/stream/stream_order.hpp>
#include <spillway/stream_prefetcher.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace spillway::detail {

/// The data that the parts of a pager share, and the few things all of them do with it.
///
/// One lock guards it all. Whoever makes room also holds *the turn*: a flag, not a lock, so that the
/// lock can be let go while copies are enqueued and other threads go on with what is resident.
template <PolicySet Policies>
struct PagerState {
  using Device = typename Policies::device;
  using Arena = ArenaOf<Policies>;
  using Pool = HostSwapPool<Device>;
  using Prefetcher = StreamPrefetcher<typename Policies::prefetch>;
  using Eviction = typename Policies::eviction;
  using Lock = typename Policies::lock;
  using ObserverType = typename Policies::observer;
  using Guard = std::unique_lock<Lock>;
  using stream_type = typename Device::stream_type;

  /// The arena maps pages: ranges have to be mapped before use, with the turn and without the lock.
  static constexpr bool maps_pages = MappingArena<Arena>;
  static constexpr bool keeps_addresses = StableAddressArena<Arena>;
  /// Swapped-out blocks keep their addresses, and nothing stays mapped there.
  static constexpr bool vacates = keeps_addresses && VacatingApi<Device>;

  PagerState(Device& the_device,
             StreamOrder<Device>& the_order,
             Arena& the_arena,
             Pool& the_pool,
             CopyStreams<Device>& the_streams,
             Prefetcher& the_prefetcher,
             PagerOptions the_options)
      : device{the_device},
        order{the_order},
        arena{the_arena},
        pool{the_pool},
        streams{the_streams},
        prefetcher{the_prefetcher},
        options{the_options} {
    lease_waiters.reserve(64);
  }

  /// Lets the lock go for as long as it lives: device calls are made in its scope.
  class Unlocked {
   public:
    explicit Unlocked(Guard& guard) : guard_{guard} { guard_.unlock(); }
    Unlocked(Unlocked const&) = delete;
    Unlocked& operator=(Unlocked const&) = delete;
    ~Unlocked() { guard_.lock(); }

   private:
    Guard& guard_;
  };

  /// The right to make room. At most one thread has it.
  class Turn {
   public:
    Turn(PagerState& state, Guard& guard) : state_{state} {
      while (state.is_turn_taken) {
        state.wait_for_change(guard);
      }
      state.is_turn_taken = true;
    }
    Turn(Turn const&) = delete;
    Turn& operator=(Turn const&) = delete;
    ~Turn() {
      state_.is_turn_taken = false;
      state_.notify();
    }

   private:
    PagerState& state_;
  };

  /// Sleeps until another thread ends a turn, a transition or a lease. Not a wait for the device.
  void wait_for_change(Guard& guard) {
    ++waiters;
    changed.wait(guard);
    --waiters;
  }

  void notify() noexcept {
    if (waiters != 0) {
      changed.notify_all();
    }
  }

  /// @throws ContractViolation for an id that names no block
  [[nodiscard]] BlockRecord& record(BlockId id) {
    BlockRecord* const found = blocks.find(id);
    expects(found != nullptr && !found->is_orphan,
            "no such block: it was freed, or the id is another allocator's");
    return *found;
  }

  /// The index of `stream`, from a small cache that is read under the lock.
  [[nodiscard]] StreamIndex index_of(Guard& guard, stream_type stream) {
    auto& hit = stream_cache[std::hash<stream_type>{}(stream) % stream_cache.size()];
    if (hit.second != StreamIndex::none && hit.first == stream) {
      return hit.second;
    }
    StreamIndex index{};
    {
      Unlocked const unlocked{guard};
      index = order.index_of(stream);
    }
    hit = {stream, index};
    return index;
  }

  void log(RecordKind kind, BlockId id, std::size_t bytes, void const* address) noexcept {
    if constexpr (ObserverType::is_enabled) {
      std::uint64_t const now = device.clock_ns();
      log(Record{kind, id, bytes, address, now, now});
    }
  }

  void log(Record const& record) noexcept {
    if constexpr (ObserverType::is_enabled) {
      try {
        records.push_back(record);
      } catch (std::bad_alloc const&) {  // NOLINT(bugprone-empty-catch): an event less to show
      }
    }
  }

  void
  count_host_waits(std::uint64_t count, std::uint64_t start_ns, std::uint64_t end_ns) noexcept {
    if (count != 0) {
      stats.host_waits += count;
      stats.host_wait_ns += end_ns - start_ns;
      log(Record{.kind = RecordKind::host_wait, .start_ns = start_ns, .end_ns = end_ns});
    }
  }

  /// Hands the events noted so far to the observer. Called without the lock.
  void tell_observer() {
    if constexpr (ObserverType::is_enabled) {
      std::vector<Record> told;
      {
        Guard const guard{lock};
        told.swap(records);
      }
      for (Record const& record : told) {
        observer.on_record(record);
      }
    }
  }

  /// What is known of memory now, for an error.
  [[nodiscard]] MemoryReport report(std::size_t requested_bytes) const {
    return {.requested_bytes = requested_bytes,
            .capacity_bytes = arena.capacity_bytes(),
            .reserved_bytes = arena.reserved_bytes(),
            .free_bytes = arena.free_bytes(),
            .largest_free_bytes = arena.largest_free_bytes(),
            .leased_bytes = static_cast<std::size_t>(stats.leased.bytes.current),
            .reclaimable_bytes = static_cast<std::size_t>(stats.inactive_bytes()),
            .host_free_bytes = pool.free_bytes()};
  }

  /// What a block of `bytes` takes up on the device.
  [[nodiscard]] std::size_t rounded(std::size_t bytes) const noexcept {
    return arena.rounded_bytes(bytes);
  }

  /// A range for a block if one fits as things are. The caller has the turn where pages are mapped.
  ///
  /// @throws DeviceError if pages cannot be mapped; nothing is taken then
  [[nodiscard]] std::optional<Placement> try_place(Guard& guard, std::size_t bytes, BlockId owner) {
    if constexpr (!maps_pages) {
      return arena.try_take(bytes, owner);
    } else {
      std::optional<Placement> placement;
      if constexpr (keeps_addresses) {
        BlockRecord const& block = *blocks.find(owner);
        placement = block.is_parked ? arena.try_retake(block.range) : arena.try_take(bytes, owner);
      } else {
        placement = arena.try_take(bytes, owner);
      }
      if (placement) {
        map_pages(guard, *placement, owner);
      }
      return placement;
    }
  }

  void map_pages(Guard& guard, Placement& placement, BlockId owner) {
    std::uint64_t waits = 0;
    std::uint64_t start_ns = 0;
    std::uint64_t end_ns = 0;
    try {
      Unlocked const unlocked{guard};
      start_ns = device.clock_ns();
      MappedRange const mapped = arena.map(placement.range);
      end_ns = device.clock_ns();
      placement.fence = mapped.fence;
      waits = mapped.host_waits;
    } catch (...) {
      unplace(owner, placement, {});
      throw;
    }
    count_host_waits(waits, start_ns, end_ns);
  }

  /// Gives back a range that `try_place` found and no block got.
  void unplace(BlockId owner, Placement const& placement, Fence const& after) noexcept {
    if constexpr (keeps_addresses) {
      if (blocks.find(owner)->is_parked) {
        return arena.park(placement.range, after);
      }
    }
    arena.give_back(placement.range, after);
  }

  /// A block got a device range. The policy is told by the caller, who knows of which use.
  void on_range_taken(BlockRecord& block, Placement const& placement) noexcept {
    block.is_parked = false;
    block.address = placement.address;
    block.range = placement.range;
    block.written = placement.fence;
    block.used.clear();
    stats.resident.add(block.bytes);
    if (block.is_leased()) {
      stats.leased.add(block.bytes);
    }
  }

  /// How a block leaves its range: for good, or to come back; then perhaps the device unmaps it.
  enum class Leaves : std::uint8_t { for_good, parked, vacated };

  /// A block's range goes back to the arena; `after` is its last use. A block that stays somewhere
  /// else keeps its address where addresses are kept.
  void on_range_left(BlockRecord& block, Fence const& after, Leaves how) noexcept {
    if constexpr (keeps_addresses) {
      block.is_parked = how != Leaves::for_good;
      if (how == Leaves::for_good) {
        arena.give_back(block.range, after);
      } else if (how == Leaves::parked) {
        arena.park(block.range, after);
      } else {
        arena.park_vacated(block.range, after);
      }
    } else {
      arena.give_back(block.range, after);
    }
    block.address = nullptr;
    stats.resident.subtract(block.bytes);
    if (block.is_leased()) {
      stats.leased.subtract(block.bytes);
    }
    if (block.is_prefetched) {
      block.is_prefetched = false;
      prefetched_bytes -= block.bytes;
      ++stats.prefetch_wasted;
    }
    block.is_arriving = false;
  }

  /// Waits while another thread carries the block, or has its range and not yet its lease.
  /// @returns whether it had to: the lock was then let go
  bool await_transition(Guard& guard, BlockRecord const& block, void const* group) {
    if (!block.is_busy && (block.filler == nullptr || block.filler == group)) {
      return false;
    }
    // Whoever makes room must not wait for leases of a thread that waits for it.
    auto const me = std::this_thread::get_id();
    lease_waiters.push_back(me);
    notify();
    while (block.is_busy || (block.filler != nullptr && block.filler != group)) {
      wait_for_change(guard);
    }
    lease_waiters.erase(std::find(lease_waiters.begin(), lease_waiters.end(), me));
    return true;
  }

  /// Learns whether the file gave back the bytes that a block was last swapped in with.
  ///
  /// @throws FileTierError if not, as often as it is asked
  void prove_contents(BlockRecord& block) {
    pool.check(block.host);
    block.is_unproven = false;
  }

  void free_block(BlockId id, BlockRecord& block) noexcept {
    log(RecordKind::deallocate, id, block.bytes, block.address);
    if (block.is_resident()) {
      eviction.on_erase(id);
      on_range_left(block, block.last_uses(), Leaves::for_good);
    } else if (block.has_contents) {
      --swapped_out_blocks;
    }
    if constexpr (keeps_addresses) {
      if (block.is_parked) {
        arena.release(block.range);
      }
    }
    if (block.host != HostSlotId{}) {
      pool.give_back(block.host);
    }
    prefetcher.on_destroy(id);
    stats.allocated.subtract(block.bytes);
    stats.requested_bytes.subtract(block.requested_bytes);
    blocks.erase(id);
    ++releases;  // room for whoever waits for it
    notify();
  }

  // Parts; not owned.
  Device& device;
  StreamOrder<Device>& order;
  Arena& arena;
  Pool& pool;
  CopyStreams<Device>& streams;
  Prefetcher& prefetcher;
  PagerOptions options;

  mutable Lock lock;  // guards everything below
  std::condition_variable_any changed;
  std::size_t waiters = 0;
  bool is_turn_taken = false;
  BlockTable<BlockRecord> blocks;
  Eviction eviction;
  Stats stats;
  std::size_t prefetched_bytes = 0;            // brought in ahead of need and not used yet
  std::size_t stuck_bytes = 0;                 // leased when the step began, and of no use in it
  std::size_t swapped_out_blocks = 0;          // blocks whose only valid copy is on the host
  std::uint64_t releases = 0;                  // leases ended; a waiting thread sees progress by it
  std::uint64_t last_eviction_step = 0;        // stats.steps + 1 at the last eviction; 0: never
  std::vector<std::thread::id> lease_waiters;  // threads that wait for leases of others
  std::array<std::pair<stream_type, StreamIndex>, 16> stream_cache{};
  std::vector<Record> records;
  [[no_unique_address]] ObserverType observer;

  /// Counts what a step that is predicted has no use for and cannot leave either, since it is leased: once
  /// for each step, so that its plan is not made anew whenever a lease begins.
  void note_stuck_bytes() noexcept {
    stuck_bytes = 0;
    AccessSchedule const& schedule = prefetcher.schedule();
    if (schedule.is_predicting()) {
      blocks.for_each([&](BlockId id, BlockRecord const& block) {
        if (block.is_leased() && block.is_resident() && schedule.use_of(id).entry == never_entry) {
          stuck_bytes += block.bytes;
        }
      });
    }
  }
  /// What blocks with a use ahead may take up.
  [[nodiscard]] std::size_t plannable_bytes() const noexcept {
    return arena.capacity_bytes() - std::min(arena.capacity_bytes(), stuck_bytes);
  }

  /// True while blocks have been leaving lately: then exact events are worth their cost.
  [[nodiscard]] bool is_under_pressure() const noexcept {
    return last_eviction_step != 0 && last_eviction_step >= stats.steps;
  }
};

}  // namespace spillway::detail
