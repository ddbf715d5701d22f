// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/bits.hpp>

#include <doctest/doctest.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <set>

using spillway::detail::Digest;
using spillway::detail::mix_bits;
using spillway::detail::next_bit;
using spillway::detail::previous_bit;
using spillway::detail::size_class_count;
using spillway::detail::size_class_of;
using spillway::detail::square_root;

namespace {

/// A simple, slow definition: shorten the number to its leading bits, and count the bits removed.
template <unsigned SplitBits>
std::uint32_t slow_class_of(std::uint32_t size) {
  std::uint32_t rest = 0;
  while ((size >> rest) >= (std::uint32_t{2} << SplitBits)) {
    ++rest;
  }
  return (rest << SplitBits) + (size >> rest);
}

template <unsigned SplitBits>
void check_classes() {
  std::uint32_t last = 0;
  for (std::uint32_t size = 1; size < 200'000; ++size) {
    std::uint32_t const now = size_class_of<SplitBits>(size);
    REQUIRE(now == slow_class_of<SplitBits>(size));
    REQUIRE((now == last || now == last + 1));
    last = now;
  }
  constexpr std::uint32_t largest = ~std::uint32_t{0};
  CHECK(size_class_of<SplitBits>(largest) == slow_class_of<SplitBits>(largest));
  CHECK(size_class_of<SplitBits>(largest) == size_class_count<SplitBits, std::uint32_t> - 1);
}

}  // namespace

TEST_SUITE("bits") {
  TEST_CASE("size_class_of: classes rise with size, without gaps up to the largest size") {
    check_classes<3>();
    check_classes<6>();
    CHECK(size_class_of<3>(~std::uint64_t{0}) == size_class_count<3, std::uint64_t> - 1);
    CHECK(size_class_of<3>(std::uint32_t{0}) == 0);
  }

  TEST_CASE("size_class_of: sizes of one class differ by less than 1/2^SplitBits") {
    for (std::uint32_t size = 1; size < 100'000; ++size) {
      REQUIRE(size_class_of<6>(size) < size_class_of<6>(size + size / 64 + 1));
    }
  }

  TEST_CASE("next_bit, previous_bit: finds the nearest set bit, or returns the number of bits") {
    constexpr std::size_t bits = 192;
    std::set<std::size_t> const all_set{0, 1, 62, 63, 64, 100, 130, 191};
    for (std::size_t const dropped : {bits, std::size_t{0}, std::size_t{64}, std::size_t{191}}) {
      std::set<std::size_t> set = all_set;
      set.erase(dropped);
      std::array<std::uint64_t, bits / 64> words{};
      for (std::size_t const bit : set) {
        words[bit / 64] |= std::uint64_t{1} << (bit % 64);
      }
      for (std::size_t from = 0; from <= bits; ++from) {
        auto const next = set.lower_bound(from);
        CHECK(next_bit(words, from) == (next == set.end() ? bits : *next));
        CHECK(previous_bit(words, from) == (next == set.begin() ? bits : *std::prev(next)));
      }
    }
    std::array<std::uint64_t, 2> const none{};
    CHECK(next_bit(none, 0) == 128);
    CHECK(previous_bit(none, 128) == 128);
  }

  TEST_CASE("square_root: returns the largest number whose square is not larger") {
    for (std::uint64_t root = 0; root < 1000; ++root) {
      CHECK(square_root(root * root) == root);
      CHECK(square_root(root * root + 2 * root) == root);
    }
    CHECK(square_root(~std::uint64_t{0}) == 0xFFFFFFFF);
    CHECK(square_root(std::uint64_t{0xFFFFFFFE00000000}) == 0xFFFFFFFE);
  }

  TEST_CASE("Digest: depends on each number and on their order") {
    auto const of = [](auto... numbers) {
      Digest all;
      (all.add(numbers), ...);
      return all.value();
    };
    std::uint64_t const one = 1;
    std::uint64_t const two = 2;
    CHECK(of(one, two) == of(one, two));
    std::set<std::uint64_t> const different{of(), of(one), of(two), of(one, two), of(two, one)};
    CHECK(different.size() == 5);
    Digest pair;
    pair.add(std::uint32_t{0}, std::uint32_t{2});
    CHECK(pair.value() == of(two));
  }

  TEST_CASE(
      "mix_bits: matches SplitMix64, and flipping one input bit changes half of the output bits") {
    CHECK(mix_bits(0) == 0xE220A8397B1DCDAFU);
    CHECK(mix_bits(0x9E3779B97F4A7C15U) == 0x6E789E6AA1B965F4U);
    std::set<std::uint32_t> high_halves;
    int changed = 0;
    for (std::uint64_t i = 0; i < 1024; ++i) {
      changed += std::popcount(mix_bits(i) ^ mix_bits(i ^ (std::uint64_t{1} << (i % 64))));
      high_halves.insert(static_cast<std::uint32_t>(mix_bits(i) >> 32U));
    }
    CHECK(changed > 1024 * 31);
    CHECK(changed < 1024 * 33);
    CHECK(high_halves.size() == 1024);
  }
}
