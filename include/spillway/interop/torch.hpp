// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Large-model support for PyTorch: tensors that no operation uses may leave the device.
///
/// Needs PyTorch's headers, 2.11 or newer. For CUDA tensors there is
/// `interop/torch/cuda_allocator.hpp`, which needs a PyTorch that was built for CUDA.
/// `python/spillway_torch` makes a Python module of it.

#include <spillway/interop/torch/frame_hook.hpp>
#include <spillway/interop/torch/host_tensor_allocator.hpp>
#include <spillway/interop/torch/operands.hpp>
#include <spillway/interop/torch/operations.hpp>
#include <spillway/interop/torch/recompute.hpp>
#include <spillway/interop/torch/storage_leases.hpp>
#include <spillway/interop/torch/torch_version.hpp>
