// SPDX-License-Identifier: Apache-2.0
#include "bindings.hpp"
#include "buffer_protocol.hpp"
#include "host_site.hpp"

PYBIND11_MODULE(SPILLWAY_TF_MODULE, m) {
  spillway_tf::Bindings<spillway_tf::HostSite>::define(m);
  m.def("wrap_buffer", &spillway_tf::wrap_buffer);
  m.def("handle_faults", &spillway_tf::FaultHandler<spillway_tf::HostSite>::install);
}
