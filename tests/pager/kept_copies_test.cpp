// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>
#include <spillway/pager/kept_copies.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

using spillway::BlockId;
using spillway::make_block_id;
using spillway::detail::KeptCopies;
using Visited = KeptCopies::Visited;

/// Copies of blocks with the indices 0 to 9 and the generation 1.
struct Bench {
  Bench() {
    for (std::uint32_t i = 0; i < 10; ++i) {
      copies.reserve(block(i));
    }
  }

  static BlockId block(std::uint32_t index) { return make_block_id(index, 1); }

  /// The indices in the order of a visit in which `visited(index)` gives the verdict.
  template <class Say>
  std::vector<std::uint32_t> order(Say visited) {
    std::vector<std::uint32_t> indices;
    copies.each([&](BlockId id) {
      indices.push_back(spillway::index_of_block(id));
      return visited(indices.back());
    });
    return indices;
  }
  std::vector<std::uint32_t> order() {
    return order([](std::uint32_t /*index*/) { return Visited::stays; });
  }

  KeptCopies copies;
};

}  // namespace

TEST_SUITE("kept_copies") {
  TEST_CASE("KeptCopies: outdated copies come first, and of each kind the newest first") {
    Bench bench;
    CHECK(bench.order().empty());
    for (std::uint32_t const i : {3U, 1U, 2U}) {
      bench.copies.note(Bench::block(i), true);
    }
    for (std::uint32_t const i : {5U, 4U}) {
      bench.copies.note(Bench::block(i), false);
    }
    CHECK(bench.order() == std::vector<std::uint32_t>{4, 5, 2, 1, 3});

    bench.copies.note(Bench::block(1), false);  // it was written
    bench.copies.note(Bench::block(3), true);   // it left and came back
    CHECK(bench.order() == std::vector<std::uint32_t>{1, 4, 5, 3, 2});
  }

  TEST_CASE("KeptCopies: a visit removes blocks from the list, and stops when told to") {
    Bench bench;
    for (std::uint32_t i = 0; i < 6; ++i) {
      bench.copies.note(Bench::block(i), i < 3);
    }
    auto const take_odd_ones = [](std::uint32_t index) {
      return index == 1 ? Visited::ends_the_visit : index % 2 == 1 ? Visited::goes : Visited::stays;
    };
    CHECK(bench.order(take_odd_ones) == std::vector<std::uint32_t>{5, 4, 3, 2, 1});
    CHECK(bench.order() == std::vector<std::uint32_t>{4, 2, 1, 0});
  }

  TEST_CASE("KeptCopies: after a block is erased, its index can be used by another block") {
    Bench bench;
    bench.copies.note(Bench::block(1), true);
    bench.copies.note(Bench::block(2), true);
    bench.copies.erase(Bench::block(1));
    bench.copies.erase(Bench::block(1));
    bench.copies.note(make_block_id(1, 2), false);
    bench.copies.erase(Bench::block(1));  // an older id
    CHECK(bench.order() == std::vector<std::uint32_t>{1, 2});
  }
}
