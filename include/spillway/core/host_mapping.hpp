// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace spillway::detail {

/// Returns the size of the system's pages.
[[nodiscard]] inline std::size_t system_page_bytes() noexcept {
  return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));  // a value that POSIX requires
}

/// Finds out how much memory this process may use.
///
/// Source: the kernel's documents "Control Group v2" (memory.max) and "Memory Resource Controller"
/// (memory.limit_in_bytes, version 1).
template <class = Lazily>
class BasicHostMemory {
 public:
  /// Returns the bytes of the machine's memory, or the least limit of the control groups that this
  /// process is in, if that is less: of a container, a service or a batch job, for example.
  ///
  /// @param root  the folder in which `/proc` and `/sys` are; other than the default only in tests
  [[nodiscard]] static std::size_t usable_bytes(std::string const& root = {}) {
    auto const pages = static_cast<std::size_t>(std::max(0L, ::sysconf(_SC_PHYS_PAGES)));
    std::size_t least = pages * system_page_bytes();
    // Each line is NUMBER:CONTROLLERS:PATH.
    for_each_line(root + "/proc/self/cgroup", [&](std::string const& line) {
      std::size_t const first = line.find(':');
      std::size_t const second = line.find(':', first + 1);
      if (second == std::string::npos) {
        return;
      }
      std::string const controllers = line.substr(first + 1, second - first - 1);
      std::string path = line.substr(second + 1);
      bool const is_version_2 = controllers.empty();
      if (!is_version_2 && ("," + controllers + ",").find(",memory,") == std::string::npos) {
        return;
      }
      std::string const mount = root + (is_version_2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
      std::string const file = is_version_2 ? "/memory.max" : "/memory.limit_in_bytes";
      // Each group is limited by those above it, too. In a container the path may be one of the
      // host, which does not exist here; then the group at the top is that of the container.
      for (bool is_top = false; !is_top;) {
        path.resize(path.find_last_not_of('/') + 1);
        is_top = path.empty();
        std::string name = mount;
        for_each_line(name.append(path).append(file), [&](std::string const& limit) {
          char* end = nullptr;
          errno = 0;
          std::uint64_t const bytes = std::strtoull(limit.c_str(), &end, 10);
          if (end != limit.c_str() && errno == 0) {  // no number: "max"
            least = std::min<std::size_t>(least, bytes);
          }
        });
        path.resize(is_top ? 0 : path.rfind('/'));
      }
    });
    return least;
  }

 private:
  /// Calls `visit` for each line of a file; for none if the file cannot be read.
  template <class Visit>
  static void for_each_line(std::string const& name, Visit visit) {
    std::FILE* const file = std::fopen(name.c_str(), "re");
    if (file == nullptr) {
      return;
    }
    char* line = nullptr;
    std::size_t room = 0;
    try {
      for (ssize_t length = 0; (length = ::getline(&line, &room, file)) > 0;) {
        auto const bytes = static_cast<std::size_t>(length);
        visit(std::string{line, line[bytes - 1] == '\n' ? bytes - 1 : bytes});
      }
    } catch (...) {
      std::free(line);
      std::fclose(file);
      throw;
    }
    std::free(line);
    std::fclose(file);
  }
};

using HostMemory = BasicHostMemory<>;

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

SPILLWAY_COMPILED_PART(class BasicHostMemory<>);

}  // namespace spillway::detail
