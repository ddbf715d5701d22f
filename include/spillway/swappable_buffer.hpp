// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/pager.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>

#include <cstddef>
#include <utility>

namespace spillway {

/// A move-only run of untyped bytes that lives on the device or in host swap.
///
/// Shape    one contiguous range of `size_bytes()` bytes, aligned to 256 B while resident.
/// Threads  thread-compatible: distinct buffers may be used at once, one buffer may not.
/// Streams  `acquire` enqueues on the stream it is given; nothing waits, and no stream is kept.
/// Address  fixed only while a lease is held; ask the lease each time, never cache it.
template <Pager P>
class SwappableBuffer {
 public:
  using stream_type = typename P::stream_type;
  using lease_type = typename P::lease_type;

  /// An empty buffer, as after a move: it holds nothing and nothing may be asked of it.
  SwappableBuffer() noexcept = default;

  /// @param pager       not owned; must outlive the buffer
  /// @param size_bytes  more than 0
  /// @throws OutOfDeviceMemory, ContractViolation for size 0; nothing is left behind
  SwappableBuffer(P& pager, std::size_t size_bytes)
      : pager_{&pager}, id_{pager.allocate(size_bytes)}, size_bytes_{size_bytes} {}

  SwappableBuffer(SwappableBuffer&& other) noexcept
      : pager_{std::exchange(other.pager_, nullptr)},
        id_{std::exchange(other.id_, BlockId{})},
        size_bytes_{std::exchange(other.size_bytes_, 0)} {}

  SwappableBuffer& operator=(SwappableBuffer&& other) noexcept {
    SwappableBuffer moved{std::move(other)};
    std::swap(pager_, moved.pager_);
    std::swap(id_, moved.id_);
    std::swap(size_bytes_, moved.size_bytes_);
    return *this;
  }

  /// Frees the block; if a lease on it is still held, as soon as that lease ends.
  ~SwappableBuffer() {
    if (pager_ != nullptr) {
      pager_->abandon(id_);
    }
  }

  /// Frees the block now and leaves the buffer empty.
  ///
  /// @throws ContractViolation if a lease on it is still held; the buffer is then unchanged
  void reset() {
    if (pager_ != nullptr) {
      pager_->deallocate(id_);
      pager_ = nullptr;
      id_ = BlockId{};
      size_bytes_ = 0;
    }
  }

  /// Makes the block resident and holds it there.
  ///
  /// @param access  `write` discards the contents and brings nothing in
  /// @param stream  work enqueued there until the lease ends may use the bytes
  /// @throws OutOfDeviceMemory, OutOfHostMemory, DeviceError, FileTierError; the contents are safe
  /// @stream  orders `stream` after earlier conflicting uses of the block; does not wait
  /// @cost    O(1) when the block is resident; else what making room and one swap-in cost
  [[nodiscard]] lease_type acquire(Access access, stream_type stream) {
    return pager().acquire(id_, access, stream);
  }

  /// Copies the bytes to host swap and gives the device range back.
  ///
  /// @throws ContractViolation if a lease is held, OutOfHostMemory, DeviceError; then unchanged
  void swap_out() { pager().swap_out(id_); }

  /// Brings the bytes back ahead of need.
  ///
  /// @throws OutOfDeviceMemory, DeviceError, FileTierError; then unchanged
  void swap_in() { pager().swap_in(id_); }

  [[nodiscard]] Residency residency() const { return pager().residency(id_); }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return size_bytes_; }
  [[nodiscard]] BlockId id() const noexcept { return id_; }
  [[nodiscard]] bool is_empty() const noexcept { return pager_ == nullptr; }
  /// What `acquire_all` takes: this buffer as an operand.
  [[nodiscard]] LeaseRequest request(Access access) const noexcept { return {id_, access}; }

 private:
  [[nodiscard]] P& pager() const {
    expects(pager_ != nullptr, "the buffer is empty: it was moved from, reset or never filled");
    return *pager_;
  }

  P* pager_ = nullptr;  // not owned
  BlockId id_{};
  std::size_t size_bytes_ = 0;
};

}  // namespace spillway
