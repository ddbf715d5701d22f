// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>
#include <spillway/schedule/access_schedule.hpp>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <support/eviction_rig.hpp>

namespace spillway::testing {

/// A schedule and a prefetch policy over blocks of 64 bytes, named by their indices.
template <class P>
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

}  // namespace spillway::testing
