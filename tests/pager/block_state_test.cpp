// SPDX-License-Identifier: Apache-2.0
#include <spillway/pager/block_state.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <support/death.hpp>

namespace {

using spillway::detail::block_state_count;
using spillway::detail::BlockRecord;
using spillway::detail::BlockState;
using spillway::detail::BlockStatus;
using spillway::detail::has_contents;
using spillway::detail::is_at_hand;
using spillway::detail::is_in_transit;
using spillway::detail::is_resident;

using enum BlockState;

/// The table in the comment of block_state.hpp, without the changes back from a transit.
std::vector<std::pair<BlockState, std::vector<BlockState>>> const table{
    {vacant, {blank}},
    {on_host, {swapping_in, filling, dropped}},
    {dropped, {filling}},
    {lost_away, {lost}},
    {swapping_in, {arriving, prefetched}},
    {blank, {resident, swapping_out, moving}},
    {resident, {swapping_out, copying_out, moving}},
    {arriving, {resident, swapping_out, copying_out, moving}},
    {prefetched, {arriving, swapping_out, copying_out, moving}},
    {filling, {resident, arriving, on_host, dropped, moving}},
    {lost, {resident, swapping_out, moving}},
    {swapping_out, {on_host, vacant, lost_away, dropping}},
    {dropping, {dropped}},
    {copying_out, {}},
    {moving, {lost, on_host, dropped}},
};

/// A status in `state` for each history that decides to which state a transit goes back.
std::vector<BlockStatus> statuses_in(BlockState state) {
  // A path to every state that is no transit.
  std::array<std::vector<BlockState>, block_state_count> ways;
  auto const way = [&](BlockState to) -> std::vector<BlockState>& {
    return ways[static_cast<std::size_t>(to)];
  };
  way(vacant) = {};
  way(blank) = {blank};
  way(resident) = {blank, resident};
  way(on_host) = {blank, resident, swapping_out, on_host};
  way(dropped) = {blank, resident, swapping_out, dropping, dropped};
  way(arriving) = {blank, resident, swapping_out, on_host, swapping_in, arriving};
  way(prefetched) = {blank, resident, swapping_out, on_host, swapping_in, prefetched};
  way(filling) = {blank, resident, swapping_out, on_host, filling};
  way(lost) = {blank, moving, lost};
  way(lost_away) = {blank, moving, lost, swapping_out, lost_away};
  auto const arrive = [](std::vector<BlockState> const& steps) {
    BlockStatus status;
    for (BlockState const step : steps) {
      status.become(step);
    }
    return status;
  };
  std::vector<BlockStatus> found;
  if (!is_in_transit(state)) {
    return {arrive(way(state))};
  }
  for (auto const& [before, next] : table) {
    if (std::find(next.begin(), next.end(), state) != next.end()) {
      for (BlockStatus status : statuses_in(before)) {
        status.become(state);
        found.push_back(status);
      }
    }
  }
  return found;
}

/// Whether `become` ends the program, tried in a forked child.
bool dies(BlockStatus status, BlockState next) {
  return spillway::test::death_of([&] { status.become(next); }).signal == SIGABRT;
}

}  // namespace

TEST_SUITE("block_state") {
  TEST_CASE("BlockStatus: only changes that the table allows are possible") {
    REQUIRE(table.size() == block_state_count);
    for (auto const& row : table) {
      BlockState const state = row.first;
      CAPTURE(static_cast<int>(state));
      for (BlockStatus const& status : statuses_in(state)) {
        REQUIRE(status.state() == state);
        std::uint32_t allowed = 0;
        for (BlockState const one : row.second) {
          allowed |= BlockStatus::bit(one);
        }
        if (is_in_transit(state)) {
          allowed |= BlockStatus::bit(status.settled());
        }
        for (std::size_t i = 0; i < block_state_count; ++i) {
          auto const to = static_cast<BlockState>(i);
          CAPTURE(i);
          bool const is_allowed = (allowed & BlockStatus::bit(to)) != 0;
          CHECK(status.may_become(to) == is_allowed);
          if (is_allowed) {
            BlockStatus changed = status;
            changed.become(to);
            CHECK(changed.state() == to);
          } else {
            CHECK(dies(status, to));
          }
        }
      }
    }
  }

  TEST_CASE("BlockStatus: a transit records the state that it may go back to") {
    for (BlockState const transit : {swapping_in, swapping_out, dropping, copying_out, moving}) {
      auto const all = statuses_in(transit);
      REQUIRE(!all.empty());
      for (BlockStatus status : all) {
        BlockState const before = status.settled();
        CHECK(!is_in_transit(before));
        status.go_back();
        CHECK(status.state() == before);
        CHECK(status.settled() == before);
      }
    }
  }

  TEST_CASE("BlockState: the pager's groups of states agree with the table") {
    auto const of = [](bool (*is)(BlockState)) {
      std::vector<BlockState> states;
      for (std::size_t i = 0; i < block_state_count; ++i) {
        if (is(static_cast<BlockState>(i))) {
          states.push_back(static_cast<BlockState>(i));
        }
      }
      return states;
    };
    using States = std::vector<BlockState>;
    CHECK(of([](BlockState s) { return !is_resident(s); }) ==
          States{vacant, on_host, dropped, lost_away, swapping_in});
    CHECK(of([](BlockState s) { return is_in_transit(s); }) ==
          States{swapping_in, swapping_out, dropping, copying_out, moving});
    CHECK(of([](BlockState s) { return is_at_hand(s); }) == States{blank, resident, arriving});
    CHECK(of([](BlockState s) { return !is_in_transit(s) && has_contents(s); }) ==
          States{on_host, dropped, resident, arriving, prefetched, filling});
  }

  TEST_CASE("BlockRecord: during a transit a block keeps the contents that it had before") {
    BlockRecord block;
    block.status.become(blank);
    block.status.become(moving);
    CHECK(!block.has_contents());
    CHECK(block.is_clean());
    block.status.go_back();
    block.status.become(resident);
    block.status.become(swapping_out);
    CHECK(block.has_contents());
    CHECK(!block.is_clean());
    CHECK(block.is_resident());
    CHECK(!block.can_leave());
    CHECK(!block.can_move());
  }
}
