// SPDX-License-Identifier: Apache-2.0
#include "replay.hpp"

#if defined(SPILLWAY_WITH_CUDA) && SPILLWAY_WITH_CUDA

#  include <spillway/cuda.hpp>

#  include "replayer.hpp"

namespace replay {

Result replay_on_cuda(Trace const& trace, Settings const& settings) {
  spillway::CudaApi device;
  return Replayer<spillway::CudaPolicies>{device, trace, settings, false}.run();
}

}  // namespace replay

#else

#  include <stdexcept>

namespace replay {

Result replay_on_cuda(Trace const& /*trace*/, Settings const& /*settings*/) {
  throw std::runtime_error{"--device cuda: this program was built without the CUDA toolkit"};
}

}  // namespace replay

#endif
