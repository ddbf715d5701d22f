// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/host_mapping.hpp>
#include <spillway/device/cuda/cuda_context.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <sys/mman.h>

namespace spillway::detail {

/// Allocates pinned host memory for `CudaApi`, near a NUMA node if the caller asks for one. Kernels
/// can access it, too.
///
/// The runtime's own allocator cannot place memory, so memory near a node is mapped, given a NUMA
/// policy and then registered. The node is a preference: if it has no pages left, or if the process
/// may not set policies (as in many containers), the memory comes from another node.
///
/// Threads  thread-safe.
/// Streams  none; allocating and freeing may wait for the whole device and is never fast.
class CudaPinnedMemory {
 public:
  CudaPinnedMemory() = default;
  CudaPinnedMemory(CudaPinnedMemory const&) = delete;
  CudaPinnedMemory& operator=(CudaPinnedMemory const&) = delete;
  ~CudaPinnedMemory() = default;

  /// @param node  NUMA node, -1 for any
  /// @return null if the host has no such memory left
  /// @throws CudaError, std::bad_alloc; nothing is left behind
  [[nodiscard]] void* try_allocate(std::size_t size_bytes, int node) {
    if (node >= 0) {
      if (void* const mapped = try_map_near(size_bytes, node); mapped != nullptr) {
        return mapped;
      }
    }
    void* memory = nullptr;
    cudaError_t const status =
        cudaHostAlloc(&memory, size_bytes, cudaHostAllocPortable | cudaHostAllocMapped);
    if (status == cudaErrorMemoryAllocation) {
      cuda_forgive(status);
      return nullptr;
    }
    cuda_check(status);
    return memory;
  }

  void free(void* memory) noexcept {
    if (HostMapping const mapping = forget(memory); mapping.data() != nullptr) {
      cuda_forgive(cudaHostUnregister(memory));
      return;
    }
    cuda_forgive(cudaFreeHost(memory));
  }

 private:
  /// Returns null if the memory could not be mapped or registered: the caller then asks the runtime
  /// for memory.
  [[nodiscard]] void* try_map_near(std::size_t size_bytes, int node) {
    // The mapping uses large pages, since registering locks memory page by page, and direct I/O
    // splits its requests by page.
    HostMapping mapping = HostMapping::try_map(size_bytes, node);
    void* const memory = mapping.data();
    if (memory == nullptr) {
      return nullptr;
    }
    // After a fork, the first write to a page would give one of the two processes a copy, possibly
    // the parent, while the device keeps using the original. The child cannot use the device
    // anyway.
    (void)madvise(memory, size_bytes, MADV_DONTFORK);
    {
      std::scoped_lock const lock{mutex_};
      mapped_.emplace(memory, std::move(mapping));
    }
    cudaError_t const status =
        cudaHostRegister(memory, size_bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (status != cudaSuccess) {
      cuda_forgive(status);
      (void)forget(memory);
      return nullptr;
    }
    return memory;
  }

  /// Removes and returns the mapping at `memory`; empty if the memory is not from `try_map_near`.
  [[nodiscard]] HostMapping forget(void* memory) noexcept {
    std::scoped_lock const lock{mutex_};
    auto entry = mapped_.extract(memory);
    return entry.empty() ? HostMapping{} : std::move(entry.mapped());
  }

  std::mutex mutex_;  // never held across a call of CUDA
  std::unordered_map<void*, HostMapping> mapped_;
};

}  // namespace spillway::detail
