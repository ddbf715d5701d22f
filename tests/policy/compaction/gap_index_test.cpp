// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/policy/compaction/gap_index.hpp>
#include <spillway/policy/compaction/layout_line.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

namespace {

using spillway::Layout;
using spillway::LayoutBlock;
using spillway::detail::GapIndex;
using spillway::detail::LayoutLine;

// Blocks of 8 granules, each with a gap of 8 before it.
std::vector<LayoutBlock> every_other(std::uint32_t count) {
  std::vector<LayoutBlock> blocks;
  for (std::uint32_t i = 0; i < count; ++i) {
    blocks.push_back({(2 * i + 1) * 8, 8, false});
  }
  return blocks;
}

// The oracle: the rest of each gap, searched one by one.
std::uint32_t smallest_that_holds(std::vector<std::uint32_t> const& left, std::uint32_t count) {
  std::uint32_t smallest = 0;
  for (std::uint32_t const granules : left) {
    if (granules >= count && (smallest == 0 || granules < smallest)) {
      smallest = granules;
    }
  }
  return smallest;
}

}  // namespace

TEST_SUITE("gap_index") {
  TEST_CASE("GapIndex: fills the smallest gap that is large enough, also after undo and redo") {
    std::uint64_t const seed = 5;
    CAPTURE(seed);
    std::mt19937_64 random{seed};
    auto const below = [&](std::size_t n) { return static_cast<std::uint32_t>(random() % n); };
    std::vector<LayoutBlock> blocks;
    std::uint32_t at = 0;
    for (int i = 0; i < 60; ++i) {
      at += below(3) == 0 ? 0 : 1 + below(i % 2 == 0 ? 40 : 4000);
      blocks.push_back({at, 8, false});
      at += 8;
    }
    LayoutLine const line{Layout{blocks, at + 500}};
    std::vector<std::uint32_t> whole(line.size() + 1);
    for (std::size_t i = 0; i < whole.size(); ++i) {
      whole[i] = line.gap(i);
    }
    std::vector<std::uint32_t> left = whole;
    GapIndex index;
    index.read(line);

    auto const gap_of = [&](std::uint32_t place) {
      std::size_t gap = 0;
      while (place < line.gap_first(gap) || place >= line.gap_end(gap)) {
        ++gap;
      }
      return gap;
    };
    std::size_t filled = 0;
    for (int round = 0; round < 400; ++round) {
      if (round % 40 == 39) {
        index.undo(0);
        left = whole;
      }
      std::size_t const mark = index.mark();
      std::vector<std::uint32_t> const before = left;
      for (std::uint32_t k = below(12); k > 0; --k) {
        std::uint32_t const count = 1 + below(below(2) == 0 ? 30 : 1500);
        std::uint32_t const smallest = smallest_that_holds(left, count);
        auto const place = index.fill(line, count, [](std::size_t) { return true; });
        REQUIRE(place.has_value() == (smallest != 0));
        if (place) {
          std::size_t const gap = gap_of(*place);
          REQUIRE(left[gap] == smallest);
          REQUIRE(*place == line.gap_end(gap) - left[gap]);  // from the low end on
          left[gap] -= count;
          ++filled;
        }
      }
      std::vector<GapIndex::Fill> const fills = index.since(mark);
      switch (below(4)) {
      case 0:
        break;
      case 1:
        index.undo(mark);
        index.redo(fills);
        break;
      default:
        index.undo(mark);
        left = before;
        break;
      }
    }
    CHECK(filled > 500);
  }

  TEST_CASE("GapIndex: fills no gap that may not be used") {
    std::vector<LayoutBlock> const blocks{{10, 5, false}};
    LayoutLine const line{Layout{blocks, 40}};
    GapIndex index;
    index.read(line);

    auto const place = index.fill(line, 4, [](std::size_t gap) { return gap == 1; });

    CHECK(place == std::optional<std::uint32_t>{15});
    CHECK_FALSE(index.fill(line, 4, [](std::size_t) { return false; }).has_value());
  }

  TEST_CASE("GapIndex: filled gaps are not looked at again, and the number of looks is limited") {
    constexpr std::uint32_t count = 1000;
    std::vector<LayoutBlock> const blocks = every_other(count);
    LayoutLine const line{Layout{blocks, 2 * count * 8}};
    GapIndex index;
    index.read(line);
    auto const any = [](std::size_t) { return true; };
    for (int round = 0; round < 2; ++round) {
      std::uint64_t const before = index.looks();
      for (std::uint32_t i = 0; i < count; ++i) {
        REQUIRE(index.fill(line, 8, any) == line.gap_first(i));  // the lowest among equals
      }
      CHECK(index.looks() - before == count);
      CHECK_FALSE(index.fill(line, 8, any).has_value());
      index.undo(0);
    }
    auto const last = [](std::size_t gap) { return gap == count - 1; };
    std::uint64_t const before = index.looks();
    CHECK_FALSE(index.fill(line, 8, last, before + count - 1).has_value());
    CHECK(index.looks() == before + count - 1);
    CHECK(index.fill(line, 8, last, index.looks() + count) == line.gap_first(count - 1));
  }

  TEST_CASE("GapIndex: without the looks to compare all gaps of a class it fills none") {
    std::vector<LayoutBlock> const blocks{{17, 1, false}, {35, 1, false}};
    LayoutLine const line{Layout{blocks, 36}};
    GapIndex index;
    index.read(line);
    auto const any = [](std::size_t) { return true; };
    CHECK_FALSE(index.fill(line, 16, any, 1).has_value());
    CHECK(index.fill(line, 16, any, index.looks() + 2) == std::optional<std::uint32_t>{0});
  }

  TEST_CASE("GapIndex: a closed gap costs no look until it is opened again") {
    constexpr std::uint32_t count = 100;
    std::vector<LayoutBlock> const blocks = every_other(count);
    LayoutLine const line{Layout{blocks, 2 * count * 8}};
    GapIndex index;
    index.read(line);
    auto const any = [](std::size_t) { return true; };
    REQUIRE(index.fill(line, 4, any) == line.gap_first(0));
    std::size_t const mark = index.mark();
    index.close(0, count - 2);
    index.close(count, count);  // is empty, and stays so
    std::uint64_t const before = index.looks();
    CHECK(index.fill(line, 8, any) == line.gap_first(count - 1));
    CHECK_FALSE(index.fill(line, 8, any).has_value());
    CHECK(index.looks() == before + 1);
    CHECK(index.fill(line, 4, any) == line.gap_first(0) + 4);  // a part of it was filled

    std::vector<GapIndex::Fill> const fills = index.since(mark);
    index.undo(mark);
    CHECK(index.fill(line, 8, any) == line.gap_first(1));
    index.undo(mark);
    index.redo(fills);
    CHECK_FALSE(index.fill(line, 8, any).has_value());
  }
}
