// SPDX-License-Identifier: Apache-2.0
#include <spillway/sim.hpp>

#include "replayer.hpp"

namespace replay {

Result replay_on_sim(Trace const& trace, Settings const& settings) {
  spillway::SimOptions options{.capacity_bytes = settings.capacity_bytes + (std::size_t{1} << 30U)};
  if (auto const gbps = settings.copy_gbps()) {
    options.link_bytes_per_second = static_cast<std::uint64_t>(*gbps * 1e9);
  }
  spillway::SimApi device{options};
  return Replayer<spillway::SimPolicies>{device, trace, settings, false}.run();
}

}  // namespace replay
