// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>
#include <spillway/host/slab_map.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <optional>
#include <vector>

using namespace spillway;
using namespace spillway::detail;

namespace {

constexpr Ticket ticket(unsigned stream, unsigned sequence) {
  return {StreamIndex{static_cast<std::uint16_t>(stream)}, sequence};
}

std::vector<Extent> extents_of(SlabMap const& map, SlabMap::Run const& run) {
  std::vector<Extent> extents;
  map.for_each_extent(run.id, [&](Extent const& extent) { extents.push_back(extent); });
  return extents;
}

std::size_t free_ranges(SlabMap const& map) {
  std::size_t count = 0;
  map.for_each_free([&](Extent const&, Fence const&) { ++count; });
  return count;
}

}  // namespace

TEST_SUITE("slab_map") {
  TEST_CASE("SlabMap: sizes are rounded up to the granule and offsets are multiples of it") {
    SlabMap map;
    map.add_slab(16 * granule_bytes);

    auto const first = map.try_take(1).value();
    auto const second = map.try_take(granule_bytes + 1).value();

    CHECK(first.bytes == granule_bytes);
    CHECK(second.bytes == 2 * granule_bytes);
    CHECK(extents_of(map, second).at(0).offset == granule_bytes);
    CHECK(map.free_bytes() == 13 * granule_bytes);
    CHECK(map.reserved_bytes() == 16 * granule_bytes);
  }

  TEST_CASE("SlabMap: a larger granule is kept to") {
    SlabMap map{4096};
    map.add_slab(8192);

    CHECK(map.try_take(4097)->bytes == 8192);
    CHECK(map.try_take(1) == std::nullopt);
  }

  TEST_CASE("SlabMap: the range that fits best is taken, not the first") {
    SlabMap map;
    map.add_slab(9 * granule_bytes);
    map.add_slab(3 * granule_bytes);
    map.add_slab(5 * granule_bytes);

    auto const run = map.try_take(3 * granule_bytes).value();

    CHECK(extents_of(map, run).at(0).slab == 1);
    CHECK(map.largest_free_bytes() == 9 * granule_bytes);
  }

  TEST_CASE("SlabMap: scattered room is room, in order of the run's bytes and nothing twice") {
    SlabMap map;
    map.add_slab(2 * granule_bytes);
    map.add_slab(4 * granule_bytes);
    map.add_slab(3 * granule_bytes);

    auto const run = map.try_take(8 * granule_bytes).value();

    auto const extents = extents_of(map, run);
    REQUIRE(extents.size() == 3);
    CHECK(extents[0].bytes == 4 * granule_bytes);
    CHECK(extents[1].bytes == 3 * granule_bytes);
    CHECK(extents[2].bytes == 1 * granule_bytes);
    CHECK(map.free_bytes() == granule_bytes);
    CHECK(map.largest_free_bytes() == granule_bytes);

    map.give_back(run.id, {});
    CHECK(map.free_bytes() == 9 * granule_bytes);
    CHECK(free_ranges(map) == 3);
  }

  TEST_CASE("SlabMap: a run of more than max_extents pieces is refused and nothing changes") {
    SlabMap map;
    for (std::size_t i = 0; i < SlabMap::max_extents + 1; ++i) {
      map.add_slab(granule_bytes);
    }

    CHECK(map.can_take(SlabMap::max_extents * granule_bytes));
    CHECK_FALSE(map.can_take((SlabMap::max_extents + 1) * granule_bytes));
    CHECK(map.try_take((SlabMap::max_extents + 1) * granule_bytes) == std::nullopt);
    CHECK(map.free_bytes() == (SlabMap::max_extents + 1) * granule_bytes);
    CHECK(map.try_take(SlabMap::max_extents * granule_bytes).has_value());
  }

  TEST_CASE("SlabMap: of more free ranges than a run may have pieces, the largest are taken") {
    SlabMap map;
    for (std::size_t const granules : {71U, 64U}) {  // one size class
      for (std::size_t i = 0; i < SlabMap::max_extents; ++i) {
        map.add_slab(granules * granule_bytes);
      }
    }
    std::size_t const most = SlabMap::max_extents * 71 * granule_bytes;

    CHECK_FALSE(map.can_take(most + 1));
    CHECK(map.try_take(most).has_value());
  }

  TEST_CASE("SlabMap: a range that fits is found behind many of its class that do not") {
    SlabMap map;
    map.add_slab(71 * granule_bytes);
    for (int i = 0; i < 40; ++i) {
      map.add_slab(64 * granule_bytes);
    }

    auto const run = map.try_take(70 * granule_bytes).value();

    CHECK(extents_of(map, run).size() == 1);
  }

  TEST_CASE("SlabMap: can_take counts one more slab as one more piece") {
    SlabMap map;
    for (std::size_t i = 0; i < SlabMap::max_extents; ++i) {
      map.add_slab(granule_bytes);
    }
    std::size_t const all = SlabMap::max_extents * granule_bytes;

    CHECK(map.can_take(all + granule_bytes, 2 * granule_bytes));
    CHECK_FALSE(map.can_take(all + 2 * granule_bytes, 2 * granule_bytes));
    CHECK(map.can_take(5 * all, 5 * all));
  }

  TEST_CASE("SlabMap: a request beyond all memory is refused without overflow") {
    SlabMap map;
    map.add_slab(granule_bytes);

    CHECK(map.try_take(~std::size_t{0}) == std::nullopt);
    CHECK_FALSE(map.can_take(~std::size_t{0}, granule_bytes));
  }

  TEST_CASE("SlabMap: free neighbours coalesce whatever the order in which they are freed") {
    std::vector<std::vector<std::size_t>> const orders = {
        {0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    for (auto const& order : orders) {
      SlabMap map;
      map.add_slab(6 * granule_bytes);
      std::vector<SlabMap::Run> runs;
      for (int i = 0; i < 3; ++i) {
        runs.push_back(map.try_take(2 * granule_bytes).value());
      }
      REQUIRE(map.free_bytes() == 0);

      for (std::size_t const i : order) {
        map.give_back(runs[i].id, {});
      }

      CHECK(free_ranges(map) == 1);
      CHECK(map.largest_free_bytes() == 6 * granule_bytes);
    }
  }

  TEST_CASE("SlabMap: slabs never coalesce with each other") {
    SlabMap map;
    map.add_slab(granule_bytes);
    map.add_slab(granule_bytes);
    auto const a = map.try_take(granule_bytes).value();
    auto const b = map.try_take(granule_bytes).value();

    map.give_back(a.id, {});
    map.give_back(b.id, {});

    CHECK(free_ranges(map) == 2);
  }

  TEST_CASE("SlabMap: who takes a range is told what must come before") {
    SlabMap map;
    map.add_slab(4 * granule_bytes);
    auto const run = map.try_take(granule_bytes).value();
    CHECK(run.fence.is_empty());

    map.give_back(run.id, Fence{ticket(3, 7)});

    CHECK(map.try_take(granule_bytes)->fence == Fence{ticket(3, 7)});
  }

  TEST_CASE("SlabMap: coalescing unites fences, and both parts of a split keep the union") {
    SlabMap map;
    map.add_slab(4 * granule_bytes);
    auto const a = map.try_take(2 * granule_bytes).value();
    auto const b = map.try_take(2 * granule_bytes).value();
    map.give_back(a.id, Fence{ticket(1, 10)});
    map.give_back(b.id, Fence{ticket(2, 20)});
    Fence both{ticket(1, 10)};
    both.add(ticket(2, 20));

    auto const first = map.try_take(granule_bytes).value();
    auto const rest = map.try_take(3 * granule_bytes).value();

    CHECK(first.fence == both);
    CHECK(rest.fence == both);
  }

  TEST_CASE("SlabMap: a scattered run comes after all of its pieces") {
    SlabMap map;
    map.add_slab(granule_bytes);
    map.add_slab(granule_bytes);
    auto const a = map.try_take(granule_bytes).value();
    auto const b = map.try_take(granule_bytes).value();
    map.give_back(a.id, Fence{ticket(1, 10)});
    map.give_back(b.id, Fence{ticket(2, 20)});
    Fence both{ticket(1, 10)};
    both.add(ticket(2, 20));

    auto const run = map.try_take(2 * granule_bytes).value();
    CHECK(run.fence == both);

    map.give_back(run.id, Fence{ticket(4, 40)});
    CHECK(map.try_take(granule_bytes)->fence == Fence{ticket(4, 40)});
  }
}
