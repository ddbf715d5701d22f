// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>

#include "bandwidth.hpp"

#if defined(SPILLWAY_WITH_CUDA) && SPILLWAY_WITH_CUDA

#  include <spillway/cuda.hpp>

#  include "measure.hpp"

namespace bandwidth {

void measure_on_cuda(Settings const& settings, Report const& report) {
  spillway::CudaOptions options;
#  if defined(SPILLWAY_WITH_CUDA_KERNELS) && SPILLWAY_WITH_CUDA_KERNELS
  options.copy_kernel = settings.has_copy_kernel ? &spillway::CudaCopyKernel::enqueue : nullptr;
#  endif
  spillway::CudaApi device{0, options};
  if (settings.has_copy_kernel && !device.has_copy_kernel()) {
    throw std::runtime_error{
        "--copy-kernel: this program was built without nvcc, or for another GPU"};
  }
  Measurement<spillway::CudaPolicies>{device, settings, report}.run();
}

}  // namespace bandwidth

#else

namespace bandwidth {

void measure_on_cuda(Settings const& /*settings*/, Report const& /*report*/) {
  throw std::runtime_error{"--device cuda: this program was built without the CUDA toolkit"};
}

}  // namespace bandwidth

#endif
