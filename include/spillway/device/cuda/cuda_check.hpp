// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>

#include <cuda_runtime_api.h>

#include <string>

namespace spillway {

/// Thrown when a call of the CUDA runtime or driver fails.
///
/// A driver result is carried as the runtime's code of the same number: the two enumerations agree.
class CudaError : public DeviceError {
 public:
  CudaError(cudaError_t code, char const* file, int line)
      : DeviceError{std::string{file} + ":" + std::to_string(line) + ": " + cudaGetErrorName(code) +
                    ": " + cudaGetErrorString(code)},
        code_{code},
        file_{file},
        line_{line} {}

  [[nodiscard]] cudaError_t code() const noexcept { return code_; }
  [[nodiscard]] char const* file() const noexcept { return file_; }
  [[nodiscard]] int line() const noexcept { return line_; }

 private:
  cudaError_t code_;
  char const* file_;  // what __builtin_FILE() gave: lives as long as the program
  int line_;
};

/// Turns a CUDA status into an exception and clears the runtime's last error.
///
/// An error that has corrupted the context cannot be cleared: later calls report it again.
///
/// `file` and `line` are the caller's; leave them out.
/// @throws CudaError carrying the caller's file and line unless `code` is `cudaSuccess`
inline void
cuda_check(cudaError_t code, char const* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (code != cudaSuccess) {
    (void)cudaGetLastError();
    throw CudaError{code, file, line};
  }
}

namespace detail {

/// For calls that give something back and must not throw: the failure of such a call, above all
/// `cudaErrorCudartUnloading` at the end of the program, leaves nothing to be done and must not
/// turn up as the last error of somebody else's call.
inline void cuda_forgive(cudaError_t code) noexcept {
  if (code != cudaSuccess) {
    (void)cudaGetLastError();
  }
}

}  // namespace detail

}  // namespace spillway
