// SPDX-License-Identifier: Apache-2.0
#include <spillway/arena/move_batch.hpp>
#include <spillway/arena/move_plan.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/types.hpp>
#include <spillway/defrag_arena.hpp>
#include <spillway/device/sim/model_api.hpp>
#include <spillway/policy/fit/best_fit.hpp>
#include <spillway/stream/stream_order.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

TEST_SUITE("defrag_arena") {
  // `DefragArena` alone, as its own documentation uses it. tests/defrag_arena_model_test.cpp runs
  // random programs.

  namespace {

  using namespace spillway;

  constexpr std::size_t blocks = 8;
  constexpr std::size_t block_bytes = 4_KiB;
  constexpr std::size_t gap_bytes = 2_KiB;

  /// Blocks with a gap before each that is too short for any of them,
  /// on a device that runs what is enqueued when it is told to.
  struct GappyArena {
    GappyArena() {
      std::vector<RangeId> gaps;
      for (unsigned char byte = 1; byte <= blocks; ++byte) {
        gaps.push_back(arena.try_take(gap_bytes, BlockId{99})->range);
        Placement const block = *arena.try_take(block_bytes, BlockId{byte});
        ranges.push_back(block.range);
        device.fill(block.address, byte, block_bytes, stream);
      }
      for (RangeId const gap : gaps) {
        arena.give_back(gap, {});
      }
    }
    ~GappyArena() {
      device.run_all();
      device.free_pinned(host, block_bytes);
    }

    /// The example of the class.
    std::optional<Placement> take(std::size_t bytes) {
      auto const can_move = [](BlockId /*id*/) { return true; };
      auto range = arena.try_take(bytes, BlockId{99});
      if (auto plan = range ? std::nullopt : arena.plan_compaction(bytes, 1_MiB, can_move)) {
        arena.begin_moves(*plan);
        std::size_t done = 0;
        try {
          order.wait(on, plan->fence);
          enqueue_moves(device, plan->moves, stream, plan->bounce, done, [&](std::size_t i) {
            order.wait(on, plan->moves[i].fence);
          });
        } catch (...) {
          moved = done;
          arena.commit_moves(*plan, done, Fence{order.mark(on)});
          throw;
        }
        arena.commit_moves(*plan, done, Fence{order.mark(on)});
        range = arena.try_take(bytes, BlockId{99});
      }
      return range;
    }

    /// Checks that each block has its bytes at its place, and that none is moving.
    void check_blocks() {
      for (std::size_t i = 0; i < ranges.size(); ++i) {
        CAPTURE(i);
        CHECK_FALSE(arena.is_moving(ranges[i]));
        device.copy(host, arena.address(ranges[i]), block_bytes, CopyKind::to_host, stream);
        device.synchronize(stream);
        CHECK(std::count(host, host + block_bytes, static_cast<unsigned char>(i + 1)) ==
              static_cast<std::ptrdiff_t>(block_bytes));
      }
    }

    testing::SteppedSimApi device{{.capacity_bytes = 1_MiB}};
    StreamOrder<testing::SteppedSimApi> order{device};
    DefragArena<testing::SteppedSimApi, BestFit> arena{
        device, {.capacity_bytes = blocks * (block_bytes + gap_bytes), .bounce_bytes = 64_KiB}};
    testing::SteppedSimApi::stream_type stream = device.create_stream();
    StreamIndex on = order.index_of(stream);
    unsigned char* host = static_cast<unsigned char*>(device.try_allocate_pinned(block_bytes, -1));
    std::vector<RangeId> ranges;
    std::size_t moved = 0;
  };

  }  // namespace

  TEST_CASE("DefragArena: a plan is committed correctly after the device refuses a copy halfway") {
    std::size_t refused = 0;
    std::size_t partly = 0;
    for (bool is_done = false; !is_done; ++refused) {
      CAPTURE(refused);
      GappyArena rig;
      ArenaStats const before = rig.arena.stats();
      rig.device.fail_copy(refused + 1);
      try {
        is_done = rig.take(blocks * gap_bytes).has_value();
      } catch (DeviceError const&) {
        partly += rig.moved != 0 ? 1U : 0U;
        ArenaStats const after = rig.arena.stats();
        CHECK(after.taken_ranges == before.taken_ranges);
        CHECK(after.taken_bytes == before.taken_bytes);
        rig.check_blocks();
        CHECK(rig.take(blocks * gap_bytes));  // the device refuses one copy and no more
      }
      rig.device.fail_copy(0);
      rig.check_blocks();
    }
    CHECK(refused > 2);
    CHECK(partly != 0);
  }

  TEST_CASE("DefragArena: the bounce range is lent to one plan at a time, with its last uses") {
    GappyArena rig;
    auto const can_move = [](BlockId /*id*/) { return true; };
    auto const begin = [&] {
      auto plan = rig.arena.plan_compaction(2 * gap_bytes, 1_MiB, can_move);
      REQUIRE(plan);
      REQUIRE_FALSE(plan->moves.empty());
      rig.arena.begin_moves(*plan);
      return *plan;
    };
    Fence const moved{Ticket{StreamIndex{3}, 7}};
    CompactionPlan first = begin();
    CHECK(first.bounce.bytes == 64_KiB);
    CHECK(first.fence.is_empty());
    CompactionPlan second = begin();
    CHECK(second.bounce.bytes == 0);
    rig.arena.commit_moves(second, 0, Fence{Ticket{StreamIndex{4}, 8}});
    CompactionPlan third = begin();
    CHECK(third.bounce.bytes == 0);  // the first plan has it until its own commit
    rig.arena.commit_moves(third, 0, {});

    rig.arena.commit_moves(first, 0, moved);

    CompactionPlan last = begin();
    CHECK(last.bounce.address != nullptr);
    CHECK(last.fence == moved);
    rig.arena.commit_moves(last, 0, {});
  }

  TEST_CASE("DefragArena: no plan for more than the capacity lets blocks take") {
    GappyArena rig;
    auto const can_move = [](BlockId /*id*/) { return true; };
    rig.arena.set_capacity(blocks * block_bytes + 2 * gap_bytes);
    CHECK(rig.arena.free_bytes() == 2 * gap_bytes);
    CHECK(rig.arena.plan_compaction(2 * gap_bytes, 1_MiB, can_move));
    CHECK_FALSE(rig.arena.plan_compaction(2 * gap_bytes + 1, 1_MiB, can_move));
  }

  TEST_CASE("DefragArena: a hole that is filled wholly joins the free ranges on both sides") {
    constexpr std::size_t piece = 4_KiB;
    ModelApi device{{.granularity_bytes = piece}};
    DefragArena<ModelApi, BestFit> arena{device,
                                         {.capacity_bytes = 4 * piece,
                                          .grows_in_place = true,
                                          .page_bytes = piece,
                                          .bounce_bytes = 0}};
    std::vector<RangeId> ranges;
    for (std::uint64_t i = 1; i <= 4; ++i) {
      ranges.push_back(arena.try_take(piece, BlockId{i})->range);
    }
    std::byte* const third = arena.address(ranges[2]);
    arena.give_back(ranges[1], {});
    arena.give_back(ranges[2], {});
    std::optional<Segment> const hole = arena.trim(piece);
    REQUIRE(hole);
    REQUIRE(hole->address == third);
    arena.release(*hole);

    // No hole makes room for 4 pieces; the lowest one is filled then, for a compaction.
    CHECK(arena.largest_bytes_after_growth(4 * piece) == 2 * piece);
    CHECK(arena.growth_for(4 * piece).address == third);
    CHECK(arena.growth_for(4 * piece).bytes == piece);
    arena.give_back(ranges[3], {});
    CHECK(arena.largest_bytes_after_growth(piece) == 3 * piece);
    Segment segment = arena.growth_for(3 * piece);
    CHECK(segment.address == third);
    REQUIRE(arena.try_reserve(segment));
    arena.add_segment(segment);
    CHECK(arena.try_take(3 * piece, BlockId{5}));
  }

  TEST_CASE("DefragArena: small steps do not lead to more reservations than there can be") {
    testing::SteppedSimApi device{{.capacity_bytes = 64_MiB}};
    DefragArena<testing::SteppedSimApi> arena{
        device,
        {.capacity_bytes = 64_MiB, .initial_bytes = 0, .growth_bytes = 0, .bounce_bytes = 0}};
    CHECK(arena.growth_for(256).bytes == 2_KiB);
    arena.set_capacity(8_MiB);
    CHECK(arena.growth_for(256).bytes == 2_KiB);
    CHECK(arena.growth_for(4_KiB).bytes == 4_KiB);
  }

  TEST_CASE("DefragArena: it grows by no more than there is room for on its line of granules") {
    ModelApi device{{.capacity_bytes = 2048_GiB}};
    DefragArena<ModelApi> arena{device,
                                {.capacity_bytes = 900_GiB, .initial_bytes = 0, .bounce_bytes = 0}};
    auto const grow = [&](std::size_t bytes) {
      Segment segment = arena.growth_for(bytes);
      if (segment.bytes != 0) {
        REQUIRE(arena.try_reserve(segment));
        arena.add_segment(segment);
      }
      return segment.bytes;
    };
    std::vector<Placement> thirds;
    for (std::size_t i = 0; i < 3; ++i) {
      CHECK(grow(300_GiB) == 300_GiB);
      thirds.push_back(*arena.try_take(300_GiB, BlockId{i + 1}));
    }
    // Only the reservation in the middle stays.
    arena.give_back(thirds[0].range, {});
    arena.give_back(thirds[2].range, {});
    while (std::optional<Segment> const segment = arena.trim()) {
      arena.release(*segment);
    }
    REQUIRE(arena.reserved_bytes() == 300_GiB);

    CHECK(grow(600_GiB) == 0);
    std::size_t const room = arena.largest_bytes_after_growth(600_GiB);
    CHECK(room == 724_GiB - 300_GiB - 4 * granule_bytes);
    CHECK(grow(room + 1) == 0);
    CHECK(grow(room) == room);
    CHECK(grow(600_GiB - room) == 600_GiB - room);
    CHECK(arena.reserved_bytes() == arena.capacity_bytes());
  }
}
