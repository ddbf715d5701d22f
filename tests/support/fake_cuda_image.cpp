// SPDX-License-Identifier: Apache-2.0
// Functions beside the runtime's interface with which a program compiled by nvcc registers its
// kernels. The stand-in needs only their names (fake_cuda_kernels.cpp).
#include <cuda_runtime_api.h>

#include <cstddef>

extern "C" {

void** __cudaRegisterFatBinary(void* /*image*/) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void** /*handle*/) {}
void __cudaUnregisterFatBinary(void** /*handle*/) {}
void __cudaRegisterVar(void**, char*, char*, char const*, int, std::size_t, int, int) {}

// Called by `kernel<<<...>>>` only, which the library does not write.
unsigned __cudaPushCallConfiguration(dim3, dim3, std::size_t, void*) {
  return cudaErrorNotSupported;
}
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, std::size_t*, void*) {
  return cudaErrorNotSupported;
}
cudaError_t __cudaGetKernel(cudaKernel_t*, void const*) {
  return cudaErrorNotSupported;
}
}
