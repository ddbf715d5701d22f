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

std::size_t count(std::vector<Record> const& records, RecordKind kind) {
  return static_cast<std::size_t>(std::count_if(
      records.begin(), records.end(), [&](Record const& one) { return one.kind == kind; }));
}

std::uint64_t bytes(std::vector<Record> const& records, RecordKind kind) {
  std::uint64_t sum = 0;
  for (Record const& record : records) {
    sum += record.kind == kind ? record.bytes : 0;
  }
  return sum;
}

json written(std::vector<Record> const& records,
             Stats const& now,
             std::vector<DeviceSpan> const& spans = {}) {
  std::ostringstream out;
  write_chrome_trace(out, records, now, spans);
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
  TEST_CASE("Timeline: its records add up to the statistics") {
    for (std::uint64_t const seed : {1U, 2U, 3U}) {
      CAPTURE(seed);
      Program program{seed};
      program.run(1500);
      auto const stats = program.allocator.stats();
      auto const records = program.allocator.observer().records();

      CHECK(count(records, RecordKind::allocate) == stats.allocated.blocks.total);
      CHECK(bytes(records, RecordKind::allocate) == stats.allocated.bytes.total);
      CHECK(count(records, RecordKind::deallocate) ==
            stats.allocated.blocks.total - stats.allocated.blocks.current);
      CHECK(count(records, RecordKind::swap_out) + count(records, RecordKind::copy_out) ==
            stats.swap_outs.count);
      CHECK(bytes(records, RecordKind::swap_out) + bytes(records, RecordKind::copy_out) ==
            stats.swap_outs.bytes);
      CHECK(count(records, RecordKind::swap_in) + count(records, RecordKind::prefetch) ==
            stats.swap_ins.count);
      CHECK(count(records, RecordKind::drop) == stats.drops.count);
      CHECK(count(records, RecordKind::move) == stats.moves.count);
      CHECK(bytes(records, RecordKind::move) == stats.moves.bytes);
      CHECK(count(records, RecordKind::step) == stats.steps);
      CHECK(count(records, RecordKind::grow) > 1);
      CHECK(stats.swap_ins.count > 100);
      CHECK(program.allocator.observer().forgotten() == 0);
    }
  }

  TEST_CASE("Timeline: records are sorted by time, and equal times keep their order") {
    Timeline timeline;
    for (std::uint64_t const time : {5U, 3U, 5U, 4U, 3U}) {
      timeline.on_record({.bytes = timeline.records().size(), .start_ns = time});
    }

    std::vector<std::size_t> order;
    for (Record const& record : timeline.records()) {
      order.push_back(record.bytes);
    }
    CHECK(order == std::vector<std::size_t>{1, 4, 3, 0, 2});
  }

  TEST_CASE("Timeline: beyond its limit it drops the oldest records and counts them") {
    Timeline timeline;
    timeline.set_limit(3);
    for (std::uint64_t time = 0; time < 10; ++time) {
      timeline.on_record({.start_ns = time});
    }
    REQUIRE(timeline.records().size() == 3);
    CHECK(timeline.records().front().start_ns == 7);
    CHECK(timeline.forgotten() == 7);

    timeline.set_limit(1);
    CHECK(timeline.records().front().start_ns == 9);
    CHECK(timeline.forgotten() == 9);

    timeline.clear();
    CHECK(timeline.records().empty());
    CHECK(timeline.forgotten() == 0);
  }

  TEST_CASE("Timeline: its trace has a named track for each kind of record") {
    Program program{1};
    program.run(1000);
    std::ostringstream out;
    program.allocator.observer().write(out, program.allocator.stats());
    json const trace = json::parse(out.str());
    auto const records = program.allocator.observer().records();

    std::map<std::uint64_t, std::string> names;
    std::set<std::string> distinct;
    for (json const& event : phase(trace, "M")) {
      if (event.at("name") == "thread_name") {
        names[event.at("tid")] = event.at("args").at("name");
        distinct.insert(event.at("args").at("name"));
      }
    }
    CHECK(names.size() == static_cast<std::size_t>(RecordKind::step) + 1);
    CHECK(distinct.size() == names.size());
    std::map<std::string, std::size_t> seen;
    for (char const* const letter : {"i", "X"}) {
      for (json const& event : phase(trace, letter)) {
        CHECK(names.at(event.at("tid")) == event.at("name").get<std::string>());
        ++seen[event.at("name")];
      }
    }
    CHECK(seen["swap_out"] == count(records, RecordKind::swap_out));
    CHECK(seen["prefetch"] == count(records, RecordKind::prefetch));
    CHECK(seen["move"] == count(records, RecordKind::move));
    CHECK(seen["step"] == count(records, RecordKind::step));
    CHECK(phase(trace, "i").size() + phase(trace, "X").size() == records.size());
  }

  TEST_CASE("write_chrome_trace: a record has its block, bytes, address and time") {
    std::array<std::byte, 1> place{};
    json const trace =
        written({{.kind = RecordKind::swap_in,
                  .block = make_block_id(7, 3),
                  .bytes = 4096,
                  .address = place.data(),
                  .start_ns = 1'234'567,
                  .end_ns = 1'234'567},
                 {.kind = RecordKind::host_wait, .start_ns = 2'000'000, .end_ns = 2'500'500}},
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

  TEST_CASE(
      "write_chrome_trace: a step lasts until the next one begins, the last one until the end") {
    json const trace = written({{.kind = RecordKind::step, .start_ns = 1'000},
                                {.kind = RecordKind::grow, .start_ns = 5'000, .end_ns = 5'000},
                                {.kind = RecordKind::step, .start_ns = 8'000},
                                {.kind = RecordKind::grow, .start_ns = 9'000, .end_ns = 9'000}},
                               {});

    auto const steps = phase(trace, "X");
    REQUIRE(steps.size() == 2);
    CHECK(steps[0].at("dur") == 7);
    CHECK(steps[0].at("args").at("step") == 1);
    CHECK(steps[1].at("dur") == 1);
    CHECK(steps[1].at("args").at("step") == 2);
  }

  TEST_CASE("write_chrome_trace: the last step lasts until the last wait or copy has ended") {
    std::vector<Record> const records{
        {.kind = RecordKind::step, .start_ns = 1'000},
        {.kind = RecordKind::host_wait, .start_ns = 2'000, .end_ns = 5'000},
        {.kind = RecordKind::grow, .start_ns = 3'000, .end_ns = 3'000}};

    auto const waited = phase(written(records, {}), "X");
    REQUIRE(waited.size() == 2);
    CHECK(waited[0].at("name") == "step");
    CHECK(waited[0].at("dur") == 4);

    auto const copied =
        phase(written(records,
                      {},
                      {{.kind = SpanKind::copy_to_host, .start_ns = 2'000, .end_ns = 9'000},
                       {.kind = SpanKind::copy_to_host, .start_ns = 3'000, .end_ns = 4'000}}),
              "X");
    REQUIRE(copied.size() == 4);
    CHECK(copied[0].at("dur") == 8);
  }

  TEST_CASE("write_chrome_trace: steps keep their numbers when older ones are dropped") {
    Timeline timeline;
    timeline.set_limit(3);
    Stats now;
    for (now.steps = 0; now.steps < 10; ++now.steps) {
      timeline.on_record({.kind = RecordKind::step, .start_ns = now.steps * 1'000});
    }
    timeline.on_record({.kind = RecordKind::grow, .start_ns = 10'000, .end_ns = 10'000});

    auto const steps = phase(written(timeline.records(), now), "X");
    REQUIRE(steps.size() == 2);
    CHECK(steps[0].at("args").at("step") == 9);
    CHECK(steps[1].at("args").at("step") == 10);
  }

  TEST_CASE(
      "write_chrome_trace: a block that was never on the device is not shown as swapped out") {
    std::array<std::byte, 1> place{};
    auto const block = make_block_id(1, 1);
    auto const unused = make_block_id(2, 1);
    Stats now;
    now.allocated.add(4096);
    json const trace = written(
        {{.kind = RecordKind::grow, .bytes = 65536},
         {.kind = RecordKind::allocate, .block = block, .bytes = 4096, .start_ns = 1'000},
         {.kind = RecordKind::allocate, .block = unused, .bytes = 256, .start_ns = 2'000},
         {.kind = RecordKind::make_resident,
          .block = block,
          .bytes = 4096,
          .address = place.data(),
          .start_ns = 3'000},
         {.kind = RecordKind::swap_out,
          .block = block,
          .bytes = 4096,
          .address = place.data(),
          .start_ns = 4'000},
         {.kind = RecordKind::deallocate, .block = unused, .bytes = 256, .start_ns = 5'000}},
        now);

    std::map<double, std::int64_t> swapped_out;
    for (json const& event : phase(trace, "C")) {
      if (event.at("name") == "swapped-out bytes") {
        swapped_out[event.at("ts")] = event.at("args").at("bytes");
      }
    }
    CHECK(swapped_out == std::map<double, std::int64_t>{{0, 0}, {4, 4096}});
  }

  TEST_CASE("write_chrome_trace: an allocated block without a residency record counts no bytes") {
    Stats now;
    now.allocated.add(4096);
    now.resident.add(4096);
    json const trace = written({{.kind = RecordKind::allocate,
                                 .block = make_block_id(1, 1),
                                 .bytes = 4096,
                                 .start_ns = 1'000}},  // and no record of how it became resident
                               now);

    for (json const& event : phase(trace, "C")) {
      CHECK(event.at("args").at("bytes") == 0);
    }
    CHECK(phase(trace, "C").size() == 3);
  }

  TEST_CASE("write_chrome_trace: a block for which there was no room is not swapped out by that") {
    BlockId const block = make_block_id(1, 1);
    Stats now;
    now.allocated.add(4096);
    json const trace = written({{.kind = RecordKind::allocate, .block = block, .bytes = 4096},
                                {.kind = RecordKind::out_of_memory, .block = block, .bytes = 4096}},
                               now);

    for (json const& event : phase(trace, "C")) {
      CHECK(event.at("args").at("bytes") == 0);
    }
    CHECK(phase(trace, "C").size() == 3);
  }

  TEST_CASE("write_chrome_trace: copies and kernels get tracks without overlaps") {
    std::array<std::byte, 1> place{};
    json const trace = written(
        {},
        {},
        {{.kind = SpanKind::kernel, .start_ns = 0, .end_ns = 5'000},
         {.kind = SpanKind::copy_to_host,
          .bytes = 64,
          .address = place.data(),
          .start_ns = 1'000,
          .end_ns = 3'000},
         {.kind = SpanKind::copy_to_host, .bytes = 32, .start_ns = 2'000, .end_ns = 4'000},
         {.kind = SpanKind::copy_to_host, .bytes = 16, .start_ns = 3'000, .end_ns = 6'000}});

    std::map<std::uint64_t, std::string> names;
    for (json const& event : phase(trace, "M")) {
      if (event.at("name") == "thread_name") {
        CHECK(names.emplace(event.at("tid"), event.at("args").at("name")).second);
      }
    }
    auto const spans = phase(trace, "X");
    REQUIRE(spans.size() == 4);
    for (json const& span : spans) {
      CHECK(names.at(span.at("tid")) == span.at("name").get<std::string>());
    }
    auto const& first = spans.at(0);
    CHECK(first.at("name") == "copy_to_host");
    CHECK(first.at("ts") == 1);
    CHECK(first.at("dur") == 2);
    CHECK(first.at("args").at("bytes") == 64);
    CHECK(first.at("args").at("address") == reinterpret_cast<std::uintptr_t>(place.data()));
    CHECK(spans.at(1).at("tid") != first.at("tid"));
    CHECK(spans.at(2).at("tid") == first.at("tid"));
    CHECK(spans.at(3).at("name") == "kernel");
    CHECK(spans.at(3).at("tid") > spans.at(1).at("tid"));
  }

  TEST_CASE("write_chrome_trace: no records make an empty trace") {
    json const trace = written({}, {});

    CHECK(phase(trace, "C").empty());
    CHECK(phase(trace, "M").size() > 10);
  }
}
