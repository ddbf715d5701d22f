// SPDX-License-Identifier: Apache-2.0
// A stand-in for nvCOMP: the functions that the library calls, on the stand-in for a CUDA device.
// All of them use one simple run-length code. They refuse what nvCOMP refuses.
#include <spillway/policy/codec/plane_kernels.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include <nvcomp/ans.h>
#include <nvcomp/lz4.h>
#include <nvcomp/version.h>
#include <support/planes_on_host.hpp>

namespace {

using spillway::detail::PlaneBatch;
using spillway::test::RunLengths;

constexpr std::size_t alignment = 16;

bool is_aligned(void const* p) {
  return reinterpret_cast<std::uintptr_t>(p) % alignment == 0;
}

/// Runs a kernel as one host function.
struct HostFunctionLaunch {
  template <class Kernel>
  void operator()(Kernel const& kernel, std::uint64_t teams) const {
    using Work = std::function<void()>;
    auto work = std::make_unique<Work>([kernel, teams] {
      typename Kernel::Memory memory;
      for (std::uint64_t team = 0; team < teams; ++team) {
        if (is_aligned(kernel.batch.from[team]) && is_aligned(kernel.batch.to[team])) {
          kernel(spillway::test::HostTeam{}, memory, team);
        } else {
          kernel.batch.statuses[team] = nvcompErrorAlignment;
        }
      }
    });
    auto const run = [](void* argument) {
      std::unique_ptr<Work> const mine{static_cast<Work*>(argument)};
      (*mine)();
    };
    *status = cudaLaunchHostFunc(stream, run, work.get());
    if (*status == cudaSuccess) {
      work.release();
    }
  }

  cudaStream_t stream;
  cudaError_t* status;
};

nvcompStatus_t max_output(std::size_t bytes, std::size_t* most) {
  *most = RunLengths::most_packed_bytes(bytes);
  return nvcompSuccess;
}
nvcompStatus_t work_bytes(std::size_t count, std::size_t* bytes) {
  *bytes = RunLengths::work_bytes(count);
  return nvcompSuccess;
}

enum class Way { compress, decompress };

nvcompStatus_t run(Way way,
                   void const* const* from,
                   std::size_t const* from_bytes,
                   void* const* to,
                   std::size_t const* to_bytes,
                   std::size_t* done_bytes,
                   nvcompStatus_t* statuses,
                   std::size_t count,
                   void* work,
                   std::size_t work_size,
                   cudaStream_t stream) {
  if (work_size < RunLengths::work_bytes(count) || count == 0) {
    return nvcompErrorInvalidValue;
  }
  PlaneBatch const batch{const_cast<void**>(from),
                         const_cast<std::size_t*>(from_bytes),
                         const_cast<void**>(to),
                         const_cast<std::size_t*>(to_bytes),
                         done_bytes,
                         reinterpret_cast<int*>(statuses),
                         static_cast<unsigned>(count)};
  cudaError_t status = cudaSuccess;
  std::span const memory{static_cast<std::byte*>(work), work_size};
  HostFunctionLaunch const launch{stream, &status};
  way == Way::compress ? RunLengths::compress(launch, batch, memory)
                       : RunLengths::decompress(launch, batch, memory);
  return status == cudaSuccess ? nvcompSuccess : nvcompErrorCudaError;
}

}  // namespace

#if NVCOMP_VER_MAJOR >= 6
#  define SPILLWAY_FAKE_WORK_BYTES(name) name##GetTempSize
#  define SPILLWAY_FAKE_STREAM , cudaStream_t
#else
#  define SPILLWAY_FAKE_WORK_BYTES(name) name##GetTempSizeAsync
#  define SPILLWAY_FAKE_STREAM
#endif

#define SPILLWAY_FAKE_NVCOMP(name)                                                                 \
  nvcompStatus_t name##CompressGetMaxOutputChunkSize(                                              \
      std::size_t bytes, name##CompressOpts_t, std::size_t* most) {                                \
    return max_output(bytes, most);                                                                \
  }                                                                                                \
  nvcompStatus_t SPILLWAY_FAKE_WORK_BYTES(name##Compress)(std::size_t count,                       \
                                                          std::size_t,                             \
                                                          name##CompressOpts_t,                    \
                                                          std::size_t * bytes,                     \
                                                          std::size_t SPILLWAY_FAKE_STREAM) {      \
    return work_bytes(count, bytes);                                                               \
  }                                                                                                \
  nvcompStatus_t SPILLWAY_FAKE_WORK_BYTES(name##Decompress)(std::size_t count,                     \
                                                            std::size_t,                           \
                                                            name##DecompressOpts_t,                \
                                                            std::size_t * bytes,                   \
                                                            std::size_t SPILLWAY_FAKE_STREAM) {    \
    return work_bytes(count, bytes);                                                               \
  }                                                                                                \
  nvcompStatus_t name##CompressAsync(void const* const* from,                                      \
                                     std::size_t const* from_bytes,                                \
                                     std::size_t,                                                  \
                                     std::size_t count,                                            \
                                     void* work,                                                   \
                                     std::size_t work_size,                                        \
                                     void* const* to,                                              \
                                     std::size_t* done_bytes,                                      \
                                     name##CompressOpts_t,                                         \
                                     nvcompStatus_t* statuses,                                     \
                                     cudaStream_t stream) {                                        \
    return run(Way::compress,                                                                      \
               from,                                                                               \
               from_bytes,                                                                         \
               to,                                                                                 \
               nullptr,                                                                            \
               done_bytes,                                                                         \
               statuses,                                                                           \
               count,                                                                              \
               work,                                                                               \
               work_size,                                                                          \
               stream);                                                                            \
  }                                                                                                \
  nvcompStatus_t name##DecompressAsync(void const* const* from,                                    \
                                       std::size_t const* from_bytes,                              \
                                       std::size_t const* to_bytes,                                \
                                       std::size_t* done_bytes,                                    \
                                       std::size_t count,                                          \
                                       void* const work,                                           \
                                       std::size_t work_size,                                      \
                                       void* const* to,                                            \
                                       name##DecompressOpts_t,                                     \
                                       nvcompStatus_t* statuses,                                   \
                                       cudaStream_t stream) {                                      \
    return run(Way::decompress,                                                                    \
               from,                                                                               \
               from_bytes,                                                                         \
               to,                                                                                 \
               to_bytes,                                                                           \
               done_bytes,                                                                         \
               statuses,                                                                           \
               count,                                                                              \
               work,                                                                               \
               work_size,                                                                          \
               stream);                                                                            \
  }

extern "C" {

SPILLWAY_FAKE_NVCOMP(nvcompBatchedANS)
SPILLWAY_FAKE_NVCOMP(nvcompBatchedLZ4)

}  // extern "C"
