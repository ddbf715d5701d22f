// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The allocator, its tensors and its policies on a GPU. Needs the headers of the CUDA toolkit and
/// its runtime library, but no nvcc. sim.hpp is the same for the simulated device.

#include <spillway/concepts/policy_set.hpp>
#include <spillway/device/cuda/cuda_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/policies.hpp>
#include <spillway/swappable_buffer.hpp>
#include <spillway/swappable_tensor.hpp>

namespace spillway {

/// The default policies on a GPU. Derive and change an alias to choose differently.
struct CudaPolicies : PoliciesFor<CudaApi> {};

static_assert(PolicySet<CudaPolicies>);

#if defined(SPILLWAY_COMPILED_CUDA)
// These are among what spillway::compiled holds for the simulated device.
extern template class StreamPrefetcher<CudaPolicies::prefetch>;
extern template class detail::RangeMap<CudaPolicies::fit>;
SPILLWAY_INSTANTIATE_ALLOCATOR(CudaPolicies);
#endif

}  // namespace spillway
