// SPDX-License-Identifier: Apache-2.0
// Each eviction policy against an oracle that keeps a plain list and looks at all of it.
#include <spillway/concepts/eviction_policy.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/eviction/ranked_eviction.hpp>
#include <spillway/policy/eviction/schedule_eviction.hpp>
#include <spillway/schedule/access_schedule.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <tuple>
#include <type_traits>
#include <vector>

namespace {

using namespace spillway;

struct Tracked {
  BlockId id;
  std::size_t bytes;
  std::uint64_t inserted;
  std::uint64_t used;
  double age;  // CostEviction: cost of the last victim at the time of that use
  bool is_clean;
  bool is_leased;
};

/// Which of two blocks leaves first.
struct LruOracle {
  static auto rank(Tracked const& block, double) { return block.used; }
};
struct FifoOracle {
  static auto rank(Tracked const& block, double) { return block.inserted; }
};
struct SizeOracle {
  static auto rank(Tracked const& block, double) {
    return std::tuple{~static_cast<std::uint64_t>(block.bytes), block.used};
  }
};
struct CostOracle {
  static auto rank(Tracked const& block, double overhead) {
    double const transfers = block.is_clean ? 1.0 : 2.0;
    return std::tuple{block.age + transfers * (1.0 + overhead / static_cast<double>(block.bytes)),
                      block.used};
  }
};

template <class Oracle, class Policy>
void agree(Policy policy, std::uint64_t seed) {
  INFO("seed ", seed);
  std::mt19937_64 random{seed};
  std::vector<Tracked> blocks;
  std::vector<std::uint32_t> generations(64, 0);
  std::uint64_t now = 0;
  double age = 0;
  double const overhead = 256.0 * 1024.0;
  for (int i = 0; i < 30000; ++i) {
    auto const pick = [&]() -> Tracked* {
      return blocks.empty() ? nullptr : &blocks[random() % blocks.size()];
    };
    switch (random() % 8) {
    case 0:
    case 1: {
      auto const index = static_cast<std::uint32_t>(random() % generations.size());
      bool const is_taken = std::any_of(blocks.begin(), blocks.end(), [&](Tracked const& block) {
        return index_of_block(block.id) == index;
      });
      if (!is_taken) {
        ++now;
        BlockId const id = make_block_id(index, ++generations[index]);
        std::size_t const bytes = std::size_t{256} << random() % 16U;
        policy.on_insert(id, bytes, {now});
        blocks.push_back({id, bytes, now, now, age, random() % 2 == 0, random() % 4 == 0});
      }
      break;
    }
    case 2:
    case 3:
    case 4:
      if (Tracked* const block = pick()) {
        block->used = ++now;
        block->age = age;
        policy.on_access(block->id, {now});
      }
      break;
    case 5:
      if (Tracked* const block = pick()) {
        block->is_leased = !block->is_leased;
        // Known to the policy from the next use on at the latest.
        block->is_clean = random() % 2 == 0;
        block->used = ++now;
        block->age = age;
        policy.on_access(block->id, {now});
      }
      break;
    default: {
      auto const inspect = [&](BlockId id) noexcept -> std::optional<EvictionCandidate> {
        for (Tracked const& block : blocks) {
          if (block.id == id && !block.is_leased) {
            return EvictionCandidate{block.bytes, block.is_clean, true};
          }
        }
        return std::nullopt;
      };
      Tracked const* expected = nullptr;
      for (Tracked const& block : blocks) {
        if (!block.is_leased && (expected == nullptr || Oracle::rank(block, overhead) <
                                                            Oracle::rank(*expected, overhead))) {
          expected = &block;
        }
      }
      auto const victim = policy.victim(1 + random() % 100000, inspect);
      REQUIRE(victim.has_value() == (expected != nullptr));
      if (victim) {
        REQUIRE(*victim == expected->id);
        if constexpr (std::is_same_v<Oracle, CostOracle>) {
          age = std::max(age, std::get<0>(CostOracle::rank(*expected, overhead)));
        }
        policy.on_erase(*victim);
        std::erase_if(blocks, [&](Tracked const& block) { return block.id == *victim; });
      }
      break;
    }
    }
  }
}

}  // namespace

TEST_SUITE("eviction") {
  TEST_CASE("LruEviction: agrees with its oracle") {
    agree<LruOracle>(LruEviction{}, 1);
  }
  TEST_CASE("FifoEviction: agrees with its oracle") {
    agree<FifoOracle>(FifoEviction{}, 2);
  }
  TEST_CASE("SizeEviction: agrees with its oracle") {
    agree<SizeOracle>(SizeEviction{}, 3);
  }
  TEST_CASE("CostEviction: agrees with its oracle") {
    agree<CostOracle>(CostEviction{}, 4);
  }
  TEST_CASE("ScheduleEviction: without predictions it agrees with the oracle of LRU") {
    agree<LruOracle>(ScheduleEviction{}, 5);
  }
}
