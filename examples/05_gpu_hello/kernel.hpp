// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

/// Enqueues `out[i] = in[i] + added` for `count` elements.
cudaError_t
add_on_device(float* out, float const* in, float added, std::size_t count, cudaStream_t stream);
