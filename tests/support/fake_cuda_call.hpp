// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <vector>

#include <support/fake_cudart.hpp>

/// What the fake runtime and the fake driver have in common.
namespace fake_cuda {

using Fake = FakeCudart;
using Lock = std::unique_lock<std::recursive_mutex>;

inline Fake* fake = nullptr;  // the one that exists
inline thread_local cudaError_t last_error = cudaSuccess;
inline thread_local std::vector<CUcontext> contexts;
inline thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
inline thread_local bool is_host_function = false;  // the thread runs one of a stream

inline std::uintptr_t value_of(void const* p) {
  return reinterpret_cast<std::uintptr_t>(p);
}
inline void* pointer_of(CUdeviceptr address) {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
}
inline CUcontext context_of(Fake::Device& device) {
  return reinterpret_cast<CUcontext>(&device);
}
inline Fake::Device& device_of(CUcontext context) {
  return *reinterpret_cast<Fake::Device*>(context);
}

struct Failure {
  cudaError_t code;
};
inline void require(bool holds, cudaError_t code = cudaErrorInvalidValue) {
  if (!holds) {
    throw Failure{code};
  }
}
inline void require_safe() {
  require(!fake->refuses_unsafe_calls(), cudaErrorStreamCaptureUnsupported);
}
/// For calls that ask or wait for the work of a stream or of an event.
inline void require_uncaptured(std::shared_ptr<Fake::Capture> const& capture, cudaError_t code) {
  if (capture != nullptr) {
    fake->break_capture(*capture);
    throw Failure{code};
  }
}

/// Runs the body of one function: counts it, fails if asked to, turns exceptions into a code.
template <class Body>
cudaError_t call(char const* name, Body body) {
  if (fake == nullptr) {
    return last_error = cudaErrorInitializationError;
  }
  if (is_host_function) {
    std::fprintf(stderr, "%s: called by a host function\n", name);
    return last_error = cudaErrorNotPermitted;
  }
  Lock const lock{fake->mutex};
  cudaError_t status = cudaSuccess;
  if (fake->begin(name, status)) {
    try {
      body();
    } catch (Failure const& failure) {
      status = failure.code;
    } catch (spillway::DeviceError const& error) {
      std::fprintf(stderr, "%s: %s\n", name, error.what());
      status = cudaErrorInvalidValue;
    }
  }
  if (status != cudaSuccess) {
    last_error = status;
  }
  return status;
}

/// The same for the driver, which knows no last error.
template <class Body>
CUresult driver_call(char const* name, Body body) {
  cudaError_t const before = last_error;
  cudaError_t const status = call(name, body);
  last_error = before;
  return static_cast<CUresult>(status);
}

/// A driver function by its name, as `cudaGetDriverEntryPointByVersion` finds it, or null.
[[nodiscard]] void* driver_function(char const* name, unsigned version);

}  // namespace fake_cuda
