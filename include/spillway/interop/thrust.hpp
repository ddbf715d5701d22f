// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/interop/leased_memory.hpp>

#include <thrust/device_ptr.h>
#include <thrust/mr/allocator.h>
#include <thrust/mr/memory_resource.h>

#include <cstddef>
#include <optional>

namespace spillway {

/// A memory resource for Thrust: its vectors, and the scratch memory of its algorithms.
///
/// For scratch memory name a stream, and run the algorithm on that stream:
/// ```
/// spillway::ThrustResource resource{memory, stream};
/// thrust::sort(thrust::cuda::par_nosync(&resource).on(stream), first, last);
/// ```
/// For vectors name none: a vector fills and copies its elements on Thrust's default stream, and
/// the resource then gives it memory whose earlier uses have all finished.
/// ```
/// spillway::ThrustResource resource{memory};
/// thrust::device_vector<float, spillway::ThrustAllocator<float, Allocator>> v(n, &resource);
/// ```
/// Memory allocated here stays on the device and in its place until it is deallocated; it is not
/// swappable.
///
/// Threads  thread-safe.
/// Streams  with a stream, its memory is used by work on it or on streams joined back into it, and
///          nothing waits. Without one, allocating may wait on the host, and all work that uses the
///          memory has finished before it is deallocated.
/// Address  fixed from `allocate` to `deallocate`.
template <LeasingAllocator Allocator, class Pointer = thrust::device_ptr<void>>
class ThrustResource final : public thrust::mr::memory_resource<Pointer> {
 public:
  using stream_type = typename Allocator::stream_type;

  /// `memory` is not owned and must outlive the resource and everything allocated from it.
  explicit ThrustResource(LeasedMemory<Allocator>& memory) : memory_{&memory} {}
  ThrustResource(LeasedMemory<Allocator>& memory, stream_type stream)
      : memory_{&memory}, stream_{stream} {}

  /// @throws OutOfDeviceMemory, which is a std::bad_alloc; DeviceError
  [[nodiscard]] Pointer do_allocate(std::size_t bytes, std::size_t alignment) override {
    void* const memory = stream_ ? memory_->allocate(bytes, alignment, *stream_)
                                 : memory_->allocate_sync(bytes, alignment);
    return static_cast<Pointer>(memory);
  }

  /// @throws ContractViolation naming the address if it is not allocated; DeviceError
  void do_deallocate(Pointer memory, std::size_t /*bytes*/, std::size_t /*alignment*/) override {
    if (stream_) {
      memory_->deallocate(thrust::raw_pointer_cast(memory), *stream_);
    } else {
      memory_->deallocate_sync(thrust::raw_pointer_cast(memory));
    }
  }

 private:
  LeasedMemory<Allocator>* memory_;
  std::optional<stream_type> stream_;
};

/// An allocator for `thrust::device_vector`, made from a pointer to a `ThrustResource`.
template <class T, LeasingAllocator Allocator>
using ThrustAllocator = thrust::mr::allocator<T, ThrustResource<Allocator>>;

}  // namespace spillway
