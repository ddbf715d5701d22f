// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "data.hpp"
#include "recording.hpp"
#include "report.hpp"
#include "session.hpp"
#include "training.hpp"

namespace beyond {

/// Trains the same network under several memory limits in turn, and compares the results.
///
/// `Platform` makes devices, and says how Thrust runs on them (run_on_sim.cpp, run_on_cuda.cu).
template <class Platform>
class Experiment {
 public:
  /// @throws DataError if a file that was asked for cannot be opened
  Experiment(Dataset const& data, ExperimentOptions options, Progress& progress)
      : data_{&data},
        options_{std::move(options)},
        progress_{&progress},
        files_{options_.timeline, options_.snapshot} {}

  [[nodiscard]] Report run() {
    Report report;
    report.device = Platform::name();
    report.reference = train({.capacity_bytes = 0, .name = "without a limit"});
    if (!report.reference.completed) {
      throw spillway::DeviceError{"the training does not fit even without a limit: " +
                                  report.reference.error};
    }
    report.peak_bytes = report.reference.result.stats.allocated.bytes.peak;
    for (double const& factor : options_.capacities) {
      for (bool const swapping : {false, true}) {
        bool const is_last = swapping && &factor == &options_.capacities.back();
        RunReport run = train({.capacity_bytes = granules(factor, report.peak_bytes),
                               .host_bytes = report.peak_bytes,
                               .swapping = swapping,
                               .recorded = is_last && files_.are_wanted(),
                               .name = describe(factor, swapping)});
        run.capacity_factor = factor;
        run.bitwise_equal = run.completed && is_same(run.result, report.reference.result);
        run.result.state = {};  // large, and not needed after the comparison
        report.runs.push_back(std::move(run));
      }
    }
    return report;
  }

 private:
  struct Policies : Platform::policies {
    using observer = Recorder;
  };
  using SessionType = Session<Policies, typename Platform::execution>;
  using Allocator = typename SessionType::allocator_type;

  struct Plan {
    std::size_t capacity_bytes;  // 0: no limit but the device's
    std::size_t host_bytes = 0;  // pinned before the training starts
    bool swapping = true;
    bool recorded = false;
    std::string name;
  };

  /// What the allocator may use beside the tensors, for moves that overlap themselves.
  static constexpr std::size_t scratch_bytes = std::size_t{64} << 10U;

  static constexpr double most_bytes = 0x1p40;  // more than any arena has

  [[nodiscard]] static std::size_t granules(double factor, std::size_t peak_bytes) {
    double const limit = factor * static_cast<double>(peak_bytes);
    if (limit >= most_bytes) {
      throw std::invalid_argument{"--capacity " + std::to_string(factor) + ": of a peak of " +
                                  std::to_string(peak_bytes) + " bytes that is 1 TiB or more"};
    }
    auto const bytes = static_cast<std::size_t>(limit);
    return std::max<std::size_t>(bytes / spillway::granule_bytes, 1) * spillway::granule_bytes;
  }

  [[nodiscard]] typename Allocator::Options allocator_options(Plan const& plan) const {
    typename Allocator::Options options;
    if (plan.capacity_bytes == 0) {
      options.initial_bytes = 0;  // reserve only as much as is needed
    }
    options.capacity_bytes = plan.capacity_bytes;
    options.bounce_bytes = scratch_bytes;
    options.host.initial_pinned_bytes = plan.swapping ? plan.host_bytes : 0;
    options.paging.swapping = plan.swapping;
    if (options_.link_gbps) {
      options.paging.link_bytes_per_second = *options_.link_gbps * 1e9;
    }
    return options;
  }

  [[nodiscard]] static std::string describe(double factor, bool swapping) {
    return std::to_string(static_cast<int>(factor * 100 + 0.5)) + " % of the peak, " +
           (swapping ? "swapping" : "no swapping");
  }

  [[nodiscard]] RunReport train(Plan const& plan) {
    auto const device =
        Platform::make_device(plan.capacity_bytes == 0 ? Platform::unlimited_bytes()
                                                       : plan.capacity_bytes + scratch_bytes,
                              options_.link_gbps);
    if constexpr (requires { device->set_timing(true); }) {
      device->set_timing(plan.recorded);
    }
    Allocator allocator{*device, allocator_options(plan)};
    if (plan.recorded) {
      allocator.observer().start();
    }
    RunReport run;
    run.capacity_bytes = plan.capacity_bytes;
    run.swapping = plan.swapping;
    try {
      SessionType session{
          *device, allocator, options_.training.recompute, options_.training.recompute_time};
      Trainer trainer{session, *data_, options_.training};
      std::size_t const steps = trainer.steps_per_epoch() * options_.training.epochs;
      std::optional<double> last_loss;
      run.result = trainer.run([&](std::size_t step, std::optional<double> loss) {
        last_loss = loss ? loss : last_loss;
        progress_->show(plan.name, step, steps, last_loss);
        if (plan.recorded && loss && step == steps) {
          files_.write(allocator);
        }
      });
      run.completed = true;
    } catch (spillway::OutOfDeviceMemory const& error) {
      run.error = error.what();
    } catch (spillway::OutOfHostMemory const& error) {
      run.error = error.what();
    }
    if (plan.recorded && !run.completed) {
      files_.write(allocator);
    }
    return run;
  }

  [[nodiscard]] static bool is_same(std::vector<float> const& a, std::vector<float> const& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  }
  [[nodiscard]] static bool is_same(TrainingResult const& a, TrainingResult const& b) {
    return is_same(a.step_losses, b.step_losses) && is_same(a.state, b.state);
  }

  Dataset const* data_;
  ExperimentOptions options_;
  Progress* progress_;
  RecordFiles files_;
};

}  // namespace beyond
