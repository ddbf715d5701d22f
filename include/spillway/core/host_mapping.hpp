// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cerrno>
#include <cstddef>
#include <utility>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace spillway::detail {

/// Pageable memory mapped from the operating system, on one NUMA node if possible.
///
/// The pageable tier of a host pool is made of mappings, and `CudaApi` page-locks them for pinned
/// memory. A mapping asks for large pages and populates them at once, so that the first swap-out
/// does not pay for page faults. A system that grants neither gives plain memory.
class HostMapping {
 public:
  HostMapping() = default;
  HostMapping(HostMapping&& other) noexcept
      : data_{std::exchange(other.data_, nullptr)},
        bytes_{std::exchange(other.bytes_, 0)},
        is_bound_{std::exchange(other.is_bound_, false)} {}
  HostMapping& operator=(HostMapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(is_bound_, other.is_bound_);
    return *this;
  }
  ~HostMapping() {
    if (data_ != nullptr) {
      ::munmap(data_, bytes_);
    }
  }

  /// Maps memory near `numa_node`, or anywhere if that is -1. Returns an empty mapping if the
  /// system has no room.
  [[nodiscard]] static HostMapping try_map(std::size_t bytes, int numa_node) noexcept {
    HostMapping made;
    void* const data =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      return made;
    }
    made.data_ = static_cast<std::byte*>(data);
    made.bytes_ = bytes;
    made.is_bound_ = try_bind(data, bytes, numa_node);
#if defined(MADV_HUGEPAGE)
    static_cast<void>(::madvise(data, bytes, MADV_HUGEPAGE));
#endif
#if defined(MADV_POPULATE_WRITE)
    if (::madvise(data, bytes, MADV_POPULATE_WRITE) != 0 && errno == ENOMEM) {
      return HostMapping{};
    }
#endif
    return made;
  }

  [[nodiscard]] std::byte* data() const noexcept {
    return data_;
  }
  [[nodiscard]] std::size_t size_bytes() const noexcept {
    return bytes_;
  }
  /// Whether the system agreed to place the memory on the node that was asked for.
  [[nodiscard]] bool is_bound() const noexcept {
    return is_bound_;
  }

 private:
  // Calls the kernel directly: one call does not justify a dependency on libnuma. The policy is
  // MPOL_PREFERRED, which takes another node before it fails.
  static bool try_bind(void* data, std::size_t bytes, int numa_node) noexcept {
#if defined(SYS_mbind)
    constexpr int max_nodes = 1024;
    constexpr int bits = 8 * static_cast<int>(sizeof(unsigned long));
    constexpr unsigned long preferred = 1;
    if (numa_node < 0 || numa_node >= max_nodes) {
      return false;
    }
    unsigned long mask[max_nodes / bits] = {};
    mask[numa_node / bits] = 1UL << static_cast<unsigned>(numa_node % bits);
    return ::syscall(SYS_mbind, data, bytes, preferred, &mask[0], max_nodes + 1UL, 0UL) == 0;
#else
    static_cast<void>(data), static_cast<void>(bytes), static_cast<void>(numa_node);
    return false;
#endif
  }

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  bool is_bound_ = false;
};

}  // namespace spillway::detail
