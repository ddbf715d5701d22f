// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#if defined(SPILLWAY_WITH_XXHASH) && SPILLWAY_WITH_XXHASH
#  if defined(SPILLWAY_COMPILED)
#    error "spillway::compiled has no checksums: link spillway::spillway instead"
#  endif
#  define XXH_INLINE_ALL
#  include <xxhash.h>
#  undef XXH_INLINE_ALL
#endif

namespace spillway::detail {

/// Keeps a checksum (xxHash) of each unit of the swap file, so that bytes that were corrupted on
/// the disk are recognised when they are read.
///
/// Threads  thread-safe, as long as no two threads note or check the same unit.
/// Cost     4 bytes of memory for each 4096 bytes of the file; one pass over all bytes transferred.
class FileChecksums {
 public:
  static constexpr std::size_t unit_bytes = 4096;
#if defined(SPILLWAY_WITH_XXHASH) && SPILLWAY_WITH_XXHASH
  static constexpr bool is_available = true;
#else
  static constexpr bool is_available = false;
#endif

  /// Makes room for the sums of a file of this size. @throws std::bad_alloc
  void grow(std::uint64_t file_bytes) {
    std::scoped_lock const lock{mutex_};
    if (std::size_t const units = file_bytes / unit_bytes; units > sums_.size()) {
      sums_.resize(units);
    }
  }

  /// Stores the checksums of `bytes` bytes that are written at `offset`. Both numbers are multiples
  /// of the unit.
  void note(std::byte const* from, std::size_t bytes, std::uint64_t offset) noexcept {
    for_each_batch(from, bytes, offset, [this](Batch const& batch, std::size_t first) {
      std::copy_n(batch.sums.begin(), batch.count, sums_.begin() + std::ptrdiff_t(first));
      return true;
    });
  }

  /// Returns whether `bytes` bytes that were read at `offset` have the checksums stored by `note`.
  [[nodiscard]] bool
  match(std::byte const* from, std::size_t bytes, std::uint64_t offset) noexcept {
    return for_each_batch(from, bytes, offset, [this](Batch const& batch, std::size_t first) {
      return std::equal(batch.sums.begin(),
                        batch.sums.begin() + std::ptrdiff_t(batch.count),
                        sums_.begin() + std::ptrdiff_t(first));
    });
  }

 private:
  struct Batch {
    std::array<std::uint32_t, 64> sums{};
    std::size_t count = 0;
  };

  [[nodiscard]] static std::uint32_t sum_of([[maybe_unused]] std::byte const* unit) noexcept {
#if defined(SPILLWAY_WITH_XXHASH) && SPILLWAY_WITH_XXHASH
    return static_cast<std::uint32_t>(XXH3_64bits(unit, unit_bytes));
#else
    return 0;
#endif
  }

  /// Computes checksums in batches without the lock, and calls `use(batch, number of its first
  /// unit)` under the lock until it returns false.
  template <class Use>
  bool for_each_batch(std::byte const* from, std::size_t bytes, std::uint64_t offset, Use use) {
    SPILLWAY_ASSERT(bytes % unit_bytes == 0 && offset % unit_bytes == 0);
    std::size_t left = bytes / unit_bytes;
    for (std::size_t first = offset / unit_bytes; left > 0;) {
      Batch batch;
      for (; batch.count < std::min(left, batch.sums.size()); ++batch.count, from += unit_bytes) {
        batch.sums[batch.count] = sum_of(from);
      }
      std::scoped_lock const lock{mutex_};
      SPILLWAY_ASSERT(first + batch.count <= sums_.size());
      if (!use(batch, first)) {
        return false;
      }
      first += batch.count;
      left -= batch.count;
    }
    return true;
  }

  std::mutex mutex_;  // guards what follows
  std::vector<std::uint32_t> sums_;
};

}  // namespace spillway::detail
