// SPDX-License-Identifier: Apache-2.0
// Compares the schedule's predictions for programs that repeat exactly with their real uses.
#include <spillway/core/types.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

namespace {

using namespace spillway;
using Random = std::mt19937_64;

/// One action of a step. A part is a block of the step: one that lives on, one made in the step
/// before and freed in this one, or one made in this one.
struct Action {
  enum class Kind : std::uint8_t { create, use, destroy } kind;
  std::uint32_t part;
};

/// A random step that can be repeated without end.
struct Program {
  Program(Random& random, std::uint32_t parts, std::size_t uses) : bytes(parts), role(parts) {
    for (std::uint32_t i = 0; i < parts; ++i) {
      bytes[i] = 256 * (1 + random() % 3);  // few sizes, so that size alone tells little
      role[i] = random() % 3 == 0   ? Role::lives_on
                : random() % 4 == 0 ? Role::crosses
                                    : Role::local;
    }
    std::vector<std::uint32_t> order;
    for (std::size_t i = 0; i < uses; ++i) {
      order.push_back(static_cast<std::uint32_t>(random() % parts));
    }
    // A block that lives across the end of the step is made in the second half and freed in the
    // first half of the next step.
    std::size_t const half = uses / 2;
    std::vector<std::size_t> first(parts, uses);
    std::vector<std::size_t> last(parts, uses);
    for (std::size_t i = 0; i < uses; ++i) {
      std::uint32_t const part = order[i];
      bool const counts = role[part] != Role::crosses || i >= half;
      first[part] = counts ? std::min(first[part], i) : first[part];
      last[part] = role[part] != Role::crosses || i < half ? i : last[part];
    }
    for (std::size_t i = 0; i < uses; ++i) {
      std::uint32_t const part = order[i];
      if (role[part] == Role::crosses && (first[part] == uses || last[part] == uses)) {
        continue;  // never used on one side of the boundary
      }
      if (role[part] != Role::lives_on && i == first[part]) {
        actions.push_back({Action::Kind::create, part});
      }
      actions.push_back({Action::Kind::use, part});
      if (role[part] != Role::lives_on && i == last[part]) {
        actions.push_back({Action::Kind::destroy, part});
      }
    }
  }

  enum class Role : std::uint8_t { lives_on, crosses, local };
  std::vector<std::size_t> bytes;
  std::vector<Role> role;
  std::vector<Action> actions;
};

/// Runs a program for some steps. @returns for each use the block, its prediction, and the step
struct Seen {
  BlockId id;
  Use use;
  int step;
};

std::vector<Seen> run(Program const& program, int steps, AccessSchedule& schedule) {
  std::vector<BlockId> old(program.bytes.size());      // born in the step before
  std::vector<BlockId> current(program.bytes.size());  // born in this step, or living on
  std::uint32_t next_index = 0;
  std::vector<std::uint32_t> free_indices;
  std::vector<std::uint32_t> generations;
  auto const create = [&](std::uint32_t part) {
    std::uint32_t index = next_index;
    if (free_indices.empty()) {
      generations.push_back(0);
      ++next_index;
    } else {
      index = free_indices.back();
      free_indices.pop_back();
    }
    BlockId const id = make_block_id(index, ++generations[index]);
    schedule.on_create(id, program.bytes[part]);
    return id;
  };
  for (std::uint32_t i = 0; i < program.bytes.size(); ++i) {
    if (program.role[i] == Program::Role::lives_on) {
      current[i] = create(i);
    }
  }
  std::vector<Seen> seen;
  for (int step = 0; step < steps; ++step) {
    schedule.begin_step();
    for (std::uint32_t i = 0; i < program.bytes.size(); ++i) {
      if (program.role[i] == Program::Role::crosses) {
        old[i] = current[i];
        current[i] = BlockId{};
      }
    }
    for (Action const& action : program.actions) {
      bool const is_old = current[action.part] == BlockId{};
      BlockId& id = is_old ? old[action.part] : current[action.part];
      switch (action.kind) {
      case Action::Kind::create:
        current[action.part] = create(action.part);
        break;
      case Action::Kind::use:
        if (id != BlockId{}) {  // in the first step no block is left over
          seen.push_back({id, schedule.on_access(id, Access::read), step});
          schedule.on_release(id);
        }
        break;
      case Action::Kind::destroy:
        if (id != BlockId{}) {
          schedule.on_destroy(id);
          free_indices.push_back(index_of_block(id));
          id = BlockId{};
        }
        break;
      }
    }
  }
  return seen;
}

}  // namespace

TEST_SUITE("schedule") {
  TEST_CASE("AccessSchedule: every prediction for a program that repeats is right") {
    std::uint64_t const seed = 4711;
    INFO("seed ", seed);
    Random random{seed};
    for (int round = 0; round < 60; ++round) {
      Program const program{
          random, 2 + static_cast<std::uint32_t>(random() % 40), 20 + random() % 300};
      AccessSchedule schedule;
      int const steps = 7;
      auto const seen = run(program, steps, schedule);
      std::map<BlockId, std::uint64_t> next;  // position of the block's next use
      std::size_t predicted = 0;
      for (std::size_t position = seen.size(); position-- != 0;) {
        auto const [id, use, step] = seen[position];
        REQUIRE(use.now == position);
        auto const after = next.find(id);
        // Blocks left over from the first step are recognised one step later.
        if (step >= 3 && step < steps - 1) {
          CAPTURE(round);
          CAPTURE(position);
          REQUIRE(use.next == (after == next.end() ? use_never : after->second));
          ++predicted;
        }
        next[id] = position;
      }
      REQUIRE(predicted > 0);
    }
  }

  TEST_CASE("AccessSchedule: the listed next uses are those that then happen") {
    std::uint64_t const seed = 4712;
    INFO("seed ", seed);
    Random random{seed};
    for (int round = 0; round < 20; ++round) {
      std::uint32_t const blocks = 2 + static_cast<std::uint32_t>(random() % 20);
      std::vector<std::uint32_t> step;
      for (std::size_t i = 0; i < 30 + random() % 50; ++i) {
        step.push_back(static_cast<std::uint32_t>(random() % blocks));
      }
      AccessSchedule schedule;
      for (std::uint32_t i = 0; i < blocks; ++i) {
        schedule.on_create(make_block_id(i, 1), 64);
      }
      for (int repeat = 0; repeat < 3; ++repeat) {
        schedule.begin_step();
        for (std::size_t i = 0; i < step.size(); ++i) {
          if (repeat != 0 && i % 7 == 0) {
            std::size_t ahead = i;
            schedule.upcoming([&](AccessSchedule::Upcoming const& use) {
              REQUIRE(use.id == make_block_id(step[ahead % step.size()], 1));
              REQUIRE(use.position == schedule.position() + ahead - i);
              ++ahead;
              return true;
            });
            REQUIRE(ahead == i + step.size());
          }
          schedule.on_access(make_block_id(step[i], 1), Access::read);
        }
      }
      CHECK(schedule.mispredictions() == 0);
    }
  }
}
