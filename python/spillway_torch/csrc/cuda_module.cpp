// SPDX-License-Identifier: Apache-2.0
#include "bindings.hpp"
#include "cuda_site.hpp"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  spillway_torch::Bindings<spillway_torch::CudaSite>::define(m);
}
