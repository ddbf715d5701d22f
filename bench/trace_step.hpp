// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "replay/trace.hpp"
#include "residency_model.hpp"

namespace spillway::bench {

/// Returns one repetition of a trace as a step.
inline Step step_of(replay::Trace const& trace) {
  Step step;
  for (replay::Operation const& operation : trace.operations) {
    std::vector<Operand>& operands = step.emplace_back();
    for (std::size_t i = 0; i < operation.operand_count; ++i) {
      replay::Operand const& operand = trace.operands[operation.first_operand + i];
      replay::Tensor const& tensor = trace.tensors[operand.tensor];
      bool const is_written = operand.is_first && !tensor.is_weight;
      operands.push_back({operand.tensor,
                          round_up(tensor.bytes, granule_bytes),
                          tensor.is_weight,
                          is_written ? Access::write : Access::read});
    }
  }
  return step;
}

/// Returns the first repetition of a trace as a step: its weights do not exist before it, so their
/// first uses write them.
inline Step first_step_of(replay::Trace const& trace) {
  Step step = step_of(trace);
  std::vector<bool> exists(trace.tensors.size());
  for (std::vector<Operand>& operands : step) {
    for (Operand& operand : operands) {
      operand.access = exists[operand.block] ? operand.access : Access::write;
      exists[operand.block] = true;
    }
  }
  return step;
}

/// Returns the times of the kernels of one repetition: `scale` times those of the trace.
inline std::vector<std::uint64_t> kernels_ns(replay::Trace const& trace, double scale = 1) {
  std::vector<std::uint64_t> kernels;
  kernels.reserve(trace.operations.size());
  for (replay::Operation const& operation : trace.operations) {
    kernels.push_back(static_cast<std::uint64_t>(static_cast<double>(operation.kernel_ns) * scale));
  }
  return kernels;
}

}  // namespace spillway::bench
