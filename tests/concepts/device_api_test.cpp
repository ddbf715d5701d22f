// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/device/sim/sim_api.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

// What is no device: each of these takes one thing away from, or gives one thing wrong to, a device
// that would do.

namespace {

using namespace spillway;

struct Device {
  using stream_type = int;
  using event_type = void*;
  using physical_type = int;

  void* try_reserve(std::size_t);
  void release(void*, std::size_t) noexcept;
  void* try_allocate_pinned(std::size_t, int);
  void free_pinned(void*, std::size_t) noexcept;
  void copy(void*, void const*, std::size_t, CopyKind, stream_type);
  void fill(void*, unsigned char, std::size_t, stream_type);
  void launch_host(stream_type, HostFunction, void*);
  stream_type create_stream();
  void destroy_stream(stream_type) noexcept;
  event_type create_event();
  void destroy_event(event_type) noexcept;
  void record(event_type, stream_type);
  void wait(stream_type, event_type);
  bool is_complete(event_type);
  void synchronize(event_type);
  void synchronize(stream_type);
  MemoryInfo memory_info() const;
  int numa_node() const noexcept;
  std::uint64_t clock_ns() const noexcept;

  std::size_t granularity_bytes() const noexcept;
  void* reserve_address(std::size_t);
  void free_address(void*, std::size_t) noexcept;
  std::optional<physical_type> try_create_physical(std::size_t);
  void release_physical(physical_type) noexcept;
  void map(void*, std::size_t, std::span<physical_type const>);
  void unmap(void*, std::size_t) noexcept;
};
static_assert(DeviceApi<Device> && VirtualMemoryApi<Device>);

struct Unhashable {
  bool operator==(Unhashable const&) const = default;
};
struct Irregular {
  int value = 0;
};

struct StreamWithoutHash : Device {
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

struct EventWithoutEquality : Device {
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

struct ReserveSaysYesOrNo : Device {
  bool try_reserve(std::size_t);
};
static_assert(!DeviceApi<ReserveSaysYesOrNo>);

struct ReleaseThrows : Device {
  void release(void*, std::size_t);
};
static_assert(!DeviceApi<ReleaseThrows>);

struct PinnedWithoutNode : Device {
  void* try_allocate_pinned(std::size_t);
};
static_assert(!DeviceApi<PinnedWithoutNode>);

struct FreePinnedThrows : Device {
  void free_pinned(void*, std::size_t);
};
static_assert(!DeviceApi<FreePinnedThrows>);

struct CopyFromMutable : Device {
  void copy(void*, void*, std::size_t, CopyKind, stream_type);
};
static_assert(!DeviceApi<CopyFromMutable>);

struct FillReturnsSomething : Device {
  int fill(void*, unsigned char, std::size_t, stream_type);
};
static_assert(!DeviceApi<FillReturnsSomething>);

struct LaunchWithoutArgument : Device {
  void launch_host(stream_type, HostFunction);
};
static_assert(!DeviceApi<LaunchWithoutArgument>);

struct DestroyStreamThrows : Device {
  void destroy_stream(stream_type);
};
static_assert(!DeviceApi<DestroyStreamThrows>);

struct DestroyEventThrows : Device {
  void destroy_event(event_type);
};
static_assert(!DeviceApi<DestroyEventThrows>);

struct RecordTheOtherWayRound : Device {
  void record(stream_type, event_type);
};
static_assert(!DeviceApi<RecordTheOtherWayRound>);

struct WaitTheOtherWayRound : Device {
  void wait(event_type, stream_type);
};
static_assert(!DeviceApi<WaitTheOtherWayRound>);

struct CompletionIsACode : Device {
  int is_complete(event_type);
};
static_assert(!DeviceApi<CompletionIsACode>);

struct NoStreamSynchronization : Device {
  void synchronize(event_type);
};
static_assert(!DeviceApi<NoStreamSynchronization>);

struct MemoryInfoChangesTheDevice : Device {
  MemoryInfo memory_info();
};
static_assert(!DeviceApi<MemoryInfoChangesTheDevice>);

struct NodeMayThrow : Device {
  int numa_node() const;
};
static_assert(!DeviceApi<NodeMayThrow>);

struct ClockIsSigned : Device {
  std::int64_t clock_ns() const noexcept;
};
static_assert(!DeviceApi<ClockIsSigned>);

struct GranularityMayThrow : Device {
  std::size_t granularity_bytes() const;
};
static_assert(DeviceApi<GranularityMayThrow> && !VirtualMemoryApi<GranularityMayThrow>);

struct FreeAddressThrows : Device {
  void free_address(void*, std::size_t);
};
static_assert(!VirtualMemoryApi<FreeAddressThrows>);

struct PhysicalIsNotOptional : Device {
  physical_type try_create_physical(std::size_t);
};
static_assert(!VirtualMemoryApi<PhysicalIsNotOptional>);

struct UnmapThrows : Device {
  void unmap(void*, std::size_t);
};
static_assert(!VirtualMemoryApi<UnmapThrows>);

struct MapsOnePiece : Device {
  void map(void*, std::size_t, physical_type);
};
static_assert(!VirtualMemoryApi<MapsOnePiece>);

}  // namespace
