// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <new>

namespace spillway {

/// Thrown when a call of the CUDA runtime or driver fails.
///
/// A failure of the driver has the runtime's error code of the same number, since the numbers of
/// the two enumerations agree.
class CudaError : public DeviceError {
 public:
  CudaError(cudaError_t code, CallSite site, char const* call)
      : DeviceError{detail::head_of_error(site, call) + cudaGetErrorName(code) + ": " +
                    cudaGetErrorString(code) + advice(code)},
        code_{code},
        site_{site},
        call_{call} {}

  [[nodiscard]] cudaError_t code() const noexcept { return code_; }
  [[nodiscard]] char const* file() const noexcept { return site_.file(); }
  [[nodiscard]] int line() const noexcept { return site_.line(); }
  /// The function that made the call, such as `copy` or `record_event` of `CudaApi`.
  [[nodiscard]] char const* call() const noexcept { return call_; }

 private:
  /// What these two codes stand for in calls that this library makes, if CUDA notices it at all.
  [[nodiscard]] static char const* advice(cudaError_t code) noexcept {
    return code == cudaErrorInvalidResourceHandle || code == cudaErrorContextIsDestroyed
               ? " (is the stream of another device, or was it destroyed before retire_stream?)"
               : "";
  }

  cudaError_t code_;
  CallSite site_;
  char const* call_;
};

/// Turns a CUDA status into an exception and clears the runtime's last error.
///
/// An error that has corrupted the context cannot be cleared, and later calls report it again.
///
/// The defaults of `site` and `call` describe the caller; do not pass them.
/// @throws CudaError carrying all three unless `code` is `cudaSuccess`
inline void
cuda_check(cudaError_t code, CallSite site = {}, char const* call = __builtin_FUNCTION()) {
  if (code != cudaSuccess) {
    (void)cudaGetLastError();
    throw CudaError{code, site, call};
  }
}

namespace detail {

/// Ignores the failure of a call that releases something and must not throw. The runtime's last
/// error is cleared, so that a later call of the program does not report it. At the end of a
/// program such calls fail with `cudaErrorCudartUnloading`.
inline void cuda_forgive(cudaError_t code) noexcept {
  if (code != cudaSuccess) {
    (void)cudaGetLastError();
  }
}

// These make it right to turn a driver's result into a cudaError_t.
static_assert(static_cast<int>(CUDA_SUCCESS) == static_cast<int>(cudaSuccess));
static_assert(static_cast<int>(CUDA_ERROR_INVALID_VALUE) ==
              static_cast<int>(cudaErrorInvalidValue));
static_assert(static_cast<int>(CUDA_ERROR_OUT_OF_MEMORY) ==
              static_cast<int>(cudaErrorMemoryAllocation));
static_assert(static_cast<int>(CUDA_ERROR_DEINITIALIZED) ==
              static_cast<int>(cudaErrorCudartUnloading));
static_assert(static_cast<int>(CUDA_ERROR_NOT_SUPPORTED) ==
              static_cast<int>(cudaErrorNotSupported));

/// Turns a result of the driver into an exception. Leaves the runtime's last error alone, which the
/// driver does not set: it may be that of the caller's own calls.
///
/// The defaults of `site` and `call` describe the caller; do not pass them.
/// @throws CudaError carrying all three unless `result` is `CUDA_SUCCESS`
inline void
cuda_driver_check(CUresult result, CallSite site = {}, char const* call = __builtin_FUNCTION()) {
  if (result != CUDA_SUCCESS) {
    throw CudaError{static_cast<cudaError_t>(result), site, call};
  }
}

/// Looks a driver function up by name, so that programs need not link the driver's library.
///
/// @tparam Function  the function's type as of CUDA `version` (major * 1000 + minor * 10)
/// @return null if the driver has no such function
/// @throws CudaError if there is no driver
template <class Function>
[[nodiscard]] Function try_cuda_entry_point(char const* name, unsigned version) {
  void* found = nullptr;
// the function exists since 12.5, but a program's wrapper of the runtime may lack it
#if CUDART_VERSION >= 13000
  cuda_check(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault));
#else
  static_cast<void>(version);
  cuda_check(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault));
#endif
  return reinterpret_cast<Function>(found);
}

/// Looks up a function that every driver has which supports this version of the runtime.
template <class Function>
[[nodiscard]] Function cuda_entry_point(char const* name, unsigned version) {
  auto const found = try_cuda_entry_point<Function>(name, version);
  if (found == nullptr) {
    throw DeviceError{detail::Text{"the CUDA driver has no "} + name};
  }
  return found;
}

/// Keeps the primary context of one device alive, which is the one that the CUDA runtime uses.
///
/// Threads  thread-safe.
class CudaContext {
 public:
  /// @throws CudaError if there is no driver or no such device
  explicit CudaContext(int ordinal) : ordinal_{ordinal} {
    // Initialises the device without making it the thread's current device.
    cuda_check(cudaInitDevice(ordinal, 0, 0));
    get_current_ = cuda_entry_point<PFN_cuCtxGetCurrent_v4000>("cuCtxGetCurrent", 4000);
    push_ = cuda_entry_point<PFN_cuCtxPushCurrent_v4000>("cuCtxPushCurrent", 4000);
    pop_ = cuda_entry_point<PFN_cuCtxPopCurrent_v4000>("cuCtxPopCurrent", 4000);
    auto const retain =
        cuda_entry_point<PFN_cuDevicePrimaryCtxRetain_v7000>("cuDevicePrimaryCtxRetain", 7000);
    release_ =
        cuda_entry_point<PFN_cuDevicePrimaryCtxRelease_v11000>("cuDevicePrimaryCtxRelease", 11000);
    device_ = device_of(ordinal);
    cuda_driver_check(retain(&context_, device_));
  }
  CudaContext(CudaContext const&) = delete;
  CudaContext& operator=(CudaContext const&) = delete;
  ~CudaContext() { (void)release_(device_); }  // fails only when CUDA has been unloaded already

  /// Returns the driver's handle of a device. @throws CudaError if there is none
  [[nodiscard]] static CUdevice device_of(int ordinal) {
    CUdevice device{};
    cuda_driver_check(
        cuda_entry_point<PFN_cuDeviceGet_v2000>("cuDeviceGet", 2000)(&device, ordinal));
    return device;
  }
  [[nodiscard]] int ordinal() const noexcept { return ordinal_; }
  [[nodiscard]] CUdevice device() const noexcept { return device_; }

 private:
  friend class CudaScope;

  int ordinal_;
  PFN_cuCtxGetCurrent_v4000 get_current_ = nullptr;
  PFN_cuCtxPushCurrent_v4000 push_ = nullptr;
  PFN_cuCtxPopCurrent_v4000 pop_ = nullptr;
  PFN_cuDevicePrimaryCtxRelease_v11000 release_ = nullptr;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
};

/// Makes a device's context the calling thread's current one for as long as it lives. Member
/// functions of `CudaApi` use it.
///
/// It pushes and pops the context. Setting the caller's device again afterwards would be worse: if
/// the caller had never used that device, it would be initialised, with all the memory that this
/// takes. If the context is current already, which is the usual case, this costs one query.
///
/// Threads  thread-unsafe: a scope belongs to the thread that made it.
class CudaScope {
 public:
  /// @throws CudaError if the context cannot be made current
  explicit CudaScope(CudaContext const& context) : context_{&context} {
    cuda_driver_check(enter());
  }
  /// The same, for calls that must not throw: if the context cannot be made current, the caller's
  /// context stays current.
  CudaScope(CudaContext const& context, std::nothrow_t /*unused*/) noexcept : context_{&context} {
    (void)enter();
  }
  CudaScope(CudaScope const&) = delete;
  CudaScope& operator=(CudaScope const&) = delete;
  ~CudaScope() {
    if (is_pushed_) {
      CUcontext popped = nullptr;
      (void)context_->pop_(&popped);
    }
  }

 private:
  [[nodiscard]] CUresult enter() noexcept {
    CUcontext current = nullptr;
    CUresult result = context_->get_current_(&current);
    if (result == CUDA_SUCCESS && current != context_->context_) {
      result = context_->push_(context_->context_);
      is_pushed_ = result == CUDA_SUCCESS;
    }
    return result;
  }

  CudaContext const* context_;
  bool is_pushed_ = false;
};

/// While it lives, the calling thread may make calls that take effect at once although a stream is
/// being captured. CUDA would otherwise refuse them and invalidate the capture.
///
/// Threads  thread-unsafe: belongs to the thread that made it.
class CudaCaptureBystander {
 public:
  CudaCaptureBystander() noexcept { exchange(); }
  CudaCaptureBystander(CudaCaptureBystander const&) = delete;
  CudaCaptureBystander& operator=(CudaCaptureBystander const&) = delete;
  ~CudaCaptureBystander() {
    if (is_exchanged_) {
      exchange();
    }
  }

 private:
  void exchange() noexcept {
    cudaError_t const status = cudaThreadExchangeStreamCaptureMode(&mode_);
    is_exchanged_ = status == cudaSuccess;
    cuda_forgive(status);
  }

  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  bool is_exchanged_ = false;
};

}  // namespace detail

}  // namespace spillway
