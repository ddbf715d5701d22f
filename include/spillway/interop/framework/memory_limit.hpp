// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

namespace spillway::framework {

/// Lowers an allocator's limit below its capacity: leased blocks that nobody else may have the room of.
///
/// Threads  thread-safe.
/// Streams  the leases belong to the stream given to `set_limit`.
template <class Allocator>
class LimitReservation {
 public:
  using Lease = typename Allocator::lease_type;
  using stream_type = typename Allocator::stream_type;

  static constexpr bool is_thread_safe = true;
  static constexpr std::size_t piece_bytes = 1_MiB;

  /// `memory` is not owned and must outlive the reservation.
  explicit LimitReservation(Allocator& memory) : memory_{&memory} {}
  LimitReservation(LimitReservation const&) = delete;
  LimitReservation& operator=(LimitReservation const&) = delete;
  ~LimitReservation() { drop_to(0); }

  [[nodiscard]] std::size_t limit_bytes() const {
    std::scoped_lock const lock{mutex_};
    return memory_->stats().capacity_bytes - bytes_;
  }

  /// What the allocator's statistics count as leased and resident for its sake.
  [[nodiscard]] std::size_t bytes() const {
    std::scoped_lock const lock{mutex_};
    return bytes_;
  }

  /// Rounded up by less than `piece_bytes`.
  ///
  /// @param start_reclaim  called when room is needed that leases stand in the way of; returns whether it may
  ///                 have helped
  /// @throws ContractViolation for more than the capacity; OutOfDeviceMemory if what is in use does not
  ///         fit: the limit is then lowered as far as it can be
  void
  set_limit(std::size_t limit_bytes, stream_type stream, std::function<bool()> const& start_reclaim) {
    std::scoped_lock const lock{mutex_};
    std::size_t const capacity = memory_->stats().capacity_bytes;
    expects(limit_bytes <= capacity, "a limit cannot be above the capacity");
    std::size_t const wanted = (capacity - limit_bytes) / piece_bytes * piece_bytes;
    drop_to(wanted);
    std::size_t bytes = wanted - bytes_;
    while (bytes_ < wanted) {
      bytes = std::min(bytes, wanted - bytes_);
      try {
        add(bytes, stream);
      } catch (OutOfDeviceMemory const&) {
        if (start_reclaim()) {
          continue;
        }
        if (bytes <= piece_bytes) {
          throw;
        }
        bytes = std::max(piece_bytes, bytes / 2 / piece_bytes * piece_bytes);
      }
    }
  }

 private:
  void add(std::size_t bytes, stream_type stream) {
    BlockId const block = memory_->allocate(bytes);
    try {
      pieces_.emplace_back(block, memory_->acquire(block, Access::write, stream));
    } catch (...) {
      memory_->abandon(block);
      throw;
    }
    bytes_ += bytes;
  }

  void drop_to(std::size_t wanted) noexcept {
    while (bytes_ > wanted) {
      auto [block, lease] = std::move(pieces_.back());
      pieces_.pop_back();
      bytes_ -= lease.size_bytes();
      lease.release();
      memory_->abandon(block);
    }
  }

  Allocator* memory_;
  mutable std::mutex mutex_;
  std::vector<std::pair<BlockId, Lease>> pieces_;
  std::size_t bytes_ = 0;
};

}  // namespace spillway::framework
