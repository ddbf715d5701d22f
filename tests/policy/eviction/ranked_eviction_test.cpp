// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/eviction_policy.hpp>
#include <spillway/core/types.hpp>
#include <spillway/policy/eviction/ranked_eviction.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
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

/// What the oracle knows of one block.
struct Ranked {
  BlockId id{};
  std::size_t bytes = 0;
  std::uint64_t used = 0;
  double age = 0;
  bool is_clean = false;
  bool can_leave = true;
};

/// Plays random uses on a policy and on a list. `price(block)` is what losing the block costs now:
/// of those that can leave, the cheapest must leave, and among equals the one used longest ago.
template <class Policy, class Price>
void play(Policy policy, std::uint64_t seed, Price price) {
  CAPTURE(seed);
  std::mt19937_64 random{seed};
  std::vector<Ranked> blocks;
  std::uint64_t uses = 0;
  double age = 0;
  std::array<std::size_t, 4> const sizes{256, 4096, 4096, 65536};
  for (std::uint32_t i = 0; i < 3000; ++i) {
    if (blocks.size() < 20) {
      blocks.push_back(
          {block(i), sizes.at(random() % sizes.size()), ++uses, age, random() % 2 == 0});
      policy.on_insert(blocks.back().id, blocks.back().bytes, {});
    }
    Ranked& used = blocks[random() % blocks.size()];
    used.used = ++uses;
    used.age = age;
    policy.on_access(used.id, {});
    if (random() % 3 != 0) {
      continue;
    }
    for (Ranked& each : blocks) {
      each.can_leave = random() % 3 != 0;
    }
    auto const find = [&](BlockId id) {
      return std::find_if(
          blocks.begin(), blocks.end(), [&](Ranked const& b) { return b.id == id; });
    };
    auto const victim =
        policy.victim(1, [&](BlockId id) noexcept -> std::optional<EvictionCandidate> {
          Ranked const& b = *find(id);
          return b.can_leave ? std::optional{EvictionCandidate{b.bytes, b.is_clean, true}}
                             : std::nullopt;
        });
    auto const expected =
        std::min_element(blocks.begin(), blocks.end(), [&](Ranked const& a, Ranked const& b) {
          if (a.can_leave != b.can_leave) {
            return a.can_leave;
          }
          return price(a) != price(b) ? price(a) < price(b) : a.used < b.used;
        });
    if (!expected->can_leave) {
      REQUIRE(victim == std::nullopt);
      continue;
    }
    REQUIRE(victim == expected->id);
    age = std::max(age, price(*expected));
    policy.on_erase(expected->id);
    blocks.erase(expected);
  }
}

}  // namespace

TEST_SUITE("eviction") {
  TEST_CASE("SizeEviction: the largest block leaves first, then the least recently used") {
    SizeEviction size;
    size.on_insert(block(1), 64, {});
    size.on_insert(block(2), 256, {});
    size.on_insert(block(3), 64, {});
    size.on_insert(block(4), 256, {});
    size.on_access(block(1), {});
    size.on_access(block(2), {});
    CHECK(drain(size, anyone) == std::vector{block(4), block(2), block(3), block(1)});
  }

  TEST_CASE("CostEviction: of equal sizes the clean block leaves, at half the cost") {
    CostEviction cost;
    cost.on_insert(block(1), 4096, {});
    cost.on_insert(block(2), 4096, {});
    auto const two_is_clean = [](BlockId id) noexcept -> std::optional<EvictionCandidate> {
      return EvictionCandidate{4096, id == block(2), true};
    };
    CHECK(cost.victim(1, two_is_clean) == block(2));
  }

  TEST_CASE("CostEviction: of two dirty blocks the larger leaves, at less cost for each byte") {
    CostEviction cost{4096};
    cost.on_insert(block(1), 4096, {});
    cost.on_insert(block(2), 1024, {});
    cost.on_insert(block(3), 65536, {});
    CHECK(drain(cost, anyone) == std::vector{block(3), block(1), block(2)});
  }

  TEST_CASE("CostEviction: an expensive block that is never used leaves in the end") {
    CostEviction cost{4096};
    cost.on_insert(block(1), 256, {});  // expensive: 17 for each byte, one way
    int rounds = 0;
    for (std::uint32_t next = 2;; ++next, ++rounds) {
      REQUIRE(rounds < 100);
      cost.on_insert(block(next), 65536, {});
      auto const victim = cost.victim(1, anyone);
      REQUIRE(victim.has_value());
      cost.on_erase(*victim);
      if (*victim == block(1)) {
        break;
      }
    }
    CHECK(rounds > 3);
  }

  TEST_CASE("SizeEviction: ranks like a search of all blocks") {
    for (std::uint64_t seed = 1; seed <= 10; ++seed) {
      play(SizeEviction{}, seed, [](Ranked const& b) { return -static_cast<double>(b.bytes); });
    }
  }

  TEST_CASE("CostEviction: ranks like a search of all blocks") {
    constexpr double overhead_bytes = 4096;
    for (std::uint64_t seed = 1; seed <= 10; ++seed) {
      play(CostEviction{4096}, seed, [](Ranked const& b) {
        double const per_byte = 1.0 + overhead_bytes / static_cast<double>(b.bytes);
        return b.age + (b.is_clean ? 1.0 : 2.0) * per_byte;
      });
    }
  }
}
