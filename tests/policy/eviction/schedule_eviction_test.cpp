// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>
#include <spillway/policy/eviction/schedule_eviction.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <vector>

namespace {

using namespace spillway;
using namespace spillway::detail;
using testing::anyone;
using testing::block;
using testing::drain;
using testing::only;

/// A schedule and a policy over blocks of given sizes, all resident.
struct Rig {
  explicit Rig(std::vector<std::size_t> const& sizes, PlanOptions options = {}) : policy{options} {
    for (std::uint32_t i = 0; i < sizes.size(); ++i) {
      create(i, sizes[i]);
    }
  }

  void create(std::uint32_t index, std::size_t bytes) {
    schedule.on_create(block(index), bytes);
    policy.on_insert(block(index), bytes, schedule.use_of(block(index)));
  }

  /// A use of a block, resident or not, for which no other block is evicted.
  void use(std::uint32_t index, Access access = Access::read) {
    Use const use = schedule.on_access(block(index), access);
    if (schedule.take_change() == AccessSchedule::Change::lost) {
      policy.on_misprediction();
    }
    policy.on_access(block(index), use);
    schedule.on_release(block(index));
  }

  /// Whether the policy says that a block need not stay until its next use.
  [[nodiscard]] bool is_leaving(BlockId id) {
    return policy.leaving_victim(only({id})).has_value();
  }

  void begin(std::size_t capacity_bytes) {
    schedule.begin_step();
    policy.on_step(schedule, capacity_bytes);
  }

  void record(std::vector<std::uint32_t> const& indices) {
    begin(0);
    for (std::uint32_t const index : indices) {
      use(index);
    }
  }

  /// A step of so many uses, of the first so many blocks one after the other.
  void record_in_turn(std::uint32_t blocks, std::uint32_t uses) {
    begin(0);
    for (std::uint32_t i = 0; i < uses; ++i) {
      use(i % blocks);
    }
  }

  /// A step with room for `capacity_bytes`, in which the first so many blocks have been used.
  void use_in_turn(std::uint32_t blocks, std::size_t capacity_bytes) {
    begin(capacity_bytes);
    for (std::uint32_t i = 0; i < blocks; ++i) {
      use(i);
    }
  }

  AccessSchedule schedule;
  ScheduleEviction policy;
};

}  // namespace

TEST_SUITE("eviction") {
  TEST_CASE("ScheduleEviction: without predictions it is LRU") {
    ScheduleEviction policy;
    for (std::uint32_t i = 1; i <= 3; ++i) {
      policy.on_insert(block(i), 64, {});
    }
    policy.on_access(block(1), {});
    CHECK(drain(policy, anyone) == std::vector{block(2), block(3), block(1)});
  }

  TEST_CASE("ScheduleEviction: the block whose next use is farthest leaves, not the least recently "
            "used") {
    Rig rig{{64, 64, 64}};
    rig.record({0, 1, 2, 0, 1, 2, 0, 1, 2, 2, 2, 2, 1, 0});
    rig.begin(2 * 64);
    rig.use(0);
    rig.use(1);
    CHECK(rig.policy.victim(64, only({block(0), block(1)})) == block(1));
  }

  TEST_CASE("ScheduleEviction: the plan evicts the fewest bytes that suffice") {
    // Before block 3 is used 40 bytes must leave. Of what could, block 0 is used last, but the two
    // smaller ones are enough together and nothing is smaller.
    Rig rig{{100, 20, 20, 40}};
    std::vector<std::uint32_t> const step{0, 1, 2, 3, 1, 2, 0};
    rig.record(step);
    rig.policy.on_erase(block(3));
    rig.begin(140);
    rig.use(0);
    rig.use(1);
    rig.use(2);
    std::set<BlockId> const victims = [&] {
      auto const first = rig.policy.victim(40, anyone);
      REQUIRE(first.has_value());
      rig.policy.on_erase(*first);
      auto const second = rig.policy.victim(20, anyone);
      REQUIRE(second.has_value());
      return std::set{*first, *second};
    }();
    CHECK(victims == std::set{block(1), block(2)});
  }

  TEST_CASE("ScheduleEviction: the plan evicts blocks that are read rather than blocks that are "
            "written") {
    // Blocks 0 and 1 are written in every step, 2 and 3 read; one of the four must be away while
    // block 4 is used, and all come back after it.
    Rig rig{{64, 64, 64, 64, 64}};
    auto const step = [&](std::size_t until) {
      std::vector<std::uint32_t> const indices{0, 1, 2, 3, 4, 3, 2, 1, 0};
      for (std::size_t i = 0; i < until; ++i) {
        rig.use(indices[i], indices[i] < 2 ? Access::read_write : Access::read);
      }
    };
    rig.begin(0);
    step(9);
    rig.policy.on_erase(block(4));
    rig.begin(4 * 64);
    step(4);
    auto const victim = rig.policy.victim(64, anyone);
    REQUIRE(victim.has_value());
    CHECK((*victim == block(2) || *victim == block(3)));
    CHECK(!rig.is_leaving(block(0)));
    CHECK(!rig.is_leaving(block(1)));
  }

  TEST_CASE("ScheduleEviction: a search for leaving blocks does not look at blocks that stay") {
    Rig rig{std::vector<std::size_t>(100, 64)};
    rig.record_in_turn(100, 100);
    rig.begin(100 * 64);
    rig.use(0);
    std::size_t inspected = 0;
    auto const counting = [&](BlockId id) noexcept {
      ++inspected;
      return anyone(id);
    };
    CHECK(rig.policy.leaving_victim(counting) == std::nullopt);
    CHECK(inspected == 0);
    CHECK(rig.policy.victim(64, counting).has_value());
    CHECK(inspected > 0);
  }

  TEST_CASE("ScheduleEviction: blocks that are never used again leave first") {
    Rig rig{{64, 64, 64}};
    rig.record({0, 1, 0, 1});
    rig.begin(3 * 64);
    rig.use(0);
    CHECK(rig.policy.victim(64, anyone) == block(2));
    CHECK(rig.is_leaving(block(2)));
    CHECK(!rig.is_leaving(block(0)));
    CHECK(!rig.is_leaving(block(77)));
  }

  TEST_CASE("ScheduleEviction: a block that is overwritten next leaves without cost") {
    Rig rig{{64, 64, 64}};
    auto const step = [&] {
      for (std::uint32_t const index : {0U, 1U, 2U}) {
        rig.use(index, index == 1 ? Access::write : Access::read);
      }
    };
    rig.begin(3 * 64);
    step();
    rig.begin(3 * 64);
    step();
    // Block 2 is used last in the step to come, and block 0 was used longest ago.
    CHECK(rig.policy.victim(64, anyone) == block(1));
  }

  TEST_CASE("ScheduleEviction: a block that came back early is not evicted again") {
    Rig rig{std::vector<std::size_t>(8, 64)};
    rig.record_in_turn(8, 80);
    rig.begin(4 * 64);
    rig.use(0);
    rig.use(1);
    auto const away = rig.policy.victim(64, anyone);
    REQUIRE(away.has_value());
    REQUIRE(rig.is_leaving(*away));
    rig.policy.on_erase(*away);
    rig.policy.on_insert(*away, 64, rig.schedule.use_of(*away));
    CHECK(!rig.is_leaving(*away));
    CHECK(rig.policy.victim(64, anyone) != away);
  }

  TEST_CASE("ScheduleEviction: a block may return when the blocks used before it have been used") {
    // While blocks 1 and 2 alternate there is no room for block 0, at any lookahead.
    Rig rig{{64, 64, 64}};
    std::vector<std::uint32_t> step{0};
    for (int i = 0; i < 20; ++i) {
      step.insert(step.end(), {1, 2});
    }
    step.push_back(0);
    rig.record(step);
    CHECK(rig.policy.may_return(rig.schedule, block(0)));  // nothing is predicted yet
    rig.policy.on_erase(block(2));
    rig.begin(2 * 64);
    rig.use(0);
    REQUIRE(rig.policy.victim(64, anyone) == block(0));
    rig.policy.on_erase(block(0));
    std::size_t since = step.size();
    for (std::size_t i = 1; i + 1 < step.size(); ++i) {
      if (rig.policy.may_return(rig.schedule, block(0))) {
        since = std::min(since, i);
      } else {
        CHECK(since == step.size());  // once it may return, it may until its use
      }
      rig.use(step[i]);
    }
    CHECK(since <= step.size() - 2);
    CHECK(since >= step.size() - 1 - StepPlan::next_ops - 2);
  }

  TEST_CASE("ScheduleEviction: a block may return at once if everything fits until its use") {
    Rig rig{{64, 64, 64, 64}};
    std::vector<std::uint32_t> step{1, 2, 3};
    for (int i = 0; i < 20; ++i) {
      step.insert(step.end(), {1, 2});
    }
    step.push_back(0);
    rig.record(step);
    rig.policy.on_erase(block(0));
    SUBCASE("throughout the step") {
      rig.begin(4 * 64);
      CHECK(rig.policy.may_return(rig.schedule, block(0)));
    }
    SUBCASE("but not while other blocks take the room") {
      rig.begin(2 * 64);
      CHECK(!rig.policy.may_return(rig.schedule, block(0)));
    }
  }

  TEST_CASE("ScheduleEviction: blocks that leave are offered for an early copy once each") {
    Rig rig{std::vector<std::size_t>(8, 64)};
    rig.record_in_turn(8, 80);
    CHECK(rig.policy.early_victim(anyone) == std::nullopt);  // nothing is predicted yet
    rig.use_in_turn(8, 4 * 64);
    std::set<BlockId> offered;
    while (auto const id = rig.policy.early_victim(anyone)) {
      CHECK(rig.is_leaving(*id));
      CHECK(offered.insert(*id).second);
    }
    CHECK(offered.size() >= 4);
    // They are victims, whether offered or not.
    auto const victim = rig.policy.victim(64, anyone);
    REQUIRE(victim.has_value());
    CHECK(offered.count(*victim) == 1);
    // After its next use a block may be offered again.
    rig.use(0);
    auto const again = rig.policy.early_victim(anyone);
    CHECK((!again || *again == block(0)));
  }

  TEST_CASE("ScheduleEviction: a block that is refused when offered is offered again later") {
    Rig rig{std::vector<std::size_t>(8, 64)};
    rig.record_in_turn(8, 80);
    rig.use_in_turn(8, 4 * 64);
    CHECK(rig.policy.early_victim(only({})) == std::nullopt);
    CHECK(rig.policy.early_victim(anyone).has_value());
  }

  TEST_CASE(
      "ScheduleEviction: blocks that need no copy leave before those that are being copied out") {
    Rig rig{std::vector<std::size_t>(8, 64)};
    rig.record_in_turn(8, 80);
    rig.use_in_turn(8, 2 * 64);
    auto const odd_are_clean = [](BlockId id) noexcept -> std::optional<EvictionCandidate> {
      return EvictionCandidate{64, index_of_block(id) % 2 == 1, true};
    };
    std::size_t leaving = 0;
    std::size_t offered = 0;
    for (std::uint32_t i = 0; i < 8; ++i) {
      leaving += rig.is_leaving(block(i)) ? 1U : 0U;
    }
    while (auto const id = rig.policy.early_victim(odd_are_clean)) {
      CHECK(index_of_block(*id) % 2 == 0);
      ++offered;
    }
    REQUIRE(offered >= 2);
    REQUIRE(leaving > offered);
    for (std::size_t left = 0; left < leaving; ++left) {
      auto const victim = rig.policy.victim(64, odd_are_clean);
      REQUIRE(victim.has_value());
      CHECK((index_of_block(*victim) % 2 == 1) == (left < leaving - offered));
      rig.policy.on_erase(*victim);
    }
  }

  TEST_CASE("ScheduleEviction: without room in the plan, the smallest sufficient block of the far "
            "ones leaves") {
    // Everything fits, so nothing is planned; then more room is needed than the plan assumed.
    std::vector<std::size_t> sizes(40, 100);
    sizes[38] = 60;
    Rig rig{sizes};
    rig.record_in_turn(40, 40);
    rig.begin(1U << 20U);
    auto const sized = [&](BlockId id) noexcept -> std::optional<EvictionCandidate> {
      return EvictionCandidate{sizes[index_of_block(id)], false, true};
    };
    CHECK(rig.policy.victim(50, sized) == block(38));
    // No block alone is large enough: the one that is used last leaves.
    CHECK(rig.policy.victim(500, sized) == block(39));
  }

  TEST_CASE("ScheduleEviction: of equal blocks outside the plan the clean one leaves") {
    Rig rig{std::vector<std::size_t>(40, 64)};
    rig.record_in_turn(40, 40);
    rig.begin(1U << 20U);
    auto const clean_37 = [](BlockId id) noexcept -> std::optional<EvictionCandidate> {
      return EvictionCandidate{64, id == block(37), true};
    };
    CHECK(rig.policy.victim(64, clean_37) == block(37));
  }

  TEST_CASE("ScheduleEviction: when predictions are lost it is LRU at once") {
    Rig rig{{64, 64, 64, 64}};
    rig.record({0, 1, 2, 3, 3, 2, 1, 0});
    rig.begin(2 * 64);
    for (std::uint32_t const index : {0U, 1U, 2U, 3U}) {
      rig.use(index);
    }
    rig.policy.on_misprediction();
    CHECK(drain(rig.policy, anyone) == std::vector{block(0), block(1), block(2), block(3)});
  }

  TEST_CASE("ScheduleEviction: a step that is not predicted uses LRU") {
    Rig rig{{64, 64, 64}};
    rig.begin(64);
    rig.use(2);
    rig.use(0);
    rig.use(1);
    CHECK(drain(rig.policy, anyone) == std::vector{block(2), block(0), block(1)});
  }

  TEST_CASE("ScheduleEviction: the plan leaves room for prefetching if that costs little") {
    // A loop over 100 blocks of which half fit: at 2 % more bytes there is room for one more.
    auto const most_leaving = [](PlanOptions options) {
      Rig rig{std::vector<std::size_t>(100, 64), options};
      rig.record_in_turn(100, 400);
      rig.begin(50 * 64);
      std::size_t most = 0;
      for (std::uint32_t i = 0; i < 400; ++i) {
        rig.use(i % 100);
        std::size_t leaving = 0;
        for (std::uint32_t index = 0; index < 100; ++index) {
          leaving += rig.is_leaving(block(index)) ? 1U : 0U;
        }
        most = std::max(most, leaving);
      }
      return most;
    };
    std::size_t const exact = most_leaving({.ahead_ops = 0});
    CHECK(most_leaving({.ahead_ops = 2, .most_extra = 0.05}) > exact);
    CHECK(most_leaving({.ahead_ops = 16, .most_extra = 1}) > exact + 5);
  }
}
