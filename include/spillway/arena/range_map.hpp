// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/arena/move_plan.hpp>
#include <spillway/concepts/fit_policy.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/growing_array.hpp>
#include <spillway/core/range_table.hpp>
#include <spillway/core/sort.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace spillway::detail {

/// The linked list of an arena's ranges by address, with their fences. It only stores places and
/// links; `RangeMap` makes the decisions.
///
/// All segments are placed on one line of granules with at least one granule between them, so no
/// range extends over two segments.
///
/// Units    granules from the start of the line; a node is the number of a range.
/// Threads  thread-compatible.
template <class = Lazily>
class BasicRangeList {
 public:
  static constexpr bool is_thread_safe = false;
  static constexpr std::uint64_t line_granules = 0xFFFFFFFFU;  ///< 1 TiB, short of one

  struct Span {
    std::byte* base = nullptr;
    std::uint32_t first = 0;
    std::uint32_t count = 0;       ///< 0: not in use
    std::uint32_t wall = no_node;  ///< sentinel node before the first range and after the last
    std::uintptr_t origin = 0;     ///< where granule 0 of the line would be, modulo 2^64

    [[nodiscard]] std::uint32_t end() const noexcept { return first + count; }
  };

  /// Adds a segment of one free range. @returns that range
  /// @throws std::bad_alloc, ContractViolation when the line is full; nothing has changed then
  [[nodiscard]] std::uint32_t add_segment(std::byte* base, std::uint32_t count) {
    std::uint64_t first = 0;
    auto rank = segments_.begin();
    for (; rank != segments_.end() && first + count >= spans_[*rank].first; ++rank) {
      first = std::uint64_t{spans_[*rank].end()} + 1;
    }
    auto const vacant = std::find_if(
        spans_.begin(), spans_.end(), [](Span const& span) noexcept { return span.count == 0; });
    auto const segment = static_cast<std::uint16_t>(vacant - spans_.begin());
    expects(count != 0 && first + count < line_granules && segment != 0xFFFFU,
            "too many segments, or too large for the arena's line");
    if (vacant == spans_.end()) {
      spans_.emplace_back();
    }
    segments_.insert(rank, segment);
    std::uint32_t node = no_node;
    std::uint32_t wall = no_node;
    try {
      node = acquire();
      wall = acquire();
    } catch (...) {
      if (node != no_node) {
        table.release(node);
      }
      std::erase(segments_, segment);
      throw;
    }

    spans_[segment] = {base,
                       static_cast<std::uint32_t>(first),
                       count,
                       wall,
                       reinterpret_cast<std::uintptr_t>(base) - first * granule_bytes};
    table[wall] = {};
    table[wall].first = spans_[segment].end();
    table[wall].segment = segment;
    table[wall].state = RangeState::claimed;
    table[node] = {};
    table[node].first = spans_[segment].first;
    table[node].count = count;
    place(node, wall, wall, segment);
    return node;
  }

  /// Returns the size of the largest segment that the line has room for. @cost O(segments)
  [[nodiscard]] std::uint64_t largest_segment() const noexcept {
    std::uint64_t largest = 0;
    std::uint64_t first = 0;
    auto const measure_up_to = [&](std::uint64_t next) noexcept {
      largest = std::max(largest, next - std::min(first + 1, next));
    };
    for (std::uint16_t const segment : segments_) {
      measure_up_to(spans_[segment].first);
      first = std::uint64_t{spans_[segment].end()} + 1;
    }
    measure_up_to(line_granules);
    return largest;
  }

  /// Removes the segment of `node`, which must be its only range, and the node.
  void remove_segment(std::uint32_t node) noexcept {
    std::uint16_t const segment = table[node].segment;
    table.release(node);
    table.release(spans_[segment].wall);
    spans_[segment] = {};
    segments_.erase(std::find(segments_.begin(), segments_.end(), segment));
  }

  /// Returns a node for a new range. @throws std::bad_alloc; nothing has changed then
  [[nodiscard]] std::uint32_t acquire() {
    if (table.idle_nodes() == 0) {
      grow();
    }
    return table.acquire();
  }

  /// Makes two ranges of a segment neighbours.
  void connect(std::uint32_t low, std::uint32_t high) noexcept {
    table[low].next = high;
    table[high].prev = low;
  }

  /// Puts a range between two others.
  void place(std::uint32_t node,
             std::uint32_t prev,
             std::uint32_t next,
             std::uint16_t segment) noexcept {
    table[node].segment = segment;
    connect(prev, node);
    connect(node, next);
  }

  /// Sets in each of two neighbours the flag that says whether the other one is free.
  void introduce(std::uint32_t low, std::uint32_t high) noexcept {
    table[low].set(RangeNode::is_next_free, is_free(high));
    table[high].set(RangeNode::is_prev_free, is_free(low));
  }

  [[nodiscard]] Fence fence(std::uint32_t node) const noexcept {
    return table[node].is(RangeNode::has_fence) ? fences_[node] : Fence{};
  }

  [[gnu::always_inline]] void add_fence(std::uint32_t node, Fence const& fence) noexcept {
    if (fence.is_empty()) {
      return;
    }
    if (table[node].is(RangeNode::has_fence)) {
      join(fences_[node], fence);
    } else {
      fences_[node] = fence;
      table[node].set(RangeNode::has_fence);
    }
  }

  [[gnu::always_inline]] void take_over_fence(std::uint32_t to, std::uint32_t from) noexcept {
    if (table[from].is(RangeNode::has_fence)) {
      add_fence(to, fences_[from]);
    }
  }

  [[nodiscard]] bool is_free(std::uint32_t node) const noexcept {
    return table[node].state == RangeState::free;
  }

  /// The address of a granule that lies in `segment`.
  [[nodiscard]] std::byte* address(std::uint16_t segment, std::uint32_t granule) const noexcept {
    // Computed in integers, since the origin is not a valid address. It may have wrapped around;
    // the sum wraps back. NOLINTNEXTLINE(performance-no-int-to-ptr)
    return reinterpret_cast<std::byte*>(spans_[segment].origin +
                                        std::size_t{granule} * granule_bytes);
  }
  /// The address of a granule in any segment. O(log segments).
  [[nodiscard]] std::byte* address(std::uint32_t granule) const noexcept {
    return address(segment_at(granule), granule);
  }
  /// The segment that a granule lies in. O(log segments).
  [[nodiscard]] std::uint16_t segment_at(std::uint32_t granule) const noexcept {
    auto const after = std::upper_bound(
        segments_.begin(), segments_.end(), granule, [&](std::uint32_t at, std::uint16_t segment) {
          return at < spans_[segment].first;
        });
    return *(after - 1);
  }

  /// The lowest range of a segment.
  [[nodiscard]] std::uint32_t front(std::uint16_t segment) const noexcept {
    return table[spans_[segment].wall].next;
  }
  [[nodiscard]] Span const& span(std::uint16_t segment) const noexcept { return spans_[segment]; }
  /// The segments in use, in order of their place on the line.
  [[nodiscard]] std::vector<std::uint16_t> const& segments() const noexcept { return segments_; }

  RangeTable table;

 private:
  // Rarely called and not inlined, so that its callers stay small enough to be inlined.
  [[gnu::noinline]] static void join(Fence& into, Fence const& fence) noexcept { into.add(fence); }
  [[gnu::noinline]] void grow() {
    if (fences_.size() == table.nodes()) {
      fences_.grow();
    }
    table.grow();
  }

  GrowingArray<Fence> fences_{1};  // by node; read only where the node says that it has one
  std::vector<Span> spans_;
  std::vector<std::uint16_t> segments_;
};

using RangeList = BasicRangeList<>;

/// Keeps account of which granules of an arena's segments are free, taken or being moved. Makes no
/// device call.
///
/// Free neighbours are always joined, and a free range has the fences of all that was given back in
/// it. A move changes the place of a range and never its number.
///
/// Units    granules from the start of the line; a node is the number of a range.
/// Threads  thread-compatible.
template <FitPolicy Fit>
class RangeMap {
 public:
  static constexpr bool is_thread_safe = false;

  /// Takes over `fit`, which indexes nothing yet.
  explicit RangeMap(Fit fit = Fit()) : fit_{std::move(fit)} {}
  RangeMap(RangeMap const&) = delete;
  RangeMap& operator=(RangeMap const&) = delete;

  /// Adds `count` free granules at `base`.
  ///
  /// @throws std::bad_alloc, ContractViolation when the line is full; nothing has changed then
  void add_segment(std::byte* base, std::uint32_t count) {
    add_free(list_.add_segment(base, count));
    list_.table.granules += count;
    ++version_;
  }

  /// Removes a segment that is wholly free and returns it, if there is one.
  [[nodiscard]] std::optional<Segment> detach_segment() noexcept {
    for (std::uint16_t const index : list_.segments()) {
      RangeList::Span const& span = list_.span(index);
      std::uint32_t const node = list_.front(index);
      if (!list_.is_free(node) || list_.table[node].count != span.count) {
        continue;
      }
      Segment const segment{span.base, std::size_t{span.count} * granule_bytes, list_.fence(node)};
      fit_.erase(list_.table, node);
      --list_.table.free_ranges;
      list_.table.granules -= span.count;
      list_.remove_segment(node);
      ++version_;
      return segment;
    }
    return std::nullopt;
  }

  /// Makes granules [first, end) of the free range `node` a hole: there is no memory behind them
  /// any more. Neighbouring holes become one.
  ///
  /// @throws std::bad_alloc; nothing has changed then
  void punch(std::uint32_t node, std::uint32_t first, std::uint32_t end) {
    std::vector<std::uint32_t> spare;
    spare.reserve(2);
    spare.push_back(list_.acquire());
    try {
      spare.push_back(list_.acquire());
    } catch (...) {
      list_.table.release(spare.back());
      throw;
    }
    RangeTable& table = list_.table;
    std::uint32_t hole = claim(node, first, end, spare);
    for (std::uint32_t const left : spare) {
      table.release(left);
    }
    table.taken_granules -= end - first;
    table.granules -= end - first;
    table[hole].state = RangeState::hole;
    table[hole].clear(RangeNode::has_fence);
    hole = join_holes(table[hole].prev, hole);
    (void)join_holes(hole, table[hole].next);
    ++version_;
  }

  /// Makes the first `count` granules of a hole free. @throws std::bad_alloc; nothing has changed
  /// then
  void fill(std::uint32_t hole, std::uint32_t count) {
    RangeTable& table = list_.table;
    std::uint32_t node = hole;
    if (count < table[hole].count) {
      node = list_.acquire();
      table[node] = {};
      table[node].first = table[hole].first;
      table[node].count = count;
      table[hole].first += count;
      table[hole].count -= count;
      list_.place(node, table[hole].prev, hole, table[hole].segment);
      table[node].state = RangeState::claimed;
      list_.introduce(table[node].prev, node);
    }
    table.granules += count;
    add_free(node);
    ++version_;
  }

  /// Takes `count` granules for `owner`. @returns the new range, `no_node` when no free range fits
  ///
  /// @param fence  set to the fence that the range's first user waits for
  /// @throws std::bad_alloc; nothing has changed then
  [[nodiscard]] std::uint32_t take(std::uint32_t count, BlockId owner, Fence& fence) {
    RangeTable& table = list_.table;
    auto const [from, is_high_end] = std::as_const(fit_).find(table, count);
    if (from == no_node) {
      return no_node;
    }
    SPILLWAY_ASSERT(table[from].state == RangeState::free && table[from].count >= count);
    std::uint32_t node = from;
    std::uint8_t flags = 0;
    if (table[from].count == count) {
      fit_.erase(table, from);
      --table.free_ranges;
      table[table[from].prev].clear(RangeNode::is_next_free);
      table[table[from].next].clear(RangeNode::is_prev_free);
    } else {
      node = list_.acquire();
      // Computed without a branch, since the processor cannot predict which end it is.
      RangeNode const& rest = table[from];
      std::uint32_t const first = rest.first;
      std::uint32_t const left = rest.count - count;
      std::uint32_t const prev = pick(is_high_end, from, rest.prev);
      std::uint32_t const next = pick(is_high_end, rest.next, from);
      table[node].first = first + pick(is_high_end, left, 0);
      table[node].count = count;
      list_.place(node, prev, next, rest.segment);
      table[prev].clear(RangeNode::is_next_free);
      table[next].clear(RangeNode::is_prev_free);
      flags = is_high_end ? RangeNode::is_prev_free : RangeNode::is_next_free;
      fit_.resize(table, from, first + pick(is_high_end, 0, count), left);
    }
    if (table[from].is(RangeNode::has_fence)) {
      fence = list_.fence(from);
    }
    RangeNode& range = table[node];
    range.state = RangeState::taken;
    range.flags = flags;
    range.set_owner(owner);
    table.taken_granules += count;
    ++table.taken_ranges;
    ++version_;
    return node;
  }

  /// Frees a range whose later users wait for `fence`. One that is moving is freed by the commit.
  void give_back(std::uint32_t node, Fence const& fence) noexcept {
    RangeNode& range = list_.table[node];
    ++version_;
    list_.add_fence(node, fence);
    if (range.state == RangeState::moving) {
      range.state = RangeState::leaving;
      return;
    }
    SPILLWAY_ASSERT(range.state == RangeState::taken);
    list_.table.taken_granules -= range.count;
    --list_.table.taken_ranges;
    add_free(node);
  }

  /// Claims the ranges that the steps need, so that no other thread takes them.
  ///
  /// @throws ContractViolation if something has changed since the plan was made; std::bad_alloc;
  ///         nothing has changed then
  /// @cost   O(m) for m steps of blocks in order of address, else O(m log m)
  void begin_moves(MoveClaims& claims) {
    expects(claims.version == version_, "the arena has changed since the plan was made");
    list_blocks(claims);
    Needs const needs = needs_of(claims);
    claims.nodes.reserve(needs.claims + claims.blocks.size());
    claims.sections.reserve(needs.sections);
    // In the end a section has at most one free range more than it has blocks. They reuse the nodes
    // of what is claimed now.
    std::size_t const most_gaps = claims.blocks.size() + needs.sections;
    std::size_t const spare = needs.cuts + most_gaps - std::min(most_gaps, needs.claims);
    claims.spare.reserve(spare + needs.claims);
    try {
      while (claims.spare.size() < spare) {
        claims.spare.push_back(list_.acquire());
      }
    } catch (...) {
      for (; !claims.spare.empty(); claims.spare.pop_back()) {
        list_.table.release(claims.spare.back());
      }
      throw;
    }

    for (std::uint32_t i = 0; i < claims.blocks.size(); ++i) {
      RangeNode& range = list_.table[claims.blocks[i].node];
      SPILLWAY_ASSERT(range.state == RangeState::taken);
      range.state = RangeState::moving;
      range.tag = i;
    }
    auto block = claims.blocks.cbegin();
    auto const add_blocks_below = [&](std::uint32_t granule) noexcept {
      for (; block != claims.blocks.cend() && block->first < granule; ++block) {
        claims.nodes.push_back(block->node);
      }
    };
    for (Piece const& piece : claims.pieces) {
      for_each_free_in(piece,
                       [&](std::uint32_t node, std::uint32_t first, std::uint32_t end) noexcept {
                         std::uint32_t const claimed = claim(node, first, end, claims.spare);
                         add_blocks_below(first);
                         claims.nodes.push_back(claimed);
                         return claimed;
                       });
    }
    add_blocks_below(RangeList::line_granules);
    claims.is_begun = true;
    ++version_;
  }

  /// Puts each block where the first `done` steps left it and frees all else that was claimed.
  ///
  /// @param moved  what later users of the places that blocks left wait for
  /// @cost  as `begin_moves`
  void commit_moves(MoveClaims& claims, std::size_t done, Fence const& moved) noexcept {
    SPILLWAY_ASSERT(claims.is_begun && done <= claims.steps.size());
    for (std::size_t i = 0; i < done; ++i) {
      Step const& step = claims.steps[i];
      claims.blocks[list_.table[step.node].tag].first = step.first;
    }
    sort_runs(claims.blocks, is_lower);
    collect_sections(claims);
    // From the top down, since `add_free` removes the upper one of the ranges that it joins.
    for (; !claims.sections.empty(); claims.sections.pop_back()) {
      rebuild(claims, claims.sections.back(), moved);
    }
    for (std::uint32_t const node : claims.spare) {
      list_.table.release(node);
    }
    claims = {};
    ++version_;
  }

  [[nodiscard]] RangeNode const& operator[](std::uint32_t node) const noexcept {
    return list_.table[node];
  }
  [[nodiscard]] RangeList const& list() const noexcept { return list_; }
  [[nodiscard]] RangeTable const& table() const noexcept { return list_.table; }
  [[nodiscard]] Fit const& fit() const noexcept { return fit_; }
  [[nodiscard]] std::uint32_t largest() const noexcept { return fit_.largest(list_.table); }
  /// Returns the number of changes so far: while it is the same, nothing has changed.
  [[nodiscard]] std::uint64_t version() const noexcept { return version_; }

 private:
  using Piece = MoveClaims::Piece;
  using Section = MoveClaims::Section;
  using Step = MoveClaims::Step;

  // How much a plan claims.
  struct Needs {
    std::size_t claims = 0;  // free ranges, or parts of them
    std::size_t cuts = 0;    // upper limit: nodes for the parts that free ranges are cut into
    std::size_t sections = 0;
  };

  static bool is_lower(Step const& a, Step const& b) noexcept { return a.first < b.first; }

  // Lists each block that moves once, where it is now, in order of address.
  void list_blocks(MoveClaims& claims) const {
    claims.blocks.clear();
    claims.blocks.reserve(claims.steps.size());
    for (Step const& step : claims.steps) {
      claims.blocks.push_back({step.node, list_.table[step.node].first});
    }
    sort_runs(claims.blocks, is_lower);
    claims.blocks.erase(
        std::unique(claims.blocks.begin(),
                    claims.blocks.end(),
                    [](Step const& a, Step const& b) noexcept { return a.node == b.node; }),
        claims.blocks.end());
  }

  [[nodiscard]] Needs needs_of(MoveClaims const& claims) {
    Needs needs;
    std::uint32_t section_end = 0;  // plus 1, so that 0 means that there is no section yet
    auto const add = [&](std::uint32_t first, std::uint32_t end) noexcept {
      needs.sections += first + 1 != section_end ? 1U : 0U;
      section_end = end + 1;
    };
    auto block = claims.blocks.cbegin();
    auto const add_blocks_below = [&](std::uint32_t granule) noexcept {
      for (; block != claims.blocks.cend() && block->first < granule; ++block) {
        add(block->first, list_.table[block->node].end());
      }
    };
    for (Piece const& piece : claims.pieces) {
      for_each_free_in(piece,
                       [&](std::uint32_t node, std::uint32_t first, std::uint32_t end) noexcept {
                         RangeNode const& whole = list_.table[node];
                         add_blocks_below(first);
                         add(first, end);
                         ++needs.claims;
                         bool const is_whole = first == whole.first && end == whole.end();
                         bool const is_middle = first != whole.first && end != whole.end();
                         needs.cuts += is_whole ? 0U : is_middle ? 2U : 1U;
                         return node;
                       });
    }
    add_blocks_below(RangeList::line_granules);
    return needs;
  }

  // Returns `first` or `second` without a branch: 0 - 1 wraps to a mask of all bits.
  static std::uint32_t pick(bool is_first, std::uint32_t first, std::uint32_t second) noexcept {
    return second ^ ((first ^ second) & (0U - static_cast<std::uint32_t>(is_first)));
  }

  // Joins a range that has become free with its free neighbours, and indexes it. Of two ranges that
  // are joined, the node of the lower one is kept, unless that is the new one.
  void add_free(std::uint32_t node) noexcept {
    RangeTable& table = list_.table;
    RangeNode& range = table[node];
    std::uint32_t const prev = range.prev;
    std::uint32_t const next = range.next;
    SPILLWAY_ASSERT(range.is(RangeNode::is_prev_free) == list_.is_free(prev));
    SPILLWAY_ASSERT(range.is(RangeNode::is_next_free) == list_.is_free(next));
    if (range.is(RangeNode::is_prev_free)) {
      list_.take_over_fence(prev, node);
      std::uint32_t count = table[prev].count + range.count;
      if (range.is(RangeNode::is_next_free)) {
        list_.take_over_fence(prev, next);
        count += table[next].count;
        fit_.erase(table, next);
        --table.free_ranges;
        list_.connect(prev, table[next].next);
        table.release(next);
      } else {
        list_.connect(prev, next);
        table[next].set(RangeNode::is_prev_free);
      }
      fit_.resize(table, prev, table[prev].first, count);
      table.release(node);
    } else if (range.is(RangeNode::is_next_free)) {
      list_.take_over_fence(next, node);
      fit_.resize(table, next, range.first, table[next].count + range.count);
      list_.connect(prev, next);
      table[prev].set(RangeNode::is_next_free);
      table.release(node);
    } else {
      table[prev].set(RangeNode::is_next_free);
      table[next].set(RangeNode::is_prev_free);
      range.state = RangeState::free;
      ++table.free_ranges;
      fit_.insert(table, node);
    }
  }

  // Makes two neighbours one hole if both are holes. @returns the range that ends where `high` did
  std::uint32_t join_holes(std::uint32_t low, std::uint32_t high) noexcept {
    RangeTable& table = list_.table;
    bool const are_holes =
        table[low].state == RangeState::hole && table[high].state == RangeState::hole;
    if (!are_holes) {
      return high;
    }
    table[low].count += table[high].count;
    table[low].set(RangeNode::is_next_free, table[high].is(RangeNode::is_next_free));
    list_.connect(low, table[high].next);
    table.release(high);
    return low;
  }

  // Calls `use(node, first, end)` for the part that lies in `piece` of each free range there.
  template <class Use>
  void for_each_free_in(Piece const& piece, Use use) {
    RangeTable& table = list_.table;
    std::uint32_t const piece_end = piece.first + piece.count;
    for (std::uint32_t node = piece.node; table[node].first < piece_end; node = table[node].next) {
      std::uint32_t const first = std::max(piece.first, table[node].first);
      std::uint32_t const end = std::min(piece_end, table[node].end());
      if (first < end && table[node].state == RangeState::free) {
        node = use(node, first, end);
      }
    }
  }

  // Makes [first, end) of a free range a claimed range of its own. @returns it
  std::uint32_t claim(std::uint32_t node,
                      std::uint32_t first,
                      std::uint32_t end,
                      std::vector<std::uint32_t>& spare) noexcept {
    RangeTable& table = list_.table;
    RangeNode const whole = table[node];
    auto const cut = [&](std::uint32_t from, std::uint32_t to) noexcept {
      std::uint32_t const part = spare.back();
      spare.pop_back();
      table[part] = {};
      table[part].first = from;
      table[part].count = to - from;
      list_.add_fence(part, list_.fence(node));
      return part;
    };
    std::uint32_t claimed = node;
    if (first == whole.first && end == whole.end()) {
      fit_.erase(table, node);
      --table.free_ranges;
    } else {
      claimed = cut(first, end);
      if (first == whole.first) {
        list_.place(claimed, whole.prev, node, whole.segment);
        fit_.resize(table, node, end, whole.end() - end);
      } else {
        list_.place(claimed, node, whole.next, whole.segment);
        fit_.resize(table, node, whole.first, first - whole.first);
        if (end != whole.end()) {
          std::uint32_t const rest = cut(end, whole.end());
          list_.place(rest, claimed, whole.next, whole.segment);
          fit_.insert(table, rest);
          ++table.free_ranges;
        }
      }
    }
    table[claimed].state = RangeState::claimed;
    list_.introduce(table[claimed].prev, claimed);
    list_.introduce(claimed, table[claimed].next);
    table.taken_granules += end - first;
    return claimed;
  }

  // Takes the plan's ranges out of the list, remembering what lies around them.
  void collect_sections(MoveClaims& claims) noexcept {
    RangeTable& table = list_.table;
    claims.sections.clear();
    for (std::uint32_t const node : claims.nodes) {
      RangeNode const range = table[node];
      if (claims.sections.empty() || claims.sections.back().next != node) {
        Section& section = claims.sections.emplace_back();
        section.first = range.first;
        section.prev = range.prev;
        section.segment = range.segment;
      }
      Section& section = claims.sections.back();
      section.end = range.end();
      section.next = range.next;
      if (range.state == RangeState::claimed) {
        section.fence.add(list_.fence(node));
        table.taken_granules -= range.count;
        claims.spare.push_back(node);
      }
    }
  }

  // Links the blocks that are in the section now, with free ranges between them.
  void rebuild(MoveClaims& claims, Section const& section, Fence const& moved) noexcept {
    RangeTable& table = list_.table;
    std::uint32_t next = section.next;
    std::uint32_t end = section.end;
    Fence fence = section.fence;
    fence.add(moved);
    auto const put = [&](std::uint32_t node, std::uint32_t first, std::uint32_t count) noexcept {
      table[node].first = first;
      table[node].count = count;
      table[node].segment = section.segment;
      list_.connect(node, next);
      next = node;
      end = first;
    };
    auto const put_gap = [&](std::uint32_t first) noexcept {
      if (first < end) {
        std::uint32_t const gap = claims.spare.back();
        claims.spare.pop_back();
        table[gap].state = RangeState::claimed;
        table[gap].flags = 0;
        put(gap, first, end - first);
      }
    };
    while (!claims.blocks.empty() && claims.blocks.back().first >= section.first) {
      auto const [node, first] = claims.blocks.back();
      claims.blocks.pop_back();
      if (table[node].state == RangeState::leaving) {
        fence.add(list_.fence(node));
        table.taken_granules -= table[node].count;
        --table.taken_ranges;
        table.release(node);
        continue;
      }
      table[node].state = RangeState::taken;
      put_gap(first + table[node].count);
      put(node, first, table[node].count);
    }
    put_gap(section.first);
    list_.connect(section.prev, next);

    std::uint32_t low = section.prev;  // `low` and `high` may both be the segment's wall
    do {
      list_.introduce(low, table[low].next);
      low = table[low].next;
    } while (low != section.next);
    while (next != section.next) {
      std::uint32_t const node = next;
      next = table[node].next;
      if (table[node].state == RangeState::claimed) {
        list_.add_fence(node, fence);
        add_free(node);
      }
    }
  }

  RangeList list_;
  [[no_unique_address]] Fit fit_;
  std::uint64_t version_ = 0;
};

SPILLWAY_COMPILED_PART(class BasicRangeList<>);

}  // namespace spillway::detail
