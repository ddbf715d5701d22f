// SPDX-License-Identifier: Apache-2.0
//
// Measures how long a step takes with less memory than it uses, for several links and policies, and
// compares it with the least possible time: that of its kernels and of the bytes that must cross
// the link (`StepBound`, `SwapBound`). --help lists the options.

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <iomanip>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "command_line.hpp"
#include "replay/capacity.hpp"
#include "replay/replay.hpp"
#include "replay/trace.hpp"
#include "step_bound.hpp"
#include "swap_bound.hpp"
#include "trace_step.hpp"
#include <CLI/CLI.hpp>

namespace {

struct Policy {
  char const* name;
  replay::Eviction eviction;
  bool is_prefetching;
};

constexpr Policy policies[] = {
    {"lru", replay::Eviction::lru, false},
    {"schedule", replay::Eviction::schedule, false},
    {"schedule+prefetch", replay::Eviction::schedule, true},
};

struct Arguments {
  std::vector<std::string> traces;
  std::vector<double> factors{0.9, 0.75, 0.6, 0.5, 0.4};
  std::vector<double> links_gbps{12, 25, 55, 450};
  std::string device = "model";
  double scale = 1;
  double kernel_scale = 1;
  std::size_t warm_steps = 2;
  std::size_t steps = 2;
  bool is_csv = false;
};

/// The text as a field of CSV, in quotation marks if it has a character that would end the field.
std::string csv_text(std::string const& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) {
    return text;
  }
  std::ostringstream field;
  field << std::quoted(text, '"', '"');  // a quotation mark in the text is doubled
  return field.str();
}

class Bench {
 public:
  Bench(Arguments const& arguments, std::string const& path)
      : arguments_{arguments},
        name_{path.substr(path.find_last_of('/') + 1)},
        trace_{read(arguments, path)},
        step_{spillway::bench::step_of(trace_)},
        swap_bound_{std::vector<spillway::bench::Step>(3, step_)},
        step_bound_{step_, spillway::bench::kernels_ns(trace_, arguments.kernel_scale)} {}

  void run() const {
    if (!arguments_.is_csv) {
      std::printf("%s on %s: kernels %.1f ms a step; step time over its least\n%-6s %-8s %10s",
                  name_.c_str(),
                  arguments_.device.c_str(),
                  all_kernels_ns() / 1e6,
                  "GB/s",
                  "capacity",
                  "least ms");
      for (Policy const& policy : policies) {
        std::printf(" %18s", policy.name);
      }
      std::printf("\n");
    }
    for (double const link_gbps : arguments_.links_gbps) {
      for (double const factor : arguments_.factors) {
        run(link_gbps, factor);
      }
    }
  }

 private:
  /// @throws std::invalid_argument if the steps of the trace take too long to be represented
  static replay::Trace read(Arguments const& arguments, std::string const& path) {
    replay::Trace trace = replay::read_trace(path, arguments.scale);
    for (double const link_gbps : arguments.links_gbps) {
      replay::check_time(trace, settings_of(arguments, link_gbps));
    }
    return trace;
  }

  static replay::Settings settings_of(Arguments const& arguments, double link_gbps) {
    replay::Settings settings;
    // The link is scaled with the bytes, and inversely with the time of the kernels, so that
    // transfers take the same share of a step.
    settings.link_gbps = link_gbps * arguments.scale / arguments.kernel_scale;
    if (!command_line::is_link(*settings.link_gbps)) {
      throw std::invalid_argument{
          "--link-gbps times --scale, over --kernel-scale: expected GB/s from 1e-9 to 1e9"};
    }
    settings.kernel_scale = arguments.kernel_scale;
    settings.steps = arguments.warm_steps + arguments.steps;
    return settings;
  }

  void run(double link_gbps, double factor) const {
    replay::Settings settings = settings_of(arguments_, link_gbps);
    settings.capacity_bytes =
        replay::arena_capacity("--capacity " + std::to_string(factor),
                               factor * static_cast<double>(trace_.peak_live_bytes));
    // Of three steps, the second and third are counted.
    auto const needed_bytes = swap_bound_.least_swap_in(settings.capacity_bytes);
    double const needed_ns =
        static_cast<double>(needed_bytes.value_or(0)) / 2 / *settings.link_gbps;
    double const least_ns =
        std::max(step_bound_.least_ns(settings.capacity_bytes, *settings.link_gbps), needed_ns);
    if (!arguments_.is_csv) {
      std::printf("%-6g %-8.2f %10.1f", link_gbps, factor, least_ns / 1e6);
    }
    for (Policy const& policy : policies) {
      settings.eviction = policy.eviction;
      settings.lookahead_ops = policy.is_prefetching ? replay::Settings{}.lookahead_ops : 0;
      print(replay(settings), least_ns, link_gbps, factor, policy);
    }
    if (!arguments_.is_csv) {
      std::printf("\n");
    }
  }

  void print(replay::Result const& result,
             double least_ns,
             double link_gbps,
             double factor,
             Policy const& policy) const {
    double step_ns = 0;
    for (std::size_t i = arguments_.warm_steps; result.completed && i < result.steps.size(); ++i) {
      step_ns +=
          static_cast<double>(result.steps[i].simulated_ns) / static_cast<double>(arguments_.steps);
    }
    if (arguments_.is_csv) {
      std::printf("%s,%g,%g,%s,%d,%.0f,%.0f,%.0f\n",
                  csv_text(name_).c_str(),
                  link_gbps,
                  factor,
                  policy.name,
                  result.completed ? 1 : 0,
                  step_ns,
                  least_ns,
                  all_kernels_ns());
    } else if (result.completed) {
      std::printf(" %18.3f", step_ns / least_ns);
    } else {
      std::printf(" %18s", "out of memory");
    }
    std::fflush(stdout);
  }

  [[nodiscard]] replay::Result replay(replay::Settings const& settings) const {
    return arguments_.device == "model" ? replay::replay_on_model(trace_, settings)
                                        : replay::replay_on_sim(trace_, settings);
  }

  [[nodiscard]] double all_kernels_ns() const {
    return static_cast<double>(trace_.compute_ns) * arguments_.kernel_scale;
  }

  Arguments const& arguments_;
  std::string name_;
  replay::Trace trace_;
  spillway::bench::Step step_;
  spillway::bench::SwapBound swap_bound_;
  spillway::bench::StepBound step_bound_;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Says how much of the transfers is hidden behind kernels.", "bench_overlap"};
  Arguments arguments;
  app.add_option("trace", arguments.traces, "CSV files: step,id,size,weight,kernel_ns")->required();
  app.add_option("--capacity", arguments.factors, "factors of the most bytes alive at once")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(command_line::positive_number())
      ->check(CLI::Range(0.0, 1000.0))
      ->capture_default_str();
  app.add_option("--link-gbps", arguments.links_gbps, "bandwidths of the host link each way")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(command_line::link_gbps())
      ->capture_default_str();
  app.add_option("--device", arguments.device, "model: virtual clock; sim: threads, in real time")
      ->check(CLI::IsMember({"model", "sim"}))
      ->capture_default_str();
  app.add_option("--scale", arguments.scale, "multiplies every size, and the link with it")
      ->check(command_line::positive_number());
  app.add_option("--kernel-scale",
                 arguments.kernel_scale,
                 "multiplies every kernel's time, and slows the link down by as much")
      ->check(command_line::positive_number());
  app.add_option("--warm-steps", arguments.warm_steps, "steps that are not counted")
      ->check(CLI::Range(std::size_t{0}, std::size_t{1000}))
      ->capture_default_str();
  app.add_option("--steps", arguments.steps, "steps that are counted, of which the mean is taken")
      ->check(CLI::Range(std::size_t{1}, std::size_t{1000}))
      ->capture_default_str();
  app.add_flag("--csv", arguments.is_csv, "print comma-separated values");
  return command_line::run(app, argc, argv, [&] {
    if (arguments.is_csv) {
      std::printf("trace,link_gbps,capacity_factor,policy,completed,step_ns,least_ns,kernels_ns\n");
    }
    for (std::string const& path : arguments.traces) {
      Bench{arguments, path}.run();
    }
    return command_line::Exit::done;
  });
}
