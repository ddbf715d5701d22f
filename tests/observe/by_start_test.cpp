// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/record.hpp>
#include <spillway/observe/by_start.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

TEST_SUITE("by_start") {
  TEST_CASE("by_start: spans come in the order of their starts, and equal ones keep theirs") {
    std::vector<spillway::DeviceSpan> spans;
    for (std::size_t i = 0; i < 1000; ++i) {
      spans.push_back({.bytes = i, .start_ns = i * 7919 % 10});
    }

    auto const sorted = spillway::detail::by_start(spans);

    REQUIRE(sorted.size() == spans.size());
    for (std::size_t i = 1; i < sorted.size(); ++i) {
      auto const& before = sorted[i - 1];
      CHECK(before.start_ns <= sorted[i].start_ns);
      CHECK((before.start_ns < sorted[i].start_ns || before.bytes < sorted[i].bytes));
    }
  }

  TEST_CASE("by_start: no spans are no error") {
    CHECK(spillway::detail::by_start(std::vector<spillway::DeviceSpan>{}).empty());
  }
}
