// SPDX-License-Identifier: Apache-2.0
#include <spillway/arena/move_plan.hpp>
#include <spillway/arena/range_map.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/policy/fit/best_fit.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

TEST_SUITE("range_map") {
  // What `DefragArena` relies on, one rule at a time. `defrag_arena_model_test.cpp` runs random
  // programs.

  namespace {

  using spillway::BlockId;
  using spillway::Fence;
  using spillway::no_node;
  using spillway::RangeState;
  using spillway::StreamIndex;
  using spillway::Ticket;
  using spillway::detail::MoveClaims;
  using Map = spillway::detail::RangeMap<spillway::BestFit>;

  std::byte* segment_base(std::uintptr_t segment) {
    return reinterpret_cast<std::byte*>(segment << 32U);  // NOLINT(performance-no-int-to-ptr)
  }
  Fence fence_of(std::uint16_t stream, std::uint64_t sequence) {
    return Fence{Ticket{StreamIndex{stream}, sequence}};
  }
  bool waits_for(Fence const& fence, Ticket ticket) {
    auto const& tickets = fence.tickets();
    return std::find(tickets.begin(), tickets.end(), ticket) != tickets.end();
  }

  /// A map with what a test asks of it.
  struct MapRig {
    explicit MapRig(std::uint32_t count) { map.add_segment(segment_base(1), count); }

    std::uint32_t take(std::uint32_t count) {
      fence = {};
      return map.take(count, BlockId{++last_owner}, fence);
    }
    /// The ranges of the first segment by address: `b3` is a block of 3 granules, `f` a free range,
    /// `h` a hole.
    [[nodiscard]] std::string layout() const {
      std::string text;
      auto const& list = map.list();
      for (std::uint32_t node = list.front(0); node != list.span(0).wall; node = map[node].next) {
        text += map[node].state == RangeState::free   ? 'f'
                : map[node].state == RangeState::hole ? 'h'
                                                      : 'b';
        text += std::to_string(map[node].count) + ' ';
      }
      return text;
    }

    Map map;
    Fence fence;  // of the range taken last
    std::uint64_t last_owner = 0;
  };

  }  // namespace

  TEST_CASE("RangeMap: adjacent free ranges coalesce, with the fences of both") {
    MapRig rig{12};
    std::uint32_t const a = rig.take(4);
    std::uint32_t const b = rig.take(4);
    std::uint32_t const c = rig.take(4);
    CHECK(rig.take(1) == no_node);

    rig.map.give_back(a, fence_of(1, 5));
    rig.map.give_back(c, fence_of(2, 6));
    CHECK(rig.layout() == "f4 b4 f4 ");
    rig.map.give_back(b, fence_of(1, 7));

    CHECK(rig.layout() == "f12 ");
    CHECK(rig.map.table().free_ranges == 1);
    REQUIRE(rig.take(12) != no_node);
    CHECK(waits_for(rig.fence, {StreamIndex{1}, 7}));
    CHECK(waits_for(rig.fence, {StreamIndex{2}, 6}));
  }

  TEST_CASE("RangeMap: a range that was never used has an empty fence") {
    MapRig rig{8};
    std::uint32_t const a = rig.take(8);
    CHECK(rig.fence.is_empty());
    rig.map.give_back(a, fence_of(1, 5));
    REQUIRE(rig.take(2) != no_node);
    CHECK(rig.fence == fence_of(1, 5));
  }

  TEST_CASE("RangeMap: no range crosses a segment boundary") {
    MapRig rig{4};
    rig.map.add_segment(segment_base(1) + 4 * spillway::granule_bytes,
                        4);  // side by side in memory
    CHECK(rig.map.largest() == 4);
    CHECK(rig.take(5) == no_node);
    CHECK(rig.map.table().free_granules() == 8);
  }

  TEST_CASE("RangeMap: only a wholly free segment is detached") {
    MapRig rig{4};
    rig.map.add_segment(segment_base(2), 8);
    std::uint32_t const small = rig.take(4);
    std::uint32_t const large = rig.take(1);
    CHECK_FALSE(rig.map.detach_segment());

    rig.map.give_back(large, fence_of(3, 9));
    auto const segment = rig.map.detach_segment();
    REQUIRE(segment);
    CHECK(segment->address == segment_base(2));
    CHECK(segment->bytes == 8 * spillway::granule_bytes);
    CHECK(segment->fence == fence_of(3, 9));
    CHECK(rig.map.table().granules == 4);
    CHECK_FALSE(rig.map.detach_segment());
    rig.map.give_back(small, {});
    CHECK(rig.map.detach_segment());
  }

  TEST_CASE("RangeMap: adjacent holes are joined, and are filled from their low end") {
    MapRig rig{12};
    std::uint32_t const low = rig.map.list().front(0);
    rig.map.punch(low, 4, 8);
    CHECK(rig.layout() == "f4 h4 f4 ");
    rig.map.punch(rig.map[rig.map[low].next].next, 8, 10);
    CHECK(rig.layout() == "f4 h6 f2 ");
    CHECK(rig.map.table().free_granules() == 6);
    CHECK(rig.take(5) == no_node);

    rig.map.fill(rig.map[low].next, 3);
    CHECK(rig.layout() == "f7 h3 f2 ");
    rig.map.fill(rig.map[low].next, 3);
    CHECK(rig.layout() == "f12 ");
    CHECK(rig.map.table().free_granules() == 12);
  }

  TEST_CASE("RangeMap: memory that fills a hole does not wait for earlier uses of its addresses") {
    MapRig rig{8};
    rig.map.give_back(rig.take(8), fence_of(1, 5));
    rig.map.punch(rig.map.list().front(0), 0, 8);
    REQUIRE(rig.layout() == "h8 ");
    rig.map.fill(rig.map.list().front(0), 8);
    REQUIRE(rig.take(8) != no_node);
    CHECK(rig.fence.is_empty());
  }

  TEST_CASE("RangeMap: a segment that leaves takes its nodes along") {
    MapRig rig{4};
    rig.map.add_segment(segment_base(2), 8);
    std::size_t const nodes = rig.map.table().nodes();
    for (int i = 0; i < 5; ++i) {
      REQUIRE(rig.map.detach_segment());
      rig.map.add_segment(segment_base(2), 8);
    }
    CHECK(rig.map.table().nodes() == nodes);
  }

  TEST_CASE("RangeMap: a plan is refused if anything has changed since it was made") {
    MapRig rig{12};
    std::uint32_t taken = rig.take(4);
    MoveClaims begun;
    auto const front = [&] { return rig.map.list().front(0); };
    std::vector<std::function<void()>> const changes{
        [&] { rig.map.give_back(taken, {}); },
        [&] { taken = rig.take(2); },
        [&] { rig.map.give_back(taken, {}); },
        [&] { rig.map.punch(front(), 0, 2); },
        [&] { rig.map.fill(front(), 1); },
        [&] { rig.map.fill(rig.map[front()].next, 1); },
        [&] { rig.map.add_segment(segment_base(2), 4); },
        [&] { REQUIRE(rig.map.detach_segment()); },
        [&] {
          begun.version = rig.map.version();
          rig.map.begin_moves(begun);
        },
        [&] { rig.map.commit_moves(begun, 0, {}); }};
    for (std::size_t i = 0; i < changes.size(); ++i) {
      CAPTURE(i);
      MoveClaims claims;
      claims.version = rig.map.version();
      changes[i]();
      std::string const layout = rig.layout();
      CHECK_THROWS_AS(rig.map.begin_moves(claims), spillway::ContractViolation);
      CHECK(rig.layout() == layout);
    }
    MoveClaims claims;
    claims.version = rig.map.version();
    rig.map.begin_moves(claims);
    CHECK_THROWS_AS(rig.map.begin_moves(claims), spillway::ContractViolation);
    rig.map.commit_moves(claims, 0, {});
  }

  TEST_CASE("RangeMap: a block may move through the midst of several free ranges") {
    MapRig rig{40};
    std::uint32_t const block = rig.take(2);
    REQUIRE(rig.layout() == "b2 f38 ");
    MoveClaims claims;
    claims.version = rig.map.version();
    for (std::uint32_t const first : {5U, 10U, 15U, 20U, 25U}) {
      claims.pieces.push_back({rig.map[block].next, first, 2});
      claims.steps.push_back({block, first});
    }
    rig.map.begin_moves(claims);
    CHECK(rig.layout() == "b2 f3 b2 f3 b2 f3 b2 f3 b2 f3 b2 f13 ");
    rig.map.commit_moves(claims, 4, fence_of(4, 8));
    CHECK(rig.layout() == "f20 b2 f18 ");
    CHECK(rig.map[block].first == 20);
    CHECK(rig.map.table().free_ranges == 2);
  }

  TEST_CASE("RangeMap: room that a move makes waits for the move, and for no earlier work") {
    MapRig rig{12};
    std::uint32_t const low = rig.take(6);
    std::uint32_t const block = rig.take(2);
    rig.map.give_back(rig.take(1), fence_of(2, 7));  // leaves a node that nothing uses
    rig.map.give_back(low, fence_of(1, 5));
    REQUIRE(rig.layout() == "f6 b2 f4 ");
    MoveClaims claims;
    claims.version = rig.map.version();
    claims.pieces.push_back({low, 0, 6});
    claims.steps.push_back({block, 2});
    rig.map.begin_moves(claims);
    REQUIRE(rig.take(4) != no_node);  // so that the room above the block is not joined with this
    rig.map.commit_moves(claims, 1, fence_of(4, 8));
    REQUIRE(rig.layout() == "f2 b2 f4 b4 ");
    Fence expected = fence_of(1, 5);
    expected.add(fence_of(4, 8));
    for (std::uint32_t const count : {2U, 4U}) {
      CAPTURE(count);
      REQUIRE(rig.take(count) != no_node);
      CHECK(rig.fence == expected);
    }
  }

  TEST_CASE("RangeMap: commit places the blocks that were moved, and undoes the other moves") {
    for (std::size_t const done : {0U, 1U}) {
      CAPTURE(done);
      MapRig rig{12};
      std::uint32_t const a = rig.take(3);
      std::uint32_t const b = rig.take(4);
      std::uint32_t const first = rig.map[a].first < rig.map[b].first ? a : b;
      std::uint32_t const second = first == a ? b : a;
      REQUIRE(rig.map[first].end() == rig.map[second].first);
      rig.map.give_back(first, fence_of(1, 2));
      std::uint32_t const gap = rig.map[second].prev;
      MoveClaims claims;
      claims.version = rig.map.version();
      claims.pieces.push_back({gap, rig.map[gap].first, rig.map[gap].count});
      claims.steps.push_back({second, rig.map[gap].first});
      std::uint32_t const from = rig.map[second].first;
      std::uint32_t const to = rig.map[gap].first;

      rig.map.begin_moves(claims);
      CHECK(rig.map[second].state == RangeState::moving);
      CHECK(rig.map[second].first == from);  // until the commit
      CHECK(rig.map.table().free_granules() == 12 - rig.map[second].count - (from - to));
      rig.map.commit_moves(claims, done, fence_of(4, 8));

      CHECK(rig.map[second].state == RangeState::taken);
      CHECK(rig.map[second].first == (done == 1 ? to : from));
      CHECK(rig.map.table().free_granules() == 12 - rig.map[second].count);
      CHECK(rig.map.table().free_ranges == (done == 1 ? 1 : 2));
    }
  }

  TEST_CASE("RangeMap: a block that is freed during its move is free after the commit") {
    MapRig rig{8};
    std::uint32_t const block = rig.take(4);
    std::uint32_t const free =
        rig.map.list().front(0) == block ? rig.map[block].next : rig.map[block].prev;
    MoveClaims claims;
    claims.version = rig.map.version();
    claims.pieces.push_back({free, rig.map[free].first, 4});
    claims.steps.push_back({block, rig.map[free].first});
    rig.map.begin_moves(claims);
    rig.map.give_back(block, fence_of(2, 3));
    CHECK(rig.map.table().free_granules() == 0);
    rig.map.commit_moves(claims, 1, fence_of(4, 8));

    CHECK(rig.layout() == "f8 ");
    CHECK(rig.map.table().taken_ranges == 0);
    REQUIRE(rig.take(8) != no_node);
    CHECK(waits_for(rig.fence, {StreamIndex{2}, 3}));
    CHECK(waits_for(rig.fence, {StreamIndex{4}, 8}));
  }

  TEST_CASE("RangeMap: moves that only join free ranges allocate no nodes") {
    // Every other block is freed and the others slide together, which only joins free ranges.
    constexpr std::uint32_t blocks = 64;
    MapRig rig{2 * blocks};
    for (std::uint32_t i = 0; i < 2 * blocks; ++i) {
      (void)rig.take(1);
    }
    std::vector<std::uint32_t> nodes;
    auto const& list = rig.map.list();
    for (std::uint32_t node = list.front(0); node != list.span(0).wall; node = rig.map[node].next) {
      nodes.push_back(node);
    }
    for (std::size_t i = 0; i < nodes.size(); i += 2) {
      rig.map.give_back(nodes[i], {});
    }
    MoveClaims claims;
    claims.version = rig.map.version();
    claims.pieces.push_back({nodes[0], 0, 2 * blocks});
    for (std::uint32_t i = 0; i < blocks; ++i) {
      claims.steps.push_back({nodes[2 * i + 1], i});
    }
    std::size_t const before = rig.map.table().nodes();
    rig.map.begin_moves(claims);
    rig.map.commit_moves(claims, blocks / 2, {});

    CHECK(rig.map.table().nodes() <= before + 1);
    CHECK(rig.map.table().taken_ranges == blocks);
    CHECK(rig.map.table().free_granules() == blocks);
  }
}
