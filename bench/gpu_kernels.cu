// SPDX-License-Identifier: Apache-2.0
// The library's kernels, for benchmarks that nvcc does not compile.
#include <spillway/cuda_kernels.cuh>

SPILLWAY_INSTANTIATE_CUDA_KERNELS;
