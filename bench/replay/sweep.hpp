// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "replay.hpp"
#include "trace.hpp"

namespace replay {

/// One capacity of a sweep, and what the trace's last repetition cost there.
struct SweepRow {
  std::size_t capacity_bytes = 0;
  bool is_completed = false;
  std::string reason;  ///< why it is not
  StepResult step;     ///< the last repetition, in which a program that repeats is steady
  std::optional<double> slowdown;  ///< its time over that of its kernels alone, if those take any
  Result result;                   ///< of all repetitions
};

/// Replays the trace with one capacity after the other. One that does not work ends nothing.
[[nodiscard]] std::vector<SweepRow>
run_sweep(Trace const& trace,
          Settings const& settings,
          std::vector<std::size_t> const& capacities,
          std::function<Result(Trace const&, Settings const&)> const& run);

void print_sweep_table(std::string const& name,
                       Trace const& trace,
                       Settings const& settings,
                       std::vector<SweepRow> const& rows);

/// The same as lines of comma-separated values, the names of the columns first.
void print_sweep_csv(Trace const& trace, std::vector<SweepRow> const& rows);

}  // namespace replay
