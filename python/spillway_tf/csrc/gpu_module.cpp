// SPDX-License-Identifier: Apache-2.0
#include <cstddef>

#include "bindings.hpp"
#include "gpu_site.hpp"
#include <external/dlpack/include/dlpack/dlpack.h>
#include <pybind11/pybind11.h>

namespace {

/// Returns the address of the first byte of the tensor in a DLPack capsule.
std::size_t address_in(pybind11::capsule const& capsule) {
  auto const* const managed = capsule.get_pointer<DLManagedTensor>();
  return reinterpret_cast<std::size_t>(managed->dl_tensor.data) + managed->dl_tensor.byte_offset;
}

}  // namespace

PYBIND11_MODULE(SPILLWAY_TF_MODULE, m) {
  spillway_tf::Bindings<spillway_tf::GpuSite>::define(m);
  m.def("address_in", &address_in);
}
