// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/eviction/ranked_eviction.hpp>
#include <spillway/policy/eviction/schedule_eviction.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/policy/recompute/recompute_if_cheaper.hpp>
#include <spillway/policy/recompute/tuned_recompute.hpp>

#include <cstddef>
#include <optional>
#include <variant>

#include "replay.hpp"

// Policies that a program chooses by their names, which are values. A type of allocator for each
// choice would be compiled for each device.

namespace replay {

class NamedRecompute {
 public:
  NamedRecompute() = default;
  explicit NamedRecompute(Recompute name) {
    if (name == Recompute::cheaper) {
      policy_.emplace<spillway::RecomputeIfCheaper>();
    } else if (name == Recompute::planned) {
      policy_ = spillway::RecomputeIfCheaper{1, true};
    } else if (name == Recompute::tuned) {
      policy_.emplace<spillway::TunedRecompute>();
    } else if (name == Recompute::always) {
      policy_.emplace<spillway::AlwaysRecompute>();
    }
  }
  void on_step(double step_ns, std::size_t bytes) noexcept {
    std::visit([&](auto& policy) { policy.on_step(step_ns, bytes); }, policy_);
  }
  [[nodiscard]] bool wants_recipes() const noexcept {
    return std::visit([](auto const& policy) { return policy.wants_recipes(); }, policy_);
  }
  [[nodiscard]] bool prefers_recompute(spillway::RecomputeCosts costs) const noexcept {
    return std::visit([costs](auto const& policy) { return policy.prefers_recompute(costs); },
                      policy_);
  }
  [[nodiscard]] double plan_share(spillway::RecomputeCosts costs) const noexcept {
    return std::visit([costs](auto const& policy) { return policy.plan_share(costs); }, policy_);
  }

 private:
  std::variant<spillway::NoRecompute,
               spillway::RecomputeIfCheaper,
               spillway::TunedRecompute,
               spillway::AlwaysRecompute>
      policy_;
};

/// Only `ScheduleEviction` knows in advance what will leave. With the others nothing is copied out
/// early and whatever is asked for may leave or return, as with a policy that knows nothing.
class NamedEviction {
 public:
  NamedEviction() = default;
  explicit NamedEviction(Eviction name) {
    if (name == Eviction::lru) {
      policy_.emplace<spillway::LruEviction>();
    } else if (name == Eviction::fifo) {
      policy_.emplace<spillway::FifoEviction>();
    } else if (name == Eviction::size) {
      policy_.emplace<spillway::SizeEviction>();
    } else if (name == Eviction::cost) {
      policy_.emplace<spillway::CostEviction>();
    }
  }
  void on_insert(spillway::BlockId id, std::size_t bytes, spillway::Use use) {
    std::visit([&](auto& policy) { policy.on_insert(id, bytes, use); }, policy_);
  }
  void on_access(spillway::BlockId id, spillway::Use use) noexcept {
    std::visit([&](auto& policy) { policy.on_access(id, use); }, policy_);
  }
  void on_erase(spillway::BlockId id) noexcept {
    std::visit([&](auto& policy) { policy.on_erase(id); }, policy_);
  }
  void on_misprediction() noexcept {
    std::visit([](auto& policy) { policy.on_misprediction(); }, policy_);
  }
  void on_step(spillway::AccessSchedule const& schedule, std::size_t capacity_bytes) noexcept {
    std::visit([&](auto& policy) { policy.on_step(schedule, capacity_bytes); }, policy_);
  }
  template <class Inspect>
  [[nodiscard]] std::optional<spillway::BlockId> victim(std::size_t short_bytes,
                                                        Inspect inspect) noexcept {
    return std::visit([&](auto& policy) { return policy.victim(short_bytes, inspect); }, policy_);
  }
  template <class Inspect>
  [[nodiscard]] std::optional<spillway::BlockId> early_victim(Inspect inspect) noexcept {
    auto* const planned = std::get_if<spillway::ScheduleEviction>(&policy_);
    return planned == nullptr ? std::nullopt : planned->early_victim(inspect);
  }
  template <class Inspect>
  [[nodiscard]] std::optional<spillway::BlockId> leaving_victim(Inspect inspect) noexcept {
    auto* const planned = std::get_if<spillway::ScheduleEviction>(&policy_);
    return planned == nullptr ? victim(0, inspect) : planned->leaving_victim(inspect);
  }
  [[nodiscard]] bool may_return(spillway::AccessSchedule const& schedule,
                                spillway::BlockId id) const noexcept {
    auto const* const planned = std::get_if<spillway::ScheduleEviction>(&policy_);
    return planned == nullptr || planned->may_return(schedule, id);
  }

 private:
  std::variant<spillway::ScheduleEviction,
               spillway::LruEviction,
               spillway::FifoEviction,
               spillway::SizeEviction,
               spillway::CostEviction>
      policy_;
};

}  // namespace replay
