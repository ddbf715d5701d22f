// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace spillway::torch {

/// A quantity as PyTorch counts it: what it is now, the most it was, and what was added and taken away.
struct TensorStat {
  std::int64_t current = 0;
  std::int64_t peak = 0;
  std::int64_t allocated = 0;
  std::int64_t freed = 0;

  void add(std::size_t n) noexcept {
    current += static_cast<std::int64_t>(n);
    allocated += static_cast<std::int64_t>(n);
    peak = std::max(peak, current);
  }
  void subtract(std::size_t n) noexcept {
    current -= static_cast<std::int64_t>(n);
    freed += static_cast<std::int64_t>(n);
  }
  /// For what is derived from others and not added to.
  void set(std::int64_t now) noexcept {
    std::int64_t const change = now - current;
    (change > 0 ? allocated : freed) += change > 0 ? change : -change;
    current = now;
    peak = std::max(peak, current);
  }
  void reset_peak() noexcept { peak = current; }
  void reset_accumulated() noexcept { allocated = freed = 0; }

  friend bool operator==(TensorStat const&, TensorStat const&) noexcept = default;
};

/// PyTorch counts allocations of up to 1 MiB apart from larger ones.
inline constexpr std::size_t largest_small_bytes = std::size_t{1} << 20U;

/// One quantity: of all allocations, of the small ones and of the large ones.
class TensorStatArray {
 public:
  void add(std::size_t allocation_bytes, std::size_t n) noexcept {
    stats_[0].add(n);
    pool_of(allocation_bytes).add(n);
  }
  void subtract(std::size_t allocation_bytes, std::size_t n) noexcept {
    stats_[0].subtract(n);
    pool_of(allocation_bytes).subtract(n);
  }
  void set_large(std::int64_t now) noexcept {
    stats_[0].set(now);
    stats_[2].set(now);
  }
  void reset_peak() noexcept {
    for (TensorStat& stat : stats_) {
      stat.reset_peak();
    }
  }
  void reset_accumulated() noexcept {
    for (TensorStat& stat : stats_) {
      stat.reset_accumulated();
    }
  }

  [[nodiscard]] TensorStat const& all() const noexcept { return stats_[0]; }
  [[nodiscard]] TensorStat const& small() const noexcept { return stats_[1]; }
  [[nodiscard]] TensorStat const& large() const noexcept { return stats_[2]; }

  friend bool operator==(TensorStatArray const&, TensorStatArray const&) noexcept = default;

 private:
  [[nodiscard]] TensorStat& pool_of(std::size_t allocation_bytes) noexcept {
    return stats_[allocation_bytes <= largest_small_bytes ? 1 : 2];
  }

  std::array<TensorStat, 3> stats_{};
};

/// What `torch.cuda.memory_stats` shows, in its terms.
///
/// An allocation is *allocated* as long as a tensor has it, wherever its bytes are, and *active* while it
/// takes up device memory; what has been swapped out is allocated and not active. Reserved memory is
/// active or, since it lies in a reservation together with what is, *inactive split*.
struct TensorStats {
  TensorStatArray allocation;
  TensorStatArray segment;
  TensorStatArray active;
  TensorStatArray inactive_split;
  TensorStatArray allocated_bytes;
  TensorStatArray reserved_bytes;
  TensorStatArray active_bytes;
  TensorStatArray inactive_split_bytes;
  TensorStatArray requested_bytes;
  std::int64_t num_alloc_retries = 0;  ///< attempts to make room that failed
  std::int64_t num_ooms = 0;           ///< errors that reached the program
  std::int64_t num_device_alloc = 0;   ///< calls that reserved device memory
  std::int64_t num_device_free = 0;

  template <class Visit>
  void for_each_array(Visit visit) {
    for (TensorStatArray* const array : {&allocation,
                                         &segment,
                                         &active,
                                         &inactive_split,
                                         &allocated_bytes,
                                         &reserved_bytes,
                                         &active_bytes,
                                         &inactive_split_bytes,
                                         &requested_bytes}) {
      visit(*array);
    }
  }
  void reset_peak() noexcept {
    for_each_array([](TensorStatArray& array) { array.reset_peak(); });
  }
  void reset_accumulated() noexcept {
    for_each_array([](TensorStatArray& array) { array.reset_accumulated(); });
    num_alloc_retries = num_ooms = num_device_alloc = num_device_free = 0;
  }
};

}  // namespace spillway::torch
