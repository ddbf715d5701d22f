// SPDX-License-Identifier: Apache-2.0
#include <spillway/sim.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>

#include "bandwidth.hpp"
#include "measure.hpp"

namespace bandwidth {

void measure_on_sim(Settings const& settings, Report const& report) {
  spillway::SimOptions options{.capacity_bytes = std::numeric_limits<std::size_t>::max() / 2};
  options.poison = false;
  options.link_bytes_per_second = static_cast<std::uint64_t>(settings.link_gbps * 1e9);
  options.copy_latency_ns = static_cast<std::uint64_t>(settings.copy_latency_us * 1e3);
  spillway::SimApi device{options};
  Measurement<spillway::SimPolicies>{device, settings, report}.run();
}

}  // namespace bandwidth
