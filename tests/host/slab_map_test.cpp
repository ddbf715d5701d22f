// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>
#include <spillway/host/slab_map.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <set>
#include <vector>

TEST_SUITE("slab_map") {
  using namespace spillway;
  using namespace spillway::detail;

  namespace {

  constexpr Ticket ticket(unsigned stream, unsigned sequence) {
    return {StreamIndex{static_cast<std::uint16_t>(stream)}, sequence};
  }

  std::vector<Extent> extents_of(SlabMap const& map, SlabMap::Chain const& chain) {
    std::vector<Extent> extents;
    map.for_each_extent(chain.id, [&](Extent const& extent) { extents.push_back(extent); });
    return extents;
  }

  std::size_t free_ranges(SlabMap const& map) {
    std::size_t count = 0;
    map.for_each_free([&](Extent const&, Fence const&) { ++count; });
    return count;
  }

  }  // namespace

  TEST_CASE("SizeClasses: classes rise with size, without gaps up to the largest size") {
    std::size_t previous = 0;
    for (std::size_t units = 1; units < 100'000; ++units) {
      std::size_t const now = SizeClasses::class_of(units);
      REQUIRE(now >= previous);
      REQUIRE(now <= previous + 1);
      previous = now;
    }
    CHECK(SizeClasses::class_of(~std::size_t{0}) == SizeClasses::count - 1);
  }

  TEST_CASE("SizeClasses: sizes of one class differ by less than an eighth") {
    for (std::size_t units = 8; units < 100'000; units = units * 9 / 8 + 1) {
      CHECK(SizeClasses::class_of(units) < SizeClasses::class_of(units + units / 8 + 1));
    }
  }

  TEST_CASE("SizeClasses: next and previous name the nearest class in use") {
    SizeClasses used;
    std::set<std::size_t> const members = {0, 1, 63, 64, 65, 127, 128, 300, SizeClasses::count - 1};
    for (std::size_t const member : members) {
      used.insert(member);
    }
    used.insert(200);
    used.erase(200);

    for (std::size_t at = 0; at < SizeClasses::count; ++at) {
      auto const above = members.lower_bound(at);
      REQUIRE(used.next(at) == (above == members.end() ? SizeClasses::count : *above));
      REQUIRE(used.previous(at) ==
              (above == members.begin() ? SizeClasses::count : *std::prev(above)));
    }
    CHECK(used.next(SizeClasses::count) == SizeClasses::count);
    CHECK(used.previous(SizeClasses::count) == SizeClasses::count - 1);
    CHECK(SizeClasses{}.next(0) == SizeClasses::count);
    CHECK(SizeClasses{}.previous(SizeClasses::count) == SizeClasses::count);
  }

  TEST_CASE("SlabMap: sizes are rounded up to the granule, and offsets are multiples of it") {
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

  TEST_CASE("SlabMap: sizes are rounded up to a larger granule, too") {
    SlabMap map{4096};
    map.add_slab(8192);

    CHECK(map.try_take(4097)->bytes == 8192);
    CHECK(map.try_take(1) == std::nullopt);
  }

  TEST_CASE("SlabMap: the best-fitting range is taken, not the first") {
    SlabMap map;
    map.add_slab(9 * granule_bytes);
    map.add_slab(3 * granule_bytes);
    map.add_slab(5 * granule_bytes);

    auto const chain = map.try_take(3 * granule_bytes).value();

    CHECK(extents_of(map, chain).at(0).slab == 1);
    CHECK(map.largest_free_bytes() == 9 * granule_bytes);
  }

  TEST_CASE("SlabMap: a request is met from scattered ranges, in the order of the chain") {
    SlabMap map;
    map.add_slab(2 * granule_bytes);
    map.add_slab(4 * granule_bytes);
    map.add_slab(3 * granule_bytes);

    auto const chain = map.try_take(8 * granule_bytes).value();

    auto const extents = extents_of(map, chain);
    REQUIRE(extents.size() == 3);
    CHECK(extents[0].bytes == 4 * granule_bytes);
    CHECK(extents[1].bytes == 3 * granule_bytes);
    CHECK(extents[2].bytes == 1 * granule_bytes);
    CHECK(map.free_bytes() == granule_bytes);
    CHECK(map.largest_free_bytes() == granule_bytes);

    map.give_back(chain.id, {});
    CHECK(map.free_bytes() == 9 * granule_bytes);
    CHECK(free_ranges(map) == 3);
  }

  TEST_CASE("SlabMap: a chain of more than max_extents pieces is refused and nothing changes") {
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

  TEST_CASE("SlabMap: of more free ranges than a chain may have pieces, the largest are taken") {
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

  TEST_CASE("SlabMap: finds the only fitting range among many of its size class") {
    SlabMap map;
    map.add_slab(71 * granule_bytes);
    for (int i = 0; i < 40; ++i) {
      map.add_slab(64 * granule_bytes);
    }

    auto const chain = map.try_take(70 * granule_bytes).value();

    CHECK(extents_of(map, chain).size() == 1);
  }

  TEST_CASE("SlabMap: can_take counts one new slab as one more piece") {
    SlabMap map;
    for (std::size_t i = 0; i < SlabMap::max_extents; ++i) {
      map.add_slab(granule_bytes);
    }
    std::size_t const all = SlabMap::max_extents * granule_bytes;

    CHECK(map.can_take(all + granule_bytes, 2 * granule_bytes));
    CHECK_FALSE(map.can_take(all + 2 * granule_bytes, 2 * granule_bytes));
    CHECK(map.can_take(5 * all, 5 * all));
    CHECK(map.can_take(granule_bytes, 5 * all));
  }

  TEST_CASE("SlabMap: a request beyond all memory is refused without overflow") {
    SlabMap map;
    map.add_slab(granule_bytes);

    CHECK(map.try_take(~std::size_t{0}) == std::nullopt);
    CHECK_FALSE(map.can_take(~std::size_t{0}, granule_bytes));
  }

  TEST_CASE("SlabMap: adjacent free ranges coalesce, in whatever order they are freed") {
    std::vector<std::vector<std::size_t>> const orders = {
        {0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    for (auto const& order : orders) {
      SlabMap map;
      map.add_slab(6 * granule_bytes);
      std::vector<SlabMap::Chain> chains;
      for (int i = 0; i < 3; ++i) {
        chains.push_back(map.try_take(2 * granule_bytes).value());
      }
      REQUIRE(map.free_bytes() == 0);

      for (std::size_t const i : order) {
        map.give_back(chains[i].id, {});
      }

      CHECK(free_ranges(map) == 1);
      CHECK(map.largest_free_bytes() == 6 * granule_bytes);
    }
  }

  TEST_CASE("SlabMap: ranges of different slabs never coalesce") {
    SlabMap map;
    map.add_slab(granule_bytes);
    map.add_slab(granule_bytes);
    auto const a = map.try_take(granule_bytes).value();
    auto const b = map.try_take(granule_bytes).value();

    map.give_back(a.id, {});
    map.give_back(b.id, {});

    CHECK(free_ranges(map) == 2);
  }

  TEST_CASE("SlabMap: a taken range comes with the fence of its last use") {
    SlabMap map;
    map.add_slab(4 * granule_bytes);
    auto const chain = map.try_take(granule_bytes).value();
    CHECK(chain.fence.is_empty());

    map.give_back(chain.id, Fence{ticket(3, 7)});

    CHECK(map.try_take(granule_bytes)->fence == Fence{ticket(3, 7)});
  }

  TEST_CASE("SlabMap: a coalesced range has both fences, and so has each part of a later split") {
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

  TEST_CASE("SlabMap: a scattered chain has the fences of all its pieces") {
    SlabMap map;
    map.add_slab(granule_bytes);
    map.add_slab(granule_bytes);
    auto const a = map.try_take(granule_bytes).value();
    auto const b = map.try_take(granule_bytes).value();
    map.give_back(a.id, Fence{ticket(1, 10)});
    map.give_back(b.id, Fence{ticket(2, 20)});
    Fence both{ticket(1, 10)};
    both.add(ticket(2, 20));

    auto const chain = map.try_take(2 * granule_bytes).value();
    CHECK(chain.fence == both);

    map.give_back(chain.id, Fence{ticket(4, 40)});
    CHECK(map.try_take(granule_bytes)->fence == Fence{ticket(4, 40)});
  }

  TEST_CASE("SlabMap: wholly free slabs are removed, and the others keep their numbers") {
    SlabMap map;
    map.add_slab(4 * granule_bytes);
    map.add_slab(2 * granule_bytes);
    map.add_slab(3 * granule_bytes);
    auto const first = map.try_take(4 * granule_bytes).value();
    auto const last = map.try_take(3 * granule_bytes).value();
    map.give_back(first.id, Fence{ticket(1, 10)});

    std::vector<std::uint32_t> removed;
    map.remove_free_slabs([&](std::uint32_t slab, std::size_t bytes, Fence const& fence) {
      removed.push_back(slab);
      CHECK(bytes == (slab == 0 ? 4 : 2) * granule_bytes);
      CHECK(fence == (slab == 0 ? Fence{ticket(1, 10)} : Fence{}));
    });

    std::sort(removed.begin(), removed.end());
    CHECK(removed == std::vector<std::uint32_t>{0, 1});
    CHECK(map.reserved_bytes() == 3 * granule_bytes);
    CHECK(map.free_bytes() == 0);
    CHECK(extents_of(map, last)[0].slab == 2);
    CHECK(map.add_slab(granule_bytes) == 3);
    CHECK(extents_of(map, map.try_take(granule_bytes).value())[0].slab == 3);
  }
}
