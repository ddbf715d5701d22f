// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/device/cuda/copy_kernel.hpp>
#include <spillway/device/cuda/cuda_api.hpp>

#include <doctest/doctest.h>

namespace spillway::test {

/// A `CudaApi` that copies with a kernel. For sources that nvcc compiles.
struct CudaApiWithCopyKernel : CudaApi {
  CudaApiWithCopyKernel() : CudaApi{0, {.copy_kernel = &CudaCopyKernel::enqueue}} {
    REQUIRE(has_copy_kernel());
  }
};

}  // namespace spillway::test
