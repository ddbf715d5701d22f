// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/arena.hpp>
#include <spillway/concepts/policy_set.hpp>
#include <spillway/defrag_arena.hpp>
#include <spillway/device/host/host_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/page_arena.hpp>
#include <spillway/policies.hpp>
#include <spillway/sim.hpp>
#include <spillway/stream/stream_order.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <type_traits>
#include <vector>

#include <support/concept_checks.hpp>

// Which concepts the library's arenas model, and which types are refused as arenas. Then minimal
// arenas, which have none or one of the optional abilities and only what the concept requires: an
// allocator must run on them.

namespace {

using namespace spillway;

using Moving = DefragArena<SimApi>;
using Mapping = PageArena<SimApi, SegregatedFit, false>;
using Stable = PageArena<SimApi, SegregatedFit, true>;

static_assert(Arena<Moving> && GrowingArena<Moving> && MovingArena<Moving>);
static_assert(!MappingArena<Moving> && !StableAddressArena<Moving>);
static_assert(Arena<Mapping> && MappingArena<Mapping> && !StableAddressArena<Mapping>);
static_assert(GrowingArena<Mapping> && !MovingArena<Mapping>);
static_assert(MappingArena<Stable> && StableAddressArena<Stable>);
static_assert(GrowingArena<Stable> && !MovingArena<Stable>);

/// A minimal arena: takes the first free place that fits in its one reservation.
template <class Device>
class FirstFitArena {
 public:
  using device_type = Device;

  FirstFitArena(Device& device, ArenaOptions const& options)
      : device_{device},
        bytes_{options.capacity_bytes},
        capacity_bytes_{bytes_},
        base_{static_cast<std::byte*>(device.try_reserve(bytes_))} {}
  FirstFitArena(FirstFitArena const&) = delete;
  FirstFitArena& operator=(FirstFitArena const&) = delete;
  ~FirstFitArena() { device_.release(base_, bytes_); }

  [[nodiscard]] std::optional<Placement> try_take(std::size_t bytes, BlockId owner) {
    std::size_t const rounded = rounded_bytes(bytes);
    std::size_t at = 0;
    for (auto const& [begin, range] : taken_) {
      if (begin - at >= rounded) {
        break;
      }
      at = begin + range.bytes;
    }
    if (bytes_ - at < rounded || rounded > free_bytes()) {
      return std::nullopt;
    }
    RangeId const id{++last_};
    taken_[at] = {rounded, owner, id};
    return Placement{id, base_ + at, last_uses_};
  }
  void give_back(RangeId range, Fence const& fence) noexcept {
    last_uses_.add(fence);
    taken_.erase(begin_of(range));
  }
  [[nodiscard]] std::size_t rounded_bytes(std::size_t bytes) const noexcept {
    return round_up(bytes, granule_bytes);
  }
  [[nodiscard]] std::byte* address(RangeId range) const noexcept {
    return base_ + begin_of(range)->first;
  }
  [[nodiscard]] std::size_t reservation(RangeId /*range*/) const noexcept { return 1; }
  [[nodiscard]] std::size_t capacity_bytes() const noexcept { return capacity_bytes_; }
  void set_capacity(std::size_t bytes) { capacity_bytes_ = bytes / granule_bytes * granule_bytes; }
  [[nodiscard]] std::size_t reserved_bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::size_t free_bytes() const noexcept {
    std::size_t taken = 0;
    for (auto const& [begin, range] : taken_) {
      taken += range.bytes;
    }
    return capacity_bytes_ - std::min(capacity_bytes_, taken);
  }
  [[nodiscard]] std::size_t largest_free_bytes() const noexcept {
    std::size_t largest = 0;
    std::size_t at = 0;
    for (auto const& [begin, range] : taken_) {
      largest = std::max(largest, begin - at);
      at = begin + range.bytes;
    }
    return std::min(free_bytes(), std::max(largest, bytes_ - at));
  }
  template <class Visit>
  void for_each_range(Visit visit) const {
    for (auto const& [begin, range] : taken_) {
      visit(RangeView{base_ + begin, range.bytes, 0, RangeState::taken, range.owner, range.id});
    }
  }

 protected:
  [[nodiscard]] Fence const& last_uses() const noexcept { return last_uses_; }

 private:
  struct Range {
    std::size_t bytes = 0;
    BlockId owner{};
    RangeId id{};
  };
  using Ranges = std::map<std::size_t, Range>;

  [[nodiscard]] typename Ranges::const_iterator begin_of(RangeId range) const noexcept {
    return std::find_if(
        taken_.begin(), taken_.end(), [&](auto const& entry) { return entry.second.id == range; });
  }

  Device& device_;
  std::size_t bytes_;
  std::size_t capacity_bytes_;
  std::byte* base_;
  Ranges taken_;  // by offset
  Fence last_uses_;
  std::uint32_t last_ = 0;
};

struct FirstFit {
  template <class Policies>
  using type = FirstFitArena<typename Policies::device>;
};

/// An arena that may be asked for plans and finds none.
template <class Device>
class UnmovedArena : public FirstFitArena<Device> {
 public:
  struct plan_type {
    std::vector<Move> moves;
    std::size_t cost_bytes = 0;
    std::size_t makes_bytes = 0;
    Bounce bounce;
    Fence fence;
  };

  using FirstFitArena<Device>::FirstFitArena;

  template <class CanMove>
  [[nodiscard]] std::optional<plan_type>
  plan_compaction(std::size_t, std::size_t, CanMove const&, std::size_t) {
    return std::nullopt;
  }
  template <class CanMove>
  [[nodiscard]] std::optional<plan_type> plan_pass(std::size_t, CanMove const&) {
    return std::nullopt;
  }
  template <class CanMove>
  [[nodiscard]] std::optional<plan_type> plan_slide(CanMove const&) {
    return std::nullopt;
  }
  void begin_moves(plan_type&) {}
  void commit_moves(plan_type&, std::size_t, Fence const&) noexcept {}
  template <class Cost>
  [[nodiscard]] std::optional<EvictionWindow>
  cheapest_window(std::size_t, Cost const&, std::size_t) {
    return std::nullopt;
  }
  [[nodiscard]] std::size_t few_ranges() const noexcept { return 100; }
  [[nodiscard]] std::size_t first_search(std::size_t) const noexcept { return all_ranges; }
  [[nodiscard]] std::size_t wider_search(std::size_t) const noexcept { return all_ranges; }
  [[nodiscard]] std::size_t spare_bytes(std::size_t) const noexcept { return 0; }
};

/// An arena that models `MappingArena`, although its memory is mapped from the beginning.
template <class Device>
class MappedArena : public FirstFitArena<Device> {
 public:
  MappedArena(Device& device, StreamOrder<Device>& /*order*/, ArenaOptions const& options)
      : FirstFitArena<Device>{device, options} {}

  [[nodiscard]] MappedRange map(RangeId /*range*/) { return {this->last_uses()}; }
};

struct Unmoved {
  template <class Policies>
  using type = UnmovedArena<typename Policies::device>;
};
struct Mapped {
  template <class Policies>
  using type = MappedArena<typename Policies::device>;
};

using Plain = FirstFitArena<SimApi>;
static_assert(Arena<Plain> && !GrowingArena<Plain> && !MovingArena<Plain> && !MappingArena<Plain>);

using OnlyMoving = UnmovedArena<SimApi>;
static_assert(MovingArena<OnlyMoving> && !GrowingArena<OnlyMoving> && !MappingArena<OnlyMoving>);
using OnlyMapping = MappedArena<SimApi>;
static_assert(MappingArena<OnlyMapping> && !GrowingArena<OnlyMapping> && !MovingArena<OnlyMapping>);
static_assert(!StableAddressArena<OnlyMapping>);

// Each lacks one requirement of the concept.
struct GiveBackMayThrow : Plain {
  void give_back(RangeId, Fence const&);
};
static_assert(!Arena<GiveBackMayThrow>);
struct TakesWithoutPlacement : Plain {
  [[nodiscard]] std::byte* try_take(std::size_t, BlockId);
};
static_assert(!Arena<TakesWithoutPlacement>);
struct MapsToNothing : Plain {
  void map(RangeId);
};
static_assert(Arena<MapsToNothing> && !MappingArena<MapsToNothing>);
struct TrimMayThrow : Moving {
  std::optional<Segment> trim(std::size_t);
};
static_assert(MovingArena<TrimMayThrow> && !GrowingArena<TrimMayThrow>);
struct ArenaVisitsByReference : Plain {
  template <class Visit>
  void for_each_range(Visit&) const {}
};
static_assert(!Arena<ArenaVisitsByReference>, "it is called with temporaries");
struct PlansByReference : Moving {
  template <class CanMove>
  std::optional<CompactionPlan> plan_pass(std::size_t, CanMove&);
};
static_assert(Arena<PlansByReference> && !MovingArena<PlansByReference>);
struct CapacityIsFixed : Plain {
  void set_capacity(std::size_t) = delete;
};
static_assert(!Arena<CapacityIsFixed>);
struct CommitMayThrow : Moving {
  void commit_moves(CompactionPlan&, std::size_t, Fence const&);
};
static_assert(GrowingArena<CommitMayThrow> && !MovingArena<CommitMayThrow>);
struct ParkMayThrow : Stable {
  void park(RangeId, Fence const&);
};
static_assert(MappingArena<ParkMayThrow> && !StableAddressArena<ParkMayThrow>);
static_assert(!Arena<int> && !Arena<SimApi>);

// The arena is chosen by an alias of its own, on the device of the bundle that is used.
template <class Choice>
struct With : SimPolicies {
  using arena = Choice;
};
struct OnHost : SimPolicies {
  using device = HostApi;
};
struct StableOnHost : OnHost {
  using arena = StableAddresses;
};
struct NotAnArena {
  template <class Policies>
  using type = int;
};
static_assert(std::is_same_v<ArenaOf<SimPolicies>, Moving>);
static_assert(std::is_same_v<ArenaOf<OnHost>, DefragArena<HostApi>>);
static_assert(std::is_same_v<ArenaOf<With<MappedPages>>, Mapping>);
static_assert(std::is_same_v<ArenaOf<With<StableAddresses>>, Stable>);
static_assert(PolicySet<With<FirstFit>> && PolicySet<With<MappedPages>> && PolicySet<OnHost>);
static_assert(!PolicySet<With<NotAnArena>> && !PolicySet<With<int>>);
static_assert(!PolicySet<StableOnHost>, "HostApi has no virtual memory");

/// An arena that takes memory when it is needed.
template <class A>
struct GrowingRig {
  explicit GrowingRig(bool in_place)
      : arena{testing::make_arena<A>(device,
                                     order,
                                     {.capacity_bytes = 2_MiB,
                                      .initial_bytes = 0,
                                      .growth_bytes = 64_KiB,
                                      .grows_in_place = in_place,
                                      .bounce_bytes = 0})} {}

  /// @returns whether anything was taken
  bool grow(std::size_t bytes) {
    Segment segment = arena.growth_for(bytes);
    if (segment.bytes == 0 || !arena.try_reserve(segment)) {
      return false;
    }
    arena.add_segment(segment);
    return true;
  }
  std::size_t trim(std::size_t bytes) {
    auto const segment = arena.trim(bytes);
    if (segment) {
      arena.release(*segment);
    }
    return segment ? segment->bytes : 0;
  }
  std::optional<Placement> take(std::size_t bytes, BlockId id) {
    auto placement = arena.try_take(bytes, id);
    while (!placement && grow(bytes)) {
      placement = arena.try_take(bytes, id);
    }
    if constexpr (MappingArena<A>) {
      if (placement) {
        (void)arena.map(placement->range);
      }
    }
    return placement;
  }
  /// Blocks of 128 KiB that fill 2 MiB.
  std::vector<Placement> take_all() {
    std::vector<Placement> taken;
    for (std::uint64_t i = 0; i < 16; ++i) {
      taken.push_back(*take(128_KiB, BlockId{i + 1}));
    }
    return taken;
  }
  [[nodiscard]] std::size_t used_bytes() const {
    MemoryInfo const info = device.memory_info();
    return info.total_bytes - info.free_bytes;
  }

  SimApi device{{.capacity_bytes = 8_MiB, .granularity_bytes = 16_KiB}};
  StreamOrder<SimApi> order{device};
  A arena;
};

}  // namespace

TEST_SUITE("arena_concept") {
  TEST_CASE_TEMPLATE_INVOKE(arena_contract, Plain, Moving, Mapping, Stable);

  TEST_CASE_TEMPLATE("GrowingArena: takes memory when it is needed and gives back what is free",
                     A,
                     Moving,
                     Mapping,
                     Stable) {
    for (bool const in_place : {false, true}) {
      GrowingRig<A> rig{in_place};
      A& arena = rig.arena;
      CHECK(rig.used_bytes() == 0);
      auto const first = rig.take(100'000, BlockId{1});
      REQUIRE(first);
      CHECK(arena.reserved_bytes() < 200'000);
      CHECK(rig.used_bytes() == arena.reserved_bytes());
      auto const second = rig.take(1_MiB, BlockId{2});
      REQUIRE(second);
      CHECK(rig.used_bytes() == arena.reserved_bytes());
      arena.set_capacity(arena.reserved_bytes());
      CHECK(arena.growth_for(2_MiB).bytes == 0);
      arena.set_capacity(2_MiB);
      CHECK(rig.trim(2_MiB) + 1_MiB + 128_KiB >= arena.reserved_bytes());
      arena.give_back(second->range, {});
      while (rig.trim(2_MiB) != 0) {
      }
      CHECK(arena.reserved_bytes() >= 100'000);
      CHECK(arena.reserved_bytes() < 200'000);
      CHECK(rig.used_bytes() == arena.reserved_bytes());
      arena.give_back(first->range, {});
      while (rig.trim(2_MiB) != 0) {
      }
      CHECK(arena.reserved_bytes() == 0);
      CHECK(rig.used_bytes() == 0);
      CHECK(arena.free_bytes() == 0);
      auto const third = rig.take(2_MiB, BlockId{3});
      CHECK(third);
    }
  }

  TEST_CASE_TEMPLATE(
      "GrowingArena: predicts the largest free range after growth", A, Moving, Mapping, Stable) {
    for (bool const in_place : {false, true}) {
      CAPTURE(in_place);
      bool const joins = in_place || MappingArena<A>;
      GrowingRig<A> rig{in_place};
      A& arena = rig.arena;
      CHECK(arena.largest_bytes_after_growth(8_MiB) == 2_MiB);
      CHECK(arena.largest_bytes_after_growth(100'000) / 16_KiB == 100'000 / 16_KiB);
      auto const low = rig.take(512_KiB, BlockId{1});
      auto const high = rig.take(512_KiB, BlockId{2});
      REQUIRE((low && high));
      CHECK(arena.largest_bytes_after_growth(0) == 0);
      arena.give_back(high->range, {});

      CHECK(arena.largest_bytes_after_growth(0) == 512_KiB);
      CHECK(arena.largest_bytes_after_growth(8_MiB) == (joins ? 1_MiB + 512_KiB : 1_MiB));
      arena.set_capacity(1_MiB + 256_KiB);
      CHECK(arena.largest_bytes_after_growth(8_MiB) == (joins ? 768_KiB : 512_KiB));
      arena.set_capacity(768_KiB);
      CHECK(arena.largest_bytes_after_growth(8_MiB) == 256_KiB);
      arena.set_capacity(2_MiB);

      std::size_t const largest = arena.largest_bytes_after_growth(8_MiB);
      CHECK(rig.take(largest, BlockId{3}));
      CHECK(arena.largest_bytes_after_growth(8_MiB) == arena.largest_free_bytes());
    }
  }

  TEST_CASE("GrowingArena: an arena that grows in place has one segment, also after a trim in its "
            "middle") {
    GrowingRig<Moving> rig{true};
    std::vector<Placement> const taken = rig.take_all();
    CHECK(rig.arena.reserved_bytes() == 2_MiB);
    CHECK(rig.arena.stats().segments == 1);
    for (std::size_t i = 4; i < 12; ++i) {
      rig.arena.give_back(taken[i].range, {});
    }
    CHECK(rig.arena.largest_free_bytes() == 1_MiB);
    // Memory in the middle is released, and reserved again at the same place.
    CHECK(rig.trim(512_KiB) == 512_KiB);
    CHECK(rig.arena.reserved_bytes() == 1_MiB + 512_KiB);
    CHECK(rig.used_bytes() == 1_MiB + 512_KiB);
    CHECK(rig.arena.largest_free_bytes() == 512_KiB);
    std::size_t shown = 0;
    rig.arena.for_each_range([&](RangeView const& range) {
      CHECK(range.state != RangeState::hole);
      shown += range.size_bytes;
    });
    CHECK(shown == 1_MiB + 512_KiB);
    auto const across = rig.take(1_MiB, BlockId{99});
    REQUIRE(across);
    CHECK(rig.arena.reserved_bytes() == 2_MiB);
  }

  TEST_CASE("GrowingArena: growth that fills a hole joins the free ranges on both sides of it") {
    GrowingRig<Moving> rig{true};
    Moving& arena = rig.arena;
    std::vector<Placement> const taken = rig.take_all();
    for (std::size_t i = 4; i < 12; ++i) {
      arena.give_back(taken[i].range, {});
    }
    REQUIRE(rig.trim(512_KiB) == 512_KiB);  // the upper half of what is free
    arena.give_back(taken[12].range, {});
    arena.give_back(taken[13].range, {});

    CHECK(arena.largest_bytes_after_growth(100'000) == 512_KiB + 96_KiB);  // whole granularities
    CHECK(arena.largest_bytes_after_growth(512_KiB - 1) == 1_MiB - 16_KiB);
    CHECK(arena.largest_bytes_after_growth(512_KiB) == 1_MiB + 256_KiB);
    Segment const growth = arena.growth_for(1_MiB + 256_KiB);
    CHECK(growth.address == taken[8].address);
    CHECK(growth.bytes == 512_KiB);
    CHECK(rig.take(1_MiB + 256_KiB, BlockId{99}));
  }

  TEST_CASE("GrowingArena: grows in the lowest hole that makes enough room, otherwise in the "
            "lowest hole") {
    GrowingRig<Moving> rig{true};
    Moving& arena = rig.arena;
    std::vector<Placement> const taken = rig.take_all();
    for (std::size_t const i : {2U, 3U, 6U, 7U, 8U, 9U, 11U, 12U, 13U, 14U}) {
      arena.give_back(taken[i].range, {});
    }
    while (rig.trim(2_MiB) != 0) {
    }
    CHECK(arena.growth_for(128_KiB).address == taken[2].address);
    CHECK(arena.growth_for(256_KiB).address == taken[2].address);
    CHECK(arena.growth_for(256_KiB + 1).address == taken[6].address);
    CHECK(arena.growth_for(512_KiB).address == taken[6].address);
    CHECK(arena.growth_for(2_MiB).address == taken[2].address);
  }

  TEST_CASE_TEMPLATE("GrowingArena: memory handed over by trim and not yet released is not reused",
                     A,
                     Moving,
                     Mapping,
                     Stable) {
    for (bool const in_place : {false, true}) {
      CAPTURE(in_place);
      GrowingRig<A> rig{in_place};
      A& arena = rig.arena;
      std::vector<Placement> const taken = rig.take_all();
      for (Placement const& placement : taken) {
        arena.give_back(placement.range, {});
      }
      auto const first = arena.trim(256_KiB);
      auto const second = arena.trim(256_KiB);
      REQUIRE((first && second));
      std::size_t const handed_over = first->bytes + second->bytes;
      REQUIRE(handed_over < 2_MiB);
      CHECK(arena.reserved_bytes() == 2_MiB - handed_over);
      // The arena may grow elsewhere, but not where this memory still is.
      auto const grow_fully = [&] { return rig.grow(2_MiB) || rig.grow(handed_over); };
      std::size_t const grown = grow_fully() ? handed_over : 0;
      CHECK(rig.used_bytes() == 2_MiB + grown);
      CHECK(arena.reserved_bytes() == 2_MiB - handed_over + grown);

      arena.release(*first);
      CHECK(rig.used_bytes() == 2_MiB + grown - first->bytes);
      arena.release(*second);
      CHECK(rig.used_bytes() == 2_MiB + grown - handed_over);
      if (grown == 0) {
        CHECK(grow_fully());
      }
      CHECK(arena.reserved_bytes() == 2_MiB);
      CHECK(rig.used_bytes() == 2_MiB);
    }
  }

  TEST_CASE("GrowingArena: growth in place is refused where memory is mapped already") {
    GrowingRig<Moving> rig{true};
    Moving& arena = rig.arena;
    Segment segment = arena.growth_for(128_KiB);
    REQUIRE(arena.try_reserve(segment));
    arena.add_segment(segment);
    ArenaStats const before = arena.stats();
    CHECK_THROWS_AS(arena.add_segment(segment), ContractViolation);  // mapped already
    CHECK_THROWS_AS(arena.add_segment(Segment{}), ContractViolation);
    Segment behind = arena.growth_for(1_MiB);
    behind.bytes = 0;
    CHECK_THROWS_AS(arena.add_segment(behind), ContractViolation);
    CHECK(arena.stats() == before);

    std::vector<Placement> const taken = rig.take_all();
    arena.give_back(taken[3].range, {});
    arena.give_back(taken[15].range, {});
    while (rig.trim(2_MiB) != 0) {
    }
    REQUIRE(arena.reserved_bytes() == 2_MiB - 256_KiB);
    Segment hole{taken[3].address, 256_KiB, {}};
    CHECK_THROWS_AS(arena.add_segment(hole), ContractViolation);  // memory of half the size
    hole.bytes = 128_KiB;
    REQUIRE(arena.try_reserve(hole));
    arena.add_segment(hole);
    CHECK(arena.largest_free_bytes() == 128_KiB);
  }

  TEST_CASE("GrowingArena: capacities that cannot be reserved in place are refused") {
    SimApi device{{.capacity_bytes = 8_MiB, .granularity_bytes = 64_KiB}};
    ArenaOptions options{
        .initial_bytes = 0, .growth_bytes = 64_KiB, .grows_in_place = true, .bounce_bytes = 0};
    // The second is below 1 TiB until it is rounded up to the granularity.
    for (std::size_t const bytes : {64_KiB - 256, (std::size_t{1} << 40U) - 512}) {
      CAPTURE(bytes);
      options.capacity_bytes = bytes;
      CHECK_THROWS_AS((Moving{device, options}), ContractViolation);
    }
    options.capacity_bytes = (std::size_t{1} << 40U) - 64_KiB;
    Moving arena{device, options};
    CHECK(arena.growth_for(1).bytes == 64_KiB);
  }

  TEST_CASE("GrowingArena: a failed growth on a full device loses nothing") {
    SimApi device{{.capacity_bytes = 256_KiB, .granularity_bytes = 16_KiB}};
    Moving arena{device,
                 {.capacity_bytes = 2_MiB,
                  .initial_bytes = 0,
                  .growth_bytes = 64_KiB,
                  .grows_in_place = true,
                  .bounce_bytes = 0}};
    Segment segment = arena.growth_for(1_MiB);
    REQUIRE(segment.bytes == 1_MiB);
    CHECK(!arena.try_reserve(segment));
    CHECK(device.memory_info().free_bytes == 256_KiB);
    segment = arena.growth_for(128_KiB);
    REQUIRE(arena.try_reserve(segment));
    arena.add_segment(segment);
    CHECK(arena.free_bytes() == 128_KiB);
  }

  TEST_CASE("Arena: default construction works for policies with explicit constructors") {
    struct ExplicitFit : SegregatedFit {
      explicit ExplicitFit(int = 3) {}
    };
    struct ExplicitCompaction : SlidingCompaction {
      explicit ExplicitCompaction(int = 3) {}
    };
    SimApi device{{.capacity_bytes = 8_MiB, .granularity_bytes = 64_KiB}};
    StreamOrder<SimApi> order{device};
    DefragArena<SimApi, ExplicitFit, ExplicitCompaction> moving{device, {.capacity_bytes = 2_MiB}};
    CHECK(moving.try_take(1_MiB, BlockId{1}));
    PageArena<SimApi, ExplicitFit, true> mapping{device, order, {.capacity_bytes = 2_MiB}};
    CHECK(mapping.try_take(1_MiB, BlockId{1}));
  }

  TEST_CASE("MovingArena: the concept requires each member") {
    CHECK_NEEDS(MovingArena, OnlyMoving, plan_compaction);
    CHECK_NEEDS(MovingArena, OnlyMoving, plan_pass);
    CHECK_NEEDS(MovingArena, OnlyMoving, plan_slide);
    CHECK_NEEDS(MovingArena, OnlyMoving, begin_moves);
    CHECK_NEEDS(MovingArena, OnlyMoving, commit_moves);
    CHECK_NEEDS(MovingArena, OnlyMoving, cheapest_window);
    CHECK_NEEDS(MovingArena, OnlyMoving, few_ranges);
    CHECK_NEEDS(MovingArena, OnlyMoving, first_search);
    CHECK_NEEDS(MovingArena, OnlyMoving, wider_search);
    CHECK_NEEDS(MovingArena, OnlyMoving, spare_bytes);
    CHECK_NEEDS(MappingArena, OnlyMapping, map);
  }

  TEST_CASE_TEMPLATE("Arena: an allocator runs on an arena that has only what its concept requires",
                     Choice,
                     FirstFit,
                     Unmoved,
                     Mapped) {
    SimApi device{{.capacity_bytes = 8_MiB}};
    DeviceAllocator<With<Choice>> memory{device, {.capacity_bytes = 64_KiB}};
    auto const stream = device.create_stream();
    std::vector<BlockId> blocks;
    for (int i = 0; i < 12; ++i) {
      blocks.push_back(memory.allocate(8_KiB));
      auto const lease = memory.acquire(blocks.back(), Access::write, stream);
      device.fill(lease.data(), static_cast<unsigned char>(i), 8_KiB, stream);
    }
    CHECK(memory.stats().swap_outs.count >= 4);
    CHECK(memory.compact() == 0);
    CHECK(memory.trim_sync() == 0);
    for (int i = 0; i < 12; ++i) {
      std::vector<unsigned char> bytes(8_KiB);
      {
        auto const lease =
            memory.acquire(blocks[static_cast<std::size_t>(i)], Access::read, stream);
        memory.copy_to_host_sync(bytes.data(), lease.data(), bytes.size(), stream);
      }
      CHECK(std::count(bytes.begin(), bytes.end(), static_cast<unsigned char>(i)) == 8192);
    }
    // A lease in the middle: what is free lies apart, and nobody can move.
    auto const held = memory.acquire(blocks[3], Access::read, stream);
    BlockId const large = memory.declare(64_KiB);
    CHECK_THROWS_AS((void)memory.acquire(large, Access::write, stream), OutOfDeviceMemory);
    memory.deallocate(large);
    memory.synchronize();
    memory.retire_stream(stream);
    for (BlockId const id : blocks) {
      memory.abandon(id);
    }
  }
}
