// SPDX-License-Identifier: Apache-2.0
#include <spillway/observe/timed_device.hpp>
#include <spillway/observe/timeline.hpp>

#include <fstream>
#include <stdexcept>

#include "model.hpp"
#include "replayer.hpp"

namespace replay {

namespace {

struct WatchedPolicies : ModelPolicies {
  using device = spillway::TimedDevice<spillway::ModelApi>;
  using observer = spillway::Timeline;
};

}  // namespace

Result replay_on_model(Trace const& trace, Settings const& settings) {
  if (settings.timeline.empty()) {
    spillway::ModelApi device{model_options(settings)};
    return Replayer<ModelPolicies>{device, trace, settings, true}.run();
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
