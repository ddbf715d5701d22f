// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/device/sim/model_api.hpp>
#include <spillway/sim.hpp>

#include <cstddef>
#include <cstdint>

#include "replay.hpp"

namespace replay {

/// The default policies on a virtual clock, for one thread.
struct ModelPolicies : spillway::SimPolicies {
  using device = spillway::ModelApi;
  using lock = spillway::NullLock;
};

/// The device that `replay_on_model` replays on: of any size, since the allocator keeps to the
/// capacity.
inline spillway::SimOptions model_options(Settings const& settings) {
  return {.capacity_bytes = std::size_t{1} << 60U,
          .link_bytes_per_second =
              static_cast<std::uint64_t>(settings.copy_gbps().value_or(default_link_gbps) * 1e9),
          .on_device_bytes_per_second = 750'000'000'000,  // each byte is read and written
          .checked = false};
}

}  // namespace replay
