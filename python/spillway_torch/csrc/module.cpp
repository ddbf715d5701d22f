// SPDX-License-Identifier: Apache-2.0
#include <spillway/interop/torch/host_site.hpp>

#include "bindings.hpp"
#include "released_lock.hpp"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using Site = spillway::torch::HostSite<spillway_python::WithoutInterpreter>;
  spillway_torch::Bindings<Site>::define(m);
}
