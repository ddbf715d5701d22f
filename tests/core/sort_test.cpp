// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/sort.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <random>
#include <vector>

namespace {

using spillway::detail::sort_runs;

std::size_t comparisons_to_sort(std::vector<int> numbers) {
  std::size_t comparisons = 0;
  std::vector<int> sorted = numbers;
  std::sort(sorted.begin(), sorted.end());
  sort_runs(numbers, [&](int a, int b) {
    ++comparisons;
    return a < b;
  });
  REQUIRE(numbers == sorted);
  return comparisons;
}

}  // namespace

TEST_SUITE("sort") {
  TEST_CASE("sort_runs: sorts any number of ascending runs of any lengths") {
    constexpr unsigned seed = 4;
    MESSAGE("seed ", seed);
    std::mt19937 random{seed};
    for (int i = 0; i < 2000; ++i) {
      CAPTURE(i);
      std::vector<int> numbers;
      for (std::size_t runs = random() % 14; runs > 0; --runs) {
        std::vector<int> run(random() % 20);
        std::generate(run.begin(), run.end(), [&] { return static_cast<int>(random() % 100); });
        std::sort(run.begin(), run.end());
        numbers.insert(numbers.end(), run.begin(), run.end());
      }
      (void)comparisons_to_sort(numbers);
    }
  }

  TEST_CASE("sort_runs: needs few comparisons for each item when there are few runs") {
    constexpr int count = 10'000;
    std::vector<int> numbers(count);
    for (int i = 0; i < count; ++i) {
      numbers[static_cast<std::size_t>(i)] = i;
    }
    CHECK(comparisons_to_sort(numbers) < count);
    std::rotate(numbers.begin(), std::prev(numbers.end()), numbers.end());
    CHECK(comparisons_to_sort(numbers) < 5 * count);
    std::rotate(numbers.begin(), std::next(numbers.begin(), count / 2), numbers.end());
    CHECK(comparisons_to_sort(numbers) < 7 * count);
  }
}
