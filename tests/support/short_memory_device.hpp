// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>

#include <cstddef>
#include <new>
#include <span>

#include <support/counted_allocations.hpp>

namespace support {

/// A simulated device whose calls need memory once, at their beginning. So a call that fails for
/// lack of memory has had no effect, and what it enqueued is not half noted by the checks of the
/// simulation, which allocate in many places, some of them noexcept.
template <class Device>
class ShortMemoryDevice : public Device {
 public:
  using typename Device::event_type;
  using typename Device::physical_type;
  using typename Device::stream_type;

  using Device::Device;

  void* try_reserve(std::size_t bytes) {
    return whole([&] { return Device::try_reserve(bytes); });
  }
  void release(void* p, std::size_t bytes) noexcept {
    AmpleMemory const ample;
    Device::release(p, bytes);
  }
  void* try_allocate_pinned(std::size_t bytes, int numa_node) {
    return whole([&] { return Device::try_allocate_pinned(bytes, numa_node); });
  }
  void free_pinned(void* p, std::size_t bytes) noexcept {
    AmpleMemory const ample;
    Device::free_pinned(p, bytes);
  }
  void
  copy(void* to, void const* from, std::size_t bytes, spillway::CopyKind kind, stream_type stream) {
    whole([&] { Device::copy(to, from, bytes, kind, stream); });
  }
  void copy_batch(std::span<void* const> to,
                  std::span<void const* const> from,
                  std::span<std::size_t const> bytes,
                  spillway::CopyKind kind,
                  stream_type stream) {
    whole([&] { Device::copy_batch(to, from, bytes, kind, stream); });
  }
  void fill(void* p, unsigned char byte, std::size_t bytes, stream_type stream) {
    whole([&] { Device::fill(p, byte, bytes, stream); });
  }
  void launch_host(stream_type stream, spillway::HostFunction function, void* argument) {
    whole([&] { Device::launch_host(stream, function, argument); });
  }
  stream_type create_stream() {
    return whole([&] { return Device::create_stream(); });
  }
  void destroy_stream(stream_type stream) noexcept {
    AmpleMemory const ample;
    Device::destroy_stream(stream);
  }
  event_type create_event() {
    return whole([&] { return Device::create_event(); });
  }
  void destroy_event(event_type event) noexcept {
    AmpleMemory const ample;
    Device::destroy_event(event);
  }
  void record(event_type event, stream_type stream) {
    whole([&] { Device::record(event, stream); });
  }
  void wait(stream_type stream, event_type event) {
    whole([&] { Device::wait(stream, event); });
  }
  bool is_complete(event_type event) {
    return whole([&] { return Device::is_complete(event); });
  }
  void synchronize(event_type event) {
    whole([&] { Device::synchronize(event); });
  }
  void synchronize(stream_type stream) {
    whole([&] { Device::synchronize(stream); });
  }

  void* reserve_address(std::size_t bytes) {
    return whole([&] { return Device::reserve_address(bytes); });
  }
  void free_address(void* p, std::size_t bytes) noexcept {
    AmpleMemory const ample;
    Device::free_address(p, bytes);
  }
  auto try_create_physical(std::size_t bytes) {
    return whole([&] { return Device::try_create_physical(bytes); });
  }
  void release_physical(physical_type physical) noexcept {
    AmpleMemory const ample;
    Device::release_physical(physical);
  }
  bool try_map(void* p, std::size_t bytes, std::span<physical_type const> pieces) {
    return whole([&] { return Device::try_map(p, bytes, pieces); });
  }
  void unmap(void* p, std::size_t bytes) noexcept {
    AmpleMemory const ample;
    Device::unmap(p, bytes);
  }

 private:
  template <class Call>
  static decltype(auto) whole(Call const& call) {
    if (!may_allocate()) {
      throw std::bad_alloc{};
    }
    AmpleMemory const ample;
    return call();
  }
};

}  // namespace support
