// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/concepts/eviction_policy.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/range_table.hpp>
#include <spillway/core/types.hpp>
#include <spillway/defrag_arena.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/policy/codec/zero_bitmap.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/eviction/schedule_eviction.hpp>
#include <spillway/policy/fit/best_fit.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <support/wrong_models.hpp>

// Each model here breaks one promise of its concept, and its contract suite must notice it.
namespace {

using namespace spillway;

struct PlacesNothing : BestFit {
  void resize(RangeTable& table,
              std::uint32_t node,
              std::uint32_t /*first*/,
              std::uint32_t count) noexcept {
    BestFit::resize(table, node, table[node].first, count);
  }
};

struct VisitsInOrderOfInsertion : BestFit {
  void insert(RangeTable& table, std::uint32_t node) noexcept {
    BestFit::insert(table, node);
    std::size_t const count = table[node].count;
    auto at = nodes_.begin();
    while (at != nodes_.end() && at->first > count) {
      ++at;
    }
    nodes_.insert(at, {count, node});
  }
  void erase(RangeTable& table, std::uint32_t node) noexcept {
    BestFit::erase(table, node);
    std::erase_if(nodes_, [&](auto const& one) { return one.second == node; });
  }
  template <class Visit>
  void visit_large(RangeTable const& /*table*/, Visit visit) const {
    for (auto const& [count, node] : nodes_) {  // by the sizes that they were inserted with
      if (!visit(node)) {
        return;
      }
    }
  }

 private:
  std::vector<std::pair<std::size_t, std::uint32_t>> nodes_;
};

/// Slides all blocks down, even if that makes less room than is wanted.
struct SlidesInVain {
  static constexpr bool moves_blocks = true;

  std::optional<LayoutPlan>
  plan(Layout const& layout, std::uint32_t /*count*/, std::uint64_t budget) {
    LayoutPlan plan;
    std::uint32_t at = 0;
    for (std::uint32_t i = 0; i < layout.blocks.size(); ++i) {
      if (layout.blocks[i].is_fixed) {
        return std::nullopt;
      }
      if (layout.blocks[i].first != at) {
        plan.moves.push_back({i, at});
        plan.cost += layout.blocks[i].count;
      }
      at += layout.blocks[i].count;
    }
    plan.first = at;
    plan.count = layout.end - at;
    return plan.cost <= budget ? std::optional{plan} : std::nullopt;
  }
};

/// Does not ask whether a block can leave once it has a plan.
struct ForcesPlan : LruEviction {
  void on_step(AccessSchedule const& schedule, std::size_t /*bytes*/) noexcept {
    has_plan_ = schedule.is_predicting();
  }
  template <class Inspect>
  [[nodiscard]] std::optional<BlockId> victim(std::size_t bytes, Inspect inspect) noexcept {
    return has_plan_ ? LruEviction::victim(bytes, testing::anyone)
                     : LruEviction::victim(bytes, std::move(inspect));
  }

 private:
  bool has_plan_ = false;
};

struct OffersLeasedBlocks : ScheduleEviction {
  template <class Inspect>
  [[nodiscard]] std::optional<BlockId> early_victim(Inspect /*inspect*/) noexcept {
    return ScheduleEviction::early_victim(testing::anyone);
  }
};

struct OffersCleanBlocks : ScheduleEviction {
  template <class Inspect>
  [[nodiscard]] std::optional<BlockId> early_victim(Inspect inspect) noexcept {
    return ScheduleEviction::leaving_victim(std::move(inspect));
  }
};

template <class Device>
struct ShowsWrongSizes : DefragArena<Device> {
  using DefragArena<Device>::DefragArena;

  template <class Visit>
  void for_each_range(Visit&& visit) const {
    DefragArena<Device>::for_each_range([&](RangeView range) {
      range.size_bytes = 1;
      visit(range);
    });
  }
};

struct WritesBehindBlock : ZeroBitmap {
  [[nodiscard]] bool decode(std::span<std::byte const> from,
                            std::span<std::byte> to) const noexcept {
    bool const is_decoded = ZeroBitmap::decode(from, to);
    if (!is_decoded && to.size() == 1000) {
      *(to.data() + to.size()) = std::byte{1};
    }
    return is_decoded;
  }
};

spillway::test::ExpectedFailures const before_wrong_policies{true};

}  // namespace

TEST_CASE_TEMPLATE_INVOKE(fit_policy_contract, PlacesNothing, VisitsInOrderOfInsertion);
TEST_CASE_TEMPLATE_INVOKE(compaction_policy_contract, SlidesInVain);
TEST_CASE_TEMPLATE_INVOKE(eviction_policy_contract,
                          ForcesPlan,
                          OffersLeasedBlocks,
                          OffersCleanBlocks);
TEST_CASE_TEMPLATE_INVOKE(arena_contract, ShowsWrongSizes<SimApi>);
TEST_CASE_TEMPLATE_INVOKE(codec_contract, WritesBehindBlock);

namespace {

spillway::test::ExpectedFailures const after_wrong_policies{false};

}  // namespace
