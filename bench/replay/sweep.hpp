// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
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

/// Replays the trace with one capacity after the other, and reports each as soon as it is done. One
/// that does not work ends nothing.
void run_sweep(Trace const& trace,
               Settings const& settings,
               std::vector<std::size_t> const& capacities,
               std::function<Result(Trace const&, Settings const&)> const& run,
               std::function<void(SweepRow const&)> const& report);

/// Prints a sweep row by row.
class SweepPrinter {
 public:
  SweepPrinter() = default;
  SweepPrinter(SweepPrinter const&) = delete;
  SweepPrinter& operator=(SweepPrinter const&) = delete;
  virtual ~SweepPrinter() = default;
  virtual void print(SweepRow const& row) = 0;
  /// After the last row.
  virtual void end() {}
};

/// A table for people. The arguments must outlive the printer.
[[nodiscard]] std::unique_ptr<SweepPrinter>
make_table_printer(std::string const& name, Trace const& trace, Settings const& settings);

/// Comma-separated values, the names of the columns first. The arguments must outlive the printer.
[[nodiscard]] std::unique_ptr<SweepPrinter> make_csv_printer(Trace const& trace,
                                                             Settings const& settings);

}  // namespace replay
