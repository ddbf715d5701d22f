// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/interop/framework/share_arguments.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <limits>

using namespace spillway;
using namespace std::chrono_literals;

TEST_SUITE("share_arguments") {
  TEST_CASE("share_options: seconds become milliseconds") {
    auto const options = framework::share_options("file", 7, 2, 0.25, 600);
    CHECK(options.file == "file");
    CHECK(options.least_bytes == 7);
    CHECK(options.weight == 2);
    CHECK(options.idle_after == 250ms);
    CHECK(options.patience == 600s);
  }

  TEST_CASE("share_options: infinity and other long times are long, negative ones are none") {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    for (double const seconds : {infinity, 1e30, 1e10}) {
      auto const options = framework::share_options("file", 7, 2, seconds, seconds);
      CHECK(options.idle_after == std::chrono::hours{100 * 365 * 24});
      CHECK(options.patience == std::chrono::hours{100 * 365 * 24});
    }
    CHECK(framework::share_options("file", 7, 2, -infinity, -1).idle_after == 0ms);
    CHECK(framework::share_options("file", 7, 2, -infinity, -1).patience == 0ms);
  }

  TEST_CASE("share_options: a time that is not a number is refused by name") {
    constexpr double nan = std::numeric_limits<double>::quiet_NaN();
    CHECK_THROWS_WITH_AS((void)framework::share_options("file", 7, 2, nan, 1),
                         doctest::Contains("idle_after is not a number"),
                         ContractViolation);
    CHECK_THROWS_WITH_AS((void)framework::share_options("file", 7, 2, 1, nan),
                         doctest::Contains("patience is not a number"),
                         ContractViolation);
  }
}
