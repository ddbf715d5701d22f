// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/block_heap.hpp>
#include <spillway/core/types.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include <support/counted_allocations.hpp>

namespace {

using namespace spillway;
using namespace spillway::detail;
using testing::block;

struct Key {
  std::uint64_t value;
  [[nodiscard]] bool is_before(Key other) const noexcept { return value < other.value; }
};

constexpr auto take_any = [](BlockId, Key&) noexcept { return Verdict::take; };

/// All blocks in the order of their keys.
std::vector<std::uint64_t> drain(BlockHeap<Key>& heap) {
  std::vector<std::uint64_t> keys;
  while (auto const id = heap.best(take_any)) {
    keys.push_back(heap.key(*id).value);
    heap.erase(*id);
  }
  return keys;
}

}  // namespace

TEST_SUITE("core") {
  TEST_CASE("BlockHeap: the block with the first key is the best") {
    BlockHeap<Key> heap;
    CHECK(heap.best(take_any) == std::nullopt);
    heap.insert(block(7), {30});
    heap.insert(block(0), {10});
    heap.insert(block(3), {20});
    CHECK(heap.best(take_any) == block(0));
    heap.update(block(0), {40});
    CHECK(heap.best(take_any) == block(3));
    heap.erase(block(3));
    CHECK(heap.best(take_any) == block(7));
    CHECK(heap.size() == 2);
    CHECK(!heap.contains(block(3)));
    CHECK(!heap.contains(make_block_id(7, 2)));
  }

  TEST_CASE("BlockHeap: a block for which room was reserved is inserted without an allocation") {
    BlockHeap<Key> heap;
    for (std::uint32_t i = 0; i < 1000; ++i) {
      heap.reserve(block(i), heap.size());
      std::size_t const before = support::allocations;
      heap.insert_reserved(block(i), {i});
      REQUIRE(support::allocations == before);
    }
  }

  TEST_CASE("BlockHeap: refused blocks are skipped and stay in the heap") {
    BlockHeap<Key> heap;
    for (std::uint32_t i = 0; i < 20; ++i) {
      heap.insert(block(i), {i});
    }
    auto const id = heap.best([](BlockId candidate, Key&) noexcept {
      return index_of_block(candidate) < 13 ? Verdict::skip : Verdict::take;
    });
    CHECK(id == block(13));
    CHECK(heap.best([](BlockId, Key&) noexcept { return Verdict::skip; }) == std::nullopt);
    auto const keys = drain(heap);
    CHECK(keys.size() == 20);
    CHECK(std::is_sorted(keys.begin(), keys.end()));
  }

  TEST_CASE("BlockHeap: a key that the caller corrects during best() is used from then on") {
    BlockHeap<Key> heap;
    heap.insert(block(1), {1});
    heap.insert(block(2), {2});
    heap.insert(block(3), {3});
    auto const dearer_one = [](BlockId id, Key& key) noexcept {
      if (id == block(1) && key.value == 1) {
        key.value = 5;
        return Verdict::key_changed;
      }
      return Verdict::take;
    };
    CHECK(heap.best(dearer_one) == block(2));
    CHECK(drain(heap) == std::vector<std::uint64_t>{2, 3, 5});
  }

  TEST_CASE("BlockHeap: blocks that are skipped keep their place, also among equal keys") {
    auto const shown = [](BlockHeap<Key>& heap) {
      std::vector<BlockId> ids;
      CHECK(heap.best([&](BlockId id, Key&) noexcept {
        ids.push_back(id);
        return Verdict::skip;
      }) == std::nullopt);
      return ids;
    };
    BlockHeap<Key> heap;
    for (std::uint32_t i = 0; i < 100; ++i) {
      heap.insert(block(i), {i * 7 % 10});
    }
    std::vector<BlockId> const order = shown(heap);
    REQUIRE(order.size() == 100);
    CHECK(std::is_sorted(order.begin(), order.end(), [&](BlockId a, BlockId b) {
      return heap.key(a).is_before(heap.key(b));
    }));
    CHECK(shown(heap) == order);
    CHECK(heap.best(take_any) == order.front());
  }

  TEST_CASE("BlockHeap: showing all blocks allocates nothing") {
    BlockHeap<Key> heap;
    for (std::uint32_t i = 0; i < 1000; ++i) {
      heap.insert(block(i), {i});
      std::size_t const before = support::allocations;
      std::size_t shown = 0;
      (void)heap.best([&](BlockId, Key&) noexcept {
        ++shown;
        return Verdict::skip;
      });
      REQUIRE(shown == i + 1);
      REQUIRE(support::allocations == before);
    }
  }

  TEST_CASE("BlockHeap: agrees with a sorted map under random changes") {
    std::uint64_t const seed = 987654321;
    INFO("seed ", seed);
    std::mt19937_64 random{seed};
    BlockHeap<Key> heap;
    std::map<BlockId, std::uint64_t> oracle;
    std::uint64_t unique = 0;
    for (int i = 0; i < 20000; ++i) {
      BlockId const id = block(static_cast<std::uint32_t>(random() % 64));
      std::uint64_t const value = (random() % 1000) * 1000000 + ++unique;
      switch (random() % 4) {
      case 0:
      case 1:
        if (heap.contains(id)) {
          heap.update(id, {value});
        } else {
          heap.insert(id, {value});
        }
        oracle[id] = value;
        break;
      case 2:
        heap.erase(id);
        oracle.erase(id);
        break;
      default: {
        std::uint64_t const refused = random() % 3;
        auto const admits = [&](BlockId other) { return index_of_block(other) % 3 != refused; };
        auto const best = heap.best([&](BlockId other, Key&) noexcept {
          return admits(other) ? Verdict::take : Verdict::skip;
        });
        std::optional<BlockId> expected;
        for (auto const& [other, key] : oracle) {
          if (admits(other) && (!expected || key < oracle[*expected])) {
            expected = other;
          }
        }
        REQUIRE(best == expected);
        break;
      }
      }
      REQUIRE(heap.size() == oracle.size());
    }
  }
}
