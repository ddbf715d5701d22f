// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/device/cuda/cuda_api.hpp>
#include <spillway/testing/device_contracts.hpp>

namespace gpu_test {

/// A fixture: a GPU, and the streams, events and memory of one test.
struct Gpu {
  spillway::CudaApi api;
  spillway::testing::DeviceRig<spillway::CudaApi> rig{api};
};

}  // namespace gpu_test
