// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/policy_set.hpp>
#include <spillway/device/cuda/cuda_api.hpp>
#include <spillway/policies.hpp>

namespace spillway {

/// What an allocator is made of on a GPU, unless told otherwise. Derive and change one alias.
struct CudaPolicies : SimPolicies {
  using device = CudaApi;
};

static_assert(PolicySet<CudaPolicies>);

}  // namespace spillway
