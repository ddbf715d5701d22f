// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "data.hpp"
#include "report.hpp"
#include "session.hpp"
#include "training.hpp"

namespace beyond {

/// Trains the same network under one memory limit after the other and compares what comes out.
///
/// `Platform` makes devices, and says how Thrust runs on them; see run_on_sim.cpp and run_on_cuda.cu.
template <class Platform>
class Experiment {
 public:
  Experiment(Dataset const& data, ExperimentOptions options, Progress& progress)
      : data_{&data}, options_{std::move(options)}, progress_{&progress} {}

  [[nodiscard]] Report run() {
    Report report;
    report.device = Platform::name();
    report.reference = train(0, true, "without a limit");
    if (!report.reference.completed) {
      throw spillway::DeviceError{"the training does not fit even without a limit: " +
                                  report.reference.error};
    }
    report.peak_bytes = report.reference.result.stats.allocated.bytes.peak;
    for (double const factor : options_.capacities) {
      for (bool const swapping : {false, true}) {
        auto const bytes =
            static_cast<std::size_t>(factor * static_cast<double>(report.peak_bytes));
        std::size_t const whole_granules =
            std::max<std::size_t>(bytes / spillway::granule_bytes, 1) * spillway::granule_bytes;
        RunReport run = train(whole_granules, swapping, describe(factor, swapping));
        run.capacity_factor = factor;
        run.bitwise_equal = run.completed && is_same(run.result, report.reference.result);
        run.result.state = {};  // large, and compared
        report.runs.push_back(std::move(run));
      }
    }
    return report;
  }

 private:
  using Policies = typename Platform::policies;
  using SessionType = Session<Policies, typename Platform::execution>;
  using Allocator = typename SessionType::allocator_type;

  /// What the allocator may use beside the tensors, for moves that overlap themselves.
  static constexpr std::size_t scratch_bytes = std::size_t{64} << 10U;

  /// @param capacity_bytes  0: no limit but the device's
  [[nodiscard]] static typename Allocator::Options allocator_options(std::size_t capacity_bytes,
                                                                     bool swapping) {
    typename Allocator::Options options;
    if (capacity_bytes == 0) {
      options.initial_bytes = 0;  // as much as turns out to be needed
    }
    options.capacity_bytes = capacity_bytes;
    options.bounce_bytes = scratch_bytes;
    options.paging.swapping = swapping;
    return options;
  }

  [[nodiscard]] static std::string describe(double factor, bool swapping) {
    return std::to_string(static_cast<int>(factor * 100 + 0.5)) + " % of the peak, " +
           (swapping ? "swapping" : "no swapping");
  }

  [[nodiscard]] RunReport
  train(std::size_t capacity_bytes, bool swapping, std::string const& name) {
    RunReport run;
    run.capacity_bytes = capacity_bytes;
    run.swapping = swapping;
    auto const device = Platform::make_device(capacity_bytes == 0 ? Platform::unlimited_bytes()
                                                                  : capacity_bytes + scratch_bytes);
    try {
      Allocator allocator{*device, allocator_options(capacity_bytes, swapping)};
      SessionType session{*device, allocator};
      Trainer trainer{session, *data_, options_.training};
      run.result = trainer.run([&](std::size_t epoch, double loss) {
        progress_->show(name, epoch, options_.training.epochs, loss);
      });
      run.completed = true;
    } catch (spillway::OutOfDeviceMemory const& error) {
      run.error = error.what();
    } catch (spillway::OutOfHostMemory const& error) {
      run.error = error.what();
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
};

}  // namespace beyond
