// SPDX-License-Identifier: Apache-2.0
// The default policies of CUDA, compiled once for the programs that link spillway::compiled.
#define SPILLWAY_COMPILED 1
#include <spillway/cuda.hpp>

namespace spillway {

SPILLWAY_INSTANTIATE_DEVICE(template, CudaApi);
SPILLWAY_INSTANTIATE_ALLOCATOR(template, CudaPolicies);

}  // namespace spillway
