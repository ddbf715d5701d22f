// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/device/cuda_check.hpp>

#include <cuda_runtime_api.h>

#include <array>
#include <climits>
#include <cstddef>
#include <mutex>
#include <unordered_set>

#if defined(__linux__)
#  include <linux/mempolicy.h>
#  include <sys/mman.h>
#  include <sys/syscall.h>
#  include <unistd.h>
#endif

namespace spillway::detail {

/// Page-locked host memory, near a NUMA node where one is asked for.
///
/// The runtime's own allocator takes no node, so memory near a node is mapped, given a policy and then
/// registered. A node is a preference: when it has no pages left, or when the process may not set
/// policies (as in many containers), the memory comes from elsewhere instead of not at all.
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
      if (void* const near = try_map_near(size_bytes, node); near != nullptr) {
        return near;
      }
    }
    void* memory = nullptr;
    cudaError_t const status = cudaHostAlloc(&memory, size_bytes, cudaHostAllocPortable);
    if (status == cudaErrorMemoryAllocation) {
      cuda_forgive(status);
      return nullptr;
    }
    cuda_check(status);
    return memory;
  }

  void free(void* memory, [[maybe_unused]] std::size_t size_bytes) noexcept {
#if defined(__linux__)
    if (forget(memory)) {
      cuda_forgive(cudaHostUnregister(memory));
      (void)munmap(memory, size_bytes);
      return;
    }
#endif
    cuda_forgive(cudaFreeHost(memory));
  }

 private:
#if defined(__linux__)
  /// Null if the memory could not be mapped or registered: then the runtime's allocator is asked.
  [[nodiscard]] void* try_map_near(std::size_t size_bytes, int node) {
    void* const memory =
        mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      return nullptr;
    }
    prefer_node(memory, size_bytes, node);
    // Registering locks page by page, and direct I/O cuts its requests by them: fewer are faster.
    (void)madvise(memory, size_bytes, MADV_HUGEPAGE);
    // After a fork, the first write would give one of the two processes other pages than the device
    // has. The child cannot use the device anyway.
    (void)madvise(memory, size_bytes, MADV_DONTFORK);
    try {
      std::scoped_lock const lock{mutex_};
      mapped_.insert(memory);
    } catch (...) {
      (void)munmap(memory, size_bytes);
      throw;
    }
    cudaError_t const status = cudaHostRegister(memory, size_bytes, cudaHostRegisterPortable);
    if (status != cudaSuccess) {
      cuda_forgive(status);
      (void)forget(memory);
      (void)munmap(memory, size_bytes);
      return nullptr;
    }
    return memory;
  }

  /// Names the node before the pages exist: registering is what makes them.
  static void prefer_node(void* memory, std::size_t size_bytes, int node) noexcept {
    constexpr std::size_t word_bits = sizeof(unsigned long) * CHAR_BIT;
    std::array<unsigned long, 1024 / word_bits> nodes{};  // as many as Linux can be built for
    auto const wanted = static_cast<std::size_t>(node);
    if (wanted >= nodes.size() * word_bits) {
      return;
    }
    nodes[wanted / word_bits] = 1UL << (wanted % word_bits);
    // The kernel reads one bit less than it is told.
    (void)syscall(SYS_mbind,
                  memory,
                  size_bytes,
                  MPOL_PREFERRED,
                  nodes.data(),
                  nodes.size() * word_bits + 1,
                  0);
  }

  /// True if `memory` was mapped here; it is not any more.
  [[nodiscard]] bool forget(void* memory) noexcept {
    std::scoped_lock const lock{mutex_};
    return mapped_.erase(memory) == 1;
  }

  std::mutex mutex_;  // never held across a call of CUDA or of the kernel
  std::unordered_set<void*> mapped_;
#else
  [[nodiscard]] static void* try_map_near(std::size_t /*size_bytes*/, int /*node*/) noexcept {
    return nullptr;
  }
#endif
};

}  // namespace spillway::detail
