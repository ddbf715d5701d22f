// SPDX-License-Identifier: Apache-2.0
// Takes the place of run_on_cuda.cu in a program built without CUDA.
#include <spillway/core/error.hpp>

#include "platforms.hpp"

namespace beyond {

bool has_cuda_device() {
  return false;
}

Report run_on_cuda(Dataset const&, ExperimentOptions const&, Progress&) {
  throw spillway::DeviceError{"this program was built without CUDA"};
}

}  // namespace beyond
