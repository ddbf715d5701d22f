// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/prefetch_policy.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/policy/prefetch/reverse_order.hpp>
#include <spillway/policy/prefetch/schedule_lookahead.hpp>
#include <spillway/schedule/access_schedule.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>

#include <support/eviction_rig.hpp>
#include <support/prefetch_rig.hpp>

namespace {

using namespace spillway;
using testing::block;
using testing::PrefetchRig;

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

}  // namespace

TEST_SUITE("prefetch") {
  // What every model of PrefetchPolicy owes; a new policy joins by adding its name below.
  TEST_CASE_TEMPLATE_DEFINE("PrefetchPolicy: ", P, prefetch_policy_contract) {
    PrefetchRig<P> rig{40};
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
    PrefetchRig<NoPrefetch> rig{4};
    rig.begin();
    rig.use(0);
    rig.begin();
    CHECK(rig.wanted().empty());
    CHECK(rig.policy.max_inflight_bytes() == 0);
  }
}
