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
// What spillway::compiled holds for CUDA; the last two are among what it holds for the simulated
// device.
SPILLWAY_INSTANTIATE class StreamOrder<CudaApi>;
SPILLWAY_INSTANTIATE class HostSwapPool<CudaApi>;
SPILLWAY_INSTANTIATE class DefragArena<CudaApi, CudaPolicies::fit, CudaPolicies::compaction>;
SPILLWAY_INSTANTIATE class detail::HostTransfers<CudaApi, PosixFileIo>;
SPILLWAY_INSTANTIATE class detail::Journal<CudaPolicies>;
SPILLWAY_INSTANTIATE class detail::Blocks<CudaPolicies>;
SPILLWAY_INSTANTIATE class detail::Transfers<CudaPolicies>;
SPILLWAY_INSTANTIATE class detail::Reclaimer<CudaPolicies>;
SPILLWAY_INSTANTIATE class detail::Leases<CudaPolicies>;
SPILLWAY_INSTANTIATE class detail::LookAhead<CudaPolicies>;
SPILLWAY_INSTANTIATE class detail::CopyStreams<CudaApi>;
SPILLWAY_INSTANTIATE class DeviceAllocator<CudaPolicies>;
SPILLWAY_INSTANTIATE bool
detail::Leases<CudaPolicies>::try_acquire(std::span<LeaseRequest const>,
                                          StreamIndex,
                                          DeviceAllocator<CudaPolicies>::Granted const&) noexcept;
SPILLWAY_INSTANTIATE void
detail::Leases<CudaPolicies>::acquire(std::span<LeaseRequest const>,
                                      CudaApi::stream_type,
                                      StreamIndex,
                                      DeviceAllocator<CudaPolicies>::Granted const&);
extern template class StreamPrefetcher<CudaPolicies::prefetch>;
extern template class detail::RangeMap<CudaPolicies::fit>;
#endif

}  // namespace spillway
