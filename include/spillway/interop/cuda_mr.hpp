// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>
#include <spillway/interop/leased_memory.hpp>

#include <cuda/memory_resource>
#include <cuda/stream_ref>

#include <cstddef>

namespace spillway {

/// A memory resource for code written against `cuda::mr`: RMM, cuDF, CCCL's own containers.
///
/// Models the resource concept in both its spellings: that of CCCL 3.0, which CUDA 13.0 ships
/// behind `LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE` (`allocate_async`, and `allocate`
/// without a stream), and that of CCCL 3.1 and later (`allocate` with a stream, `allocate_sync`
/// without).
///
/// Memory allocated here stays on the device and in its place until it is deallocated; it is not
/// swappable. Use buffers and tensors for what should be able to leave.
///
/// Shape    a pointer; copies share the memory they were made from and compare equal.
/// Threads  thread-safe.
/// Streams  as `LeasedMemory`: with a stream nothing waits. Code for `cuda::mr` retires no streams,
///          so the owner of a stream must do that (`retire_stream`) before it is destroyed.
/// Address  fixed from `allocate` to `deallocate`.
///
/// @tparam StreamRef  what names a stream; `get()` gives the allocator's `stream_type`
template <LeasingAllocator Allocator, class StreamRef = cuda::stream_ref>
class CudaMemoryResource {
 public:
  /// `memory` is not owned and must outlive every copy.
  explicit CudaMemoryResource(LeasedMemory<Allocator>& memory) noexcept : memory_{&memory} {}

  /// @throws OutOfDeviceMemory, which is a std::bad_alloc; DeviceError
  /// @stream the memory may be used by work on `stream` from now on; does not wait
  [[nodiscard]] void*
  allocate(StreamRef stream, std::size_t bytes, std::size_t alignment = granule_bytes) {
    return memory_->allocate(bytes, alignment, stream.get());
  }
  /// @throws ContractViolation naming the address if it is not allocated; DeviceError
  /// @stream the memory is reused after the work that is on `stream` now; does not wait
  void deallocate(StreamRef stream,
                  void* memory,
                  std::size_t /*bytes*/,
                  std::size_t /*alignment*/ = granule_bytes) {
    memory_->deallocate(memory, stream.get());
  }

  /// As `allocate`, but work on any stream may use the memory at once. May wait on the host for
  /// earlier uses of the memory.
  [[nodiscard]] void* allocate_sync(std::size_t bytes, std::size_t alignment = granule_bytes) {
    return memory_->allocate_sync(bytes, alignment);
  }
  /// The caller must have waited for all work that uses the memory.
  void
  deallocate_sync(void* memory, std::size_t /*bytes*/, std::size_t /*alignment*/ = granule_bytes) {
    memory_->deallocate_sync(memory);
  }

  /// The same functions under their names in CCCL 3.0.
  [[nodiscard]] void* allocate_async(std::size_t bytes, std::size_t alignment, StreamRef stream) {
    return allocate(stream, bytes, alignment);
  }
  [[nodiscard]] void* allocate_async(std::size_t bytes, StreamRef stream) {
    return allocate(stream, bytes);
  }
  void deallocate_async(void* memory, std::size_t bytes, std::size_t alignment, StreamRef stream) {
    deallocate(stream, memory, bytes, alignment);
  }
  void deallocate_async(void* memory, std::size_t bytes, StreamRef stream) {
    deallocate(stream, memory, bytes);
  }
  [[nodiscard]] void* allocate(std::size_t bytes, std::size_t alignment = granule_bytes) {
    return allocate_sync(bytes, alignment);
  }
  void deallocate(void* memory, std::size_t bytes, std::size_t alignment = granule_bytes) {
    deallocate_sync(memory, bytes, alignment);
  }

  [[nodiscard]] LeasedMemory<Allocator>& memory() const noexcept { return *memory_; }

  friend bool operator==(CudaMemoryResource lhs, CudaMemoryResource rhs) noexcept {
    return lhs.memory_ == rhs.memory_;
  }

#if CCCL_VERSION >= 3001000 || defined(LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE)
  friend constexpr void get_property(CudaMemoryResource const& /*resource*/,
                                     cuda::mr::device_accessible /*property*/) noexcept {}
#endif

 private:
  LeasedMemory<Allocator>* memory_;
};

}  // namespace spillway
