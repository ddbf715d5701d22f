// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/device/host/host_paged_api.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>

#include <support/archetypes/policy_archetypes.hpp>
#include <support/concept_checks.hpp>

// Types that are no device: each lacks one member of a complete device, or has one with a wrong
// signature.

namespace {

using namespace spillway;
using spillway::test::DeviceArchetype;
using StreamType = DeviceArchetype::stream_type;
using Event = DeviceArchetype::event_type;

static_assert(DeviceApi<DeviceArchetype>);
static_assert(!BatchCopyApi<DeviceArchetype> && !VirtualMemoryApi<DeviceArchetype>);
static_assert(VirtualMemoryApi<HostPagedApi>);

struct Unhashable {
  bool operator==(Unhashable const&) const = default;
};
struct Irregular {
  int value = 0;
};

struct StreamWithoutHash : DeviceArchetype {
  using stream_type = Unhashable;
  stream_type create_stream();
  void copy(void*, void const*, std::size_t, CopyKind, stream_type);
  void fill(void*, unsigned char, std::size_t, stream_type);
  void launch_host(stream_type, HostFunction, void*);
  void destroy_stream(stream_type) noexcept;
  void record(event_type, stream_type);
  void wait(stream_type, event_type);
  void synchronize(event_type);
  void synchronize(stream_type);
};
static_assert(!DeviceApi<StreamWithoutHash>);

struct EventWithoutEquality : DeviceArchetype {
  using event_type = Irregular;
  event_type create_event();
  void destroy_event(event_type) noexcept;
  void record(event_type, stream_type);
  void wait(stream_type, event_type);
  bool is_complete(event_type);
  void synchronize(event_type);
  void synchronize(stream_type);
};
static_assert(!DeviceApi<EventWithoutEquality>);

// One `synchronize` would get streams and events, and could not tell which.
struct EventsAreStreams : DeviceArchetype {
  using event_type = stream_type;
  event_type create_event();
  void destroy_event(event_type) noexcept;
  void record(event_type, stream_type);
  void wait(stream_type, event_type);
  bool is_complete(event_type);
  void synchronize(stream_type);
};
static_assert(!DeviceApi<EventsAreStreams>);

}  // namespace

TEST_SUITE("device_api") {
  TEST_CASE("DeviceApi: the concept requires each member") {
    CHECK_NEEDS(DeviceApi, DeviceArchetype, try_reserve);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, release);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, try_allocate_pinned);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, free_pinned);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, copy);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, fill);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, launch_host);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, create_stream);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, destroy_stream);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, create_event);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, destroy_event);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, record);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, wait);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, is_complete);
    CHECK_REFUSES(DeviceApi, DeviceArchetype, void synchronize(DeviceArchetype::event_type));
    CHECK_REFUSES(DeviceApi, DeviceArchetype, void synchronize(DeviceArchetype::stream_type));
    CHECK_NEEDS(DeviceApi, DeviceArchetype, memory_info);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, numa_node);
    CHECK_NEEDS(DeviceApi, DeviceArchetype, clock_ns);
    CHECK_REFUSES(DeviceApi, DeviceArchetype, void release(void*, std::size_t));  // may throw
  }

  TEST_CASE("VirtualMemoryApi: the concept requires each member") {
    CHECK_NEEDS(VirtualMemoryApi, HostPagedApi, granularity_bytes);
    CHECK_NEEDS(VirtualMemoryApi, HostPagedApi, reserve_address);
    CHECK_NEEDS(VirtualMemoryApi, HostPagedApi, free_address);
    CHECK_NEEDS(VirtualMemoryApi, HostPagedApi, try_create_physical);
    CHECK_NEEDS(VirtualMemoryApi, HostPagedApi, release_physical);
    CHECK_NEEDS(VirtualMemoryApi, HostPagedApi, try_map);
    CHECK_NEEDS(VirtualMemoryApi, HostPagedApi, unmap);
    CHECK_NEEDS(VirtualMemoryApi, HostPagedApi, copy);
  }

  TEST_CASE("DeviceApi: a member with a wrong signature is refused") {
    CHECK_REFUSES(DeviceApi, DeviceArchetype, bool try_reserve(std::size_t));
    CHECK_REFUSES(DeviceApi, DeviceArchetype, void* try_allocate_pinned(std::size_t));
    CHECK_REFUSES(DeviceApi, DeviceArchetype, void free_pinned(void*, std::size_t));  // may throw
    CHECK_REFUSES(
        DeviceApi, DeviceArchetype, void copy(void*, void*, std::size_t, CopyKind, StreamType));
    CHECK_REFUSES(
        DeviceApi, DeviceArchetype, int fill(void*, unsigned char, std::size_t, StreamType));
    CHECK_REFUSES(DeviceApi, DeviceArchetype, void launch_host(StreamType, HostFunction));
    CHECK_REFUSES(DeviceApi, DeviceArchetype, void destroy_stream(StreamType));  // may throw
    CHECK_REFUSES(DeviceApi, DeviceArchetype, void destroy_event(Event));        // may throw
    CHECK_REFUSES(DeviceApi, DeviceArchetype, void record(StreamType, Event));
    CHECK_REFUSES(DeviceApi, DeviceArchetype, void wait(Event, StreamType));
    CHECK_REFUSES(DeviceApi, DeviceArchetype, int is_complete(Event));
    CHECK_REFUSES(DeviceApi, DeviceArchetype, MemoryInfo memory_info());  // not const
    CHECK_REFUSES(DeviceApi, DeviceArchetype, int numa_node() const);     // may throw
    CHECK_REFUSES(DeviceApi, DeviceArchetype, std::int64_t clock_ns() const noexcept);
  }

  TEST_CASE("VirtualMemoryApi: a member with a wrong signature is refused") {
    using Physical = HostPagedApi::physical_type;
    CHECK_REFUSES(VirtualMemoryApi, HostPagedApi, std::size_t granularity_bytes() const);
    CHECK_REFUSES(VirtualMemoryApi, HostPagedApi, void free_address(void*, std::size_t));
    CHECK_REFUSES(VirtualMemoryApi, HostPagedApi, Physical try_create_physical(std::size_t));
    CHECK_REFUSES(VirtualMemoryApi, HostPagedApi, void unmap(void*, std::size_t));
    CHECK_REFUSES(VirtualMemoryApi, HostPagedApi, bool try_map(void*, std::size_t, Physical));
  }
}
