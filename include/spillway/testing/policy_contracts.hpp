// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Contract suites for policies: doctest cases that check what every model of their concepts must
/// do.
///
/// To test policies of your own, which must be default-constructible, write a test program:
/// ```
/// #include <doctest/doctest.h>
/// #include <spillway/device/sim/sim_api.hpp>
/// #include <spillway/testing/policy_contracts.hpp>
///
/// TEST_CASE_TEMPLATE_INVOKE(fit_policy_contract, MyFit);
/// TEST_CASE_TEMPLATE_INVOKE(compaction_policy_contract, MyCompaction);
/// TEST_CASE_TEMPLATE_INVOKE(eviction_policy_contract, MyEviction);  // speculative or not
/// TEST_CASE_TEMPLATE_INVOKE(prefetch_policy_contract, MyPrefetch);
/// TEST_CASE_TEMPLATE_INVOKE(recompute_policy_contract, MyRecompute);
/// TEST_CASE_TEMPLATE_INVOKE(arena_contract, MyArena<spillway::SimApi>);
/// TEST_CASE_TEMPLATE_INVOKE(codec_contract, MyCodec);
/// ```
/// The suites check what the tables in the comments of the concepts require, not how good a
/// policy's choices are. Their names are in the global namespace, where doctest's macros put them.
/// What they use is in `spillway::testing`, where tests of your own can use it, too.

#include <spillway/concepts/arena.hpp>
#include <spillway/concepts/codec.hpp>
#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/concepts/eviction_policy.hpp>
#include <spillway/concepts/fit_policy.hpp>
#include <spillway/concepts/prefetch_policy.hpp>
#include <spillway/concepts/recompute_policy.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/range_table.hpp>
#include <spillway/core/types.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/schedule/use.hpp>
#include <spillway/stream/stream_order.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <utility>
#include <vector>

namespace spillway::testing {

/// Drives a fit policy as an arena does, and keeps a map of the free ranges that the policy should
/// know, so that a test can compare its answers with the map.
template <FitPolicy Policy>
class CheckedFit {
 public:
  /// @param taken_ranges  number of blocks to tell the policy, which may choose differently if
  ///                      there are few or many
  explicit CheckedFit(std::size_t taken_ranges) {
    table_.taken_ranges = taken_ranges;
    table_.taken_granules = 64 * taken_ranges;
  }

  std::uint32_t insert(std::uint32_t count) {
    if (table_.idle_nodes() == 0) {
      table_.grow();
    }
    std::uint32_t const node = table_.acquire();
    table_[node] = {};
    table_[node].first = next_first_;
    table_[node].count = count;
    next_first_ += 16;
    sizes_[node] = count;
    policy_.insert(table_, node);
    ++table_.free_ranges;
    return node;
  }
  void erase(std::uint32_t node) {
    policy_.erase(table_, node);
    sizes_.erase(node);
    table_.release(node);
    --table_.free_ranges;
  }
  void resize(std::uint32_t node, std::uint32_t count) {
    sizes_[node] = count;
    policy_.resize(table_, node, next_first_, count);
    REQUIRE(table_[node].first == next_first_);
    REQUIRE(table_[node].count == count);
    next_first_ += 16;
  }

  [[nodiscard]] Fit find(std::uint32_t count) const { return policy_.find(table_, count); }
  [[nodiscard]] std::uint32_t largest() const { return policy_.largest(table_); }
  /// Returns the first `most` ranges that the policy visits.
  [[nodiscard]] std::vector<std::uint32_t> large(std::size_t most) const {
    std::vector<std::uint32_t> nodes;
    policy_.visit_large(table_, [&](std::uint32_t node) {
      nodes.push_back(node);
      return nodes.size() < most;
    });
    return nodes;
  }
  /// Returns the size of each range.
  [[nodiscard]] std::map<std::uint32_t, std::uint32_t> const& sizes() const { return sizes_; }
  /// Returns the size of the smallest range that fits, or 0 if none does.
  [[nodiscard]] std::uint32_t best(std::uint32_t count) const {
    std::uint32_t best = 0;
    for (auto const& [node, size] : sizes_) {
      best = size >= count && (best == 0 || size < best) ? size : best;
    }
    return best;
  }

 private:
  RangeTable table_;
  Policy policy_;
  std::map<std::uint32_t, std::uint32_t> sizes_;
  std::uint32_t next_first_ = 0;
};

/// Checks that every range is visited once, and none that is more than 1/8 larger than one before.
template <FitPolicy Policy>
void check_large(CheckedFit<Policy> const& index) {
  std::vector<std::uint32_t> const nodes = index.large(index.sizes().size() + 1);
  REQUIRE(nodes.size() == index.sizes().size());
  std::set<std::uint32_t> visited;
  std::uint32_t least = std::numeric_limits<std::uint32_t>::max();
  for (std::uint32_t const node : nodes) {
    REQUIRE(index.sizes().count(node) == 1);
    REQUIRE(visited.insert(node).second);
    std::uint32_t const size = index.sizes().at(node);
    least = std::min(least, size);
    REQUIRE(size - least <= least / 8);
  }
}

/// Inserts, erases and resizes up to `most_ranges` ranges at random, and checks what is found.
template <FitPolicy Policy>
void play_fit(std::size_t taken_ranges, std::size_t most_ranges, std::uint64_t seed) {
  CAPTURE(taken_ranges);
  CAPTURE(seed);
  std::mt19937_64 random{seed};
  auto const below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  auto const any_size = [&] {
    double const share = static_cast<double>(below(1U << 20U)) / (1U << 20U);
    return static_cast<std::uint32_t>(std::exp2(share * 31.9));
  };
  CheckedFit<Policy> index{taken_ranges};
  for (int op = 0; op < 6000; ++op) {
    bool const is_full = index.sizes().size() >= most_ranges;
    std::size_t const what = index.sizes().empty() ? 0 : below(4);
    if (what == 0 && !is_full) {
      index.insert(any_size());
    } else {
      auto const any = std::next(index.sizes().begin(),
                                 static_cast<std::ptrdiff_t>(below(index.sizes().size())));
      if (what == 1 || is_full) {
        index.erase(any->first);
      } else {
        // Often by a little, as when a small block is cut off.
        std::uint32_t const size = any->second;
        index.resize(any->first, below(2) == 0 ? any_size() : size - (size > 64 ? size / 200 : 0));
      }
    }
    std::uint32_t most = 0;
    for (auto const& [node, size] : index.sizes()) {
      most = std::max(most, size);
    }
    REQUIRE(index.largest() == most);
    if (op % 16 == 0) {
      check_large(index);
    }
    std::uint32_t const wanted = any_size();
    for (std::uint32_t const count : {wanted, most, most - most / 300}) {
      if (count == 0) {
        continue;
      }
      CAPTURE(count);
      Fit const fit = index.find(count);
      REQUIRE((fit.node != no_node) == (index.best(count) != 0));
      if (fit.node != no_node) {
        REQUIRE(index.sizes().at(fit.node) >= count);
        REQUIRE(index.find(count) == fit);
      }
    }
  }
}

/// A `Layout` that owns its blocks, for tests of compaction policies. `random_layout` makes them.
struct OwnedLayout {
  std::vector<LayoutBlock> blocks;
  std::uint32_t end = 0;

  [[nodiscard]] Layout view() const noexcept { return {blocks, end}; }
  [[nodiscard]] std::uint32_t room() const noexcept {
    std::uint32_t room = end;
    for (LayoutBlock const& block : blocks) {
      room -= block.count;
    }
    return room;
  }
};

/// Makes a layout of `blocks` blocks of 1 to `most_count` granules, with gaps of 0 to `most_gap`
/// around them. A block is fixed with probability 1 / `nth_fixed`; none is if that is 0.
inline OwnedLayout random_layout(std::mt19937_64& random,
                                 std::size_t blocks,
                                 std::uint32_t most_count,
                                 std::uint32_t most_gap,
                                 std::uint32_t nth_fixed) {
  auto const below = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
  OwnedLayout layout;
  for (std::size_t i = 0; i < blocks; ++i) {
    layout.end += below(2) == 0 ? 0 : below(most_gap + 1);
    layout.blocks.push_back(
        {layout.end, 1 + below(most_count), nth_fixed != 0 && below(nth_fixed) == 0});
    layout.end += layout.blocks.back().count;
  }
  layout.end += below(most_gap + 1);
  return layout;
}

/// Makes the moves of a plan and checks them: no fixed block moves, every destination is free, the
/// cost is the sum of the moves, and the planned range is free at the end.
inline void check_plan(Layout const& layout, LayoutPlan const& plan, std::uint32_t count) {
  constexpr std::uint32_t nobody = UINT32_MAX;
  std::vector<std::uint32_t> owner(layout.end, nobody);
  std::vector<std::uint32_t> at;
  for (std::uint32_t i = 0; i < layout.blocks.size(); ++i) {
    at.push_back(layout.blocks[i].first);
    std::fill_n(owner.begin() + at[i], layout.blocks[i].count, i);
  }
  std::uint64_t cost = 0;
  for (auto const [block, to] : plan.moves) {
    REQUIRE(block < layout.blocks.size());
    std::uint32_t const size = layout.blocks[block].count;
    REQUIRE_FALSE(layout.blocks[block].is_fixed);
    REQUIRE(std::uint64_t{to} + size <= layout.end);
    std::fill_n(owner.begin() + at[block], size, nobody);
    for (std::uint32_t granule = to; granule < to + size; ++granule) {
      REQUIRE(owner[granule] == nobody);
      owner[granule] = block;
    }
    at[block] = to;
    cost += size;
  }
  REQUIRE(cost == plan.cost);
  REQUIRE(plan.count >= count);
  REQUIRE(std::uint64_t{plan.first} + plan.count <= layout.end);
  for (std::uint32_t granule = plan.first; granule < plan.first + plan.count; ++granule) {
    REQUIRE(owner[granule] == nobody);
  }
}

/// Returns the block with index `index` and the first generation.
inline BlockId block(std::uint32_t index) {
  return make_block_id(index, 1);
}

/// Admits every block, as a dirty one of 64 bytes.
inline constexpr auto anyone = [](BlockId) noexcept -> std::optional<EvictionCandidate> {
  return EvictionCandidate{64, false, true};
};

/// Admits only the named blocks.
inline auto only(std::vector<BlockId> admitted) {
  return [admitted = std::move(admitted)](BlockId id) noexcept -> std::optional<EvictionCandidate> {
    bool const is_admitted = std::find(admitted.begin(), admitted.end(), id) != admitted.end();
    return is_admitted ? anyone(id) : std::nullopt;
  };
}

/// Returns all victims in the order in which the policy names them, if each is evicted at once.
template <EvictionPolicy P, class Inspect>
std::vector<BlockId> drain(P& policy, Inspect inspect) {
  std::vector<BlockId> victims;
  while (auto const id = policy.victim(1, inspect)) {
    victims.push_back(*id);
    policy.on_erase(*id);
  }
  return victims;
}

/// A schedule that predicts, and an eviction policy that was told all of it: a step uses the blocks
/// there and back, and half of them fit. All blocks have 64 bytes and are resident.
template <EvictionPolicy P>
struct PredictedEviction {
  explicit PredictedEviction(std::uint32_t blocks) {
    for (std::uint32_t i = 0; i < blocks; ++i) {
      schedule.on_create(block(i), 64);
      policy.on_insert(block(i), 64, {});
    }
    for (int step = 0; step < 4; ++step) {
      schedule.begin_step();
      policy.on_step(schedule, blocks / 2 * 64);
      for (std::uint32_t i = 0; i < blocks; ++i) {
        use(i);
      }
      for (std::uint32_t i = step == 3 ? 0 : blocks; i-- != 0;) {
        use(i);
      }
    }
  }
  void use(std::uint32_t index) {
    policy.on_access(block(index), schedule.on_access(block(index), Access::read));
    schedule.on_release(block(index));
  }

  P policy;
  AccessSchedule schedule;
};

/// Drives a prefetch policy as the pager does: tells it and a schedule of every use. The blocks
/// have 64 bytes and are named by their indices.
template <PrefetchPolicy P>
struct PrefetchRig {
  explicit PrefetchRig(std::uint32_t blocks, P chosen = P{}) : policy{std::move(chosen)} {
    for (std::uint32_t i = 0; i < blocks; ++i) {
      policy.on_create(block(i));
      schedule.on_create(block(i), 64);
    }
  }
  void use(std::uint32_t index, Access access = Access::read) {
    policy.on_access(block(index), schedule.on_access(block(index), access));
    schedule.on_release(block(index));
  }
  void begin() {
    schedule.begin_step();
    policy.on_step();
  }
  std::vector<std::uint32_t> wanted(std::size_t most = 1000) {
    std::vector<std::uint32_t> indices;
    policy.candidates(schedule, [&](BlockId id, std::uint64_t) {
      indices.push_back(index_of_block(id));
      return indices.size() < most;
    });
    return indices;
  }

  P policy;
  AccessSchedule schedule;
};

/// Makes an arena with the constructor that its concept requires.
template <Arena A>
A make_arena(typename A::device_type& device,
             StreamOrder<typename A::device_type>& order,
             ArenaOptions const& options) {
  if constexpr (MappingArena<A>) {
    return A(device, order, options);
  } else {
    return A(device, options);
  }
}

/// Makes an arena of 64 MiB for a test, with the device and the order of streams that it needs.
template <Arena A>
struct ArenaRig {
  typename A::device_type device;
  StreamOrder<typename A::device_type> order{device};
  A arena{make_arena<A>(device, order, {.capacity_bytes = 64_MiB, .bounce_bytes = 0})};
};

/// Makes bytes for tests of codecs: floating-point numbers with a share of zeros, among them NaNs,
/// infinities and denormal numbers; or noise if `zeros` is negative.
[[nodiscard]] inline std::vector<std::byte>
codec_input(std::size_t bytes, double zeros, std::uint32_t seed) {
  std::mt19937 random{seed};
  std::uniform_real_distribution<double> share{0, 1};
  std::vector<std::byte> made(bytes);
  for (std::size_t at = 0; at < bytes; at += 4) {
    std::uint32_t bits = static_cast<std::uint32_t>(random());
    if (zeros >= 0) {
      bits = share(random) < zeros  ? 0
             : share(random) < 0.02 ? 0x7F800000U | (bits & 0x80000001U)
                                    : 0x3F000000U | (bits & 0x807FFFFFU);
    }
    std::memcpy(made.data() + at, &bits, std::min<std::size_t>(4, bytes - at));
  }
  return made;
}

/// Memory for a codec to decode into, between bytes that must not change.
class GuardedBytes {
 public:
  explicit GuardedBytes(std::size_t bytes) : memory_(bytes + 2 * around, guard) {}

  [[nodiscard]] std::span<std::byte> bytes() {
    return std::span{memory_}.subspan(around, memory_.size() - 2 * around);
  }
  [[nodiscard]] bool is_whole() const {
    auto const is_guard = [](std::byte byte) { return byte == guard; };
    return std::all_of(memory_.begin(), memory_.begin() + around, is_guard) &&
           std::all_of(memory_.end() - around, memory_.end(), is_guard);
  }

 private:
  static constexpr std::byte guard{0xA5};
  static constexpr std::ptrdiff_t around = 64;

  std::vector<std::byte> memory_;
};

/// Encodes into a buffer for the worst case, and checks that the bytes behind it do not change.
template <Codec C>
[[nodiscard]] std::vector<std::byte> encode_checked(C& codec, std::span<std::byte const> from) {
  constexpr std::byte guard{0xA5};
  std::size_t const room = C::worst_bytes(from.size());
  std::vector<std::byte> to(room + 64, guard);
  std::size_t const written = codec.encode(from, std::span{to}.first(room));
  REQUIRE(written <= room);
  CHECK(std::all_of(to.begin() + static_cast<std::ptrdiff_t>(room), to.end(), [](std::byte b) {
    return b == guard;
  }));
  to.resize(written);
  return to;
}

}  // namespace spillway::testing

TEST_CASE_TEMPLATE_DEFINE("FitPolicy: ", P, fit_policy_contract) {
  using namespace spillway;
  using namespace spillway::testing;
  SUBCASE("an empty index has no range and no size") {
    CheckedFit<P> const index{0};
    CHECK(index.find(1).node == no_node);
    CHECK(index.largest() == 0);
    CHECK(index.large(3).empty());
  }
  SUBCASE("a range is found by every size up to its own and by none above") {
    CheckedFit<P> index{10'000};
    std::uint32_t const node = index.insert(1000);
    CHECK(index.find(1).node == node);
    CHECK(index.find(1000).node == node);
    CHECK(index.find(1001).node == no_node);
  }
  SUBCASE("a range that is erased is not found again") {
    CheckedFit<P> index{10'000};
    std::uint32_t const first = index.insert(1000);
    std::uint32_t const second = index.insert(1000);
    std::uint32_t const third = index.insert(1000);
    index.erase(second);
    index.erase(third);
    CHECK(index.find(1000).node == first);
    index.erase(first);
    CHECK(index.find(1).node == no_node);
    CHECK(index.largest() == 0);
  }
  SUBCASE("the largest size there can be is found") {
    CheckedFit<P> index{10'000};
    std::uint32_t const node = index.insert(0xFFFFFFFEU);
    CHECK(index.find(0xFFFFFFFEU).node == node);
    CHECK(index.largest() == 0xFFFFFFFEU);
  }
  SUBCASE("every range is visited once, large ones roughly first") {
    CheckedFit<P> index{10'000};
    std::mt19937_64 random{5};
    for (int i = 0; i < 3000; ++i) {
      index.insert(static_cast<std::uint32_t>(1 + random() % (1U << (4 + i % 20))));
    }
    check_large(index);
  }
  SUBCASE("no more ranges are visited than are wanted") {
    CheckedFit<P> index{10'000};
    for (std::uint32_t size = 1; size <= 100; ++size) {
      index.insert(10 * size);
    }
    CHECK(index.large(3).size() == 3);
  }
  SUBCASE("a range that fits is found whenever there is one") {
    std::uint64_t seed = 1;
    for (std::size_t const taken_ranges : {0U, 100U, 1000U, 100'000U}) {
      play_fit<P>(taken_ranges, 6, seed++);
      play_fit<P>(taken_ranges, 60, seed++);
    }
  }
}

TEST_CASE_TEMPLATE_DEFINE("CompactionPolicy: ", P, compaction_policy_contract) {
  using namespace spillway;
  using namespace spillway::testing;
  P policy;
  std::mt19937_64 random{6};
  std::size_t plans = 0;
  for (int i = 0; i < 600; ++i) {
    CAPTURE(i);
    OwnedLayout const layout = random_layout(random, random() % 40, 60, 20, 12);
    auto const any_cost = std::numeric_limits<std::uint64_t>::max();
    REQUIRE_FALSE(policy.plan(layout.view(), layout.room() + 1, any_cost));
    if (layout.room() == 0) {
      continue;
    }
    auto const count = static_cast<std::uint32_t>(1 + random() % layout.room());
    auto const plan = policy.plan(layout.view(), count, any_cost);
    if (!plan) {
      continue;
    }
    ++plans;
    check_plan(layout.view(), *plan, count);
    auto const within = policy.plan(layout.view(), count, plan->cost);
    REQUIRE((!within || within->cost <= plan->cost));
    if (plan->cost != 0) {
      auto const cheaper = policy.plan(layout.view(), count, plan->cost - 1);
      REQUIRE((!cheaper || cheaper->cost < plan->cost));
    }
    OwnedLayout fixed = layout;
    for (LayoutBlock& block : fixed.blocks) {
      block.is_fixed = true;
    }
    auto const without_moves = policy.plan(fixed.view(), count, any_cost);
    REQUIRE((!without_moves || without_moves->moves.empty()));
  }
  CHECK((plans != 0) == P::moves_blocks);
}

TEST_CASE_TEMPLATE_DEFINE("EvictionPolicy: ", P, eviction_policy_contract) {
  using namespace spillway;
  using namespace spillway::testing;
  P policy;
  SUBCASE("an empty policy names no victim") {
    CHECK(policy.victim(1, anyone) == std::nullopt);
  }
  P same;
  for (std::uint32_t i = 1; i <= 3; ++i) {
    policy.on_insert(block(i), 64, {});
    same.on_insert(block(i), 64, {});
  }

  SUBCASE("every tracked block is named once, and no other") {
    auto victims = drain(policy, anyone);
    std::sort(victims.begin(), victims.end());
    CHECK(victims == std::vector{block(1), block(2), block(3)});
  }
  SUBCASE("a block that cannot leave is not named") {
    CHECK(policy.victim(1, only({block(2)})) == block(2));
    CHECK(policy.victim(1, only({})) == std::nullopt);
  }
  SUBCASE("refusals leave the order as it was") {
    CHECK(policy.victim(1, only({block(3)})) == block(3));
    CHECK(policy.victim(1, only({})) == std::nullopt);
    CHECK(drain(policy, anyone) == drain(same, anyone));
  }
  SUBCASE("an erased block is not named") {
    policy.on_erase(block(1));
    policy.on_erase(block(1));  // no effect the second time
    policy.on_access(block(1), {});
    CHECK(drain(policy, anyone).size() == 2);
  }
  SUBCASE("an older block of an index that was reused is another block") {
    policy.on_erase(block(2));
    policy.on_insert(make_block_id(2, 2), 64, {});
    policy.on_erase(block(2));
    policy.on_access(block(2), {});
    CHECK(policy.victim(1, only({block(2)})) == std::nullopt);
    CHECK(policy.victim(1, only({make_block_id(2, 2)})) == make_block_id(2, 2));
  }
  SUBCASE("naming a victim does not forget it") {
    CHECK(policy.victim(1, anyone) == policy.victim(1, anyone));
  }
  SUBCASE("an erased block may come back") {
    policy.on_erase(block(1));
    policy.on_insert(block(1), 64, {});
    CHECK(drain(policy, anyone).size() == 3);
  }
  SUBCASE("with nothing predicted, a step and a misprediction change nothing") {
    AccessSchedule const schedule;
    policy.on_step(schedule, 1024);
    policy.on_misprediction();
    CHECK(drain(policy, anyone) == drain(same, anyone));
  }
  SUBCASE("moved, it knows the same blocks") {
    P moved{std::move(policy)};
    CHECK(drain(moved, anyone) == drain(same, anyone));
  }
  SUBCASE("while a schedule predicts, the same holds") {
    for (std::uint32_t const blocks : {1U, 8U, 40U}) {
      CAPTURE(blocks);
      PredictedEviction<P> rig{blocks};
      PredictedEviction<P> other{blocks};
      REQUIRE(rig.schedule.is_predicting());
      for (std::uint32_t i = 0; i < blocks; ++i) {
        REQUIRE(rig.policy.victim(1, only({block(i)})) == block(i));
      }
      REQUIRE(rig.policy.victim(1, only({})) == std::nullopt);
      REQUIRE(rig.policy.victim(1, anyone) == rig.policy.victim(1, anyone));

      std::vector<BlockId> victims = drain(rig.policy, anyone);
      REQUIRE(victims == drain(other.policy, anyone));
      std::sort(victims.begin(), victims.end());
      REQUIRE(std::adjacent_find(victims.begin(), victims.end()) == victims.end());
      REQUIRE(victims.size() == blocks);
      REQUIRE(std::all_of(victims.begin(), victims.end(), [&](BlockId id) {
        return generation_of(id) == 1 && index_of_block(id) < blocks;
      }));
    }
  }
  SUBCASE("while a schedule predicts, refusals leave the order as it was, whatever the sizes") {
    auto const sized = [](BlockId id) noexcept -> std::optional<EvictionCandidate> {
      return EvictionCandidate{64 * (1 + std::size_t{index_of_block(id)} * 7 % 11), false, true};
    };
    for (std::size_t const short_bytes : {1U, 100U, 1000U}) {
      CAPTURE(short_bytes);
      PredictedEviction<P> rig{40};
      PredictedEviction<P> other{40};
      while (auto const id = other.policy.victim(short_bytes, sized)) {
        REQUIRE(rig.policy.victim(short_bytes, only({})) == std::nullopt);
        REQUIRE(rig.policy.victim(short_bytes, sized) == id);
        rig.policy.on_erase(*id);
        other.policy.on_erase(*id);
      }
      REQUIRE(rig.policy.victim(short_bytes, sized) == std::nullopt);
    }
  }
  if constexpr (SpeculativeEvictionPolicy<P>) {
    auto const clean = [](BlockId) noexcept -> std::optional<EvictionCandidate> {
      return EvictionCandidate{64, true, true};
    };
    SUBCASE("before anything is predicted, no block leaves early") {
      REQUIRE(policy.early_victim(anyone) == std::nullopt);
    }
    SUBCASE("of blocks that will leave, only tracked ones that can leave now are named") {
      for (std::uint32_t i = 0; i < 40; ++i) {
        CAPTURE(i);
        PredictedEviction<P> rig{40};
        rig.policy.on_erase(block(39 - i));
        for (int tries = 0; tries < 40; ++tries) {
          auto const is_right = [&](std::optional<BlockId> id) { return !id || id == block(i); };
          REQUIRE(is_right(rig.policy.early_victim(only({block(i), block(39 - i)}))));
          REQUIRE(is_right(rig.policy.leaving_victim(only({block(i), block(39 - i)}))));
        }
        REQUIRE(rig.policy.leaving_victim(only({})) == std::nullopt);
        REQUIRE(rig.policy.early_victim(only({})) == std::nullopt);
        REQUIRE(rig.policy.early_victim(clean) == std::nullopt);
      }
    }
  }
}

TEST_CASE_TEMPLATE_DEFINE("RecomputePolicy: ", P, recompute_policy_contract) {
  using namespace spillway;
  P policy;
  for (double const step_ns : {0., 0., 100., 100., 1e9, 1., 0., 50., 50., 50., 50., 50., 50.}) {
    policy.on_step(step_ns, 1024);
    for (double const copy_ns : {1., 50., 100.}) {
      for (double const recompute_ns : {1., 50., 100.}) {
        CAPTURE(copy_ns);
        CAPTURE(recompute_ns);
        bool const is_preferred = policy.prefers_recompute({copy_ns, recompute_ns});
        CHECK(policy.prefers_recompute({copy_ns, recompute_ns}) == is_preferred);
        double const share = policy.plan_share({copy_ns, recompute_ns});
        CHECK(share >= 0);
        CHECK(share <= 1);
        CHECK((is_preferred || share == 1));  // copied bytes count as a copy
        if (is_preferred) {
          CHECK(policy.wants_recipes());
          CHECK(policy.prefers_recompute({2 * copy_ns, recompute_ns}));
          CHECK(policy.prefers_recompute({copy_ns, recompute_ns / 2}));
        }
      }
    }
  }
  bool const is_preferred = policy.prefers_recompute({100, 50});
  P const moved{std::move(policy)};
  CHECK(moved.prefers_recompute({100, 50}) == is_preferred);
}

TEST_CASE_TEMPLATE_DEFINE("PrefetchPolicy: ", P, prefetch_policy_contract) {
  using namespace spillway;
  using namespace spillway::testing;
  PrefetchRig<P> rig{40};
  SUBCASE("before anything was used nothing is wanted") {
    CHECK(rig.wanted().empty());
  }
  for (int step = 0; step < 2; ++step) {  // there and back, twice
    rig.begin();
    for (std::uint32_t i = 0; i < 40; ++i) {
      rig.use(i);
    }
    for (std::uint32_t i = 40; i-- != (step == 0 ? 0U : 15U);) {
      rig.use(i);
    }
  }
  SUBCASE("a freed block is not wanted") {
    rig.policy.on_destroy(block(13));
    rig.schedule.on_destroy(block(13));
    rig.policy.on_destroy(block(13));  // no effect the second time
    auto const wanted = rig.wanted();
    CHECK(std::count(wanted.begin(), wanted.end(), 13U) == 0);
  }
  SUBCASE("no more is named than the visitor wants") {
    CHECK(rig.wanted(1).size() <= 1);
  }
  SUBCASE("next uses are in order and not in the past") {
    std::uint64_t last = rig.schedule.position();
    rig.policy.candidates(rig.schedule, [&](BlockId, std::uint64_t next_use) {
      CHECK(next_use >= last);
      last = next_use;
      return true;
    });
  }
}

TEST_CASE_TEMPLATE_DEFINE("Arena: ", A, arena_contract) {
  using namespace spillway;
  using namespace spillway::testing;
  ArenaRig<A> rig;
  A& arena = rig.arena;
  SUBCASE("ranges do not overlap, and all that was taken can be taken again") {
    std::mt19937_64 random{61};
    struct Taken {
      Placement placement;
      BlockId owner;
      std::size_t bytes;
    };
    std::map<std::byte*, Taken> taken;
    std::size_t refused = 0;
    for (std::uint64_t i = 1; i <= 2000; ++i) {
      if (taken.empty() || random() % 5 < 3) {
        std::size_t const bytes = 1 + random() % 6_MiB;
        std::size_t const before = arena.free_bytes();
        bool const fits = bytes <= arena.largest_free_bytes();
        auto const placement = arena.try_take(bytes, BlockId{i});
        REQUIRE(placement.has_value() == fits);
        refused += fits ? 0U : 1U;
        if (placement) {
          REQUIRE(arena.address(placement->range) == placement->address);
          REQUIRE(arena.free_bytes() + arena.rounded_bytes(bytes) == before);
          REQUIRE(arena.rounded_bytes(bytes) >= bytes);
          taken[placement->address] = {*placement, BlockId{i}, arena.rounded_bytes(bytes)};
        }
      } else {
        auto const one =
            std::next(taken.begin(), static_cast<std::ptrdiff_t>(random() % taken.size()));
        arena.give_back(one->second.placement.range, {});
        taken.erase(one);
      }
      REQUIRE(arena.free_bytes() <= arena.reserved_bytes());
      REQUIRE(arena.largest_free_bytes() <= arena.free_bytes());
      REQUIRE(arena.reserved_bytes() <= arena.capacity_bytes());
    }
    CHECK(refused > 50);
    std::size_t views = 0;
    arena.for_each_range([&](RangeView const& range) {
      if (range.state == RangeState::taken) {
        ++views;
        auto const one = taken.find(range.address);
        REQUIRE(one != taken.end());
        REQUIRE(range.size_bytes == one->second.bytes);
        REQUIRE(range.owner == one->second.owner);
        REQUIRE(range.range == one->second.placement.range);
      }
    });
    CHECK(views == taken.size());
    std::byte* end = nullptr;
    for (auto const& [address, one] : taken) {
      REQUIRE(address >= end);
      end = address + one.bytes;
    }
    for (auto const& [address, one] : taken) {
      arena.give_back(one.placement.range, {});
    }
    CHECK(arena.free_bytes() == arena.reserved_bytes());
    CHECK(arena.largest_free_bytes() == arena.capacity_bytes());
  }
  SUBCASE("the capacity in force bounds what can be taken") {
    auto const first = arena.try_take(32_MiB, BlockId{1});
    auto const second = arena.try_take(16_MiB, BlockId{2});
    REQUIRE(first);
    REQUIRE(second);
    arena.set_capacity(56_MiB);
    CHECK(arena.capacity_bytes() == 56_MiB);
    CHECK(arena.free_bytes() == 8_MiB);
    CHECK(arena.largest_free_bytes() == 8_MiB);
    CHECK(!arena.try_take(10_MiB, BlockId{3}));
    arena.set_capacity(32_MiB);  // below what is taken, which stays where it is
    CHECK(arena.free_bytes() == 0);
    CHECK(!arena.try_take(1, BlockId{3}));
    arena.give_back(second->range, {});
    CHECK(arena.free_bytes() == 0);
    arena.give_back(first->range, {});
    CHECK(arena.free_bytes() == 32_MiB);
    auto const third = arena.try_take(32_MiB, BlockId{3});
    REQUIRE(third);
    CHECK(arena.largest_free_bytes() == 0);
    arena.set_capacity(64_MiB);
    auto const fourth = arena.try_take(16_MiB, BlockId{4});
    REQUIRE(fourth);
    arena.give_back(third->range, {});
    arena.give_back(fourth->range, {});
    CHECK(arena.free_bytes() == 64_MiB);
  }
  if constexpr (!MappingArena<A>) {
    SUBCASE("whoever takes bytes is told to wait for those who used them before") {
      auto const first = arena.try_take(arena.capacity_bytes(), BlockId{1});
      REQUIRE(first);
      auto const stream = rig.device.create_stream();
      Fence const uses = rig.order.mark(rig.order.index_of(stream));
      arena.give_back(first->range, uses);
      auto const second = arena.try_take(1000, BlockId{2});
      REQUIRE(second);
      CHECK(second->fence == uses);
      arena.give_back(second->range, {});
      rig.order.retire(stream);
      rig.device.synchronize(stream);
      rig.device.destroy_stream(stream);
    }
  }
}

// The sizes are around those of an element, of a word of a bitmap and of a vector register. The
// address is not aligned.
TEST_CASE_TEMPLATE_DEFINE("Codec: ", C, codec_contract) {
  using namespace spillway;
  using Bytes = std::vector<std::byte>;
  C codec;

  SUBCASE("what goes in comes out, or the same as the time before") {
    for (double const zeros : {-1.0, 0.0, 0.5, 0.97, 1.0}) {
      for (unsigned const bytes :
           {0U, 1U, 3U, 4U, 31U, 32U, 63U, 255U, 260U, 4096U, 65536U, 70001U}) {
        CAPTURE(zeros);
        CAPTURE(bytes);
        Bytes const memory = testing::codec_input(bytes + 1, zeros, 7);
        auto const from = std::span{memory}.subspan(1);
        Bytes const encoded = testing::encode_checked(codec, from);
        Bytes once(bytes + 2, std::byte{0xA5});
        REQUIRE(codec.decode(encoded, std::span{once}.subspan(1, bytes)));
        CHECK(once.front() == std::byte{0xA5});
        CHECK(once.back() == std::byte{0xA5});
        auto const decoded = std::span<std::byte const>{once}.subspan(1, bytes);
        if (C::is_lossless) {
          CHECK(std::equal(from.begin(), from.end(), decoded.begin()));
        }
        Bytes again(bytes);
        REQUIRE(codec.decode(testing::encode_checked(codec, decoded), again));
        CHECK(std::equal(again.begin(), again.end(), decoded.begin()));
      }
    }
  }

  SUBCASE("a wrong length is found, whichever it is") {
    Bytes const from = testing::codec_input(1000, 0.5, 3);
    Bytes encoded = testing::encode_checked(codec, from);
    testing::GuardedBytes to{from.size()};
    for (std::size_t length = 0; length < encoded.size(); ++length) {
      // A buffer of its own, so that a sanitizer notices reads behind its end.
      Bytes const part(encoded.begin(), encoded.begin() + static_cast<std::ptrdiff_t>(length));
      REQUIRE_FALSE(codec.decode(part, to.bytes()));
    }
    encoded.push_back(std::byte{1});
    CHECK_FALSE(codec.decode(encoded, to.bytes()));
    CHECK(to.is_whole());
  }

  SUBCASE("whatever the bytes are, nothing is touched outside the spans") {
    for (std::uint32_t seed = 0; seed < 200; ++seed) {
      Bytes encoded = testing::encode_checked(codec, testing::codec_input(1000, 0.5, seed));
      std::mt19937 random{seed};
      for (int i = 0; i < 8; ++i) {
        encoded[random() % encoded.size()] = static_cast<std::byte>(random());
      }
      testing::GuardedBytes to{1000};
      static_cast<void>(codec.decode(encoded, to.bytes()));
      REQUIRE(to.is_whole());
    }
  }
}
