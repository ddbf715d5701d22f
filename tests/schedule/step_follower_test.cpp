// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>
#include <spillway/schedule/step_follower.hpp>
#include <spillway/schedule/step_record.hpp>
#include <spillway/schedule/use.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

namespace {

using namespace spillway;
using spillway::detail::ScheduledBlock;
using spillway::detail::StepFollower;
using spillway::detail::StepRecord;
using Change = StepFollower::Change;

constexpr std::uint32_t none = StepRecord::none;

std::vector<std::uint32_t> round_robin(std::uint32_t blocks, std::uint32_t uses) {
  std::vector<std::uint32_t> step;
  for (std::uint32_t i = 0; i < uses; ++i) {
    step.push_back(i % blocks);
  }
  return step;
}

/// A follower of a step over blocks that live on. Block `i` has role `i`.
struct Rig {
  static constexpr std::uint64_t start = 1000;

  explicit Rig(std::vector<std::uint32_t> const& step) {
    std::uint32_t const count = *std::max_element(step.begin(), step.end()) + 1;
    StepRecord& record = follower.record();
    blocks.resize(count);
    for (std::uint32_t i = 0; i < count; ++i) {
      record.blocks.push_back({.id = make_block_id(i, 1), .bytes = 64});
      blocks[i] = {.generation = 1, .role = i, .bytes = 64};
    }
    record.born_from = count;
    auto const length = static_cast<std::uint32_t>(step.size());
    for (std::uint32_t i = 0; i < length; ++i) {
      StepRecord::Block& block = record.blocks[step[i]];
      record.entries.push_back({step[i], never_entry, (i + 1) & StepRecord::entry_mask, 0});
      if (block.last != none) {
        record.entries[block.last].next = i;
        ++record.reuses;
        record.reuse_sum += i - block.last;
      } else {
        block.first = i;
      }
      block.last = i;
    }
    for (StepRecord::Block const& block : record.blocks) {
      if (block.last != none) {
        record.entries[block.last].next = length + block.first;
      }
    }
    follower.start(start);
  }

  void free(std::uint32_t block) {
    follower.record().blocks[blocks[block].role].id = BlockId{};
    blocks[block] = {};
  }

  /// A block that the record does not know. @returns its index
  std::uint32_t add_stranger(std::uint64_t bytes) {
    blocks.push_back({.generation = 1, .bytes = bytes});
    return static_cast<std::uint32_t>(blocks.size() - 1);
  }

  Use use(std::uint32_t block) {
    Use const use =
        follower.on_access(blocks, recording, make_block_id(block, 1), start + uses_so_far);
    ++uses_so_far;
    return use;
  }

  /// Uses a block that is not expected until the place in the record is lost.
  void lose(std::uint32_t stranger) {
    while (follower.is_following()) {
      use(stranger);
    }
  }

  StepFollower follower;
  StepFollower::Blocks blocks;
  StepRecord recording;
  std::uint64_t uses_so_far = 0;
};

}  // namespace

TEST_SUITE("schedule") {
  TEST_CASE("StepFollower: without a record it predicts nothing and counts no misprediction") {
    StepFollower follower;
    StepFollower::Blocks blocks{{.generation = 1, .bytes = 64}};
    StepRecord recording;
    follower.start(5);
    Use const use = follower.on_access(blocks, recording, make_block_id(0, 1), 5);
    CHECK(use.now == 5);
    CHECK(use.next == use_unknown);
    CHECK(!follower.is_following());
    CHECK(follower.mispredictions() == 0);
  }

  TEST_CASE("StepFollower: an expected use advances the place and returns the next use") {
    Rig rig{{0, 1, 0}};
    CHECK(rig.follower.is_following());
    Use const first = rig.use(0);
    CHECK(first.next == Rig::start + 2);
    CHECK(first.entry == 2);
    CHECK(rig.follower.cursor() == 1);
    CHECK(rig.use(1).entry == 3 + 1);  // in the step after
    CHECK(rig.use(0).next == Rig::start + 3);
    CHECK(rig.follower.cursor() == 3);
    CHECK(rig.follower.mispredictions() == 0);
  }

  TEST_CASE("StepFollower: an entry that was used early is not waited for again") {
    Rig rig{{0, 1, 2, 3, 0, 1, 2, 3}};
    rig.use(0);
    rig.use(2);
    CHECK(rig.follower.cursor() == 1);
    CHECK(!rig.follower.is_past(1));
    CHECK(rig.follower.is_past(2));
    CHECK(!rig.follower.is_past(3));
    CHECK(rig.follower.mispredictions() == 1);
    rig.use(1);
    CHECK(rig.follower.cursor() == 3);
    CHECK(rig.use(3).next == Rig::start + 7);
    CHECK(rig.follower.mispredictions() == 1);
  }

  TEST_CASE("StepFollower: an entry that was used early stays used when its block is freed") {
    Rig rig{round_robin(40, 80)};
    rig.use(0);
    rig.use(2);
    rig.free(2);
    CHECK(rig.follower.is_past(2));
    rig.use(1);
    CHECK(rig.follower.cursor() == 3);
    CHECK(!rig.follower.is_past(42));
    rig.use(3);
    CHECK(rig.follower.position_of(4) == Rig::start + 4);
    CHECK(rig.follower.mispredictions() == 1);
  }

  TEST_CASE("StepFollower: a new block does not take the role of one that was used early") {
    Rig rig{{0, 1, 2, 3, 4, 0, 1, 2, 3}};
    rig.follower.record().born_from = 2;
    rig.free(2);
    rig.free(3);
    std::uint32_t const first = rig.add_stranger(64);
    std::uint32_t const second = rig.add_stranger(64);
    rig.use(0);
    CHECK(rig.use(first).entry == 7);
    CHECK(rig.use(second).entry == 8);
    CHECK(rig.blocks[first].role == 2);
    CHECK(rig.blocks[second].role == 3);
    rig.use(1);
    CHECK(rig.follower.cursor() == 4);
  }

  TEST_CASE("StepFollower: a new block takes the role of one from the step before that lives on") {
    Rig rig{{0, 1, 2, 3, 0, 1, 2, 3}};
    rig.follower.record().born_from = 2;
    std::uint32_t const born = rig.add_stranger(64);
    rig.use(0);
    rig.use(1);
    CHECK(rig.use(born).entry == 6);
    CHECK(rig.blocks[born].role == 2);
    CHECK(rig.blocks[2].role == none);
    CHECK(rig.follower.mispredictions() == 0);
  }

  // A lookup walks no chain: what passes an entry over has moved its role on.
  TEST_CASE("StepFollower: the coming entry of each role is never before the cursor") {
    constexpr std::uint32_t rounds = 40;
    std::vector<std::uint32_t> step;
    for (std::uint32_t round = 0; round < rounds; ++round) {
      step.insert(step.end(), 50, 0);
      for (std::uint32_t i = 1; i <= 10; ++i) {
        step.push_back(10 * round + i);
      }
    }
    Rig rig{step};
    for (std::uint32_t i = 1; i <= 10 * rounds; ++i) {  // block 0 is not used any more
      rig.use(i);
      REQUIRE(rig.follower.is_following());
      for (StepRecord::Block const& role : rig.follower.record().blocks) {
        REQUIRE(role.coming >= rig.follower.cursor());
        REQUIRE(role.coming >= role.unused);
      }
    }
    CHECK(rig.follower.record().blocks[0].unused == 0);
    CHECK(rig.follower.cursor() == step.size());
  }

  TEST_CASE(
      "StepFollower: eight consecutive entries farther on show that those before are left out") {
    std::vector<std::uint32_t> const step = round_robin(40, 80);
    Rig rig{step};
    rig.use(0);
    for (std::uint32_t i = 5; i < 12; ++i) {
      rig.use(i);
      CHECK(rig.follower.cursor() == 1);
    }
    rig.use(12);
    CHECK(rig.follower.cursor() == 13);
    CHECK(rig.follower.take_change() == Change::resumed);
    CHECK(rig.follower.take_change() == Change::none);
    // Four entries were left out: all uses come four uses sooner.
    CHECK(rig.follower.position_of(13) == Rig::start + 9);
    CHECK(rig.follower.use_of(rig.blocks[3], Rig::start + 9).entry == 43);
  }

  TEST_CASE(
      "StepFollower: eight stray uses in a row are tolerated, and the ninth loses the place") {
    Rig rig{round_robin(40, 80)};
    std::uint32_t const stranger = rig.add_stranger(4096);
    for (int i = 0; i < 8; ++i) {
      CHECK(rig.use(stranger).next == use_unknown);
      CHECK(rig.follower.is_following());
      CHECK(rig.follower.take_change() == Change::none);
    }
    rig.use(stranger);
    CHECK(!rig.follower.is_following());
    CHECK(rig.follower.take_change() == Change::lost);
    CHECK(rig.follower.mispredictions() == 9);
  }

  TEST_CASE("StepFollower: a stray use shifts all predictions by one use") {
    Rig rig{{0, 1, 2, 0}};
    std::uint32_t const stranger = rig.add_stranger(4096);
    CHECK(rig.use(0).next == Rig::start + 3);
    rig.use(stranger);
    rig.use(1);
    CHECK(rig.follower.position_of(3) == Rig::start + 4);
    CHECK(rig.follower.use_of(rig.blocks[0], Rig::start + 3).next == Rig::start + 4);
  }

  TEST_CASE("StepFollower: sixteen expected uses make up for one stray use") {
    for (std::uint32_t const expected : {15U, 16U}) {
      CAPTURE(expected);
      Rig rig{round_robin(40, 80)};
      std::uint32_t const stranger = rig.add_stranger(4096);
      for (int i = 0; i < 8; ++i) {
        rig.use(stranger);
      }
      for (std::uint32_t i = 0; i < expected; ++i) {
        rig.use(i);
      }
      rig.use(stranger);
      CHECK(rig.follower.is_following() == (expected == 16));
    }
  }

  TEST_CASE("StepFollower: a new block takes a free role of its size") {
    for (std::uint64_t const bytes : {64U, 128U}) {
      CAPTURE(bytes);
      Rig rig{{0, 1, 2, 1, 0}};
      rig.free(1);
      std::uint32_t const born = rig.add_stranger(bytes);
      rig.use(0);
      Use const use = rig.use(born);
      CHECK(rig.blocks[born].role == (bytes == 64 ? 1 : none));
      CHECK(use.entry == (bytes == 64 ? 3 : none));
      CHECK(rig.follower.mispredictions() == (bytes == 64 ? 0 : 1));
    }
  }

  TEST_CASE("StepFollower: a step that ends early is a misprediction, one of the recorded length "
            "is not") {
    for (bool const is_complete : {false, true}) {
      Rig rig{{0, 1, 2}};
      rig.use(0);
      rig.use(1);
      if (is_complete) {
        rig.use(2);
      }
      rig.follower.finish(rig.uses_so_far);
      CHECK(rig.follower.mispredictions() == (is_complete ? 0 : 1));
    }
  }

  TEST_CASE(
      "StepFollower: if less than half of a step matched, the next one starts without trust") {
    for (std::uint32_t const agreed : {20U, 60U}) {
      CAPTURE(agreed);
      Rig rig{round_robin(40, 80)};
      std::uint32_t const stranger = rig.add_stranger(4096);
      for (std::uint32_t i = 0; i < agreed; ++i) {
        rig.use(i % 40);
      }
      for (std::uint32_t i = agreed; i < 80; ++i) {
        rig.use(stranger);
      }
      rig.follower.finish(80);
      rig.follower.start(Rig::start + 80);
      CHECK_FALSE(rig.follower.is_following() == (agreed == 20));
    }
  }

  TEST_CASE("StepFollower: a long match makes up for at most eight stray uses") {
    Rig rig{round_robin(100, 400)};
    std::uint32_t const stranger = rig.add_stranger(128);
    for (std::uint32_t i = 0; i < 300; ++i) {
      rig.use(i % 100);
    }
    for (std::uint32_t i = 0; i < 8; ++i) {
      rig.use(stranger);
      CHECK(rig.follower.is_following());
    }
    rig.use(stranger);
    CHECK_FALSE(rig.follower.is_following());
  }

  TEST_CASE(
      "StepFollower: each loss doubles the number of matches needed to find the place again") {
    Rig rig{round_robin(100, 1000)};
    std::uint32_t const stranger = rig.add_stranger(128);
    std::uint32_t place = 0;
    for (; place < 200; ++place) {
      rig.use(place % 100);
    }
    for (std::uint32_t const needed : {32U, 64U, 128U}) {
      CAPTURE(needed);
      rig.lose(stranger);
      Use use;
      std::uint32_t uses = 0;
      for (; !rig.follower.is_following() && uses < 400; ++uses) {
        use = rig.use(place++ % 100);
      }
      CHECK(uses == needed);
      CHECK(use.next == use.now + 100);
      CHECK(rig.follower.cursor() == place);
    }
  }

  TEST_CASE("StepFollower: just after the place was found again, four stray uses are tolerated") {
    Rig rig{round_robin(100, 400)};
    std::uint32_t const stranger = rig.add_stranger(128);
    std::uint32_t place = 0;
    for (; place < 100; ++place) {
      rig.use(place);
    }
    rig.lose(stranger);
    while (!rig.follower.is_following()) {
      rig.use(place++ % 100);
    }
    for (std::uint32_t i = 0; i < 4; ++i) {
      rig.use(stranger);
      CHECK(rig.follower.is_following());
    }
    rig.use(stranger);
    CHECK_FALSE(rig.follower.is_following());
  }

  TEST_CASE("StepFollower: if the place is found out of sequence, it waits for the sixteen entries "
            "before") {
    Rig rig{round_robin(100, 400)};
    std::uint32_t const stranger = rig.add_stranger(128);
    std::uint32_t place = 0;
    for (; place < 100; ++place) {
      rig.use(place);
    }
    rig.lose(stranger);
    while (!rig.follower.is_following() && place < 400) {
      rig.use((place + 1) % 100);  // pairs in reverse order
      if (!rig.follower.is_following()) {
        rig.use(place % 100);
      }
      place += 2;
    }
    REQUIRE(rig.follower.is_following());
    CHECK(rig.follower.cursor() + 16 >= place - 4);
    CHECK(rig.follower.cursor() + 16 <= place + 4);
  }

  TEST_CASE(
      "StepFollower: entries used beyond the window move the place to half a window behind them") {
    Rig rig{round_robin(200, 800)};
    for (std::uint32_t i = 0; i < 200; ++i) {
      rig.use(i);
    }
    for (std::uint32_t const entry : {262U, 263U, 264U}) {
      rig.use(entry - 200);
      CHECK(rig.follower.cursor() == 200);
    }
    rig.use(65);
    CHECK(rig.follower.cursor() == 265 - 32);
  }

  TEST_CASE("StepFollower: a step of which half matched is trusted again") {
    for (std::uint32_t const strays : {4U, 5U}) {
      CAPTURE(strays);
      Rig rig{{0, 1, 2, 3}};
      std::uint32_t const stranger = rig.add_stranger(128);
      for (std::uint32_t i = 0; i < strays; ++i) {
        rig.use(stranger);
      }
      for (std::uint32_t i = 0; i < 4; ++i) {
        rig.use(i);
      }
      rig.follower.finish(rig.uses_so_far);
      rig.follower.start(rig.start);
      CHECK(rig.follower.is_following() == (strays == 4));
    }
  }

  TEST_CASE("StepFollower: where the place was never lost, wrong predictions cost no trust") {
    for (bool const is_longer : {false, true}) {  // beyond the end of its record a step is not lost
      CAPTURE(is_longer);
      Rig rig{round_robin(100, 150)};
      std::uint32_t const stranger = rig.add_stranger(128);
      for (std::uint32_t i = 0; i < 60; ++i) {
        rig.use(i);
      }
      for (std::uint32_t i = 40; i < 48; ++i) {
        rig.use(i);  // expected 80 uses later: eight wrong predictions beside fifty right ones
      }
      for (std::uint32_t i = 60; i < 150; ++i) {
        rig.use(i % 100);
      }
      if (is_longer) {
        rig.use(stranger);
      }
      REQUIRE(rig.follower.is_following() == !is_longer);
      rig.follower.finish(rig.uses_so_far);
      rig.follower.start(rig.start);
      CHECK(rig.follower.is_following());
    }
  }

  TEST_CASE("StepFollower: after a loss, eight right predictions make up for each wrong one") {
    for (std::uint32_t const length : {180U, 181U}) {
      CAPTURE(length);
      Rig rig{round_robin(100, length)};
      for (std::uint32_t i = 0; i < 60; ++i) {
        rig.use(i);
      }
      for (std::uint32_t i = 40; i < 49; ++i) {
        rig.use(i);  // expected 80 uses later; the last one, at the loss, counts twice
      }
      REQUIRE_FALSE(rig.follower.is_following());
      for (std::uint32_t i = 60; i < length; ++i) {
        rig.use(i % 100);
      }
      rig.follower.finish(rig.uses_so_far);
      rig.follower.start(rig.start);
      CHECK(rig.follower.is_following() == (length == 181));
    }
  }

  // A slow model: the set of used entries. The next use of a block is its first entry at or after
  // the cursor that is not in the set.
  TEST_CASE(
      "StepFollower: returns the first unused entry of any block, in whatever order uses come") {
    std::uint64_t out_of_order = 0;
    for (std::uint64_t seed = 1; seed <= 60; ++seed) {
      CAPTURE(seed);
      std::mt19937_64 random{seed};
      auto const count = static_cast<std::uint32_t>(8 + random() % 60);
      std::vector<std::uint32_t> step = round_robin(count, 400);
      std::shuffle(step.begin(), step.end(), random);
      Rig rig{step};
      StepRecord const& record = rig.follower.record();
      std::uint32_t const length = record.length();
      std::set<std::uint32_t> used;
      std::uint32_t last_cursor = 0;
      for (std::size_t i = 0; i < step.size(); ++i) {
        if (random() % 20 == 0) {
          continue;  // left out
        }
        if (i + 1 < step.size() && random() % 10 == 0) {
          std::swap(step[i], step[i + 1]);
        }
        std::uint64_t const mispredictions = rig.follower.mispredictions();
        Use const use = rig.use(step[i]);
        if (!rig.follower.is_following()) {
          break;
        }
        out_of_order += rig.follower.mispredictions() - mispredictions;
        if (rig.blocks[step[i]].at != none) {
          used.insert(rig.blocks[step[i]].at);
        }
        std::uint32_t const cursor = rig.follower.cursor();
        REQUIRE(cursor >= last_cursor);
        REQUIRE(cursor <= length);
        last_cursor = cursor;
        auto const is_used = [&](std::uint32_t entry) { return used.count(entry) != 0; };
        std::uint32_t wrong = 0;
        for (std::uint32_t entry = cursor; entry < length; ++entry) {
          wrong += rig.follower.is_past(entry) == is_used(entry) ? 0U : 1U;
        }
        for (std::uint32_t block = 0; block < count; ++block) {
          std::uint32_t expected = record.blocks[block].first + length;
          for (std::uint32_t entry = length; entry-- > cursor;) {
            if (record.entries[entry].block == block && !is_used(entry)) {
              expected = entry;
            }
          }
          std::uint64_t const now = Rig::start + rig.uses_so_far;
          Use const next = rig.follower.use_of(rig.blocks[block], now);
          wrong += next.entry == expected ? 0U : 1U;
          wrong += next.next == std::max(now, rig.follower.position_of(expected)) ? 0U : 1U;
        }
        REQUIRE(wrong == 0);
        REQUIRE(use.entry == rig.follower.use_of(rig.blocks[step[i]], use.now).entry);
      }
    }
    CHECK(out_of_order > 300);  // otherwise this has tested little
  }
}
