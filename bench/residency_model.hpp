// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/eviction_policy.hpp>
#include <spillway/core/types.hpp>
#include <spillway/policy/prefetch/schedule_lookahead.hpp>
#include <spillway/schedule/access_schedule.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace spillway::bench {

/// An operand of an operation: the block, and its size.
struct Operand {
  std::uint32_t block = 0;
  std::uint64_t bytes = 0;
  /// A weight lives throughout. Another block is born at its first use in a step and freed after
  /// its last.
  bool is_weight = false;
  Access access = Access::read_write;
};

/// A step: operations in order, each with the operands that must be resident together.
using Step = std::vector<std::vector<Operand>>;

/// Simulates what residency costs on a device without fragmentation. It drives an eviction policy
/// and a schedule as the pager does, over blocks that have nothing but a size.
template <EvictionPolicy Policy>
class ResidencyModel {
 public:
  explicit ResidencyModel(std::uint64_t capacity_bytes, Policy policy = {})
      : policy_{std::move(policy)}, capacity_bytes_{capacity_bytes} {}

  /// How many uses ahead blocks are prefetched after each operation. A block is brought in if there
  /// is room, or if it can replace one that is needed later and that, if the policy can tell,
  /// leaves anyway.
  std::size_t prefetch_ops = 0;

  std::uint64_t swapped_in_bytes = 0;
  std::uint64_t swapped_out_bytes = 0;
  std::uint64_t victims = 0;
  std::uint64_t failures = 0;  ///< operations that did not fit
  /// Blocks that were swapped in when they were used, and not ahead of that
  std::uint64_t late = 0;

  [[nodiscard]] AccessSchedule const& schedule() const noexcept { return schedule_; }
  [[nodiscard]] std::uint64_t resident_bytes() const noexcept { return resident_bytes_; }

  void begin_step() {
    schedule_.begin_step();
    policy_.on_step(schedule_, capacity_bytes_);
  }

  /// Runs one step; blocks that are not weights are born and freed within it.
  void run(Step const& step) {
    std::map<std::uint32_t, std::size_t> last_op;
    for (std::size_t i = 0; i < step.size(); ++i) {
      for (Operand const& operand : step[i]) {
        last_op[operand.block] = i;
      }
    }
    for (std::size_t i = 0; i < step.size(); ++i) {
      use(step[i]);
      for (Operand const& operand : step[i]) {
        if (!operand.is_weight && last_op[operand.block] == i) {
          free(operand.block);
        }
      }
    }
  }

  /// Runs one operation: keeps all its operands while room is made
  /// for those that are missing.
  void use(std::span<Operand const> operands) {
    for (Operand const& operand : operands) {
      Block& block = block_of(operand);
      ++block.leases;
    }
    for (Operand const& operand : operands) {
      access(operand);
    }
    for (Operand const& operand : operands) {
      Block& block = blocks_[names_.at(operand.block)];
      if (--block.leases == 0) {
        schedule_.on_release(id_of(names_.at(operand.block)));
      }
    }
    if (prefetch_ops != 0) {
      prefetch();
    }
  }

  void free(std::uint32_t name) {
    auto const at = names_.find(name);
    if (at == names_.end()) {
      return;
    }
    std::uint32_t const index = at->second;
    BlockId const id = id_of(index);
    policy_.on_erase(id);
    schedule_.on_destroy(id);
    if (blocks_[index].is_resident) {
      resident_bytes_ -= blocks_[index].bytes;
    }
    blocks_[index] = {.generation = blocks_[index].generation};
    free_indices_.push_back(index);
    names_.erase(at);
  }

 private:
  struct Block {
    std::uint32_t generation = 0;
    std::uint32_t leases = 0;
    std::uint64_t bytes = 0;
    bool is_resident = false;
    bool is_clean = false;
    bool has_contents = false;
  };

  [[nodiscard]] BlockId id_of(std::uint32_t index) const {
    return make_block_id(index, blocks_[index].generation);
  }

  Block& block_of(Operand const& operand) {
    auto const at = names_.find(operand.block);
    if (at != names_.end()) {
      return blocks_[at->second];
    }
    std::uint32_t index = static_cast<std::uint32_t>(blocks_.size());
    if (free_indices_.empty()) {
      blocks_.emplace_back();
    } else {
      index = free_indices_.back();
      free_indices_.pop_back();
    }
    Block& block = blocks_[index];
    ++block.generation;
    block.bytes = operand.bytes;
    block.has_contents = operand.is_weight;  // weights were written before the run
    names_[operand.block] = index;
    schedule_.on_create(id_of(index), operand.bytes);
    return block;
  }

  void access(Operand const& operand) {
    std::uint32_t const index = names_.at(operand.block);
    BlockId const id = id_of(index);
    Block& block = blocks_[index];
    Use const use = schedule_.on_access(id, operand.access);
    switch (schedule_.take_change()) {
    case AccessSchedule::Change::none:
      break;
    case AccessSchedule::Change::lost:
      policy_.on_misprediction();
      break;
    case AccessSchedule::Change::resumed:
      policy_.on_step(schedule_, capacity_bytes_);
      break;
    }
    if (block.is_resident) {
      policy_.on_access(id, use);
    } else {
      auto const choose = [&](std::uint64_t short_bytes) noexcept {
        return policy_.victim(short_bytes, inspecting([](BlockId) noexcept { return true; }));
      };
      failures += make_room(block.bytes, choose) ? 0U : 1U;
      block.is_resident = true;
      resident_bytes_ += block.bytes;
      policy_.on_insert(id, block.bytes, use);
      if (block.has_contents && operand.access != Access::write) {
        swapped_in_bytes += block.bytes;
        ++late;
        block.is_clean = true;
      }
    }
    if (operand.access != Access::read) {
      block.is_clean = false;
      block.has_contents = true;
    }
  }

  void prefetch() {
    ScheduleLookahead const lookahead{PrefetchOptions{.lookahead_ops = prefetch_ops}};
    lookahead.candidates(schedule_, [&](BlockId id, std::uint64_t next_use) {
      Block& block = blocks_[index_of_block(id)];
      if (block.is_resident || !block.has_contents) {
        return true;
      }
      auto const may_go = [&](BlockId other) noexcept {
        std::uint64_t const next = schedule_.next_use(other);
        return next != use_unknown && next > next_use;
      };
      auto const choose = [&](std::uint64_t short_bytes) noexcept {
        if constexpr (SpeculativeEvictionPolicy<Policy>) {
          return policy_.leaving_victim(inspecting(may_go));
        } else {
          return policy_.victim(short_bytes, inspecting(may_go));
        }
      };
      if (!make_room(block.bytes, choose)) {
        return false;
      }
      block.is_resident = true;
      block.is_clean = true;
      resident_bytes_ += block.bytes;
      swapped_in_bytes += block.bytes;
      policy_.on_insert(id, block.bytes, schedule_.use_of(id));
      return true;
    });
  }

  /// What the policy is told about blocks for which `may_go(id)` is true.
  template <class MayGo>
  [[nodiscard]] auto inspecting(MayGo may_go) const noexcept {
    return [this, may_go](BlockId id) noexcept -> std::optional<EvictionCandidate> {
      Block const& block = blocks_[index_of_block(id)];
      if (block.leases != 0 || block.generation != generation_of(id) || !may_go(id)) {
        return std::nullopt;
      }
      return EvictionCandidate{block.bytes, block.is_clean, block.has_contents};
    };
  }

  /// Evicts the blocks that `choose(short_bytes)` names until the block fits.
  template <class Choose>
  bool make_room(std::uint64_t bytes, Choose choose) {
    while (resident_bytes_ + bytes > capacity_bytes_) {
      auto const id = choose(resident_bytes_ + bytes - capacity_bytes_);
      if (!id) {
        return false;
      }
      Block& victim = blocks_[index_of_block(*id)];
      policy_.on_erase(*id);
      ++victims;
      victim.is_resident = false;
      resident_bytes_ -= victim.bytes;
      if (victim.has_contents && !victim.is_clean) {
        swapped_out_bytes += victim.bytes;
        victim.is_clean = true;
      }
    }
    return true;
  }

  AccessSchedule schedule_;
  Policy policy_;
  std::uint64_t capacity_bytes_;
  std::uint64_t resident_bytes_ = 0;
  std::map<std::uint32_t, std::uint32_t> names_;
  std::vector<Block> blocks_;
  std::vector<std::uint32_t> free_indices_;
};

}  // namespace spillway::bench
