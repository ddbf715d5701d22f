// SPDX-License-Identifier: Apache-2.0
// Calls of the CUDA allocator that only PyTorch's C++ code makes, as functions for Python.
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <type_traits>
#include <utility>

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/core/TensorImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>

namespace {

using Entry = c10::CachingDeviceAllocator::TraceEntry;

std::atomic<std::size_t> seen[16]{};
std::atomic<bool> are_there{true};

/// Older versions of PyTorch store the workspaces without their sizes.
template <class Map>
void add_workspace(Map& workspaces, c10::DataPtr memory, std::size_t bytes) {
  if constexpr (std::is_same_v<typename Map::mapped_type, c10::DataPtr>) {
    workspaces[{nullptr, nullptr}] = std::move(memory);
  } else {
    workspaces[{nullptr, nullptr}] = {std::move(memory), bytes};
  }
}

}  // namespace

extern "C" {

/// Allocates a workspace as the first matrix product of a thread on a stream does.
void keep_workspace(std::size_t bytes) {
  add_workspace(at::cuda::cublas_handle_stream_to_workspace().map,
                c10::cuda::CUDACachingAllocator::get()->allocate(bytes),
                bytes);
}

/// Asks for the largest free range, as cuDNN's benchmark mode does before it tries algorithms.
std::size_t largest_piece(int device) {
  std::size_t bytes = 0;
  c10::cuda::CUDACachingAllocator::cacheInfo(static_cast<c10::DeviceIndex>(device), &bytes);
  return bytes;
}

/// Enqueues `to[i] = a[i] + b[i]`, as a kernel does that is given addresses only. The arguments are
/// never freed, since a graph may contain the call.
void add_on_stream(
    float const* a, float const* b, float* to, std::size_t count, cudaStream_t stream) {
  struct Arguments {
    float const* a;
    float const* b;
    float* to;
    std::size_t count;
  };
  cudaLaunchHostFunc(
      stream,
      [](void* given) {
        auto const& [from, other, result, size] = *static_cast<Arguments const*>(given);
        for (std::size_t i = 0; i < size; ++i) {
          result[i] = from[i] + other[i];
        }
      },
      new Arguments{a, b, to, count});
}

/// Asks for an address as C++ code does that Python calls and that is no operation.
void* address_of(c10::TensorImpl* tensor) {
  return tensor->mutable_data();
}

bool refuses_address(c10::TensorImpl* tensor) {
  try {
    (void)address_of(tensor);
    return false;
  } catch (c10::Error const&) {
    return true;
  }
}

void* base_of(void* p, std::size_t* bytes) {
  return c10::cuda::CUDACachingAllocator::getBaseAllocation(p, bytes);
}

/// Attaches a trace tracker, as NCCL does to register segments.
void track() {
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](Entry const& entry) {
    ++seen[entry.action_];
    if (entry.action_ == Entry::SEGMENT_FREE) {
      cudaPointerAttributes at{};
      void const* const last = reinterpret_cast<char*>(entry.addr_) + entry.size_ - 1;
      are_there = are_there && cudaPointerGetAttributes(&at, last) == cudaSuccess &&
                  at.type == cudaMemoryTypeDevice;
    }
  });
}
std::size_t tracked_allocations() {
  return seen[Entry::ALLOC];
}
std::size_t tracked_frees() {
  return seen[Entry::FREE_COMPLETED];
}

std::size_t tracked_segment_frees() {
  return seen[Entry::SEGMENT_FREE];
}
/// Whether each segment was still mapped when the tracker was told that it is freed.
bool were_segments_there() {
  return are_there;
}

/// An allocator for a pool. As soon as it gets memory back, it writes it on its stream.
void* take(std::size_t bytes, int /*device*/, cudaStream_t /*stream*/) {
  void* p = nullptr;
  return cudaMalloc(&p, bytes) == cudaSuccess ? p : nullptr;
}
void clear_and_give_back(void* p, std::size_t bytes, int /*device*/, cudaStream_t stream) {
  cudaMemsetAsync(p, 0, bytes, stream);
}

}  // extern "C"
