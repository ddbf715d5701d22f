// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/stats.hpp>

#include <doctest/doctest.h>

#include <cstdint>

using namespace spillway;

TEST_SUITE("stats") {
  TEST_CASE("Tally: adding another tally adds its counts") {
    Tally tally{.count = 2, .bytes = 30};

    tally.add(Tally{.count = 5, .bytes = 700});

    CHECK(tally == Tally{.count = 7, .bytes = 730});
  }

  TEST_CASE(
      "Stats: evictions are counted by reason, and can be summed over several or all reasons") {
    Stats stats;
    std::uint64_t number = 1;
    for (Tally& tally : stats.evictions) {  // a decimal place of its own for each reason
      tally = {.count = number, .bytes = 7 * number};
      number *= 10;
    }
    auto const place = [&stats](EvictionReason reason) { return stats.evicted(reason).count; };

    Tally const two = stats.evicted({EvictionReason::watermark, EvictionReason::speculative});
    std::uint64_t const count =
        place(EvictionReason::watermark) + place(EvictionReason::speculative);
    CHECK(two == Tally{.count = count, .bytes = 7 * count});
    CHECK(stats.evicted({EvictionReason::pressure}) == stats.evicted(EvictionReason::pressure));

    CHECK(stats.evicted() == Tally{.count = number / 9, .bytes = number / 9 * 7});
  }
}
