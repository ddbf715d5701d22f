// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/block_list.hpp>
#include <spillway/core/types.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <list>
#include <random>
#include <vector>

namespace {

using namespace spillway;
using namespace spillway::detail;
using testing::block;

std::vector<BlockId> forwards(BlockList const& order) {
  std::vector<BlockId> ids;
  for (BlockId id = order.front(); id != BlockId{}; id = order.after(id)) {
    ids.push_back(id);
  }
  return ids;
}

std::vector<BlockId> backwards(BlockList const& order) {
  std::vector<BlockId> ids;
  for (BlockId id = order.back(); id != BlockId{}; id = order.before(id)) {
    ids.insert(ids.begin(), id);
  }
  return ids;
}

}  // namespace

TEST_SUITE("core") {
  TEST_CASE("BlockList: blocks are in the order in which they were appended or moved") {
    BlockList order;
    CHECK(order.is_empty());
    for (std::uint32_t i : {5U, 0U, 3U}) {
      order.reserve(block(i));
      order.push_back(block(i));
    }
    order.move_to_back(block(5));
    CHECK(forwards(order) == std::vector{block(0), block(3), block(5)});
    order.erase(block(3));
    CHECK(forwards(order) == std::vector{block(0), block(5)});
    CHECK(!order.contains(block(3)));
    CHECK(!order.is_empty());
  }

  TEST_CASE("BlockList: an id with another generation is another block") {
    BlockList order;
    order.reserve(block(2));
    order.push_back(make_block_id(2, 2));
    CHECK(!order.contains(block(2)));
    order.erase(block(2));
    order.move_to_back(block(2));
    CHECK(forwards(order) == std::vector{make_block_id(2, 2)});
    CHECK(!order.contains(BlockId{}));
  }

  TEST_CASE("BlockList: after clear() it is empty and can be used again") {
    BlockList order;
    order.reserve(block(9));
    order.push_back(block(9));
    order.push_back(block(1));
    order.clear();
    CHECK(order.is_empty());
    CHECK(!order.contains(block(1)));
    order.push_back(block(1));
    CHECK(forwards(order) == std::vector{block(1)});
  }

  TEST_CASE("BlockList: agrees with a list under random changes") {
    std::uint64_t const seed = 20240607;
    INFO("seed ", seed);
    std::mt19937_64 random{seed};
    BlockList order;
    std::list<BlockId> oracle;
    for (int i = 0; i < 20000; ++i) {
      BlockId const id = block(static_cast<std::uint32_t>(random() % 40));
      switch (random() % 3) {
      case 0:
        order.reserve(id);
        if (!order.contains(id)) {
          order.push_back(id);
          oracle.push_back(id);
        }
        break;
      case 1:
        order.move_to_back(id);
        if (std::find(oracle.begin(), oracle.end(), id) != oracle.end()) {
          oracle.remove(id);
          oracle.push_back(id);
        }
        break;
      default:
        order.erase(id);
        oracle.remove(id);
        break;
      }
      if (i % 50 == 0) {
        std::vector<BlockId> const expected{oracle.begin(), oracle.end()};
        REQUIRE(forwards(order) == expected);
        REQUIRE(backwards(order) == expected);
      }
    }
  }
}
