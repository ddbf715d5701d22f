// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Large-model support for PyTorch's CPU tensors, in programs in C++ (LibTorch): tensors that no
/// operation uses may be swapped out. For CUDA tensors there is `interop/torch_cuda.hpp`.
///
/// Needs PyTorch's headers, 2.11 or newer. `python/spillway_torch` makes a Python module of it.

#include <spillway/interop/torch/host_site.hpp>
#include <spillway/interop/torch/large_model_support.hpp>

namespace spillway::torch {

/// Large-model support for CPU tensors.
using HostSupport = LargeModelSupport<HostSite<>>;

}  // namespace spillway::torch
