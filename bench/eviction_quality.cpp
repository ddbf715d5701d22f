// SPDX-License-Identifier: Apache-2.0
//
// Counts the bytes that each eviction policy makes a program swap in, for several capacities, and
// compares them with the fewest possible. The device is ideal: it has no fragmentation, and copies
// take no time. --help lists the options.

#include <spillway/core/types.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/eviction/ranked_eviction.hpp>
#include <spillway/policy/eviction/schedule_eviction.hpp>
#include <spillway/schedule/access_schedule.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "command_line.hpp"
#include "order_changes.hpp"
#include "replay/trace.hpp"
#include "residency_model.hpp"
#include "swap_bound.hpp"
#include "trace_step.hpp"
#include <CLI/CLI.hpp>

namespace {

using namespace spillway;
using bench::Operand;
using bench::Step;
using bench::step_of;

void expect_fit(std::uint64_t failures) {
  if (failures != 0) {
    throw std::runtime_error{"an operation did not fit"};
  }
}

template <class Policy>
double swapped_in_gb(std::vector<Step> const& steps, std::uint64_t capacity_bytes) {
  bench::ResidencyModel<Policy> model{capacity_bytes};
  std::uint64_t warm_bytes = 0;
  for (Step const& step : steps) {
    model.begin_step();
    model.run(step);
    warm_bytes = &step == &steps.front() ? model.swapped_in_bytes : warm_bytes;
  }
  expect_fit(model.failures);
  return static_cast<double>(model.swapped_in_bytes - warm_bytes) / 1e9;
}

void compare(std::string const& path, std::size_t count, std::vector<double> const& factors) {
  std::vector<Step> const steps(count, step_of(replay::read_trace(path, 1)));
  bench::SwapBound const bound{steps};
  std::printf("%s: %zu operations, peak %.3f GB alive, largest operation %.3f GB\n",
              path.c_str(),
              steps.front().size(),
              static_cast<double>(bound.peak_bytes()) / 1e9,
              static_cast<double>(bound.working_set_bytes()) / 1e9);
  std::printf("%-8s %10s %10s %10s %10s %10s %10s %8s  swap-in GB\n",
              "capacity",
              "lru",
              "fifo",
              "size",
              "cost",
              "schedule",
              "bound",
              "over");
  for (double const factor : factors) {
    auto const capacity_bytes =
        static_cast<std::uint64_t>(factor * static_cast<double>(bound.peak_bytes()));
    auto const least = bound.least_swap_in(capacity_bytes);
    if (!least) {
      std::printf("%-8.2f less than the largest operation needs\n", factor);
      continue;
    }
    double const least_gb = static_cast<double>(*least) / 1e9;
    double const schedule_gb = swapped_in_gb<ScheduleEviction>(steps, capacity_bytes);
    std::printf("%-8.2f %10.3f %10.3f %10.3f %10.3f %10.3f %10.3f",
                factor,
                swapped_in_gb<LruEviction>(steps, capacity_bytes),
                swapped_in_gb<FifoEviction>(steps, capacity_bytes),
                swapped_in_gb<SizeEviction>(steps, capacity_bytes),
                swapped_in_gb<CostEviction>(steps, capacity_bytes),
                schedule_gb,
                least_gb);
    if (least_gb > 0) {
      std::printf(" %+7.2f%%\n", 100.0 * (schedule_gb / least_gb - 1.0));
    } else {
      std::printf(" %8s\n", "-");  // no share of zero bytes
    }
  }
}

/// As above, for programs whose steps differ, so that the record of a step is of little use. The
/// policy to compare with is LRU.
void compare_changing(std::string const& path,
                      std::size_t count,
                      std::vector<double> const& factors) {
  Step const step = step_of(replay::read_trace(path, 1));
  std::printf("%s, steps that change\n%-14s %-8s %10s %10s %10s\n",
              path.c_str(),
              "change",
              "capacity",
              "lru",
              "schedule",
              "of lru");
  for (auto const& [change, name] : bench::order_changes) {
    std::vector<Step> const steps = bench::changing_steps(step, change, count, 1);
    bench::SwapBound const bound{steps};
    for (double const factor : factors) {
      auto const capacity_bytes =
          static_cast<std::uint64_t>(factor * static_cast<double>(bound.peak_bytes()));
      if (capacity_bytes < bound.working_set_bytes()) {
        std::printf("%-14s %-8.2f less than the largest operation needs\n", name, factor);
        continue;
      }
      double const lru_gb = swapped_in_gb<LruEviction>(steps, capacity_bytes);
      double const schedule_gb = swapped_in_gb<ScheduleEviction>(steps, capacity_bytes);
      std::printf("%-14s %-8.2f %10.3f %10.3f %10.3f\n",
                  name,
                  factor,
                  lru_gb,
                  schedule_gb,
                  lru_gb > 0 ? schedule_gb / lru_gb : 1.0);
    }
  }
}

double ms_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Returns the time that the uses of one step take in a schedule; with `is_recording`, everything
/// but the planning.
double schedule_ms(Step const& step, bool is_recording) {
  AccessSchedule schedule;
  std::vector<std::uint32_t> generations;
  std::vector<double> times;
  for (int i = 0; i < 101; ++i) {
    std::map<std::uint32_t, std::size_t> last_op;
    for (std::size_t k = 0; k < step.size(); ++k) {
      for (Operand const& operand : step[k]) {
        last_op[operand.block] = k;
        generations.resize(std::max<std::size_t>(generations.size(), operand.block + 1U));
      }
    }
    auto const start = std::chrono::steady_clock::now();
    if (is_recording) {
      schedule.begin_step();
    }
    for (std::size_t k = 0; k < step.size(); ++k) {
      for (Operand const& operand : step[k]) {
        std::uint32_t& generation = generations[operand.block];
        if (generation % 2 == 0) {  // odd while the block lives
          schedule.on_create(make_block_id(operand.block, ++generation), operand.bytes);
        }
        (void)schedule.on_access(make_block_id(operand.block, generation), operand.access);
      }
      for (Operand const& operand : step[k]) {
        std::uint32_t& generation = generations[operand.block];
        schedule.on_release(make_block_id(operand.block, generation));
        if (!operand.is_weight && last_op.find(operand.block)->second == k) {
          schedule.on_destroy(make_block_id(operand.block, generation++));
        }
      }
    }
    times.push_back(ms_since(start));
  }
  return median(times);
}

/// Compares the host's time for recording and planning a step with the time of the step's kernels.
void time_planning(std::string const& path, std::size_t count, std::vector<double> const& factors) {
  replay::Trace const trace = replay::read_trace(path, 1);
  std::vector<Step> const steps(count, step_of(trace));
  bench::SwapBound const bound{steps};
  double const kernels_ms = static_cast<double>(trace.compute_ns) / 1e6;
  double const record_ms = schedule_ms(steps.front(), true) - schedule_ms(steps.front(), false);
  std::printf(
      "%s: %zu operands, kernels %.1f ms a step; medians on the host\n%-8s %10s %10s %12s\n",
      path.c_str(),
      trace.operands.size(),
      kernels_ms,
      "capacity",
      "record ms",
      "plan ms",
      "of kernels");
  for (double const factor : factors) {
    auto const capacity_bytes =
        static_cast<std::uint64_t>(factor * static_cast<double>(bound.peak_bytes()));
    if (capacity_bytes < bound.working_set_bytes()) {
      std::printf("%-8.2f less than the largest operation needs\n", factor);
      continue;
    }
    bench::ResidencyModel<ScheduleEviction> model{capacity_bytes};
    std::vector<double> times;
    for (Step const& step : steps) {
      auto const start = std::chrono::steady_clock::now();
      model.begin_step();
      times.push_back(ms_since(start));
      model.run(step);
    }
    expect_fit(model.failures);
    double const plan_ms = median({times.begin() + 1, times.end()});
    std::printf("%-8.2f %10.3f %10.3f %11.4f%%\n",
                factor,
                record_ms,
                plan_ms,
                kernels_ms > 0 ? 100 * (record_ms + plan_ms) / kernels_ms : 0.0);
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Says how many bytes each eviction policy swaps in, against the fewest possible.",
               "bench_eviction_quality"};
  std::vector<std::string> paths;
  std::vector<double> factors{0.9, 0.75, 0.6, 0.5, 0.4};
  std::size_t steps = 3;
  app.add_option("trace", paths, "CSV files: step,id,size,weight,kernel_ns or id,lower,upper,size")
      ->required();
  app.add_option("--capacity", factors, "factors of the most bytes alive at once")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(command_line::positive_number())
      ->check(CLI::Range(0.0, 1000.0))
      ->capture_default_str();
  app.add_option("--steps", steps, "how often a trace is repeated; the first time is not counted")
      ->check(CLI::Range(std::size_t{2}, std::size_t{1000}))
      ->capture_default_str();
  bool has_changes = false;
  auto* const changing =
      app.add_flag("--changing", has_changes, "compare with LRU on steps that differ instead");
  bool is_timed = false;
  app.add_flag("--time", is_timed, "say what recording and planning cost instead")
      ->excludes(changing);
  return command_line::run(app, argc, argv, [&] {
    for (std::string const& path : paths) {
      (is_timed ? time_planning : has_changes ? compare_changing : compare)(path, steps, factors);
    }
    return command_line::Exit::done;
  });
}
