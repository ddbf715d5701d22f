// SPDX-License-Identifier: Apache-2.0
#include "sweep.hpp"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string_view>

#include "../step_bound.hpp"
#include "../trace_step.hpp"
#include "capacity.hpp"

namespace replay {

namespace {

double factor_of(Trace const& trace, SweepRow const& row) {
  return static_cast<double>(row.capacity_bytes) / static_cast<double>(trace.peak_live_bytes);
}

/// What a table has room for: of the allocator's own words the first sentence.
std::string reason_of(Trace const& trace, SweepRow const& row) {
  if (row.capacity_bytes < trace.working_set_bytes) {
    return "one operation alone needs " + text_of(trace.working_set_bytes);
  }
  std::string_view failure = row.result.failure;
  if (std::string_view const prefix{"spillway: "}; failure.starts_with(prefix)) {
    failure.remove_prefix(prefix.size());
  }
  return "operation " + std::to_string(row.result.failed_at.value_or(0)) + ": " +
         std::string{failure.substr(0, failure.find_first_of(".;\n"))};
}

/// Of longer steps the bound would take too long: the square of their operations.
constexpr std::size_t most_bounded_operations = 20'000;

/// No plan of copies takes less for the last repetition; of accesses over a known link. Recipes may
/// take less.
std::optional<spillway::bench::StepBound> bound_of(Trace const& trace, Settings const& settings) {
  if (trace.form != Trace::Form::accesses || trace.operations.size() > most_bounded_operations ||
      !settings.link_gbps) {
    return std::nullopt;
  }
  return spillway::bench::StepBound{
      settings.steps == 1 ? spillway::bench::first_step_of(trace) : spillway::bench::step_of(trace),
      spillway::bench::kernels_ns(trace, settings.kernel_scale.value_or(1))};
}

double gib(std::uint64_t bytes) {
  return static_cast<double>(bytes) / 0x1p30;
}
double ms(std::uint64_t ns) {
  return static_cast<double>(ns) / 1e6;
}

class TablePrinter final : public SweepPrinter {
 public:
  TablePrinter(std::string const& name, Trace const& trace, Settings const& settings)
      : name_{name}, trace_{trace}, settings_{settings} {}

  void print(SweepRow const& row) override {
    if (!has_heading_) {
      print_heading();
    }
    std::printf("%12s %7.2fx ", text_of(row.capacity_bytes).c_str(), factor_of(trace_, row));
    if (!row.is_completed) {
      std::printf("does not work: %s\n", row.reason.c_str());
      return;
    }
    std::printf("%12.1f ", ms(row.step.simulated_ns));
    if (row.slowdown) {
      std::printf("%8.2fx ", *row.slowdown);
    } else {
      std::printf("%9s ", "-");
    }
    std::printf("%10.2f %10.2f %10.2f\n",
                gib(row.step.swapped_in_bytes),
                gib(row.step.swapped_out_bytes),
                gib(row.step.moved_bytes));
  }

 private:
  void print_heading() {
    has_heading_ = true;
    std::printf("%s: %zu operations a step, the last of %zu steps\n",
                name_.c_str(),
                trace_.operations.size(),
                settings_.steps);
    std::printf("  at most %s alive at once, at most %s in one operation, kernels %.1f ms a step\n",
                text_of(trace_.peak_live_bytes).c_str(),
                text_of(trace_.working_set_bytes).c_str(),
                static_cast<double>(trace_.compute_ns) * settings_.kernel_scale.value_or(1) / 1e6);
    if (settings_.link_gbps) {
      std::printf("  host link %g GB/s each way", *settings_.link_gbps);
      if (settings_.codec_ratio) {
        std::printf(", by the codec %g times as fast", *settings_.codec_ratio);
      }
      std::printf("\n");
    }
    std::printf("%12s %8s %12s %9s %10s %10s %10s\n",
                "capacity",
                "of peak",
                "step ms",
                "slowdown",
                "in GiB",
                "out GiB",
                "moved GiB");
  }

  std::string const& name_;
  Trace const& trace_;
  Settings const& settings_;
  bool has_heading_ = false;
};

class CsvPrinter final : public SweepPrinter {
 public:
  CsvPrinter(Trace const& trace, Settings const& settings)
      : trace_{trace}, settings_{settings}, bound_{bound_of(trace, settings)} {
    std::printf("capacity_bytes,capacity_factor,completed,step_ns,slowdown,swapped_in_bytes,"
                "swapped_out_bytes,dropped_bytes,moved_bytes,reason,least_ns,link_gbps\n");
  }

  void print(SweepRow const& row) override {
    std::printf(
        "%zu,%.6f,%d,", row.capacity_bytes, factor_of(trace_, row), row.is_completed ? 1 : 0);
    if (!row.is_completed) {
      std::string reason = row.reason;
      std::replace(reason.begin(), reason.end(), '"', '\'');
      std::printf(",,,,,,\"%s\",", reason.c_str());
      print_link();
      return;
    }
    std::printf("%llu,", static_cast<unsigned long long>(row.step.simulated_ns));
    if (row.slowdown) {
      std::printf("%.6f", *row.slowdown);
    }
    for (std::uint64_t const bytes : {row.step.swapped_in_bytes,
                                      row.step.swapped_out_bytes,
                                      row.step.dropped_bytes,
                                      row.step.moved_bytes}) {
      std::printf(",%llu", static_cast<unsigned long long>(bytes));
    }
    std::printf(",,");
    if (bound_ && row.slowdown) {
      std::printf("%.0f", bound_->least_ns(row.capacity_bytes, *settings_.copy_gbps()));
    }
    print_link();
  }

 private:
  void print_link() const {
    if (settings_.link_gbps) {
      std::printf(",%g\n", *settings_.link_gbps);
    } else {
      std::printf(",\n");
    }
  }

  Trace const& trace_;
  Settings const& settings_;
  std::optional<spillway::bench::StepBound> bound_;
};

}  // namespace

void run_sweep(Trace const& trace,
               Settings const& settings,
               std::vector<std::size_t> const& capacities,
               std::function<Result(Trace const&, Settings const&)> const& run,
               std::function<void(SweepRow const&)> const& report) {
  for (std::size_t const capacity_bytes : capacities) {
    Settings with_capacity = settings;
    with_capacity.capacity_bytes = capacity_bytes;
    SweepRow row;
    row.capacity_bytes = capacity_bytes;
    row.result = run(trace, with_capacity);
    row.is_completed = row.result.completed;
    if (row.is_completed) {
      row.step = row.result.steps.back();
      std::uint64_t const compute_ns = row.result.compute_ns / settings.steps;
      if (row.result.has_run_kernels && compute_ns != 0) {
        row.slowdown = static_cast<double>(row.step.simulated_ns) / static_cast<double>(compute_ns);
      }
    } else {
      row.reason = reason_of(trace, row);
    }
    report(row);
  }
}

std::unique_ptr<SweepPrinter>
make_table_printer(std::string const& name, Trace const& trace, Settings const& settings) {
  return std::make_unique<TablePrinter>(name, trace, settings);
}

std::unique_ptr<SweepPrinter> make_csv_printer(Trace const& trace, Settings const& settings) {
  return std::make_unique<CsvPrinter>(trace, settings);
}

}  // namespace replay
