// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/codec.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/concepts/policy_set.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/host_mapping.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host/staging.hpp>
#include <spillway/lease.hpp>
#include <spillway/pager/block_state.hpp>
#include <spillway/pager/blocks.hpp>
#include <spillway/pager/copy_streams.hpp>
#include <spillway/pager/journal.hpp>
#include <spillway/pager/leases.hpp>
#include <spillway/pager/look_ahead.hpp>
#include <spillway/pager/monitor.hpp>
#include <spillway/pager/reclaimer.hpp>
#include <spillway/pager/transfers.hpp>
#include <spillway/policies.hpp>
#include <spillway/stream.hpp>
#include <spillway/swappable_tensor.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace spillway {

/// Allocates blocks of device memory, which together may be larger than the device: a block that is
/// not leased can be swapped out to the host, and is swapped in again before it is used.
///
/// A program makes one allocator for each device. The allocator owns the arena, the host pool, the
/// prefetcher with its copy streams, and the pager. Programs mostly use it through
/// `SwappableBuffer` and `SwappableTensor`, which call the functions that take a `BlockId`; code
/// that manages blocks by itself, such as an adapter, calls these functions directly.
///
/// If a call fails, every block is as it was or validly swapped out, and the call may be repeated.
///
/// Units    bytes. Sizes are rounded up to 256, and addresses are multiples of 256.
/// Threads  thread-safe, unless the policies' lock is `NullLock`. One thread at a time makes room;
///          meanwhile other threads can use resident blocks.
/// Streams  work on different streams is ordered by events. A stream on which leases were acquired
///          must live until `retire_stream` or the end of the allocator; a stream from
///          `create_stream` retires itself.
/// Address  valid only while a lease on the block is held.
template <PolicySet Policies = DefaultPolicies>
class DeviceAllocator {
 public:
  using device_type = typename Policies::device;
  using stream_type = typename device_type::stream_type;
  using lease_type = Lease<DeviceAllocator>;
  using observer_type = typename Policies::observer;
  using fit_type = typename Policies::fit;
  using compaction_type = typename Policies::compaction;
  using eviction_type = typename Policies::eviction;
  using prefetch_type = typename Policies::prefetch;
  using recompute_type = typename Policies::recompute;
  using file_io_type = typename Policies::file_io;

  static constexpr bool is_thread_safe = !std::is_empty_v<typename Policies::lock>;
  /// True if a block keeps its address for life, which depends on the arena of the policies.
  static constexpr bool keeps_addresses = StableAddressArena<ArenaOf<Policies>>;

  struct Options {
    /// The most device memory to use, which `set_capacity` lowers: 256 bytes or more, and with
    /// `DefragArena` less than 1 TiB. 0: nine tenths of what the device has free now.
    std::size_t capacity_bytes = 0;
    /// The part of the capacity that the constructor takes from the device; the rest is taken when
    /// it is needed. Default: all of it.
    std::size_t initial_bytes = std::numeric_limits<std::size_t>::max();
    /// The least that is taken from the device when more memory is needed, if the capacity leaves
    /// as much.
    std::size_t growth_bytes = ArenaOptions{}.growth_bytes;
    /// True: all memory that is ever taken is mapped into one range of addresses, so that it can
    /// grow and shrink in place. Needs a device with virtual memory; see `ArenaOptions`.
    bool grows_in_place = false;
    /// The size of a page, for arenas that map pages, or of a piece, with `grows_in_place`. 0: the
    /// device's granularity (2 MiB on today's GPUs) for pages, `growth_bytes` for pieces. Blocks
    /// are rounded up to whole pages; larger pages give fewer different block sizes, so that a
    /// block more often finds a free piece of its size. Smaller pieces can be given back and joined
    /// even where only little is free between leased blocks.
    std::size_t page_bytes = 0;
    /// Size of the bounce range, which moves use whose source and destination overlap. It is taken
    /// in addition to the capacity.
    std::size_t bounce_bytes = 4_MiB;
    /// Where swapped-out bytes go. If no tier is given, they go to pinned memory, which grows as
    /// needed up to half of the machine's memory, or of what a container leaves of it.
    HostPoolOptions host{};
    PagerOptions paging{};
    /// Policy objects to use, for policies that have parameters, such as
    /// `ScheduleLookahead{{.lookahead_ops = 8}}`. A policy without a value is default-constructed.
    std::optional<prefetch_type> prefetch{};
    std::optional<eviction_type> eviction{};
    std::optional<recompute_type> recompute{};
    std::optional<file_io_type> file_io{};
    /// `fit` and `compaction` are used only by arenas that have such a policy.
    std::optional<fit_type> fit{};
    std::optional<compaction_type> compaction{};
  };

  /// Makes an allocator that owns its device, which is default-constructed. @throws as below
  explicit DeviceAllocator(Options options = {}) requires std::default_initializable<device_type>
      : DeviceAllocator{std::make_unique<device_type>(), nullptr, std::move(options)} {}

  /// Makes an allocator on `device`, which is not owned and must outlive the allocator.
  ///
  /// @throws OutOfDeviceMemory if the initial reservation does not fit, OutOfHostMemory if
  ///         `initial_pinned_bytes` cannot be pinned, ContractViolation for options that contradict
  ///         each other, FileTierError, DeviceError
  explicit DeviceAllocator(device_type& device, Options options = {})
      : DeviceAllocator{nullptr, &device, std::move(options)} {}

  DeviceAllocator(DeviceAllocator const&) = delete;
  DeviceAllocator& operator=(DeviceAllocator const&) = delete;

  /// Waits on the host for all work that uses this allocator's memory, then gives it back.
  ///
  /// All buffers, leases and `Stream`s must have been destroyed before, since they refer to the
  /// allocator. Otherwise the program is terminated by a ContractViolation: for buffers and leases
  /// by the one that `close` would have thrown.
  ~DeviceAllocator();  // NOLINT(bugprone-exception-escape): that is how it ends the program

  /// Checks that no block is left, so that the allocator may be destroyed. Only the destructor
  /// checks that no `Stream` is left.
  ///
  /// @throws ContractViolation if blocks exist; it says how many, and how many of them are leased
  void close() const {
    Stats const now = stats();
    if (now.allocated.blocks.current != 0) {
      throw ContractViolation{detail::head_of_error({}, "close") + "an allocator ends while " +
                              now.allocated.blocks.current + " of its blocks exist, " +
                              now.leased.blocks.current +
                              " of them leased: destroy buffers and leases first"};
    }
  }

  /// Makes a block of `size_bytes`, resident and without contents.
  ///
  /// @throws ContractViolation for 0 bytes; OutOfDeviceMemory, DeviceError, FileTierError if room
  ///         cannot be made; std::bad_alloc. Nothing is left behind.
  /// @stream no call on any stream unless blocks have to leave or move
  /// @cost   O(1) when a free range fits
  [[nodiscard]] BlockId allocate(std::size_t size_bytes);

  /// Makes a block of `size_bytes` that gets its device range only when it is first leased.
  ///
  /// Use it for the results of an operation, which are leased together with the operands: room is
  /// then made for all of them at once, when it is known which blocks the operation uses.
  ///
  /// @throws ContractViolation for 0 bytes; OutOfDeviceMemory only if the block alone is larger
  ///         than the capacity; std::bad_alloc
  /// @cost   O(1), no device call
  [[nodiscard]] BlockId declare(std::size_t size_bytes) {
    Call const call{*this};
    BlockId const id = blocks_.add(size_bytes);
    blocks_.count(id);
    return id;
  }

  /// Frees a block. Its range and its copy on the host are reused only after its last uses.
  ///
  /// @throws ContractViolation if the block is unknown or leased; it is then unchanged
  void deallocate(BlockId id);

  /// Frees a block now, or when its last lease ends. An unknown id ends the program in builds with
  /// assertions and is ignored in others.
  void abandon(BlockId id) noexcept;

  /// Makes a block resident and holds it there: see `SwappableBuffer::acquire`.
  ///
  /// The form with a template argument returns a `ReadLease` for `Access::read`, whose address is
  /// `void const*`. The run-time form is for code that learns the access when it runs.
  ///
  /// @param access  with `write` the holder promises to overwrite all bytes that are read later:
  ///                the old bytes are not swapped in, and their copy on the host becomes invalid
  /// @throws ContractViolation for an unknown block, for a stream as `mark` refuses it, for reading
  ///         an unwritten block where the device checks that, or if something would have to be
  ///         enqueued on a stream that is being captured into a graph; OutOfDeviceMemory,
  ///         OutOfHostMemory, std::bad_alloc, DeviceError, FileTierError. No lease is held then and
  ///         no byte is lost.
  /// @stream orders `stream` after earlier uses that conflict: writes before a read, all uses
  ///         before a write. Makes no device call for uses on the same stream. Does not wait for
  ///         the device. If leases of other threads leave no room, waits for the end of one, for at
  ///         most `PagerOptions::lease_wait`.
  /// @cost   O(1) for a resident block
  [[nodiscard]] lease_type acquire(BlockId id, Access access, stream_type stream) {
    LeaseRequest const request{id, access};
    lease_type lease;
    Call const call{*this};
    Granted const granted{this, &lease};
    StreamIndex const on = leases_.index_of(stream);
    if (!leases_.try_acquire({&request, 1}, on, granted)) {
      leases_.acquire({&request, 1}, stream, on, granted);
    }
    look_ahead();
    return lease;
  }
  template <Access access>
  [[nodiscard]] LeaseFor<lease_type, access> acquire(BlockId id, stream_type stream) {
    return LeaseFor<lease_type, access>{acquire(id, access, stream)};
  }

  /// Leases all operands of one operation. All of them are protected from eviction before the first
  /// is swapped in, so none is evicted to make room for another.
  ///
  /// Returns a tuple of leases of the types that the accesses allow, in the order of the operands,
  /// and for a range of buffers or tensors a vector of such leases:
  /// ```
  /// auto const [a, b, sum] = memory.acquire_all(stream, reads(x), reads(y), writes(z));
  /// auto const [weights, out] = memory.acquire_all(stream, reads(layers), writes(result));
  /// ```
  /// @throws ContractViolation if an operand is empty or on another allocator; as `acquire`. No
  ///         lease of the group is held then
  /// @stream as `acquire`
  template <GroupOperand... Operands>
  [[nodiscard]] auto acquire_all(Located<stream_type> stream, Operands const&... operands) {
    expects((operands.is_on(*this) && ...),
            "an operand is empty, since it was moved from or reset, or is on another allocator",
            stream.site());
    auto const requests = detail::requests_for(operands...);
    std::vector<lease_type> leases = detail::call_at(
        stream.site(), [&] { return acquire_all(std::span{requests}, stream.value()); });
    lease_type* next = leases.data();
    // Braces guarantee that the leases are moved from left to right.
    return std::tuple<decltype(operands.take(next))...>{operands.take(next)...};
  }
  /// The run-time form. Returns the leases in the order of `requests`, in which a block may occur
  /// more than once. @throws as above
  [[nodiscard]] std::vector<lease_type> acquire_all(std::span<LeaseRequest const> requests,
                                                    stream_type stream) {
    std::vector<lease_type> leases(requests.size());
    Call const call{*this};
    Granted const granted{this, leases.data()};
    StreamIndex const on = leases_.index_of(stream);
    if (!leases_.try_acquire(requests, on, granted)) {
      leases_.acquire(requests, stream, on, granted);
    }
    look_ahead();
    return leases;
  }
  [[nodiscard]] std::vector<lease_type> acquire_all(std::initializer_list<LeaseRequest> requests,
                                                    stream_type stream) {
    return acquire_all(std::span{requests.begin(), requests.size()}, stream);
  }

  /// Ends all these leases of this allocator at once; empty ones are ignored. This is cheaper than
  /// ending them one by one: while blocks are being swapped out, each call records one event for
  /// each stream.
  void release_all(std::span<lease_type> leases) noexcept;

  /// Makes a block leave the device: copies its bytes to the host pool and frees its device range.
  /// Nothing is copied if the copy in the host pool is still valid, or if making the bytes again by
  /// the block's recipe is cheaper. No effect while another thread recomputes a block from this
  /// one.
  ///
  /// @throws ContractViolation if the block is unknown or leased, OutOfHostMemory, DeviceError,
  ///         FileTierError; the block then stays resident
  /// @stream enqueues on the outgoing copy stream; does not wait
  void swap_out(BlockId id);

  /// Swaps a block in ahead of need. No effect on a block that is resident, has no contents, or
  /// must be recomputed by its recipe, which would need a stream.
  ///
  /// @throws as `acquire`; the block then stays on the host
  /// @stream enqueues on the incoming copy stream; does not wait
  void swap_in(BlockId id) {
    Call const call{*this};
    (void)blocks_.expect(id);
    leases_.swap_in(id);
  }

  /// Gives a block a recipe: work that makes its bytes again from those of other blocks, the
  /// operands. The block may then leave the device without a copy; `acquire` recomputes it.
  ///
  /// The recipe ends when the block or an operand is acquired for writing, or when an operand that
  /// has no recipe itself is freed. An operand that has a recipe may be freed: its memory is
  /// released, and it is recomputed together with the block. No bytes are lost when a recipe ends:
  /// a block that only its recipe can make is recomputed before an operand is written, and the
  /// bytes of a freed operand are kept for as long as such a block needs them.
  ///
  /// @param operands  the blocks that the bytes are made from
  /// @param cost      how long the work of `make` takes on the device. The pager compares it with
  ///                  the time of a copy to decide whether the block is copied or recomputed
  /// @param make      `make(stream, operands, result)` enqueues the work on `stream`. `operands`, a
  ///                  `std::span<void const* const>`, has the addresses of the operands in their
  ///                  order, and `result`, a `void*`, is the address to write the bytes to. `make`
  ///                  must be copyable, always make the same bytes, enqueue nothing on another
  ///                  stream and not call the allocator. `acquire` passes on what it throws. `make`
  ///                  may own objects whose destructors call the allocator, such as buffers of the
  ///                  operands: it is destroyed after the recipe has ended, without the lock
  /// @pre     the block holds the bytes that the recipe would make now, and no operand is leased
  ///          for writing, or acquired for writing during the call
  /// @throws  ContractViolation for a block or an operand that is unknown or was never written, and
  ///          for a block that is its own operand or whose bytes only its present recipe can make;
  ///          nothing has changed then. std::bad_alloc; the block then has no recipe, or the one
  ///          that it had
  template <class Make>
  void set_recipe(BlockId id,
                  std::span<BlockId const> operands,
                  std::chrono::nanoseconds cost,
                  Make make);
  template <class Make>
  void set_recipe(BlockId id,
                  std::initializer_list<BlockId> operands,
                  std::chrono::nanoseconds cost,
                  Make make) {
    set_recipe(id, std::span{operands.begin(), operands.size()}, cost, std::move(make));
  }

  /// Extends a block's recipe by a change that the holder of a lease has made in place, so that the
  /// recipe need not end: from now on recomputing the block runs the recipe and then `make`. Call
  /// it before the lease ends, which must be one for `Access::read_write` that was acquired with
  /// `LeaseRequest::extends_recipe`.
  ///
  /// @param operands, cost, make  as for `set_recipe`, of the change alone: `result` has the bytes
  ///                              that the block had when the lease was granted
  /// @pre     `make` writes everything that was written under the lease
  /// @returns false if the block has no recipe to extend: it had none, its recipe already has the
  ///          most changes (8), or the block or an operand has been written by others since
  /// @throws  as `set_recipe`, and ContractViolation for a lease that is empty or another
  ///          allocator's
  template <class Make>
  bool extend_recipe(lease_type const& lease,
                     std::span<BlockId const> operands,
                     std::chrono::nanoseconds cost,
                     Make make);

  /// Returns whether it is worth the program's time to give recipes now. That is not so if the
  /// recompute policy does not want any, for example after `TunedRecompute` has found that copies
  /// are faster, unless the host pool has less free room than the capacity. The policy is asked at
  /// each `begin_step`. A recipe that is given all the same is used when no copy can be kept.
  ///
  /// @cost  reads one word without the lock
  [[nodiscard]] bool wants_recipes() const noexcept { return blocks_.wants_recipes(); }

  /// Chooses the codec that encodes a block in the host pool from its next swap-out on: `Identity`,
  /// which every block has at first, `ZeroBitmap`, or a codec that loses bits, such as
  /// `AsBfloat16`. `HostSwapPool` says on which devices and in which tiers codecs work; elsewhere,
  /// and below 4 KiB, blocks are copied unchanged.
  /// ```
  /// memory.set_codec<ZeroBitmap>(activation, layer);
  /// ```
  /// @param tag  a number that the program gives to blocks with similar contents: what the pool
  ///             learns about the codec is used for all blocks of the tag
  /// @throws ContractViolation if the block is unknown; std::bad_alloc; OutOfDeviceMemory and
  ///         DeviceError, if the codec works in device memory. The block is then as it was
  /// @stream enqueues nothing; may wait on the host for work that uses the memory in which codecs
  ///         of the device work, if this codec needs more of it than others did
  template <Codec C>
  void set_codec(BlockId id, std::uint64_t tag = 0) {
    Call const call{*this};
    CodingId coding;
    {
      typename Monitor::Unlocked const unlocked{monitor_};
      coding = pool_.template coding<C>(tag);
    }
    blocks_.set_coding(id, coding);
  }

  /// Where the bytes are now. Asks the device whether a copy is still in flight.
  ///
  /// @throws ContractViolation if the block is unknown
  [[nodiscard]] Residency residency(BlockId id) const;

  /// Returns the address that the block has for life, with policies that keep addresses
  /// (`StableAddresses`). It may be accessed only while a lease on the block is held.
  ///
  /// @throws ContractViolation if the block is unknown
  [[nodiscard]] void* stable_address(BlockId id) const requires keeps_addresses {
    std::lock_guard const guard{monitor_};
    return arena_.address(blocks_.expect(id).range);
  }

  /// Marks the boundary between two steps of a program that repeats. The uses that were recorded
  /// since the last call predict the uses of the step that begins, for eviction and prefetch.
  ///
  /// @throws FileTierError if the file tier failed to give bytes back since it was last asked; the
  ///         step has begun all the same, and only those bytes are lost
  void begin_step();

  /// Moves blocks inside the device so that free ranges join. Allocations compact by themselves
  /// when they must; this call does it at a time of the caller's choice.
  ///
  /// @param budget_bytes  the most to move
  /// @returns bytes moved
  /// @throws DeviceError; the blocks moved before it stay where they are now
  /// @stream enqueues on the moving copy stream; does not wait
  std::size_t compact(std::size_t budget_bytes = std::numeric_limits<std::size_t>::max()) {
    Call const call{*this};
    Exclusive const exclusive{monitor_};
    return reclaimer_.compact(budget_bytes);
  }

  /// Gives free memory back to the device, after waiting on the host for its last uses: whole
  /// reservations that are free or, if the arena grows in place, every free piece.
  ///
  /// @returns bytes released
  /// @throws DeviceError; ContractViolation if a stream that used the memory is being captured into
  ///         a graph and has no event from before the capture. The next call releases that memory
  std::size_t trim_sync() {
    Call const call{*this};
    Exclusive const exclusive{monitor_};
    return reclaimer_.trim(std::numeric_limits<std::size_t>::max());
  }

  /// Returns the size of the largest block that could be allocated now without evicting or moving
  /// any block: from free ranges and from what the arena could still take from the device.
  ///
  /// @throws DeviceError
  [[nodiscard]] std::size_t largest_block_bytes() const {
    [[maybe_unused]] std::size_t const device_bytes = device_->memory_info().free_bytes;
    std::lock_guard const guard{monitor_};
    if constexpr (GrowingArena<Arena>) {
      return arena_.largest_bytes_after_growth(device_bytes);
    } else {
      return arena_.largest_free_bytes();
    }
  }

  /// Makes blocks that are swapped out from now on go to `tier` of the host pool, or to a slower
  /// tier. Bytes that lie in faster tiers stay there: see `trim_host_sync`. If the pool has neither
  /// this tier nor a slower one, no more blocks can be swapped out.
  void set_first_host_tier(HostTier tier);

  /// Empties the tiers that are faster than the one of `set_first_host_tier`, and gives the host
  /// memory that is free then back to the system. Blocks that are swapped out to those tiers are
  /// moved to the first one, one after the other by way of the device; those for which there is no
  /// room stay where they are. Resident blocks lose their copies in those tiers.
  ///
  /// @pre     no block is deallocated meanwhile; `abandon` may be called
  /// @returns bytes of host memory given back
  /// @throws  OutOfDeviceMemory where a block finds no room on the device, DeviceError,
  ///          FileTierError, std::bad_alloc. No byte is lost, and the call may be repeated
  /// @stream  enqueues on the copy streams; waits on the host until the bytes have moved
  std::size_t trim_host_sync();

  /// Changes the capacity, to at most `Options::capacity_bytes`. If it is lowered, blocks are
  /// evicted until the rest fits, and reserved memory beyond the new capacity is given back to the
  /// device as far as possible: all of it if the arena maps pages or grows in place and no leased
  /// block prevents it.
  ///
  /// A block that only its recipe can make may no longer fit together with its operands under the
  /// new capacity. Acquiring it then fails until the capacity is raised.
  ///
  /// @throws ContractViolation for less than the arena's granule and for more than
  ///         `Options::capacity_bytes`; OutOfDeviceMemory if the blocks that cannot leave are
  ///         larger; OutOfHostMemory, DeviceError, FileTierError. The capacity is then unchanged
  /// @stream enqueues copies as `swap_out`; waits on the host for what is given back
  void set_capacity(std::size_t bytes);

  /// Must be called before work on `stream` is captured into a graph, also for a stream that joins
  /// the capture of another one by waiting for an event. It records an event, so that other streams
  /// can wait for earlier work on `stream` while `stream` is being captured.
  ///
  /// The graph contains addresses of blocks. Acquire leases on all blocks that it uses before the
  /// capture, hold them until the graph has run for the last time, and during the capture release
  /// no lease that was acquired on `stream`.
  ///
  /// @throws DeviceError; ContractViolation if `stream` is being captured already, or as `mark`
  void prepare_capture(stream_type stream) {
    Elsewhere const call{monitor_};
    order_.record(index_of(stream));
  }
  /// The same for all streams that leases were acquired on or that `mark` has been called for: any
  /// of them may then join the capture. Streams that are being captured already are left out.
  ///
  /// @throws DeviceError
  /// @cost   one event for each stream that has been used since its last event
  void prepare_capture() {
    Elsewhere const call{monitor_};
    order_.record_all();
  }

  /// Returns a fence that stands for all work enqueued on `stream` so far, for `order_after`.
  ///
  /// @throws ContractViolation if too many streams are in use (see `StreamOrder`), or if the handle
  ///         means another stream in every thread (`cudaStreamPerThread`); DeviceError
  /// @cost   no device call, unless the stream is used for the first time
  [[nodiscard]] Fence mark(stream_type stream) {
    Elsewhere const call{monitor_};
    return order_.mark(index_of(stream));
  }
  /// Makes later work on `stream` run after `fence`, which `mark` of this allocator has returned.
  /// Use it when other streams than the one of the lease use a block.
  ///
  /// @throws DeviceError; ContractViolation if a stream in `fence` is being captured into a graph
  ///         and has no event from before the capture, or if `stream` is being captured and would
  ///         have to wait for work outside the capture (in both cases the call may be repeated
  ///         later), or if `fence` is recognised as one of another allocator
  /// @stream enqueues at most one event and one wait for each stream in `fence`; does not wait
  void order_after(stream_type stream, Fence const& fence) {
    Elsewhere const call{monitor_};
    expects(order_.has_marked(fence),
            "the point was marked by another allocator: use an event of the device, which orders "
            "the streams of all");
    order_.wait(index_of(stream), fence);
  }
  /// Makes later work on `stream` run after all work on all streams that leases were acquired on or
  /// that `mark` has been called for.
  ///
  /// @throws as `order_after`
  /// @stream as `order_after`
  void order_after_all(stream_type stream) {
    Elsewhere const call{monitor_};
    order_.wait_for_all(index_of(stream));
  }

  /// Creates a stream on this allocator's device, which the returned object retires and destroys at
  /// its end. @throws DeviceError
  [[nodiscard]] Stream<DeviceAllocator> create_stream() { return Stream<DeviceAllocator>{*this}; }

  /// Must be called before a stream is destroyed on which leases were acquired, unless the stream
  /// is from `create_stream`. No lease that was acquired on it may still be held, except by
  /// `LeasedMemory`, whose memory may be deallocated on another stream.
  ///
  /// @throws DeviceError if what was done on the stream cannot be recorded, ContractViolation if
  ///         the stream is being captured; the stream must then live on
  /// @stream does not wait for the stream
  void retire_stream(stream_type stream);

  /// Waits on the host for every use of this allocator's memory that has been enqueued.
  ///
  /// @throws DeviceError
  void synchronize() {
    Call const call{*this};
    typename Monitor::Unlocked const unlocked{monitor_};
    order_.synchronize(Ticket::everything());
  }

  /// A thread that forks calls `before_fork` before `fork`, and `after_fork_in_parent` or
  /// `after_fork_in_child` after it, for each allocator of the program. In between no other thread
  /// is inside a call of the allocator: `before_fork` blocks until that is so. The child can use
  /// the allocator if its device is a `ForkingApi`, as `HostApi` is; blocks that other threads have
  /// leased stay leased there.
  void before_fork() {
    while (!monitor_.try_lock_between_calls()) {
      if constexpr (requires { device_->let_others_in(); }) {
        device_->let_others_in();  // this thread may keep the device, for another allocator
      } else {
        std::this_thread::yield();
      }
    }
    if constexpr (ForkingApi<device_type>) {
      device_->before_fork();
    }
  }
  void after_fork_in_parent() noexcept {
    if constexpr (ForkingApi<device_type>) {
      device_->after_fork_in_parent();
    }
    monitor_.unlock();
  }
  void after_fork_in_child() noexcept {
    if constexpr (ForkingApi<device_type>) {
      device_->after_fork_in_child();
    }
    monitor_.unlock();
  }

  /// Copies between ordinary host memory and a leased block, through pinned memory of this
  /// allocator.
  ///
  /// @throws DeviceError; OutOfHostMemory if no pinned memory can be had; ContractViolation if
  ///         `stream` is being captured into a graph
  /// @stream enqueues on `stream`, on which the lease was acquired, and waits on the host
  /// @threads any number at once; each takes a pinned chunk of its own
  void
  copy_from_host_sync(void* device_to, void const* from, std::size_t bytes, stream_type stream);
  void copy_to_host_sync(void* to, void const* device_from, std::size_t bytes, stream_type stream);

  /// Return statistics of this allocator's work and memory (`stats`), and of its host pool.
  [[nodiscard]] Stats stats() const;
  [[nodiscard]] HostPoolStats host_stats() const {
    Elsewhere const call{monitor_};
    return pool_.stats();
  }
  /// Sets every peak in `stats` to its current value.
  void reset_peak_stats() {
    std::lock_guard const guard{monitor_};
    journal_.reset_peaks(arena_.reserved_bytes());
  }
  /// The observer that the policies name, such as a `Timeline`.
  [[nodiscard]] observer_type& observer() noexcept { return journal_.observer(); }
  [[nodiscard]] device_type& device() noexcept { return *device_; }

  /// For snapshots and adapters: calls `visit(BlockId, detail::BlockRecord const&)` for every
  /// block, or `visit(RangeView const&)` for every range of the arena. `visit` is called under the
  /// lock and must not call the allocator. `BlockRecord` is internal and may change in any version.
  template <class Visit>
  void for_each_block(Visit visit) const {
    std::lock_guard const guard{monitor_};
    std::as_const(blocks_).for_each(visit);
  }
  template <class Visit>
  void for_each_range(Visit visit) const {
    std::lock_guard const guard{monitor_};
    std::as_const(arena_).for_each_range(visit);
  }
  /// Returns how many bytes of device memory a resident block of `size_bytes` takes up:
  /// `size_bytes` rounded up to the arena's granule or page. `stats` counts these.
  [[nodiscard]] std::size_t rounded_bytes(std::size_t size_bytes) const noexcept {
    return arena_.rounded_bytes(size_bytes);
  }
  /// Returns how many threads are waiting now for leases or copies of other threads.
  [[nodiscard]] std::size_t waiting_threads() const {
    std::lock_guard const guard{monitor_};
    return monitor_.waiting_count();
  }

 private:
  friend lease_type;
  friend Stream<DeviceAllocator>;
  using Arena = ArenaOf<Policies>;
  using Pool = HostSwapPool<device_type, file_io_type>;
  using Monitor = detail::Monitor<typename Policies::lock>;
  using Exclusive = typename Monitor::Exclusive;
  using Elsewhere = typename Monitor::Elsewhere;

  /// Brackets a public call: holds the lock during the call, and at its end destroys recipes that
  /// have ended and passes records to the observer, both without the lock.
  class Call {
   public:
    explicit Call(DeviceAllocator& allocator) : allocator_{allocator} {
      allocator_.monitor_.begin_call();
    }
    Call(Call const&) = delete;
    Call& operator=(Call const&) = delete;
    ~Call() {
      while (allocator_.blocks_.recipes().has_dead()) {
        detail::Recipe::Make dead = allocator_.blocks_.recipes().take_dead();
        typename Monitor::Unlocked const unlocked{allocator_.monitor_};
        dead = nullptr;  // destructors of what it owns may call the allocator
      }
      if constexpr (observer_type::is_enabled) {
        // Before `end_call`, so that no fork happens while the observer's own lock is taken.
        typename Monitor::Unlocked const unlocked{allocator_.monitor_};
        allocator_.journal_.tell_observer();
      }
      allocator_.monitor_.end_call();
    }

   private:
    DeviceAllocator& allocator_;
  };

  /// Called for each lease that is granted: stores it in the caller's array.
  struct Granted {
    DeviceAllocator* allocator;
    lease_type* leases;
    void operator()(std::size_t i,
                    LeaseRecord const& lease,
                    detail::BlockRecord const& block) const noexcept {
      leases[i] = lease_type{*allocator, lease, block.address, block.requested_bytes};
    }
  };

  /// A call of `set_capacity` that has not ended. While it waits for leases others may begin, so
  /// the capacity is that of the last one, unless it fails.
  struct CapacityChange {
    std::uint64_t number = 0;
    std::size_t bytes = 0;
  };

  DeviceAllocator(std::unique_ptr<device_type> owned, device_type* device, Options options);

  void check_recipe(BlockId id,
                    std::span<BlockId const> operands,
                    char const* call = __builtin_FUNCTION());
  [[nodiscard]] static std::uint64_t count_of(std::chrono::nanoseconds cost) noexcept {
    return static_cast<std::uint64_t>(std::max<std::int64_t>(0, cost.count()));
  }
  /// Wraps a recipe's callable so that it takes a pointer to the stream: the pager stores callables
  /// without knowing the type of streams.
  template <class Make>
  [[nodiscard]] static detail::Recipe::Make on_any_stream(Make make) {
    return [make = std::move(make)](
               void const* stream, std::span<void const* const> addresses, void* result) {
      make(*static_cast<stream_type const*>(stream), addresses, result);
    };
  }
  void count_streams(int change) noexcept { stream_count_ += change; }
  void release(LeaseRecord const& lease) noexcept;
  void free_now_or_later(BlockId id, detail::BlockRecord& block) noexcept {
    if (block.is_leased()) {
      block.is_abandoned = true;
    } else {
      blocks_.free(id, block);
    }
  }
  void record_exactly(StreamIndex stream) noexcept;
  [[nodiscard]] StreamIndex index_of(stream_type stream) {
    std::lock_guard const guard{monitor_};
    return leases_.index_of(stream);
  }
  void look_ahead() {
    if (look_ahead_.is_due()) {
      look_ahead_.run();
    }
  }

  /// Returns `ArenaOptions::bytes_per_look`, which limits how long a search for room may take. A
  /// search delays the program, and most searches find nothing better in the end, so a search may
  /// take a quarter of the time that it could save. Without swapping, failing to find room is an
  /// error, so the search is not limited.
  static double bytes_per_look(PagerOptions const& options) noexcept {
    constexpr double seconds = 4 * 20e-9;  // a look takes 20 ns
    return options.swapping ? options.device_bytes_per_second / 2 * seconds : 0;
  }
  static ArenaOptions arena_options(device_type const& device, Options const& options) {
    std::size_t const capacity = options.capacity_bytes != 0
                                     ? options.capacity_bytes
                                     : device.memory_info().free_bytes / 10 * 9;
    return {.capacity_bytes = capacity / granule_bytes * granule_bytes,
            .initial_bytes = options.initial_bytes,
            .growth_bytes = options.growth_bytes,
            .grows_in_place = options.grows_in_place,
            .page_bytes = options.page_bytes,
            .bounce_bytes = options.bounce_bytes,
            .bytes_per_look = bytes_per_look(options.paging)};
  }

  /// Constructs the arena: with `order_` if it maps memory, and with the policies that it takes.
  Arena make_arena(Options& options) {
    if constexpr (MappingArena<Arena>) {
      return make_arena(options, *device_, order_);
    } else {
      return make_arena(options, *device_);
    }
  }
  template <class Policy>
  static Policy chosen(std::optional<Policy>& given) {
    if constexpr (std::default_initializable<Policy>) {
      return std::move(given).value_or(Policy());
    } else {
      expects(given.has_value(),
              "a policy without a default constructor needs a value in Options",
              {},
              "DeviceAllocator");
      return *std::move(given);
    }
  }
  template <class... Parts>
  static Arena make_arena(Options& options, device_type& device, Parts&... parts) {
    ArenaOptions const sizes = arena_options(device, options);
    if constexpr (std::is_constructible_v<Arena,
                                          device_type&,
                                          Parts&...,
                                          ArenaOptions,
                                          fit_type,
                                          compaction_type>) {
      return Arena(device, parts..., sizes, chosen(options.fit), chosen(options.compaction));
    } else if constexpr (
        std::is_constructible_v<Arena, device_type&, Parts&..., ArenaOptions, fit_type>) {
      return Arena(device, parts..., sizes, chosen(options.fit));
    } else {
      return Arena(device, parts..., sizes);
    }
  }

  /// Returns the options of the host pool with defaults filled in. On a device that shares the
  /// host's memory there is no default tier: nothing is swapped unless a file is named.
  static HostPoolOptions host_options([[maybe_unused]] device_type const& device,
                                      Options const& options) {
    HostPoolOptions host = options.host;
    bool const is_unset =
        host.pinned_bytes == 0 && host.pageable_bytes == 0 && host.file_bytes == 0;
    bool is_memory_shared = false;
    if constexpr (SharedMemoryApi<device_type>) {
      is_memory_shared = device.shares_host_memory();
    }
    if (is_unset && options.paging.swapping && !is_memory_shared) {
      host.pinned_bytes = detail::HostMemory::usable_bytes() / 2;
    }
    return host;
  }

  static PagerOptions checked(PagerOptions options) {
    expects(options.high_watermark > 0 && options.high_watermark <= 1 &&
                options.low_watermark > 0 && options.low_watermark <= options.high_watermark,
            "watermarks are parts of the capacity: 0 < low_watermark <= high_watermark <= 1",
            {},
            "DeviceAllocator");
    expects(options.prefetched_part > 0 && options.prefetched_part <= 1,
            "prefetched_part is a part of the capacity: more than 0, at most 1",
            {},
            "DeviceAllocator");
    expects(options.link_bytes_per_second > 0 && options.device_bytes_per_second > 0,
            "link_bytes_per_second and device_bytes_per_second must be positive",
            {},
            "DeviceAllocator");
    return options;
  }

  // Destroyed from the last to the first: nothing outlives what it uses.
  std::unique_ptr<device_type> owned_device_;
  device_type* device_;
  PagerOptions paging_;
  mutable StreamOrder<device_type> order_;  // queries note which events have completed
  Arena arena_;
  Pool pool_;
  detail::CopyStreams<device_type, file_io_type> streams_{*device_, order_, pool_};
  StreamPrefetcher<prefetch_type> prefetcher_;
  mutable Monitor monitor_;  // guards what follows, the arena and the prefetcher
  detail::Journal<Policies> journal_{*device_, monitor_};
  detail::Blocks<Policies> blocks_;
  detail::Transfers<Policies> transfers_{*device_,
                                         order_,
                                         arena_,
                                         pool_,
                                         streams_,
                                         blocks_,
                                         journal_,
                                         monitor_,
                                         paging_.poison_vacated};
  detail::Reclaimer<Policies> reclaimer_{
      *device_, order_, arena_, blocks_, transfers_, journal_, monitor_, paging_};
  detail::Leases<Policies> leases_{
      *device_, order_, pool_, prefetcher_, blocks_, transfers_, reclaimer_, journal_, monitor_};
  detail::LookAhead<Policies> look_ahead_{
      arena_, prefetcher_, blocks_, transfers_, reclaimer_, journal_, monitor_, paging_};
  detail::SyncCopier<device_type> copier_{*device_};
  std::vector<CapacityChange> capacity_changes_;  // in the order in which they began
  std::uint64_t capacity_change_count_ = 0;
  std::size_t kept_capacity_bytes_ = 0;  // the capacity if all these changes fail
  std::atomic<int> stream_count_{0};     // `Stream`s that refer to this object
};

template <PolicySet Policies>
DeviceAllocator<Policies>::DeviceAllocator(std::unique_ptr<device_type> owned,
                                           device_type* device,
                                           Options options)
    : owned_device_{std::move(owned)},
      device_{device == nullptr ? owned_device_.get() : device},
      paging_{checked(options.paging)},
      order_{*device_},
      arena_(make_arena(options)),
      pool_{*device_, order_, host_options(*device_, options), chosen(options.file_io)},
      prefetcher_{chosen(options.prefetch)},
      blocks_{*device_,
              arena_,
              pool_,
              prefetcher_,
              journal_,
              monitor_,
              chosen(options.eviction),
              chosen(options.recompute),
              paging_.link_bytes_per_second} {
  journal_.reset_peaks(arena_.reserved_bytes());
}

template <PolicySet Policies>
DeviceAllocator<Policies>::~DeviceAllocator() {  // NOLINT(bugprone-exception-escape): see above
  close();
  expects(stream_count_ == 0,
          "an allocator ends while streams from its create_stream exist: destroy these first",
          {},
          "~DeviceAllocator");
  try {
    synchronize();
  } catch (DeviceError const&) {  // NOLINT(bugprone-empty-catch): a dead device has no work left
  }
}

template <PolicySet Policies>
BlockId DeviceAllocator<Policies>::allocate(std::size_t size_bytes) {
  Call const call{*this};
  BlockId const id = blocks_.add(size_bytes);
  detail::BlockRecord& block = blocks_.at(id);
  try {
    std::optional<Placement> placement;
    if constexpr (!MappingArena<Arena>) {
      placement = blocks_.try_place(block.bytes, id);
    }
    if (placement) {
      journal_.range_found(RangeSource::free_range);
    } else {
      Exclusive const exclusive{monitor_};
      placement = reclaimer_.take_range(block.bytes, id);
    }
    blocks_.place(id, *placement, prefetcher_.schedule().use_of(id));
  } catch (...) {
    blocks_.refuse(id);
    throw;
  }
  blocks_.count(id);
  return id;
}

template <PolicySet Policies>
void DeviceAllocator<Policies>::deallocate(BlockId id) {
  Call const call{*this};
  expects(blocks_.expect(id).owner_leases() == 0,
          "a leased block cannot be freed: release its leases first");
  blocks_.wait_until_settled(id, nullptr);
  free_now_or_later(id, blocks_.expect(id));
}

template <PolicySet Policies>
void DeviceAllocator<Policies>::abandon(BlockId id) noexcept {
  Call const call{*this};
  detail::BlockRecord* const block = blocks_.find(id);
  SPILLWAY_ASSERT(block != nullptr && !block->is_abandoned);
  if (block == nullptr) {
    return;
  }
  blocks_.wait_until_settled(id, nullptr);
  free_now_or_later(id, *block);
}

template <PolicySet Policies>
void DeviceAllocator<Policies>::release(LeaseRecord const& lease) noexcept {
  Call const call{*this};
  bool const is_exact_event_wanted = leases_.release(lease);
  if (is_exact_event_wanted) {
    record_exactly(lease.stream);
  }
}

template <PolicySet Policies>
void DeviceAllocator<Policies>::release_all(std::span<lease_type> leases) noexcept {
  Call const call{*this};
  bool is_exact_event_wanted = false;
  for (lease_type& lease : leases) {
    SPILLWAY_ASSERT(lease.empty() || lease.pager_ == this);
    if (!lease.empty()) {
      is_exact_event_wanted = leases_.release(lease.record_) || is_exact_event_wanted;
    }
  }
  StreamIndex recorded = StreamIndex::none;
  for (lease_type& lease : leases) {
    if (is_exact_event_wanted && !lease.empty() &&
        std::exchange(recorded, lease.record_.stream) != lease.record_.stream) {
      record_exactly(recorded);  // makes no device call if an event already covers the stream
    }
    lease.forget();
  }
}

/// Records an event on `stream` now, so that those who later wait for the work enqueued so far do
/// not also wait for work that is enqueued after it. Called with the lock, which is released
/// meanwhile.
template <PolicySet Policies>
void DeviceAllocator<Policies>::record_exactly(StreamIndex stream) noexcept {
  typename Monitor::Unlocked const unlocked{monitor_};
  try {
    order_.record(stream);
  } catch (...) {  // NOLINT(bugprone-empty-catch): whoever waits will record an event instead
  }
}

template <PolicySet Policies>
void DeviceAllocator<Policies>::swap_out(BlockId id) {
  Call const call{*this};
  (void)blocks_.expect(id);
  Exclusive const exclusive{monitor_};
  detail::BlockRecord& block = blocks_.expect(id);
  expects(block.owner_leases() == 0,
          "a leased block cannot be swapped out: release its leases first");
  if (!block.is_resident() || block.is_leased()) {
    return;
  }
  std::size_t const bytes = block.bytes;
  blocks_.begin_swap_out(id);
  if (transfers_.swap_out({&id, 1}, EvictionReason::requested) == 0) {
    throw OutOfHostMemory{bytes, pool_.free_bytes(), pool_.advice_when_full()};
  }
}

template <PolicySet Policies>
template <class Make>
void DeviceAllocator<Policies>::set_recipe(BlockId id,
                                           std::span<BlockId const> operands,
                                           std::chrono::nanoseconds cost,
                                           Make make) {
  detail::Recipe::Make callable = on_any_stream(std::move(make));  // outlives the call
  Call const call{*this};
  check_recipe(id, operands);
  expects(!blocks_.at(id).needs_recipe(),
          "the block needs the recipe that it has: acquire it before it is given another");
  blocks_.recipes().give(id, operands, count_of(cost), std::move(callable));
  blocks_.note_price(id, blocks_.at(id));
}

template <PolicySet Policies>
template <class Make>
bool DeviceAllocator<Policies>::extend_recipe(lease_type const& lease,
                                              std::span<BlockId const> operands,
                                              std::chrono::nanoseconds cost,
                                              Make make) {
  expects(lease.pager_ == this, "a recipe is extended by the holder of a lease of this allocator");
  detail::Recipe::Make callable = on_any_stream(std::move(make));  // outlives the call
  Call const call{*this};
  check_recipe(lease.block(), operands);
  bool const is_extended = blocks_.recipes().extend(
      lease.block(), lease.record_.serial, operands, count_of(cost), std::move(callable));
  if (is_extended) {
    blocks_.note_price(lease.block(), blocks_.at(lease.block()));
  }
  return is_extended;
}

/// Waits until `id` and the operands are not in transit. @throws ContractViolation, which names the
/// calling function, if `id` cannot have a recipe with these operands
template <PolicySet Policies>
void DeviceAllocator<Policies>::check_recipe(BlockId id,
                                             std::span<BlockId const> operands,
                                             char const* call) {
  auto const settle = [this, call](BlockId one) {
    (void)blocks_.expect(one, call);
    blocks_.wait_until_settled(one, nullptr);
  };
  std::for_each(operands.begin(), operands.end(), settle);
  settle(id);  // last, since it may begin to leave again while an operand is waited for
  auto const has_bytes = [this, call](BlockId one) {
    return blocks_.expect(one, call).has_contents();
  };
  expects(has_bytes(id) && std::all_of(operands.begin(), operands.end(), has_bytes),
          "a recipe is given once the block and its operands have been written",
          {},
          call);
  expects(std::find(operands.begin(), operands.end(), id) == operands.end(),
          "a block cannot be made again from itself",
          {},
          call);
}

template <PolicySet Policies>
Residency DeviceAllocator<Policies>::residency(BlockId id) const {
  Elsewhere const call{monitor_};
  std::unique_lock guard{monitor_};
  detail::BlockRecord const& block = blocks_.expect(id);
  detail::BlockState const settled = block.status.settled();
  bool const is_resident = detail::is_resident(settled);
  bool const is_on_host = settled == detail::BlockState::on_host;
  bool const may_be_in_flight = is_on_host || settled == detail::BlockState::arriving ||
                                settled == detail::BlockState::prefetched;
  Fence const transfer = block.written;
  guard.unlock();
  if (may_be_in_flight && !order_.is_complete(transfer)) {
    return is_resident ? Residency::moving_in : Residency::moving_out;
  }
  return is_resident ? Residency::device : is_on_host ? Residency::host : Residency::none;
}

template <PolicySet Policies>
void DeviceAllocator<Policies>::begin_step() {
  Call const call{*this};
  journal_.begin_step();
  blocks_.begin_step();
  typename Monitor::Unlocked const unlocked{monitor_};
  pool_.check();
}

template <PolicySet Policies>
void DeviceAllocator<Policies>::set_capacity(std::size_t bytes) {
  Call const call{*this};
  Exclusive const exclusive{monitor_};
  auto& changes = capacity_changes_;
  kept_capacity_bytes_ = changes.empty() ? arena_.capacity_bytes() : kept_capacity_bytes_;
  std::uint64_t const number = ++capacity_change_count_;
  changes.push_back({number, bytes});
  auto const find = [&] {  // finds nothing if a later change has succeeded
    return std::find_if(changes.begin(), changes.end(), [&](CapacityChange const& change) {
      return change.number == number;
    });
  };
  try {
    arena_.set_capacity(bytes);
    reclaimer_.fit_capacity();
  } catch (...) {
    if (auto const change = find(); change != changes.end()) {
      changes.erase(change);
      arena_.set_capacity(changes.empty() ? kept_capacity_bytes_ : changes.back().bytes);
      monitor_.notify_release();
    }
    throw;
  }
  if (auto const change = find(); change != changes.end()) {
    kept_capacity_bytes_ = bytes;
    changes.erase(changes.begin(), change + 1);
  }
  blocks_.plan();
  monitor_.notify_release();  // wakes threads that wait for room
}

template <PolicySet Policies>
void DeviceAllocator<Policies>::set_first_host_tier(HostTier tier) {
  Call const call{*this};
  Exclusive const exclusive{monitor_};
  pool_.set_first_tier(tier);
}

template <PolicySet Policies>
std::size_t DeviceAllocator<Policies>::trim_host_sync() {
  HostTier const first = pool_.first_tier();
  auto const is_before = [&](detail::BlockRecord const& block) {
    return block.host != HostSlotId{} && pool_.tier(block.host) < first;
  };
  std::vector<BlockId> before;
  {
    std::lock_guard const guard{monitor_};
    std::as_const(blocks_).for_each([&](BlockId id, detail::BlockRecord const& block) {
      if (is_before(block)) {
        before.push_back(id);
      }
    });
  }
  bool has_room = true;
  for (BlockId const id : before) {
    Call const call{*this};
    detail::BlockRecord* block = blocks_.find(id);
    bool const is_away = block != nullptr && !block->is_resident();
    if (is_away && has_room) {
      leases_.swap_in(id);  // its owner may have freed it: others may be made from it
    }
    Exclusive const exclusive{monitor_};
    block = blocks_.find(id);  // others may have freed it or brought it in
    if (block == nullptr || !is_before(*block) || !block->is_resident() || block->is_in_transit() ||
        block->state() == detail::BlockState::filling || transfers_.has_lost_bytes(*block)) {
      continue;
    }
    transfers_.give_up_host_copy(*block);
    if (is_away && block->can_leave()) {
      blocks_.begin_swap_out(id);
      has_room = transfers_.swap_out({&id, 1}, EvictionReason::requested) != 0;
      if (!has_room) {  // back to where it came from
        struct Lifted {
          explicit Lifted(Pool& all) : pool{all}, tier{all.first_tier()} {
            pool.set_first_tier(HostTier::pinned);
          }
          Lifted(Lifted const&) = delete;
          Lifted& operator=(Lifted const&) = delete;
          ~Lifted() { pool.set_first_tier(tier); }
          Pool& pool;
          HostTier tier;
        } const lifted{pool_};
        blocks_.begin_swap_out(id);
        (void)transfers_.swap_out({&id, 1}, EvictionReason::requested);
      }
    }
  }
  Elsewhere const call{monitor_};
  return pool_.trim_sync();
}

template <PolicySet Policies>
Stats DeviceAllocator<Policies>::stats() const {
  std::lock_guard const guard{monitor_};
  Stats now = journal_.stats();
  now.capacity_bytes = arena_.capacity_bytes();
  now.reserved_bytes = arena_.reserved_bytes();
  now.free_bytes = arena_.free_bytes();
  now.largest_free_bytes = arena_.largest_free_bytes();
  now.mispredictions = prefetcher_.schedule().mispredictions();
  return now;
}

template <PolicySet Policies>
void DeviceAllocator<Policies>::retire_stream(stream_type stream) {
  Elsewhere const call{monitor_};
  {
    std::lock_guard const guard{monitor_};
    leases_.forget_streams();
  }
  order_.retire(stream);
}

template <PolicySet Policies>
void DeviceAllocator<Policies>::copy_from_host_sync(void* device_to,
                                                    void const* from,
                                                    std::size_t bytes,
                                                    stream_type stream) {
  Elsewhere const call{monitor_};
  copier_.copy_from_host_sync(device_to, from, bytes, stream);
}

template <PolicySet Policies>
void DeviceAllocator<Policies>::copy_to_host_sync(void* to,
                                                  void const* device_from,
                                                  std::size_t bytes,
                                                  stream_type stream) {
  Elsewhere const call{monitor_};
  copier_.copy_to_host_sync(to, device_from, bytes, stream);
}

/// The common tensor: on a `DeviceAllocator` with the default policies, or with `Policies`.
template <class T, std::size_t Rank, PolicySet Policies = DefaultPolicies>
using Tensor = SwappableTensor<T, Rank, DeviceAllocator<Policies>>;

SPILLWAY_COMPILED_PART(class StreamPrefetcher<ScheduleLookahead>);

}  // namespace spillway
