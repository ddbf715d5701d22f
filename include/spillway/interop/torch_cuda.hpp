// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Large-model support for PyTorch's CUDA tensors, in programs in C++ (LibTorch). Needs the headers
/// and libraries of a PyTorch that was built for CUDA, 2.11 or newer, and the CUDA runtime.
/// `interop/torch.hpp` is the same for CPU tensors. For codecs of CUDA tensors define
/// `SPILLWAY_WITH_CUDA_CODECS` as 1 in all sources that include this header, and compile
/// `cuda_kernels.cuh` in one more source with nvcc.

#include <spillway/interop/torch/cuda_site.hpp>
#include <spillway/interop/torch/large_model_support.hpp>

namespace spillway::torch {

/// Large-model support for the tensors of one CUDA device.
using CudaSupport = LargeModelSupport<CudaSite<>>;

}  // namespace spillway::torch
