// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/testing/device_contracts.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <support/random_work.hpp>

using namespace spillway;
using spillway::test::RandomWork;
using spillway::test::WorkBench;
using spillway::test::WorkItem;
using spillway::testing::DeviceRig;
using spillway::testing::SteppedSimApi;

namespace {

/// Notes in which order host calls ran.
struct Note {
  std::vector<int>* log = nullptr;
  int name = 0;

  static void write(void* note) noexcept {
    auto* const self = static_cast<Note*>(note);
    self->log->push_back(self->name);
  }
};

struct ThreeStreams {
  std::vector<int> log;  // declared first: the device's end runs what is left, which uses it
  Note one{&log, 1};
  Note two{&log, 2};
  Note three{&log, 3};
  SteppedSimApi device;
  DeviceRig<SteppedSimApi> rig{device};
  SimStream a = rig.stream();
  SimStream b = rig.stream();
  SimStream c = rig.stream();

  void note(SimStream stream, Note& which) { device.launch_host(stream, Note::write, &which); }
};

}  // namespace

TEST_SUITE("sim_stepped") {
  TEST_CASE("SteppedSimApi: work runs only when told to") {
    ThreeStreams t;
    t.note(t.a, t.one);
    t.note(t.a, t.two);
    CHECK(t.log.empty());
    CHECK(t.device.queued_ops(t.a) == 2);

    CHECK(t.device.step(t.a));
    CHECK(t.log == std::vector{1});
    CHECK(t.device.step(t.a));
    CHECK(t.log == std::vector{1, 2});
    CHECK_FALSE(t.device.step(t.a));
    CHECK_FALSE(t.device.step(t.b));
  }

  TEST_CASE("SteppedSimApi: a stream stops at an event that has not been reached") {
    ThreeStreams t;
    auto const event = t.rig.event();
    t.note(t.a, t.one);
    t.device.record(event, t.a);
    t.note(t.b, t.two);
    t.device.wait(t.b, event);
    t.note(t.b, t.three);

    CHECK(t.device.run(t.b) == 1);
    CHECK(t.log == std::vector{2});
    CHECK(t.device.step(t.a));
    CHECK(t.device.run(t.b) == 0);
    CHECK_FALSE(t.device.is_complete(event));
    CHECK(t.device.step(t.a));
    CHECK(t.device.is_complete(event));
    CHECK(t.device.run(t.b) == 2);
    CHECK(t.log == std::vector{2, 1, 3});
  }

  TEST_CASE("SteppedSimApi: recording an event again does not change an earlier wait") {
    ThreeStreams t;
    auto const event = t.rig.event();
    t.note(t.a, t.one);
    t.device.record(event, t.a);
    t.device.wait(t.b, event);
    t.note(t.b, t.two);

    SUBCASE("on a stream that is ahead") {
      t.device.record(event, t.c);
      t.device.run(t.c);
      CHECK(t.device.is_complete(event));
      CHECK(t.device.run(t.b) == 0);
    }
    SUBCASE("on a stream that is behind") {
      t.note(t.c, t.three);
      t.device.record(event, t.c);
      t.device.run(t.a);
      CHECK_FALSE(t.device.is_complete(event));
      CHECK(t.device.run(t.b) == 2);
    }
  }

  TEST_CASE("SteppedSimApi: a host wait runs the work that it depends on and no other") {
    ThreeStreams t;
    auto const event = t.rig.event();
    auto const second = t.rig.event();
    t.note(t.a, t.one);
    t.device.record(event, t.a);
    t.note(t.a, t.one);
    t.device.wait(t.b, event);
    t.note(t.b, t.two);
    t.device.record(second, t.b);
    t.note(t.c, t.three);

    t.device.synchronize(second);

    CHECK(t.log == std::vector{1, 2});
    CHECK(t.device.queued_ops(t.a) == 1);
    CHECK(t.device.queued_ops(t.c) == 1);
  }

  TEST_CASE("SteppedSimApi: waiting for a stalled stream is a deadlock and throws") {
    ThreeStreams t;
    auto const event = t.rig.event();
    t.device.stall(t.a);
    t.note(t.a, t.one);
    t.device.record(event, t.a);
    t.device.wait(t.b, event);

    CHECK_THROWS_WITH_AS(t.device.synchronize(t.b),
                         "SimApi: deadlock: the host waits for stream number 1, which is stalled "
                         "with 2 operations to run",
                         DeviceError);
    CHECK(t.device.run_all() == 0);
    CHECK(t.device.run_random(1) == 0);
    CHECK_FALSE(t.device.step(t.a));

    t.device.resume(t.a);
    t.device.synchronize(t.b);
    CHECK(t.log == std::vector{1});
  }

  TEST_CASE(
      "SteppedSimApi: run_all takes streams in turn, run_random in an order drawn from the seed") {
    auto const order = [](auto run) {
      ThreeStreams t;
      for (int i = 0; i < 3; ++i) {
        t.note(t.a, t.one);
        t.note(t.b, t.two);
        t.note(t.c, t.three);
      }
      CHECK(run(t.device) == 9);
      return t.log;
    };
    CHECK(order([](SteppedSimApi& d) { return d.run_all(); }) ==
          std::vector{1, 2, 3, 1, 2, 3, 1, 2, 3});
    auto const first = order([](SteppedSimApi& d) { return d.run_random(7); });
    CHECK(first == order([](SteppedSimApi& d) { return d.run_random(7); }));
    CHECK(first != order([](SteppedSimApi& d) { return d.run_random(8); }));
    CHECK(std::count(first.begin(), first.end(), 2) == 3);
  }

  TEST_CASE("SteppedSimApi: work of a destroyed stream stays and is run by others") {
    ThreeStreams t;
    auto const doomed = t.device.create_stream();
    auto const event = t.rig.event();
    t.note(doomed, t.one);
    t.device.record(event, doomed);
    t.device.destroy_stream(doomed);

    CHECK_THROWS_AS(t.device.step(doomed), DeviceError);
    CHECK_FALSE(t.device.is_complete(event));
    t.device.wait(t.a, event);
    t.note(t.a, t.two);
    t.device.run_all();

    CHECK(t.log == std::vector{1, 2});
    CHECK(t.device.is_complete(event));
  }

  TEST_CASE("SteppedSimApi: the device's end runs what is left, stalled or not") {
    std::vector<int> log;
    Note note{&log, 1};
    {
      SteppedSimApi device;
      auto const stream = device.create_stream();
      device.launch_host(stream, Note::write, &note);
      device.stall(stream);
    }
    CHECK(log.size() == 1);
  }

  TEST_CASE("SteppedSimApi: work without a race gives the same bytes in every order") {
    for (std::uint64_t seed = 1; seed <= 40; ++seed) {
      CAPTURE(seed);
      RandomWork const work{seed};
      for (std::uint64_t order = 1; order <= 5; ++order) {
        CAPTURE(order);
        SteppedSimApi device{{.check_order = false}};
        WorkBench bench{device};
        for (WorkItem const& item : work.items()) {
          if (item.is_ordered) {
            bench.enqueue(item);
          }
        }
        device.run_random(order);
        CHECK(bench.holds_result_of(work));
      }
    }
  }
}
