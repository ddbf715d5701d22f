// SPDX-License-Identifier: Apache-2.0
#include <spillway/stream/stream_epoch.hpp>

#include <doctest/doctest.h>

#include <cstdint>

using spillway::detail::StreamEpoch;

TEST_SUITE("stream_epoch") {
  TEST_CASE("StreamEpoch: points share a number until an event is recorded") {
    StreamEpoch epoch;
    epoch.start(7);
    CHECK(epoch.last() == 6);  // nothing is marked
    CHECK(epoch.mark() == 7);
    CHECK(epoch.mark() == 7);
    CHECK(epoch.last() == 7);

    CHECK(epoch.close([] { return std::uint64_t{20}; }) == 19);
    CHECK(epoch.last() == 19);
    CHECK(epoch.mark() == 20);
  }

  TEST_CASE("StreamEpoch: an event after which nothing was marked closes nothing") {
    StreamEpoch epoch;
    epoch.start(7);
    auto const none = []() -> std::uint64_t {
      FAIL("no number is needed");
      return 0;
    };
    CHECK(epoch.close(none) == 6);
    CHECK(epoch.mark() == 7);
  }

  TEST_CASE("StreamEpoch: a point marked while another thread closes is not taken for covered") {
    StreamEpoch epoch;
    epoch.start(7);
    (void)epoch.mark();
    std::uint64_t marked = 0;
    std::uint64_t number = 10;
    auto const covered = epoch.close([&] {
      marked = epoch.mark();  // just before the number changes
      return number++;
    });
    CHECK(marked <= covered);
    CHECK(epoch.mark() > covered);
  }
}
