// SPDX-License-Identifier: Apache-2.0
#include <spillway/interop/torch/cuda_site.hpp>
#include <spillway/interop/torch/site.hpp>

#include "bindings.hpp"
#include "released_lock.hpp"

namespace {

using Site = spillway::torch::CudaSite<spillway_python::WithoutInterpreter>;
static_assert(spillway::torch::CapturingSite<Site>);
static_assert(spillway::torch::JoiningSite<Site>);
static_assert(spillway::torch::PassingSite<Site>);

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  spillway_torch::Bindings<Site>::define(m);
}
