// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/prefetch_policy.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/policy/prefetch/schedule_lookahead.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace spillway::framework {

/// Lowers an allocator's limit below its capacity while it is in use, and raises it again: reserves
/// the bytes above the limit, as blocks under a lease, so that nothing else can be placed there.
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
  ~LimitReservation() { shrink_to(0); }

  [[nodiscard]] std::size_t limit_bytes() const {
    std::scoped_lock const lock{mutex_};
    return memory_->stats().capacity_bytes - bytes_;
  }

  /// The bytes that are reserved, which the allocator's statistics count as leased and resident.
  [[nodiscard]] std::size_t bytes() const {
    std::scoped_lock const lock{mutex_};
    return bytes_;
  }

  /// Sets the limit, rounded up by less than `piece_bytes`.
  ///
  /// @param reclaim  called when leases stand in the way of the reservation; returns whether it may
  ///                 have made some of them end
  /// @throws ContractViolation for more than the capacity; OutOfDeviceMemory if what is in use does
  ///         not fit: the limit is then as low as it can be
  void
  set_limit(std::size_t limit_bytes, stream_type stream, std::function<bool()> const& reclaim) {
    std::scoped_lock const lock{mutex_};
    std::size_t const capacity = memory_->stats().capacity_bytes;
    expects(limit_bytes <= capacity, "a limit cannot be above the capacity");
    std::size_t const wanted = (capacity - limit_bytes) / piece_bytes * piece_bytes;
    shrink_to(wanted);
    std::size_t bytes = wanted - bytes_;
    while (bytes_ < wanted) {
      bytes = std::min(bytes, wanted - bytes_);
      try {
        add(bytes, stream);
      } catch (OutOfDeviceMemory const&) {
        if (reclaim()) {
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

  void shrink_to(std::size_t wanted) noexcept {
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

/// A limit that one thread sets while others read it.
///
/// Threads  thread-safe.
using SharedLimit = std::shared_ptr<std::atomic<std::size_t>>;

/// A `ScheduleLookahead` that brings in no more at once than a sixth of a limit, as the limit is at
/// that time. For memory whose limit is lowered below the capacity that its allocator was made
/// with.
class LimitedLookahead : public ScheduleLookahead {
 public:
  LimitedLookahead() noexcept {}  // NOLINT(modernize-use-equals-default): as ScheduleLookahead's
  LimitedLookahead(PrefetchOptions options, SharedLimit limit_bytes) noexcept
      : ScheduleLookahead{options}, limit_bytes_{std::move(limit_bytes)} {}

  [[nodiscard]] std::size_t max_inflight_bytes() const noexcept {
    std::size_t const most = ScheduleLookahead::max_inflight_bytes();
    return limit_bytes_ == nullptr ? most : std::min(most, limit_bytes_->load() / 6);
  }

 private:
  SharedLimit limit_bytes_;
};

static_assert(PrefetchPolicy<LimitedLookahead>);

}  // namespace spillway::framework
