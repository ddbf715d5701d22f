// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/device/cuda/cuda_api.hpp>
#include <spillway/device/cuda/cuda_context.hpp>

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

// Kernels for tests, and helpers to launch them.

namespace gpu_test {

/// The byte at `i` of a block that was last written with `tag`.
__host__ __device__ constexpr unsigned char byte_of(std::uint32_t tag, std::size_t i) {
  return static_cast<unsigned char>((tag * 2654435761U + static_cast<std::uint32_t>(i)) >> 7U);
}

/// Holds its stream up until the flag is set, or at most for about `limit_ns`, so that a failing
/// test ends.
__global__ void
await_flag(unsigned const volatile* flag, unsigned volatile* gave_up, std::uint64_t limit_ns) {
  std::uint64_t start = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  while (*flag == 0) {
    std::uint64_t now = 0;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (now - start > limit_ns) {
      *gave_up = 1;
      return;
    }
    __nanosleep(1000);
  }
}

__global__ void write_bytes(unsigned char* bytes, std::size_t size_bytes, std::uint32_t tag) {
  std::size_t const stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < size_bytes;
       i += stride) {
    bytes[i] = byte_of(tag, i);
  }
}

/// Counts the bytes that differ from what `write_bytes` writes.
__global__ void count_wrong(unsigned char const* bytes,
                            std::size_t size_bytes,
                            std::uint32_t tag,
                            unsigned long long* wrong) {
  unsigned long long mine = 0;
  std::size_t const stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < size_bytes;
       i += stride) {
    mine += bytes[i] != byte_of(tag, i) ? 1 : 0;
  }
  if (mine != 0) {
    atomicAdd(wrong, mine);
  }
}

inline void
launch_write(void* bytes, std::size_t size_bytes, std::uint32_t tag, cudaStream_t stream) {
  write_bytes<<<64, 256, 0, stream>>>(static_cast<unsigned char*>(bytes), size_bytes, tag);
  spillway::cuda_check(cudaGetLastError());
}

inline void launch_check(void const* bytes,
                         std::size_t size_bytes,
                         std::uint32_t tag,
                         unsigned long long* wrong,
                         cudaStream_t stream) {
  count_wrong<<<64, 256, 0, stream>>>(
      static_cast<unsigned char const*>(bytes), size_bytes, tag, wrong);
  spillway::cuda_check(cudaGetLastError());
}

/// A counter in pinned memory that kernels add to and the host reads once they have finished.
class WrongBytes {
 public:
  explicit WrongBytes(spillway::CudaApi& device)
      : device_{&device},
        count_{static_cast<unsigned long long*>(
            device.try_allocate_pinned(sizeof(unsigned long long), -1))} {
    *count_ = 0;
  }
  WrongBytes(WrongBytes const&) = delete;
  WrongBytes& operator=(WrongBytes const&) = delete;
  ~WrongBytes() { device_->free_pinned(count_, sizeof *count_); }

  [[nodiscard]] unsigned long long* counter() const { return count_; }
  /// The count; valid once the kernels that add to it have finished.
  [[nodiscard]] unsigned long long value() const { return *count_; }

 private:
  spillway::CudaApi* device_;
  unsigned long long* count_;
};

/// Holds streams up with a kernel until the gate is opened. Declare it after the owner of the
/// streams.
class KernelGate {
 public:
  explicit KernelGate(spillway::CudaApi& device)
      : device_{&device},
        words_{
            static_cast<unsigned volatile*>(device.try_allocate_pinned(2 * sizeof(unsigned), -1))} {
    words_[0] = 0;
    words_[1] = 0;
  }
  KernelGate(KernelGate const&) = delete;
  KernelGate& operator=(KernelGate const&) = delete;
  ~KernelGate() {
    open();
    (void)cudaDeviceSynchronize();
    device_->free_pinned(const_cast<unsigned*>(words_), 2 * sizeof(unsigned));
  }

  void close(cudaStream_t stream) {
    await_flag<<<1, 1, 0, stream>>>(words_, words_ + 1, 20'000'000'000);
    spillway::cuda_check(cudaGetLastError());
  }
  void open() { words_[0] = 1; }
  /// True if a kernel ended before the gate was opened: the test then proves nothing.
  [[nodiscard]] bool gave_up() const { return words_[1] != 0; }

 private:
  spillway::CudaApi* device_;
  unsigned volatile* words_;
};

}  // namespace gpu_test
