// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/host/host_api.hpp>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include <sys/mman.h>

namespace spillway {

/// Names a piece of memory of a `HostPagedApi`: only how many there are matters.
enum class HostPhysical : std::uint64_t {};

/// A `HostApi` that maps memory, for programs that keep raw pointers: what is swapped out keeps its
/// addresses and cannot be touched there.
///
/// The machine's memory has no handles, so a piece of it is a number that is counted, and mapping
/// it makes addresses accessible, with zeros. What is unmapped goes back to the system at once.
///
/// Threads  thread-safe, except that addresses are reserved by one thread at a time.
/// Streams  as `HostApi`. Mapping takes effect at the call, `vacate` in stream order.
template <class = detail::Lazily>
class BasicHostPagedApi : public HostApi {
 public:
  using HostPagedApi = BasicHostPagedApi;  // what a derived class calls its base

  using physical_type = HostPhysical;

  static constexpr std::size_t least_granularity_bytes = 16_KiB;
  static constexpr std::size_t most_granularity_bytes = 2_MiB;

  /// A granularity for this much memory: fine, as long as there are not too many pieces.
  [[nodiscard]] static constexpr std::size_t granularity_for(std::size_t capacity_bytes) noexcept {
    return std::clamp(std::bit_ceil(std::min(capacity_bytes, std::size_t{1} << 62U) / 65536),
                      least_granularity_bytes,
                      most_granularity_bytes);
  }

  /// @throws ContractViolation unless the granularity is a power of two of at least 16 KiB
  explicit BasicHostPagedApi(std::size_t granularity_bytes = least_granularity_bytes)
      : granularity_bytes_{granularity_bytes} {
    expects(std::has_single_bit(granularity_bytes) && granularity_bytes >= least_granularity_bytes,
            "the granularity must be a power of two of at least 16 KiB");
  }

  [[nodiscard]] std::size_t granularity_bytes() const noexcept { return granularity_bytes_; }
  /// False for addresses that were never reserved here, in next to no time.
  [[nodiscard]] bool may_own(void const* p) const noexcept {
    auto const address = reinterpret_cast<std::uintptr_t>(p);
    return address >= lowest_.load(std::memory_order_relaxed) &&
           address < highest_.load(std::memory_order_relaxed);
  }

  [[nodiscard]] void* reserve_address(std::size_t bytes);
  void free_address(void* p, std::size_t bytes) noexcept { ::munmap(p, bytes); }
  [[nodiscard]] std::optional<physical_type> try_create_physical(std::size_t /*bytes*/) noexcept {
    return HostPhysical{created_.fetch_add(1, std::memory_order_relaxed)};
  }
  void release_physical(physical_type /*physical*/) noexcept {}
  void map(void* p, std::size_t bytes, std::span<physical_type const> pieces) {
    if (::mprotect(p, pieces.size() * bytes, PROT_READ | PROT_WRITE) != 0) {
      throw DeviceError{detail::Text{"HostPagedApi: cannot map memory: "} + std::strerror(errno)};
    }
#ifdef MADV_POPULATE_WRITE
    // One call for all pages: faulting in each when it is touched takes longer than copying it. A
    // system that does not know this call (Linux before 5.14) still does that.
    (void)::madvise(p, pieces.size() * bytes, MADV_POPULATE_WRITE);
#endif
  }
  void unmap(void* p, std::size_t bytes) noexcept {
    (void)::madvise(p, bytes, MADV_DONTNEED);
    (void)::mprotect(p, bytes, PROT_NONE);
  }

  /// The same as `unmap`, when all that was enqueued on `stream` before is done, and at once after
  /// the last of it.
  ///
  /// @throws DeviceError for a handle that names no stream; std::bad_alloc
  void vacate(void* p, std::size_t bytes, stream_type stream) {
    auto range = std::make_unique<Range>(Range{this, p, bytes});
    enqueue_task(stream, &run_vacate, range.get());
    (void)range.release();
  }

 private:
  struct Range {
    BasicHostPagedApi* device = nullptr;
    void* p = nullptr;
    std::size_t bytes = 0;
  };
  static void run_vacate(void* argument) noexcept {
    std::unique_ptr<Range> const range{static_cast<Range*>(argument)};
    range->device->unmap(range->p, range->bytes);
  }

  std::size_t granularity_bytes_;
  std::atomic<std::uint64_t> created_{1};
  std::atomic<std::uintptr_t> lowest_{std::numeric_limits<std::uintptr_t>::max()};
  std::atomic<std::uintptr_t> highest_{0};
};

using HostPagedApi = BasicHostPagedApi<>;

/// Aligned to the granularity, or to 2 MiB if that is more, so that the system may use large pages.
template <class Lazy>
void* BasicHostPagedApi<Lazy>::reserve_address(std::size_t bytes) {
  std::size_t const alignment = most_granularity_bytes;
  std::size_t const all = bytes + alignment;
  void* const base =
      all < bytes
          ? MAP_FAILED
          : ::mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    throw DeviceError{detail::Text{"HostPagedApi: cannot reserve addresses: "} +
                      std::strerror(errno)};
  }
  auto const begin = reinterpret_cast<std::uintptr_t>(base);
  std::size_t const head = round_up(begin, alignment) - begin;
  auto* const kept = static_cast<std::byte*>(base) + head;
  if (head != 0) {
    ::munmap(base, head);
  }
  if (alignment != head) {
    ::munmap(kept + bytes, alignment - head);
  }
  (void)::madvise(kept, bytes, MADV_HUGEPAGE);
  auto const first = begin + head;
  lowest_ = std::min(lowest_.load(), first);
  highest_ = std::max(highest_.load(), first + bytes);
  return kept;
}

static_assert(VirtualMemoryApi<HostPagedApi> && VacatingApi<HostPagedApi>);

}  // namespace spillway
