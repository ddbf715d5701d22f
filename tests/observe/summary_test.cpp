// SPDX-License-Identifier: Apache-2.0
#include <spillway/observe/summary.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include <support/counted_stats.hpp>

using namespace spillway;
using namespace spillway::literals;

namespace {

/// The cells of the row that begins with `name`, without the spaces around them.
std::vector<std::string> row(std::string const& table, std::string const& name) {
  std::istringstream lines{table};
  for (std::string line; std::getline(lines, line);) {
    std::vector<std::string> cells;
    std::istringstream rest{line.substr(1)};
    for (std::string cell; std::getline(rest, cell, '|');) {
      auto const begin = cell.find_first_not_of(' ');
      auto const end = cell.find_last_not_of(' ');
      cells.push_back(begin == std::string::npos ? "" : cell.substr(begin, end - begin + 1));
    }
    if (cells.at(0) == name) {
      return cells;
    }
  }
  return {};
}

using Cells = std::vector<std::string>;

}  // namespace

TEST_SUITE("summary") {
  TEST_CASE("human_bytes: sizes are exact below 1 KiB and have one decimal above") {
    CHECK(human_bytes(0) == "0 B");
    CHECK(human_bytes(1023) == "1023 B");
    CHECK(human_bytes(1024) == "1.0 KiB");
    CHECK(human_bytes(1536) == "1.5 KiB");
    CHECK(human_bytes(1_MiB - 1) == "1.0 MiB");
    CHECK(human_bytes(1_MiB) == "1.0 MiB");
    CHECK(human_bytes(25_GiB + 300_MiB) == "25.3 GiB");
    CHECK(human_bytes(std::numeric_limits<std::uint64_t>::max()) == "16.0 EiB");
  }

  TEST_CASE("summary: all lines have the same length, and their bars are aligned") {
    support::CountedStats const made;
    std::istringstream lines{summary(made.stats, made.host)};

    std::size_t width = 0;
    for (std::string line; std::getline(lines, line);) {
      width = width == 0 ? line.size() : width;
      CAPTURE(line);
      CHECK(line.size() == width);
      CHECK(line.front() == '|');
      CHECK(line.back() == '|');
      CHECK(width <= 100);
    }
    CHECK(width > 40);
  }

  TEST_CASE("summary: rows show the values of the statistics") {
    Stats stats;
    stats.allocated.add(3_MiB);
    stats.allocated.add(1_MiB);
    stats.allocated.subtract(3_MiB);
    stats.requested_bytes.add(1'000);
    stats.resident.add(1_MiB);
    stats.leased.add(256_KiB);
    stats.reserved_bytes = 8_MiB;
    stats.peak_reserved_bytes = 16_MiB;
    stats.capacity_bytes = 1_GiB;
    stats.free_bytes = 1_MiB;
    stats.largest_free_bytes = 256_KiB;
    stats.swap_outs.add(512);
    stats.evictions[static_cast<std::size_t>(EvictionReason::watermark)].add(2_KiB);
    stats.range_sources[static_cast<std::size_t>(RangeSource::growth)] = 42;
    stats.host_wait_ns = 7'654'321;
    HostPoolStats host;
    host.tiers[2].used_bytes = 5_GiB;
    host.tiers[2].capacity_bytes = 6_GiB;
    host.tiers[2].slot_count = 11;
    auto const table = summary(stats, host);

    CHECK(row(table, "Allocated") == Cells{"Allocated", "1.0 MiB", "4.0 MiB", "4.0 MiB", "1"});
    CHECK(row(table, "Requested") == Cells{"Requested", "1000 B", "1000 B", "1000 B", ""});
    CHECK(row(table, "Leased") == Cells{"Leased", "256.0 KiB", "256.0 KiB", "256.0 KiB", "1"});
    CHECK(row(table, "Inactive") == Cells{"Inactive", "768.0 KiB", "", "", "0"});
    CHECK(row(table, "Reserved") == Cells{"Reserved", "8.0 MiB", "16.0 MiB", "", ""});
    CHECK(row(table, "Capacity (limit)").at(1) == "1.0 GiB");
    CHECK(row(table, "External fragmentation").at(1) == "75.0 %");
    CHECK(row(table, "Swap-outs") == Cells{"Swap-outs", "1", "512 B", "", ""});
    CHECK(row(table, "Evicted: watermark") == Cells{"Evicted: watermark", "1", "2.0 KiB", "", ""});
    CHECK(row(table, "Range from: growth").at(1) == "42");
    CHECK(row(table, "Host wait time").at(1) == "7 ms");
    CHECK(row(table, "file") == Cells{"file", "5.0 GiB", "0 B", "6.0 GiB", "11"});
  }

  TEST_CASE("summary: fragmentation is rounded to a tenth of a percent") {
    Stats stats;
    stats.free_bytes = 3;
    stats.largest_free_bytes = 1;
    CHECK(row(summary(stats, {}), "External fragmentation").at(1) == "66.7 %");
    stats.largest_free_bytes = 2;
    CHECK(row(summary(stats, {}), "External fragmentation").at(1) == "33.3 %");
  }

  TEST_CASE("summary: failures of the host pool are shown only if there were any") {
    HostPoolStats host;
    CHECK(row(summary({}, host), "Failed writes").empty());

    host.failed_writes = 3;
    host.rescued_bytes = 2_KiB;
    host.tiers[2].is_failed = true;
    auto const table = summary({}, host);
    CHECK(row(table, "Failed writes").at(1) == "3");
    CHECK(row(table, "Rescued").at(1) == "2.0 KiB");
    CHECK_FALSE(row(table, "file (failed)").empty());
  }

  TEST_CASE("summary: each number of the statistics appears") {
    support::CountedStats made;
    made.stats.host_wait_ns *= 1'000'000;
    auto const table = summary(made.stats, made.host);

    for (std::uint64_t const n : {made.stats.mispredictions,
                                  made.stats.prefetch_hits,
                                  made.stats.prefetch_late,
                                  made.stats.prefetch_wasted,
                                  made.stats.steps,
                                  made.stats.compaction_passes,
                                  made.stats.host_waits,
                                  made.stats.out_of_memory,
                                  made.stats.moves.count,
                                  made.stats.drops.count,
                                  made.stats.swap_ins.count,
                                  made.stats.allocated.blocks.current,
                                  made.stats.ranges_from(RangeSource::retry),
                                  made.stats.evicted(EvictionReason::requested).count,
                                  made.host.staging_waits}) {
      CAPTURE(n);
      CHECK(table.find(' ' + std::to_string(n) + ' ') != std::string::npos);
    }
  }
}
