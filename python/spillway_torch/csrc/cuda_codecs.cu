// SPDX-License-Identifier: Apache-2.0
#include <spillway/cuda_codecs.cuh>

SPILLWAY_INSTANTIATE_CUDA_CODECS;
