// SPDX-License-Identifier: Apache-2.0
#include <spillway/policy/eviction/absence_cover.hpp>
#include <spillway/policy/eviction/absence_set.hpp>
#include <spillway/policy/eviction/slack_tree.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace {

using namespace spillway;
using namespace spillway::detail;

struct Problem {
  std::vector<std::int64_t> excess;
  std::vector<Gap> gaps;
};

Problem random_problem(std::mt19937_64& random, std::size_t moments, std::size_t gaps) {
  Problem problem;
  for (std::size_t t = 0; t < moments; ++t) {
    problem.excess.push_back(static_cast<std::int64_t>(random() % 60));
  }
  for (std::size_t i = 0; i < gaps; ++i) {
    auto const a = static_cast<std::uint32_t>(random() % moments);
    auto const b = static_cast<std::uint32_t>(random() % moments);
    problem.gaps.push_back(
        {{std::min(a, b), std::max(a, b)}, 1 + random() % 50, static_cast<std::uint32_t>(i)});
  }
  return problem;
}

bool is_covered(Problem const& problem, std::vector<bool> const& chosen) {
  for (std::uint32_t t = 0; t < problem.excess.size(); ++t) {
    std::int64_t away = 0;
    for (std::size_t i = 0; i < problem.gaps.size(); ++i) {
      away += chosen[i] && problem.gaps[i].is_around(t) ? problem.gaps[i].signed_bytes() : 0;
    }
    if (away < problem.excess[t]) {
      return false;
    }
  }
  return true;
}

/// The cheapest choice of all, by trying every one; the largest number if there is none.
std::int64_t best_of_all(Problem const& problem) {
  std::int64_t best = std::numeric_limits<std::int64_t>::max();
  for (std::uint32_t set = 0; set < (1U << problem.gaps.size()); ++set) {
    std::vector<bool> chosen;
    std::int64_t bytes = 0;
    for (std::size_t i = 0; i < problem.gaps.size(); ++i) {
      chosen.push_back((set >> i & 1U) != 0);
      bytes += chosen.back() ? problem.gaps[i].signed_bytes() : 0;
    }
    if (bytes < best && is_covered(problem, chosen)) {
      best = bytes;
    }
  }
  return best;
}

struct Answer {
  bool is_covered;
  std::int64_t bytes;
  std::vector<bool> chosen;
};

Answer solve(Problem const& problem) {
  GapSet gaps;
  gaps.clear();
  for (Gap const& gap : problem.gaps) {
    gaps.add(gap);
  }
  gaps.close(problem.excess.size());
  GapCover cover;
  Answer answer{};
  answer.is_covered = cover.choose(problem.excess, gaps);
  answer.bytes = gaps.chosen_bytes();
  answer.chosen.resize(problem.gaps.size());
  for (Gap const& gap : gaps) {
    answer.chosen[gap.tag] = gap.is_chosen;
  }
  return answer;
}

}  // namespace

TEST_SUITE("plan") {
  TEST_CASE("SlackTree: sums, minima and where they are agree with a plain array") {
    std::uint64_t const seed = 314159;
    INFO("seed ", seed);
    std::mt19937_64 random{seed};
    for (std::size_t const size : {1U, 2U, 7U, 64U, 100U}) {
      std::vector<std::int64_t> plain(size);
      for (auto& value : plain) {
        value = static_cast<std::int64_t>(random() % 100);
      }
      SlackTree tree;
      tree.reserve(size);
      tree.assign(plain);
      for (int i = 0; i < 500; ++i) {
        auto const a = static_cast<std::uint32_t>(random() % size);
        auto const b = static_cast<std::uint32_t>(random() % size);
        SlackTree::Run const run{std::min(a, b), std::max(a, b)};
        auto const first = plain.begin() + run.first;
        auto const last = plain.begin() + run.last + 1;
        auto const value = static_cast<std::int64_t>(random() % 40) - 20;
        tree.add(run, value);
        std::for_each(first, last, [&](std::int64_t& x) { x += value; });
        REQUIRE(tree.least(run) == *std::min_element(first, last));
        auto const is_below = [&](std::int64_t x) { return x < 10; };
        auto const found = std::find_if(first, last, is_below);
        std::uint32_t const expected =
            found == last ? SlackTree::nowhere : static_cast<std::uint32_t>(found - plain.begin());
        REQUIRE(tree.first_below(run, 10) == expected);
        std::uint32_t expected_last = SlackTree::nowhere;
        for (std::uint32_t t = run.first; t <= run.last; ++t) {
          expected_last = is_below(plain[t]) ? t : expected_last;
        }
        REQUIRE(tree.last_below(run, 10) == expected_last);
      }
    }
  }

  TEST_CASE("GapCover: of gaps of one size, those that end last are taken, as few as do") {
    Problem problem{{10, 10, 10, 10}, {}};
    problem.gaps = {{{0, 1}, 10, 0}, {{0, 3}, 10, 1}, {{0, 2}, 10, 2}};
    auto const answer = solve(problem);
    CHECK(answer.is_covered);
    CHECK(answer.chosen == std::vector{false, true, false});
  }

  TEST_CASE("GapCover: a gap just large enough is taken instead of a larger one that ends later") {
    Problem problem{{10, 10}, {}};
    problem.gaps = {{{0, 1}, 100, 0}, {{0, 1}, 11, 1}, {{0, 0}, 10, 2}};
    CHECK(solve(problem).bytes == 11);
  }

  TEST_CASE("GapCover: several small gaps are taken instead of a large one") {
    Problem problem{{30}, {}};
    problem.gaps = {
        {{0, 0}, 100, 0}, {{0, 0}, 9, 1}, {{0, 0}, 10, 2}, {{0, 0}, 11, 3}, {{0, 0}, 7, 4}};
    CHECK(solve(problem).bytes == 30);
  }

  TEST_CASE("GapCover: what cannot be taken away is told, and all that helps is taken") {
    Problem problem{{50, 5}, {}};
    problem.gaps = {{{0, 0}, 20, 0}, {{0, 0}, 10, 1}, {{1, 1}, 5, 2}, {{1, 1}, 5, 3}};
    auto const answer = solve(problem);
    CHECK(!answer.is_covered);
    CHECK(answer.chosen[0]);
    CHECK(answer.chosen[1]);
    CHECK(answer.chosen[2] != answer.chosen[3]);
  }

  TEST_CASE("GapCover: with nothing in excess nothing is taken") {
    Problem problem{{0, -5}, {}};
    problem.gaps = {{{0, 1}, 20, 0}};
    CHECK(solve(problem).bytes == 0);
    CHECK(solve({{0}, {}}).is_covered);
  }

  TEST_CASE("GapCover: of gaps that do as well those are taken that need no copy out") {
    Problem problem{{10, 10, 10}, {}};
    problem.gaps = {{{0, 2}, 10, 0, true}, {{0, 2}, 12, 1, false}, {{0, 2}, 10, 2, false}};
    CHECK(solve(problem).chosen == std::vector{false, false, true});
    // Not if more bytes had to come back, or if they came back too early.
    problem.gaps = {{{0, 2}, 10, 0, true}, {{0, 2}, 12, 1, false}, {{0, 1}, 10, 2, false}};
    CHECK(solve(problem).chosen == std::vector{true, false, false});
  }

  TEST_CASE("GapCover: to take what needs no copy out costs little and uncovers nothing") {
    std::uint64_t const seed = 161803;
    INFO("seed ", seed);
    std::mt19937_64 random{seed};
    std::int64_t total = 0;
    std::int64_t total_if_not_told = 0;
    std::int64_t dear = 0;
    std::int64_t dear_if_not_told = 0;
    for (int i = 0; i < 100; ++i) {
      Problem untold = random_problem(random, 20, 120);
      for (Gap& gap : untold.gaps) {
        gap.bytes = 10 * (1 + random() % 3);  // as in a network, where many blocks are of one size
      }
      Problem told = untold;
      for (Gap& gap : told.gaps) {
        gap.is_dear = random() % 2 == 0;
      }
      auto const with = solve(told);
      auto const without = solve(untold);
      REQUIRE(with.is_covered == without.is_covered);
      if (!with.is_covered) {
        continue;
      }
      REQUIRE(is_covered(told, with.chosen));
      for (std::size_t k = 0; k < told.gaps.size(); ++k) {
        std::int64_t const bytes = told.gaps[k].is_dear ? told.gaps[k].signed_bytes() : 0;
        dear += with.chosen[k] ? bytes : 0;
        dear_if_not_told += without.chosen[k] ? bytes : 0;
      }
      total += with.bytes;
      total_if_not_told += without.bytes;
    }
    CHECK(total * 100 <= total_if_not_told * 101);
    MESSAGE("of what is copied out if not told: ",
            static_cast<double>(dear) / static_cast<double>(dear_if_not_told));
    CHECK(dear * 10 < dear_if_not_told * 9);
  }

  TEST_CASE(
      "GapCover: on small problems it is within a few parts in a hundred of the best of all") {
    std::uint64_t const seed = 271828;
    INFO("seed ", seed);
    std::mt19937_64 random{seed};
    std::int64_t total = 0;
    std::int64_t best_total = 0;
    for (int i = 0; i < 150; ++i) {
      Problem const problem = random_problem(random, 1 + random() % 12, 1 + random() % 12);
      auto const answer = solve(problem);
      std::int64_t const best = best_of_all(problem);
      REQUIRE(answer.is_covered == (best != std::numeric_limits<std::int64_t>::max()));
      if (answer.is_covered) {
        REQUIRE(is_covered(problem, answer.chosen));
        REQUIRE(answer.bytes >= best);
        total += answer.bytes;
        best_total += best;
      }
    }
    MESSAGE("over the best by ", static_cast<double>(total) / static_cast<double>(best_total) - 1);
    CHECK(total * 100 <= best_total * 102);
  }

  TEST_CASE("GapCover: the same problem has the same answer") {
    std::mt19937_64 random{5};
    Problem const problem = random_problem(random, 40, 60);
    CHECK(solve(problem).chosen == solve(problem).chosen);
  }
}
