// SPDX-License-Identifier: Apache-2.0
// Driver functions that PyTorch looks up by name before it needs them, and that a device without
// cores does not have. The driver's header would object to how they are declared.
namespace {
constexpr int not_supported = 801;
}

#define SPILLWAY_FAKE_MISSING(name)                                                                \
  int name() {                                                                                     \
    return not_supported;                                                                          \
  }

extern "C" {

SPILLWAY_FAKE_MISSING(cuCtxSetCurrent)
SPILLWAY_FAKE_MISSING(cuDeviceGet)
SPILLWAY_FAKE_MISSING(cuDeviceGetAttribute)
SPILLWAY_FAKE_MISSING(cuDevicePrimaryCtxRetain)
SPILLWAY_FAKE_MISSING(cuFuncGetAttribute)
SPILLWAY_FAKE_MISSING(cuFuncSetAttribute)
SPILLWAY_FAKE_MISSING(cuFuncSetCacheConfig)
SPILLWAY_FAKE_MISSING(cuLaunchCooperativeKernel)
SPILLWAY_FAKE_MISSING(cuLaunchKernel)
SPILLWAY_FAKE_MISSING(cuLinkAddData_v2)
SPILLWAY_FAKE_MISSING(cuLinkComplete)
SPILLWAY_FAKE_MISSING(cuLinkCreate_v2)
SPILLWAY_FAKE_MISSING(cuModuleGetFunction)
SPILLWAY_FAKE_MISSING(cuModuleLoad)
SPILLWAY_FAKE_MISSING(cuModuleLoadData)
SPILLWAY_FAKE_MISSING(cuModuleLoadDataEx)
SPILLWAY_FAKE_MISSING(cuModuleUnload)
SPILLWAY_FAKE_MISSING(cuOccupancyMaxActiveBlocksPerMultiprocessor)
SPILLWAY_FAKE_MISSING(cuPointerGetAttribute)
SPILLWAY_FAKE_MISSING(cuTensorMapEncodeTiled)

}  // extern "C"
