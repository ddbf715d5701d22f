// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/sim/model_api.hpp>
#include <spillway/observe/timed_device.hpp>
#include <spillway/observe/timeline.hpp>
#include <spillway/sim.hpp>

#include <fstream>
#include <stdexcept>

#include "replayer.hpp"

namespace replay {

namespace {

struct ModelPolicies : spillway::SimPolicies {
  using device = spillway::ModelApi;
  using lock = spillway::NullLock;
};

struct WatchedPolicies : ModelPolicies {
  using device = spillway::TimedDevice<spillway::ModelApi>;
  using observer = spillway::Timeline;
};

spillway::SimOptions model_options(Settings const& settings) {
  return {.capacity_bytes = std::size_t{1} << 60U,
          .link_bytes_per_second =
              static_cast<std::uint64_t>(settings.link_gbps.value_or(default_link_gbps) * 1e9),
          .on_device_bytes_per_second = 750'000'000'000,  // each byte is read and written
          .checked = false};
}

}  // namespace

Result replay_on_model(Trace const& trace, Settings const& settings) {
  if (settings.timeline.empty()) {
    spillway::ModelApi device{model_options(settings)};
    return replay_with<ModelPolicies>(device, trace, settings, true);
  }
  std::ofstream out{settings.timeline};
  if (!out) {
    throw std::runtime_error{settings.timeline + ": cannot be opened for writing"};
  }
  WatchedPolicies::device device{model_options(settings)};
  Replayer<WatchedPolicies> replayer{device, trace, settings, true};
  Result const result = replayer.run();
  replayer.write_timeline(out);
  if (!out.flush()) {
    throw std::runtime_error{settings.timeline + ": cannot be written"};
  }
  return result;
}

}  // namespace replay
