// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>
#include <spillway/policy/prefetch/schedule_lookahead.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

namespace {

using namespace spillway;
using testing::PrefetchRig;

}  // namespace

TEST_SUITE("prefetch") {
  TEST_CASE("ScheduleLookahead: blocks are wanted in the order of their next uses, each once") {
    PrefetchRig<ScheduleLookahead> rig{4};
    for (int step = 0; step < 2; ++step) {
      rig.begin();
      if (step == 0) {
        for (std::uint32_t const index : {0U, 1U, 0U, 2U, 1U, 3U}) {
          rig.use(index);
        }
      }
    }
    CHECK(rig.wanted() == std::vector{0U, 1U, 2U, 3U});
    rig.use(0);
    rig.use(1);
    CHECK(rig.wanted() == std::vector{0U, 2U, 1U, 3U});
  }

  TEST_CASE("ScheduleLookahead: a block that others were used before is wanted first") {
    PrefetchRig<ScheduleLookahead> rig{30};
    for (int step = 0; step < 2; ++step) {
      rig.begin();
      for (std::uint32_t i = 0; step == 0 && i < 30; ++i) {
        rig.use(i);
      }
    }
    rig.use(0);
    rig.use(3);
    rig.use(2);
    std::vector<std::uint32_t> const wanted = rig.wanted();
    REQUIRE(wanted.size() > 2);
    CHECK(wanted[0] == 1);
    CHECK(wanted[1] == 4);
  }

  TEST_CASE("ScheduleLookahead: it does not look farther if blocks that were recorded are freed") {
    PrefetchRig<ScheduleLookahead> rig{500};
    for (int step = 0; step < 2; ++step) {
      rig.begin();
      for (std::uint32_t i = 0; step == 0 && i < 500; ++i) {
        rig.use(i);
      }
    }
    for (std::uint32_t i = 1; i < 400; ++i) {
      rig.schedule.on_destroy(testing::block(i));
    }
    CHECK(rig.wanted() == std::vector{0U});
  }

  TEST_CASE("ScheduleLookahead: the lookahead continues into the next step") {
    PrefetchRig<ScheduleLookahead> rig{3};
    for (int step = 0; step < 2; ++step) {
      rig.begin();
      rig.use(0);
      rig.use(1);
      rig.use(2);
    }
    CHECK(rig.wanted() == std::vector{0U, 1U, 2U});
  }

  TEST_CASE("ScheduleLookahead: a block that is overwritten next is not wanted") {
    PrefetchRig<ScheduleLookahead> rig{3};
    for (int step = 0; step < 2; ++step) {
      rig.begin();
      rig.use(0);
      rig.use(1, Access::write);
      rig.use(2);
    }
    CHECK(rig.wanted() == std::vector{0U, 2U});
  }

  TEST_CASE("ScheduleLookahead: it looks as far ahead as the option says") {
    PrefetchRig<ScheduleLookahead> rig{
        4, ScheduleLookahead{{.lookahead_ops = 2, .max_inflight_bytes = 4096}}};
    for (int step = 0; step < 2; ++step) {
      rig.begin();
      for (std::uint32_t i = 0; i < 4; ++i) {
        rig.use(i);
      }
    }
    CHECK(rig.wanted() == std::vector{0U, 1U});
    CHECK(rig.policy.max_inflight_bytes() == 4096);
    CHECK(ScheduleLookahead{}.max_inflight_bytes() == std::numeric_limits<std::size_t>::max());
  }

  TEST_CASE(
      "ScheduleLookahead: the nearest uses are always considered, those farther ahead by turns") {
    constexpr std::uint32_t lookahead = 400;
    PrefetchRig<ScheduleLookahead> rig{500, ScheduleLookahead{{.lookahead_ops = lookahead}}};
    for (int step = 0; step < 2; ++step) {
      rig.begin();
      for (std::uint32_t i = 0; step == 0 && i < 500; ++i) {
        rig.use(i);
      }
    }
    std::set<std::uint32_t> seen;
    for (std::uint32_t used = 0; used < 100; ++used) {
      std::vector<std::uint32_t> const wanted = rig.wanted();
      REQUIRE(wanted.size() >= 64);
      CHECK(wanted.size() < 128);  // the cost of a call does not depend on the lookahead
      CHECK(std::is_sorted(wanted.begin(), wanted.end()));
      CHECK(wanted.front() == used);
      CHECK(wanted[63] == used + 63);
      CHECK(wanted.back() < used + lookahead);
      seen.insert(wanted.begin(), wanted.end());
      if (used == (lookahead - 64) / 16) {
        CHECK(seen.size() >= lookahead);  // each block, within as many uses
      }
      rig.use(used);
    }
  }

  TEST_CASE("ScheduleLookahead: a lookahead longer than the step equals one as long as the step") {
    constexpr std::uint32_t length = 500;
    PrefetchRig<ScheduleLookahead> far{length, ScheduleLookahead{{.lookahead_ops = length}}};
    PrefetchRig<ScheduleLookahead> beyond{
        length, ScheduleLookahead{{.lookahead_ops = std::numeric_limits<std::size_t>::max()}}};
    for (int step = 0; step < 2; ++step) {
      for (auto* const rig : {&far, &beyond}) {
        rig->begin();
        for (std::uint32_t i = 0; step == 0 && i < length; ++i) {
          rig->use(i);
        }
      }
    }
    for (std::uint32_t used = 0; used < 100; ++used) {
      std::vector<std::uint32_t> const wanted = far.wanted();
      CHECK(wanted.size() > 64);
      CHECK(beyond.wanted() == wanted);
      far.use(used);
      beyond.use(used);
    }
  }
}
