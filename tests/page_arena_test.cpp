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

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <random>
#include <type_traits>
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
        : arena{device,
                order,
                {.capacity_bytes = pages * page,
                 .initial_bytes = pages * page,
                 .growth_bytes = page}},
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

  TEST_CASE("PageArena: pages that are handed over twice leave each after its own last uses") {
    PageRig<false> rig{3};
    Placement const idle = rig.take(1);
    Placement const busy = rig.take(1);
    (void)rig.arena.map(idle.range);
    (void)rig.arena.map(busy.range);
    rig.arena.give_back(rig.take(1).range, {});
    rig.arena.give_back(idle.range, {});
    rig.arena.give_back(busy.range, rig.use(busy.address));
    auto const first = rig.arena.trim(2 * page);
    auto const second = rig.arena.trim(page);
    REQUIRE((first && second));
    CHECK(first->fence.is_empty());
    CHECK_FALSE(second->fence.is_empty());

    rig.arena.release(*first);  // the device ends the program if it unmaps what is in use
    CHECK(rig.device.usage().device_bytes == page);
    Segment growth = rig.arena.growth_for(3 * page);
    CHECK(growth.bytes == 3 * page);
    CHECK_FALSE(rig.arena.try_reserve(growth));  // one page has not left yet
    rig.order.synchronize(second->fence);
    rig.arena.release(*second);
    CHECK(rig.device.usage().device_bytes == 0);
    REQUIRE(rig.arena.try_reserve(growth));
    rig.arena.add_segment(growth);
    CHECK(rig.arena.free_bytes() == 3 * page);
  }

  TEST_CASE_TEMPLATE("PageArena: agrees with the count of each page, in any order of calls",
                     Rig,
                     PageRig<false>,
                     PageRig<true>) {
    constexpr bool parks = std::is_same_v<Rig, PageRig<true>>;
    constexpr unsigned seed = 20263;
    MESSAGE("seed ", seed);
    std::mt19937 random{seed};
    constexpr std::size_t most = 24;
    struct Range {
      Placement placement;
      std::size_t pages = 0;
      unsigned char byte = 0;
      std::size_t on = 0;  // the stream of its last use
      bool is_parked = false;
    };
    constexpr std::size_t longest = 6;
    Rig rig{most};
    auto& arena = rig.arena;
    auto* const host =
        static_cast<unsigned char*>(rig.device.try_allocate_pinned(longest * page, -1));
    REQUIRE(host != nullptr);
    std::array const streams{rig.stream, rig.device.create_stream()};
    std::array const indices{rig.on, rig.order.index_of(streams[1])};
    std::vector<Range> ranges;
    std::deque<Segment> leaving;
    std::size_t reserved = most;
    std::size_t capacity = most;
    std::size_t refused = 0;
    std::size_t trims = 0;
    auto const taken = [&] {
      std::size_t pages = 0;
      for (Range const& range : ranges) {
        pages += range.is_parked ? 0 : range.pages;
      }
      return pages;
    };
    auto const leaving_pages = [&] {
      std::size_t pages = 0;
      for (Segment const& segment : leaving) {
        pages += segment.bytes / page;
      }
      return pages;
    };
    auto const usable = [&] {
      return std::min(reserved - taken(), capacity - std::min(capacity, taken()));
    };
    // Maps the range and writes it; what was there before may still be read.
    auto const fill = [&](Range& range) {
      MappedRange const mapped = arena.map(range.placement.range);
      range.on = random() % 2;
      rig.order.wait(indices[range.on], mapped.fence);
      range.byte = static_cast<unsigned char>(random());
      rig.device.fill(range.placement.address, range.byte, range.pages * page, streams[range.on]);
    };
    for (int i = 0; i < 6000; ++i) {
      CAPTURE(i);
      auto const at = ranges.begin() +
                      static_cast<std::ptrdiff_t>(ranges.empty() ? 0 : random() % ranges.size());
      switch (random() % 8) {
      case 0:
      case 1: {
        std::size_t const pages = 1 + random() % longest;
        auto const placement = arena.try_take(pages * page, BlockId{1});
        REQUIRE(placement.has_value() == (pages <= usable()));
        if (placement) {
          fill(ranges.emplace_back(Range{*placement, pages}));
        }
        break;
      }
      case 2:
        if (!ranges.empty()) {
          Fence const last_uses{rig.order.mark(indices[at->on])};
          if constexpr (parks) {
            if (at->is_parked) {
              arena.release(at->placement.range);
              ranges.erase(at);
              break;
            }
          }
          arena.give_back(at->placement.range, last_uses);
          ranges.erase(at);
        }
        break;
      case 3:
        if constexpr (parks) {
          if (!ranges.empty() && !at->is_parked) {
            arena.park(at->placement.range, Fence{rig.order.mark(indices[at->on])});
            at->is_parked = true;
          } else if (!ranges.empty()) {
            bool const is_retaken = arena.try_retake(at->placement.range).has_value();
            REQUIRE(is_retaken == (at->pages <= usable()));
            if (is_retaken) {
              at->is_parked = false;
              fill(*at);
            }
          }
        }
        break;
      case 4: {
        std::size_t const wanted = 1 + random() % 6;
        std::size_t const free = reserved - taken();
        auto const segment = arena.trim(wanted * page);
        REQUIRE((segment ? segment->bytes / page : 0) == std::min(wanted, free));
        if (segment) {
          leaving.push_back(*segment);
          reserved -= segment->bytes / page;
          ++trims;
        }
        break;
      }
      case 5:
        if (!leaving.empty()) {
          rig.order.synchronize(leaving.front().fence);
          arena.release(leaving.front());
          leaving.pop_front();
        }
        break;
      case 6: {
        std::size_t const wanted = 1 + random() % 8;
        std::size_t const free = reserved - taken();
        Segment growth = arena.growth_for(wanted * page);
        std::size_t const missing = wanted - std::min(wanted, free);
        REQUIRE(growth.bytes / page == std::min(missing, capacity - std::min(capacity, reserved)));
        if (growth.bytes == 0) {
          break;
        }
        bool const has_room = reserved + leaving_pages() + growth.bytes / page <= most;
        REQUIRE(arena.try_reserve(growth) == has_room);
        if (has_room) {
          arena.add_segment(growth);
          reserved += growth.bytes / page;
        } else {
          ++refused;
        }
        break;
      }
      default:
        capacity = random() % 4 == 0 ? 1 + random() % most : most;
        arena.set_capacity(capacity * page);
        if (!ranges.empty() && !at->is_parked) {
          std::size_t const n = at->pages * page;
          rig.device.copy(host, at->placement.address, n, CopyKind::to_host, streams[at->on]);
          rig.device.synchronize(streams[at->on]);
          REQUIRE(static_cast<std::size_t>(std::count(host, host + n, at->byte)) == n);
        }
        break;
      }
      REQUIRE(arena.reserved_bytes() == reserved * page);
      REQUIRE(arena.trimmable_bytes() == (reserved - taken()) * page);
      REQUIRE(arena.free_bytes() == usable() * page);
      REQUIRE(rig.device.usage().device_bytes == (reserved + leaving_pages()) * page);
    }
    rig.device.run_all();
    rig.device.free_pinned(host, longest * page);
    CHECK(trims > 100);
    CHECK(refused > 20);
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
