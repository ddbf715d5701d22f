// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <filesystem>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data.hpp"
#include "progress.hpp"
#include "training_types.hpp"

namespace beyond {

/// Which memory limits to train under.
struct ExperimentOptions {
  std::vector<double> capacities{
      1.0, 0.5, 0.3, 0.2};  // as factors of the peak of the run without a limit
  TrainingOptions training;
  std::optional<double> link_gbps;  // rate to simulate for the host link; empty: the default
  std::filesystem::path timeline;   // of the last run; empty: none is written
  std::filesystem::path snapshot;
};

/// One training run.
struct RunReport {
  double capacity_factor = 0;
  std::size_t capacity_bytes = 0;
  bool swapping = true;
  bool completed = false;
  bool bitwise_equal = false;  // every loss, weight and moment, to those of the run without a limit
  std::string error;           // why it did not complete; empty if it did
  TrainingResult result;
};

struct Report {
  std::string device;
  std::size_t peak_bytes = 0;  // of live tensors, without a limit
  RunReport reference;         // the run without a limit
  std::vector<RunReport> runs;
};

/// The least accuracy on the test pictures that counts as trained.
inline constexpr double wanted_accuracy = 0.95;

/// The judgement of a report, which is the exit status of the program.
enum class Verdict : int { good = 0, wrong = 1, out_of_memory = 3 };

/// @param judge_accuracy  false for a training too short to be judged by it
[[nodiscard]] Verdict judge(Report const& report, bool judge_accuracy);

void print_table(std::ostream& out,
                 Dataset const& data,
                 ExperimentOptions const& options,
                 Report const& report);
void print_json(std::ostream& out,
                Dataset const& data,
                ExperimentOptions const& options,
                Report const& report);

/// Shows on standard error how far a run is.
class Progress {
 public:
  /// @param loss  the mean of the last epoch, once there is one
  void show(std::string_view run, std::size_t step, std::size_t steps, std::optional<double> loss);

 private:
  command_line::Progress line_{true};
};

}  // namespace beyond
