// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace spillway {

/// The properties of a simulated device. A rate of 0 means as fast as possible; on a virtual clock
/// copying then takes no time apart from the latency.
struct SimOptions {
  std::size_t capacity_bytes = 1_GiB;  ///< limit for reservations and physical memory together
  std::size_t pinned_capacity_bytes = std::numeric_limits<std::size_t>::max();
  int numa_node = -1;
  /// Of virtual memory mappings; a power of two, a multiple of a page
  std::size_t granularity_bytes = 64_KiB;
  /// Of the link in each direction, which are independent
  std::uint64_t link_bytes_per_second = 0;
  /// Rate of copies inside the device; a byte counts once, though it is read and written
  std::uint64_t on_device_bytes_per_second = 0;
  std::uint64_t copy_latency_ns = 0;  ///< added to each copy and fill
  bool poison = true;                 ///< fill memory that is given out, if the device holds bytes
  unsigned char poison_byte = 0xFF;   ///< reads as NaN in every floating-point type
  /// Larger ranges are not poisoned, since writing to them would make the system provide memory for
  /// them.
  std::size_t poison_limit_bytes = 64_MiB;
  bool checked = true;  ///< check that both ranges of every copy and fill are live
  /// Refuse leases that read a block which was never written. Only for a `checked` device that
  /// holds bytes.
  bool check_reads = true;
  /// Stepped devices only: refuse work that nothing orders after earlier work on the same bytes
  bool check_order = true;
};

/// The calls of a simulated device that can be made to fail.
enum class SimCall : std::uint8_t {
  reserve,          ///< fails by returning null
  allocate_pinned,  ///< fails by returning null
  copy,  ///< this and the following fail by throwing DeviceError; each copy of a batch counts
  fill,
  launch_host,
  create_stream,
  create_event,
  record,
  wait,
  synchronize,
  reserve_address,
  create_physical,
  map,
};

/// How often each call of a simulated device was made since its construction. Calls that failed do
/// not count.
///
/// If two values are equal, no device call was made between them. `clock_ns` and `numa_node` only
/// read a member and are not counted.
struct SimCalls {
  std::uint64_t reserves = 0;
  std::uint64_t releases = 0;
  std::uint64_t pinned_allocations = 0;
  std::uint64_t pinned_frees = 0;
  std::uint64_t copies_to_host = 0;
  std::uint64_t copies_to_device = 0;
  /// Each copy of a batch counts; the same holds for the two above
  std::uint64_t copies_on_device = 0;
  std::uint64_t bytes_to_host = 0;
  std::uint64_t bytes_to_device = 0;
  std::uint64_t bytes_on_device = 0;
  std::uint64_t copy_batches = 0;  ///< calls of `copy_batch`
  std::uint64_t fills = 0;
  std::uint64_t filled_bytes = 0;
  std::uint64_t host_launches = 0;
  std::uint64_t streams_created = 0;
  std::uint64_t streams_destroyed = 0;
  std::uint64_t events_created = 0;
  std::uint64_t events_destroyed = 0;
  std::uint64_t records = 0;
  std::uint64_t waits = 0;                  ///< waits of streams for events
  std::uint64_t completion_queries = 0;     ///< `is_complete`
  std::uint64_t host_synchronizations = 0;  ///< `synchronize`, of events and of streams
  std::uint64_t memory_queries = 0;         ///< `memory_info`
  std::uint64_t address_reservations = 0;
  std::uint64_t address_frees = 0;
  std::uint64_t physical_creations = 0;
  std::uint64_t physical_releases = 0;
  std::uint64_t maps = 0;
  std::uint64_t unmaps = 0;
  std::uint64_t mapped_pieces = 0;    ///< pieces that calls of `map` have mapped
  std::uint64_t unmapped_pieces = 0;  ///< pieces that calls of `unmap` have unmapped

  [[nodiscard]] std::uint64_t copies() const noexcept {
    return copies_to_host + copies_to_device + copies_on_device;
  }
  [[nodiscard]] std::uint64_t copied_bytes() const noexcept {
    return bytes_to_host + bytes_to_device + bytes_on_device;
  }

  void count_copy(CopyKind kind, std::size_t bytes) noexcept {
    switch (kind) {
    case CopyKind::to_host:
      ++copies_to_host;
      bytes_to_host += bytes;
      return;
    case CopyKind::to_device:
      ++copies_to_device;
      bytes_to_device += bytes;
      return;
    case CopyKind::on_device:
      ++copies_on_device;
      bytes_on_device += bytes;
      return;
    }
  }

  friend bool operator==(SimCalls const&, SimCalls const&) noexcept = default;
};

/// The memory, streams and events that a simulated device has given out and that have not been
/// given back.
struct SimUsage {
  std::size_t device_bytes = 0;  ///< reservations and physical memory
  std::size_t pinned_bytes = 0;
  std::size_t streams = 0;
  std::size_t events = 0;

  friend bool operator==(SimUsage const&, SimUsage const&) noexcept = default;
};

/// The calls of a simulated device that a test has told to fail.
///
/// Threads  thread-compatible; the device uses it under its own lock.
class SimFaults {
 public:
  /// Makes the `nth` call of that kind from now on fail; 1 is the next one, 0 disarms the fault.
  void arm(SimCall call, std::uint64_t nth) noexcept { at(call) = nth; }

  /// Counts the call, and returns true if it is the one that has to fail.
  [[nodiscard]] bool strikes(SimCall call) noexcept {
    std::uint64_t& left = at(call);
    return left != 0 && --left == 0;
  }

  /// Counts the call. @throws DeviceError if it is the one that has to fail
  void strike(SimCall call, char const* name) {
    if (strikes(call)) {
      throw DeviceError{detail::Text{"SimApi: "} + name + " failed, as it was told to"};
    }
  }

 private:
  static constexpr std::size_t calls = static_cast<std::size_t>(SimCall::map) + 1;

  [[nodiscard]] std::uint64_t& at(SimCall call) noexcept {
    return left_[static_cast<std::size_t>(call)];
  }

  std::array<std::uint64_t, calls> left_{};
};

}  // namespace spillway
