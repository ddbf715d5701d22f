// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/host_mapping.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/sim/sim_options.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace spillway::detail {

/// The memory of a simulated device that holds bytes: anonymous mappings for reserved and pinned
/// memory, and one memory file for physical memory, which is mapped explicitly.
///
/// Memory that was given back is inaccessible, and each mapping has an inaccessible page on both
/// sides. So work that runs too late or out of bounds faults.
///
/// Threads  thread-compatible.
template <class = Lazily>
class BasicSimHostBacking {
 public:
  static constexpr bool holds_bytes = true;

  explicit BasicSimHostBacking(SimOptions const& options);
  BasicSimHostBacking(BasicSimHostBacking const&) = delete;
  BasicSimHostBacking& operator=(BasicSimHostBacking const&) = delete;
  ~BasicSimHostBacking();

  /// Maps `bytes` > 0 of memory, filled with poison if that is asked for. Returns null if the
  /// system has none.
  [[nodiscard]] void* try_map_memory(std::size_t bytes, bool is_poisoned);
  void unmap_memory(void* p, std::size_t bytes) noexcept;

  /// Reserves addresses without memory.
  /// @throws DeviceError if there are none left
  [[nodiscard]] void* reserve_address(std::size_t bytes);
  void free_address(void* p, std::size_t bytes) noexcept { unmap_memory(p, bytes); }

  /// Creates a range of the memory file, filled with poison; returns its offset.
  /// @throws DeviceError if the system refuses
  [[nodiscard]] std::uint64_t create_physical(std::size_t bytes);
  void release_physical(std::uint64_t offset, std::size_t bytes) noexcept;
  /// @throws DeviceError if the system refuses
  void map(void* p, std::uint64_t offset, std::size_t bytes);
  void unmap(void* p, std::size_t bytes) noexcept;

 private:
  [[noreturn]] static void fail(char const* what) {
    throw DeviceError{Text{"SimApi: "} + what + ": " + std::strerror(errno)};
  }
  [[nodiscard]] std::size_t mapped_bytes(std::size_t bytes) const noexcept {
    return round_up(bytes, page_bytes_) + 2 * page_bytes_;
  }
  void free_file_range(std::uint64_t offset, std::size_t bytes);

  SimOptions const* options_;
  std::size_t page_bytes_;
  int file_ = -1;
  std::uint64_t file_bytes_ = 0;
  std::map<std::uint64_t, std::size_t> free_file_ranges_;
};

using SimHostBacking = BasicSimHostBacking<>;

template <class Lazy>
BasicSimHostBacking<Lazy>::BasicSimHostBacking(SimOptions const& options)
    : options_{&options}, page_bytes_{system_page_bytes()} {
  expects(options.granularity_bytes % page_bytes_ == 0,
          "SimOptions::granularity_bytes must be a multiple of the host's page size",
          {},
          "SimApi");
}

template <class Lazy>
BasicSimHostBacking<Lazy>::~BasicSimHostBacking() {
  if (file_ >= 0) {
    ::close(file_);
  }
}

template <class Lazy>
void* BasicSimHostBacking<Lazy>::try_map_memory(std::size_t bytes, bool is_poisoned) {
  std::size_t const all = mapped_bytes(bytes);
  if (all < bytes) {
    return nullptr;
  }
  int const flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const base = ::mmap(nullptr, all, PROT_NONE, flags, -1, 0);
  if (base == MAP_FAILED) {
    return nullptr;
  }
  void* const p = static_cast<std::byte*>(base) + page_bytes_;
  if (::mprotect(p, all - 2 * page_bytes_, PROT_READ | PROT_WRITE) != 0) {
    ::munmap(base, all);
    return nullptr;
  }
#if defined(MADV_HUGEPAGE)
  // As drivers do, use large pages: direct I/O splits its requests by the number of separate pages.
  static_cast<void>(::madvise(p, bytes, MADV_HUGEPAGE));
#endif
  if (is_poisoned && options_->poison && bytes <= options_->poison_limit_bytes) {
    std::memset(p, options_->poison_byte, bytes);
  }
  return p;
}

template <class Lazy>
void BasicSimHostBacking<Lazy>::unmap_memory(void* p, std::size_t bytes) noexcept {
  ::munmap(static_cast<std::byte*>(p) - page_bytes_, mapped_bytes(bytes));
}

template <class Lazy>
void* BasicSimHostBacking<Lazy>::reserve_address(std::size_t bytes) {
  // Reserves more than is needed, so that an aligned address with a page on each side lies in it,
  // and gives back the rest.
  std::size_t const granularity = options_->granularity_bytes;
  std::size_t const wanted = mapped_bytes(bytes);
  std::size_t const all = wanted + granularity;
  int const flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  errno = ENOMEM;  // in case the sum has wrapped around, since the system is not called then
  void* const base = all < bytes ? MAP_FAILED : ::mmap(nullptr, all, PROT_NONE, flags, -1, 0);
  if (base == MAP_FAILED) {
    fail("cannot reserve addresses");
  }
  auto const begin = reinterpret_cast<std::uintptr_t>(base);
  std::size_t const head = round_up(begin + page_bytes_, granularity) - page_bytes_ - begin;
  std::size_t const tail = all - head - wanted;
  auto* const kept = static_cast<std::byte*>(base) + head;
  if (head != 0) {
    ::munmap(base, head);
  }
  if (tail != 0) {
    ::munmap(kept + wanted, tail);
  }
  return kept + page_bytes_;
}

template <class Lazy>
std::uint64_t BasicSimHostBacking<Lazy>::create_physical(std::size_t bytes) {
  if (file_ < 0) {
    file_ = ::memfd_create("spillway-sim", MFD_CLOEXEC);
    if (file_ < 0) {
      fail("cannot make a memory file");
    }
  }
  auto const fits = std::find_if(free_file_ranges_.begin(),
                                 free_file_ranges_.end(),
                                 [bytes](auto const& range) { return range.second >= bytes; });
  std::uint64_t offset = file_bytes_;
  if (fits != free_file_ranges_.end()) {
    offset = fits->first;
    std::size_t const left = fits->second - bytes;
    if (left != 0) {
      free_file_ranges_.emplace(offset + bytes, left);
    }
    free_file_ranges_.erase(fits);
  } else {
    if (::ftruncate(file_, static_cast<off_t>(file_bytes_ + bytes)) != 0) {
      fail("cannot grow the memory file");
    }
    file_bytes_ += bytes;
  }
  if (options_->poison && bytes <= options_->poison_limit_bytes) {
    std::array<unsigned char, 4096> pattern{};
    pattern.fill(options_->poison_byte);
    for (std::size_t done = 0; done < bytes; done += pattern.size()) {
      auto const at = static_cast<off_t>(offset + done);
      if (::pwrite(file_, pattern.data(), pattern.size(), at) < 0) {
        release_physical(offset, bytes);
        fail("cannot write to the memory file");
      }
    }
  }
  return offset;
}

template <class Lazy>
void BasicSimHostBacking<Lazy>::release_physical(std::uint64_t offset, std::size_t bytes) noexcept {
  // If the hole cannot be punched, this process keeps using the pages, but nothing else changes.
  [[maybe_unused]] int const result = ::fallocate(file_,
                                                  FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                                  static_cast<off_t>(offset),
                                                  static_cast<off_t>(bytes));
  free_file_range(offset, bytes);
}

template <class Lazy>
void BasicSimHostBacking<Lazy>::free_file_range(std::uint64_t offset, std::size_t bytes) {
  auto next = free_file_ranges_.lower_bound(offset);
  if (next != free_file_ranges_.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = free_file_ranges_.erase(next);
  }
  if (next != free_file_ranges_.begin()) {
    auto const before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_file_ranges_.emplace_hint(next, offset, bytes);
}

template <class Lazy>
void BasicSimHostBacking<Lazy>::map(void* p, std::uint64_t offset, std::size_t bytes) {
  int const flags = MAP_SHARED | MAP_FIXED;
  auto const at = static_cast<off_t>(offset);
  if (::mmap(p, bytes, PROT_READ | PROT_WRITE, flags, file_, at) == MAP_FAILED) {
    fail("cannot map physical memory");
  }
}

template <class Lazy>
void BasicSimHostBacking<Lazy>::unmap(void* p, std::size_t bytes) noexcept {
  int const flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (::mmap(p, bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED) {
    ::mprotect(p, bytes, PROT_NONE);  // the pages stay, but are inaccessible
  }
}

/// The memory of a simulated device that holds no bytes: addresses that are never reused.
///
/// Threads  thread-compatible.
/// Address  beyond what user space can map, so an access faults.
class SimFakeBacking {
 public:
  static constexpr bool holds_bytes = false;

  explicit SimFakeBacking(SimOptions const& options) noexcept
      : alignment_{std::max(options.granularity_bytes, 2_MiB)} {}

  [[nodiscard]] void* try_map_memory(std::size_t bytes, bool /*is_poisoned*/) noexcept {
    return take(bytes);
  }
  void unmap_memory(void* /*p*/, std::size_t /*bytes*/) noexcept {}
  [[nodiscard]] void* reserve_address(std::size_t bytes) {
    void* const p = take(bytes);
    if (p == nullptr) {
      throw DeviceError{"SimApi: cannot reserve addresses: none are left"};
    }
    return p;
  }
  void free_address(void* /*p*/, std::size_t /*bytes*/) noexcept {}
  [[nodiscard]] std::uint64_t create_physical(std::size_t /*bytes*/) noexcept { return 0; }
  void release_physical(std::uint64_t /*offset*/, std::size_t /*bytes*/) noexcept {}
  void map(void* /*p*/, std::uint64_t /*offset*/, std::size_t /*bytes*/) noexcept {}
  void unmap(void* /*p*/, std::size_t /*bytes*/) noexcept {}

 private:
  static constexpr std::uintptr_t first = std::uintptr_t{1} << 56U;
  static constexpr std::uintptr_t last = std::uintptr_t{1} << 63U;

  [[nodiscard]] void* take(std::size_t bytes) noexcept {
    if (bytes > last - next_ - 2 * alignment_) {
      return nullptr;
    }
    void* const p = reinterpret_cast<void*>(next_);     // NOLINT(performance-no-int-to-ptr)
    next_ += round_up(bytes, alignment_) + alignment_;  // the gap keeps neighbours apart
    return p;
  }

  std::size_t alignment_;
  std::uintptr_t next_ = first;
};

SPILLWAY_COMPILED_PART(class BasicSimHostBacking<>);

}  // namespace spillway::detail
