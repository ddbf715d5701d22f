// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/range_table.hpp>
#include <spillway/policy/fit/best_fit.hpp>
#include <spillway/policy/fit/segregated_fit.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <vector>

#include <support/checked_fit.hpp>

namespace {

using spillway::BestFit;
using spillway::Fit;
using spillway::no_node;
using spillway::SegregatedFit;
using support::CheckedFit;

template <class Policy>
void play(std::size_t taken_ranges, std::size_t most_ranges, std::uint64_t seed) {
  CAPTURE(taken_ranges);
  CAPTURE(seed);
  std::mt19937_64 random{seed};
  auto const below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  auto const any_size = [&] {
    double const share = static_cast<double>(below(1U << 20U)) / (1U << 20U);
    return static_cast<std::uint32_t>(std::exp2(share * 31.9));
  };
  CheckedFit<Policy> index{taken_ranges};
  for (int op = 0; op < 6000; ++op) {
    bool const is_full = index.sizes().size() >= most_ranges;
    std::size_t const what = index.sizes().empty() ? 0 : below(4);
    if (what == 0 && !is_full) {
      index.insert(any_size());
    } else if (!index.sizes().empty()) {
      auto const any = std::next(index.sizes().begin(),
                                 static_cast<std::ptrdiff_t>(below(index.sizes().size())));
      if (what == 1 || is_full) {
        index.erase(any->first);
      } else {
        // Often by little, so that the size stays in its class.
        std::uint32_t const size = any->second;
        index.resize(any->first, below(2) == 0 ? any_size() : size - (size > 64 ? size / 200 : 0));
      }
    }

    std::uint32_t most = 0;
    for (auto const& [node, size] : index.sizes()) {
      most = std::max(most, size);
    }
    REQUIRE(index.largest() == most);
    std::uint32_t const wanted = any_size();
    for (std::uint32_t const count : {wanted, most, most == 0 ? 1 : most - most / 300}) {
      if (count == 0) {
        continue;
      }
      CAPTURE(count);
      Fit const fit = index.find(count);
      std::uint32_t const best = index.best(count);
      REQUIRE((fit.node != no_node) == (best != 0));
      if (best != 0) {
        REQUIRE(index.sizes().at(fit.node) >= count);
        REQUIRE(index.find(count) == fit);
      }
    }
  }
}

}  // namespace

TEST_SUITE("fit") {
  // What every model of FitPolicy owes; a new policy joins by adding its name below.
  TEST_CASE_TEMPLATE_DEFINE("FitPolicy: ", P, fit_policy_contract) {
    SUBCASE("an empty index has no range and no size") {
      CheckedFit<P> index{0};
      CHECK(index.find(1).node == no_node);
      CHECK(index.largest() == 0);
    }
    SUBCASE("a range is found by every size up to its own and by none above") {
      CheckedFit<P> index{10'000};
      std::uint32_t const node = index.insert(1000);
      CHECK(index.find(1).node == node);
      CHECK(index.find(1000).node == node);
      CHECK(index.find(1001).node == no_node);
    }
    SUBCASE("a range that is erased is not found again") {
      CheckedFit<P> index{10'000};
      std::uint32_t const first = index.insert(1000);
      std::uint32_t const second = index.insert(1000);
      std::uint32_t const third = index.insert(1000);
      index.erase(second);
      index.erase(third);
      CHECK(index.find(1000).node == first);
      index.erase(first);
      CHECK(index.find(1).node == no_node);
      CHECK(index.largest() == 0);
    }
    SUBCASE("the largest size there can be is found") {
      CheckedFit<P> index{10'000};
      std::uint32_t const node = index.insert(0xFFFFFFFEU);
      CHECK(index.find(0xFFFFFFFEU).node == node);
      CHECK(index.largest() == 0xFFFFFFFEU);
    }
    SUBCASE("every range is visited once, large ones first") {
      CheckedFit<P> index{10'000};
      std::mt19937_64 random{5};
      for (int i = 0; i < 3000; ++i) {
        index.insert(static_cast<std::uint32_t>(1 + random() % (1U << (4 + i % 20))));
      }
      std::vector<std::uint32_t> const nodes = index.large(index.sizes().size() + 1);

      CHECK(std::set<std::uint32_t>(nodes.begin(), nodes.end()).size() == nodes.size());
      REQUIRE(nodes.size() == index.sizes().size());
      std::uint32_t least = index.sizes().at(nodes.front());
      for (std::uint32_t const node : nodes) {
        least = std::min(least, index.sizes().at(node));
        REQUIRE(index.sizes().at(node) - least <= least / 64);
      }
    }
    SUBCASE("no more ranges are visited than are wanted") {
      CheckedFit<P> index{10'000};
      for (std::uint32_t size = 1; size <= 100; ++size) {
        index.insert(10 * size);
      }

      std::vector<std::uint32_t> const nodes = index.large(3);
      REQUIRE(nodes.size() == 3);
      CHECK(index.sizes().at(nodes[0]) == 1000);
      CHECK(index.sizes().at(nodes[1]) == 990);
      CHECK(index.sizes().at(nodes[2]) == 980);
      CHECK(CheckedFit<P>{0}.large(3).empty());
    }
    SUBCASE("a range that fits is found whenever there is one") {
      std::uint64_t seed = 1;
      for (std::size_t const taken_ranges : {0U, 100U, 1000U, 100'000U}) {
        play<P>(taken_ranges, 6, seed++);
        play<P>(taken_ranges, 60, seed++);
      }
    }
  }
  TEST_CASE_TEMPLATE_INVOKE(fit_policy_contract, BestFit, SegregatedFit);
}
