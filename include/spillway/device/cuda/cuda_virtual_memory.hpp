// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/cuda/cuda_context.hpp>

#include <cuda.h>
#include <cudaTypedefs.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <span>
#include <vector>

namespace spillway::detail {

/// Ranges of addresses that are mapped. Those that touch are one range, unless a reservation of
/// addresses begins between them: one call of the driver must not span two reservations.
///
/// Cost     logarithmic in the number of ranges.
/// Threads  none: the caller serialises.
class MappedRanges {
 public:
  /// To be called when addresses are reserved from `first` on. @throws std::bad_alloc
  void begin_reservation(CUdeviceptr first) { reserved_.insert(first); }
  /// Precondition: nothing is mapped in the reservation that begins at `first`.
  void end_reservation(CUdeviceptr first) noexcept { reserved_.erase(first); }

  /// Precondition: nothing of the range is mapped. @throws std::bad_alloc; nothing has changed then
  void add(CUdeviceptr first, CUdeviceptr end) {
    auto const after = ranges_.lower_bound(first);
    auto const before = after == ranges_.begin() ? ranges_.end() : std::prev(after);
    bool const joins_before =
        before != ranges_.end() && before->second == first && !reserved_.contains(first);
    auto const at = joins_before ? before : ranges_.emplace_hint(after, first, end);
    at->second = end;
    if (after != ranges_.end() && after->first == end && !reserved_.contains(end)) {
      at->second = after->second;
      ranges_.erase(after);
    }
  }
  /// Does nothing unless all of the range is mapped. If there is no memory for the two ranges that
  /// remain of one, that one stays.
  void remove(CUdeviceptr first, CUdeviceptr end) noexcept {
    auto const after = ranges_.upper_bound(first);
    if (after == ranges_.begin() || std::prev(after)->second < end) {
      return;
    }
    auto const at = std::prev(after);
    try {
      if (at->second != end) {
        ranges_.emplace(end, at->second);
      }
    } catch (std::bad_alloc const&) {
      return;
    }
    at->second = first;
    if (at->first == first) {
      ranges_.erase(at);
    }
  }
  /// From the first address of each range to the one behind its last.
  [[nodiscard]] std::map<CUdeviceptr, CUdeviceptr> const& all() const noexcept { return ranges_; }

 private:
  std::map<CUdeviceptr, CUdeviceptr> ranges_;
  std::set<CUdeviceptr> reserved_;  // the first address of each reservation
};

/// The virtual memory management of the CUDA driver for one device. `CudaApi` owns one.
///
/// The memory can be registered for GPUDirect RDMA, as that of `cudaMalloc` can, if the driver
/// supports this for memory that is mapped.
///
/// Threads  thread-safe. The driver's calls take effect at once, also while a stream is being
///          captured; unmapping may wait for the device.
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
    cuda_driver_check(get_attribute(
        &is_supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, context.device()));
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
    CudaCaptureBystander const bystander;
    CUmemAllocationProp const properties = memory_here();
    cuda_driver_check(
        get_granularity(&granularity_bytes_, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    accessors_.push_back({properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
    int has_rdma = 0;  // a driver that does not know the question has none
    (void)get_attribute(
        &has_rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, context.device());
    is_rdma_capable_ = has_rdma != 0 && can_map_rdma();
    is_supported_ = true;
  }

  /// False if the device or its driver has no virtual memory; `reserve_address`, `try_map` and
  /// `try_create_physical` then throw.
  [[nodiscard]] bool is_supported() const noexcept { return is_supported_; }

  [[nodiscard]] std::size_t granularity_bytes() const noexcept { return granularity_bytes_; }

  [[nodiscard]] void* reserve_address(std::size_t size_bytes) {
    require_support();
    CudaScope const scope{*context_};
    CudaCaptureBystander const bystander;
    CUdeviceptr address = 0;
    std::scoped_lock const lock{mutex_};
    cuda_driver_check(reserve_(&address, size_bytes, granularity_bytes_, 0, 0));
    try {
      mapped_.begin_reservation(address);
    } catch (std::bad_alloc const&) {
      (void)free_(address, size_bytes);
      throw;
    }
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver writes addresses as integers
    return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
  }

  void free_address(void* address, std::size_t size_bytes) noexcept {
    if (is_supported()) {
      CudaScope const scope{*context_, std::nothrow};
      CudaCaptureBystander const bystander;
      CUdeviceptr const first = value_of(address);
      std::scoped_lock const lock{mutex_};
      if (free_(first, size_bytes) == CUDA_SUCCESS) {
        mapped_.end_reservation(first);
      }
    }
  }

  [[nodiscard]] std::optional<physical_type> try_create_physical(std::size_t size_bytes) {
    require_support();
    CudaScope const scope{*context_};
    CudaCaptureBystander const bystander;
    CUmemAllocationProp const properties = memory_here();
    physical_type memory{};
    CUresult const result = create_(&memory, size_bytes, &properties, 0);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
      return std::nullopt;
    }
    cuda_driver_check(result);
    return memory;
  }

  void release_physical(physical_type memory) noexcept {
    if (is_supported()) {
      CudaScope const scope{*context_, std::nothrow};
      CudaCaptureBystander const bystander;
      (void)release_(memory);
    }
  }

  /// Maps each piece with one call, then makes all of them accessible with one call. That one is
  /// slow, since it writes the device's page tables, for which the device may lack memory.
  [[nodiscard]] bool
  try_map(void* address, std::size_t size_bytes, std::span<physical_type const> pieces) {
    require_support();
    if (pieces.empty()) {
      return true;
    }
    CudaScope const scope{*context_};
    CudaCaptureBystander const bystander;
    CUdeviceptr const first = value_of(address);
    std::scoped_lock const lock{mutex_};
    std::size_t mapped_bytes = 0;
    CUresult result = CUDA_SUCCESS;
    for (physical_type const piece : pieces) {
      result = map_(first + mapped_bytes, size_bytes, 0, piece, 0);
      if (result != CUDA_SUCCESS) {
        break;
      }
      mapped_bytes += size_bytes;
    }
    if (result == CUDA_SUCCESS) {
      result = set_access_(first, mapped_bytes, accessors_.data(), accessors_.size());
    }
    if (result != CUDA_SUCCESS) {
      if (mapped_bytes != 0) {
        (void)unmap_(first, mapped_bytes);
      }
      if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        return false;
      }
      cuda_driver_check(result);
    }
    try {
      mapped_.add(first, first + mapped_bytes);
    } catch (std::bad_alloc const&) {
      (void)unmap_(first, mapped_bytes);
      throw;
    }
    return true;
  }

  /// If the driver refuses, the memory counts as mapped as before.
  void unmap(void* address, std::size_t size_bytes) noexcept {
    if (is_supported()) {
      CudaScope const scope{*context_, std::nothrow};
      CudaCaptureBystander const bystander;
      CUdeviceptr const first = value_of(address);
      std::scoped_lock const lock{mutex_};
      if (unmap_(first, size_bytes) == CUDA_SUCCESS) {
        mapped_.remove(first, first + size_bytes);
      }
    }
  }

  /// Lets another device access all memory that is mapped, now and later. Does nothing if it
  /// already may, or if there is no virtual memory.
  ///
  /// @throws CudaError
  void allow_access(int ordinal) {
    if (!is_supported()) {
      return;
    }
    CudaScope const scope{*context_};
    CudaCaptureBystander const bystander;
    CUdevice const device = CudaContext::device_of(ordinal);
    std::scoped_lock const lock{mutex_};
    CUmemAccessDesc peer = accessors_.front();
    peer.location.id = device;
    if (std::any_of(accessors_.begin(), accessors_.end(), [&](CUmemAccessDesc const& one) {
          return one.location.id == peer.location.id;
        })) {
      return;
    }
    accessors_.push_back(peer);
    for (auto const& [first, end] : mapped_.all()) {
      if (CUresult const result = set_access_(first, end - first, &peer, 1);
          result != CUDA_SUCCESS) {
        accessors_.pop_back();
        cuda_driver_check(result);
      }
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
    properties.allocFlags.gpuDirectRDMACapable = is_rdma_capable_ ? 1 : 0;
    return properties;
  }

  /// Returns whether memory for GPUDirect RDMA can be mapped, by mapping one piece: drivers for
  /// WSL 2 before R615 claim it and then fail to make such memory accessible. Also false if the
  /// device has no memory left to try.
  [[nodiscard]] bool can_map_rdma() noexcept {
    CUmemAllocationProp properties = memory_here();
    properties.allocFlags.gpuDirectRDMACapable = 1;
    physical_type memory{};
    if (create_(&memory, granularity_bytes_, &properties, 0) != CUDA_SUCCESS) {
      return false;
    }
    CUdeviceptr address = 0;
    CUresult result = reserve_(&address, granularity_bytes_, granularity_bytes_, 0, 0);
    if (result == CUDA_SUCCESS) {
      result = map_(address, granularity_bytes_, 0, memory, 0);
      if (result == CUDA_SUCCESS) {
        result = set_access_(address, granularity_bytes_, accessors_.data(), 1);
        (void)unmap_(address, granularity_bytes_);
      }
      (void)free_(address, granularity_bytes_);
    }
    (void)release_(memory);
    return result == CUDA_SUCCESS;
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
  bool is_rdma_capable_ = false;
  // Guards what follows. It is held across the driver's calls that change addresses and mappings,
  // so that what follows agrees with the driver.
  std::mutex mutex_;
  std::vector<CUmemAccessDesc> accessors_;  // first this device, then those of `allow_access`
  MappedRanges mapped_;
};

}  // namespace spillway::detail
