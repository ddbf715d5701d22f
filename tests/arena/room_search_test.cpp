// SPDX-License-Identifier: Apache-2.0
#include <spillway/arena/range_map.hpp>
#include <spillway/arena/room_search.hpp>
#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/defrag_arena.hpp>
#include <spillway/device/sim/model_api.hpp>
#include <spillway/policy/compaction/sliding_compaction.hpp>
#include <spillway/policy/fit/best_fit.hpp>
#include <spillway/policy/fit/segregated_fit.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include <support/counted_allocations.hpp>

namespace {

using namespace spillway::literals;
using spillway::BlockId;
using spillway::Fence;
using spillway::RangeId;
using spillway::RangeNode;
using spillway::RangeState;
using spillway::SegregatedFit;
using spillway::detail::SearchScope;
using spillway::detail::Stretch;
using Map = spillway::detail::RangeMap<SegregatedFit>;
using Arena = spillway::DefragArena<spillway::ModelApi>;

constexpr std::size_t no_budget = std::numeric_limits<std::size_t>::max();

/// Two segments of `count` granules each, full of small blocks; one in `nth` was given back.
void fragment(Map& map, std::uint32_t count, std::size_t nth, std::uint64_t seed) {
  std::mt19937_64 random{seed};
  for (std::size_t segment = 1; segment <= 2; ++segment) {
    map.add_segment(reinterpret_cast<std::byte*>(segment << 40U), count);
  }
  std::vector<std::uint32_t> blocks;
  for (;;) {
    Fence fence;
    std::uint32_t const node =
        map.take(static_cast<std::uint32_t>(1 + random() % 30), BlockId{1}, fence);
    if (node == spillway::no_node) {
      break;
    }
    blocks.push_back(node);
  }
  for (std::uint32_t const node : blocks) {
    if (random() % nth == 0) {
      map.give_back(node, {});
    }
  }
}

/// An arena of blocks of 1 to 32 granules, of which one in ten was given back.
struct FragmentedArena {
  FragmentedArena(std::size_t bytes, std::size_t few_ranges, std::uint64_t seed)
      : device{{.capacity_bytes = bytes}},
        arena{device, {.capacity_bytes = bytes, .bounce_bytes = 0, .few_ranges = few_ranges}} {
    std::mt19937_64 random{seed};
    std::vector<RangeId> ranges;
    while (auto const placement = arena.try_take(256 * (1 + random() % 32), BlockId{1})) {
      ranges.push_back(placement->range);
    }
    for (RangeId const range : ranges) {
      if (random() % 10 == 0) {
        arena.give_back(range, {});
      }
    }
  }

  spillway::ModelApi device;
  Arena arena;
};

/// Records what it is asked for.
struct RecordedCompaction {
  struct Call {
    std::uint32_t count;
    double granules_per_look;
    friend bool operator==(Call const&, Call const&) = default;
  };
  static constexpr bool moves_blocks = true;

  std::optional<spillway::LayoutPlan>
  plan(spillway::Layout const& layout, std::uint32_t count, std::uint64_t budget) {
    calls->push_back({count, layout.granules_per_look});
    return spillway::SlidingCompaction{}.plan(layout, count, budget);
  }

  std::vector<Call>* calls = nullptr;
};

}  // namespace

TEST_SUITE("arena") {
  TEST_CASE("SearchScope: contains the neighbourhood of the largest free ranges, in order, without "
            "duplicates") {
    for (std::uint64_t seed = 1; seed <= 40; ++seed) {
      CAPTURE(seed);
      Map map;
      fragment(map, 2000, 2 + seed % 6, seed);
      std::size_t const most = std::size_t{4} << (seed % 6);
      SearchScope scope;
      scope.read_around_large(map.list(), map.fit(), most);

      CHECK(scope.is_part());
      std::set<std::uint32_t> seen;
      std::optional<std::uint32_t> end;
      for (Stretch const& stretch : scope.stretches()) {
        REQUIRE((!end || map[stretch.from].first > *end));  // adjacent ones are joined
        for (std::uint32_t node = stretch.from; node != stretch.past; node = map[node].next) {
          REQUIRE(seen.insert(node).second);
        }
        end = map[stretch.past].first;
      }
      std::vector<std::uint32_t> large;
      std::size_t side = 0;
      while ((side + 1) * (side + 1) <= most) {
        ++side;
      }
      map.fit().visit_large(map.table(), [&](std::uint32_t node) {
        large.push_back(node);
        return large.size() < side;
      });
      CHECK(seen.size() <= large.size() * (side + 1));
      for (std::uint32_t const node : large) {
        std::uint32_t const wall = map.list().span(map[node].segment).wall;
        std::uint32_t low = node;
        std::uint32_t high = node;
        for (std::size_t i = 0; i < side / 2; ++i) {
          low = map[low].prev == wall ? low : map[low].prev;
          high = map[high].next == wall ? high : map[high].next;
        }
        REQUIRE(seen.count(node) == 1);
        REQUIRE(seen.count(low) == 1);
        REQUIRE(seen.count(high) == 1);
      }
    }
  }

  TEST_CASE("SearchScope: contains every range after read_all") {
    Map map;
    fragment(map, 500, 3, 7);
    SearchScope scope;
    scope.read_all(map.list());

    CHECK_FALSE(scope.is_part());
    std::size_t ranges = 0;
    for (Stretch const& stretch : scope.stretches()) {
      for (std::uint32_t node = stretch.from; node != stretch.past; node = map[node].next) {
        ++ranges;
      }
    }
    CHECK(ranges == map.table().taken_ranges + map.table().free_ranges);
  }

  TEST_CASE("SearchScope: widens from few ranges to all; with few ranges it starts with all") {
    CHECK(SearchScope::narrowest(1000, 1000) == spillway::all_ranges);
    for (std::size_t const ranges : {1001U, 5000U, 100'000U, 10'000'000U}) {
      std::size_t most = SearchScope::narrowest(ranges, 1000);
      CHECK(most <= 2048);
      std::size_t total = 0;
      while (most != spillway::all_ranges) {
        total += most;
        std::size_t const wider = SearchScope::wider(most, ranges);
        REQUIRE(wider > most);
        most = wider;
      }
      CHECK(total <= ranges / 3);  // little compared with the search of all ranges that follows
    }
  }

  TEST_CASE("cheapest_eviction_window: finds the cheapest window within the scope") {
    for (std::uint64_t seed = 1; seed <= 60; ++seed) {
      CAPTURE(seed);
      std::mt19937_64 random{seed};
      Map map;
      fragment(map, 400, 4, seed);
      SearchScope scope;
      if (seed % 2 == 0) {
        scope.read_all(map.list());
      } else {
        scope.read_around_large(map.list(), map.fit(), 64);
      }
      auto const count = static_cast<std::uint32_t>(1 + random() % 80);
      auto const price_of = [&](std::uint32_t node) -> std::optional<std::uint64_t> {
        std::uint32_t const mixed = (map[node].first * 2654435761U) >> 8U;
        return mixed % 7 == 0 ? std::nullopt : std::optional<std::uint64_t>{mixed % 50};
      };
      // The search asks by owner. All blocks have the same, so it visits the ranges in order.
      std::vector<std::uint32_t> asked;
      std::optional<std::uint64_t> cheapest;
      for (Stretch const& stretch : scope.stretches()) {
        for (std::uint32_t from = stretch.from; from != stretch.past; from = map[from].next) {
          if (map[from].state == RangeState::taken) {
            asked.push_back(from);
          }
          std::uint64_t cost = 0;
          std::uint64_t granules = 0;
          for (std::uint32_t node = from; node != stretch.past; node = map[node].next) {
            auto const mine =
                map[node].state == RangeState::free ? std::uint64_t{0} : price_of(node);
            if (!mine) {
              break;
            }
            cost += *mine;
            granules += map[node].count;
            if (granules >= count) {
              cheapest = std::min(cheapest.value_or(cost), cost);
              break;
            }
          }
        }
      }
      std::size_t next = 0;
      auto const window = spillway::detail::cheapest_eviction_window(
          map.list(), scope, count, [&](BlockId) { return price_of(asked.at(next++)); });
      CHECK(next == asked.size());
      REQUIRE(window.has_value() == cheapest.has_value());
      if (window) {
        CHECK(window->cost == *cheapest);
        CHECK(window->bytes >= count * spillway::granule_bytes);
      }
    }
  }

  TEST_CASE(
      "cheapest_eviction_window: lists the blocks once, however often a cheaper window is found") {
    constexpr std::uint32_t blocks = 200;
    constexpr std::uint32_t wanted = 50;
    Map map;
    map.add_segment(reinterpret_cast<std::byte*>(std::size_t{1} << 40U), blocks);
    for (std::uint32_t i = 0; i < blocks; ++i) {
      Fence fence;
      REQUIRE(map.take(1, spillway::make_block_id(i, 1), fence) != spillway::no_node);
    }
    std::vector<BlockId> owners;  // in order of address
    SearchScope scope;
    scope.read_all(map.list());
    for (std::uint32_t node = scope.stretches()[0].from; node != scope.stretches()[0].past;
         node = map[node].next) {
      owners.push_back(map[node].owner());
    }
    REQUIRE(owners.size() == blocks);
    // Prices that rise with the address, so that the first window is best, and prices that fall.
    std::vector<std::size_t> counts;
    for (bool const rises : {true, false}) {
      CAPTURE(rises);
      std::uint64_t asked = 0;
      std::size_t const before = support::allocations;
      auto const window = spillway::detail::cheapest_eviction_window(
          map.list(), scope, wanted, [&](BlockId) -> std::optional<std::uint64_t> {
            ++asked;
            return rises ? asked : blocks - asked;
          });
      counts.push_back(support::allocations - before);
      REQUIRE(window);
      auto const first = owners.begin() + (rises ? 0 : blocks - wanted);
      CHECK(window->owners == std::vector<BlockId>{first, first + wanted});
      CHECK(window->address == map.list().address(0, 0) + (rises ? 0 : blocks - wanted) * 256);
      CHECK(window->bytes == wanted * 256);
      CHECK(window->cost == (rises ? wanted * (wanted + 1) / 2 : wanted * (wanted - 1) / 2));
    }
    CHECK(counts[0] == counts[1]);
    auto const lowest = spillway::detail::cheapest_eviction_window(
        map.list(), scope, wanted, [](BlockId) -> std::optional<std::uint64_t> { return 7; });
    REQUIRE(lowest);
    CHECK(lowest->address == map.list().address(0, 0));  // the first one among equals
  }

  TEST_CASE("DefragArena: a constructor that lacks memory leaves nothing on the device") {
    for (bool const in_place : {false, true}) {
      std::size_t more = 0;
      for (bool is_made = false; !is_made; ++more) {
        CAPTURE(in_place);
        CAPTURE(more);
        spillway::ModelApi device;
        try {
          support::ShortMemory const few{more};
          Arena const arena{device, {.capacity_bytes = 4_MiB, .grows_in_place = in_place}};
          is_made = true;
        } catch (std::bad_alloc const&) {
        }
        CHECK(device.usage().device_bytes == 0);
      }
      CHECK(more > 3);
    }
  }

  TEST_CASE("DefragArena: with many ranges, examining a few usually finds room") {
    std::size_t looks = 0;
    std::size_t plans = 0;
    std::size_t ranges = 0;
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
      CAPTURE(seed);
      FragmentedArena rig{16_MiB, 512, seed};
      ranges = std::max(ranges, rig.arena.stats().taken_ranges);
      for (int i = 0; i < 10; ++i) {
        auto plan = rig.arena.plan_compaction(
            rig.arena.largest_free_bytes() + 256, no_budget, [&](BlockId) {
              ++looks;
              return true;
            });
        REQUIRE(plan);
        ++plans;
        rig.arena.begin_moves(*plan);
        std::size_t const makes_bytes = plan->makes_bytes;
        rig.arena.commit_moves(*plan, plan->moves.size(), {});
        CHECK(rig.arena.largest_free_bytes() >= makes_bytes);
      }
    }
    CHECK(ranges > 3000);
    CHECK(looks < plans * ranges / 16);
  }

  TEST_CASE(
      "DefragArena: all free bytes can be made one range, however few ranges are examined first") {
    for (std::uint64_t seed = 1; seed <= 30; ++seed) {
      CAPTURE(seed);
      FragmentedArena rig{2_MiB, 8, seed};
      for (std::size_t const share : {8U, 4U, 2U, 1U}) {
        std::size_t const wanted = rig.arena.free_bytes() / share;
        auto plan =
            rig.arena.plan_compaction(wanted, no_budget, [](BlockId) noexcept { return true; });
        REQUIRE(plan);
        rig.arena.begin_moves(*plan);
        rig.arena.commit_moves(*plan, plan->moves.size(), {});
        REQUIRE(rig.arena.largest_free_bytes() >= wanted);
      }
    }
  }

  TEST_CASE("DefragArena: if all free bytes are one range already, plan_pass examines no block") {
    FragmentedArena rig{2_MiB, 8, 1};
    std::size_t looks = 0;
    auto const can_move = [&](BlockId) {
      ++looks;
      return true;
    };
    for (auto plan = rig.arena.plan_pass(no_budget, can_move); plan;
         plan = rig.arena.plan_pass(no_budget, can_move)) {
      rig.arena.begin_moves(*plan);
      rig.arena.commit_moves(*plan, plan->moves.size(), {});
    }
    REQUIRE(rig.arena.largest_free_bytes() == rig.arena.free_bytes());
    looks = 0;
    CHECK_FALSE(rig.arena.plan_pass(no_budget, can_move));
    CHECK(looks == 0);
  }

  TEST_CASE(
      "DefragArena: plan_pass asks for no size that an earlier plan makes, without time limit") {
    // gap 4 | 1 | gap 4 | 1 | gap 4, and one block may be moved.
    spillway::ModelApi device;
    std::vector<RecordedCompaction::Call> calls;
    spillway::DefragArena<spillway::ModelApi, spillway::BestFit, RecordedCompaction> arena{
        device,
        {.capacity_bytes = 14 * 256, .bounce_bytes = 0, .bytes_per_look = 10'000},
        {},
        RecordedCompaction{&calls}};
    std::vector<RangeId> gaps;
    for (std::size_t const granules : {4U, 1U, 4U, 1U, 4U}) {
      RangeId const range = arena.try_take(granules * 256, BlockId{1})->range;
      if (granules == 4) {
        gaps.push_back(range);
      }
    }
    for (RangeId const gap : gaps) {
      arena.give_back(gap, {});
    }
    auto const can_move = [](BlockId) { return true; };

    auto const plan = arena.plan_pass(256, can_move);

    REQUIRE(plan);
    CHECK(plan->makes_bytes == 9 * 256);  // one block leaves for the gap at the other end
    std::vector<RecordedCompaction::Call> const unlimited{{12, 0}, {6, 0}, {9, 0}, {10, 0}};
    CHECK(calls == unlimited);
    calls.clear();
    CHECK(arena.plan_compaction(8 * 256, 256, can_move));
    REQUIRE(calls.size() == 1);
    CHECK(calls[0].granules_per_look > 0);
  }

  TEST_CASE(
      "DefragArena: spare_bytes is 0 with few ranges, and a small part of the capacity with many") {
    FragmentedArena const few{1_MiB, 1024, 1};
    FragmentedArena const many{16_MiB, 1024, 1};

    CHECK(few.arena.spare_bytes(few.arena.few_ranges()) == 0);
    CHECK(many.arena.spare_bytes(many.arena.few_ranges()) > many.arena.capacity_bytes() / 64);
    CHECK(many.arena.spare_bytes(many.arena.few_ranges()) < many.arena.capacity_bytes() / 32);
  }
}
