// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/growing_array.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>

namespace {

using spillway::detail::GrowingArray;

struct Pair {
  std::uint32_t first = 7;
  std::uint64_t second = 9;
};

}  // namespace

TEST_SUITE("growing_array") {
  TEST_CASE("GrowingArray: starts with the requested number of default records") {
    GrowingArray<Pair> const none{0};
    GrowingArray<Pair> const some{3};

    CHECK(none.size() == 0);
    REQUIRE(some.size() == 3);
    CHECK(some[2].first == 7);
    CHECK(some[2].second == 9);
  }

  TEST_CASE("GrowingArray: records keep their values when growth moves pages") {
    GrowingArray<std::uint64_t> array{1};
    constexpr std::size_t many = std::size_t{1} << 21U;  // 16 MiB
    for (std::size_t i = 1; i < many; ++i) {
      if (i % 3 == 0) {
        array.grow();
        array[i] = i * i;
      } else {
        array.push_back(i * i);
      }
    }

    REQUIRE(array.size() == many);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < many; ++i) {
      wrong += array[i] == i * i ? 0U : 1U;
    }
    CHECK(wrong == 0);
  }
}
