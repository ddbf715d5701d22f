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

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <type_traits>
#include <vector>

// Which abilities the library's arenas have, what does not count as an arena, and an arena that has
// none of the abilities, which an allocator runs on all the same.

namespace {

using namespace spillway;

using Moving = DefragArena<SimApi>;
using Mapping = PageArena<SimApi, SegregatedFit, false>;
using Stable = PageArena<SimApi, SegregatedFit, true>;

static_assert(Arena<Moving> && GrowingArena<Moving> && MovingArena<Moving>);
static_assert(!MappingArena<Moving> && !StableAddressArena<Moving>);
static_assert(Arena<Mapping> && MappingArena<Mapping> && !StableAddressArena<Mapping>);
static_assert(!GrowingArena<Mapping> && !MovingArena<Mapping>);
static_assert(MappingArena<Stable> && StableAddressArena<Stable>);
static_assert(!GrowingArena<Stable> && !MovingArena<Stable>);

/// An arena and no more: the first free place that fits in one reservation.
template <class Device>
class FirstFitArena {
 public:
  using device_type = Device;

  FirstFitArena(Device& device, ArenaOptions const& options)
      : device_{device},
        bytes_{options.capacity_bytes},
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
    if (bytes_ - at < rounded) {
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
  [[nodiscard]] std::size_t capacity_bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::size_t reserved_bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::size_t free_bytes() const noexcept {
    std::size_t bytes = bytes_;
    for (auto const& [begin, range] : taken_) {
      bytes -= range.bytes;
    }
    return bytes;
  }
  [[nodiscard]] std::size_t largest_free_bytes() const noexcept {
    std::size_t largest = 0;
    std::size_t at = 0;
    for (auto const& [begin, range] : taken_) {
      largest = std::max(largest, begin - at);
      at = begin + range.bytes;
    }
    return std::max(largest, bytes_ - at);
  }
  template <class Visit>
  void for_each_range(Visit visit) const {
    for (auto const& [begin, range] : taken_) {
      visit(RangeView{base_ + begin, range.bytes, 0, RangeState::taken, range.owner, range.id});
    }
  }

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
  std::byte* base_;
  Ranges taken_;  // by offset
  Fence last_uses_;
  std::uint32_t last_ = 0;
};

struct FirstFit {
  template <class Policies>
  using type = FirstFitArena<typename Policies::device>;
};

using Plain = FirstFitArena<SimApi>;
static_assert(Arena<Plain> && !GrowingArena<Plain> && !MovingArena<Plain> && !MappingArena<Plain>);

// Each misses the concept by one thing.
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
  std::optional<Segment> trim();
};
static_assert(MovingArena<TrimMayThrow> && !GrowingArena<TrimMayThrow>);
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

/// Makes an arena as the concept says.
template <class A>
struct Rig {
  static A make(SimApi& device, StreamOrder<SimApi>& order, ArenaOptions const& options) {
    if constexpr (MappingArena<A>) {
      return A(device, order, options);
    } else {
      return A(device, options);
    }
  }
  SimApi device{{.capacity_bytes = 8_MiB}};
  StreamOrder<SimApi> order{device};
  A arena{make(device, order, {.capacity_bytes = 2_MiB, .bounce_bytes = 0})};
};

}  // namespace

TEST_SUITE("arena_concept") {
  TEST_CASE_TEMPLATE("Arena: ranges do not overlap, and all that was taken can be taken again",
                     A,
                     Plain,
                     Moving,
                     Mapping,
                     Stable) {
    constexpr std::uint64_t seed = 61;
    MESSAGE("seed ", seed);
    std::mt19937_64 random{seed};
    Rig<A> rig;
    A& arena = rig.arena;
    std::map<std::byte*, Placement> taken;
    std::size_t taken_bytes = 0;
    std::size_t refused = 0;
    for (int i = 0; i < 2000; ++i) {
      if (taken.empty() || random() % 5 < 3) {
        std::size_t const bytes = 1 + random() % 200'000;
        bool const fits = bytes <= arena.largest_free_bytes();
        auto const placement = arena.try_take(bytes, BlockId{static_cast<std::uint64_t>(i + 1)});
        REQUIRE(placement.has_value() == fits);
        refused += fits ? 0U : 1U;
        if (placement) {
          REQUIRE(arena.address(placement->range) == placement->address);
          taken[placement->address] = *placement;
          taken_bytes += arena.rounded_bytes(bytes);
        }
      } else {
        auto const one =
            std::next(taken.begin(), static_cast<std::ptrdiff_t>(random() % taken.size()));
        std::size_t const before = arena.free_bytes();
        arena.give_back(one->second.range, {});
        taken_bytes -= arena.free_bytes() - before;
        taken.erase(one);
      }
      REQUIRE(arena.free_bytes() + taken_bytes == arena.reserved_bytes());
      REQUIRE(arena.reserved_bytes() <= arena.capacity_bytes());
    }
    CHECK(refused > 50);
    std::byte* end = nullptr;
    std::size_t blocks = 0;
    std::map<std::byte*, std::size_t> views;
    arena.for_each_range([&](RangeView const& range) {
      if (range.state == RangeState::taken) {
        views[range.address] = range.size_bytes;
      }
    });
    for (auto const& [address, bytes] : views) {
      REQUIRE(address >= end);
      REQUIRE(taken.count(address) == 1);
      end = address + bytes;
      ++blocks;
    }
    CHECK(blocks == taken.size());
    for (auto const& [address, placement] : taken) {
      arena.give_back(placement.range, {});
    }
    CHECK(arena.largest_free_bytes() == arena.capacity_bytes());
  }

  TEST_CASE("Arena: whoever takes a range is told to wait for those who used it before") {
    Rig<Moving> rig;
    auto const first = rig.arena.try_take(rig.arena.capacity_bytes(), BlockId{1});
    REQUIRE(first);
    Fence uses;
    uses.add(Ticket{StreamIndex{3}, 7});
    rig.arena.give_back(first->range, uses);
    auto const second = rig.arena.try_take(1000, BlockId{2});
    REQUIRE(second);
    CHECK(second->fence == uses);
  }

  TEST_CASE("Arena: an allocator runs on an arena that neither grows, moves nor maps") {
    SimApi device{{.capacity_bytes = 8_MiB}};
    DeviceAllocator<With<FirstFit>> memory{device, {.capacity_bytes = 64_KiB}};
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
