// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/eviction_policy.hpp>
#include <spillway/core/types.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

namespace {

using namespace spillway;
using testing::anyone;
using testing::block;
using testing::drain;

/// Plays random uses against a plain list of blocks, the next victim first.
template <class Policy>
void play(std::uint64_t seed, bool use_moves_to_end) {
  CAPTURE(seed);
  std::mt19937_64 random{seed};
  Policy policy;
  std::vector<BlockId> queue;
  for (int i = 0; i < 2000; ++i) {
    BlockId const id = block(static_cast<std::uint32_t>(random() % 40));
    auto const at = std::find(queue.begin(), queue.end(), id);
    switch (random() % 4) {
    case 0:
      policy.on_insert(id, 64, {});
      if (at != queue.end()) {
        queue.erase(at);
      }
      queue.push_back(id);
      break;
    case 1:
      policy.on_erase(id);
      if (at != queue.end()) {
        queue.erase(at);
      }
      break;
    default:
      policy.on_access(id, {});
      if (at != queue.end() && use_moves_to_end) {
        queue.erase(at);
        queue.push_back(id);
      }
    }
    std::uint32_t const stuck = static_cast<std::uint32_t>(random() % 4);
    auto const can_leave = [&](BlockId other) noexcept -> std::optional<EvictionCandidate> {
      return index_of_block(other) % 4 == stuck ? std::nullopt
                                                : std::optional{EvictionCandidate{64, false, true}};
    };
    auto const first = std::find_if(
        queue.begin(), queue.end(), [&](BlockId other) { return can_leave(other).has_value(); });
    REQUIRE(policy.victim(1, can_leave) ==
            (first == queue.end() ? std::nullopt : std::optional{*first}));
  }
  CHECK(drain(policy, anyone) == queue);
}

}  // namespace

TEST_SUITE("eviction") {
  TEST_CASE("LruEviction: the least recently used block leaves first") {
    LruEviction lru;
    for (std::uint32_t i = 1; i <= 3; ++i) {
      lru.on_insert(block(i), 64, {});
    }
    lru.on_access(block(1), {});
    CHECK(drain(lru, anyone) == std::vector{block(2), block(3), block(1)});
  }

  TEST_CASE("FifoEviction: the block that came first leaves first, used or not") {
    FifoEviction fifo;
    for (std::uint32_t i = 1; i <= 3; ++i) {
      fifo.on_insert(block(i), 64, {});
    }
    fifo.on_access(block(1), {});
    CHECK(drain(fifo, anyone) == std::vector{block(1), block(2), block(3)});
  }

  TEST_CASE("LruEviction, FifoEviction: both order blocks as a plain list does") {
    for (std::uint64_t seed = 1; seed <= 10; ++seed) {
      play<LruEviction>(seed, true);
      play<FifoEviction>(seed, false);
    }
  }
}
