// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/observe/timed_device.hpp>
#include <spillway/policies.hpp>
#include <spillway/sim.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "experiment.hpp"
#include "platforms.hpp"
#include "sim_execution.hpp"

namespace beyond {
namespace {

using namespace spillway::literals;

struct SimPlatform {
  using device = spillway::TimedDevice<spillway::SimApi>;  // so that a timeline shows what overlaps
  using policies = spillway::PoliciesFor<device>;
  using execution = SimExecution;

  [[nodiscard]] static std::string name() { return "sim"; }
  [[nodiscard]] static std::size_t unlimited_bytes() { return 16_GiB; }
  /// Makes a device with `memory_bytes` of memory. Its link is as fast as memory unless a rate is
  /// given.
  [[nodiscard]] static std::unique_ptr<device> make_device(std::size_t memory_bytes,
                                                           std::optional<double> link_gbps) {
    return std::make_unique<device>(spillway::SimOptions{
        .capacity_bytes = memory_bytes,
        .link_bytes_per_second = static_cast<std::uint64_t>(link_gbps.value_or(0) * 1e9)});
  }
};

}  // namespace

Report run_on_sim(Dataset const& data, ExperimentOptions const& options, Progress& progress) {
  return Experiment<SimPlatform>{data, options, progress}.run();
}

}  // namespace beyond
