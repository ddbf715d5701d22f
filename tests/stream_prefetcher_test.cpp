// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/policy/prefetch/schedule_lookahead.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>
#include <spillway/stream_prefetcher.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include <support/counted_allocations.hpp>

namespace {

using namespace spillway;

/// A policy that counts its calls, and passes on what the schedule predicts.
struct Told : ScheduleLookahead {
  struct Calls {
    int creates = 0;
    int destroys = 0;
    int steps = 0;
    std::vector<Use> uses;
  };

  Told() = default;
  explicit Told(Calls& the_calls) : calls{&the_calls} {}

  void on_create(BlockId) { ++calls->creates; }
  void on_destroy(BlockId) noexcept { ++calls->destroys; }
  void on_step() noexcept { ++calls->steps; }
  void on_access(BlockId, Use use) noexcept { calls->uses.push_back(use); }

  Calls* calls = nullptr;
};

/// Names the block whose index is the number of steps it was told of. The position is the number of
/// steps that the schedule counts.
struct Asking : NoPrefetch {
  void on_step() noexcept { ++steps; }
  template <class Visit>
  void candidates(AccessSchedule const& schedule, Visit visit) const {
    visit(make_block_id(steps, 1), schedule.steps());
  }
  [[nodiscard]] std::size_t max_inflight_bytes() const noexcept { return 77; }

  std::uint32_t steps = 0;
};

}  // namespace

TEST_SUITE("prefetch") {
  TEST_CASE("StreamPrefetcher: the policy is told of every use, with the schedule's prediction") {
    Told::Calls calls;
    StreamPrefetcher<Told> prefetcher{Told{calls}};
    BlockId const a = make_block_id(0, 1);
    BlockId const b = make_block_id(1, 1);
    prefetcher.on_create(a, 64);
    prefetcher.on_create(b, 64);
    for (int step = 0; step < 2; ++step) {
      prefetcher.begin_step();
      for (BlockId const id : {a, b, a}) {
        Use const use = prefetcher.on_access(id, Access::read);
        CHECK(use.entry == calls.uses.back().entry);
        CHECK(use.now == calls.uses.back().now);
        prefetcher.on_release(id);
      }
    }
    CHECK(calls.creates == 2);
    CHECK(calls.steps == 2);
    REQUIRE(calls.uses.size() == 6);
    CHECK(calls.uses[0].next == use_unknown);  // the first step is recorded
    CHECK(calls.uses[3].next == 5);            // the second one predicted
    CHECK(prefetcher.schedule().record().entries[0].released == 1);

    prefetcher.on_destroy(a);
    CHECK(calls.destroys == 1);
    CHECK(prefetcher.schedule().next_use(a) == use_unknown);
  }

  TEST_CASE("StreamPrefetcher: a policy names blocks by its own state and the schedule") {
    StreamPrefetcher<Asking> prefetcher;
    prefetcher.begin_step();
    prefetcher.begin_step();
    int named = 0;
    prefetcher.candidates([&](BlockId id, std::uint64_t steps) {
      ++named;
      CHECK(index_of_block(id) == 2);
      CHECK(steps == 2);
      return true;
    });
    CHECK(named == 1);
    CHECK(prefetcher.max_inflight_bytes() == 77);
  }

  TEST_CASE(
      "StreamPrefetcher: if memory runs out, neither policy nor schedule knows the new block") {
    Told::Calls calls;
    StreamPrefetcher<Told> prefetcher{Told{calls}};
    BlockId const id = make_block_id(100, 1);
    bool is_refused = false;
    try {
      support::ShortMemory const is_short{0};
      prefetcher.on_create(id, 64);
    } catch (std::bad_alloc const&) {
      is_refused = true;
    }
    CHECK(is_refused);
    CHECK(calls.creates == 1);
    CHECK(calls.destroys == 1);

    prefetcher.on_create(id, 64);
    CHECK(prefetcher.on_access(id, Access::read).now == 0);
  }
}
