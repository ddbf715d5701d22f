// SPDX-License-Identifier: Apache-2.0
#include <spillway/share/fair_shares.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

using spillway::detail::fair_shares;
using spillway::detail::ShareRequest;

namespace {

std::vector<std::uint64_t> shares_of(std::vector<ShareRequest> const& requests,
                                     std::uint64_t capacity_bytes) {
  std::vector<std::uint64_t> shares(requests.size());
  fair_shares(requests, capacity_bytes, shares);
  return shares;
}

std::uint64_t sum_of(std::vector<std::uint64_t> const& shares) {
  return std::accumulate(shares.begin(), shares.end(), std::uint64_t{0});
}

}  // namespace

TEST_SUITE("fair_shares") {
  using Shares = std::vector<std::uint64_t>;

  TEST_CASE("fair_shares: a program that wants little gets it, the others share the rest equally") {
    CHECK(shares_of({{.wanted_bytes = 80}, {.wanted_bytes = 30}}, 100) == Shares{70, 30});
    CHECK(shares_of({{.wanted_bytes = 80}, {.wanted_bytes = 90}}, 100) == Shares{50, 50});
  }

  TEST_CASE("fair_shares: a program of twice the weight gets twice as much") {
    CHECK(shares_of({{.wanted_bytes = 200, .weight = 2}, {.wanted_bytes = 200}}, 90) ==
          Shares{60, 30});
  }

  TEST_CASE("fair_shares: idle programs get what the others leave") {
    CHECK(shares_of({{.wanted_bytes = 80}, {.wanted_bytes = 50, .is_active = false}}, 100) ==
          Shares{80, 20});
    CHECK(shares_of({{.wanted_bytes = 100}, {.wanted_bytes = 50, .is_active = false}}, 100) ==
          Shares{100, 0});
    CHECK(shares_of(
              {{.wanted_bytes = 30, .is_active = false}, {.wanted_bytes = 50, .is_active = false}},
              100) == Shares{50, 50});
  }

  TEST_CASE(
      "fair_shares: bytes that nobody wants go to working programs, which then need not ask") {
    CHECK(shares_of({{.wanted_bytes = 10}, {.wanted_bytes = 20}, {.is_active = false}}, 100) ==
          Shares{50, 50, 0});
  }

  TEST_CASE("fair_shares: promises are met before wanted bytes, and claims before both") {
    CHECK(shares_of({{.wanted_bytes = 100}, {.least_bytes = 30, .is_active = false}}, 100) ==
          Shares{70, 30});
    CHECK(shares_of({{.wanted_bytes = 100}, {.claimed_bytes = 80, .wanted_bytes = 80}}, 100) ==
          Shares{20, 80});
    // A claim that cannot be met together with an earlier one gets nothing.
    CHECK(shares_of({{.claimed_bytes = 60, .wanted_bytes = 60},
                     {.claimed_bytes = 60, .wanted_bytes = 60}},
                    100) == Shares{60, 40});
  }

  TEST_CASE("fair_shares: random requests are met by max-min fairness") {
    std::mt19937_64 random{20261127};
    auto const below = [&](std::uint64_t n) { return random() % n; };
    for (int round = 0; round < 2000; ++round) {
      CAPTURE(round);
      std::uint64_t const capacity = 1 + below(std::uint64_t{1} << (1 + below(40)));
      std::vector<ShareRequest> requests(1 + below(8));
      std::uint64_t promised = 0;
      for (ShareRequest& one : requests) {
        one.least_bytes = below(4) == 0 ? below(capacity - promised + 1) : 0;
        promised += one.least_bytes;
        one.wanted_bytes = below(2 * capacity);
        one.claimed_bytes = below(4) == 0 ? below(one.wanted_bytes + 1) : 0;
        one.weight = static_cast<double>(1 + below(16)) / 4;
        one.is_active = below(3) != 0;
      }
      Shares const shares = shares_of(requests, capacity);
      auto const slack = static_cast<double>(requests.size() + 1);  // the indivisible rest
      CHECK(sum_of(shares) <= capacity);
      CHECK(static_cast<double>(capacity - sum_of(shares)) <= slack);
      for (std::size_t i = 0; i < requests.size(); ++i) {
        ShareRequest const& poor = requests[i];
        CHECK(shares[i] >= poor.least_bytes);
        if (shares[i] >= poor.wanted_bytes) {
          continue;
        }
        // A program that wants more than it has gets as much for its weight as any other of its
        // kind, apart from promises to others and their claims.
        for (std::size_t j = 0; j < requests.size(); ++j) {
          ShareRequest const& rich = requests[j];
          if (rich.is_active > poor.is_active ||
              shares[j] <= std::max(rich.least_bytes, rich.claimed_bytes) + requests.size()) {
            continue;
          }
          CAPTURE(i);
          CAPTURE(j);
          CHECK(rich.is_active ==
                poor.is_active);  // idle ones have nothing while others lack bytes
          CHECK(static_cast<double>(shares[j]) / rich.weight <=
                static_cast<double>(shares[i]) / poor.weight + 16 * slack);
        }
      }
    }
  }
}
