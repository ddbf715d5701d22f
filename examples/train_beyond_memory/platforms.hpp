// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "data.hpp"
#include "report.hpp"

namespace beyond {

/// Runs the experiment on the simulated device. @throws spillway::DeviceError
[[nodiscard]] Report
run_on_sim(Dataset const& data, ExperimentOptions const& options, Progress& progress);

/// Whether this program can use CUDA and there is a device.
[[nodiscard]] bool has_cuda_device();

/// Runs the experiment on the current CUDA device. @throws spillway::DeviceError
[[nodiscard]] Report
run_on_cuda(Dataset const& data, ExperimentOptions const& options, Progress& progress);

}  // namespace beyond
