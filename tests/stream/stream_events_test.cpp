// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/sim/model_api.hpp>
#include <spillway/stream/stream_events.hpp>

#include <doctest/doctest.h>

#include <cstdint>

namespace {

using spillway::ModelApi;
using spillway::detail::EventPool;
using spillway::detail::RecordedEvents;
using spillway::detail::StreamEpoch;

/// The list of one stream, and events that were recorded one after another.
struct Bench {
  using Event = EventPool<ModelApi>::stream_event;

  ModelApi device{{.capacity_bytes = 1 << 20}};
  EventPool<ModelApi> pool{device};
  RecordedEvents<ModelApi> events{pool};

  /// Records an event that covers the points up to `covers`; the caller has it in use.
  Event* record(std::uint64_t covers) {
    Event* event = pool.try_take();
    if (event == nullptr) {
      event = pool.add(pool.make());
    }
    events.add(event, covers);
    return event;
  }
  /// True if the pool has exactly this event to give out.
  bool has_idle(Event const* event) {
    Event* const idle = pool.try_take();
    bool const is_it = idle == event && pool.try_take() == nullptr;
    if (idle != nullptr) {
      pool.give_back(idle);
    }
    return is_it;
  }
};

}  // namespace

TEST_SUITE("recorded_events") {
  TEST_CASE("RecordedEvents: a point is served by the earliest event that covers it") {
    Bench bench;
    auto* const first = bench.record(10);
    auto* const second = bench.record(20);
    CHECK(bench.events.try_claim(1) == first);
    CHECK(bench.events.try_claim(10) == first);
    CHECK(bench.events.try_claim(11) == second);
    CHECK(bench.events.try_claim(21) == nullptr);
    CHECK(bench.events.try_claim_newest() == second);
    CHECK(bench.events.covers(20));
    CHECK_FALSE(bench.events.covers(21));
  }

  TEST_CASE("RecordedEvents: an event in use returns to the pool only when it is released") {
    Bench bench;
    auto* const first = bench.record(10);
    CHECK(bench.events.try_claim(5) == first);  // used twice
    bench.events.drop(10);
    CHECK(bench.events.try_claim(5) == nullptr);
    CHECK(bench.has_idle(nullptr));
    bench.events.release(first);
    CHECK(bench.has_idle(nullptr));
    bench.events.release(first);
    CHECK(bench.has_idle(first));
  }

  TEST_CASE("RecordedEvents: an event that covers less than the newest serves only its recorder") {
    Bench bench;
    auto* const newest = bench.record(20);
    auto* const late = bench.record(15);
    CHECK(bench.events.try_claim(12) == newest);
    bench.events.release(late);
    CHECK(bench.has_idle(late));
  }

  TEST_CASE(
      "RecordedEvents: a full list drops its oldest event, and the next one covers its points") {
    Bench bench;
    auto* const oldest = bench.record(1);
    bench.events.release(oldest);
    for (std::uint64_t covers = 2; covers <= RecordedEvents<ModelApi>::most; ++covers) {
      bench.events.release(bench.record(covers));
    }
    CHECK(bench.events.try_claim(1) == oldest);
    bench.events.release(oldest);
    bench.events.release(bench.record(100));
    auto* const next = bench.events.try_claim(1);
    REQUIRE(next != nullptr);
    CHECK(next->covers == 2);
    CHECK(bench.has_idle(oldest));
  }
}

TEST_SUITE("stream_epoch") {
  TEST_CASE("StreamEpoch: points share a number until an event is recorded") {
    StreamEpoch epoch;
    epoch.start(7);
    CHECK(epoch.last() == 6);  // nothing is marked
    CHECK(epoch.mark() == 7);
    CHECK(epoch.mark() == 7);
    CHECK(epoch.last() == 7);

    CHECK(epoch.close([] { return std::uint64_t{20}; }) == 19);
    CHECK(epoch.last() == 19);
    CHECK(epoch.mark() == 20);
  }

  TEST_CASE("StreamEpoch: an event without new points closes no number") {
    StreamEpoch epoch;
    epoch.start(7);
    auto const none = []() -> std::uint64_t {
      FAIL("no number is needed");
      return 0;
    };
    CHECK(epoch.close(none) == 6);
    CHECK(epoch.mark() == 7);
  }

  TEST_CASE("StreamEpoch: a point marked while another thread closes does not count as covered") {
    StreamEpoch epoch;
    epoch.start(7);
    (void)epoch.mark();
    std::uint64_t marked = 0;
    std::uint64_t number = 10;
    auto const covered = epoch.close([&] {
      marked = epoch.mark();  // just before the number changes
      return number++;
    });
    CHECK(marked <= covered);
    CHECK(epoch.mark() > covered);
  }
}
