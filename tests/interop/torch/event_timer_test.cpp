// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/interop/torch/event_timer.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace {

using namespace spillway;
using spillway::testing::SteppedSimApi;

/// A device whose clock is advanced only by its kernels.
struct ClockedDevice : SteppedSimApi {
  std::size_t events = 0;
  std::size_t records_until_failure = 0;  // 0: none fails
  bool fails_to_read = false;

  ClockedDevice() : SteppedSimApi{{.capacity_bytes = 1 << 20}} {}

  event_type create_timed_event() {
    ++events;
    return create_event();
  }
  void destroy_event(event_type event) noexcept {
    --events;
    SteppedSimApi::destroy_event(event);
  }
  void record(event_type event, stream_type stream) {
    if (records_until_failure != 0 && --records_until_failure == 0) {
      throw DeviceError{"no event can be recorded"};
    }
    launch(stream, [this, stamp = stamp_of(event)] { *stamp = now_ns_; });
    SteppedSimApi::record(event, stream);
  }
  void run_kernel(stream_type stream, std::uint64_t ns) {
    launch(stream, [this, ns] { now_ns_ += ns; });
  }
  std::uint64_t elapsed_ns(event_type from, event_type to) {
    if (fails_to_read) {
      throw DeviceError{"no time can be read"};
    }
    return *stamp_of(to) - *stamp_of(from);
  }

 private:
  std::shared_ptr<std::uint64_t> stamp_of(event_type event) {
    for (auto const& [known, stamp] : stamps_) {
      if (known == event) {
        return stamp;
      }
    }
    stamps_.emplace_back(event, std::make_shared<std::uint64_t>(0));
    return stamps_.back().second;
  }

  std::uint64_t now_ns_ = 0;
  std::vector<std::pair<event_type, std::shared_ptr<std::uint64_t>>> stamps_;
};
static_assert(TimingApi<ClockedDevice>);

struct TimerBench {
  using Timer = spillway::torch::EventTimer<ClockedDevice>;
  using Noted = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

  ClockedDevice device;
  Timer timer{device};
  SimStream stream = device.create_stream();

  ~TimerBench() {
    device.run_all();
    device.destroy_stream(stream);
  }
  bool measure(std::uint64_t key, std::uint64_t ns) {
    auto const pair = timer.try_begin(stream);
    if (pair) {
      device.run_kernel(stream, ns);
      timer.mark_end(*pair, stream);
      timer.end(*pair, key);
    }
    return pair.has_value();
  }
  Noted collect() {
    Noted noted;
    timer.collect([&](std::uint64_t key, std::uint64_t ns) { noted.emplace_back(key, ns); });
    return noted;
  }
};

}  // namespace

TEST_SUITE("event_timer") {
  TEST_CASE("EventTimer: a time is returned with its key after the stream has passed both events") {
    TimerBench bench;
    CHECK(bench.measure(7, 30));
    CHECK(bench.measure(9, 50));
    CHECK(bench.collect().empty());
    bench.device.run_all();
    CHECK(bench.collect() == TimerBench::Noted{{7, 30}, {9, 50}});
    CHECK(bench.collect().empty());
  }

  TEST_CASE("EventTimer: work enqueued before begin is not counted") {
    TimerBench bench;
    bench.device.run_kernel(bench.stream, 1000);
    CHECK(bench.measure(1, 20));
    bench.device.run_kernel(bench.stream, 1000);
    bench.device.run_all();
    CHECK(bench.collect() == TimerBench::Noted{{1, 20}});
  }

  TEST_CASE("EventTimer: a call collects a few times, oldest first, and reuses their events") {
    TimerBench bench;
    for (std::uint64_t key = 1; key <= 6; ++key) {
      CHECK(bench.measure(key, 10 * key));
    }
    bench.device.run_all();
    CHECK(bench.collect() == TimerBench::Noted{{1, 10}, {2, 20}, {3, 30}, {4, 40}});
    std::size_t const events = bench.device.events;
    CHECK(events == 12);
    CHECK(bench.measure(7, 70));
    CHECK(bench.device.events == events);
    bench.device.run_all();
    CHECK(bench.collect() == TimerBench::Noted{{5, 50}, {6, 60}, {7, 70}});
  }

  TEST_CASE("EventTimer: the number of pairs in flight is limited") {
    TimerBench bench;
    for (std::size_t i = 0; i < TimerBench::Timer::most_pairs; ++i) {
      REQUIRE(bench.measure(i, 1));
    }
    CHECK_FALSE(bench.measure(0, 1));
    CHECK(bench.collect().empty());
    bench.device.run_all();
    CHECK(bench.collect().size() == TimerBench::Timer::most_collected);
    CHECK(bench.measure(0, 1));
  }

  TEST_CASE("EventTimer: a dropped pair measures nothing") {
    TimerBench bench;
    auto const pair = bench.timer.try_begin(bench.stream);
    REQUIRE(pair);
    bench.timer.drop(*pair);
    CHECK(bench.measure(3, 5));
    CHECK(bench.device.events == 2);
    bench.device.run_all();
    CHECK(bench.collect() == TimerBench::Noted{{3, 5}});
  }

  TEST_CASE("EventTimer: a failed record is an error, and its pair is reused") {
    TimerBench bench;
    bench.device.records_until_failure = 1;
    CHECK_THROWS_AS((void)bench.timer.try_begin(bench.stream), DeviceError);
    CHECK(bench.measure(3, 5));
    CHECK(bench.device.events == 2);
  }

  TEST_CASE("EventTimer: a pair that cannot be read is an error once") {
    TimerBench bench;
    CHECK(bench.measure(3, 5));
    CHECK(bench.measure(4, 6));
    bench.device.run_all();
    bench.device.fails_to_read = true;
    CHECK_THROWS_AS((void)bench.collect(), DeviceError);
    bench.device.fails_to_read = false;
    CHECK(bench.collect() == TimerBench::Noted{{4, 6}});
  }

  TEST_CASE("EventTimer: restarting a pair measures from there") {
    TimerBench bench;
    auto const pair = bench.timer.try_begin(bench.stream);
    REQUIRE(pair);
    bench.device.run_kernel(bench.stream, 1000);
    bench.timer.begin_again(*pair, bench.stream);
    bench.device.run_kernel(bench.stream, 20);
    bench.timer.mark_end(*pair, bench.stream);
    bench.timer.end(*pair, 8);
    bench.device.run_all();
    CHECK(bench.collect() == TimerBench::Noted{{8, 20}});
  }

  TEST_CASE("EventTimer: its end destroys all events") {
    ClockedDevice device;
    auto const stream = device.create_stream();
    {
      spillway::torch::EventTimer timer{device};
      auto const first = timer.try_begin(stream);
      auto const second = timer.try_begin(stream);
      REQUIRE((first && second));
      timer.mark_end(*first, stream);
      timer.end(*first, 1);
      timer.drop(*second);
      CHECK(device.events == 4);
    }
    CHECK(device.events == 0);
    device.run_all();
    device.destroy_stream(stream);
  }
}
