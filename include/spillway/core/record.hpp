// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/types.hpp>

#include <cstddef>
#include <cstdint>

namespace spillway {

/// The kind of a record.
enum class RecordKind : std::uint8_t {
  allocate,       ///< a block was made; it has no range yet
  deallocate,     ///< a block is gone, and its range if it had one
  make_resident,  ///< a block got a range, and no bytes have to come
  swap_out,       ///< bytes are on their way to the host pool, and the range was given up
  copy_out,       ///< bytes are on their way to the host pool ahead of need, and the range was kept
  swap_in,        ///< bytes are on their way back, because an acquire needs them
  prefetch,       ///< bytes are on their way back ahead of need
  drop,           ///< a range was given up without a copy
  recompute,      ///< bytes are being made again by the block's recipe
  move,           ///< bytes are on their way to another place in the device
  grow,           ///< the reservation grew
  trim,           ///< the reservation shrank
  host_wait,      ///< a call waited on the host
  out_of_memory,  ///< room could not be made
  step            ///< `begin_step` was called
};

/// Describes one thing that an allocator did, for its observer.
///
/// Times are the device's `clock_ns()` when the call was made on the host; the work itself runs
/// later, in stream order: a `DeviceSpan` says when. Only a `host_wait` has a duration.
struct Record {
  RecordKind kind{};
  BlockId block{};
  std::size_t bytes = 0;
  /// The address of the range that the block has now or has given up; null if there is none.
  void const* address = nullptr;
  std::uint64_t start_ns = 0;
  std::uint64_t end_ns = 0;
};

/// The kind of work that a `DeviceSpan` describes.
enum class SpanKind : std::uint8_t { copy_to_host, copy_to_device, copy_on_device, kernel };

/// A copy, a batch of copies or a kernel, and when the device ran it, on the clock of `clock_ns()`.
struct DeviceSpan {
  SpanKind kind{};
  std::size_t bytes = 0;          ///< sum over all copies of a batch; 0 for a kernel
  void const* address = nullptr;  ///< device address that the first copy reads or writes
  std::uint64_t start_ns = 0;
  std::uint64_t end_ns = 0;
};

}  // namespace spillway
