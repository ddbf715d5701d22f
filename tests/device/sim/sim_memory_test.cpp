// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/sim/sim_memory.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <random>

using spillway::detail::SimRanges;

namespace {

void* at(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace

TEST_SUITE("sim_ranges") {
  TEST_CASE("SimRanges: adjacent ranges together cover what lies across them, and no more") {
    SimRanges ranges;
    ranges.insert(at(100), 50);
    ranges.insert(at(150), 50);
    ranges.insert(at(300), 10);

    CHECK(ranges.covers(at(100), 100));
    CHECK(ranges.covers(at(149), 2));
    CHECK(ranges.covers(at(309), 1));
    CHECK_FALSE(ranges.covers(at(99), 2));
    CHECK_FALSE(ranges.covers(at(199), 2));
    CHECK_FALSE(ranges.covers(at(200), 1));
    CHECK_FALSE(ranges.covers(at(299), 11));
    CHECK_FALSE(ranges.covers(at(150), ~std::size_t{0} - 100));
    CHECK_FALSE(ranges.covers(at(150), ~std::size_t{0}));
  }

  TEST_CASE("SimRanges: an erased range is not covered, even if it was looked up last") {
    SimRanges ranges;
    ranges.insert(at(100), 50);
    ranges.insert(at(150), 50);
    REQUIRE(ranges.covers(at(120), 60));

    ranges.erase(ranges.find(at(150)));

    CHECK_FALSE(ranges.covers(at(120), 60));
    CHECK_FALSE(ranges.covers(at(160), 1));
    CHECK(ranges.covers(at(120), 30));
  }

  TEST_CASE("SimRanges: agrees with a map of single bytes") {
    constexpr std::size_t bytes = 200;
    constexpr std::uintptr_t base = 1000;
    std::mt19937_64 random{11};
    INFO("seed 11");
    SimRanges ranges;
    std::array<bool, bytes> taken{};
    for (int round = 0; round < 20'000; ++round) {
      std::size_t const begin = random() % bytes;
      std::size_t const n = 1 + random() % std::min<std::size_t>(30, bytes - begin);
      bool is_covered = true;
      bool is_clear = true;
      for (std::size_t i = begin; i < begin + n; ++i) {
        is_covered = is_covered && taken[i];
        is_clear = is_clear && !taken[i];
      }
      REQUIRE(ranges.covers(at(base + begin), n) == is_covered);
      REQUIRE(ranges.is_clear(at(base + begin), n) == is_clear);
      if (is_clear && random() % 2 == 0) {
        ranges.insert(at(base + begin), n);
        std::fill_n(taken.begin() + static_cast<std::ptrdiff_t>(begin), n, true);
      } else if (auto const it = ranges.holder(at(base + begin));
                 it != ranges.end() && random() % 4 == 0) {
        auto const first = taken.begin() + static_cast<std::ptrdiff_t>(it->first - base);
        std::fill_n(first, it->second.bytes, false);
        ranges.erase(it);
      }
    }
    CHECK(ranges.size() > 0);
  }
}
