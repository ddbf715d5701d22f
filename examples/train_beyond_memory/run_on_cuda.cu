// SPDX-License-Identifier: Apache-2.0
#include <spillway/cuda.hpp>
#include <spillway/cuda_kernels.cuh>
#include <spillway/device/cuda/cuda_api.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "cuda_execution.cuh"
#include "experiment.hpp"
#include "platforms.hpp"

namespace beyond {
namespace {

struct CudaPlatform {
  using policies = spillway::CudaPolicies;
  using execution = CudaExecution;

  [[nodiscard]] static std::string name() { return "cuda"; }
  [[nodiscard]] static std::size_t unlimited_bytes() {
    return spillway::CudaApi{}.memory_info().free_bytes / 10 * 9;
  }
  [[nodiscard]] static std::unique_ptr<spillway::CudaApi> make_device(std::size_t,
                                                                      std::optional<double>) {
    return std::make_unique<spillway::CudaApi>(
        0, spillway::CudaOptions{.copy_kernel = &spillway::CudaCopyKernel::enqueue});
  }
};

}  // namespace

bool has_cuda_device() {
  int count = 0;
  bool const is_known = cudaGetDeviceCount(&count) == cudaSuccess;
  // Without a driver the call above has failed. Clear that, so that no later call reports it.
  static_cast<void>(cudaGetLastError());
  return is_known && count > 0;
}

Report run_on_cuda(Dataset const& data, ExperimentOptions const& options, Progress& progress) {
  return Experiment<CudaPlatform>{data, options, progress}.run();
}

}  // namespace beyond
