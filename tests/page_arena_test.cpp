// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/arena.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/range.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/page_arena.hpp>
#include <spillway/policy/fit/segregated_fit.hpp>
#include <spillway/stream/stream_order.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

TEST_SUITE("page_arena") {
  // What `PageArena` does beyond what every arena owes (tests/concepts/arena_test.cpp).

  namespace {

  using namespace spillway;
  using Device = testing::SteppedSimApi;

  constexpr std::size_t page = 16_KiB;

  template <bool Stable>
  struct PageRig {
    explicit PageRig(std::size_t pages)
        : arena{device, order, {.capacity_bytes = pages * page, .initial_bytes = pages * page}},
          stream{device.create_stream()},
          on{order.index_of(stream)} {}
    ~PageRig() { device.run_all(); }

    Placement take(std::size_t pages) {
      auto const placement = arena.try_take(pages * page, BlockId{1});
      REQUIRE(placement);
      return *placement;
    }
    /// A fence of work that runs only when the device is told to.
    Fence use(void* at) {
      device.fill(at, 1, page, stream);
      return Fence{order.mark(on)};
    }

    Device device{{.capacity_bytes = 1_MiB, .granularity_bytes = page}};
    StreamOrder<Device> order{device};
    PageArena<Device, SegregatedFit, Stable> arena;
    Device::stream_type stream;
    StreamIndex on;
  };

  }  // namespace

  TEST_CASE("PageArena: pages that are still mapped at a range's address cost no call") {
    PageRig<false> rig{4};
    Placement const first = rig.take(2);
    CHECK(rig.arena.map(first.range).host_waits == 0);
    rig.arena.give_back(first.range, rig.use(first.address));
    auto const before = rig.device.calls();

    Placement const again = rig.take(2);
    REQUIRE(again.address == first.address);
    MappedRange const mapped = rig.arena.map(again.range);

    CHECK(rig.device.calls() == before);  // no wait either: the order of streams is enough
    CHECK(mapped.host_waits == 0);
    CHECK_FALSE(mapped.fence.is_empty());
    rig.arena.give_back(again.range, {});
  }

  TEST_CASE("PageArena: neighbours are mapped, and unmapped, by one call") {
    PageRig<false> rig{8};
    auto const before = rig.device.calls();
    Placement const all = rig.take(8);
    (void)rig.arena.map(all.range);
    CHECK(rig.device.calls().maps - before.maps == 1);
    rig.arena.give_back(all.range, {});
    auto const segment = rig.arena.trim(8 * page);
    REQUIRE(segment);
    rig.arena.release(*segment);
    CHECK(rig.device.calls().unmaps - before.unmaps == 1);
    CHECK(rig.device.usage().device_bytes == 0);
  }

  TEST_CASE("PageArena: pages from anywhere make one range") {
    PageRig<false> rig{6};
    std::vector<Placement> small;
    for (int i = 0; i < 6; ++i) {
      small.push_back(rig.take(1));
      (void)rig.arena.map(small.back().range);
    }
    for (std::size_t const i : {0U, 2U, 4U}) {
      rig.arena.give_back(small[i].range, {});
    }
    CHECK(rig.arena.largest_free_bytes() == 3 * page);
    Placement const large = rig.take(3);
    CHECK(rig.arena.map(large.range).host_waits == 0);
    rig.device.fill(large.address, 7, 3 * page, rig.stream);  // refused where nothing is mapped
    rig.device.run_all();
  }

  TEST_CASE("PageArena: a page is mapped elsewhere once its last use has finished") {
    PageRig<true> rig{2};
    Placement const parked = rig.take(2);
    (void)rig.arena.map(parked.range);
    rig.arena.park(parked.range, rig.use(parked.address));
    Placement const other = rig.take(2);
    REQUIRE(other.address != parked.address);
    CHECK(rig.arena.map(other.range).host_waits == 1);
    CHECK_FALSE(rig.arena.try_retake(parked.range));  // its pages serve others

    rig.arena.give_back(other.range, {});
    auto const back = rig.arena.try_retake(parked.range);
    REQUIRE(back);
    CHECK(back->address == parked.address);
    CHECK(rig.arena.map(back->range).host_waits == 0);
    rig.arena.give_back(back->range, {});
  }

  TEST_CASE("PageArena: those pages leave first that have been free for longest") {
    PageRig<false> rig{3};
    Placement const first = rig.take(1);
    Placement const second = rig.take(1);
    Placement const third = rig.take(1);
    for (Placement const& placement : {first, second, third}) {
      (void)rig.arena.map(placement.range);
    }
    rig.arena.give_back(second.range, {});
    rig.arena.give_back(first.range, {});
    auto const segment = rig.arena.trim(page);
    REQUIRE(segment);
    rig.arena.release(*segment);

    auto const before = rig.device.calls();
    Placement const again = rig.take(1);
    (void)rig.arena.map(again.range);
    CHECK(again.address == first.address);
    CHECK(rig.device.calls().maps == before.maps);  // the page of `first` is still there
  }

  TEST_CASE("PageArena: a device that runs out of pages half-way keeps none") {
    Device device{{.capacity_bytes = 4 * page, .granularity_bytes = page}};
    StreamOrder<Device> order{device};
    PageArena<Device, SegregatedFit, false> arena{
        device, order, {.capacity_bytes = 8 * page, .initial_bytes = 0}};
    Segment segment = arena.growth_for(8 * page);
    REQUIRE(segment.bytes == 8 * page);
    CHECK_FALSE(arena.try_reserve(segment));
    CHECK(device.usage().device_bytes == 0);
    CHECK_THROWS_AS(
        (PageArena<Device, SegregatedFit, false>{device, order, {.capacity_bytes = page - 1}}),
        ContractViolation);
  }

  TEST_CASE("PageArena: a capacity of too many pages is refused, and the message says why") {
    Device device{{.granularity_bytes = page}};
    StreamOrder<Device> order{device};
    CHECK_THROWS_WITH_AS(
        (PageArena<Device, SegregatedFit, true>{
            device, order, {.capacity_bytes = (std::size_t{1} << 26U) * page, .initial_bytes = 0}}),
        doctest::Contains("make pages larger"),
        ContractViolation);
  }

  TEST_CASE("PageArena: what is larger than any memory is not there") {
    PageRig<false> rig{4};
    constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
    CHECK_FALSE(rig.arena.try_take(most, BlockId{1}));
    CHECK_FALSE(rig.arena.try_take(most - page, BlockId{1}));
    CHECK(rig.arena.growth_for(most).bytes == 0);
    CHECK_THROWS_AS((void)rig.arena.try_take(0, BlockId{1}), ContractViolation);
  }
}
