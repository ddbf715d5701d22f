// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <support/fake_cuda_call.hpp>

using namespace fake_cuda;

namespace {

CUresult device_get(CUdevice* device, int ordinal) {
  return driver_call("cuDeviceGet", [&] {
    require(ordinal >= 0 && ordinal < fake->options.devices, cudaErrorInvalidDevice);
    *device = ordinal;
  });
}
CUresult device_get_attribute(int* value, CUdevice_attribute attribute, CUdevice /*device*/) {
  return driver_call("cuDeviceGetAttribute", [&] {
    bool const is_rdma = attribute == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
    require(is_rdma || attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
    *value = int{is_rdma ? fake->options.has_rdma : fake->options.has_virtual_memory};
  });
}
CUresult primary_retain(CUcontext* context, CUdevice device) {
  return driver_call("cuDevicePrimaryCtxRetain", [&] {
    Fake::Device& retained = fake->devices.at(static_cast<std::size_t>(device));
    retained.is_set_up = true;
    ++retained.references;
    *context = context_of(retained);
  });
}
CUresult primary_release(CUdevice device) {
  return driver_call("cuDevicePrimaryCtxRelease",
                     [&] { --fake->devices.at(static_cast<std::size_t>(device)).references; });
}
CUresult get_current(CUcontext* context) {
  return driver_call("cuCtxGetCurrent",
                     [&] { *context = contexts.empty() ? nullptr : contexts.back(); });
}
CUresult push_current(CUcontext context) {
  return driver_call("cuCtxPushCurrent", [&] { contexts.push_back(context); });
}
CUresult pop_current(CUcontext* context) {
  return driver_call("cuCtxPopCurrent", [&] {
    require(!contexts.empty());
    *context = contexts.back();
    contexts.pop_back();
  });
}
CUresult get_granularity(std::size_t* bytes,
                         CUmemAllocationProp const* properties,
                         CUmemAllocationGranularity_flags /*flags*/) {
  return driver_call("cuMemGetAllocationGranularity", [&] {
    require(properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE);
    *bytes = fake->devices[0].sim->granularity_bytes();
  });
}
CUresult address_reserve(CUdeviceptr* address,
                         std::size_t bytes,
                         std::size_t alignment,
                         CUdeviceptr hint,
                         unsigned long long flags) {
  return driver_call("cuMemAddressReserve", [&] {
    require_safe();
    require(hint == 0 && flags == 0 && bytes % alignment == 0);
    void* const p = fake->current().sim->reserve_address(bytes);
    fake->reserved_addresses[value_of(p)] = bytes;
    *address = static_cast<CUdeviceptr>(value_of(p));
  });
}
CUresult address_free(CUdeviceptr address, std::size_t bytes) {
  return driver_call("cuMemAddressFree", [&] {
    require_safe();
    auto const found = fake->reserved_addresses.find(address);
    require(found != fake->reserved_addresses.end() && found->second == bytes);
    fake->reserved_addresses.erase(found);
    fake->current().sim->free_address(pointer_of(address), bytes);
  });
}
CUresult mem_create(CUmemGenericAllocationHandle* handle,
                    std::size_t bytes,
                    CUmemAllocationProp const* properties,
                    unsigned long long flags) {
  return driver_call("cuMemCreate", [&] {
    require_safe();
    require(flags == 0 && properties->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
            properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE);
    Fake::Device& device = fake->devices.at(static_cast<std::size_t>(properties->location.id));
    require(bytes % device.sim->granularity_bytes() == 0);
    auto const made = device.sim->try_create_physical(bytes);
    require(made.has_value(), cudaErrorMemoryAllocation);
    *handle = fake->next_physical++;
    bool const is_rdma_capable = properties->allocFlags.gpuDirectRDMACapable != 0;
    fake->physical[*handle] = {&device, *made, bytes, is_rdma_capable};
  });
}
CUresult mem_release(CUmemGenericAllocationHandle handle) {
  return driver_call("cuMemRelease", [&] {
    require_safe();
    auto const found = fake->physical.find(handle);
    require(found != fake->physical.end());
    found->second.device->sim->release_physical(found->second.sim);
    fake->physical.erase(found);
  });
}
CUresult mem_map(CUdeviceptr address,
                 std::size_t bytes,
                 std::size_t offset,
                 CUmemGenericAllocationHandle handle,
                 unsigned long long flags) {
  return driver_call("cuMemMap", [&] {
    require_safe();
    auto const found = fake->physical.find(handle);
    require(found != fake->physical.end() && found->second.bytes == bytes && offset == 0 &&
            flags == 0);
    require(
        found->second.device->sim->try_map(pointer_of(address), bytes, {&found->second.sim, 1}));
    fake->mapped_without_access[address] = {bytes, Fake::RangeKind::mapped, found->second.device};
  });
}
CUresult mem_set_access(CUdeviceptr address,
                        std::size_t bytes,
                        CUmemAccessDesc const* access,
                        std::size_t count) {
  return driver_call("cuMemSetAccess", [&] {
    require_safe();
    // Whole mappings that lie side by side in one reservation.
    auto const reserved = fake->reserved_addresses.upper_bound(address);
    require(reserved == fake->reserved_addresses.end() || reserved->first >= address + bytes);
    std::vector<std::pair<std::uintptr_t, Fake::Range*>> found;
    std::uintptr_t end = address;
    for (auto* const mapped : {&fake->mapped_without_access, &fake->ranges}) {
      for (auto at = mapped->find(end);
           at != mapped->end() && at->first == end && end < address + bytes;
           ++at) {
        require(at->second.kind == Fake::RangeKind::mapped);
        found.emplace_back(at->first, &at->second);
        end += at->second.bytes;
      }
    }
    require(bytes != 0 && end == address + bytes && count != 0);
    for (CUmemAccessDesc const& one : std::span{access, count}) {
      require(one.flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE &&
              one.location.type == CU_MEM_LOCATION_TYPE_DEVICE);
      Fake::Device const& device = fake->devices.at(static_cast<std::size_t>(one.location.id));
      for (auto const& [start, range] : found) {
        require(range->device == &device || fake->options.has_peers);
        range->accessors.insert(&device);
      }
    }
    for (auto const& [start, range] : found) {
      if (auto made = fake->mapped_without_access.extract(start)) {
        fake->ranges.insert(std::move(made));
      }
    }
  });
}
CUresult mem_unmap(CUdeviceptr address, std::size_t bytes) {
  return driver_call("cuMemUnmap", [&] {
    require_safe();
    // Whole mappings only, but any number of them.
    std::vector<std::pair<std::map<std::uintptr_t, Fake::Range>*, std::uintptr_t>> found;
    std::size_t covered = 0;
    for (auto* const mapped : {&fake->ranges, &fake->mapped_without_access}) {
      for (auto at = mapped->lower_bound(address);
           at != mapped->end() && at->first + at->second.bytes <= address + bytes;
           ++at) {
        found.emplace_back(mapped, at->first);
        covered += at->second.bytes;
      }
    }
    require(bytes != 0 && covered == bytes);
    for (auto const& [mapped, start] : found) {
      Fake::Range const& range = mapped->at(start);
      range.device->sim->unmap(reinterpret_cast<void*>(start), range.bytes);
      mapped->erase(start);
    }
  });
}

CUresult event_query(CUevent event) {
  return driver_call("cuEventQuery", [&] {
    require_safe();
    require(fake->has_passed(event), cudaErrorNotReady);
  });
}

/// The stream's thread polls the word, as a GPU does.
CUresult stream_wait_value(CUstream handle, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  return driver_call("cuStreamWaitValue32", [&] {
    require(fake->options.has_stream_waits, cudaErrorNotSupported);
    void* const word = pointer_of(address);
    require(flags == CU_STREAM_WAIT_VALUE_GEQ && address % sizeof value == 0 &&
            fake->contains(word, sizeof value, false));
    Fake::Stream& stream = fake->stream_of(handle);
    require(stream.capture == nullptr, cudaErrorStreamCaptureUnsupported);
    spillway::detail::launch_callable(*stream.device->sim, stream.sim, [word, value]() noexcept {
      std::atomic_ref<std::uint32_t> const now{*static_cast<std::uint32_t*>(word)};
      while (static_cast<std::int32_t>(now.load() - value) < 0) {
        std::this_thread::yield();
      }
    });
  });
}

struct EntryPoint {
  char const* name;
  unsigned since;
  void* function;
};
template <class Function>
EntryPoint entry(char const* name, unsigned since, Function function) {
  return {name, since, reinterpret_cast<void*>(function)};
}

}  // namespace

void* fake_cuda::driver_function(char const* name, unsigned version) {
  EntryPoint const known[] = {
      entry("cuDeviceGet", 2000, device_get),
      entry("cuDeviceGetAttribute", 2000, device_get_attribute),
      entry("cuDevicePrimaryCtxRetain", 7000, primary_retain),
      entry("cuDevicePrimaryCtxRelease", 11000, primary_release),
      entry("cuCtxGetCurrent", 4000, get_current),
      entry("cuCtxPushCurrent", 4000, push_current),
      entry("cuCtxPopCurrent", 4000, pop_current),
      entry("cuEventQuery", 2000, event_query),
      entry("cuMemGetAllocationGranularity", 10020, get_granularity),
      entry("cuMemAddressReserve", 10020, address_reserve),
      entry("cuMemAddressFree", 10020, address_free),
      entry("cuMemCreate", 10020, mem_create),
      entry("cuMemRelease", 10020, mem_release),
      entry("cuMemMap", 10020, mem_map),
      entry("cuMemSetAccess", 10020, mem_set_access),
      entry("cuMemUnmap", 10020, mem_unmap),
      entry("cuStreamWaitValue32", 11070, stream_wait_value),
  };
  for (EntryPoint const& point : known) {
    if (std::strcmp(point.name, name) == 0 && version >= point.since) {
      return point.function;
    }
  }
  return nullptr;
}
