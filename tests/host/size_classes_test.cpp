// SPDX-License-Identifier: Apache-2.0
#include <spillway/host/size_classes.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <set>

using namespace spillway;
using namespace spillway::detail;

TEST_SUITE("size_classes") {
  TEST_CASE("SizeClasses: classes rise with size, without gaps up to the largest size") {
    std::size_t previous = 0;
    for (std::size_t units = 1; units < 100'000; ++units) {
      std::size_t const now = SizeClasses::class_of(units);
      REQUIRE(now >= previous);
      REQUIRE(now <= previous + 1);
      previous = now;
    }
    CHECK(SizeClasses::class_of(~std::size_t{0}) == SizeClasses::count - 1);
  }

  TEST_CASE("SizeClasses: sizes of one class differ by less than an eighth") {
    for (std::size_t units = 8; units < 100'000; units = units * 9 / 8 + 1) {
      CHECK(SizeClasses::class_of(units) < SizeClasses::class_of(units + units / 8 + 1));
    }
  }

  TEST_CASE("SizeClasses: next and previous name the nearest class in use") {
    SizeClasses used;
    std::set<std::size_t> const members = {0, 1, 63, 64, 65, 127, 128, 300, SizeClasses::count - 1};
    for (std::size_t const member : members) {
      used.insert(member);
    }
    used.insert(200);
    used.erase(200);

    for (std::size_t at = 0; at < SizeClasses::count; ++at) {
      auto const above = members.lower_bound(at);
      REQUIRE(used.next(at) == (above == members.end() ? SizeClasses::count : *above));
      REQUIRE(used.previous(at) ==
              (above == members.begin() ? SizeClasses::count : *std::prev(above)));
    }
    CHECK(used.next(SizeClasses::count) == SizeClasses::count);
    CHECK(used.previous(SizeClasses::count) == SizeClasses::count - 1);
    CHECK(SizeClasses{}.next(0) == SizeClasses::count);
    CHECK(SizeClasses{}.previous(SizeClasses::count) == SizeClasses::count);
  }
}
