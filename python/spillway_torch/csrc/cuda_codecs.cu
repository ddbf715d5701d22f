// SPDX-License-Identifier: Apache-2.0
#include <spillway/cuda_kernels.cuh>

SPILLWAY_INSTANTIATE_CUDA_KERNELS;
