// SPDX-License-Identifier: Apache-2.0
// The default policies of CUDA, compiled once for the programs that link spillway::compiled.
#define SPILLWAY_COMPILED
#define SPILLWAY_COMPILED_CUDA
#define SPILLWAY_COMPILING
#include <spillway/cuda.hpp>
