// SPDX-License-Identifier: Apache-2.0
#include <spillway/policy/compaction/size_pool.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <random>
#include <vector>

namespace {

using spillway::detail::SizePool;

/// The largest sum of some of `sizes` that is at most `target`, by trying which sums can be had.
std::uint64_t slow_best(std::vector<std::uint32_t> const& sizes, std::uint64_t target) {
  std::vector<char> can_be_had(target + 1, 0);
  can_be_had[0] = 1;
  for (std::uint32_t const size : sizes) {
    for (std::uint64_t sum = target; sum >= size; --sum) {
      can_be_had[sum] = static_cast<char>(can_be_had[sum] | can_be_had[sum - size]);
    }
  }
  while (can_be_had[target] == 0) {
    --target;
  }
  return target;
}

}  // namespace

TEST_SUITE("size_pool") {
  TEST_CASE("SizePool: finds the largest sum that fits if large blocks were added first, and takes "
            "those blocks") {
    constexpr std::uint64_t seed = 41;
    MESSAGE("seed ", seed);
    std::mt19937_64 random{seed};
    for (int i = 0; i < 300; ++i) {
      CAPTURE(i);
      bool const is_sorted = i % 2 == 0;
      std::vector<std::uint32_t> all(14);
      for (std::uint32_t& size : all) {
        size = static_cast<std::uint32_t>(1 + random() % 40);
      }
      if (is_sorted) {
        std::sort(all.begin(), all.end(), std::greater<>{});
      }
      std::map<std::uint32_t, std::uint32_t> live;  // size of each block
      SizePool pool;
      for (std::uint32_t block = 0; block < all.size(); ++block) {
        live[block] = all[block];
        pool.add(block, all[block]);
      }
      while (!live.empty()) {
        std::vector<std::uint32_t> sizes;
        for (auto const& [block, size] : live) {
          sizes.push_back(size);
        }
        std::uint64_t const target = 1 + random() % 120;
        std::uint64_t looks = 1'000'000;
        SizePool::Choice const choice = pool.best_for(target, looks);
        REQUIRE(choice.sum <= slow_best(sizes, target));
        if (is_sorted) {
          REQUIRE(choice.sum == slow_best(sizes, target));
        }
        if (choice.sum == 0) {
          break;
        }
        std::uint64_t taken = 0;
        pool.take(choice, [&](std::uint32_t block) {
          REQUIRE(live.count(block) == 1);
          taken += live.at(block);
          live.erase(block);
        });
        REQUIRE(taken == choice.sum);
      }
      std::size_t left = 0;
      pool.for_each([&](std::uint32_t block) {
        REQUIRE(live.count(block) == 1);
        ++left;
      });
      REQUIRE(left == live.size());
    }
  }

  TEST_CASE("SizePool: with few looks it fills at least as well as greedy packing") {
    SizePool pool;
    std::uint32_t block = 0;
    for (std::uint32_t const size : {7U, 5U, 5U, 3U}) {
      pool.add(block++, size);
    }
    std::uint64_t few = 2;
    CHECK(pool.best_for(10, few).sum == 10);  // greedily 7 and 3
    few = 2;
    CHECK(pool.best_for(11, few).sum >= 10);
    CHECK(few == 0);
    std::uint64_t many = 1000;
    CHECK(pool.best_for(13, many).sum == 13);  // 5, 5 and 3
    CHECK(pool.best_for(2, many).sum == 0);
    pool.clear();
    CHECK(pool.best_for(100, many).sum == 0);
  }
}
