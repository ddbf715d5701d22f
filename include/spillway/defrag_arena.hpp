// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/arena/arena_memory.hpp>
#include <spillway/arena/move_batch.hpp>
#include <spillway/arena/move_plan.hpp>
#include <spillway/arena/range_map.hpp>
#include <spillway/arena/room_search.hpp>
#include <spillway/concepts/arena.hpp>
#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/fit_policy.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/types.hpp>
#include <spillway/policy/compaction/sliding_compaction.hpp>
#include <spillway/policy/fit/segregated_fit.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <optional>
#include <utility>

namespace spillway {

/// Statistics of an arena: how much memory it has and how that is divided. Sizes are in bytes,
/// rounded up to the granule.
struct ArenaStats {
  std::size_t capacity_bytes = 0;
  std::size_t reserved_bytes = 0;
  std::size_t free_bytes = 0;
  std::size_t largest_free_bytes = 0;
  std::size_t taken_bytes = 0;  ///< includes what a begun plan has claimed
  std::size_t taken_ranges = 0;
  std::size_t free_ranges = 0;
  std::size_t segments = 0;

  /// Returns the external fragmentation, `1 - largest_free_bytes / free_bytes`: 0 if the free bytes
  /// are one range or nothing is free, close to 1 if they are many small ranges.
  [[nodiscard]] double external_fragmentation() const noexcept {
    return free_bytes == 0
               ? 0.0
               : 1.0 - static_cast<double>(largest_free_bytes) / static_cast<double>(free_bytes);
  }

  friend bool operator==(ArenaStats const&, ArenaStats const&) noexcept = default;
};

/// The arena that moves blocks: it divides device memory into ranges, joins free neighbours, and
/// plans how blocks move inside the device so that gaps join. `DeviceAllocator` has one unless its
/// policies choose another arena.
///
/// It can also be used alone, by a program that does not swap. A taken range comes with the fence
/// that its first user waits for, and is given back with the fence of its last uses. When no free
/// range fits, the program compacts:
/// ```
/// auto range = arena.try_take(bytes, id);  // the first user's stream waits for range->fence
/// if (auto plan = range ? std::nullopt : arena.plan_compaction(bytes, budget_bytes, can_move)) {
///   arena.begin_moves(*plan);              // from here on other threads may use the arena again
///   std::size_t done = 0;
///   try {
///     // the stream waits for plan->fence
///     enqueue_moves(device, plan->moves, stream, plan->bounce, done, [&](std::size_t i) {
///       // the stream waits for plan->moves[i].fence and for the last uses of the block
///     });
///   } catch (...) {                        // the moves before number `done` are enqueued
///     arena.commit_moves(*plan, done, fence_after_the_moves());
///     throw;
///   }
///   arena.commit_moves(*plan, done, fence_after_the_moves());
///   range = arena.try_take(bytes, id);
/// }
/// ```
///
/// Shape    one or more segments, which are reservations of the device, or one range of addresses
///          with holes (`ArenaOptions::grows_in_place`); sizes and addresses are multiples of
///          `granule_bytes`.
/// Threads  thread-compatible. Only the constructor, the destructor, `try_reserve` and `release`
///          call the device, so a caller can hold a lock around everything else.
/// Streams  none: each free range carries the last uses of its bytes, and the caller that takes the
///          range makes its stream wait for them (`Placement::fence`, `Move::fence`).
/// Address  of a range: fixed except by a committed plan that moves it.
template <DeviceApi Device,
          FitPolicy Fit = SegregatedFit,
          CompactionPolicy Compaction = SlidingCompaction>
class DefragArena {
 public:
  using device_type = Device;
  using fit_type = Fit;
  using compaction_type = Compaction;
  using plan_type = CompactionPlan;
  using Options = ArenaOptions;

  static constexpr bool is_thread_safe = false;

  /// `device` is not owned and must outlive the arena.
  ///
  /// @throws OutOfDeviceMemory if the device does not have `initial_bytes` free; DeviceError;
  ///         std::bad_alloc; ContractViolation if the capacity is 1 TiB or more, or is less than a
  ///         granule (with `grows_in_place`: less than the device's granularity)
  DefragArena(Device& device,
              ArenaOptions options,
              Fit fit = Fit(),
              Compaction compaction = Compaction());
  DefragArena(DefragArena const&) = delete;
  DefragArena& operator=(DefragArena const&) = delete;
  /// Releases all memory to the device. All work that uses the memory must have finished.
  ~DefragArena() {
    for (std::uint16_t const segment : map_.list().segments()) {
      detail::RangeList::Span const& span = map_.list().span(segment);
      memory_.release({span.base, std::size_t{span.count} * granule_bytes, {}});
    }
    if (bounce_.address != nullptr) {
      device_->release(bounce_.address, bounce_.bytes);
    }
  }

  /// Takes a range of `bytes`, rounded up to the granule, for block `owner`.
  ///
  /// @returns the range with the fence that its first user waits for; nothing if no free range fits
  /// @throws ContractViolation for 0 bytes; std::bad_alloc; nothing has changed then
  /// @cost   that of the fit policy
  [[nodiscard]] std::optional<Placement> try_take(std::size_t bytes, BlockId owner) {
    // Every path returns this variable, so that the compiler can elide the copy.
    std::optional<Placement> placement;
    if (bytes - 1 >= most_bytes_) {  // also true for 0 bytes: 0 - 1 wraps around
      expects(bytes != 0, "a range of 0 bytes cannot be taken");
      return placement;
    }
    std::uint64_t const count = granules(bytes);
    if (map_.table().taken_granules + count > capacity_granules_) {
      return placement;
    }
    placement.emplace();
    std::uint32_t const node =
        map_.take(static_cast<std::uint32_t>(count), owner, placement->fence);
    if (node == no_node) {
      placement.reset();
      return placement;
    }
    placement->range = RangeId{node};
    placement->address = address(placement->range);
    return placement;
  }

  /// Frees a range. The next user of its bytes waits for `last_uses` first.
  ///
  /// A range that a begun plan moves may be given back, too. It then becomes free when the plan is
  /// committed.
  void give_back(RangeId range, Fence const& last_uses) noexcept {
    map_.give_back(node_of(range), last_uses);
  }

  /// Changes the capacity; ranges that are taken stay taken.
  ///
  /// @throws ContractViolation for less than a granule, and for more than
  ///         `ArenaOptions::capacity_bytes`
  void set_capacity(std::size_t bytes) {
    expects(bytes >= granule_bytes && bytes <= most_bytes_,
            "the capacity must be at least 256 bytes, and at most what the arena was made with");
    capacity_granules_ = bytes / granule_bytes;
  }

  /// Returns the segment to reserve next so that `bytes` fit; a segment of 0 bytes if the capacity
  /// does not allow that, or if the present segments leave no place for it in the 1 TiB that an
  /// arena can number.
  ///
  /// Without `grows_in_place` the segment has at least 1/32768 of the largest capacity, so that
  /// there are not too many. With it the segment is the beginning of the lowest hole that would
  /// give a free range of `bytes`. If no hole does, it is a part of the lowest hole, which
  /// compaction can join with free ranges elsewhere.
  /// @cost O(1) when the capacity is reached; else O(segments), with `grows_in_place` O(ranges)
  [[nodiscard]] Segment growth_for(std::size_t bytes) const noexcept {
    std::size_t const left = bytes_to_reserve();
    if (left == 0 || (bytes > left && !memory_.is_one_line())) {
      return {};
    }
    if (!memory_.is_one_line()) {
      std::size_t const wanted =
          std::max({bytes, options_.growth_bytes, most_bytes_ / most_reservations});
      return {nullptr, wanted >= left ? left : granules(wanted) * granule_bytes, {}};
    }
    std::uint32_t const hole = hole_for(bytes, left);
    if (hole == no_node) {
      return {};
    }
    detail::RangeList const& list = map_.list();
    std::size_t const missing = bytes - std::min(bytes, free_bytes_of(list.table[hole].prev));
    std::size_t const wanted = std::max({missing, options_.growth_bytes, granule_bytes});
    std::size_t const granularity = memory_.granularity_bytes();
    return {list.address(list.table[hole].segment, list.table[hole].first),
            std::min({round_up(std::min(wanted, left), granularity),
                      left / granularity * granularity,
                      std::size_t{list.table[hole].count} * granule_bytes}),
            {}};
  }

  /// Returns the largest `n` for which `try_take` would find a range if the arena grew by at most
  /// `growth_bytes`.
  /// @cost as `growth_for`
  [[nodiscard]] std::size_t largest_bytes_after_growth(std::size_t growth_bytes) const noexcept {
    std::size_t growth = std::min(growth_bytes, bytes_to_reserve());
    if (memory_.is_one_line() && growth != 0) {
      std::size_t const whole = growth / memory_.granularity_bytes() * memory_.granularity_bytes();
      growth = 0;
      (void)find_hole([&](std::uint32_t node) {
        growth = std::max(growth, bytes_after_growth(node, whole));
        return false;
      });
    }
    return std::max(largest_free_bytes(), growth / granule_bytes * granule_bytes);
  }

  /// Takes the memory of a segment that `growth_for` returned from the device.
  ///
  /// @returns false if the device is full, or (with `grows_in_place`) if `trim` has handed over
  ///          memory at these addresses that has not been released yet
  /// @throws DeviceError, std::bad_alloc; nothing has been taken then
  [[nodiscard]] bool try_reserve(Segment& segment) { return memory_.try_reserve(segment); }

  /// Adds a segment from `try_reserve` to the arena as a free range. The arena owns it from now on.
  ///
  /// @throws ContractViolation if the segment exceeds the capacity, is not a multiple of the
  ///         granule, or (with `grows_in_place`) lies where the arena already has memory;
  ///         std::bad_alloc. The caller then still owns it
  void add_segment(Segment const& segment) {
    expects(segment.bytes % granule_bytes == 0 &&
                reserved_bytes_ + segment.bytes <= capacity_bytes(),
            "a segment is a multiple of 256 B and fits into the capacity");
    auto const count = static_cast<std::uint32_t>(granules(segment.bytes));
    if (memory_.is_one_line()) {
      std::uint32_t const hole = find_hole([&](std::uint32_t node) {
        return map_.list().address(0, map_.list().table[node].first) == segment.address;
      });
      expects(count != 0 && count <= map_[hole].count,  // false for `no_node`, which has 0 granules
              "in place, a segment begins where a hole begins, and is no longer than that");
      map_.fill(hole, count);
    } else {
      map_.add_segment(static_cast<std::byte*>(segment.address), count);
    }
    reserved_bytes_ += segment.bytes;
  }

  /// Takes free memory out of the arena, if there is any, so that the caller can `release` it once
  /// its fence has passed: a segment that is wholly free or, with `grows_in_place`, adjacent pieces
  /// of about `bytes` in all, from the highest addresses down.
  /// @cost O(segments); with `grows_in_place` O(ranges)
  [[nodiscard]] std::optional<Segment>
  trim(std::size_t bytes = std::numeric_limits<std::size_t>::max()) noexcept {
    auto segment = memory_.is_one_line() ? detach_pieces(bytes) : map_.detach_segment();
    reserved_bytes_ -= segment ? segment->bytes : 0;
    return segment;
  }
  /// Returns how many bytes repeated calls of `trim` would hand over. @cost O(ranges), with
  /// `grows_in_place` O(ranges + pieces)
  [[nodiscard]] std::size_t trimmable_bytes() const noexcept {
    detail::RangeList const& list = map_.list();
    std::size_t bytes = 0;
    for (std::uint16_t const segment : list.segments()) {
      for (std::uint32_t node = list.front(segment); node != list.span(segment).wall;
           node = list.table[node].next) {
        RangeNode const& range = list.table[node];
        if (range.state != RangeState::free) {
          continue;
        }
        if (memory_.is_one_line()) {
          bytes += memory_
                       .top_pieces(list.address(segment, range.first),
                                   list.address(segment, range.end()),
                                   std::numeric_limits<std::size_t>::max())
                       .bytes;
        } else if (range.count == list.span(segment).count) {
          bytes += std::size_t{range.count} * granule_bytes;
        }
      }
    }
    return bytes;
  }
  /// Releases to the device what `trim` handed over. Its fence must have passed.
  void release(Segment const& segment) noexcept { memory_.release(segment); }
  [[nodiscard]] bool trims_anywhere() const noexcept { return memory_.is_one_line(); }

  /// Searches for a cheap plan that makes a free range of `bytes` by moving at most `budget_bytes`.
  ///
  /// If there are more than `ArenaOptions::few_ranges` ranges, the search begins with some of them
  /// and is widened only if it finds nothing.
  ///
  /// @param can_move  predicate on a block's id; asked once for each block looked at, in order of
  ///                  address
  /// @return  nothing if no such plan was found; a plan without moves if a free range fits already
  /// @throws  ContractViolation for 0 bytes; std::bad_alloc
  /// @cost    O(n) for n ranges, and a bounded search; mostly O(1) beyond `few_ranges`
  template <std::predicate<BlockId> CanMove>
  [[nodiscard]] std::optional<CompactionPlan>
  plan_compaction(std::size_t bytes, std::size_t budget_bytes, CanMove can_move) {
    for (std::size_t most = first_search(few_ranges()); most != all_ranges;
         most = wider_search(most)) {
      if (auto plan = plan_compaction(bytes, budget_bytes, can_move, most)) {
        return plan;
      }
    }
    return plan_compaction(bytes, budget_bytes, can_move, all_ranges);
  }

  /// Searches for a plan that makes about the largest free range that is possible by moving at most
  /// `budget_bytes`.
  ///
  /// @return  nothing if no plan makes a free range that is larger than the present largest one
  /// @throws  std::bad_alloc
  /// @cost    a few times that of `plan_compaction`
  template <std::predicate<BlockId> CanMove>
  [[nodiscard]] std::optional<CompactionPlan> plan_pass(std::size_t budget_bytes,
                                                        CanMove can_move) {
    if (!Compaction::moves_blocks) {
      return std::nullopt;
    }
    return search_.plan_largest(map_, budget_bytes / granule_bytes, std::move(can_move));
  }

  /// Makes a plan that slides every block that may move to the lowest address that it can reach, so
  /// that the free memory at the top can be given back to the device.
  ///
  /// @return  nothing if no block can move down
  /// @throws  std::bad_alloc
  /// @cost    O(n) for n ranges; the plan may move every block of the arena
  template <std::predicate<BlockId> CanMove>
  [[nodiscard]] std::optional<CompactionPlan> plan_slide(CanMove can_move) {
    return Compaction::moves_blocks ? search_.plan_slide(map_, std::move(can_move)) : std::nullopt;
  }

  /// Claims the ranges that `plan` needs, so that no other thread takes them while the caller
  /// enqueues the moves.
  ///
  /// Blocks keep their addresses until the commit. Begun plans must be committed.
  /// @throws ContractViolation if the arena has changed since the plan was made; std::bad_alloc;
  ///         nothing has changed then
  /// @cost   O(m log m) for m moves
  void begin_moves(CompactionPlan& plan) {
    map_.begin_moves(plan.claims);
    if (!plan.moves.empty() && !is_bounce_lent_) {
      is_bounce_lent_ = true;
      plan.bounce = bounce_;
      plan.fence = bounce_fence_;
    }
  }

  /// Ends a begun plan: gives the blocks of the first `done` moves their new addresses, and frees
  /// what was claimed for the other moves. `moved` must cover all work that was enqueued for the
  /// plan, even if `done` is 0.
  ///
  /// @cost O(m log m) for m moves
  void commit_moves(CompactionPlan& plan, std::size_t done, Fence const& moved) noexcept {
    map_.commit_moves(plan.claims, done, moved);
    if (plan.bounce.address != nullptr) {
      is_bounce_lent_ = false;
      bounce_fence_.add(moved);
      plan.bounce = {};
    }
  }

  /// Finds the neighbouring ranges that would become a free range of `bytes` at the lowest cost of
  /// evicting their blocks, among all ranges or among about `most_ranges` of them around the
  /// largest free ranges.
  ///
  /// @param cost  function from a `BlockId` to an optional number: what evicting the block costs,
  ///              nothing if it may not leave
  /// @throws ContractViolation for 0 bytes; std::bad_alloc
  /// @cost   O(ranges looked at)
  template <class Cost>
  [[nodiscard]] std::optional<EvictionWindow>
  cheapest_window(std::size_t bytes, Cost cost, std::size_t most_ranges = all_ranges) {
    expects(bytes != 0, "a window of 0 bytes is no window");
    if (bytes > capacity_bytes()) {
      return std::nullopt;
    }
    return search_.cheapest_window(
        map_, static_cast<std::uint32_t>(granules(bytes)), std::move(cost), most_ranges);
  }

  // For callers that weigh a search against eviction, as the pager does (`MovingArena`).

  /// As `plan_compaction` above, but looks at about `most_ranges` ranges only, those around the
  /// largest free ones. Also returns nothing if the plan that it has found would take longer to
  /// carry out than a wider search takes.
  template <std::predicate<BlockId> CanMove>
  [[nodiscard]] std::optional<CompactionPlan> plan_compaction(std::size_t bytes,
                                                              std::size_t budget_bytes,
                                                              CanMove can_move,
                                                              std::size_t most_ranges) {
    expects(bytes != 0, "a range of 0 bytes cannot be planned for");
    if (bytes <= largest_free_bytes()) {
      std::optional<CompactionPlan> plan{std::in_place};
      plan->makes_bytes = largest_free_bytes();
      plan->claims.version = map_.version();
      return plan;
    }
    if (!Compaction::moves_blocks || bytes > free_bytes()) {
      return std::nullopt;
    }
    return search_.plan(map_,
                        static_cast<std::uint32_t>(granules(bytes)),
                        budget_bytes / granule_bytes,
                        std::move(can_move),
                        most_ranges);
  }

  /// Returns how many ranges the first search for room should look at: all of them if there are at
  /// most `few`. `wider_search` returns the number for the next search after one of `most_ranges`
  /// has failed; the last number that it returns is `all_ranges`.
  [[nodiscard]] std::size_t first_search(std::size_t few) const noexcept {
    return detail::SearchScope::narrowest(ranges(), few);
  }
  [[nodiscard]] std::size_t wider_search(std::size_t most_ranges) const noexcept {
    return detail::SearchScope::wider(most_ranges, ranges());
  }
  [[nodiscard]] std::size_t few_ranges() const noexcept { return options_.few_ranges; }

  /// Returns how many free bytes beyond those asked for should exist before a search for room in
  /// one piece is worth its time: 0 for up to `few` ranges, close to 1/32 of the capacity for many.
  [[nodiscard]] std::size_t spare_bytes(std::size_t few) const noexcept {
    return ranges() <= few ? 0 : capacity_bytes() / 32 / ranges() * (ranges() - few);
  }

  /// Calls `visit` with the `RangeView` of each range, in order of segment and address. Holes are
  /// not shown; the ranges between two holes have a segment number of their own. No number is left
  /// out.
  template <std::invocable<RangeView const&> Visit>
  void for_each_range(Visit visit) const {
    detail::RangeList const& list = map_.list();
    std::size_t begun = 0;  // segments so far, as the visitor sees them
    for (std::uint16_t const segment : list.segments()) {
      bool is_begun = false;
      for (std::uint32_t node = list.front(segment); node != list.span(segment).wall;
           node = list.table[node].next) {
        RangeNode const& range = list.table[node];
        if (range.state == RangeState::hole) {
          is_begun = false;  // a hole may also be the first or the last range
          continue;
        }
        begun += std::exchange(is_begun, true) ? 0U : 1U;
        bool const is_block = range.state != RangeState::free && range.state != RangeState::claimed;
        visit(RangeView{.address = list.address(segment, range.first),
                        .size_bytes = std::size_t{range.count} * granule_bytes,
                        .segment = begun - 1,
                        .state = range.state,
                        .owner = is_block ? range.owner() : BlockId{},
                        .range = RangeId{is_block ? node : no_node}});
      }
    }
  }

  [[nodiscard]] std::byte* address(RangeId range) const noexcept {
    RangeNode const& node = map_[node_of(range)];
    return map_.list().address(node.segment, node.first);
  }
  /// Returns the size of the range, which is a multiple of the granule.
  [[nodiscard]] std::size_t size_bytes(RangeId range) const noexcept {
    return std::size_t{map_[node_of(range)].count} * granule_bytes;
  }
  /// Returns the number of the device reservation that the range lies in, counted from 1.
  [[nodiscard]] std::size_t reservation(RangeId range) const noexcept {
    return std::size_t{map_[node_of(range)].segment} + 1;
  }
  [[nodiscard]] BlockId owner(RangeId range) const noexcept { return map_[node_of(range)].owner(); }
  /// True while a plan that moves the range is begun and not committed.
  [[nodiscard]] bool is_moving(RangeId range) const noexcept {
    RangeState const state = map_[node_of(range)].state;
    return state == RangeState::moving || state == RangeState::leaving;
  }
  [[nodiscard]] static constexpr std::size_t rounded_bytes(std::size_t bytes) noexcept {
    return round_up(bytes, granule_bytes);
  }
  [[nodiscard]] std::size_t capacity_bytes() const noexcept {
    return static_cast<std::size_t>(capacity_granules_) * granule_bytes;
  }
  [[nodiscard]] std::size_t reserved_bytes() const noexcept { return reserved_bytes_; }
  [[nodiscard]] std::size_t free_bytes() const noexcept {
    return static_cast<std::size_t>(std::min(map_.table().free_granules(), left_granules())) *
           granule_bytes;
  }
  [[nodiscard]] std::size_t largest_free_bytes() const noexcept {
    return static_cast<std::size_t>(std::min<std::uint64_t>(map_.largest(), left_granules())) *
           granule_bytes;
  }
  [[nodiscard]] ArenaStats stats() const noexcept {
    RangeTable const& table = map_.table();
    return {.capacity_bytes = capacity_bytes(),
            .reserved_bytes = reserved_bytes_,
            .free_bytes = free_bytes(),
            .largest_free_bytes = largest_free_bytes(),
            .taken_bytes = static_cast<std::size_t>(table.taken_granules) * granule_bytes,
            .taken_ranges = table.taken_ranges,
            .free_ranges = table.free_ranges,
            .segments = map_.list().segments().size()};
  }

  [[nodiscard]] Device& device() const noexcept { return *device_; }

 private:
  // The public constructor delegates to the one with this parameter, which reserves nothing. If the
  // public one then throws, the destructor runs and releases what it has reserved.
  struct Nothing {};
  DefragArena(Device& device, ArenaOptions options, Fit fit, Compaction compaction, Nothing)
      : device_{&device},
        options_{checked(options)},
        most_bytes_{options_.capacity_bytes},
        capacity_granules_{most_bytes_ / granule_bytes},
        memory_{device,
                options.grows_in_place ? line_bytes(most_bytes_) : 0,
                options.page_bytes != 0
                    ? options.page_bytes
                    : std::max(options.growth_bytes, ArenaOptions{}.growth_bytes)},
        map_{std::move(fit)},
        search_{std::move(compaction), options_.bytes_per_look} {
    if (memory_.is_one_line()) {
      std::uint64_t const line = granules(memory_.line_bytes());
      expects(most_bytes_ >= memory_.granularity_bytes() && line < detail::RangeList::line_granules,
              "with grows_in_place, capacity_bytes must be at least the device's granularity, and "
              "rounded up to it below 1 TiB");
      auto const count = static_cast<std::uint32_t>(line);
      map_.add_segment(memory_.base(), count);
      map_.punch(map_.list().front(0), 0, count);
    }
  }
  // There can be no more than 65535 segments, whose numbers have 16 bits.
  static constexpr std::size_t most_reservations = 0x8000;

  static ArenaOptions checked(ArenaOptions options) {
    options.capacity_bytes &= ~(granule_bytes - 1);
    options.bounce_bytes &= ~(granule_bytes - 1);
    expects(options.capacity_bytes != 0 &&
                options.capacity_bytes / granule_bytes < detail::RangeList::line_granules,
            "capacity_bytes must be at least 256 and below 1 TiB",
            {},
            "DefragArena");
    return options;
  }

  /// Returns the size of the address range of an arena that grows in place: eight times its memory,
  /// so that pieces that were freed apart from each other can be mapped side by side elsewhere, but
  /// no more than 512 GiB, unless its memory is larger.
  [[nodiscard]] static std::size_t line_bytes(std::size_t most_bytes) noexcept {
    constexpr std::size_t longest = (detail::RangeList::line_granules >> 1U) * granule_bytes;
    return std::max(most_bytes, std::min(8 * most_bytes, longest));
  }
  /// Returns the most bytes that the next segment may have. If the capacity is not much less than
  /// the 1 TiB that the list of ranges can number, the present segments may lie so that there is no
  /// place for all that the capacity still allows.
  [[nodiscard]] std::size_t bytes_to_reserve() const noexcept {
    std::size_t const left = capacity_bytes() - std::min(capacity_bytes(), reserved_bytes_);
    if (left == 0 || memory_.is_one_line()) {
      return left;
    }
    return std::min(left, map_.list().largest_segment() * granule_bytes);
  }
  /// Returns the lowest hole for which `is_it(node)` is true, or `no_node`. Only for an arena that
  /// grows in place, which has one segment.
  template <class Predicate>
  [[nodiscard]] std::uint32_t find_hole(Predicate const& is_it) const noexcept {
    detail::RangeList const& list = map_.list();
    std::uint32_t const wall = list.span(0).wall;
    std::uint32_t node = list.front(0);
    while (node != wall && !(list.table[node].state == RangeState::hole && is_it(node))) {
      node = list.table[node].next;
    }
    return node == wall ? no_node : node;
  }
  /// The lowest hole of which a part of at most `growth_bytes` makes room for `bytes`, else the
  /// lowest hole.
  [[nodiscard]] std::uint32_t hole_for(std::size_t bytes, std::size_t growth_bytes) const noexcept {
    std::uint32_t const hole = find_hole(
        [&](std::uint32_t node) { return bytes_after_growth(node, growth_bytes) >= bytes; });
    return hole != no_node ? hole : find_hole([](std::uint32_t) { return true; });
  }
  /// Returns the size of the free range that results if up to `growth_bytes` of a hole get memory.
  [[nodiscard]] std::size_t bytes_after_growth(std::uint32_t hole,
                                               std::size_t growth_bytes) const noexcept {
    RangeNode const& range = map_.list().table[hole];
    std::size_t const hole_bytes = std::size_t{range.count} * granule_bytes;
    std::size_t const before = free_bytes_of(range.prev);
    return growth_bytes < hole_bytes ? before + growth_bytes
                                     : before + hole_bytes + free_bytes_of(range.next);
  }
  /// Returns the size of a range if it is free, else 0.
  [[nodiscard]] std::size_t free_bytes_of(std::uint32_t node) const noexcept {
    detail::RangeList const& list = map_.list();
    return list.is_free(node) ? std::size_t{list.table[node].count} * granule_bytes : 0;
  }
  /// Takes adjacent free pieces of about `bytes` in all out of the arena, from the highest
  /// addresses down, and leaves a hole in their place.
  [[nodiscard]] std::optional<Segment> detach_pieces(std::size_t bytes) noexcept {
    detail::RangeList const& list = map_.list();
    std::uint32_t const wall = list.span(0).wall;
    for (std::uint32_t node = list.table[wall].prev; node != wall; node = list.table[node].prev) {
      RangeNode const& range = list.table[node];
      if (range.state != RangeState::free) {
        continue;
      }
      std::byte* const begin = list.address(0, range.first);
      Segment segment = memory_.top_pieces(begin, list.address(0, range.end()), bytes);
      if (segment.bytes == 0) {
        continue;
      }
      segment.fence = list.fence(node);
      auto const offset =
          static_cast<std::size_t>(static_cast<std::byte*>(segment.address) - begin);
      auto const first = range.first + static_cast<std::uint32_t>(granules(offset));
      try {
        map_.punch(node, first, first + static_cast<std::uint32_t>(granules(segment.bytes)));
      } catch (std::bad_alloc const&) {
        return std::nullopt;
      }
      return segment;
    }
    return std::nullopt;
  }
  /// Returns how many granules the capacity still allows to take, whether or not a free range has
  /// room for them.
  [[nodiscard]] std::uint64_t left_granules() const noexcept {
    std::uint64_t const taken = map_.table().taken_granules;
    return capacity_granules_ - std::min(capacity_granules_, taken);
  }

  [[nodiscard]] std::size_t ranges() const noexcept { return map_.table().ranges(); }
  static std::uint32_t node_of(RangeId range) noexcept { return static_cast<std::uint32_t>(range); }
  // Rounds `bytes` up to granules. `bytes` is at most the capacity, so the sum cannot wrap around.
  static std::uint64_t granules(std::size_t bytes) noexcept {
    return (bytes + granule_bytes - 1) / granule_bytes;
  }

  Device* device_;
  ArenaOptions options_;
  std::size_t most_bytes_;  // the largest capacity that can be set
  std::uint64_t capacity_granules_;
  std::size_t reserved_bytes_ = 0;
  detail::ArenaMemory<Device> memory_;
  Bounce bounce_;
  Fence bounce_fence_;
  bool is_bounce_lent_ = false;
  detail::RangeMap<Fit> map_;
  detail::RoomSearch<Compaction> search_;
};

template <DeviceApi Device, FitPolicy Fit, CompactionPolicy Compaction>
DefragArena<Device, Fit, Compaction>::DefragArena(Device& device,
                                                  ArenaOptions options,
                                                  Fit fit,
                                                  Compaction compaction)
    : DefragArena{device, options, std::move(fit), std::move(compaction), Nothing{}} {
  std::size_t const bytes = granules(std::min(options_.initial_bytes, most_bytes_)) * granule_bytes;
  while (reserved_bytes_ < bytes) {
    Segment segment = growth_for(bytes - reserved_bytes_);
    if (segment.bytes == 0) {
      break;  // less than the device's granularity is left
    }
    segment.bytes = memory_.is_one_line() ? segment.bytes : bytes;
    if (!memory_.try_reserve(segment)) {
      MemoryReport report;
      report.requested_bytes = bytes;
      report.capacity_bytes = most_bytes_;
      throw OutOfDeviceMemory{
          report,
          detail::Text{"The device has "} + device.memory_info().free_bytes +
              " bytes free: lower capacity_bytes, or initial_bytes to reserve the rest later."};
    }
    try {
      add_segment(segment);
    } catch (...) {
      memory_.release(segment);
      throw;
    }
  }
  if (options_.bounce_bytes != 0) {
    // Moves work without the bounce range, with more copies, so failing to reserve it is no error.
    bounce_.address = static_cast<std::byte*>(device.try_reserve(options_.bounce_bytes));
    bounce_.bytes = bounce_.address != nullptr ? options_.bounce_bytes : 0;
  }
}

/// Chooses `DefragArena` as the arena of a bundle of policies: blocks are moved inside the device
/// so that gaps join, as the bundle's `compaction` decides.
struct MovableBlocks {
  template <class Policies>
  using type =
      DefragArena<typename Policies::device, typename Policies::fit, typename Policies::compaction>;
};

}  // namespace spillway
