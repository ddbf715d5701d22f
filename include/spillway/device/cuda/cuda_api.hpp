// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_api.hpp>
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/cuda/cuda_context.hpp>
#include <spillway/device/cuda/cuda_host_worker.hpp>
#include <spillway/device/cuda/cuda_pinned_memory.hpp>
#include <spillway/device/cuda/cuda_virtual_memory.hpp>

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <span>

namespace spillway {

/// Options of a `CudaApi`.
struct CudaOptions {
  /// True if a thread that waits in `synchronize(event)` is to yield its processor core, instead of
  /// spinning. The wait then ends some microseconds later.
  bool yield_in_waits = false;
  /// True if pinned memory is to come from the NUMA node that is asked for, false for any node.
  bool numa_placement = true;
  /// True if copies of one kind are to be handed to the driver in batches where it takes them
  /// (`cudaMemcpyBatchAsync`, CUDA 12.8), false if one by one.
  bool batched_copies = true;
  /// `&CudaCopyKernel::enqueue` (device/cuda/copy_kernel.hpp) to make batches of copies with a
  /// kernel: copies inside the device, and copies between the device and pinned memory of less than
  /// 512 KiB on average. Even in batches, the driver takes about 5 us for each copy inside the
  /// device and 1 to 4 us for one to or from the host; the kernel takes some nanoseconds. It uses
  /// multiprocessors that other kernels may need. It is not used if it was not compiled for the
  /// device.
  cudaError_t (*copy_kernel)(std::span<void* const> to,
                             std::span<void const* const> from,
                             std::span<std::size_t const> sizes_bytes,
                             CopyKind kind,
                             cudaStream_t stream) noexcept = nullptr;
};

/// A CUDA device as a model of `DeviceApi`. It calls the CUDA runtime, and the driver for virtual
/// memory. It is the default device of cuda.hpp.
///
/// Needs the toolkit's headers and its runtime library, but neither nvcc nor the driver's library.
///
/// Units    bytes; times in nanoseconds of the host's steady clock.
/// Threads  thread-safe. The calling thread's current device and context do not change.
/// Streams  any stream of this device, the caller's included. This class itself enqueues nothing on
///          the null stream. Handles that mean another stream in every thread must not be used (see
///          `is_one_stream`).
/// Address  device memory comes from the runtime, so kernels and libraries take its addresses.
///
/// Calls that reserve, release, pin or unmap may wait for the device: make them at the start and
/// the end of a program. Calls that take effect at once may be made while a stream is being
/// captured.
class CudaApi {
 public:
  using stream_type = cudaStream_t;
  using event_type = cudaEvent_t;
  using physical_type = detail::CudaVirtualMemory::physical_type;

  static constexpr bool is_thread_safe = true;
  static constexpr bool pins_slowly = true;  // a few GB/s, since pages are locked one by one

  /// Initialises the device if that has not happened yet.
  ///
  /// @param ordinal  the runtime's number of the device, from 0
  /// @throws CudaError if there is no driver or no such device
  explicit CudaApi(int ordinal = 0, CudaOptions options = {})
      : context_{ordinal},
        virtual_memory_{context_},
        query_event_{detail::cuda_entry_point<PFN_cuEventQuery_v2000>("cuEventQuery", 2000)},
        options_{options},
        numa_node_{numa_node_of(ordinal)},
        is_integrated_{is_attribute_set(cudaDevAttrIntegrated, ordinal)},
        has_host_addresses_{
            is_attribute_set(cudaDevAttrCanUseHostPointerForRegisteredMem, ordinal)},
        has_batches_{options.batched_copies},
        total_bytes_{memory_info().total_bytes} {
    load_copy_kernel();
  }
  CudaApi(CudaApi const&) = delete;
  CudaApi& operator=(CudaApi const&) = delete;
  ~CudaApi() = default;

  /// Device memory, aligned to 256 B.
  ///
  /// @param size_bytes  more than 0
  /// @return null if the device does not have that much left in one piece
  /// @throws CudaError for any other failure
  [[nodiscard]] void* try_reserve(std::size_t size_bytes);

  /// Releases memory of `try_reserve`. May wait for the device.
  void release(void* memory, std::size_t size_bytes) noexcept;

  /// Page-locked host memory that every device can copy from and to.
  ///
  /// @param size_bytes  more than 0
  /// @param node        NUMA node to prefer, -1 for any
  /// @return null if the host has no such memory left
  /// @throws CudaError, std::bad_alloc
  [[nodiscard]] void* try_allocate_pinned(std::size_t size_bytes, int node);

  void free_pinned(void* memory, std::size_t size_bytes) noexcept;

  /// @stream enqueues one copy; does not wait if the host side is pinned
  void copy(void* to, void const* from, std::size_t size_bytes, CopyKind kind, stream_type stream);

  /// Enqueues several copies at once, which may run in any order. This is cheaper than single
  /// copies if they are many and small.
  ///
  /// They are enqueued one by one if CUDA takes no batches: before 12.8, with a driver that is
  /// older than the runtime, on the null stream, in a capture, and with an empty copy among them.
  /// With `CudaOptions::copy_kernel` the host side of a batch must be pinned.
  ///
  /// @param to, from, sizes_bytes  of the same length; no range that is written overlaps another
  /// @stream enqueues the copies; does not wait if the host sides are pinned
  /// @throws ContractViolation for spans of different lengths; CudaError, and then some of the
  ///         copies may have been enqueued
  void copy_batch(std::span<void* const> to,
                  std::span<void const* const> from,
                  std::span<std::size_t const> sizes_bytes,
                  CopyKind kind,
                  stream_type stream);

  /// @stream enqueues a memset; does not wait
  void fill(void* memory, unsigned char byte, std::size_t size_bytes, stream_type stream);

  /// Enqueues a call of `function(argument)` on the host. It is not called if the device has failed
  /// by then.
  ///
  /// @stream enqueues the call; does not wait
  void launch_host(stream_type stream, HostFunction function, void* argument);

  /// Makes a worker for functions that may take long, for which CUDA's own host functions would
  /// block other streams.
  /// @throws CudaError, std::bad_alloc
  [[nodiscard]] std::unique_ptr<detail::CudaHostWorker> make_host_worker(stream_type stream) {
    return std::make_unique<detail::CudaHostWorker>(context_, stream);
  }

  /// Creates a stream that does not synchronize with the null stream.
  [[nodiscard]] stream_type create_stream();
  void destroy_stream(stream_type stream) noexcept;

  /// Creates an event without a time stamp.
  [[nodiscard]] event_type create_event() { return create_event(cudaEventDisableTiming); }
  /// Creates an event with a time stamp, which the device takes longer to record.
  [[nodiscard]] event_type create_timed_event() { return create_event(cudaEventDefault); }
  /// Returns the time between two events with time stamps, to about half a microsecond. Both must
  /// be complete.
  [[nodiscard]] std::uint64_t elapsed_ns(event_type from, event_type to);
  void destroy_event(event_type event) noexcept;

  // As in the table of `DeviceApi`. Each throws DeviceError if CUDA fails the call.
  void record(event_type event, stream_type stream);
  void wait(stream_type stream, event_type event);
  [[nodiscard]] bool is_complete(event_type event);
  void synchronize(event_type event);
  void synchronize(stream_type stream);

  [[nodiscard]] MemoryInfo memory_info() const;
  [[nodiscard]] int numa_node() const noexcept { return numa_node_; }
  [[nodiscard]] std::uint64_t clock_ns() const noexcept {
    return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                          std::chrono::steady_clock::now().time_since_epoch())
                                          .count());
  }

  /// True if the GPU uses the host's memory and has none of its own, such as GB10. False for GH200:
  /// there host and device can access each other's memory, but these are two memories, so swapping
  /// out frees device memory.
  [[nodiscard]] bool shares_host_memory() const noexcept { return is_integrated_; }

  /// True while `stream` is being captured into a graph. What is enqueued there does not run now,
  /// and events recorded there mean nothing outside the capture.
  [[nodiscard]] bool is_capturing(stream_type stream) const;

  /// False for a handle that means another stream in every thread, whose work cannot be ordered:
  /// `cudaStreamPerThread`, and the null stream in a program compiled for per-thread null streams.
  [[nodiscard]] static bool is_one_stream(stream_type stream) noexcept {
#if defined(CUDA_API_PER_THREAD_DEFAULT_STREAM)
    return stream != nullptr && stream != cudaStreamPerThread;
#else
    return stream != cudaStreamPerThread;
#endif
  }

  /// False if the device or its driver has no virtual memory; `reserve_address`,
  /// `try_create_physical` and `map` then throw DeviceError.
  [[nodiscard]] bool has_virtual_memory() const noexcept {
    return virtual_memory_.is_supported();
  }
  [[nodiscard]] std::size_t granularity_bytes() const noexcept {
    return virtual_memory_.granularity_bytes();
  }
  [[nodiscard]] void* reserve_address(std::size_t size_bytes) {
    return virtual_memory_.reserve_address(size_bytes);
  }
  void free_address(void* address, std::size_t size_bytes) noexcept {
    virtual_memory_.free_address(address, size_bytes);
  }
  [[nodiscard]] std::optional<physical_type> try_create_physical(std::size_t size_bytes) {
    return size_bytes > total_bytes_ ? std::nullopt
                                     : virtual_memory_.try_create_physical(size_bytes);
  }
  void release_physical(physical_type memory) noexcept {
    virtual_memory_.release_physical(memory);
  }
  [[nodiscard]] bool
  try_map(void* address, std::size_t size_bytes, std::span<physical_type const> pieces) {
    return virtual_memory_.try_map(address, size_bytes, pieces);
  }
  void unmap(void* address, std::size_t size_bytes) noexcept {
    virtual_memory_.unmap(address, size_bytes);
  }

  /// Lets kernels and copies of another device access this device's virtual memory, now and later,
  /// as `cudaDeviceEnablePeerAccess` does for memory of `cudaMalloc` only. The devices must be able
  /// to access each other (`cudaDeviceCanAccessPeer`).
  ///
  /// @throws CudaError
  /// @cost one call of the driver for each range that is mapped
  void allow_access(int ordinal) {
    virtual_memory_.allow_access(ordinal);
  }

  /// Calls `enqueue()`, which launches kernels on streams of this device, while the device is the
  /// calling thread's current one.
  ///
  /// @throws what `enqueue` throws, which checks its launches; CudaError
  template <std::invocable Enqueue>
  void enqueue_kernels(Enqueue enqueue) {
    Scope const scope{context_};
    enqueue();
  }

  /// Whether `CudaOptions::copy_kernel` makes copies.
  [[nodiscard]] bool has_copy_kernel() const noexcept {
    return options_.copy_kernel != nullptr;
  }

  /// The runtime's number of the device.
  [[nodiscard]] int ordinal() const noexcept {
    return context_.ordinal();
  }

 private:
  using Scope = detail::CudaScope;
  using CaptureBystander = detail::CudaCaptureBystander;

  [[nodiscard]] static int numa_node_of(int ordinal) noexcept;
  [[nodiscard]] static bool is_attribute_set(cudaDeviceAttr attribute, int ordinal) noexcept;
  [[nodiscard]] static cudaMemcpyKind kind_of(CopyKind kind) noexcept;
  [[nodiscard]] event_type create_event(unsigned flags);
  void load_copy_kernel();
  [[nodiscard]] bool takes_kernel(std::span<std::size_t const> sizes_bytes,
                                  CopyKind kind) const noexcept;
  [[nodiscard]] bool takes_batches(stream_type stream) const;
  [[nodiscard]] static cudaError_t enqueue_batch(std::span<void* const> to,
                                                 std::span<void const* const> from,
                                                 std::span<std::size_t const> sizes_bytes,
                                                 CopyKind kind,
                                                 stream_type stream);

  detail::CudaContext context_;
  detail::CudaVirtualMemory virtual_memory_;
  PFN_cuEventQuery_v2000 query_event_;
  detail::CudaPinnedMemory pinned_;
  CudaOptions options_;
  int numa_node_;
  bool is_integrated_;
  bool has_host_addresses_;        // registered memory has the same address on the device
  std::atomic<bool> has_batches_;  // becomes false if the driver refuses a batch as unknown
  // A request for more than this is answered as out of memory, since CUDA may call it an invalid
  // argument.
  std::size_t total_bytes_;
};

inline void* CudaApi::try_reserve(std::size_t size_bytes) {
  if (size_bytes > total_bytes_) {
    return nullptr;
  }
  Scope const scope{context_};
  CaptureBystander const bystander;
  void* memory = nullptr;
  cudaError_t const status = cudaMalloc(&memory, size_bytes);
  if (status == cudaErrorMemoryAllocation) {
    detail::cuda_forgive(status);
    return nullptr;
  }
  cuda_check(status);
  return memory;
}

inline void CudaApi::release(void* memory, std::size_t /*size_bytes*/) noexcept {
  Scope const scope{context_, std::nothrow};
  CaptureBystander const bystander;
  detail::cuda_forgive(cudaFree(memory));
}

inline void* CudaApi::try_allocate_pinned(std::size_t size_bytes, int node) {
  Scope const scope{context_};
  CaptureBystander const bystander;
  // Memory near a node is registered, so its address on the device may differ. Copies in a batch
  // need the host's addresses.
  bool const is_placed = options_.numa_placement && has_host_addresses_;
  return pinned_.try_allocate(size_bytes, is_placed ? node : -1);
}

inline void CudaApi::free_pinned(void* memory, std::size_t /*size_bytes*/) noexcept {
  Scope const scope{context_, std::nothrow};
  CaptureBystander const bystander;
  pinned_.free(memory);
}

inline void CudaApi::copy(
    void* to, void const* from, std::size_t size_bytes, CopyKind kind, stream_type stream) {
  Scope const scope{context_};
  cuda_check(cudaMemcpyAsync(to, from, size_bytes, kind_of(kind), stream));
}

inline void CudaApi::copy_batch(std::span<void* const> to,
                                std::span<void const* const> from,
                                std::span<std::size_t const> sizes_bytes,
                                CopyKind kind,
                                stream_type stream) {
  expects(to.size() == from.size() && to.size() == sizes_bytes.size(),
          "the three spans differ in length");
  if (to.empty()) {
    return;
  }
  Scope const scope{context_};
  if (to.size() > 1 && takes_kernel(sizes_bytes, kind)) {
    cuda_check(options_.copy_kernel(to, from, sizes_bytes, kind, stream));
    return;
  }
  // CUDA refuses a whole batch if it contains an empty copy.
  bool const has_empty =
      std::any_of(sizes_bytes.begin(), sizes_bytes.end(), [](std::size_t n) { return n == 0; });
  std::size_t done = 0;
  if (to.size() > 1 && !has_empty && takes_batches(stream)) {
    // Drivers have been reported to fail, or to hang, with tens of thousands of copies in a call.
    constexpr std::size_t most = 1024;
    while (done != to.size()) {
      std::size_t const count = std::min(most, to.size() - done);
      cudaError_t const status = enqueue_batch(to.subspan(done, count),
                                               from.subspan(done, count),
                                               sizes_bytes.subspan(done, count),
                                               kind,
                                               stream);
      if (status == cudaErrorNotSupported || status == cudaErrorCallRequiresNewerDriver) {
        detail::cuda_forgive(status);
        has_batches_.store(false, std::memory_order_relaxed);
        break;
      }
      cuda_check(status);
      done += count;
    }
  }
  for (std::size_t i = done; i < to.size(); ++i) {
    cuda_check(cudaMemcpyAsync(to[i], from[i], sizes_bytes[i], kind_of(kind), stream));
  }
}

inline void
CudaApi::fill(void* memory, unsigned char byte, std::size_t size_bytes, stream_type stream) {
  Scope const scope{context_};
  cuda_check(cudaMemsetAsync(memory, byte, size_bytes, stream));
}

inline void CudaApi::launch_host(stream_type stream, HostFunction function, void* argument) {
  Scope const scope{context_};
  cuda_check(cudaLaunchHostFunc(stream, function, argument));
}

inline auto CudaApi::create_stream() -> stream_type {
  Scope const scope{context_};
  CaptureBystander const bystander;
  stream_type stream = nullptr;
  cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

inline void CudaApi::destroy_stream(stream_type stream) noexcept {
  Scope const scope{context_, std::nothrow};
  CaptureBystander const bystander;
  detail::cuda_forgive(cudaStreamDestroy(stream));
}

inline auto CudaApi::create_event(unsigned flags) -> event_type {
  Scope const scope{context_};
  CaptureBystander const bystander;
  event_type event = nullptr;
  unsigned const yielding = options_.yield_in_waits ? cudaEventBlockingSync : 0U;
  cuda_check(cudaEventCreateWithFlags(&event, flags | yielding));
  return event;
}

inline std::uint64_t CudaApi::elapsed_ns(event_type from, event_type to) {
  Scope const scope{context_};
  CaptureBystander const bystander;
  float milliseconds = 0;
  cuda_check(cudaEventElapsedTime(&milliseconds, from, to));
  return static_cast<std::uint64_t>(static_cast<double>(milliseconds) * 1e6);
}

inline void CudaApi::destroy_event(event_type event) noexcept {
  Scope const scope{context_, std::nothrow};
  CaptureBystander const bystander;
  detail::cuda_forgive(cudaEventDestroy(event));
}

inline void CudaApi::record(event_type event, stream_type stream) {
  Scope const scope{context_};
  cuda_check(cudaEventRecord(event, stream));
}

inline void CudaApi::wait(stream_type stream, event_type event) {
  Scope const scope{context_};
  cuda_check(cudaStreamWaitEvent(stream, event, cudaEventWaitDefault));
}

inline bool CudaApi::is_complete(event_type event) {
  Scope const scope{context_};
  CaptureBystander const bystander;
  // The runtime's own query would make "not ready" the last error, in place of an error of the
  // caller's own launches.
  CUresult const result = query_event_(event);
  if (result == CUDA_ERROR_NOT_READY) {
    return false;
  }
  detail::cuda_driver_check(result);
  return true;
}

inline void CudaApi::synchronize(event_type event) {
  Scope const scope{context_};
  CaptureBystander const bystander;
  cuda_check(cudaEventSynchronize(event));
}

inline void CudaApi::synchronize(stream_type stream) {
  Scope const scope{context_};
  CaptureBystander const bystander;
  cuda_check(cudaStreamSynchronize(stream));
}

inline MemoryInfo CudaApi::memory_info() const {
  Scope const scope{context_};
  CaptureBystander const bystander;
  MemoryInfo info;
  cuda_check(cudaMemGetInfo(&info.free_bytes, &info.total_bytes));
  return info;
}

inline bool CudaApi::is_capturing(stream_type stream) const {
  Scope const scope{context_};
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaError_t const status = cudaStreamIsCapturing(stream, &capture);
  if (status == cudaErrorStreamCaptureImplicit) {
    // The null stream cannot be used while a stream that it waits for is being captured.
    detail::cuda_forgive(status);
    return true;
  }
  cuda_check(status);
  return capture != cudaStreamCaptureStatusNone;
}

inline int CudaApi::numa_node_of(int ordinal) noexcept {
  int node = -1;
  cudaError_t const status = cudaDeviceGetAttribute(&node, cudaDevAttrHostNumaId, ordinal);
  detail::cuda_forgive(status);
  return status == cudaSuccess ? node : -1;
}

inline bool CudaApi::is_attribute_set(cudaDeviceAttr attribute, int ordinal) noexcept {
  int value = 0;
  cudaError_t const status = cudaDeviceGetAttribute(&value, attribute, ordinal);
  detail::cuda_forgive(status);
  return status == cudaSuccess && value != 0;
}

inline cudaMemcpyKind CudaApi::kind_of(CopyKind kind) noexcept {
  switch (kind) {
  case CopyKind::to_host:
    return cudaMemcpyDeviceToHost;
  case CopyKind::to_device:
    return cudaMemcpyHostToDevice;
  case CopyKind::on_device:
    break;
  }
  return cudaMemcpyDeviceToDevice;
}

/// Loads the copy kernel, and does not use it if it was not compiled for this device.
inline void CudaApi::load_copy_kernel() {
  if (options_.copy_kernel != nullptr) {
    Scope const scope{context_};
    cudaError_t const status = options_.copy_kernel({}, {}, {}, CopyKind::on_device, nullptr);
    if (status != cudaSuccess) {
      detail::cuda_forgive(status);
      options_.copy_kernel = nullptr;
    }
  }
}

/// Whether the copy kernel makes copies of these sizes. Between host and device, the copy engines
/// are as fast as the link for large blocks, and use no multiprocessors. On an H200 the engines
/// copy a batch of blocks of 256 KiB at 46 GB/s and the kernel at 52; blocks of 1 MiB both copy at
/// 52.
inline bool CudaApi::takes_kernel(std::span<std::size_t const> sizes_bytes,
                                  CopyKind kind) const noexcept {
  constexpr std::size_t most_small_bytes = 512_KiB;
  if (options_.copy_kernel == nullptr || kind == CopyKind::on_device) {
    return options_.copy_kernel != nullptr;
  }
  std::size_t const bytes = std::accumulate(sizes_bytes.begin(), sizes_bytes.end(), std::size_t{0});
  return has_host_addresses_ && bytes / sizes_bytes.size() < most_small_bytes;
}

/// Whether the runtime takes batches on `stream`. It refuses them on the null stream and on a
/// stream that is being captured; the capture then continues without the copies and without an
/// error.
inline bool CudaApi::takes_batches(stream_type stream) const {
  return has_batches_.load(std::memory_order_relaxed) && stream != nullptr &&
         stream != cudaStreamLegacy && !is_capturing(stream);
}

/// Enqueues the copies with one call. CUDA 13 dropped the index of the copy at fault and made the
/// arguments const; older versions do not write to the arguments either.
inline cudaError_t CudaApi::enqueue_batch([[maybe_unused]] std::span<void* const> to,
                                          [[maybe_unused]] std::span<void const* const> from,
                                          [[maybe_unused]] std::span<std::size_t const> sizes_bytes,
                                          [[maybe_unused]] CopyKind kind,
                                          [[maybe_unused]] stream_type stream) {
#if CUDART_VERSION >= 12080
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  // Inside the device the copy engines are slower than the multiprocessors, and an allocation waits
  // for the copies.
  attributes.flags =
      kind == CopyKind::on_device ? cudaMemcpyFlagDefault : cudaMemcpyFlagPreferOverlapWithCompute;
  std::size_t first_with_these = 0;
#  if CUDART_VERSION >= 13000
  return cudaMemcpyBatchAsync(to.data(),
                              from.data(),
                              sizes_bytes.data(),
                              to.size(),
                              &attributes,
                              &first_with_these,
                              1,
                              stream);
#  else
  // NOLINTBEGIN(cppcoreguidelines-pro-type-const-cast)
  std::size_t at_fault = 0;
  return cudaMemcpyBatchAsync(const_cast<void**>(to.data()),
                              const_cast<void**>(from.data()),
                              const_cast<std::size_t*>(sizes_bytes.data()),
                              to.size(),
                              &attributes,
                              &first_with_these,
                              1,
                              &at_fault,
                              stream);
  // NOLINTEND(cppcoreguidelines-pro-type-const-cast)
#  endif
#else
  return cudaErrorNotSupported;
#endif
}

SPILLWAY_CHECK_MODEL(BatchCopyApi<CudaApi>);
SPILLWAY_CHECK_MODEL(VirtualMemoryApi<CudaApi>);
SPILLWAY_CHECK_MODEL(HostWorkApi<CudaApi>);

}  // namespace spillway
