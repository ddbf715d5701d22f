// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/prefetch_policy.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/policy/prefetch/reverse_order.hpp>
#include <spillway/policy/prefetch/schedule_lookahead.hpp>
#include <spillway/schedule/access_schedule.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <support/eviction_rig.hpp>

namespace {

using namespace spillway;
using testing::block;

// One struct per requirement that is missing or loosened: the concept must refuse each of them.
struct ThrowingAccess : NoPrefetch {
  void on_access(BlockId, Use);
};
struct ThrowingDestroy : NoPrefetch {
  void on_destroy(BlockId);
};
struct ThrowingStep : NoPrefetch {
  void on_step();
};
struct ChangingCandidates : NoPrefetch {
  template <class V>
  void candidates(AccessSchedule const&, V);  // not const
};
struct NoBound {
  void on_create(BlockId);
  void on_access(BlockId, Use) noexcept;
  void on_destroy(BlockId) noexcept;
  void on_step() noexcept;
  template <class V>
  void candidates(AccessSchedule const&, V) const;
};
struct NotMovable : NoPrefetch {
  NotMovable() = default;
  NotMovable(NotMovable const&) = delete;
};
static_assert(!PrefetchPolicy<ThrowingAccess>);
static_assert(!PrefetchPolicy<ThrowingDestroy>);
static_assert(!PrefetchPolicy<ThrowingStep>);
static_assert(!PrefetchPolicy<ChangingCandidates>);
static_assert(!PrefetchPolicy<NoBound>);
static_assert(!PrefetchPolicy<NotMovable>);

template <class P>
struct Rig {
  explicit Rig(std::uint32_t blocks, P chosen = P{}) : policy{std::move(chosen)} {
    for (std::uint32_t i = 0; i < blocks; ++i) {
      policy.on_create(block(i));
      schedule.on_create(block(i), 64);
    }
  }
  void use(std::uint32_t index, Access access = Access::read) {
    policy.on_access(block(index), schedule.on_access(block(index), access));
    schedule.on_release(block(index));
  }
  void begin() {
    schedule.begin_step();
    policy.on_step();
  }
  std::vector<std::uint32_t> wanted(std::size_t most = 1000) {
    std::vector<std::uint32_t> indices;
    policy.candidates(schedule, [&](BlockId id, std::uint64_t) {
      indices.push_back(index_of_block(id));
      return indices.size() < most;
    });
    return indices;
  }

  P policy;
  AccessSchedule schedule;
};

}  // namespace

TEST_SUITE("prefetch") {
  // What every model of PrefetchPolicy owes; a new policy joins by adding its name below.
  TEST_CASE_TEMPLATE_DEFINE("PrefetchPolicy: ", P, prefetch_policy_contract) {
    Rig<P> rig{40};
    auto const forth_and_back = [&] {
      rig.begin();
      for (std::uint32_t i = 0; i < 40; ++i) {
        rig.use(i);
      }
      for (std::uint32_t i = 40; i-- != 15;) {
        rig.use(i);
      }
    };
    SUBCASE("before anything was used nothing is wanted") {
      CHECK(rig.wanted().empty());
    }
    SUBCASE("a freed block is not wanted") {
      forth_and_back();
      rig.policy.on_destroy(block(13));
      rig.schedule.on_destroy(block(13));
      rig.policy.on_destroy(block(13));  // no effect the second time
      for (std::uint32_t const index : rig.wanted()) {
        CHECK(index != 13);
      }
    }
    SUBCASE("no more is named than is asked for, nor after the visitor has had enough") {
      forth_and_back();
      CHECK(rig.wanted().size() <= PrefetchOptions{}.lookahead_ops);
      CHECK(rig.wanted(1).size() <= 1);
    }
    SUBCASE("next uses are in order and not in the past") {
      forth_and_back();
      std::uint64_t last = 0;
      rig.policy.candidates(rig.schedule, [&](BlockId, std::uint64_t next_use) {
        CHECK(next_use >= rig.schedule.position());
        CHECK(next_use >= last);
        last = next_use;
        return true;
      });
    }
  }
  TEST_CASE_TEMPLATE_INVOKE(prefetch_policy_contract, NoPrefetch, ScheduleLookahead, ReverseOrder);

  TEST_CASE("NoPrefetch: nothing is ever wanted") {
    Rig<NoPrefetch> rig{4};
    rig.begin();
    rig.use(0);
    rig.begin();
    CHECK(rig.wanted().empty());
    CHECK(rig.policy.max_inflight_bytes() == 0);
  }

  TEST_CASE("ScheduleLookahead: what is used next is wanted first, each block once") {
    Rig<ScheduleLookahead> rig{4};
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

  TEST_CASE("ScheduleLookahead: the end of the step does not end the view") {
    Rig<ScheduleLookahead> rig{3};
    for (int step = 0; step < 2; ++step) {
      rig.begin();
      rig.use(0);
      rig.use(1);
      rig.use(2);
    }
    CHECK(rig.wanted() == std::vector{0U, 1U, 2U});
  }

  TEST_CASE("ScheduleLookahead: what is overwritten next is not wanted") {
    Rig<ScheduleLookahead> rig{3};
    for (int step = 0; step < 2; ++step) {
      rig.begin();
      rig.use(0);
      rig.use(1, Access::write);
      rig.use(2);
    }
    CHECK(rig.wanted() == std::vector{0U, 2U});
  }

  TEST_CASE("ScheduleLookahead: it looks as far ahead as it is told") {
    Rig<ScheduleLookahead> rig{4,
                               ScheduleLookahead{{.lookahead_ops = 2, .max_inflight_bytes = 4096}}};
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

  TEST_CASE("ReverseOrder: in a backward pass the blocks before the last one come back") {
    Rig<ReverseOrder> rig{40, ReverseOrder{{.lookahead_ops = 3}}};
    for (std::uint32_t i = 0; i < 40; ++i) {
      rig.use(i);
      CHECK(rig.wanted().empty());
    }
    for (std::uint32_t i = 40; i-- != 25;) {
      rig.use(i);
    }
    CHECK(rig.wanted() == std::vector{24U, 23U, 22U});
  }

  TEST_CASE("ReverseOrder: gradients made on the way do not disturb it") {
    Rig<ReverseOrder> rig{80, ReverseOrder{{.lookahead_ops = 2}}};
    for (std::uint32_t i = 0; i < 40; ++i) {
      rig.use(i);
    }
    for (std::uint32_t i = 40; i-- != 20;) {
      rig.use(i);
      rig.use(40 + i);  // made by this operation
      rig.use(40 + i);  // and used by the next
    }
    CHECK(rig.wanted() == std::vector{19U, 18U});
  }

  TEST_CASE("ReverseOrder: a loop over weights is not a backward pass") {
    Rig<ReverseOrder> rig{40};
    for (int round = 0; round < 3; ++round) {
      for (std::uint32_t i = 0; i < 40; ++i) {
        rig.use(i);
        CHECK(rig.wanted().empty());
      }
    }
  }

  TEST_CASE("ReverseOrder: a freed block leaves the order of the others as it is") {
    Rig<ReverseOrder> rig{40, ReverseOrder{{.lookahead_ops = 3}}};
    for (std::uint32_t i = 0; i < 40; ++i) {
      rig.use(i);
    }
    for (std::uint32_t i = 40; i-- != 20;) {
      rig.use(i);
      rig.policy.on_destroy(block(i));
    }
    CHECK(rig.wanted() == std::vector{19U, 18U, 17U});
  }

  TEST_CASE("ReverseOrder: a new step starts a new order") {
    Rig<ReverseOrder> rig{40};
    for (std::uint32_t i = 0; i < 40; ++i) {
      rig.use(i);
    }
    for (std::uint32_t i = 40; i-- != 20;) {
      rig.use(i);
    }
    CHECK(!rig.wanted().empty());
    rig.begin();
    CHECK(rig.wanted().empty());
    rig.use(5);
    CHECK(rig.wanted().empty());
  }
}
