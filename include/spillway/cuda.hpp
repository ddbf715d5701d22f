// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The allocator, its tensors and its policies on a GPU. Needs the headers of the CUDA toolkit and
/// its runtime library, but no nvcc. sim.hpp is the same for the simulated device.

#include <spillway/concepts/policy_set.hpp>
#include <spillway/core/config.hpp>
#include <spillway/device/cuda/copy_kernel.hpp>
#include <spillway/device/cuda/cuda_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/policies.hpp>
#include <spillway/swappable_buffer.hpp>
#include <spillway/swappable_tensor.hpp>

namespace spillway {

/// The default policies on a GPU. Derive and change an alias to choose differently.
struct CudaPolicies : PoliciesFor<CudaApi> {};

SPILLWAY_CHECK_MODEL(PolicySet<CudaPolicies>);

#if defined(SPILLWAY_COMPILED_CUDA)
SPILLWAY_INSTANTIATE_DEVICE(extern template, CudaApi);
SPILLWAY_INSTANTIATE_ALLOCATOR(extern template, CudaPolicies);
#endif

}  // namespace spillway
