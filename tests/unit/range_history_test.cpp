// SPDX-License-Identifier: Apache-2.0
#include <spillway/observe/range_history.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <support/watched_program.hpp>

using namespace spillway;

namespace {

constexpr BlockId a{1};
constexpr BlockId b{2};

Event event(EventKind kind, BlockId block, std::uintptr_t address, std::size_t bytes = 100) {
  return {.kind = kind,
          .block = block,
          .bytes = bytes,
          .address = reinterpret_cast<void const*>(address)};
}

/// `1:+a@100` says that event 1 shows block a taking address 100.
std::vector<std::string> told(std::vector<Event> const& events) {
  std::vector<std::string> lines;
  for (RangeChange const& change : range_changes(events)) {
    lines.push_back(std::to_string(change.event) + ':' + (change.is_taken ? '+' : '-') +
                    static_cast<char>('a' + static_cast<int>(change.block) - 1) + '@' +
                    std::to_string(change.address));
  }
  return lines;
}

using Lines = std::vector<std::string>;

/// What is taken after all changes: address to block and bytes.
using Taken = std::map<std::uintptr_t, std::pair<BlockId, std::size_t>>;

/// Replays changes and checks that no range is taken twice and none is given up that is not taken.
Taken replay(std::vector<RangeChange> const& changes) {
  Taken taken;
  std::map<BlockId, std::uintptr_t> homes;
  for (RangeChange const& change : changes) {
    if (!change.is_taken) {
      REQUIRE(taken.erase(change.address) == 1);
      REQUIRE(homes.erase(change.block) == 1);
      continue;
    }
    auto const next = taken.lower_bound(change.address);
    REQUIRE((next == taken.end() || change.address + change.bytes <= next->first));
    if (next != taken.begin()) {
      auto const& [before, what] = *std::prev(next);
      REQUIRE(before + what.second <= change.address);
    }
    taken[change.address] = {change.block, change.bytes};
    REQUIRE(homes.emplace(change.block, change.address).second);
  }
  return taken;
}

template <class Allocator>
Taken taken_now(Allocator& allocator) {
  Taken taken;
  allocator.pager().for_each_range([&](RangeView const& range) {
    if (range.state == RangeState::taken) {
      taken[reinterpret_cast<std::uintptr_t>(range.address)] = {range.owner, range.size_bytes};
    }
  });
  return taken;
}

}  // namespace

TEST_SUITE("range_history") {
  TEST_CASE("range_changes: a block takes ranges and gives them up as the events say") {
    CHECK(told({event(EventKind::allocate, a, 100),
                event(EventKind::swap_out, a, 100),
                event(EventKind::prefetch, a, 300),
                event(EventKind::drop, a, 300),
                event(EventKind::swap_in, a, 200),
                event(EventKind::move, a, 500),
                event(EventKind::deallocate, a, 0)}) == Lines{"0:+a@100",
                                                              "1:-a@100",
                                                              "2:+a@300",
                                                              "3:-a@300",
                                                              "4:+a@200",
                                                              "5:-a@200",
                                                              "5:+a@500",
                                                              "6:-a@500"});
  }

  TEST_CASE("range_changes: a swap-out keeps the range if the block is still there afterwards") {
    CHECK(told({event(EventKind::allocate, a, 100),
                event(EventKind::swap_out, a, 100),
                event(EventKind::swap_out, a, 100),
                event(EventKind::drop, a, 100)}) == Lines{"0:+a@100", "3:-a@100"});
    CHECK(told({event(EventKind::allocate, a, 100),
                event(EventKind::swap_out, a, 100),
                event(EventKind::move, a, 400)}) == Lines{"0:+a@100", "2:-a@100", "2:+a@400"});
  }

  TEST_CASE("range_changes: whoever lies where another block arrives has left") {
    CHECK(told({event(EventKind::allocate, a, 100),
                event(EventKind::allocate, b, 199),
                event(EventKind::deallocate, a, 0)}) == Lines{"0:+a@100", "1:-a@100", "1:+b@199"});
    CHECK(told({event(EventKind::allocate, a, 100), event(EventKind::allocate, b, 200)}) ==
          Lines{"0:+a@100", "1:+b@200"});
    CHECK(told({event(EventKind::allocate, a, 300), event(EventKind::allocate, b, 200, 101)}) ==
          Lines{"0:+a@300", "1:-a@300", "1:+b@200"});
  }

  TEST_CASE("range_changes: what is given up first was there from the start") {
    CHECK(told({event(EventKind::drop, a, 100),
                event(EventKind::drop, b, 200),
                event(EventKind::drop, a, 100)}) == Lines{"0:-a@100", "1:-b@200"});
    CHECK(told({event(EventKind::deallocate, a, 0)}).empty());
    CHECK(told({event(EventKind::deallocate, a, 100)}) == Lines{"0:-a@100"});
    CHECK(told({event(EventKind::move, a, 100), event(EventKind::drop, a, 100)}) ==
          Lines{"0:-a@0", "0:+a@100", "1:-a@100"});
    CHECK(told({event(EventKind::swap_out, a, 100), event(EventKind::drop, a, 100)}) ==
          Lines{"1:-a@100"});
  }

  TEST_CASE("range_changes: events that concern no block change nothing") {
    CHECK(told({event(EventKind::grow, {}, 100),
                event(EventKind::step, {}, 0),
                event(EventKind::host_wait, {}, 0),
                event(EventKind::out_of_memory, a, 0)})
              .empty());
  }

  TEST_CASE("range_changes: at every moment it knows what lies where") {
    for (std::uint64_t const seed : {1U, 2U, 3U, 4U}) {
      CAPTURE(seed);
      support::WatchedProgram<support::WatchedOnDemand> program{seed};
      for (std::size_t i = 0; i < 300; ++i) {
        CAPTURE(i);
        program.step();
        REQUIRE(replay(range_changes(program.allocator.observer().events())) ==
                taken_now(program.allocator));
      }
      auto const stats = program.allocator.stats();
      CHECK(stats.swap_outs.count > 20);
      CHECK(stats.swap_ins.count > 20);
      CHECK(stats.drops.count > 5);
      CHECK(stats.moves.count > 5);
    }
  }

  TEST_CASE("range_changes: it stays consistent with what happens ahead of need") {
    for (std::uint64_t const seed : {5U, 6U, 7U}) {
      CAPTURE(seed);
      support::WatchedProgram<support::Watched> program{seed};
      for (std::size_t i = 0; i < 40; ++i) {
        program.run(10);
        (void)replay(range_changes(program.allocator.observer().events()));
      }
    }
  }
}
