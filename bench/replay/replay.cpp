// SPDX-License-Identifier: Apache-2.0
#include "replay.hpp"

#include <stdexcept>

namespace replay {

namespace {

constexpr double most_ns = 0x1p62;

/// What one repetition's copies take at most, if each operation swaps each of its operands out and
/// in.
double copies_ns(Trace const& trace, double gbps) {
  double bytes = 0;
  for (Operand const& operand : trace.operands) {
    bytes += static_cast<double>(trace.tensors[operand.tensor].bytes);
  }
  return 2 * bytes / gbps;
}

}  // namespace

void check_time(Trace const& trace, Settings const& settings) {
  auto const steps = static_cast<double>(settings.steps);
  if (static_cast<double>(trace.compute_ns) * settings.kernel_scale.value_or(1) * steps > most_ns) {
    throw std::invalid_argument{
        "the kernels of all steps take more than 2^62 ns: fewer --steps or a smaller "
        "--kernel-scale"};
  }
  if (copies_ns(trace, settings.copy_gbps().value_or(default_link_gbps)) * steps > most_ns) {
    throw std::invalid_argument{
        "the copies of all steps may take more than 2^62 ns: fewer --steps or a larger "
        "--link-gbps"};
  }
}

}  // namespace replay
