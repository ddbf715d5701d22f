// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/concepts/pager.hpp>
#include <spillway/concepts/policy_set.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>
#include <spillway/lease.hpp>
#include <spillway/pager/block_state.hpp>
#include <spillway/pager/blocks.hpp>
#include <spillway/pager/journal.hpp>
#include <spillway/pager/monitor.hpp>
#include <spillway/pager/reclaimer.hpp>
#include <spillway/pager/transfers.hpp>
#include <spillway/schedule/use.hpp>
#include <spillway/stream/stream_order.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <forward_list>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace spillway::detail {

/// Gives out leases and takes them back: makes blocks resident, orders streams after earlier uses,
/// and counts who holds which block.
///
/// Most leases are on blocks that are resident and settled, and cost neither a device call nor a
/// wait. Every function is called with the lock, which is released during device calls.
template <PolicySet Policies>
class Leases {
 public:
  using Device = typename Policies::device;
  using Pool = typename Blocks<Policies>::Pool;
  using MonitorType = Monitor<typename Policies::lock>;
  using stream_type = typename Device::stream_type;

  /// The arguments are not owned and must outlive this object.
  Leases(Device& device,
         StreamOrder<Device>& order,
         Pool& pool,
         typename Blocks<Policies>::Prefetcher& prefetcher,
         Blocks<Policies>& blocks,
         Transfers<Policies>& transfers,
         Reclaimer<Policies>& reclaimer,
         Journal<Policies>& journal,
         MonitorType& monitor)
      : device_{device},
        order_{order},
        pool_{pool},
        prefetcher_{prefetcher},
        blocks_{blocks},
        transfers_{transfers},
        reclaimer_{reclaimer},
        journal_{journal},
        monitor_{monitor} {}
  Leases(Leases const&) = delete;
  Leases& operator=(Leases const&) = delete;

  /// The fast path, by which most leases are given: leases all blocks that `requests` name if that
  /// takes no device call, and calls `give(position, LeaseRecord, BlockRecord const&)` for each.
  ///
  /// @returns false if a device call would be needed, with nothing changed
  template <class Give>
  [[nodiscard]] bool
  try_acquire(std::span<LeaseRequest const> requests, StreamIndex on, Give const& give) noexcept;

  /// The slow path: does the same for any blocks. Swaps in or recomputes those that are not
  /// resident, and makes `stream`, whose index is `on`, wait for earlier uses. All leases are
  /// counted before any block is swapped in, so that none is evicted for another.
  ///
  /// @param call  the name of the public call, for errors; by default that of the caller
  /// @throws as `DeviceAllocator::acquire`; no lease is held then
  template <class Give>
  [[gnu::noinline]] void acquire(std::span<LeaseRequest const> requests,
                                 stream_type stream,
                                 StreamIndex on,
                                 Give const& give,
                                 char const* call = __builtin_FUNCTION());

  /// Ends a lease. @returns whether an exact event should be recorded on its stream now
  [[nodiscard]] bool release(LeaseRecord const& lease) noexcept {
    BlockRecord& block = *lease.record;
    Ticket const now = order_.mark(lease.stream);
    if (lease.access == Access::read) {
      block.used.add(now);
    } else if (block.lease_serial == lease.serial) {
      // Since this lease was given none has begun or ended, so its stream has waited for all
      // earlier fences.
      block.written = now;
      block.used.clear();
    } else {
      block.written.add(now);
    }
    bool const is_exact_event_wanted = journal_.is_under_pressure() && !now.is_none();
    --block.granted;
    uncount(lease.block, block, lease.thread, Holder::program);
    return is_exact_event_wanted;
  }

  /// Swaps a block in without a lease. No effect on a block that was freed, is resident, has no
  /// contents, or must be recomputed, which would need a stream.
  ///
  /// @throws as `acquire`
  void swap_in(BlockId id) {
    LeaseRequest const request{id, Access::read};
    blocks_.wait_until_settled(id, nullptr);
    BlockRecord const* const block = blocks_.find(id);
    if (block != nullptr && block->state() == BlockState::on_host) {
      Pending pending{*this, {&request, 1}};
      pending.count_all();
      make_resident(request, prefetcher_.schedule().use_of(id), pending);
    }
  }

  /// The index of `stream`, from a small cache that is read under the lock.
  [[nodiscard]] StreamIndex index_of(stream_type stream) {
    auto& hit = stream_cache_[std::hash<stream_type>{}(stream) % stream_cache_.size()];
    if (hit.second != StreamIndex::none && hit.first == stream) {
      return hit.second;
    }
    StreamIndex index{};
    bool has_waited = false;
    std::uint64_t const start_ns = device_.clock_ns();
    {
      Unlocked const unlocked{monitor_};
      index = order_.index_of(stream, has_waited);
    }
    if (has_waited) {
      journal_.host_waited(1, start_ns, device_.clock_ns());
    }
    hit = {stream, index};
    return index;
  }
  /// Clears the cache of `index_of`. Must be called before a stream is retired.
  void forget_streams() noexcept { stream_cache_.fill({}); }

 private:
  using Exclusive = typename MonitorType::Exclusive;
  using Unlocked = typename MonitorType::Unlocked;
  using ThreadIndex = typename MonitorType::ThreadIndex;

  /// Who holds a lease: the program, whose uses the schedule records, or a recomputation.
  enum class Holder : std::uint8_t { program, recipe };

  /// The leases of one acquire that are counted and not handed out yet: their blocks cannot leave
  /// but may still move. The destructor takes the leases back unless `keep` was called.
  class Pending {
   public:
    Pending(Leases& leases, std::span<LeaseRequest const> requests, Holder holder = Holder::program)
        : leases_{leases}, requests_{requests}, holder_{holder} {}
    Pending(Pending const&) = delete;
    Pending& operator=(Pending const&) = delete;
    ~Pending() {
      for (; count_ != 0; --count_) {
        leases_.take_back(requests_[count_ - 1].id, *this, holder_);
      }
    }
    void count_all() noexcept {
      thread_ = leases_.monitor_.begin_leases(static_cast<std::uint32_t>(requests_.size()));
      for (; count_ != requests_.size(); ++count_) {
        BlockId const id = requests_[count_].id;
        leases_.count(id, leases_.blocks_.at(id), holder_);
      }
    }
    void keep() noexcept { count_ = 0; }
    [[nodiscard]] ThreadIndex thread() const noexcept { return thread_; }
    /// False for a recomputation: its errors do not name the operands whose bytes are lost.
    [[nodiscard]] bool is_of_program() const noexcept { return holder_ == Holder::program; }

   private:
    Leases& leases_;
    std::span<LeaseRequest const> requests_;
    Holder holder_;
    ThreadIndex thread_ = 0;
    std::size_t count_ = 0;
  };

  /// Returns the block if a lease on it can be given without a device call and cannot fail, else
  /// null.
  [[nodiscard]] BlockRecord* find_at_hand(LeaseRequest request, StreamIndex on) noexcept {
    BlockRecord* const block = blocks_.find(request.id);
    bool const is_found =
        block != nullptr && (request.access == Access::read || block->recipe == nullptr);
    return is_found && is_settled(*block, request, on) ? block : nullptr;
  }
  /// Whether that is so, apart from the recipes that the lease may end.
  [[nodiscard]] bool
  is_settled(BlockRecord const& block, LeaseRequest request, StreamIndex on) const noexcept {
    if (!is_at_hand(block.state()) || block.is_read_unchecked || block.is_abandoned) {
      return false;
    }
    if constexpr (ReadCheckingApi<Device>) {
      if (block.state() == BlockState::blank && request.access == Access::read) {
        return false;  // the slow path may have to refuse it
      }
    }
    return order_.is_ordered(block.written, on) &&
           (request.access == Access::read || order_.is_ordered(block.used, on));
  }
  LeaseRecord grant_at_hand(BlockRecord& block,
                            LeaseRequest request,
                            StreamIndex on,
                            ThreadIndex thread) noexcept {
    count(request.id, block, Holder::program);
    blocks_.touch(request.id, blocks_.record_access(block, request));
    return grant(block, request, on, thread);
  }

  void count(BlockId id, BlockRecord& block, Holder holder) noexcept {
    if (block.leases++ == 0 && block.is_resident()) {
      journal_.leases_begun(block);
    }
    ++block.lease_serial;
    if (holder == Holder::recipe) {
      blocks_.recipes().begin_reading(id);
    }
  }

  /// Grants a lease that was counted before.
  LeaseRecord
  grant(BlockRecord& block, LeaseRequest request, StreamIndex stream, ThreadIndex thread) noexcept {
    blocks_.use(request.id, block, request.access);
    ++block.granted;
    return {.block = request.id,
            .record = &block,
            .stream = stream,
            .access = request.access,
            .thread = thread,
            .serial = block.lease_serial};
  }

  /// Undoes `count`, whether the lease was granted or not. The schedule is told when the last lease
  /// of the program on a block ends. Leases of recomputations do not count: the schedule does not
  /// record them as uses either.
  void uncount(BlockId id, BlockRecord& block, ThreadIndex thread, Holder holder) noexcept {
    if (holder == Holder::recipe) {
      blocks_.recipes().end_reading(id);
    }
    --block.leases;
    if (holder == Holder::program && block.owner_leases() == 0) {
      prefetcher_.on_release(id);
    }
    if (block.leases != 0) {
      ++block.lease_serial;  // so that the others keep the fence of this one: see `release`
    } else {
      if (block.is_resident()) {
        journal_.leases_ended(block);
      }
      if (block.is_abandoned) {
        blocks_.free(id, block);
      }
    }
    monitor_.end_lease(thread);
  }

  /// Takes back a lease that was counted and not granted.
  void take_back(BlockId id, Pending const& group, Holder holder) noexcept {
    blocks_.wait_until_settled(id, &group);
    BlockRecord& block = blocks_.at(id);
    if (block.state() == BlockState::filling) {
      blocks_.undo_filling(id, block);
    }
    uncount(id, block, group.thread(), holder);
  }

  /// Refuses work on a stream that is being captured into a graph. A swap-in that is captured would
  /// not run now, but at each launch of the graph, from a host slot that may then belong to another
  /// block.
  ///
  /// @throws ContractViolation
  void refuse_capture(stream_type stream, [[maybe_unused]] char const* call) {
    if constexpr (CapturingApi<Device>) {
      bool is_capturing = false;
      {
        Unlocked const unlocked{monitor_};
        is_capturing = device_.is_capturing(stream);
      }
      expects(
          !is_capturing,
          "the stream is being captured into a graph, and not all operands are at hand: acquire "
          "them before the capture, and hold the leases for as long as the graph is launched",
          {},
          call);
    }
  }

  /// On devices that know their host functions (`HostCallCheckingApi`), refuses their calls, since
  /// they may not make the device calls that follow. The fast path makes none and is not checked.
  ///
  /// @throws ContractViolation
  void refuse_host_function([[maybe_unused]] char const* call) {
    if constexpr (HostCallCheckingApi<Device>) {
      bool is_host_function = false;
      {
        Unlocked const unlocked{monitor_};
        is_host_function = device_.is_host_function_caller();
      }
      expects(!is_host_function,
              "called by a function that a stream launched: it may not call the allocator, but can "
              "wake a thread that does",
              {},
              call);
    }
  }

  /// Checks the blocks of a group that is not held, before the first of them is counted. Their
  /// owners may free them whenever the lock is released.
  ///
  /// @throws ContractViolation for a block that does not exist, BlockLost
  void check_blocks(std::span<LeaseRequest const> requests, char const* call) {
    for (LeaseRequest const& request : requests) {
      refuse_lost(blocks_.expect(request.id, call), request);
    }
  }

  static void refuse_lost(BlockRecord const& block, LeaseRequest request) {
    if (block.is_lost() && request.access != Access::write) {
      throw BlockLost{"the bytes of this block were lost when the device failed: write it anew"};
    }
  }

  /// For a group that has found no room and is not held any more: throws an error that says so if
  /// the group would not even fit on an empty device.
  void refuse_too_many(std::span<LeaseRequest const> requests) {
    std::vector<BlockId> ids;
    for (LeaseRequest const& request : requests) {
      ids.push_back(request.id);
    }
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    std::size_t bytes = 0;
    for (BlockId const id : ids) {
      BlockRecord const* const block = blocks_.find(id);
      bytes += block == nullptr ? 0 : block->bytes;  // its owner may have freed it
    }
    MemoryReport const report = blocks_.report(bytes);
    if (ids.size() > 1 && bytes > report.capacity_bytes) {
      throw OutOfDeviceMemory{report,
                              "These are the operands of one call together: acquire fewer at "
                              "once, or raise the capacity."};
    }
  }

  /// On devices that look for mistakes of programs (`ReadCheckingApi`), refuses to lease a block
  /// for `read` that was never written. A lease for `read_write` is allowed, since it may write
  /// first, and so is a read of what another operand of the group writes.
  void refuse_unwritten(std::span<LeaseRequest const> requests, [[maybe_unused]] char const* call) {
    if constexpr (ReadCheckingApi<Device>) {
      if (!device_.checks_reads()) {
        return;
      }
      for (LeaseRequest const& request : requests) {
        BlockState const state = blocks_.at(request.id).status.settled();
        bool const is_unwritten = state == BlockState::vacant || state == BlockState::blank;
        auto const writes_it = [&](LeaseRequest const& other) {
          return other.id == request.id && other.access != Access::read;
        };
        expects(!is_unwritten || std::any_of(requests.begin(), requests.end(), writes_it),
                "a block is read that was never written: acquire it for Access::write first",
                {},
                call);
      }
    }
  }

  /// Gives a block whose lease is counted a range, and swaps its bytes in unless they will be
  /// overwritten. A block that needs its recipe has been recomputed before.
  void make_resident(LeaseRequest request, Use use, Pending const& group) {
    BlockRecord& block = blocks_.at(request.id);
    for (;;) {
      // Must not wait with the exclusive right, which the other thread may need to go on.
      blocks_.wait_until_settled(request.id, &group);
      if (block.is_resident()) {
        return blocks_.touch(request.id, use);
      }
      Exclusive const exclusive{monitor_};
      if (block.is_resident() || block.is_in_transit()) {
        continue;
      }
      auto const needs_copy = [&] {
        return block.state() == BlockState::on_host && request.access != Access::write;
      };
      if (needs_copy()) {
        pool_.check(block.host, group.is_of_program());
      }
      std::optional<Placement> const placement = reclaimer_.take_range(block.bytes, request.id);
      if (!placement) {
        continue;
      }
      if (!needs_copy()) {
        blocks_.place(request.id, *placement, use, &group);
      } else {
        blocks_.begin_swap_in(request.id);
        transfers_.stage_swap_in(request.id, *placement, use, false);
        transfers_.swap_in();
      }
      return;
    }
  }

  /// The requests of a group whose blocks will be overwritten while they are away. They get their
  /// ranges after all other blocks of the group, in the order of their ids.
  ///
  /// Such a block is `filling` from the time when it gets its range until the whole group has its
  /// leases, and other groups that want it wait until then. That cannot deadlock: a group has
  /// everything else that it needs before it fills its first block, and all groups fill blocks in
  /// the same order.
  class ToFill {
   public:
    /// Adds the request if it is such a request. @pre the block is settled: while it is not, nobody
    /// knows whether it will be away @throws std::bad_alloc
    [[nodiscard]] bool try_add(LeaseRequest request, Use use, BlockRecord const& block) {
      bool const is_filled =
          request.access == Access::write && !block.is_resident() && block.has_contents();
      auto const is_same = [&](auto const& other) { return other.first.id == request.id; };
      if (!is_filled && std::none_of(requests_.begin(), requests_.end(), is_same)) {
        return false;
      }
      requests_.emplace_back(request, use);
      return true;
    }
    [[nodiscard]] std::vector<std::pair<LeaseRequest, Use>> const& sorted() {
      std::sort(requests_.begin(), requests_.end(), [](auto const& a, auto const& b) {
        return a.first.id < b.first.id;
      });
      return requests_;
    }

   private:
    std::vector<std::pair<LeaseRequest, Use>> requests_;
  };

  // Recipes. To recompute a block, it is acquired for writing and its operands for reading, and its
  // recipe is enqueued before anybody else can lease the block.

  /// Holds a block that is to be recomputed, and its operands, so that none of them leaves
  /// meanwhile.
  class Recomputation {
   public:
    Recomputation(Leases& leases, BlockId id)
        : requests_{requests_of(id, *leases.blocks_.at(id).recipe)},
          pending_{leases, requests_, Holder::recipe} {
      pending_.count_all();
    }
    /// The requests: first the block, for writing, then its operands, for reading.
    [[nodiscard]] std::span<LeaseRequest const> requests() const noexcept { return requests_; }
    [[nodiscard]] Pending const& group() const noexcept { return pending_; }

   private:
    static std::vector<LeaseRequest> requests_of(BlockId id, Recipe const& recipe) {
      std::vector<LeaseRequest> requests{{id, Access::write}};
      for (Recipe::Link const& operand : recipe.operands) {
        requests.push_back({operand.block, Access::read});
      }
      return requests;
    }

    std::vector<LeaseRequest> requests_;
    Pending pending_;
  };

  /// Recomputes a block if it needs that, after those of its operands that need it.
  ///
  /// @throws as `acquire`, and what the recipe throws; the block then needs its recipe as before
  void recompute(BlockId id, stream_type stream, StreamIndex on) {
    // A stack: each block is an operand of the one behind it.
    std::forward_list<Recomputation> work;
    for (BlockId next = id;;) {
      blocks_.wait_until_settled(next, nullptr);
      // The first block is not held here, so its owner may have freed it.
      BlockRecord const* const block = blocks_.find(next);
      if (block != nullptr && block->state() == BlockState::dropped) {
        work.emplace_front(*this, next);
      }
      next = BlockId{};
      while (!work.empty() && next == BlockId{}) {
        for (LeaseRequest const& operand : work.front().requests().subspan(1)) {
          next = blocks_.at(operand.id).needs_recipe() ? operand.id : next;
        }
        if (next == BlockId{}) {
          run_recipe(work.front(), stream, on);
          work.pop_front();
        }
      }
      if (work.empty()) {
        return;
      }
    }
  }

  /// Makes the operands resident and enqueues the block's recipe, unless another thread has
  /// recomputed the block meanwhile.
  void run_recipe(Recomputation const& work, stream_type stream, StreamIndex on) {
    std::span<LeaseRequest const> const requests = work.requests();
    for (LeaseRequest const& request : requests) {
      refuse_lost(blocks_.at(request.id), request);
    }
    for (LeaseRequest const& request : requests.subspan(1)) {
      make_resident(request, prefetcher_.schedule().use_of(request.id), work.group());
    }
    LeaseRequest const made = requests.front();  // made resident last: see `ToFill`
    make_resident(made, prefetcher_.schedule().use_of(made.id), work.group());
    for (LeaseRequest const& request : requests) {
      check_arrival(request, work.group());
    }
    order_after_earlier_uses(requests, on, work.group());
    BlockId const id = requests.front().id;
    BlockRecord& block = blocks_.at(id);
    if (block.state() != BlockState::filling) {
      return;
    }
    std::vector<void const*> operands;
    operands.reserve(requests.size());
    for (LeaseRequest const& request : requests.subspan(1)) {
      operands.push_back(blocks_.at(request.id).address);
    }
    hold(requests);
    std::uint64_t ns = block.recipe->cost_ns;
    std::exception_ptr failure;
    try {
      Unlocked const unlocked{monitor_};
      std::uint64_t const start_ns = device_.clock_ns();
      block.recipe->make(&stream, operands, block.address);
      if constexpr (CallerStreamApi<Device>) {
        ns = device_.clock_ns() - start_ns;
      }
    } catch (...) {
      failure = std::current_exception();
    }
    Ticket const done = order_.mark(on);
    for (LeaseRequest const& request : requests) {  // even after a failure: part may be enqueued
      BlockRecord& used = blocks_.at(request.id);
      --used.granted;
      used.used.add(done);
      if (request.access == Access::read) {
        blocks_.use(request.id, used, Access::read);
      }
    }
    if (failure) {
      std::rethrow_exception(failure);
    }
    blocks_.commit_recompute(id, block, done, ns);
    if (!done.is_none()) {
      Unlocked const unlocked{monitor_};
      try {
        order_.record(on);  // so that waiting for the bytes does not include later work
      } catch (...) {  // NOLINT(bugprone-empty-catch): whoever waits will record an event instead
      }
    }
  }
  /// Counts leases on blocks so that they stay while a recipe is run.
  void hold(std::span<LeaseRequest const> requests) noexcept {
    for (LeaseRequest const& request : requests) {
      ++blocks_.at(request.id).granted;
    }
  }

  /// The blocks whose recipes will end when a group gets its leases, and with them the recipes that
  /// read these blocks: those that the group will write, and those that are added. Until then no
  /// block is dropped that has such a recipe, but the recipes remain, so that an acquire that fails
  /// leaves them as they were.
  class EndingRecipes {
   public:
    EndingRecipes(Leases& leases, std::span<LeaseRequest const> requests) noexcept
        : leases_{leases}, requests_{requests} {
      for (LeaseRequest const& request : requests_) {
        if (request.access != Access::read) {
          leases_.blocks_.recipes().begin_writing(request.id);
        }
      }
    }
    EndingRecipes(EndingRecipes const&) = delete;
    EndingRecipes& operator=(EndingRecipes const&) = delete;
    ~EndingRecipes() {
      for (LeaseRequest const& request : requests_) {
        if (request.access != Access::read) {
          end_writing(request.id);
        }
      }
      std::for_each(added_.begin(), added_.end(), [this](BlockId id) { end_writing(id); });
    }
    /// Adds a block that the group will read. @throws std::bad_alloc
    void add(BlockId id) {
      added_.push_back(id);
      leases_.blocks_.recipes().begin_writing(id);
    }
    [[nodiscard]] bool has_added(BlockId id) const noexcept {
      return std::find(added_.begin(), added_.end(), id) != added_.end();
    }

   private:
    void end_writing(BlockId id) noexcept {
      if (leases_.blocks_.find(id) != nullptr) {  // its owner may have freed it
        leases_.blocks_.recipes().end_writing(id);
      }
    }

    Leases& leases_;
    std::span<LeaseRequest const> requests_;
    std::vector<BlockId> added_;
  };

  /// Ends the recipes that must not be used once a lease for writing is held. If the lease will
  /// extend the recipe of its block, that recipe is suspended.
  void end_recipes(LeaseRequest request, LeaseRecord const& lease) noexcept {
    [[maybe_unused]] bool const is_needed = blocks_.recipes().forget_dependents(request.id);
    SPILLWAY_ASSERT(!is_needed);
    if (request.extends_recipe && request.access == Access::read_write) {
      blocks_.recipes().suspend(request.id, lease.serial);
    } else {
      blocks_.recipes().forget(request.id);
    }
  }

  /// Returns a block that must be recomputed before the lease is given: the requested block, if it
  /// will be read, or a block that would be lost when the requested one is written. None if the
  /// requested block, which need not be held, was freed.
  [[nodiscard]] std::optional<BlockId> to_recompute(LeaseRequest request) noexcept {
    if (blocks_.find(request.id) == nullptr) {
      return std::nullopt;
    }
    if (request.access != Access::write && blocks_.at(request.id).needs_recipe()) {
      return request.id;
    }
    return request.access == Access::read ? std::nullopt
                                          : blocks_.recipes().dependent_in_need(request.id);
  }

  /// Recomputes all blocks that `to_recompute` names.
  void recompute_for(std::span<LeaseRequest const> requests, stream_type stream, StreamIndex on) {
    for (LeaseRequest const& request : requests) {
      while (auto const id = to_recompute(request)) {
        recompute(*id, stream, on);
      }
    }
  }

  /// At the first use of a block after its swap-in: checks whether the swap-in has lost bytes, and
  /// counts a prefetch as a hit if its copy is complete, else as late.
  ///
  /// The file is read after the swap-in was enqueued, so a failure can be reported only here.
  ///
  /// @throws FileTierError if the file did not give the bytes back
  void check_arrival(LeaseRequest request, Pending const& group) {
    blocks_.wait_until_settled(request.id, &group);
    BlockRecord& block = blocks_.at(request.id);
    bool const is_read_unchecked = block.is_read_unchecked && request.access != Access::write;
    bool const is_prefetched = block.state() == BlockState::prefetched;
    if (is_prefetched) {
      blocks_.use_prefetched(block);
    }
    if (is_read_unchecked || is_prefetched) {
      Fence const arrival = block.written;
      bool has_arrived = false;
      {
        Unlocked const unlocked{monitor_};
        has_arrived = order_.is_complete(arrival);
      }
      if (is_prefetched) {
        journal_.prefetch_used(has_arrived);
      }
      if (is_read_unchecked && block.is_read_unchecked) {
        // A failure may be known before the arrival is.
        pool_.check(block.host, group.is_of_program());
        block.is_read_unchecked = !has_arrived;
      }
    }
  }

  /// Makes later work on `on` wait for earlier uses that conflict with the requests. On return all
  /// blocks are resident, settled and not lost, and the lock has not been released since that was
  /// checked.
  void order_after_earlier_uses(std::span<LeaseRequest const> requests,
                                StreamIndex on,
                                Pending const& group) {
    std::vector<Fence> waits;
    for (;;) {
      // Until its address is handed out a block may still be moved, and a move that fails may leave
      // it with only its copy on the host.
      bool has_changed = false;
      for (LeaseRequest const& request : requests) {
        has_changed = blocks_.wait_until_settled(request.id, &group) || has_changed;
        has_changed = has_changed || !blocks_.at(request.id).is_resident();
      }
      if (has_changed) {
        for (LeaseRequest const& request : requests) {
          if (!blocks_.at(request.id).is_resident()) {
            make_resident(request, prefetcher_.schedule().use_of(request.id), group);
          }
          check_arrival(request, group);
        }
        continue;  // a settled block may have begun to move meanwhile
      }
      waits.clear();
      for (LeaseRequest const& request : requests) {
        BlockRecord const& block = blocks_.at(request.id);
        Fence const fence = request.access == Access::read ? block.written : block.last_uses();
        if (!order_.is_ordered(fence, on)) {
          waits.push_back(fence);
        }
      }
      if (waits.empty()) {
        for (LeaseRequest const& request : requests) {
          // A move by another thread may have destroyed the block since its lease was counted.
          refuse_lost(blocks_.at(request.id), request);
        }
        return;
      }
      Unlocked const unlocked{monitor_};
      for (Fence const& fence : waits) {
        order_.wait(on, fence);
      }
    }
  }

  Device& device_;
  StreamOrder<Device>& order_;
  Pool& pool_;
  typename Blocks<Policies>::Prefetcher& prefetcher_;
  Blocks<Policies>& blocks_;
  Transfers<Policies>& transfers_;
  Reclaimer<Policies>& reclaimer_;
  Journal<Policies>& journal_;
  MonitorType& monitor_;
  std::array<std::pair<stream_type, StreamIndex>, 16> stream_cache_{};
};

template <PolicySet Policies>
template <class Give>
bool Leases<Policies>::try_acquire(std::span<LeaseRequest const> requests,
                                   StreamIndex on,
                                   Give const& give) noexcept {
  if (requests.size() == 1) {
    BlockRecord* const block = find_at_hand(requests.front(), on);
    if (block != nullptr) {
      ThreadIndex const thread = monitor_.begin_leases(1);
      give(0, grant_at_hand(*block, requests.front(), on, thread), *block);
    }
    return block != nullptr;
  }
  for (LeaseRequest const request : requests) {
    if (find_at_hand(request, on) == nullptr) {
      return false;
    }
  }
  ThreadIndex const thread = monitor_.begin_leases(static_cast<std::uint32_t>(requests.size()));
  for (std::size_t i = 0; i < requests.size(); ++i) {
    BlockRecord& block = blocks_.at(requests[i].id);
    give(i, grant_at_hand(block, requests[i], on, thread), block);
  }
  return true;
}

template <PolicySet Policies>
template <class Give>
void Leases<Policies>::acquire(std::span<LeaseRequest const> requests,
                               stream_type stream,
                               StreamIndex on,
                               Give const& give,
                               char const* call) {
  refuse_host_function(call);
  check_blocks(requests, call);
  EndingRecipes ending{*this, requests};
  bool const has_recipes =
      std::any_of(requests.begin(), requests.end(), [this](LeaseRequest request) {
        return blocks_.at(request.id).recipe != nullptr;
      });
  bool const is_at_hand =
      has_recipes && std::all_of(requests.begin(), requests.end(), [&](LeaseRequest request) {
        return is_settled(blocks_.at(request.id), request, on) && !to_recompute(request);
      });
  refuse_unwritten(requests, call);
  if (!is_at_hand) {
    refuse_capture(stream, call);
  }
  auto const is_incomplete = [this](LeaseRequest request) {
    return to_recompute(request).has_value();
  };
  for (bool has_room = true;; has_room = false) {
    if (!has_room) {
      // There was no room for the operands of a recipe beside the group. Without the group there
      // is: a block is dropped only if it can be recomputed within the capacity.
      check_blocks(requests, call);
      for (LeaseRequest const& request : requests) {
        if (request.access == Access::read && blocks_.at(request.id).needs_recipe()) {
          ending.add(request.id);  // so that it does not leave again without a copy
        }
      }
      recompute_for(requests, stream, on);
    }
    check_blocks(requests, call);
    try {
      Pending pending{*this, requests};
      pending.count_all();
      recompute_for(requests, stream, on);
      ToFill to_fill;
      for (LeaseRequest const& request : requests) {
        blocks_.wait_until_settled(request.id, &pending);
        BlockRecord& block = blocks_.at(request.id);
        Use const use = blocks_.record_access(block, request);
        if (!to_fill.try_add(request, use, block)) {
          make_resident(request, use, pending);
        }
      }
      for (auto const& [request, use] : to_fill.sorted()) {
        make_resident(request, use, pending);
      }
      for (LeaseRequest const& request : requests) {
        check_arrival(request, pending);
      }
      order_after_earlier_uses(requests, on, pending);
      for (std::size_t i = 0; i < requests.size(); ++i) {
        BlockRecord& block = blocks_.at(requests[i].id);
        LeaseRecord const lease = grant(block, requests[i], on, pending.thread());
        give(i, lease, block);
        if (block.recipe != nullptr && requests[i].access != Access::read) {
          end_recipes(requests[i], lease);
        } else if (block.recipe != nullptr && ending.has_added(requests[i].id)) {
          blocks_.recipes().forget(requests[i].id);  // there was no room to recompute it
        }
      }
      pending.keep();
      break;
    } catch (OutOfDeviceMemory const&) {
      if (!has_room || !has_recipes ||
          std::none_of(requests.begin(), requests.end(), is_incomplete)) {
        refuse_too_many(requests);
        throw;
      }
    }
  }
  blocks_.free_orphans();
}

}  // namespace spillway::detail
