// SPDX-License-Identifier: Apache-2.0
#include <spillway/observe/timeline.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include <support/watched_program.hpp>

using namespace spillway;
using namespace spillway::detail;
using nlohmann::json;

namespace {

using Program = support::WatchedProgram<support::Watched>;

std::size_t count(std::vector<Event> const& events, EventKind kind) {
  return static_cast<std::size_t>(
      std::count_if(events.begin(), events.end(), [&](Event const& e) { return e.kind == kind; }));
}

std::uint64_t bytes(std::vector<Event> const& events, EventKind kind) {
  std::uint64_t sum = 0;
  for (Event const& event : events) {
    sum += event.kind == kind ? event.bytes : 0;
  }
  return sum;
}

json written(std::vector<Event> const& events, Stats const& now) {
  std::ostringstream out;
  write_chrome_trace(out, events, now);
  return json::parse(out.str());
}

/// The trace events with phase `phase`.
std::vector<json> phase(json const& trace, char const* letter) {
  std::vector<json> found;
  for (json const& event : trace.at("traceEvents")) {
    if (event.at("ph") == letter) {
      found.push_back(event);
    }
  }
  return found;
}

}  // namespace

TEST_SUITE("timeline") {
  TEST_CASE("Timeline: what it remembers adds up to the statistics") {
    for (std::uint64_t const seed : {1U, 2U, 3U}) {
      CAPTURE(seed);
      Program program{seed};
      program.run(1500);
      auto const stats = program.allocator.stats();
      auto const events = program.allocator.observer().events();

      CHECK(count(events, EventKind::allocate) == stats.allocated.blocks.total);
      CHECK(bytes(events, EventKind::allocate) == stats.allocated.bytes.total);
      CHECK(count(events, EventKind::deallocate) ==
            stats.allocated.blocks.total - stats.allocated.blocks.current);
      CHECK(count(events, EventKind::swap_out) + count(events, EventKind::copy_out) ==
            stats.swap_outs.count);
      CHECK(bytes(events, EventKind::swap_out) + bytes(events, EventKind::copy_out) ==
            stats.swap_outs.bytes);
      CHECK(count(events, EventKind::swap_in) + count(events, EventKind::prefetch) ==
            stats.swap_ins.count);
      CHECK(count(events, EventKind::drop) == stats.drops.count);
      CHECK(count(events, EventKind::move) == stats.moves.count);
      CHECK(bytes(events, EventKind::move) == stats.moves.bytes);
      CHECK(count(events, EventKind::step) == stats.steps);
      CHECK(count(events, EventKind::grow) > 1);
      CHECK(stats.swap_ins.count > 100);
      CHECK(program.allocator.observer().forgotten() == 0);
    }
  }

  TEST_CASE("Timeline: events come out in order of time, those of the same time as they came") {
    Timeline timeline;
    for (std::uint64_t const time : {5U, 3U, 5U, 4U, 3U}) {
      timeline.on_event({.bytes = timeline.events().size(), .start_ns = time});
    }

    std::vector<std::size_t> order;
    for (Event const& event : timeline.events()) {
      order.push_back(event.bytes);
    }
    CHECK(order == std::vector<std::size_t>{1, 4, 3, 0, 2});
  }

  TEST_CASE("Timeline: beyond its limit it forgets the oldest and says how many") {
    Timeline timeline;
    timeline.set_limit(3);
    for (std::uint64_t time = 0; time < 10; ++time) {
      timeline.on_event({.start_ns = time});
    }
    REQUIRE(timeline.events().size() == 3);
    CHECK(timeline.events().front().start_ns == 7);
    CHECK(timeline.forgotten() == 7);

    timeline.set_limit(1);
    CHECK(timeline.events().front().start_ns == 9);
    CHECK(timeline.forgotten() == 9);

    timeline.clear();
    CHECK(timeline.events().empty());
    CHECK(timeline.forgotten() == 0);
  }

  TEST_CASE("Timeline: its trace has a named track for each kind of event") {
    Program program{1};
    program.run(1000);
    std::ostringstream out;
    program.allocator.observer().write(out, program.allocator.stats());
    json const trace = json::parse(out.str());
    auto const events = program.allocator.observer().events();

    std::map<std::uint64_t, std::string> names;
    std::set<std::string> distinct;
    for (json const& event : phase(trace, "M")) {
      if (event.at("name") == "thread_name") {
        names[event.at("tid")] = event.at("args").at("name");
        distinct.insert(event.at("args").at("name"));
      }
    }
    CHECK(names.size() == static_cast<std::size_t>(EventKind::step) + 1);
    CHECK(distinct.size() == names.size());
    std::map<std::string, std::size_t> seen;
    for (char const* const letter : {"i", "X"}) {
      for (json const& event : phase(trace, letter)) {
        CHECK(names.at(event.at("tid")) == event.at("name"));
        ++seen[event.at("name")];
      }
    }
    CHECK(seen["swap_out"] == count(events, EventKind::swap_out));
    CHECK(seen["prefetch"] == count(events, EventKind::prefetch));
    CHECK(seen["move"] == count(events, EventKind::move));
    CHECK(seen["step"] == count(events, EventKind::step));
    CHECK(phase(trace, "i").size() + phase(trace, "X").size() == events.size());
  }

  TEST_CASE("write_chrome_trace: an event shows its block, bytes, address and time") {
    std::array<std::byte, 1> place{};
    json const trace =
        written({{.kind = EventKind::swap_in,
                  .block = make_block_id(7, 3),
                  .bytes = 4096,
                  .address = place.data(),
                  .start_ns = 1'234'567,
                  .end_ns = 1'234'567},
                 {.kind = EventKind::host_wait, .start_ns = 2'000'000, .end_ns = 2'500'500}},
                {});

    json const swap_in = phase(trace, "i").at(0);
    CHECK(swap_in.at("ts").get<double>() == doctest::Approx(1234.567).epsilon(1e-12));
    CHECK(swap_in.at("args").at("block") == static_cast<std::uint64_t>(make_block_id(7, 3)));
    CHECK(swap_in.at("args").at("bytes") == 4096);
    CHECK(swap_in.at("args").at("address") == reinterpret_cast<std::uintptr_t>(place.data()));
    json const wait = phase(trace, "X").at(0);
    CHECK(wait.at("name") == "host_wait");
    CHECK(wait.at("ts") == 2000);
    CHECK(wait.at("dur").get<double>() == 500.5);
  }

  TEST_CASE("write_chrome_trace: a step lasts until the next, the last one until the end") {
    json const trace = written({{.kind = EventKind::step, .start_ns = 1'000},
                                {.kind = EventKind::grow, .start_ns = 5'000, .end_ns = 5'000},
                                {.kind = EventKind::step, .start_ns = 8'000},
                                {.kind = EventKind::grow, .start_ns = 9'000, .end_ns = 9'000}},
                               {});

    auto const steps = phase(trace, "X");
    REQUIRE(steps.size() == 2);
    CHECK(steps[0].at("dur") == 7);
    CHECK(steps[0].at("args").at("step") == 1);
    CHECK(steps[1].at("dur") == 1);
    CHECK(steps[1].at("args").at("step") == 2);
  }

  TEST_CASE("write_chrome_trace: no events make an empty trace") {
    json const trace = written({}, {});

    CHECK(phase(trace, "C").empty());
    CHECK(phase(trace, "M").size() > 10);
  }
}
