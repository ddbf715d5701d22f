// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/block_table.hpp>
#include <spillway/core/types.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include <support/counted_allocations.hpp>

namespace {

using namespace spillway;
using Table = detail::BlockTable<int>;

}  // namespace

TEST_SUITE("block_table") {
  TEST_CASE("BlockTable: indices are dense, and a reused index gives a new id") {
    Table table;
    BlockId const a = table.emplace(1);
    BlockId const b = table.emplace(2);
    CHECK(index_of_block(a) == 0);
    CHECK(index_of_block(b) == 1);
    table.erase(a);
    BlockId const c = table.emplace(3);
    CHECK(index_of_block(c) == 0);
    CHECK(c != a);
    CHECK(table.find(a) == nullptr);
    REQUIRE(table.find(c) != nullptr);
    CHECK(*table.find(c) == 3);
  }

  TEST_CASE("BlockTable: ids that were never assigned are unknown") {
    Table table;
    CHECK(table.find(BlockId{}) == nullptr);
    BlockId const id = table.emplace(1);
    CHECK(table.find(BlockId{}) == nullptr);
    CHECK(table.find(make_block_id(index_of_block(id), generation_of(id) + 1)) == nullptr);
    CHECK(table.find(make_block_id(1, 1)) == nullptr);
    CHECK(table.find(make_block_id(100'000, 1)) == nullptr);
    CHECK(std::as_const(table).find(id) == table.find(id));
  }

  TEST_CASE("BlockTable: tables with different first generations do not accept each other's ids") {
    Table first{1000};
    Table second{2000};
    for (int i = 0; i < 300; ++i) {  // more than are allocated at a time
      BlockId const id = first.emplace(i);
      CHECK(generation_of(id) == 1000);
      CHECK(second.emplace(i) != id);
      CHECK(second.find(id) == nullptr);
    }
  }

  TEST_CASE("BlockTable: after the last generation comes the first, since 0 names nothing") {
    Table table{UINT32_MAX};
    BlockId const last = table.emplace(1);
    table.erase(last);
    BlockId const next = table.emplace(2);
    CHECK(index_of_block(next) == index_of_block(last));
    CHECK(generation_of(next) == 1);
    CHECK(table.find(last) == nullptr);
  }

  TEST_CASE("BlockTable: erasing records allocates nothing") {
    Table table;
    std::vector<BlockId> ids;
    for (int i = 0; i < 1000; ++i) {
      ids.push_back(table.emplace(i));
    }
    std::size_t const before = support::allocations;
    for (BlockId const id : ids) {
      table.erase(id);
    }
    CHECK(support::allocations == before);
    CHECK(table.size() == 0);
  }

  TEST_CASE("BlockTable: records do not move when the table grows") {
    Table table;
    BlockId const id = table.emplace(7);
    int const* const record = table.find(id);
    for (int i = 0; i < 5000; ++i) {
      table.emplace(i);
    }
    CHECK(table.find(id) == record);
    CHECK(*record == 7);
  }

  TEST_CASE("BlockTable: agrees with a map under random insertions and removals") {
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
      CAPTURE(seed);
      std::mt19937_64 random{seed};
      Table table;
      std::map<BlockId, int> known;
      std::vector<BlockId> gone;
      for (int i = 0; i < 4000; ++i) {
        if (known.empty() || random() % 5 < 3) {
          BlockId const id = table.emplace(i);
          REQUIRE(known.emplace(id, i).second);
        } else {
          auto const at =
              std::next(known.begin(), static_cast<std::ptrdiff_t>(random() % known.size()));
          table.erase(at->first);
          gone.push_back(at->first);
          known.erase(at);
        }
        REQUIRE(table.size() == known.size());
      }
      std::map<BlockId, int> visited;
      std::uint32_t next_index = 0;
      table.for_each([&](BlockId id, int record) {
        CHECK(index_of_block(id) >= next_index);
        next_index = index_of_block(id) + 1;
        visited.emplace(id, record);
      });
      CHECK(visited == known);
      for (BlockId const id : gone) {
        REQUIRE(table.find(id) == nullptr);
      }
    }
  }
}
