// SPDX-License-Identifier: Apache-2.0
// Calls that lack memory for the tables of ranges fail, and leave everything as it was.
#include <spillway/arena/move_plan.hpp>
#include <spillway/arena/range_map.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/sim/model_api.hpp>
#include <spillway/page_arena.hpp>
#include <spillway/policy/fit/best_fit.hpp>
#include <spillway/stream/stream_order.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <tuple>
#include <vector>

#include <support/little_memory.hpp>

// The tables of ranges grow by `realloc`. The program is linked with --wrap=realloc.
// NOLINTBEGIN(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp)
extern "C" void* __real_realloc(void* memory, std::size_t bytes);
extern "C" void* __wrap_realloc(void* memory, std::size_t bytes) {
  return ++support::allocations <= support::most_allocations ? __real_realloc(memory, bytes)
                                                             : nullptr;
}
// NOLINTEND(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp)

TEST_SUITE("range_map_memory") {
  namespace {

  using namespace spillway;
  using detail::MoveClaims;
  using Map = detail::RangeMap<BestFit>;

  std::byte* segment_base(std::uintptr_t segment) {
    return reinterpret_cast<std::byte*>(segment << 32U);  // NOLINT(performance-no-int-to-ptr)
  }

  /// All that a failed call must leave as it was.
  struct Picture {
    explicit Picture(Map const& map)
        : version{map.version()},
          used_nodes{map.table().nodes() - map.table().idle_nodes()},
          segments{map.list().segments().size()},
          granules{map.table().granules},
          taken_granules{map.table().taken_granules} {
      for (std::uint16_t const segment : map.list().segments()) {
        std::uint32_t const wall = map.list().span(segment).wall;
        for (std::uint32_t node = map.list().front(segment); node != wall; node = map[node].next) {
          ranges.emplace_back(node, map[node].first, map[node].count, map[node].state);
        }
      }
    }
    friend bool operator==(Picture const&, Picture const&) = default;

    std::uint64_t version;
    std::size_t used_nodes;
    std::size_t segments;
    std::uint64_t granules;
    std::uint64_t taken_granules;
    std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, RangeState>> ranges;
  };

  /// Makes a call with little memory until it succeeds. @returns how often it has failed
  template <class Call>
  std::size_t failures_of(Map const& map, Call call) {
    Picture const before{map};
    return support::call_with_little_memory(call, [&] { REQUIRE(Picture{map} == before); });
  }

  }  // namespace

  TEST_CASE("RangeMap: a call that lacks memory changes nothing, whichever allocation fails") {
    // With each number of blocks, other nodes are those for which the tables have to grow.
    std::size_t failures = 0;
    for (std::uint32_t blocks = 0; blocks < 40; ++blocks) {
      CAPTURE(blocks);
      Map map;
      map.add_segment(segment_base(1), 2 * blocks + 60);
      Fence fence;
      for (std::uint32_t i = 0; i < blocks; ++i) {
        (void)map.take(2, BlockId{i + 1}, fence);
      }
      std::uint32_t const end = 2 * blocks + 60;
      std::uint32_t block = no_node;
      failures += failures_of(map, [&] { block = map.take(2, BlockId{99}, fence); });
      REQUIRE(block != no_node);
      std::uint32_t const free = map[block].next;
      failures += failures_of(map, [&] { map.punch(free, end - 6, end - 3); });
      std::uint32_t const hole = map[free].next;
      CHECK(map[hole].state == RangeState::hole);
      failures += failures_of(map, [&] { map.fill(hole, 1); });
      CHECK(map[hole].first == end - 5);
      failures += failures_of(map, [&] { map.add_segment(segment_base(2), 8); });
      CHECK(map.table().granules == end - 2 + 8);

      MoveClaims claims;
      claims.version = map.version();
      for (std::uint32_t first = end - 50; first < end - 10; first += 8) {
        claims.pieces.push_back({map[block].next, first, 2});
        claims.steps.push_back({block, first});
      }
      failures += failures_of(map, [&] { map.begin_moves(claims); });
      map.commit_moves(claims, 1, {});
      CHECK(map[block].first == end - 50);
    }
    CHECK(failures > 100);
  }

  TEST_CASE("PageArena: a range whose list of pieces lacks memory leaves its addresses free") {
    constexpr std::size_t page = 64_KiB;
    ModelApi device{{.granularity_bytes = page}};
    StreamOrder<ModelApi> order{device};
    PageArena<ModelApi, BestFit, false> arena{device, order, {.capacity_bytes = 64 * page}};
    std::byte* end = nullptr;
    for (std::uint64_t i = 1; i <= 32; ++i) {
      CAPTURE(i);
      std::optional<Placement> taken;
      for (std::size_t more = 0; !taken; ++more) {
        try {
          support::ShortMemory const few{more};
          taken = arena.try_take(2 * page, BlockId{i});
          REQUIRE(taken);
        } catch (std::bad_alloc const&) {
        }
        REQUIRE(arena.free_bytes() == (64 - 2 * i + (taken ? 0 : 2)) * page);
      }
      CHECK((end == nullptr || taken->address == end));  // none was lost in between
      end = taken->address + 2 * page;
      CHECK_FALSE(arena.map(taken->range).is_refused);
    }
  }
}
