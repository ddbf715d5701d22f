// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/pager.hpp>
#include <spillway/concepts/policy_set.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/host/host_staging.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/pager/swap_pager.hpp>
#include <spillway/policies.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

namespace spillway {

/// A device's memory, larger than it is: blocks that are not leased may leave it and come back.
///
/// Owns one of each part: the arena, the host pool, the prefetcher with its copy streams, the pager.
/// Every call is documented at `SwapPager`; this class builds the parts, checks the options and sees
/// to an orderly end.
///
/// Threads  thread-safe, unless the policies' lock is `NullLock`.
/// Streams  a stream that leases were acquired on lives until `retire_stream` or the end of this
///          object.
/// Address  promised by leases only.
template <PolicySet Policies = DefaultPolicies>
class DeviceAllocator {
 public:
  using State = detail::PagerState<Policies>;
  using pager_type = detail::SwapPager<Policies>;
  using device_type = typename Policies::device;
  using stream_type = typename device_type::stream_type;
  using lease_type = typename pager_type::lease_type;
  using observer_type = typename Policies::observer;
  using prefetch_type = typename Policies::prefetch;

  static constexpr bool is_thread_safe = pager_type::is_thread_safe;

  struct Options {
    /// The most device memory to use. 0: nine tenths of what the device has free now.
    std::size_t capacity_bytes = 0;
    /// Taken from the device at once; the rest is taken when it is needed. Default: all.
    std::size_t initial_bytes = std::numeric_limits<std::size_t>::max();
    /// Least step of growth. 0: what is needed, rounded up to 2 MiB.
    std::size_t growth_bytes = 0;
    /// Scratch for moves that overlap themselves, on top of the capacity.
    std::size_t bounce_bytes = 4_MiB;
    /// Where swapped-out bytes go. With no tier given: pinned memory, grown as needed up to half of
    /// the machine's memory.
    HostPoolOptions host{};
    PagerOptions paging{};
    prefetch_type prefetch{};
  };

  /// On a device of its own, made by default.
  explicit DeviceAllocator(Options options = {}) : DeviceAllocator{nullptr, std::move(options)} {}

  /// On `device`, which is not owned and must outlive the allocator.
  ///
  /// @throws OutOfDeviceMemory if the initial reservation does not fit, ContractViolation for options
  ///         that contradict each other, FileTierError, DeviceError
  explicit DeviceAllocator(device_type& device, Options options = {})
      : DeviceAllocator{&device, std::move(options)} {}

  DeviceAllocator(DeviceAllocator const&) = delete;
  DeviceAllocator& operator=(DeviceAllocator const&) = delete;

  /// Waits on the host for all work that uses this allocator's memory, then gives it back.
  ///
  /// Buffers and leases must be gone: they would point into nothing. If not, the program ends with
  /// the ContractViolation that `close` would have thrown.
  ~DeviceAllocator() {  // NOLINT(bugprone-exception-escape): that is how it ends the program
    close();
    try {
      synchronize();
    } catch (DeviceError const&) {  // NOLINT(bugprone-empty-catch): a dead device has no work left
    }
  }

  /// Checks that the allocator may be destroyed.
  ///
  /// @throws ContractViolation naming how many blocks and leases are left
  void close() const {
    Stats const now = stats();
    if (now.allocated.blocks.current != 0) {
      throw ContractViolation{"an allocator ends while " +
                              std::to_string(now.allocated.blocks.current) +
                              " of its blocks exist, " + std::to_string(now.leased.blocks.current) +
                              " of them leased: destroy buffers and leases first"};
    }
  }

  [[nodiscard]] BlockId allocate(std::size_t size_bytes) { return pager_.allocate(size_bytes); }
  [[nodiscard]] BlockId declare(std::size_t size_bytes) { return pager_.declare(size_bytes); }
  void deallocate(BlockId id) { pager_.deallocate(id); }
  void abandon(BlockId id) noexcept { pager_.abandon(id); }
  [[nodiscard]] lease_type acquire(BlockId id, Access access, stream_type stream) {
    return pager_.acquire(id, access, stream);
  }
  [[nodiscard]] std::vector<lease_type> acquire_all(std::span<LeaseRequest const> requests,
                                                    stream_type stream) {
    return pager_.acquire_all(requests, stream);
  }
  [[nodiscard]] std::vector<lease_type> acquire_all(std::initializer_list<LeaseRequest> requests,
                                                    stream_type stream) {
    return pager_.acquire_all({requests.begin(), requests.size()}, stream);
  }
  void swap_out(BlockId id) { pager_.swap_out(id); }
  void swap_in(BlockId id) { pager_.swap_in(id); }
  [[nodiscard]] Residency residency(BlockId id) const { return pager_.residency(id); }

  [[nodiscard]] void* stable_address(BlockId id) const requires State::keeps_addresses {
    return pager_.stable_address(id);
  }

  void begin_step() { pager_.begin_step(); }
  std::size_t compact(std::size_t budget_bytes = std::numeric_limits<std::size_t>::max()) {
    return pager_.compact(budget_bytes);
  }
  std::size_t trim_sync() { return pager_.trim_sync(); }
  void prepare_capture(stream_type stream) { pager_.prepare_capture(stream); }
  void retire_stream(stream_type stream) { pager_.retire_stream(stream); }
  /// Waits on the host for every use of this allocator's memory that has been enqueued.
  void synchronize() {
    order_.synchronize(
        Ticket{StreamIndex::every, std::numeric_limits<std::uint64_t>::max() >> 16U});
  }

  /// Copies between ordinary host memory and a leased block, through pinned memory of this allocator.
  ///
  /// @throws DeviceError; std::bad_alloc if no pinned memory can be had
  /// @stream enqueues on `stream`, on which the lease was acquired, and waits on the host
  /// @threads one such copy at a time; others wait their turn
  void
  copy_from_host_sync(void* device_to, void const* from, std::size_t bytes, stream_type stream) {
    staging_.copy_from_host_sync(device_to, from, bytes, stream);
  }
  void copy_to_host_sync(void* to, void const* device_from, std::size_t bytes, stream_type stream) {
    staging_.copy_to_host_sync(to, device_from, bytes, stream);
  }

  [[nodiscard]] Stats stats() const { return pager_.stats(); }
  [[nodiscard]] HostPoolStats host_stats() const { return pool_.stats(); }
  void reset_peak_stats() { pager_.reset_peak_stats(); }
  [[nodiscard]] observer_type& observer() noexcept { return pager_.observer(); }
  [[nodiscard]] device_type& device() noexcept { return *device_; }
  [[nodiscard]] pager_type const& pager() const noexcept { return pager_; }

 private:
  DeviceAllocator(device_type* device, Options options)
      : owned_device_{device == nullptr ? std::make_unique<device_type>() : nullptr},
        device_{device == nullptr ? owned_device_.get() : device},
        order_{*device_},
        arena_(make_arena(*device_, order_, options)),
        pool_{*device_, order_, host_options(options)},
        streams_{*device_, order_, pool_},
        prefetcher_{std::move(options.prefetch)},
        pager_{*device_, order_, arena_, pool_, streams_, prefetcher_, checked(options.paging)} {}

  static ArenaOptions arena_options(device_type const& device, Options const& options) {
    std::size_t const capacity = options.capacity_bytes != 0
                                     ? options.capacity_bytes
                                     : device.memory_info().free_bytes / 10 * 9;
    return {.capacity_bytes = capacity / granule_bytes * granule_bytes,
            .initial_bytes = options.initial_bytes,
            .growth_bytes = options.growth_bytes,
            .bounce_bytes = options.bounce_bytes};
  }

  static typename State::Arena
  make_arena(device_type& device, StreamOrder<device_type>& order, Options const& options) {
    if constexpr (State::maps_pages) {
      return typename State::Arena(device, order, arena_options(device, options).capacity_bytes);
    } else {
      return typename State::Arena(device, arena_options(device, options));
    }
  }

  static HostPoolOptions host_options(Options const& options) {
    HostPoolOptions host = options.host;
    bool const is_unset =
        host.pinned_bytes == 0 && host.pageable_bytes == 0 && host.file_bytes == 0;
    if (is_unset && options.paging.swapping) {
      auto const pages = static_cast<std::size_t>(std::max(0L, sysconf(_SC_PHYS_PAGES)));
      auto const page_bytes = static_cast<std::size_t>(std::max(0L, sysconf(_SC_PAGESIZE)));
      host.pinned_bytes = pages * page_bytes / 2;
    }
    return host;
  }

  static PagerOptions checked(PagerOptions options) {
    expects(options.high_watermark > 0 && options.high_watermark <= 1 &&
                options.low_watermark > 0 && options.low_watermark <= options.high_watermark,
            "watermarks are parts of the capacity: 0 < low_watermark <= high_watermark <= 1");
    expects(options.link_bytes_per_second > 0 && options.device_bytes_per_second > 0,
            "bandwidths that plans are priced with must be positive");
    return options;
  }

  // Destroyed from the last to the first: nothing outlives what it uses.
  std::unique_ptr<device_type> owned_device_;
  device_type* device_;
  StreamOrder<device_type> order_;
  typename State::Arena arena_;
  typename State::Pool pool_;
  detail::CopyStreams<device_type> streams_;
  typename State::Prefetcher prefetcher_;
  pager_type pager_;
  detail::HostStaging<device_type> staging_{*device_};
};

static_assert(Pager<DeviceAllocator<>>);

}  // namespace spillway
