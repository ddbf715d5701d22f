// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/device/cuda/cuda_api.hpp>

#include <thrust/system/cuda/execution_policy.h>

#include "multiply.hpp"

namespace beyond {

/// Runs Thrust on the GPU.
struct CudaExecution {
  using tiling = CudaTiling;

  /// Enqueues the kernels of `work(policy)` on `stream`. Does not wait.
  template <class Work>
  static void launch(spillway::CudaApi&, spillway::CudaApi::stream_type stream, Work work) {
    work(thrust::cuda::par_nosync.on(stream));
    spillway::cuda_check(cudaGetLastError());
  }
};

}  // namespace beyond
