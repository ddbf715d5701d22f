// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/cuda/cuda_context.hpp>

#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <span>

namespace spillway::detail {

/// The virtual memory management of the CUDA driver for one device. `CudaApi` owns one.
///
/// Threads  thread-safe. The driver's calls take effect at once; unmapping may wait for the device.
class CudaVirtualMemory {
 public:
  using physical_type = CUmemGenericAllocationHandle;

  /// `context` is not owned and must outlive this object.
  /// @throws CudaError
  explicit CudaVirtualMemory(CudaContext const& context) : context_{&context} {
    constexpr unsigned cuda_10_2 = 10020;
    auto const get_attribute =
        cuda_entry_point<PFN_cuDeviceGetAttribute_v2000>("cuDeviceGetAttribute", 2000);
    int is_supported = 0;
    cuda_check(cuda_status(get_attribute(
        &is_supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, context.device())));
    if (is_supported == 0) {
      return;
    }
    reserve_ = cuda_entry_point<PFN_cuMemAddressReserve_v10020>("cuMemAddressReserve", cuda_10_2);
    free_ = cuda_entry_point<PFN_cuMemAddressFree_v10020>("cuMemAddressFree", cuda_10_2);
    create_ = cuda_entry_point<PFN_cuMemCreate_v10020>("cuMemCreate", cuda_10_2);
    release_ = cuda_entry_point<PFN_cuMemRelease_v10020>("cuMemRelease", cuda_10_2);
    map_ = cuda_entry_point<PFN_cuMemMap_v10020>("cuMemMap", cuda_10_2);
    unmap_ = cuda_entry_point<PFN_cuMemUnmap_v10020>("cuMemUnmap", cuda_10_2);
    set_access_ = cuda_entry_point<PFN_cuMemSetAccess_v10020>("cuMemSetAccess", cuda_10_2);
    auto const get_granularity = cuda_entry_point<PFN_cuMemGetAllocationGranularity_v10020>(
        "cuMemGetAllocationGranularity", cuda_10_2);
    CudaScope const scope{context};
    CUmemAllocationProp const properties = memory_here();
    cuda_check(cuda_status(
        get_granularity(&granularity_bytes_, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM)));
    is_supported_ = true;
  }

  /// False if the device or its driver has no virtual memory; `reserve_address`, `map` and
  /// `try_create_physical` then throw.
  [[nodiscard]] bool is_supported() const noexcept { return is_supported_; }

  [[nodiscard]] std::size_t granularity_bytes() const noexcept { return granularity_bytes_; }

  [[nodiscard]] void* reserve_address(std::size_t size_bytes) {
    require_support();
    CudaScope const scope{*context_};
    CUdeviceptr address = 0;
    cuda_check(cuda_status(reserve_(&address, size_bytes, granularity_bytes_, 0, 0)));
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver writes addresses as integers
    return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
  }

  void free_address(void* address, std::size_t size_bytes) noexcept {
    if (is_supported()) {
      CudaScope const scope{*context_, std::nothrow};
      (void)free_(value_of(address), size_bytes);
    }
  }

  [[nodiscard]] std::optional<physical_type> try_create_physical(std::size_t size_bytes) {
    require_support();
    CudaScope const scope{*context_};
    CUmemAllocationProp const properties = memory_here();
    physical_type memory{};
    CUresult const result = create_(&memory, size_bytes, &properties, 0);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
      return std::nullopt;
    }
    cuda_check(cuda_status(result));
    return memory;
  }

  void release_physical(physical_type memory) noexcept {
    if (is_supported()) {
      CudaScope const scope{*context_, std::nothrow};
      (void)release_(memory);
    }
  }

  /// Maps each piece with one call, then makes all of them accessible with one call. That one is
  /// slow, since it writes the device's page tables.
  void map(void* address, std::size_t size_bytes, std::span<physical_type const> pieces) {
    require_support();
    CudaScope const scope{*context_};
    CUdeviceptr const first = value_of(address);
    std::size_t mapped_bytes = 0;
    CUresult result = CUDA_SUCCESS;
    for (physical_type const piece : pieces) {
      result = map_(first + mapped_bytes, size_bytes, 0, piece, 0);
      if (result != CUDA_SUCCESS) {
        break;
      }
      mapped_bytes += size_bytes;
    }
    if (result == CUDA_SUCCESS && mapped_bytes != 0) {
      CUmemAccessDesc access{};
      access.location = memory_here().location;
      access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      result = set_access_(first, mapped_bytes, &access, 1);
    }
    if (result != CUDA_SUCCESS) {
      if (mapped_bytes != 0) {
        (void)unmap_(first, mapped_bytes);
      }
      cuda_check(cuda_status(result));
    }
  }

  void unmap(void* address, std::size_t size_bytes) noexcept {
    if (is_supported()) {
      CudaScope const scope{*context_, std::nothrow};
      (void)unmap_(value_of(address), size_bytes);
    }
  }

 private:
  void require_support() const {
    if (!is_supported()) {
      throw DeviceError{Text{"CUDA device "} + static_cast<unsigned>(context_->ordinal()) +
                        " or its driver has no virtual memory management"};
    }
  }

  [[nodiscard]] CUmemAllocationProp memory_here() const noexcept {
    CUmemAllocationProp properties{};
    // the driver's name for memory that does not move
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = context_->device();
    return properties;
  }

  [[nodiscard]] static CUdeviceptr value_of(void* address) noexcept {
    return static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(address));
  }

  CudaContext const* context_;
  PFN_cuMemAddressReserve_v10020 reserve_ = nullptr;
  PFN_cuMemAddressFree_v10020 free_ = nullptr;
  PFN_cuMemCreate_v10020 create_ = nullptr;
  PFN_cuMemRelease_v10020 release_ = nullptr;
  PFN_cuMemMap_v10020 map_ = nullptr;
  PFN_cuMemUnmap_v10020 unmap_ = nullptr;
  PFN_cuMemSetAccess_v10020 set_access_ = nullptr;
  // the value of every device so far; the constructor asks the driver
  std::size_t granularity_bytes_ = 2_MiB;
  bool is_supported_ = false;
};

}  // namespace spillway::detail
