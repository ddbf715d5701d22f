// SPDX-License-Identifier: Apache-2.0
// What PyTorch's own C++ code asks of the CUDA allocator and Python cannot, as plain functions.
#include <atomic>
#include <cstddef>

#include <c10/cuda/CUDACachingAllocator.h>

namespace {

using Entry = c10::CachingDeviceAllocator::TraceEntry;

std::atomic<std::size_t> seen[16]{};

}  // namespace

extern "C" {

/// As cuDNN's benchmark mode does before it tries algorithms that need much scratch memory.
std::size_t largest_piece(int device) {
  std::size_t bytes = 0;
  c10::cuda::CUDACachingAllocator::cacheInfo(static_cast<c10::DeviceIndex>(device), &bytes);
  return bytes;
}

void* base_of(void* p, std::size_t* bytes) {
  return c10::cuda::CUDACachingAllocator::getBaseAllocation(p, bytes);
}

/// As NCCL's registration of segments does.
void track() {
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(
      [](Entry const& entry) { ++seen[entry.action_]; });
}
std::size_t tracked_allocations() {
  return seen[Entry::ALLOC];
}
std::size_t tracked_frees() {
  return seen[Entry::FREE_COMPLETED];
}

}  // extern "C"
