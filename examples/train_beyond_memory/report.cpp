// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <ostream>

#include <nlohmann/json.hpp>

namespace beyond {
namespace {

using Json = nlohmann::ordered_json;

std::string fixed(double value, int digits) {
  std::array<char, 64> text{};
  int const length = std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return {text.data(), static_cast<std::size_t>(std::clamp(length, 0, 63))};
}

std::string mebibytes(std::uint64_t bytes) {
  return fixed(static_cast<double>(bytes) / (1024.0 * 1024.0), 1) + " MiB";
}

std::string factor_of(RunReport const& run) {
  return fixed(run.capacity_factor, 2) + "x";
}

/// Rows of text in columns as wide as their widest cell, aligned to the right.
class Table {
 public:
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }

  void print(std::ostream& out) const {
    std::vector<std::size_t> widths;
    for (auto const& row : rows_) {
      widths.resize(std::max(widths.size(), row.size()));
      for (std::size_t i = 0; i < row.size(); ++i) {
        widths[i] = std::max(widths[i], row[i].size());
      }
    }
    for (auto const& row : rows_) {
      for (std::size_t i = 0; i < row.size(); ++i) {
        out << "  " << std::string(widths[i] - row[i].size(), ' ') << row[i];
      }
      out << '\n';
    }
  }

 private:
  std::vector<std::vector<std::string>> rows_;
};

void print_losses(std::ostream& out, std::size_t epochs, Report const& report) {
  std::vector<RunReport const*> shown{&report.reference};
  std::vector<std::string> head{"epoch", "no limit"};
  for (RunReport const& run : report.runs) {
    if (run.completed && run.swapping) {
      shown.push_back(&run);
      head.push_back(factor_of(run));
    }
  }
  Table table;
  table.add(std::move(head));
  std::vector<std::vector<double>> losses;
  for (RunReport const* const run : shown) {
    losses.push_back(epoch_losses(run->result.step_losses, epochs));
  }
  for (std::size_t epoch = 0; epoch < epochs; ++epoch) {
    std::vector<std::string> row{std::to_string(epoch + 1)};
    for (auto const& column : losses) {
      row.push_back(fixed(column[epoch], 6));
    }
    table.add(std::move(row));
  }
  out << "\nMean loss of each epoch\n\n";
  table.print(out);
}

void print_runs(std::ostream& out, Report const& report) {
  Table table;
  table.add({"capacity",
             "swapping",
             "outcome",
             "bitwise equal",
             "accuracy",
             "step",
             "swapped out",
             "swapped in",
             "dropped",
             "recomputed",
             "moved",
             "host waits"});
  for (RunReport const& run : report.runs) {
    std::vector<std::string> row{factor_of(run) + " = " + mebibytes(run.capacity_bytes),
                                 run.swapping ? "yes" : "no",
                                 run.completed ? "completed" : "out of memory"};
    if (run.completed) {
      spillway::Stats const& stats = run.result.stats;
      row.insert(row.end(),
                 {run.bitwise_equal ? "yes" : "NO",
                  fixed(run.result.test_accuracy * 100, 1) + " %",
                  fixed(run.result.step_ms, 1) + " ms",
                  mebibytes(stats.swap_outs.bytes),
                  mebibytes(stats.swap_ins.bytes),
                  mebibytes(stats.drops.bytes),
                  mebibytes(stats.recomputations.bytes),
                  mebibytes(stats.moves.bytes),
                  std::to_string(stats.host_waits)});
    }
    table.add(std::move(row));
  }
  out << "\nThe same training under a limit\n\n";
  table.print(out);
}

Json to_json(RunReport const& run, std::size_t epochs) {
  Json json;
  json["capacity_factor"] = run.capacity_factor;
  json["capacity_bytes"] = run.capacity_bytes;
  json["swapping"] = run.swapping;
  json["completed"] = run.completed;
  json["bitwise_equal"] = run.bitwise_equal;
  spillway::Stats const& stats = run.result.stats;
  auto const losses = epoch_losses(run.result.step_losses, epochs);
  json["final_loss"] = run.completed ? Json(losses.back()) : Json();
  json["test_accuracy"] = run.completed ? Json(run.result.test_accuracy) : Json();
  json["step_ms"] = run.completed ? Json(run.result.step_ms) : Json();
  json["swapped_out_bytes"] = stats.swap_outs.bytes;
  json["swapped_in_bytes"] = stats.swap_ins.bytes;
  json["dropped_bytes"] = stats.drops.bytes;
  json["recomputed_bytes"] = stats.recomputations.bytes;
  json["moved_bytes"] = stats.moves.bytes;
  json["host_waits"] = stats.host_waits;
  json["loss_per_epoch"] = losses;
  if (!run.error.empty()) {
    json["error"] = run.error;
  }
  return json;
}

}  // namespace

Verdict judge(Report const& report, bool judge_accuracy) {
  bool is_out_of_memory = false;
  auto const is_wrong = [&](RunReport const& run) {
    return !run.bitwise_equal || (judge_accuracy && run.result.test_accuracy < wanted_accuracy);
  };
  for (RunReport const& run : report.runs) {
    if (run.completed && is_wrong(run)) {
      return Verdict::wrong;
    }
    is_out_of_memory = is_out_of_memory || (run.swapping && !run.completed);
  }
  return is_out_of_memory ? Verdict::out_of_memory : Verdict::good;
}

void print_table(std::ostream& out,
                 Dataset const& data,
                 ExperimentOptions const& options,
                 Report const& report) {
  TrainingOptions const& training = options.training;
  out << "A residual network of " << 2 * training.shape.blocks + 2 << " layers, width "
      << training.shape.width << ", learns " << data.train.count() << " pictures of " << data.name
      << "\nin batches of " << training.batch << " and is tested on " << data.test.count()
      << " others. Device: " << report.device << ".\n\n"
      << "Without a limit its tensors take " << mebibytes(report.peak_bytes)
      << " at the peak; a step takes " << fixed(report.reference.result.step_ms, 1)
      << " ms, and it\nreads " << fixed(report.reference.result.test_accuracy * 100, 1)
      << " % of the test pictures right.\n";
  print_losses(out, training.epochs, report);
  print_runs(out, report);
  for (RunReport const& run : report.runs) {
    if (!run.completed) {
      out << '\n'
          << factor_of(run) << (run.swapping ? " with" : " without") << " swapping: " << run.error
          << '\n';
    }
  }
}

void print_json(std::ostream& out,
                Dataset const& data,
                ExperimentOptions const& options,
                Report const& report) {
  TrainingOptions const& training = options.training;
  Json json;
  json["device"] = report.device;
  json["peak_bytes"] = report.peak_bytes;
  json["data"] = data.name;
  json["epochs"] = training.epochs;
  json["steps"] = report.reference.result.step_losses.size();
  Json reference = to_json(report.reference, training.epochs);
  reference.erase("capacity_factor");
  reference.erase("bitwise_equal");
  json["reference"] = std::move(reference);
  json["runs"] = Json::array();
  for (RunReport const& run : report.runs) {
    json["runs"].push_back(to_json(run, training.epochs));
  }
  out << json.dump(2, ' ', false, Json::error_handler_t::replace) << '\n';
}

void Progress::show(std::string_view run,
                    std::size_t step,
                    std::size_t steps,
                    std::optional<double> loss) {
  line_.show([&] {
    return "training, " + std::string{run} + ": step " + std::to_string(step) + " of " +
           std::to_string(steps) + (loss ? ", loss " + fixed(*loss, 4) : "");
  });
}

}  // namespace beyond
