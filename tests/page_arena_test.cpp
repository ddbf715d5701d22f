// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/arena.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/record.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/page_arena.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/fit/segregated_fit.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/sim.hpp>
#include <spillway/stream/stream_order.hpp>
#include <spillway/swappable_buffer.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <random>
#include <span>
#include <utility>
#include <vector>

TEST_SUITE("page_arena") {
  // What `PageArena` does beyond the rules for every arena (tests/concepts/arena_test.cpp).

  namespace {

  using namespace spillway;
  using Device = testing::SteppedSimApi;

  constexpr std::size_t page = 16_KiB;
  constexpr std::size_t gpu_page = 2_MiB;  // for what depends on the cost of large pieces

  /// A device on which small pieces cost no more than large ones.
  struct CheapPieces : Device {
    using Device::Device;
    static constexpr bool has_cheap_pieces = true;
  };
  static_assert(CheapPiecesApi<CheapPieces> && !CheapPiecesApi<Device>);

  /// The same, with a call that moves mapped pages to other addresses.
  struct MovesMapped : CheapPieces {
    using CheapPieces::CheapPieces;
    bool try_map(void* p, std::size_t bytes, std::span<physical_type const> pieces) {
      REQUIRE(CheapPieces::try_map(p, bytes, pieces));
      for (std::size_t i = 0; i < pieces.size(); ++i) {
        REQUIRE(mapped.emplace(static_cast<std::byte*>(p) + i * bytes, pieces[i]).second);
      }
      return true;
    }
    void unmap(void* p, std::size_t bytes) noexcept {
      CheapPieces::unmap(p, bytes);
      auto* const begin = static_cast<std::byte*>(p);
      mapped.erase(mapped.lower_bound(begin), mapped.lower_bound(begin + bytes));
    }
    void move_mapped(void* to, void* from, std::size_t bytes) {
      auto* const begin = static_cast<std::byte*>(from);
      std::vector<physical_type> pieces;
      for (auto piece = mapped.lower_bound(begin);
           piece != mapped.end() && piece->first < begin + bytes;
           ++piece) {
        pieces.push_back(piece->second);
      }
      unmap(from, bytes);
      if (fails) {
        throw DeviceError{"the system has no memory for that"};
      }
      (void)try_map(to, page, pieces);
      ++moves;
      moved_pages += pieces.size();
    }

    bool fails = false;
    std::size_t moves = 0;
    std::size_t moved_pages = 0;
    std::map<std::byte*, physical_type> mapped;  // by address
  };
  static_assert(RemappingApi<MovesMapped> && !RemappingApi<CheapPieces>);

  /// A device shared with others, who take memory as soon as it is released.
  template <class Base>
  struct Shared : Base {
    using Base::Base;
    void release_physical(typename Base::physical_type physical) noexcept {
      Base::release_physical(physical);
      if (wanted_bytes != 0) {
        if (auto const taken = Base::try_create_physical(wanted_bytes)) {
          taken_by_others.push_back(*taken);
          bytes_of_others += std::exchange(wanted_bytes, 0);
        }
      }
    }
    void end_others() {
      for (; !taken_by_others.empty(); taken_by_others.pop_back()) {
        Base::release_physical(taken_by_others.back());
      }
      bytes_of_others = 0;
    }

    std::size_t wanted_bytes = 0;
    std::size_t bytes_of_others = 0;
    std::vector<typename Base::physical_type> taken_by_others;
  };

  /// A device that has memory for the tables of a limited number of mappings.
  struct FewTables : Device {
    using Device::Device;
    bool try_map(void* p, std::size_t bytes, std::span<physical_type const> pieces) {
      return mappings_left-- != 0 && Device::try_map(p, bytes, pieces);
    }

    std::size_t mappings_left = 0;
  };

  struct TrimWatch {
    static constexpr bool is_enabled = true;

    std::size_t trimmed_bytes = 0;

    void on_record(Record const& record) noexcept {
      trimmed_bytes += record.kind == RecordKind::trim ? record.bytes : 0;
    }
  };

  template <bool Stable, class D = Device>
  struct PageRig {
    static constexpr bool is_stable = Stable;

    /// On a device with no more memory than that.
    explicit PageRig(std::size_t pages, std::size_t bytes = page)
        : page_bytes{bytes},
          device{{.capacity_bytes = pages * bytes, .granularity_bytes = bytes}},
          arena{device,
                order,
                {.capacity_bytes = pages * bytes,
                 .initial_bytes = pages * bytes,
                 .growth_bytes = bytes}},
          stream{device.create_stream()},
          on{order.index_of(stream)} {}
    ~PageRig() { device.run_all(); }

    /// The calls that the device gets while `act` runs.
    template <class Act>
    SimCalls calls_of(Act act) {
      SimCalls const before = device.calls();
      act();
      SimCalls calls = device.calls();
      calls.physical_creations -= before.physical_creations;
      calls.physical_releases -= before.physical_releases;
      calls.maps -= before.maps;
      calls.unmaps -= before.unmaps;
      calls.mapped_pieces -= before.mapped_pieces;
      calls.unmapped_pieces -= before.unmapped_pieces;
      return calls;
    }

    Placement take(std::size_t pages) {
      auto const placement = arena.try_take(pages * page_bytes, BlockId{1});
      REQUIRE(placement);
      return *placement;
    }
    MappedRange map(Placement const& placement) {
      MappedRange const mapped = arena.map(placement.range);
      REQUIRE_FALSE(mapped.is_refused);
      return mapped;
    }
    Placement take_mapped(std::size_t pages) {
      Placement const placement = take(pages);
      (void)map(placement);
      return placement;
    }
    /// A fence of work that runs only when the device is told to.
    Fence use(void* at) {
      device.fill(at, 1, page_bytes, stream);
      return Fence{order.mark(on)};
    }
    /// Takes a parked range back, and parks it again.
    void lease(Placement const& placement) requires Stable {
      REQUIRE(arena.try_retake(placement.range));
      (void)map(placement);
      arena.park(placement.range, use(placement.address));
      device.run_all();
    }
    Placement take_parked(std::size_t pages) requires Stable {
      Placement const placement = take_mapped(pages);
      arena.park(placement.range, {});
      return placement;
    }

    std::size_t page_bytes;
    D device;
    StreamOrder<D> order{device};
    PageArena<D, SegregatedFit, Stable> arena;
    typename D::stream_type stream;
    StreamIndex on;
  };

  }  // namespace

  TEST_CASE(
      "PageArena: a range whose pages are still mapped at its address is taken without a call") {
    PageRig<false> rig{4};
    Placement const first = rig.take(2);
    CHECK(rig.map(first).host_waits == 0);
    rig.arena.give_back(first.range, rig.use(first.address));
    auto const before = rig.device.calls();

    Placement const again = rig.take(2);
    REQUIRE(again.address == first.address);
    MappedRange const mapped = rig.map(again);

    CHECK(rig.device.calls() == before);  // no wait either: the order of streams is enough
    CHECK(mapped.host_waits == 0);
    CHECK_FALSE(mapped.fence.is_empty());
    rig.arena.give_back(again.range, {});
  }

  TEST_CASE("PageArena: adjacent ranges are mapped and unmapped by one call") {
    PageRig<false> rig{8};
    auto const before = rig.device.calls();
    Placement const all = rig.take(8);
    (void)rig.map(all);
    CHECK(rig.device.calls().maps - before.maps == 1);
    rig.arena.give_back(all.range, {});
    auto const segment = rig.arena.trim(8 * page);
    REQUIRE(segment);
    rig.arena.release(*segment);
    CHECK(rig.device.calls().unmaps - before.unmaps == 1);
    CHECK(rig.device.usage().device_bytes == 0);
  }

  TEST_CASE("PageArena: a range can be made of pages from anywhere") {
    PageRig<false> rig{6};
    std::vector<Placement> small;
    for (int i = 0; i < 6; ++i) {
      small.push_back(rig.take(1));
      (void)rig.map(small.back());
    }
    for (std::size_t const i : {0U, 2U, 4U}) {
      rig.arena.give_back(small[i].range, {});
    }
    CHECK(rig.arena.largest_free_bytes() == 3 * page);
    Placement const large = rig.take(3);
    CHECK(rig.map(large).host_waits == 0);
    rig.device.fill(large.address, 7, 3 * page, rig.stream);  // refused where nothing is mapped
    rig.device.run_all();
  }

  TEST_CASE(
      "PageArena: alternating leases of two ranges of one size map and unmap one piece each") {
    PageRig<true> rig{64, gpu_page};
    Placement const a = rig.take_parked(64);
    Placement const b = rig.take_parked(64);
    for (int i = 0; i < 3; ++i) {
      for (Placement const& placement : {a, b}) {
        SimCalls const calls = rig.calls_of([&] { rig.lease(placement); });
        CHECK(calls.maps == 1);
        CHECK(calls.mapped_pieces == 1);
        CHECK(calls.unmaps == 1);
        CHECK(calls.unmapped_pieces == 1);
        CHECK(calls.physical_creations == 0);
      }
    }
  }

  TEST_CASE("PageArena: alternating leases of ranges of several sizes soon create no new pieces") {
    PageRig<true> rig{64, gpu_page};
    Placement const a = rig.take_parked(64);
    Placement const b = rig.take_parked(48);
    Placement const c = rig.take_parked(1);
    auto const round = [&] {
      for (Placement const& placement : {a, b, c}) {
        rig.lease(placement);
      }
    };
    round();
    round();
    SimCalls const calls = rig.calls_of(round);
    CHECK(calls.physical_creations == 0);
    CHECK(calls.mapped_pieces <= 5);
    CHECK(calls.unmapped_pieces <= 5);
    CHECK(rig.arena.reserved_bytes() == 64 * gpu_page);
  }

  TEST_CASE("PageArena: pieces whose sizes add up are mapped unchanged if that takes less time") {
    PageRig<true> rig{64, gpu_page};
    Placement const halves[] = {rig.take_mapped(32), rig.take_mapped(32)};
    for (Placement const& half : halves) {
      rig.arena.park(half.range, {});
    }
    SimCalls const calls = rig.calls_of([&] { (void)rig.take_mapped(64); });
    CHECK(calls.mapped_pieces == 2);
    CHECK(calls.maps == 1);  // they have one size
    CHECK(calls.physical_creations == 0);
  }

  TEST_CASE("PageArena: one piece of the exact size is preferred to parts that are mapped there "
            "already") {
    PageRig<true> rig{8, gpu_page};
    Placement const three = rig.take_mapped(3);
    Placement const one = rig.take_mapped(1);
    Placement const four = rig.take_mapped(4);
    rig.arena.park(three.range, {});
    rig.arena.park(one.range, {});
    Placement const mixed = rig.take_parked(4);
    REQUIRE(rig.arena.try_retake(one.range));
    (void)rig.map(one);  // takes a part of it
    rig.arena.park(four.range, {});

    SimCalls const calls = rig.calls_of([&] {
      REQUIRE(rig.arena.try_retake(mixed.range));
      (void)rig.map(mixed);
    });
    CHECK(calls.physical_creations == 0);
    CHECK(calls.mapped_pieces == 1);
  }

  TEST_CASE("PageArena: on a full device, small pieces are replaced by a large one") {
    PageRig<true> rig{64, gpu_page};
    std::vector<Placement> small;
    for (int i = 0; i < 64; ++i) {
      small.push_back(rig.take_mapped(1));
    }
    for (Placement const& placement : small) {
      rig.arena.park(placement.range, {});
    }
    Placement large;
    SimCalls const calls = rig.calls_of([&] { large = rig.take_mapped(64); });
    CHECK(calls.mapped_pieces == 1);
    CHECK(calls.physical_creations == 1);
    CHECK(calls.physical_releases == 64);
    rig.arena.give_back(large.range, {});
    CHECK(rig.arena.free_bytes() == 64 * gpu_page);
    CHECK(rig.device.usage().device_bytes == 64 * gpu_page);
  }

  TEST_CASE("PageArena: a large piece is halved repeatedly to serve many small ranges") {
    PageRig<true> rig{64, gpu_page};
    SimCalls const calls = rig.calls_of([&] {
      for (int i = 0; i < 64; ++i) {
        (void)rig.take_mapped(1);
      }
    });
    CHECK(calls.physical_releases == 6);
    CHECK(calls.physical_creations == 64 + 5);
    CHECK(calls.mapped_pieces == 64);
  }

  TEST_CASE("PageArena: a piece is cut only after its last use has finished") {
    PageRig<true> rig{4};
    Placement const parked = rig.take_mapped(4);
    rig.arena.park(parked.range, rig.use(parked.address));
    Placement const small = rig.take(1);
    CHECK(rig.map(small).host_waits == 1);  // the device ends the program if it is unmapped before
    rig.arena.give_back(small.range, {});
  }

  TEST_CASE("PageArena: on a device with cheap pieces they are single pages, mapped in runs") {
    PageRig<true, CheapPieces> rig{8};
    Placement const small = rig.take_parked(3);
    Placement const large = rig.take_parked(8);
    SimCalls const calls = rig.calls_of([&] {
      rig.lease(small);
      rig.lease(large);
    });
    CHECK(rig.device.calls().physical_creations == 8);
    CHECK(rig.device.calls().physical_releases == 0);
    CHECK(calls.maps == 2);
    CHECK(calls.mapped_pieces == 6);
  }

  TEST_CASE("PageArena: pages mapped elsewhere are moved in runs if the device can do that") {
    PageRig<true, MovesMapped> rig{8};
    Placement const first = rig.take_parked(3);
    Placement const second = rig.take_parked(3);
    REQUIRE(rig.device.mapped.size() == 6);
    Placement const large = rig.take(8);
    SimCalls const calls = rig.calls_of([&] { (void)rig.map(large); });
    CHECK(rig.device.moved_pages == 6);
    CHECK(rig.device.moves == 1);  // the two lay side by side
    CHECK(calls.maps == 2);        // what was mapped nowhere, and the device's own for the move
    CHECK(rig.device.mapped.size() == 8);
    CHECK(rig.device.mapped.begin()->first == large.address);
    rig.arena.park(large.range, {});

    // One of these pages is kept at its address, the other three are moved.
    rig.lease(second);
    CHECK(rig.device.moved_pages == 9);
    CHECK(rig.device.mapped.count(first.address) == 0);
    CHECK(rig.device.mapped.count(second.address) == 1);
    rig.lease(second);
    CHECK(rig.device.moved_pages == 9);
  }

  TEST_CASE("PageArena: pages that could not be moved are available for the next attempt") {
    PageRig<true, MovesMapped> rig{4};
    Placement const from = rig.take_parked(4);
    Placement const to = rig.take(4);
    rig.device.fails = true;
    CHECK_THROWS_AS((void)rig.arena.map(to.range), DeviceError);
    CHECK(rig.device.mapped.empty());
    rig.arena.park(to.range, {});
    rig.device.fails = false;
    for (Placement const& placement : {from, to}) {
      rig.lease(placement);
      CHECK(rig.device.mapped.size() == 4);
      CHECK(rig.device.mapped.begin()->first == placement.address);
    }
  }

  TEST_CASE("PageArena: memory that others take while a piece is replaced is no longer counted as "
            "reserved") {
    PageRig<true, Shared<Device>> rig{8};
    Placement const kept = rig.take_mapped(2);
    rig.device.fill(kept.address, 7, 2 * page, rig.stream);
    rig.device.run_all();
    auto const expect_consistent = [&](std::size_t pages) {
      CHECK(rig.arena.reserved_bytes() == pages * page);
      CHECK(rig.device.usage().device_bytes - rig.device.bytes_of_others == pages * page);
    };

    // Of 6 pages others take 2: the 3 that are needed can be created, what is left cannot.
    rig.device.wanted_bytes = 2 * page;
    Placement const range = rig.take(3);
    CHECK(rig.arena.map(range.range).is_refused);
    rig.arena.give_back(range.range, {});
    expect_consistent(5);
    (void)rig.take_mapped(3);
    CHECK(rig.arena.free_bytes() == 0);

    rig.device.end_others();
    Segment growth = rig.arena.growth_for(3 * page);
    REQUIRE(growth.bytes == 3 * page);
    REQUIRE(rig.arena.try_reserve(growth));
    rig.arena.add_segment(growth);
    expect_consistent(8);

    // Of 3 pages others take 2: only what is left can be created, and the range stays parked.
    Placement const parked = rig.take_parked(3);
    rig.arena.park(rig.take_mapped(3).range, {});
    rig.device.wanted_bytes = 2 * page;
    Placement const other = rig.take(2);
    CHECK(rig.arena.map(other.range).is_refused);
    rig.arena.park(other.range, {});
    expect_consistent(6);
    CHECK_FALSE(rig.arena.try_retake(parked.range));
    CHECK_FALSE(rig.arena.try_retake(other.range));

    auto* const host = static_cast<unsigned char*>(rig.device.try_allocate_pinned(2 * page, -1));
    REQUIRE(host != nullptr);
    rig.device.copy(host, kept.address, 2 * page, CopyKind::to_host, rig.stream);
    rig.device.run_all();
    CHECK(std::count(host, host + 2 * page, 7) == 2 * page);
    rig.device.free_pinned(host, 2 * page);
    rig.device.end_others();
  }

  TEST_CASE("PageArena: memory that the device has no page tables for is given back to it") {
    PageRig<true, FewTables> rig{8};
    rig.device.mappings_left = 3;
    Placement const first = rig.take_mapped(2);
    Placement const second = rig.take_parked(3);
    Placement const parked = rig.take_parked(1);

    // Takes the two pages that were never mapped, and one of those that are parked.
    rig.device.mappings_left = 0;
    Placement const refused = rig.take(3);
    CHECK(rig.arena.map(refused.range).is_refused);
    rig.arena.park(refused.range, {});
    std::size_t const reserved_bytes = rig.arena.reserved_bytes();
    CHECK(reserved_bytes < 8 * page);
    CHECK(rig.device.usage().device_bytes == reserved_bytes);

    rig.device.mappings_left = 8;
    Segment growth = rig.arena.growth_for(6 * page);
    REQUIRE(rig.arena.try_reserve(growth));
    rig.arena.add_segment(growth);
    for (Placement const& placement : {second, parked}) {
      REQUIRE(rig.arena.try_retake(placement.range));
      (void)rig.map(placement);
    }
    CHECK(rig.device.usage().device_bytes == 8 * page);
    rig.device.fill(first.address, 1, 2 * page, rig.stream);
    rig.device.fill(second.address, 1, 3 * page, rig.stream);
  }

  TEST_CASE("PageArena: a piece that cannot be created is no longer counted as reserved") {
    PageRig<true> rig{8};
    Placement const kept = rig.take_mapped(2);
    Placement const range = rig.take(2);
    rig.device.fail(SimCall::create_physical, 1);
    CHECK_THROWS_AS((void)rig.arena.map(range.range), DeviceError);
    rig.arena.give_back(range.range, {});
    CHECK(rig.arena.reserved_bytes() == rig.device.usage().device_bytes);
    Segment growth = rig.arena.growth_for(6 * page);
    CHECK(rig.arena.try_reserve(growth));
    rig.arena.add_segment(growth);
    CHECK(rig.arena.reserved_bytes() == 8 * page);
    (void)rig.take_mapped(6);
    rig.arena.give_back(kept.range, {});
  }

  TEST_CASE("PageArena: if a wait fails, all memory stays where it is") {
    PageRig<true> rig{8};
    Placement const parked = rig.take_mapped(8);
    rig.arena.park(parked.range, rig.use(parked.address));
    Placement const range = rig.take(2);
    rig.device.fail(SimCall::synchronize, 1);
    CHECK_THROWS_AS((void)rig.arena.map(range.range), DeviceError);
    rig.arena.give_back(range.range, {});
    CHECK(rig.arena.reserved_bytes() == 8 * page);
    CHECK(rig.arena.free_bytes() == 8 * page);
    Placement const again = rig.take_mapped(3);
    CHECK(rig.device.usage().device_bytes == 8 * page);
    rig.arena.give_back(again.range, {});
    REQUIRE(rig.arena.try_retake(parked.range));
    (void)rig.map(parked);
    rig.arena.give_back(parked.range, {});
  }

  TEST_CASE("PageArena: trim hands over whole pieces, the smallest that suffice") {
    PageRig<true> rig{8};
    std::vector<Placement> ranges;
    for (std::size_t const pages : {5U, 2U, 1U}) {
      ranges.push_back(rig.take_mapped(pages));
    }
    for (Placement const& placement : ranges) {
      rig.arena.park(placement.range, {});
    }
    auto const trimmed = [&](std::size_t pages) {
      auto const segment = rig.arena.trim(pages * page);
      REQUIRE(segment);
      rig.arena.release(*segment);
      CHECK(rig.device.usage().device_bytes == rig.arena.reserved_bytes());
      return segment->bytes / page;
    };
    CHECK(trimmed(3) == 3);
    CHECK(trimmed(1) == 5);  // nothing smaller is left
    CHECK_FALSE(rig.arena.trim(page));
  }

  TEST_CASE(
      "PageArena: blocks of an allocator stay valid when others take memory that it released") {
    struct Policies : SimPolicies {
      using device = Shared<SimApi>;
      using arena = StableAddresses;
      using eviction = LruEviction;
      using prefetch = NoPrefetch;
      using observer = TrimWatch;
    };
    Policies::device device{SimOptions{.capacity_bytes = 8 * page, .granularity_bytes = page}};
    using Allocator = DeviceAllocator<Policies>;
    auto const stream = device.create_stream();
    Allocator::Options options{.capacity_bytes = 8 * page};
    options.host.pinned_bytes = 1_MiB;
    options.paging.lease_wait = {};
    {
      Allocator memory{device, options};
      auto* const host = static_cast<unsigned char*>(device.try_allocate_pinned(8 * page, -1));
      REQUIRE(host != nullptr);
      using Buffer = SwappableBuffer<Allocator>;
      auto const write = [&](Buffer& buffer, int byte) {
        device.fill(buffer.acquire(Access::write, stream).data(),
                    static_cast<unsigned char>(byte),
                    buffer.size_bytes(),
                    stream);
      };
      auto const holds = [&](Buffer& buffer, int byte) {
        std::size_t const bytes = buffer.size_bytes();
        auto const lease = buffer.acquire(Access::read, stream);
        device.copy(host, lease.data(), bytes, CopyKind::to_host, stream);
        device.synchronize(stream);
        return std::count(host, host + bytes, byte) == static_cast<std::ptrdiff_t>(bytes);
      };
      Buffer large{memory, 8 * page};
      write(large, 3);

      device.wanted_bytes = 2 * page;  // of the 8 pages: half of them can be created
      Buffer small{memory, 4 * page};
      write(small, 4);
      CHECK(device.bytes_of_others == 2 * page);
      CHECK(memory.stats().reserved_bytes == 4 * page);
      CHECK(memory.observer().trimmed_bytes == 4 * page);
      CHECK_THROWS_AS((void)large.acquire(Access::read, stream), OutOfDeviceMemory);
      CHECK(holds(small, 4));
      device.end_others();
      CHECK(holds(large, 3));  // in two pieces
      CHECK(memory.stats().reserved_bytes == 8 * page);

      device.wanted_bytes = 2 * page;  // of a piece of 4: the 3 are made of the other piece then
      Buffer smallest{memory, 3 * page};
      write(smallest, 5);
      CHECK(device.bytes_of_others == 2 * page);
      CHECK(memory.stats().reserved_bytes == 5 * page);
      CHECK(holds(small, 4));
      CHECK(holds(smallest, 5));
      device.end_others();
      CHECK(holds(large, 3));
      CHECK(holds(smallest, 5));
      device.free_pinned(host, 8 * page);
      memory.retire_stream(stream);
    }
    device.destroy_stream(stream);
  }

  TEST_CASE("PageArena: a page is mapped elsewhere only after its last use has finished") {
    PageRig<true> rig{2};
    Placement const parked = rig.take(2);
    (void)rig.map(parked);
    rig.arena.park(parked.range, rig.use(parked.address));
    Placement const other = rig.take(2);
    REQUIRE(other.address != parked.address);
    CHECK(rig.map(other).host_waits == 1);
    CHECK_FALSE(rig.arena.try_retake(parked.range));  // its pages serve others

    rig.arena.give_back(other.range, {});
    auto const back = rig.arena.try_retake(parked.range);
    REQUIRE(back);
    CHECK(back->address == parked.address);
    CHECK(rig.map(*back).host_waits == 0);
    rig.arena.give_back(back->range, {});
  }

  TEST_CASE("PageArena: pages that have been free for longest are handed over first") {
    PageRig<false> rig{3};
    Placement const first = rig.take(1);
    Placement const second = rig.take(1);
    Placement const third = rig.take(1);
    for (Placement const& placement : {first, second, third}) {
      (void)rig.map(placement);
    }
    rig.arena.give_back(second.range, {});
    rig.arena.give_back(first.range, {});
    auto const segment = rig.arena.trim(page);
    REQUIRE(segment);
    rig.arena.release(*segment);

    auto const before = rig.device.calls();
    Placement const again = rig.take(1);
    (void)rig.map(again);
    CHECK(again.address == first.address);
    CHECK(rig.device.calls().maps == before.maps);  // the page of `first` is still there
  }

  TEST_CASE("PageArena: pages handed over twice are released each after its own last uses") {
    PageRig<false> rig{3};
    Placement const idle = rig.take(1);
    Placement const busy = rig.take(1);
    (void)rig.map(idle);
    (void)rig.map(busy);
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

  TEST_CASE_TEMPLATE("PageArena: agrees with a model that counts each page, in any order of calls",
                     Rig,
                     PageRig<false>,
                     PageRig<true>,
                     PageRig<false, Shared<Device>>,
                     PageRig<true, Shared<Device>>,
                     PageRig<true, CheapPieces>,
                     PageRig<true, MovesMapped>) {
    constexpr bool parks = Rig::is_stable;
    constexpr bool is_shared = requires(Rig rig) {
      rig.device.wanted_bytes;
    };
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
    std::size_t lost = 0;  // pieces that others took
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
    auto const bytes_of_others = [&]() -> std::size_t {
      if constexpr (is_shared) {
        return rig.device.bytes_of_others;
      } else {
        return 0;
      }
    };
    // Maps the range, which only a shared device may refuse, and writes it; what was there before
    // may still be read.
    auto const fill = [&](Range& range) {
      if constexpr (is_shared) {
        std::size_t const left = most * page - rig.device.usage().device_bytes;
        rig.device.wanted_bytes = random() % 2 == 0 ? left + (1 + random() % 3) * page : 0;
      }
      MappedRange const mapped = arena.map(range.placement.range);
      if constexpr (is_shared) {
        rig.device.wanted_bytes = 0;
      }
      if (mapped.is_refused) {
        REQUIRE(bytes_of_others() != 0);
        return false;
      }
      range.on = random() % 2;
      rig.order.wait(indices[range.on], mapped.fence);
      range.byte = static_cast<unsigned char>(random());
      rig.device.fill(range.placement.address, range.byte, range.pages * page, streams[range.on]);
      return true;
    };
    // What a map that was refused has left is what the arena says; the device's count must agree.
    auto const count_lost = [&] {
      REQUIRE(arena.reserved_bytes() < reserved * page);
      reserved = arena.reserved_bytes() / page;
      ++lost;
    };
    for (int i = 0; i < 6000; ++i) {
      CAPTURE(i);
      auto const at = ranges.begin() +
                      static_cast<std::ptrdiff_t>(ranges.empty() ? 0 : random() % ranges.size());
      if constexpr (is_shared) {
        if (random() % 4 == 0) {
          rig.device.end_others();
        }
      }
      switch (random() % 8) {
      case 0:
      case 1: {
        std::size_t const pages = 1 + random() % longest;
        auto const placement = arena.try_take(pages * page, BlockId{1});
        REQUIRE(placement.has_value() == (pages <= usable()));
        if (placement && !fill(ranges.emplace_back(Range{*placement, pages}))) {
          arena.give_back(placement->range, {});
          ranges.pop_back();
          count_lost();
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
              at->is_parked = !fill(*at);
              if (at->is_parked) {
                arena.park(at->placement.range, {});
                count_lost();
              }
            }
          }
        }
        break;
      case 4: {
        std::size_t const wanted = 1 + random() % 6;
        std::size_t const free = reserved - taken();
        auto const segment = arena.trim(wanted * page);
        REQUIRE(segment.has_value() == (free != 0));
        if (segment) {
          REQUIRE(segment->bytes >= std::min(wanted, free) * page);
          REQUIRE(segment->bytes <= free * page);
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
        bool const has_room =
            reserved + leaving_pages() + (growth.bytes + bytes_of_others()) / page <= most;
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
      REQUIRE(rig.device.usage().device_bytes ==
              (reserved + leaving_pages()) * page + bytes_of_others());
    }
    rig.device.run_all();
    rig.device.free_pinned(host, longest * page);
    if constexpr (is_shared) {
      rig.device.end_others();
    }
    CHECK(trims > 100);
    CHECK(refused > 20);
    CHECK((lost > 20) == is_shared);
  }

  TEST_CASE("PageArena: nothing is mapped where the device takes memory away before that is done") {
    PageRig<true> rig{3};
    Placement const vacated = rig.take_mapped(1);
    Placement const other = rig.take_mapped(1);
    rig.device.unmap(vacated.address, page);  // as a device does that vacates in stream order
    rig.arena.park_vacated(vacated.range, rig.use(other.address));

    // It gets the page that was never used. Only its address has to be waited for.
    REQUIRE(rig.arena.try_retake(vacated.range));
    CHECK(rig.map(vacated).host_waits == 1);

    rig.device.unmap(vacated.address, page);
    rig.arena.park_vacated(vacated.range, rig.use(other.address));
    rig.arena.release(vacated.range);
    Placement const next = rig.take(1);
    REQUIRE(next.address == vacated.address);
    CHECK(rig.map(next).host_waits == 1);
    rig.arena.give_back(next.range, {});
  }

  TEST_CASE("PageArena: pages that are handed over count until they are released") {
    Device device{{.capacity_bytes = 8 * page, .granularity_bytes = page}};
    StreamOrder<Device> order{device};
    PageArena<Device, SegregatedFit, false> arena{device, order, {.capacity_bytes = 3 * page}};
    auto const leaving = arena.trim();
    REQUIRE(leaving);
    Segment segment = arena.growth_for(3 * page);
    REQUIRE(segment.bytes == 3 * page);
    CHECK_FALSE(arena.try_reserve(segment));
    arena.release(*leaving);
    CHECK(arena.try_reserve(segment));
    arena.add_segment(segment);
    CHECK(device.usage().device_bytes == 3 * page);
  }

  TEST_CASE("PageArena: if one of several pieces cannot be created, none is kept") {
    CheapPieces device{{.capacity_bytes = 4 * page, .granularity_bytes = page}};
    StreamOrder<CheapPieces> order{device};
    PageArena<CheapPieces, SegregatedFit, false> arena{
        device, order, {.capacity_bytes = 8 * page, .initial_bytes = 0, .growth_bytes = page}};
    Segment segment = arena.growth_for(8 * page);
    CHECK_FALSE(arena.try_reserve(segment));
    CHECK(device.usage().device_bytes == 0);
    device.fail(SimCall::create_physical, 3);
    CHECK_THROWS_AS((void)arena.try_reserve(segment), DeviceError);
    CHECK(device.usage().device_bytes == 0);
    segment = arena.growth_for(4 * page);
    REQUIRE(arena.try_reserve(segment));
    arena.add_segment(segment);
    CHECK(arena.free_bytes() == 4 * page);
  }

  TEST_CASE("PageArena: a device that runs out of pages halfway keeps none") {
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

  TEST_CASE("PageArena: a capacity of too many pages is refused with a reason") {
    Device device{{.granularity_bytes = page}};
    StreamOrder<Device> order{device};
    CHECK_THROWS_WITH_AS(
        (PageArena<Device, SegregatedFit, true>{
            device, order, {.capacity_bytes = (std::size_t{1} << 26U) * page, .initial_bytes = 0}}),
        doctest::Contains("make pages larger"),
        ContractViolation);
  }

  TEST_CASE("PageArena: pages larger than any memory are refused with a reason") {
    Device device{{.granularity_bytes = page}};
    StreamOrder<Device> order{device};
    constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
    for (std::size_t const page_bytes : {most, most / 2 + 2, most / 2 + 1, most / 2}) {
      CAPTURE(page_bytes);
      CHECK_THROWS_WITH_AS((PageArena<Device, SegregatedFit, true>{
                               device, order, {.capacity_bytes = 1_GiB, .page_bytes = page_bytes}}),
                           doctest::Contains("at least one page"),
                           ContractViolation);
    }
  }

  TEST_CASE("PageArena: a capacity for which there are not enough addresses is refused") {
    Device device{{.granularity_bytes = page}};
    StreamOrder<Device> order{device};
    for (unsigned const bits : {58U, 59U, 63U}) {
      CAPTURE(bits);
      CHECK_THROWS_WITH_AS(
          (PageArena<Device, SegregatedFit, true>{device,
                                                  order,
                                                  {.capacity_bytes = std::size_t{1} << bits,
                                                   .initial_bytes = 0,
                                                   .page_bytes = std::size_t{1} << 40U}}),
          doctest::Contains("not enough addresses"),
          ContractViolation);
    }
  }

  TEST_CASE("PageArena: requests larger than any memory are refused") {
    PageRig<false> rig{4};
    constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
    CHECK_FALSE(rig.arena.try_take(most, BlockId{1}));
    CHECK_FALSE(rig.arena.try_take(most - page, BlockId{1}));
    CHECK(rig.arena.growth_for(most).bytes == 0);
    CHECK_THROWS_AS((void)rig.arena.try_take(0, BlockId{1}), ContractViolation);
  }
}
