// SPDX-License-Identifier: Apache-2.0
// Trains a network that needs more memory than the device is allowed to have, and checks that the
// results are bitwise the same as with enough memory.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <iostream>
#include <stdexcept>
#include <string>

#include "command_line.hpp"
#include "data.hpp"
#include "platforms.hpp"
#include "report.hpp"
#include <CLI/CLI.hpp>

namespace {

/// Enough for the shipped digits; a larger set of pictures needs fewer epochs for as many steps.
std::size_t default_epochs(beyond::Dataset const& data, std::size_t batch) {
  constexpr std::size_t wanted_steps = 75;
  std::size_t const steps = std::max<std::size_t>(data.train.count() / batch, 1);
  return (wanted_steps + steps - 1) / steps;
}

}  // namespace

int main(int argc, char** argv) {
  beyond::ExperimentOptions options;
  beyond::TrainingOptions& training = options.training;
  std::string data_path = SPILLWAY_EXAMPLE_DIGITS;
  std::string device;
  std::size_t epochs = 0;
  bool is_json = false;

  CLI::App app{"Trains a network under a device memory limit that the training does not fit in.",
               "train_beyond_memory"};
  app.add_option(
         "--capacity", options.capacities, "Memory limit, in peaks of the run without a limit")
      ->check(command_line::positive_number())
      ->check(CLI::Range(0.0, 1000.0))
      ->expected(1)
      ->take_all()
      ->capture_default_str();
  app.add_option("--epochs",
                 epochs,
                 "Times to go through the pictures; fewer than the default are "
                 "not judged by their accuracy")
      ->check(command_line::positive_number());
  app.add_option("--data", data_path, "A CSV file like the shipped digits, or a folder with MNIST")
      ->capture_default_str();
  app.add_option("--device", device, "sim or cuda; default: cuda where there is a device")
      ->check(CLI::IsMember({"sim", "cuda"}));
  app.add_option("--timeline", options.timeline, "Write a Perfetto trace of the last run");
  app.add_option("--snapshot", options.snapshot, "Write a memory snapshot of the last run");
  app.add_option("--batch", training.batch, "Pictures in a step")
      ->check(command_line::positive_number())
      ->capture_default_str();
  app.add_option("--blocks", training.shape.blocks, "Residual blocks of two layers each")
      ->check(command_line::positive_number())
      ->capture_default_str();
  app.add_option("--width", training.shape.width, "Width of a layer")
      ->check(command_line::positive_number())
      ->capture_default_str();
  app.add_option("--seed", training.seed, "Seed of the weights and of the order of the pictures")
      ->check(command_line::whole_number())
      ->capture_default_str();
  app.add_flag("--recompute",
               training.recompute,
               "Let what a hidden layer makes leave without a copy, to be computed again, where "
               "that makes the steps faster");
  app.add_option_function<double>(
         "--recompute-us",
         [&](double us) {
           training.recompute_time = std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::duration<double, std::micro>{us});
         },
         "Time in us that computing such a layer again is taken to need; otherwise measured")
      ->check(command_line::number_from(0, 1e9));
  app.add_option("--link-gbps",
                 options.link_gbps,
                 "What the host link is taken for each way, in GB/s, and what that of sim has")
      ->check(command_line::link_gbps());
  app.add_flag("--json", is_json, "Print one JSON object");
  return command_line::run(app, argc, argv, [&]() -> int {
    for (auto const& recording : {options.timeline, options.snapshot}) {
      if (command_line::is_same_file(recording, data_path)) {
        throw std::invalid_argument{recording.string() +
                                    ": these are the pictures, which would be overwritten; name "
                                    "another file"};
      }
    }
    if (command_line::is_same_file(options.timeline, options.snapshot)) {
      throw std::invalid_argument{"--timeline and --snapshot: name a file for each"};
    }
    beyond::Dataset const data = beyond::load_dataset(data_path);
    if (training.batch > data.train.count()) {
      throw beyond::DataError{"--batch: only " + std::to_string(data.train.count()) +
                              " pictures to train with"};
    }
    training.shape.inputs = data.train.pixels;
    training.shape.classes = data.classes;
    training.epochs = epochs != 0 ? epochs : default_epochs(data, training.batch);

    if (device == "cuda" && !beyond::has_cuda_device()) {
      throw std::invalid_argument{"--device cuda: no CUDA device, or built without CUDA"};
    }
    bool const is_cuda = device == "cuda" || (device.empty() && beyond::has_cuda_device());
    beyond::Report const report = [&] {
      beyond::Progress progress;
      return is_cuda ? beyond::run_on_cuda(data, options, progress)
                     : beyond::run_on_sim(data, options, progress);
    }();
    (is_json ? beyond::print_json : beyond::print_table)(std::cout, data, options, report);
    auto const verdict =
        beyond::judge(report, training.epochs >= default_epochs(data, training.batch));
    if (verdict == beyond::Verdict::wrong) {
      std::cerr
          << "train_beyond_memory: a run differs from the one without a limit, or reads fewer than "
          << beyond::wanted_accuracy * 100 << " % of the test pictures right\n";
    }
    return static_cast<int>(verdict);
  });
}
