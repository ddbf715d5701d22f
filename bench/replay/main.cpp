// SPDX-License-Identifier: Apache-2.0
// spillway-replay: runs a memory trace through an allocator and says what it cost.
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>

#include "../command_line.hpp"
#include "../progress.hpp"
#include "capacity.hpp"
#include "replay.hpp"
#include "sweep.hpp"
#include "trace.hpp"
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

enum Exit : int { completed = 0, failed = 1, out_of_memory = 3 };  // 2: bad input

struct Arguments {
  std::string trace;
  std::string capacity = "1.0x";
  std::string sweep;
  std::string device = "model";
  std::string prefetch;
  double scale = 1;
  bool no_swap = false;
  bool no_compaction = false;
  bool json = false;
  bool csv = false;
  replay::Settings settings;
};

std::size_t parse_lookahead(std::string const& text, std::size_t otherwise) {
  if (text.empty()) {
    return otherwise;
  }
  if (text == "off") {
    return 0;
  }
  std::size_t value = 0;
  auto const [past, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || past != text.data() + text.size()) {
    throw std::invalid_argument{"--prefetch '" + text +
                                "': expected a number of operations, or off"};
  }
  return value;
}

nlohmann::ordered_json to_json(replay::StepResult const& step) {
  return {{"swapped_out_bytes", step.swapped_out_bytes},
          {"swapped_in_bytes", step.swapped_in_bytes},
          {"dropped_bytes", step.dropped_bytes},
          {"moved_bytes", step.moved_bytes},
          {"simulated_ns", step.simulated_ns}};
}

nlohmann::ordered_json
to_json(Arguments const& arguments, replay::Trace const& trace, replay::Result const& result) {
  nlohmann::ordered_json json{{"trace", arguments.trace},
                              {"device", arguments.device},
                              {"completed", result.completed},
                              {"failed_at", nullptr},
                              {"capacity_bytes", arguments.settings.capacity_bytes},
                              {"lower_bound_bytes", trace.peak_live_bytes},
                              {"allocated_bytes", result.allocated_bytes},
                              {"peak_reserved_bytes", result.peak_reserved_bytes},
                              {"swapped_out_bytes", result.total.swapped_out_bytes},
                              {"swapped_in_bytes", result.total.swapped_in_bytes},
                              {"dropped_bytes", result.total.dropped_bytes},
                              {"moved_bytes", result.total.moved_bytes},
                              {"spared_bytes", result.spared_bytes},
                              {"recomputed_bytes", result.recomputed_bytes},
                              {"recompute_ns", result.recompute_ns},
                              {"compaction_passes", result.compaction_passes},
                              {"evictions", result.evictions},
                              {"mispredictions", result.mispredictions},
                              {"prefetch_hits", result.prefetch_hits},
                              {"prefetch_late", result.prefetch_late},
                              {"prefetch_wasted", result.prefetch_wasted},
                              {"host_waits", result.host_waits},
                              {"compute_ns", nullptr},
                              {"simulated_ns", result.total.simulated_ns},
                              {"ns_per_op_median", result.ns_per_op_median},
                              {"ns_per_op_p99", result.ns_per_op_p99},
                              {"ops", result.ops},
                              {"steps", nlohmann::ordered_json::array()}};
  if (trace.form == replay::Trace::Form::accesses) {
    json["working_set_bytes"] = trace.working_set_bytes;
  }
  if (result.has_run_kernels) {
    json["compute_ns"] = result.compute_ns;
  }
  if (result.failed_at) {
    json["failed_at"] = *result.failed_at;
    json["failure"] = result.failure;
  }
  for (replay::StepResult const& step : result.steps) {
    json["steps"].push_back(to_json(step));
  }
  if (arguments.settings.verify) {
    json["verified_bytes"] = result.verified_bytes;
    json["corrupt_bytes"] = result.corrupt_bytes;
  }
  return json;
}

/// A file's name need not be UTF-8: what is not shows as U+FFFD.
std::string text_of(nlohmann::ordered_json const& json) {
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

void print_table(Arguments const& arguments,
                 replay::Trace const& trace,
                 replay::Result const& result) {
  auto const mib = [](std::uint64_t bytes) { return static_cast<double>(bytes) / 0x1p20; };
  auto const ms = [](std::uint64_t ns) { return static_cast<double>(ns) / 1e6; };
  std::printf(
      "%s on %s, %zu operations\n", arguments.trace.c_str(), arguments.device.c_str(), result.ops);
  if (!result.completed) {
    std::printf("  out of memory at operation %zu: %s\n",
                result.failed_at.value_or(0),
                result.failure.c_str());
  }
  std::printf("  capacity        %12.1f MiB of a peak of %.1f MiB live\n",
              mib(arguments.settings.capacity_bytes),
              mib(trace.peak_live_bytes));
  std::printf("  allocated       %12.1f MiB in all\n", mib(result.allocated_bytes));
  std::printf("  swapped out     %12.1f MiB\n", mib(result.total.swapped_out_bytes));
  std::printf("  swapped in      %12.1f MiB\n", mib(result.total.swapped_in_bytes));
  std::printf("  dropped         %12.1f MiB\n", mib(result.total.dropped_bytes));
  if (arguments.settings.recompute != replay::Recompute::none) {
    std::printf("  recomputed      %12.1f MiB in %.1f ms\n",
                mib(result.recomputed_bytes),
                ms(result.recompute_ns));
  }
  std::printf("  moved           %12.1f MiB in %llu passes\n",
              mib(result.total.moved_bytes),
              static_cast<unsigned long long>(result.compaction_passes));
  std::printf("  time            %12.1f ms", ms(result.total.simulated_ns));
  if (result.has_run_kernels) {
    std::printf(", of which compute %.1f ms", ms(result.compute_ns));
  }
  std::printf("\n");
  std::printf("  host per op     %12llu ns median, %llu ns p99, %llu waits\n",
              static_cast<unsigned long long>(result.ns_per_op_median),
              static_cast<unsigned long long>(result.ns_per_op_p99),
              static_cast<unsigned long long>(result.host_waits));
  if (arguments.settings.verify) {
    std::printf("  verified        %12.1f MiB, %llu bytes corrupt\n",
                mib(result.verified_bytes),
                static_cast<unsigned long long>(result.corrupt_bytes));
  }
}

replay::Result run(Arguments const& arguments, replay::Trace const& trace) {
  if (arguments.device == "model") {
    return replay::replay_on_model(trace, arguments.settings);
  }
  if (arguments.device == "sim") {
    return replay::replay_on_sim(trace, arguments.settings);
  }
  return replay::replay_on_cuda(trace, arguments.settings);
}

void add_options(CLI::App& app, Arguments& arguments) {
  std::map<std::string, replay::Eviction> const evictions{{"lru", replay::Eviction::lru},
                                                          {"fifo", replay::Eviction::fifo},
                                                          {"size", replay::Eviction::size},
                                                          {"cost", replay::Eviction::cost},
                                                          {"schedule", replay::Eviction::schedule}};
  std::map<std::string, replay::Recompute> const recomputes{{"none", replay::Recompute::none},
                                                            {"cheaper", replay::Recompute::cheaper},
                                                            {"planned", replay::Recompute::planned},
                                                            {"tuned", replay::Recompute::tuned},
                                                            {"always", replay::Recompute::always}};
  app.add_option(
         "trace", arguments.trace, "CSV file: id,lower,upper,size or step,id,size,weight,kernel_ns")
      ->required();
  app.add_option("--capacity",
                 arguments.capacity,
                 "device memory: bytes with KiB, MiB, GiB, or a factor of the peak such as 0.5x")
      ->capture_default_str();
  app.add_option("--sweep",
                 arguments.sweep,
                 "capacities to try instead, FROM:TO:COUNT evenly spaced, such as 0.2x:1.0x:9 or "
                 "8GiB:24GiB:5; prints what the last step costs at each")
      ->check(command_line::not_empty())
      ->excludes("--capacity");
  app.add_option("--eviction", arguments.settings.eviction, "who leaves")
      ->transform(command_line::one_of(evictions));
  app.add_flag("--no-swap", arguments.no_swap, "nothing may leave: a full device is an error");
  app.add_flag("--no-compaction", arguments.no_compaction, "nothing moves");
  app.add_flag("--recompute{tuned}",
               arguments.settings.recompute,
               "whether a buffer may leave without a copy, to be made again by the operation of an "
               "access trace that it begins with, in that operation's kernel time: where that is "
               "cheaper than a copy, always, or where the steps get faster by it")
      ->transform(command_line::one_of(recomputes));
  app.add_option("--prefetch", arguments.prefetch, "how many operations to look ahead, or off")
      ->check(command_line::not_empty());
  app.add_option(
         "--steps", arguments.settings.steps, "how often to repeat the trace; 1, and for a sweep 3")
      ->check(CLI::Range(std::size_t{1}, std::size_t{1'000'000}));
  app.add_option("--scale", arguments.scale, "multiplies every size")
      ->check(command_line::positive_number());
  app.add_option("--link-gbps",
                 arguments.settings.link_gbps,
                 "bandwidth of the host link each way, in GB/s; the model takes 25")
      ->check(command_line::link_gbps());
  app.add_option(
         "--codec-ratio",
         arguments.settings.codec_ratio,
         "how many times fewer bytes a codec makes of a buffer: copies, and plans, take the "
         "link for so many times faster")
      ->check(command_line::positive_number());
  app.add_option("--kernel-scale",
                 arguments.settings.kernel_scale,
                 "multiplies the time of every kernel; without it kernels take none on sim")
      ->check(command_line::positive_number());
  app.add_option("--device", arguments.device, "model: virtual clock without bytes; sim; cuda")
      ->check(CLI::IsMember({"model", "sim", "cuda"}))
      ->capture_default_str();
  app.add_flag("--verify",
               arguments.settings.verify,
               "fill every buffer with a pattern and check it at each use");
  app.add_option("--timeline",
                 arguments.settings.timeline,
                 "write what happened when to this file, for ui.perfetto.dev")
      ->excludes("--sweep");
  auto* const json =
      app.add_flag("--json", arguments.json, "print one JSON object, or an array of a sweep's");
  app.add_flag("--csv", arguments.csv, "print a sweep as comma-separated values")
      ->needs("--sweep")
      ->excludes(json);
}

void check(Arguments const& arguments) {
  if (arguments.settings.verify && arguments.device == "model") {
    throw std::invalid_argument{"--verify: the model holds no bytes; use --device sim or cuda"};
  }
  if (!arguments.settings.timeline.empty() && arguments.device != "model") {
    throw std::invalid_argument{"--timeline: only with --device model"};
  }
  if (command_line::is_same_file(arguments.settings.timeline, arguments.trace)) {
    throw std::invalid_argument{"--timeline '" + arguments.settings.timeline +
                                "': this is the trace, which would be overwritten; name another "
                                "file"};
  }
  if (arguments.settings.kernel_scale && arguments.device == "cuda") {
    throw std::invalid_argument{
        "--kernel-scale: on a GPU no kernels run; use --device model or sim"};
  }
  if (arguments.settings.codec_ratio && arguments.device == "cuda") {
    throw std::invalid_argument{
        "--codec-ratio: a GPU's link is as fast as it is; use --device model or sim"};
  }
}

/// A byte that a codec leaves out takes no time on the link: so does one on a faster link.
void apply_codec(replay::Settings& settings) {
  if (settings.codec_ratio) {
    settings.link_gbps = settings.link_gbps.value_or(replay::default_link_gbps);
    if (!command_line::is_link(*settings.copy_gbps())) {
      throw std::invalid_argument{
          "--link-gbps times --codec-ratio: expected GB/s from 1e-9 to 1e9"};
    }
  }
}

int report_corruption(replay::Result const& result) {
  std::fprintf(stderr,
               "spillway-replay: %llu bytes corrupt, the first in %s\n",
               static_cast<unsigned long long>(result.corrupt_bytes),
               result.first_corruption.c_str());
  return Exit::failed;
}

/// An array of what a single run prints, one capacity after the other.
class JsonPrinter final : public replay::SweepPrinter {
 public:
  JsonPrinter(Arguments const& arguments, replay::Trace const& trace)
      : arguments_{arguments}, trace_{trace} {}

  void print(replay::SweepRow const& row) override {
    Arguments with{arguments_};
    with.settings.capacity_bytes = row.capacity_bytes;
    std::printf(
        "%s%s", is_first_ ? "[\n" : ",\n", text_of(to_json(with, trace_, row.result)).c_str());
    is_first_ = false;
  }
  void end() override { std::fputs(is_first_ ? "[]\n" : "\n]\n", stdout); }

 private:
  Arguments const& arguments_;
  replay::Trace const& trace_;
  bool is_first_ = true;
};

std::unique_ptr<replay::SweepPrinter> make_printer(Arguments const& arguments,
                                                   replay::Trace const& trace) {
  if (arguments.json) {
    return std::make_unique<JsonPrinter>(arguments, trace);
  }
  return arguments.csv ? replay::make_csv_printer(trace, arguments.settings)
                       : replay::make_table_printer(arguments.trace, trace, arguments.settings);
}

/// Runs the sweep. What is printed has an end whatever happens.
void sweep_into(replay::SweepPrinter& printer, std::function<void()> const& sweep) {
  try {
    sweep();
  } catch (...) {
    printer.end();
    throw;
  }
  printer.end();
}

int sweep_and_report(Arguments& arguments, replay::Trace const& trace) {
  if (arguments.device == "model" && !arguments.settings.link_gbps) {
    arguments.settings.link_gbps = replay::default_link_gbps;  // so that the table says so
  }
  auto const capacities = replay::parse_sweep(arguments.sweep, trace.peak_live_bytes);
  std::unique_ptr<replay::SweepPrinter> const printer = make_printer(arguments, trace);
  int status = Exit::out_of_memory;  // unless some capacity works
  std::size_t begun = 0;
  command_line::Progress progress{false};  // in a log the rows say enough
  auto const replay_one = [&](replay::Trace const& the_trace, replay::Settings const& settings) {
    Arguments with{arguments};
    with.settings = settings;
    ++begun;
    progress.show([&] {
      return "capacity " + std::to_string(begun) + " of " + std::to_string(capacities.size()) +
             ": " + replay::text_of(settings.capacity_bytes);
    });
    return run(with, the_trace);
  };
  auto const report = [&](replay::SweepRow const& row) {
    progress.clear();
    printer->print(row);
    std::fflush(stdout);
    if (row.result.corrupt_bytes != 0) {
      status = report_corruption(row.result);
    } else if (row.is_completed && status == Exit::out_of_memory) {
      status = Exit::completed;
    }
  };
  sweep_into(*printer,
             [&] { replay::run_sweep(trace, arguments.settings, capacities, replay_one, report); });
  return status;
}

int replay_and_report(Arguments& arguments) {
  arguments.settings.swapping = !arguments.no_swap;
  arguments.settings.compaction = !arguments.no_compaction;
  arguments.settings.lookahead_ops =
      parse_lookahead(arguments.prefetch, arguments.settings.lookahead_ops);
  check(arguments);
  apply_codec(arguments.settings);
  replay::Trace const trace = replay::read_trace(arguments.trace, arguments.scale);
  if (arguments.settings.recompute != replay::Recompute::none &&
      trace.form != replay::Trace::Form::accesses) {
    throw std::invalid_argument{
        "--recompute: a trace of lifetimes does not say what makes a buffer"};
  }
  if (arguments.settings.kernel_scale && trace.compute_ns == 0) {
    throw std::invalid_argument{"--kernel-scale: the kernels of this trace take no time"};
  }
  replay::check_time(trace, arguments.settings);
  if (!arguments.sweep.empty()) {
    return sweep_and_report(arguments, trace);
  }
  arguments.settings.capacity_bytes =
      replay::parse_capacity("--capacity", arguments.capacity, trace.peak_live_bytes);

  replay::Result const result = run(arguments, trace);
  if (arguments.json) {
    std::cout << text_of(to_json(arguments, trace, result)) << '\n';
  } else {
    print_table(arguments, trace, result);
  }
  if (result.corrupt_bytes != 0) {
    return report_corruption(result);
  }
  return result.completed ? Exit::completed : Exit::out_of_memory;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Replays a memory trace through spillway and reports what it cost.",
               "spillway-replay"};
  Arguments arguments;
  add_options(app, arguments);
  return command_line::run(app, argc, argv, [&] {
    if (!arguments.sweep.empty() && app.count("--steps") == 0) {
      arguments.settings.steps = 3;  // to record, to plan, and to be steady
    }
    return replay_and_report(arguments);
  });
}
