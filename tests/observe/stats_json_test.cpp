// SPDX-License-Identifier: Apache-2.0
#include <spillway/observe/stats_json.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <set>
#include <sstream>
#include <string>

#include <nlohmann/json.hpp>
#include <support/counted_stats.hpp>

using namespace spillway;
using nlohmann::json;

namespace {

/// Every number below `it`, by its path.
void collect(json const& it, std::string const& path, std::multiset<std::uint64_t>& numbers) {
  if (it.is_number_unsigned()) {
    numbers.insert(it.get<std::uint64_t>());
  }
  if (it.is_object()) {
    for (auto const& [name, member] : it.items()) {
      collect(member, path + '/' + name, numbers);
    }
  }
}

}  // namespace

TEST_SUITE("stats_json") {
  TEST_CASE("write_json: every number of the statistics is written once") {
    support::CountedStats const made;
    std::ostringstream out;
    write_json(out, made.stats, made.host);
    json const read = json::parse(out.str());

    std::multiset<std::uint64_t> numbers;
    collect(read, "", numbers);
    for (std::uint64_t n = support::CountedStats::first; n < made.next; ++n) {
      CAPTURE(n);
      CHECK(numbers.count(n) == 1);
    }
    CHECK(made.next - support::CountedStats::first > 70);
  }

  TEST_CASE("write_json: numbers are written under the names of the members") {
    support::CountedStats const made;
    std::ostringstream out;
    write_json(out, made.stats, made.host);
    json const read = json::parse(out.str());
    json const& device = read.at("device");

    CHECK(device.at("allocated").at("bytes").at("peak") == made.stats.allocated.bytes.peak);
    CHECK(device.at("requested_bytes").at("total") == made.stats.requested_bytes.total);
    CHECK(device.at("leased").at("blocks").at("current") == made.stats.leased.blocks.current);
    CHECK(device.at("swap_ins").at("bytes") == made.stats.swap_ins.bytes);
    CHECK(device.at("evictions").at("speculative").at("count") ==
          made.stats.evicted(EvictionReason::speculative).count);
    CHECK(device.at("range_sources").at("after_compaction") ==
          made.stats.ranges_from(RangeSource::after_compaction));
    CHECK(device.at("external_fragmentation").get<double>() == made.stats.external_fragmentation());
    CHECK(device.at("inactive_bytes") == made.stats.inactive_bytes());
    json const& host = read.at("host");
    CHECK(host.at("tiers").at("file").at("used_bytes") ==
          made.host.tier(HostTier::file).used_bytes);
    CHECK(host.at("tiers").at("pageable").at("is_failed") == true);
    CHECK(host.at("tiers").at("pinned").at("is_failed") == false);
    CHECK(host.at("is_file_direct") == true);
    CHECK(host.at("is_file_checked") == true);
    CHECK(host.at("file_calls") == "io_uring");
  }
}
