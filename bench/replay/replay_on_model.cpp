// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/sim/model_api.hpp>
#include <spillway/sim.hpp>

#include "replayer.hpp"

namespace replay {

namespace {

struct ModelPolicies : spillway::SimPolicies {
  using device = spillway::ModelApi;
  using lock = spillway::NullLock;
};

}  // namespace

Result replay_on_model(Trace const& trace, Settings const& settings) {
  spillway::ModelApi device{
      {.capacity_bytes = std::size_t{1} << 60U,
       .link_bytes_per_second =
           static_cast<std::uint64_t>(settings.link_gbps.value_or(default_link_gbps) * 1e9),
       .on_device_bytes_per_second = 750'000'000'000,  // each byte is read and written
       .checked = false}};
  return replay_with<ModelPolicies>(device, trace, settings, true);
}

}  // namespace replay
