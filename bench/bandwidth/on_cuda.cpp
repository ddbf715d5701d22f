// SPDX-License-Identifier: Apache-2.0
#include "bandwidth.hpp"

#if defined(SPILLWAY_WITH_CUDA)

#  include <spillway/cuda.hpp>

#  include "measure.hpp"

namespace bandwidth {

void measure_on_cuda(Settings const& settings, Report const& report) {
  spillway::CudaApi device;
  Measurement<spillway::CudaPolicies>{device, settings, report}.run();
}

}  // namespace bandwidth

#else

#  include <stdexcept>

namespace bandwidth {

void measure_on_cuda(Settings const& /*settings*/, Report const& /*report*/) {
  throw std::runtime_error{"--device cuda: this program was built without the CUDA toolkit"};
}

}  // namespace bandwidth

#endif
