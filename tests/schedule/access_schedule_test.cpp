// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

TEST_SUITE("schedule") {
  namespace {

  using namespace spillway;
  using testing::block;
  using Change = AccessSchedule::Change;

  /// A schedule over blocks that live on, named by their indices.
  struct Rig {
    explicit Rig(std::uint32_t blocks, std::size_t bytes = 64) {
      for (std::uint32_t i = 0; i < blocks; ++i) {
        schedule.on_create(block(i), bytes);
      }
    }

    Use use(BlockId id, Access access = Access::read) {
      Use const use = schedule.on_access(id, access);
      schedule.on_release(id);
      return use;
    }
    Use use(std::uint32_t index) { return use(block(index)); }

    /// One step over these blocks. @returns the predicted next uses
    std::vector<std::uint64_t> step(std::vector<std::uint32_t> const& indices) {
      schedule.begin_step();
      std::vector<std::uint64_t> next;
      for (std::uint32_t const index : indices) {
        next.push_back(use(index).next);
      }
      return next;
    }

    AccessSchedule schedule;
  };

  std::vector<std::uint32_t> round_robin(std::uint32_t blocks, std::uint32_t uses) {
    std::vector<std::uint32_t> indices;
    for (std::uint32_t i = 0; i < uses; ++i) {
      indices.push_back(i % blocks);
    }
    return indices;
  }

  }  // namespace

  TEST_CASE("AccessSchedule: a program that marks no steps gets no predictions") {
    Rig rig{2};
    for (int i = 0; i < 100; ++i) {
      CHECK(rig.use(0).next == use_unknown);
    }
    CHECK(!rig.schedule.is_predicting());
    CHECK(rig.schedule.position() == 100);
    CHECK(rig.schedule.mispredictions() == 0);
  }

  TEST_CASE("AccessSchedule: a record tells how far apart the uses of one block are on average") {
    Rig rig{3};
    rig.step({0, 1, 0, 2, 1});
    rig.schedule.begin_step();
    CHECK(rig.schedule.record().reuses == 2);
    CHECK(rig.schedule.record().mean_reuse() == 2);  // of 2 and 3
    rig.step({0, 1, 2});
    rig.schedule.begin_step();
    CHECK(rig.schedule.record().mean_reuse() == 0);
  }

  TEST_CASE("AccessSchedule: the first step is recorded, the second one predicted") {
    Rig rig{3};
    CHECK(rig.step({0, 1, 0, 2}) ==
          std::vector{use_unknown, use_unknown, use_unknown, use_unknown});
    // Positions 4 to 7; blocks not used again in this step are used again in the next.
    CHECK(rig.step({0, 1, 0, 2}) == std::vector<std::uint64_t>{6, 9, 8, 11});
    CHECK(rig.schedule.is_predicting());
    CHECK(rig.schedule.mispredictions() == 0);
  }

  TEST_CASE("AccessSchedule: spared bytes belong to the role and pass to its next block") {
    Rig rig{1};
    for (std::uint32_t step = 0; step < 3; ++step) {
      rig.schedule.begin_step();
      if (step > 0) {
        REQUIRE(rig.schedule.record().blocks.size() == 2);
        CHECK(rig.schedule.record().blocks[0].spared_bytes == 10 * step);
        CHECK(rig.schedule.record().blocks[1].spared_bytes == 100 * step);  // not born yet
      }
      BlockId const born = block(step + 1);
      rig.schedule.on_create(born, 256);
      rig.schedule.on_spared(block(0), 10 * (step + 1));
      rig.schedule.on_spared(born, 100 * (step + 1));
      rig.use(0);
      rig.use(born);
      rig.schedule.on_destroy(born);
    }
  }

  TEST_CASE(
      "AccessSchedule: the spared bytes of a role change by more than a sixteenth or not at all") {
    Rig rig{1, 64};
    std::vector<std::uint64_t> kept;
    for (std::uint64_t const spared : {20U, 24U, 16U, 25U, 22U, 0U, 4U, 5U}) {
      rig.schedule.begin_step();
      rig.schedule.on_spared(block(0), spared);
      rig.use(0);
      rig.schedule.begin_step();
      kept.push_back(rig.schedule.record().blocks[0].spared_bytes);
      rig.use(0);
    }
    CHECK(kept == std::vector<std::uint64_t>{20, 20, 20, 25, 25, 0, 0, 5});
  }

  TEST_CASE("AccessSchedule: the next use of any block is known, used in this step or not") {
    Rig rig{4};
    rig.step({0, 1, 2});
    rig.schedule.begin_step();
    CHECK(rig.schedule.next_use(block(0)) == 3);
    CHECK(rig.schedule.next_use(block(2)) == 5);
    CHECK(rig.schedule.next_use(block(3)) == use_never);
    rig.use(0);
    CHECK(rig.schedule.next_use(block(0)) == 6);
    CHECK(rig.schedule.use_of(block(0)).now == 4);
    CHECK(rig.schedule.next_use(block(99)) == use_unknown);
  }

  TEST_CASE("AccessSchedule: tells whether the next use overwrites the block") {
    Rig rig{2};
    auto const step = [&] {
      rig.schedule.begin_step();
      rig.use(block(0), Access::write);
      rig.use(block(1), Access::read_write);
    };
    step();
    step();
    CHECK(rig.schedule.is_overwritten_next(block(0)));
    CHECK(!rig.schedule.is_overwritten_next(block(1)));
  }

  TEST_CASE("AccessSchedule: blocks made in a step are recognised by size and first use") {
    Rig rig{1};
    auto const step = [&](std::uint32_t generation) {
      rig.schedule.begin_step();
      std::vector<std::uint64_t> next;
      for (std::uint32_t const index : {5U, 6U}) {
        rig.schedule.on_create(make_block_id(index, generation), index * 100);
      }
      next.push_back(rig.use(make_block_id(6, generation)).next);
      next.push_back(rig.use(0).next);
      next.push_back(rig.use(make_block_id(5, generation)).next);
      next.push_back(rig.use(make_block_id(6, generation)).next);
      rig.schedule.on_destroy(make_block_id(6, generation));
      next.push_back(rig.use(make_block_id(5, generation)).next);
      rig.schedule.on_destroy(make_block_id(5, generation));
      return next;
    };
    step(1);
    CHECK(step(2) == std::vector<std::uint64_t>{8, 11, 9, use_never, use_never});
    CHECK(step(3) == std::vector<std::uint64_t>{13, 16, 14, use_never, use_never});
    CHECK(rig.schedule.mispredictions() == 0);
  }

  TEST_CASE("AccessSchedule: a new block of another size is a misprediction") {
    Rig rig{1};
    auto const step = [&](std::uint32_t generation, std::size_t bytes) {
      rig.schedule.begin_step();
      rig.schedule.on_create(make_block_id(5, generation), bytes);
      Use const use = rig.use(make_block_id(5, generation));
      rig.use(0);
      rig.use(make_block_id(5, generation));
      rig.schedule.on_destroy(make_block_id(5, generation));
      return use.next;
    };
    step(1, 100);
    CHECK(step(2, 200) == use_unknown);
    CHECK(rig.schedule.mispredictions() > 0);
  }

  TEST_CASE(
      "AccessSchedule: a block freed in the step after its birth passes its role to a new block") {
    Rig rig{1};
    std::uint32_t generation = 0;
    // A gradient: made at the end of a step, read at the start of the next one, and freed.
    auto const step = [&] {
      rig.schedule.begin_step();
      std::vector<std::uint64_t> next;
      if (generation != 0) {
        next.push_back(rig.use(make_block_id(7, generation)).next);
        rig.schedule.on_destroy(make_block_id(7, generation));
      }
      ++generation;
      next.push_back(rig.use(0).next);
      rig.schedule.on_create(make_block_id(7, generation), 4096);
      next.push_back(rig.use(make_block_id(7, generation)).next);
      return next;
    };
    for (int i = 0; i < 4; ++i) {
      step();
    }
    std::uint64_t const mispredictions = rig.schedule.mispredictions();
    std::uint64_t const begin = rig.schedule.position();
    CHECK(step() == std::vector<std::uint64_t>{use_never, begin + 4, begin + 3});
    CHECK(step() == std::vector<std::uint64_t>{use_never, begin + 7, begin + 6});
    CHECK(rig.schedule.mispredictions() == mispredictions);
  }

  TEST_CASE("AccessSchedule: a block that two new blocks could succeed is succeeded by only one") {
    Rig rig{1};
    rig.schedule.begin_step();
    rig.use(0);
    BlockId const old = make_block_id(5, 1);
    rig.schedule.on_create(old, 4096);
    rig.use(old);
    rig.schedule.begin_step();
    // The first new block has the rank of the old one, the second is used where the old one was
    // first used.
    BlockId const first = make_block_id(6, 1);
    BlockId const second = make_block_id(7, 1);
    rig.schedule.on_create(first, 4096);
    rig.schedule.on_create(second, 4096);
    rig.use(0);
    rig.use(second);
    rig.use(first);
    rig.schedule.on_destroy(old);
    rig.schedule.begin_step();

    auto const& blocks = rig.schedule.record().blocks;
    std::size_t successors = 0;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      if (std::uint32_t const before = blocks[i].successor_of; before != detail::StepRecord::none) {
        ++successors;
        CHECK(blocks[before].successor == i);
      }
    }
    CHECK(successors == 1);
  }

  TEST_CASE(
      "AccessSchedule: a block made in the first step that lives on is recognised by its id") {
    Rig rig{1};
    rig.schedule.begin_step();
    rig.use(0);
    rig.schedule.on_create(block(4), 256);  // an optimiser's state
    rig.use(4);
    rig.use(0);
    CHECK(rig.step({0, 4, 0}) == std::vector<std::uint64_t>{5, 7, 6});
    CHECK(rig.schedule.mispredictions() == 0);
  }

  TEST_CASE("AccessSchedule: a step longer than its record gets no predictions beyond the record") {
    Rig rig{2};
    rig.step({0, 1});
    rig.step({0, 1});
    CHECK(rig.schedule.is_predicting());
    CHECK(rig.use(0).next == use_unknown);
    CHECK(rig.schedule.take_change() == Change::lost);
    CHECK(rig.schedule.take_change() == Change::none);
    CHECK(!rig.schedule.is_predicting());
    CHECK(rig.schedule.mispredictions() == 1);
    // The whole record matched, so the longer step is trusted.
    rig.schedule.begin_step();
    CHECK(rig.schedule.is_predicting());
  }

  TEST_CASE("AccessSchedule: a step shorter than its record is a misprediction, too") {
    Rig rig{2};
    rig.step({0, 1, 0});
    rig.step({0, 1});
    rig.schedule.begin_step();
    CHECK(rig.schedule.mispredictions() == 1);
  }

  TEST_CASE("AccessSchedule: two exchanged uses do not end the predictions") {
    Rig rig{20};
    auto indices = round_robin(20, 100);
    rig.step(indices);
    std::swap(indices[50], indices[51]);
    auto const next = rig.step(indices);
    CHECK(rig.schedule.is_predicting());
    CHECK(rig.schedule.mispredictions() == 1);
    CHECK(next[50] == 100 + 71);  // where the record has it
    CHECK(next[99] == 100 + 119);
  }

  TEST_CASE("AccessSchedule: uses that are left out are skipped") {
    Rig rig{20};
    auto indices = round_robin(20, 200);
    rig.step(indices);
    indices.erase(indices.begin() + 50, indices.begin() + 53);
    rig.schedule.begin_step();
    bool has_resumed = false;
    std::uint64_t last = 0;
    for (std::size_t i = 0; i < indices.size(); ++i) {
      last = rig.use(indices[i]).next;
      has_resumed = rig.schedule.take_change() == Change::resumed || has_resumed;
      if (i == 60) {
        CHECK(has_resumed);
        // A block whose use was left out: its next use comes three uses sooner than recorded.
        CHECK(rig.schedule.next_use(block(10)) == 200 + 67);
      }
    }
    CHECK(rig.schedule.is_predicting());
    CHECK(last == 200 + 197 + 19);
  }

  TEST_CASE("AccessSchedule: one additional use is tolerated") {
    Rig rig{21};
    auto indices = round_robin(20, 200);
    indices.push_back(20);
    rig.step(indices);
    indices.insert(indices.begin() + 100, 20);
    auto const next = rig.step(indices);
    CHECK(rig.schedule.is_predicting());
    CHECK(rig.schedule.mispredictions() == 1);
    CHECK(next[150] == 201 + 170);
  }

  TEST_CASE("AccessSchedule: another order ends the predictions within a few uses") {
    Rig rig{200};
    auto const indices = round_robin(200, 1000);
    rig.step(indices);
    rig.schedule.begin_step();
    std::size_t uses = 0;
    for (std::uint32_t i = 0; i < 200 && rig.schedule.is_predicting(); ++i, ++uses) {
      rig.use(i * 73 % 200);  // a permutation
    }
    CHECK(!rig.schedule.is_predicting());
    CHECK(rig.schedule.take_change() == Change::lost);
    CHECK(uses < 20);
    CHECK(rig.schedule.next_use(block(0)) == use_unknown);
  }

  TEST_CASE("AccessSchedule: after a long interruption it finds its place again") {
    Rig rig{60};
    auto indices = round_robin(50, 2000);
    rig.step(indices);
    std::vector<std::uint32_t> others;
    for (std::uint32_t i = 0; i < 40; ++i) {
      others.push_back(50 + i % 10);
    }
    indices.insert(indices.begin() + 200, others.begin(), others.end());
    rig.schedule.begin_step();
    bool was_lost = false;
    for (std::uint32_t const index : indices) {
      rig.use(index);
      was_lost = was_lost || !rig.schedule.is_predicting();
    }
    CHECK(was_lost);
    CHECK(rig.schedule.is_predicting());
  }

  TEST_CASE("AccessSchedule: sections in another order are not mistaken for the recorded step") {
    // Sections of 100 uses, each always the same, in a changing order: within a section the next
    // use is as recorded, but not the time at which a block is used again.
    Rig rig{300};
    auto const run = [&](std::initializer_list<std::uint32_t> rows) {
      rig.schedule.begin_step();
      std::size_t predicted = 0;
      for (std::uint32_t const row : rows) {
        for (std::uint32_t i = 0; i < 100; ++i) {
          rig.use(row * 30 + i * 7 % 60);
          predicted += rig.schedule.is_predicting() ? 1U : 0U;
        }
      }
      return predicted;
    };
    run({0, 1, 2, 3, 4, 5, 6, 7});
    run({5, 2, 7, 0, 3, 6, 1, 4});
    CHECK(run({3, 0, 6, 4, 1, 7, 5, 2}) < 100);
    CHECK(run({6, 7, 3, 1, 5, 0, 2, 4}) < 100);
  }

  TEST_CASE(
      "AccessSchedule: after a step unlike its record, it predicts only once uses match again") {
    Rig rig{200};
    auto const indices = round_robin(200, 1000);
    std::vector<std::uint32_t> other;
    for (std::uint32_t i = 0; i < 1000; ++i) {
      other.push_back(i * 73 % 200);
    }
    rig.step(indices);
    rig.step(other);
    rig.schedule.begin_step();
    CHECK(!rig.schedule.is_predicting());
    for (std::uint32_t const index : other) {
      rig.use(index);
    }
    CHECK(rig.schedule.is_predicting());
    rig.schedule.begin_step();
    CHECK(rig.schedule.is_predicting());
  }

  TEST_CASE("AccessSchedule: upcoming uses are listed in order, across the end of the step") {
    Rig rig{2};
    auto const step = [&](std::uint32_t generation) {
      rig.schedule.begin_step();
      rig.use(0);
      rig.schedule.on_create(make_block_id(9, generation), 512);
      rig.use(make_block_id(9, generation), Access::write);
      rig.use(1);
      rig.use(make_block_id(9, generation));
      rig.schedule.on_destroy(make_block_id(9, generation));
    };
    step(1);
    rig.schedule.begin_step();
    rig.use(0);
    rig.schedule.on_create(make_block_id(9, 2), 512);
    rig.use(make_block_id(9, 2), Access::write);

    std::vector<AccessSchedule::Upcoming> coming;
    rig.schedule.upcoming([&](AccessSchedule::Upcoming const& use) {
      coming.push_back(use);
      return true;
    });
    REQUIRE(coming.size() == 4);
    CHECK(coming[0].position == 6);
    CHECK(coming[0].id == block(1));
    CHECK(coming[1].position == 7);
    CHECK(coming[1].id == make_block_id(9, 2));
    CHECK(!coming[1].is_birth);
    CHECK(coming[2].position == 8);
    CHECK(coming[2].id == block(0));
    CHECK(coming[3].position == 9);
    CHECK(coming[3].id == BlockId{});
    CHECK(coming[3].is_birth);
    CHECK(coming[3].bytes == 512);
    CHECK(coming[3].access == Access::write);

    std::size_t visits = 0;
    rig.schedule.upcoming([&](AccessSchedule::Upcoming const&) { return ++visits < 2; });
    CHECK(visits == 2);
  }

  TEST_CASE("AccessSchedule: a use that came early is not listed again") {
    Rig rig{20};
    rig.step(round_robin(20, 100));
    rig.schedule.begin_step();
    rig.use(0);
    rig.use(2);
    rig.schedule.upcoming([&](AccessSchedule::Upcoming const& use) {
      CHECK(use.id == block(1));
      return false;
    });
    rig.use(1);
    rig.schedule.upcoming([&](AccessSchedule::Upcoming const& use) {
      CHECK(use.id == block(3));
      CHECK(use.position == 103);
      return false;
    });
  }

  TEST_CASE("AccessSchedule: a use that others have come before is expected now") {
    Rig rig{20};
    rig.step(round_robin(20, 100));
    rig.schedule.begin_step();
    rig.use(0);
    rig.use(3);
    rig.use(2);
    std::vector<std::uint32_t> entries;
    rig.schedule.upcoming(
        [&](AccessSchedule::Upcoming const& use) {
          CHECK(use.position >= rig.schedule.position());
          CHECK(use.position == rig.schedule.next_use(use.id));
          CHECK(use.entry == rig.schedule.use_of(use.id).entry);
          entries.push_back(use.entry);
          return true;
        },
        0,
        5);
    CHECK(entries == std::vector<std::uint32_t>{1, 4, 5});
  }

  TEST_CASE("AccessSchedule: no more entries are looked at than asked for") {
    Rig rig{100};
    rig.step(round_robin(100, 200));
    rig.schedule.begin_step();
    for (std::uint32_t i = 10; i < 60; ++i) {
      rig.schedule.on_destroy(block(i));
    }
    auto const visits = [&](std::size_t skipped, std::size_t most) {
      std::size_t count = 0;
      rig.schedule.upcoming(
          [&](AccessSchedule::Upcoming const&) { return ++count != 0; }, skipped, most);
      return count;
    };
    CHECK(visits(0, 20) == 10);
    CHECK(visits(10, 50) == 0);
    CHECK(visits(50, 20) == 10);
    CHECK(visits(190, 100) == 10);
    CHECK(visits(1000, 10) == 0);
  }

  TEST_CASE("AccessSchedule: a block that is used early and freed at once delays nothing") {
    Rig rig{80};
    std::uint32_t generation = 0;
    auto const step = [&](std::uint32_t born_before) {
      rig.schedule.begin_step();
      BlockId const born = make_block_id(100, ++generation);
      for (std::uint32_t i = 0; i < 80; ++i) {
        if (i == born_before) {
          rig.schedule.on_create(born, 4096);
          rig.use(born);
          rig.schedule.on_destroy(born);
        }
        rig.use(i);
      }
    };
    step(10);
    step(10);
    CHECK(rig.schedule.mispredictions() == 0);
    step(9);
    CHECK(rig.schedule.mispredictions() == 1);
    CHECK(rig.schedule.cursor() == 81);
  }

  TEST_CASE("AccessSchedule: two new blocks of one size that are both used early keep apart") {
    Rig rig{40};
    std::uint32_t generation = 0;
    BlockId first;
    BlockId second;
    auto const step = [&](bool is_early) {
      rig.schedule.begin_step();
      ++generation;
      first = make_block_id(100, generation);
      second = make_block_id(101, generation);
      auto const make_both = [&] {
        for (BlockId const born : {first, second}) {
          rig.schedule.on_create(born, 4096);
          rig.use(born);
        }
      };
      for (std::uint32_t i = 0; i < 30; ++i) {
        if (i == (is_early ? 10U : 11U)) {
          make_both();
        }
        rig.use(i);
      }
      CHECK((generation == 1 || rig.schedule.next_use(first) == rig.schedule.position()));
      rig.use(first);
      for (std::uint32_t i = 30; i < 40; ++i) {
        rig.use(i);
      }
      CHECK((generation == 1 || rig.schedule.next_use(second) == rig.schedule.position()));
      rig.use(second);
      rig.schedule.on_destroy(first);
      rig.schedule.on_destroy(second);
    };
    step(false);
    step(false);
    step(true);
    CHECK(rig.schedule.mispredictions() == 2);
  }

  TEST_CASE("AccessSchedule: a step longer than the limit is not recorded, but the next one is") {
    AccessSchedule schedule{10};
    schedule.on_create(block(0), 64);
    auto const step = [&](int uses) {
      schedule.begin_step();
      for (int i = 0; i < uses; ++i) {
        schedule.on_access(block(0), Access::read);
        schedule.on_release(block(0));
      }
    };
    step(11);
    step(5);
    CHECK(!schedule.is_predicting());
    schedule.begin_step();
    CHECK(schedule.is_predicting());
  }

  TEST_CASE("AccessSchedule: blocks that are made and never used count towards the limit, too") {
    AccessSchedule schedule{10};
    schedule.on_create(block(0), 64);
    auto const step = [&](std::uint32_t births) {
      schedule.begin_step();
      schedule.on_access(block(0), Access::read);
      schedule.on_release(block(0));
      for (std::uint32_t i = 1; i <= births; ++i) {
        schedule.on_create(spillway::make_block_id(1, i), 64);
        schedule.on_destroy(spillway::make_block_id(1, i));
      }
    };
    step(10);
    schedule.begin_step();
    CHECK(schedule.is_predicting());
    step(11);
    schedule.begin_step();
    CHECK(!schedule.is_predicting());
  }

  TEST_CASE("AccessSchedule: destroying an unknown block has no effect") {
    Rig rig{1};
    rig.step({0, 0});
    rig.schedule.on_destroy(make_block_id(0, 7));
    rig.schedule.on_destroy(make_block_id(1000, 1));
    CHECK(rig.step({0, 0}) == std::vector<std::uint64_t>{3, 4});
  }
}
