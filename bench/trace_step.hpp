// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>

#include <cstddef>
#include <vector>

#include "replay/trace.hpp"
#include "residency_model.hpp"

namespace spillway::bench {

/// One repetition of a trace: a block is written at its first use and read from then on.
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

}  // namespace spillway::bench
