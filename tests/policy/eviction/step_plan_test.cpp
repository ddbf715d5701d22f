// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>
#include <spillway/policy/eviction/step_plan.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/step_record.hpp>
#include <spillway/schedule/use.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace spillway;
using namespace spillway::detail;
using namespace spillway::literals;
using testing::block;

constexpr PlanOptions exact{.ahead_ops = 0};
constexpr auto all = [](BlockId) { return true; };

/// A schedule that predicts a step over blocks of given sizes that live on.
AccessSchedule repeating(std::vector<std::size_t> const& sizes,
                         std::vector<std::pair<std::uint32_t, Access>> const& step) {
  AccessSchedule schedule;
  for (std::uint32_t i = 0; i < sizes.size(); ++i) {
    schedule.on_create(block(i), sizes[i]);
  }
  schedule.begin_step();
  for (auto const& [index, access] : step) {
    schedule.on_access(block(index), access);
    schedule.on_release(block(index));
  }
  schedule.begin_step();
  return schedule;
}

AccessSchedule reading(std::vector<std::size_t> const& sizes,
                       std::vector<std::uint32_t> const& step) {
  std::vector<std::pair<std::uint32_t, Access>> uses;
  for (std::uint32_t const index : step) {
    uses.emplace_back(index, Access::read);
  }
  return repeating(sizes, uses);
}

/// A random step: some blocks live on, the others are made and freed in it, and leases last for
/// some uses.
struct RandomStep {
  RandomStep(std::uint64_t seed, std::uint32_t blocks, std::uint32_t uses) {
    std::mt19937_64 random{seed};
    std::vector<std::uint32_t> order;
    for (std::uint32_t i = 0; i < uses; ++i) {
      order.push_back(static_cast<std::uint32_t>(random() % blocks));
    }
    std::vector<bool> lives_on(blocks);
    std::vector<std::size_t> bytes(blocks);
    for (std::uint32_t i = 0; i < blocks; ++i) {
      lives_on[i] = random() % 2 == 0;
      bytes[i] = 1 + random() % 100;
      if (lives_on[i]) {
        schedule.on_create(block(i), bytes[i]);
        residents.push_back(random() % 2 == 0 ? block(i) : BlockId{});
      }
    }
    schedule.begin_step();
    std::vector<std::uint32_t> held;
    for (std::uint32_t t = 0; t < uses; ++t) {
      std::uint32_t const i = order[t];
      bool const is_first = std::find(order.begin(), order.begin() + t, i) == order.begin() + t;
      if (!lives_on[i] && is_first) {
        schedule.on_create(block(i), bytes[i]);
      }
      schedule.on_access(block(i), static_cast<Access>(random() % 3));
      held.push_back(i);
      while (!held.empty() && random() % 4 != 0) {
        bool const is_used_again =
            std::find(order.begin() + t + 1, order.end(), held.front()) != order.end();
        schedule.on_release(block(held.front()));
        if (!lives_on[held.front()] && !is_used_again) {
          schedule.on_destroy(block(held.front()));
        }
        held.erase(held.begin());
      }
    }
    for (std::uint32_t const i : held) {
      schedule.on_release(block(i));
      if (!lives_on[i]) {
        schedule.on_destroy(block(i));
      }
    }
    schedule.begin_step();
  }

  [[nodiscard]] bool is_resident(BlockId id) const {
    return std::find(residents.begin(), residents.end(), id) != residents.end();
  }

  AccessSchedule schedule;
  std::vector<BlockId> residents;
};

/// Marks where each block is on the device at each moment of the step if what may leave leaves, and
/// comes back when the plan has room for it. Calls `present(moment, bytes, is_needed)`.
template <class Present>
void play(StepRecord const& record, StepPlan const& plan, RandomStep const& step, Present present) {
  std::uint32_t const length = record.length();
  for (std::uint32_t role = 0; role < record.blocks.size(); ++role) {
    StepRecord::Block const& b = record.blocks[role];
    std::uint32_t const end = std::min(length, b.freed);
    // From `from` on the block could be away until the use at `entry`, which is at `to`.
    auto const absence =
        [&](std::uint32_t from, std::uint32_t to, std::uint32_t entry, bool is_away) {
          std::uint32_t back = from;
          if (plan.leaves_for_nothing(entry)) {
            back = to;
          } else if (is_away) {
            back = to;  // the plan did not count on its room before
          } else if (plan.must_leave(entry)) {
            back = plan.returns_at(entry);
            CHECK(back >= std::min(from, to));
          }
          for (std::uint32_t t = std::max(from, back); t < std::min(to, end); ++t) {
            present(t, b.bytes, false);
          }
        };
    if (!record.is_birth(role)) {
      bool const is_resident = step.is_resident(b.id);
      bool const is_used = b.first != StepRecord::none;
      if (is_used || is_resident) {
        absence(0, is_used ? b.first : length, is_used ? b.first : never_entry, !is_resident);
      }
    }
    for (std::uint32_t e = b.first; e < length; e = record.entries[e].next) {
      StepRecord::Entry const& entry = record.entries[e];
      std::uint32_t const to = std::min(entry.next, end);
      std::uint32_t const from =
          entry.released == 0 ? to : std::min<std::uint32_t>(entry.released, to);
      for (std::uint32_t t = e; t < from; ++t) {
        present(t, b.bytes, true);
      }
      if (entry.released != 0) {
        absence(entry.released, entry.next >= never_entry ? end : entry.next, entry.next, false);
      }
    }
  }
}

std::uint64_t most(std::vector<std::uint64_t> const& bytes) {
  return *std::max_element(bytes.begin(), bytes.end());
}

}  // namespace

TEST_SUITE("eviction") {
  TEST_CASE("StepPlan: a block may return into the slack of the plan") {
    // While 1 and 2 are used there is no room for 0. When 2 has left there is room for 3 and 0,
    // although 0 is needed much later, after other moments with an excess.
    std::vector<std::uint32_t> step{0, 1, 2, 1, 2, 1, 2};
    for (int i = 0; i < 10; ++i) {
      step.insert(step.end(), {1, 3});
    }
    auto const last_use = static_cast<std::uint32_t>(step.size());
    step.push_back(0);
    AccessSchedule const schedule = reading({64, 64, 128, 64}, step);
    PlanOptions options{.most_extra = -1.0, .most_extra_for_next = -1.0, .kept_free = 0};
    SUBCASE("with no room planned for returns") {}
    SUBCASE("with room planned for returns") {
      options = {.most_extra = 100.0, .kept_free = 0};
    }
    StepPlan plan{options};
    plan.make(schedule, 192, 0, all);
    REQUIRE(plan.must_leave(last_use));
    CHECK(plan.returns_at(last_use) > 6);
    CHECK(plan.returns_at(last_use) <= 9);

    SUBCASE("but not into room that must stay free") {
      StepPlan careful{{.most_extra = -1.0, .most_extra_for_next = -1.0, .kept_free = 0.05}};
      careful.make(schedule, 192, 0, all);
      REQUIRE(careful.must_leave(last_use));
      CHECK(careful.returns_at(last_use) >= last_use - 1);
    }
  }

  TEST_CASE("StepPlan: a block that leaves without a copy costs less than one that needs a copy") {
    // One of blocks 0 and 1 must be away while block 2 is used.
    std::vector<std::pair<std::uint32_t, Access>> const step{{0, Access::read_write},
                                                             {1, Access::read},
                                                             {2, Access::read},
                                                             {1, Access::read},
                                                             {0, Access::read_write}};
    // Which of the two leaves when a part of 310 bytes does not fit.
    auto const leaves = [&](std::size_t read_bytes, std::size_t capacity_bytes, double discount) {
      StepPlan plan{{.ahead_ops = 0, .clean_discount = discount}};
      plan.make(repeating({100, read_bytes, 310 - 100 - read_bytes}, step), capacity_bytes, 0, all);
      REQUIRE(plan.must_leave(4) != plan.must_leave(3));
      return std::string{plan.must_leave(4) ? "written" : "read"};
    };
    CHECK(leaves(110, 210, 0.0) == "written");
    CHECK(leaves(110, 210, 0.5) == "read");     // 110 bytes less 16 %
    CHECK(leaves(110, 290, 0.5) == "written");  // less 3 %
    CHECK(leaves(130, 210, 0.5) == "written");
  }

  TEST_CASE("StepPlan: of two blocks that could leave, the one whose absence ends last does") {
    AccessSchedule const schedule = reading({64, 64, 64}, {0, 1, 2, 1, 0});
    StepPlan plan{exact};
    plan.make(schedule, 128, 0, all);
    CHECK(plan.must_leave(4));       // block 0 is away before it
    CHECK(!plan.must_leave(3));      // block 1 is not
    CHECK(plan.returns_at(4) == 4);  // until then more is alive than fits
  }

  TEST_CASE("StepPlan: of the blocks that could leave, those that a codec makes smaller do") {
    AccessSchedule schedule = reading({64, 64, 64}, {0, 1, 2, 1, 0});
    schedule.on_spared(block(1), 48);
    schedule.on_spared(block(2), 48);
    StepPlan plan{exact};
    plan.make(schedule, 128, 0, all);
    CHECK(plan.must_leave(3));
    CHECK(!plan.must_leave(4));

    schedule.on_spared(block(1), 0);  // they have no codec any more
    schedule.on_spared(block(2), 0);
    plan.make(schedule, 128, 0, all);
    CHECK(!plan.must_leave(3));
    CHECK(plan.must_leave(4));
  }

  TEST_CASE("StepPlan: a plan is made again if anything that it depends on has changed") {
    using Step = std::vector<std::pair<std::uint32_t, Access>>;
    std::vector<std::size_t> const sizes{100, 100, 100, 100};
    Step const step{{0, Access::read},
                    {1, Access::write},
                    {2, Access::read},
                    {3, Access::read},
                    {2, Access::read},
                    {1, Access::read},
                    {0, Access::read}};
    StepPlan plan;
    CHECK(plan.make(repeating(sizes, step), 250, 0, all));
    CHECK_FALSE(plan.make(repeating(sizes, step), 250, 0, all));

    SUBCASE("the capacity, or what other blocks take of it") {
      CHECK_FALSE(plan.make(repeating(sizes, step), 260, 10, all));
      CHECK(plan.make(repeating(sizes, step), 251, 0, all));
      CHECK(plan.make(repeating(sizes, step), 251, 1, all));
    }
    SUBCASE("a size") {
      CHECK(plan.make(repeating({100, 100, 100, 101}, step), 250, 0, all));
    }
    SUBCASE("the order of uses, or their number") {
      Step other = step;
      std::swap(other[2], other[3]);
      CHECK(plan.make(repeating(sizes, other), 250, 0, all));
      other.pop_back();
      CHECK(plan.make(repeating(sizes, other), 250, 0, all));
    }
    SUBCASE("an access") {
      Step other = step;
      other[5].second = Access::read_write;
      CHECK(plan.make(repeating(sizes, other), 250, 0, all));
    }
    SUBCASE("which blocks are resident") {
      CHECK(plan.make(repeating(sizes, step), 250, 0, [](BlockId id) { return id != block(3); }));
    }
    SUBCASE("the bytes that a block is spared") {
      AccessSchedule schedule = repeating(sizes, step);
      schedule.on_spared(block(2), 50);
      CHECK(plan.make(schedule, 250, 0, all));
    }
    SUBCASE("how much of the step is left") {
      AccessSchedule schedule = repeating(sizes, step);
      schedule.on_access(block(0), Access::read);
      CHECK(plan.make(schedule, 250, 0, all));
    }
    SUBCASE("a block that the step does not use") {
      std::vector<std::size_t> more = sizes;
      more.push_back(10);
      CHECK(plan.make(repeating(more, step), 250, 0, all));
    }
    SUBCASE("the plan was cleared") {
      plan.clear();
      CHECK(plan.make(repeating(sizes, step), 250, 0, all));
    }
  }

  TEST_CASE("StepPlan: a plan stays valid for blocks with other indices in the same order of use") {
    auto const step_over = [](std::vector<std::uint32_t> const& places) {
      std::vector<std::size_t> sizes(places.size());
      std::vector<std::pair<std::uint32_t, Access>> uses;
      for (std::uint32_t i = 0; i < places.size(); ++i) {
        sizes[places[i]] = 100 + i;
        uses.emplace_back(places[i], Access::read);
      }
      uses.insert(uses.end(), uses.begin(), uses.end());
      return repeating(sizes, uses);
    };
    StepPlan plan;
    CHECK(plan.make(step_over({0, 1, 2, 3}), 250, 0, all));
    CHECK_FALSE(plan.make(step_over({3, 1, 0, 2}), 250, 0, all));
    CHECK_FALSE(plan.make(step_over({2, 0, 3, 1}), 250, 0, all));
  }

  TEST_CASE("StepPlan: a plan that is kept equals the one that would be made") {
    StepPlan kept;
    std::uint32_t answers = 0;
    for (std::uint64_t round = 0; round < 400; ++round) {
      CAPTURE(round);
      // Steps, capacities and residents come again, in pairs and alone.
      RandomStep const step{1 + round / 4 % 7, static_cast<std::uint32_t>(6 + round / 8 % 2), 60};
      std::size_t const capacity = 150 + round / 2 % 3 * 50;
      auto const is_resident = [&](BlockId id) {
        return round / 2 % 2 == 0 || step.is_resident(id);
      };
      StepPlan fresh;
      REQUIRE(fresh.make(step.schedule, capacity, 0, is_resident));
      answers += kept.make(step.schedule, capacity, 0, is_resident) ? 0U : 1U;
      for (std::uint32_t entry = 0; entry < 2 * step.schedule.record().length(); ++entry) {
        CHECK(kept.must_leave(entry) == fresh.must_leave(entry));
        CHECK(kept.leaves_for_nothing(entry) == fresh.leaves_for_nothing(entry));
        CHECK(kept.returns_at(entry) == fresh.returns_at(entry));
      }
    }
    CHECK(answers >= 100);
  }

  TEST_CASE("StepPlan: where everything fits nothing leaves") {
    AccessSchedule const schedule = reading({64, 64, 64}, {0, 1, 2, 1, 0});
    StepPlan plan;
    plan.make(schedule, 192, 0, all);
    for (std::uint32_t entry = 0; entry < 10; ++entry) {
      CHECK(!plan.must_leave(entry));
      CHECK(!plan.leaves_for_nothing(entry));
      CHECK(plan.returns_at(entry) == 0);
    }
  }

  TEST_CASE("StepPlan: small blocks stay unless the others cannot make the room") {
    AccessSchedule const schedule = reading({256, 1_MiB, 1_MiB}, {0, 1, 2, 1, 0});
    StepPlan plan{exact};
    plan.make(schedule, 2_MiB, 0, all);
    CHECK(plan.must_leave(3));   // block 1
    CHECK(!plan.must_leave(4));  // block 0, which would be large enough

    AccessSchedule const two = reading({256, 1_MiB}, {0, 1, 0});
    plan.make(two, 1_MiB, 0, all);
    CHECK(plan.must_leave(2));
  }

  TEST_CASE("StepPlan: bytes of blocks unknown to the record are not available to the plan") {
    AccessSchedule const schedule = reading({64, 64, 64}, {0, 1, 2, 1, 0});
    StepPlan plan{exact};
    plan.make(schedule, 192, 64, all);
    CHECK(plan.must_leave(4));
  }

  TEST_CASE("StepPlan: a block that is overwritten next leaves without cost, before any other") {
    AccessSchedule const schedule = repeating({64, 64, 64},
                                              {{0, Access::read},
                                               {1, Access::read},
                                               {2, Access::read},
                                               {1, Access::write},
                                               {0, Access::read}});
    StepPlan plan{exact};
    plan.make(schedule, 128, 0, all);
    CHECK(plan.leaves_for_nothing(3));
    CHECK(!plan.leaves_for_nothing(4));
    CHECK(!plan.must_leave(3));
    CHECK(!plan.must_leave(4));
    CHECK(plan.leaves_for_nothing(never_entry));
    CHECK(!plan.leaves_for_nothing(unknown_entry));
  }

  TEST_CASE("StepPlan: a capacity that no plan can meet gives a plan without returns") {
    AccessSchedule const schedule = reading({64, 64, 64}, {0, 1, 2, 1, 0});
    StepPlan plan;
    plan.make(schedule, 32, 0, all);
    for (std::uint32_t entry = 0; entry < 10; ++entry) {
      CHECK(plan.returns_at(entry) == 0);
    }
  }

  TEST_CASE("StepPlan: a cleared plan evicts only blocks that are not used again") {
    AccessSchedule const schedule = reading({64, 64, 64}, {0, 1, 2, 1, 0});
    StepPlan plan{exact};
    plan.make(schedule, 128, 0, all);
    plan.clear();
    CHECK(!plan.must_leave(4));
    CHECK(plan.returns_at(4) == 0);
    CHECK(plan.leaves_for_nothing(never_entry));
  }

  TEST_CASE("StepPlan: the absence of a block that was used early counts once") {
    // Two loops over the blocks. The program has used block 0 and, early, the last one.
    for (std::uint32_t count = 4; count < 9; ++count) {
      std::vector<std::uint32_t> step;
      for (std::uint32_t i = 0; i < 2 * count; ++i) {
        step.push_back(i % count);
      }
      AccessSchedule schedule = reading(std::vector<std::size_t>(count, 64), step);
      for (std::uint32_t const used : {0U, count - 1}) {
        schedule.on_access(block(used), Access::read);
        schedule.on_release(block(used));
      }
      REQUIRE(schedule.cursor() == 1);
      for (std::uint32_t fitting = 2; fitting < count; ++fitting) {
        StepPlan plan{exact};
        plan.make(schedule, std::size_t{fitting} * 64, 0, all);
        for (std::uint32_t moment = 1; moment < 2 * count; ++moment) {
          std::uint32_t away = 0;
          for (std::uint32_t i = 0; i < count; ++i) {
            std::uint32_t entry = schedule.use_of(block(i)).entry;
            while (entry < moment) {
              entry += count;
            }
            away += entry != moment && plan.must_leave(entry) ? 1U : 0U;
          }
          CAPTURE(count);
          CAPTURE(fitting);
          CAPTURE(moment);
          CHECK(away + fitting >= count);
        }
      }
    }
  }

  TEST_CASE(
      "StepPlan: blocks come back early at the price that is allowed, otherwise just in time") {
    // Three loops over ten blocks, of which eight fit: two are away, and room for one more takes a
    // third away.
    std::vector<std::size_t> const sizes(10, 64);
    std::vector<std::uint32_t> step;
    for (std::uint32_t i = 0; i < 30; ++i) {
      step.push_back(i % 10);
    }
    AccessSchedule const schedule = reading(sizes, step);
    for (double const price : {0.05, 2.0}) {
      CAPTURE(price);
      StepPlan plan{{.most_extra_for_next = price}};
      plan.make(schedule, 8 * 64, 0, all);
      std::uint32_t leaving = 0;
      for (std::uint32_t entry = 0; entry < 30; ++entry) {
        if (plan.must_leave(entry)) {
          ++leaving;
          CHECK((plan.returns_at(entry) < entry) == (price > 1.0));
        }
      }
      CHECK(leaving >= 2);
    }
  }

  TEST_CASE("StepPlan: the more bytes must be away, the more bytes early returns may cost") {
    // Four loops over a hundred blocks, from which blocks may come back sixteen uses early.
    std::vector<std::uint32_t> step;
    for (std::uint32_t i = 0; i < 400; ++i) {
      step.push_back(i % 100);
    }
    AccessSchedule const schedule = reading(std::vector<std::size_t>(100, 64), step);
    // The sum over all blocks of how many uses before they are needed they may be back.
    auto const early_uses = [&](std::size_t fitting, double of_excess) {
      StepPlan plan{{.ahead_ops = 16,
                     .most_extra = 0.0,
                     .most_extra_of_excess = of_excess,
                     .most_extra_for_next = -1.0}};
      plan.make(schedule, fitting * 64, 0, all);
      std::uint32_t uses = 0;
      for (std::uint32_t entry = 0; entry < 400; ++entry) {
        uses += plan.must_leave(entry) ? entry - plan.returns_at(entry) : 0;
      }
      return uses;
    };
    CHECK(early_uses(50, 100.0) > early_uses(50, 0.0));
    CHECK(early_uses(95, 100.0) == early_uses(95, 0.0));  // less than a tenth has to be away
  }

  // Plays the plan moment by moment, to check that there is room for its returns.
  TEST_CASE("StepPlan: the rest of any step fits at each moment if each single use fits") {
    std::uint32_t leaving = 0;
    for (std::uint64_t seed = 1; seed <= 300; ++seed) {
      CAPTURE(seed);
      RandomStep const step{seed, static_cast<std::uint32_t>(4 + seed % 20), 100};
      StepRecord const& record = step.schedule.record();
      REQUIRE(step.schedule.is_predicting());
      auto const is_resident = [&](BlockId id) { return step.is_resident(id); };

      std::vector<std::uint64_t> needed(record.length());
      StepPlan const nothing;
      play(record, nothing, step, [&](std::uint32_t t, std::uint64_t bytes, bool is_needed) {
        needed[t] += is_needed ? bytes : 0;
      });
      std::uint64_t const capacity = most(needed) + seed % 150;
      for (PlanOptions const options : {exact, PlanOptions{}, PlanOptions{64, 1.0, 1.0}}) {
        StepPlan plan{options};
        plan.make(step.schedule, capacity, 0, is_resident);
        std::vector<std::uint64_t> bytes(record.length());
        play(record, plan, step, [&](std::uint32_t t, std::uint64_t more, bool) {
          bytes[t] += more;
        });
        CHECK(most(bytes) <= capacity);
        for (std::uint32_t entry = 0; entry < record.length(); ++entry) {
          leaving += plan.must_leave(entry) ? 1U : 0U;
        }
      }
    }
    CHECK(leaving > 1000);  // otherwise it has tested little
  }
}
