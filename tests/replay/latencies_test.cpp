// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "../../bench/replay/latencies.hpp"

TEST_SUITE("replay") {
  using replay::Latencies;

  TEST_CASE("Latencies: no times have no percentiles") {
    CHECK(Latencies{}.percentile(0.5) == 0);
  }

  TEST_CASE("Latencies: short times are exact") {
    Latencies times;
    for (std::uint64_t ns = 0; ns <= 255; ++ns) {
      times.add(ns);
    }

    CHECK(times.percentile(0) == 0);
    CHECK(times.percentile(0.5) == 127);
    CHECK(times.percentile(1) == 255);
  }

  TEST_CASE("Latencies: the longest time has a bin") {
    Latencies times;
    times.add(std::numeric_limits<std::uint64_t>::max());

    CHECK(times.percentile(0.99) == std::uint64_t{255} << 56U);
  }

  TEST_CASE("Latencies: percentiles are those of the sorted times, but for less than 1/128") {
    std::uint64_t const seed = 20260301;
    CAPTURE(seed);
    std::mt19937_64 random{seed};
    for (std::size_t const count : {1U, 2U, 999U, 20'000U}) {
      CAPTURE(count);
      Latencies times;
      std::vector<std::uint64_t> sorted;
      for (std::size_t i = 0; i < count; ++i) {
        sorted.push_back(random() >> (random() % 64));
        times.add(sorted.back());
      }
      std::sort(sorted.begin(), sorted.end());
      for (double const part : {0.0, 0.25, 0.5, 0.99, 1.0}) {
        CAPTURE(part);
        auto const exact =
            sorted[static_cast<std::size_t>(part * static_cast<double>(sorted.size() - 1))];

        CHECK(times.percentile(part) <= exact);
        CHECK(exact - times.percentile(part) <= exact / 128);
      }
    }
  }
}
