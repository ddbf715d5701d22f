// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/pager.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/lease.hpp>

#include <cstddef>
#include <utility>

namespace spillway {

/// Untyped bytes that live on the device or in host swap. Move-only, like `std::unique_ptr`.
///
/// Holds one block of a `DeviceAllocator` and frees it at its end. For elements with a type and a
/// shape use `SwappableTensor`.
///
/// Shape    one contiguous range of `size_bytes()` bytes, aligned to 256 B while resident.
/// Threads  thread-compatible: distinct buffers may be used at once, one buffer may not.
/// Streams  `acquire` enqueues on the stream it is given; nothing waits, and no stream is kept.
/// Address  fixed only while a lease is held; ask the lease each time, never cache it.
/// Errors   every call on an empty buffer but the queries without `@throws`, `reset` and assignment
///          throws ContractViolation.
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

  /// Makes the block resident and holds it there, with the access that the type of the lease
  /// allows: `read` gives a `ReadLease`, whose address is `void const*`; `write` and `read_write`
  /// give a `Lease` with a `void*`. A buffer that is const can be acquired for `read` only.
  ///
  /// `write` discards the contents and brings nothing in: everything that is read later has to be
  /// written under this lease.
  ///
  /// @param stream  work enqueued there until the lease ends may use the bytes
  /// @throws OutOfDeviceMemory, OutOfHostMemory, DeviceError, FileTierError; the contents are safe
  /// @stream  orders `stream` after earlier conflicting uses of the block; does not wait
  /// @cost    O(1) when the block is resident; else what making room and one swap-in cost
  template <Access access>
    requires(access == Access::read)
  [[nodiscard]] LeaseFor<lease_type, access> acquire(stream_type stream, CallSite site = {}) const {
    return typed<access>(pager(site).acquire(id_, access, stream));
  }
  template <Access access>
    requires(access != Access::read)
  [[nodiscard]] LeaseFor<lease_type, access> acquire(stream_type stream, CallSite site = {}) {
    return typed<access>(pager(site).acquire(id_, access, stream));
  }
  /// The same three by name. Templates need them, since `acquire<...>` would have to be written
  /// `template acquire<...>` there.
  [[nodiscard]] auto acquire_read(stream_type stream, CallSite site = {}) const {
    return acquire<Access::read>(stream, site);
  }
  [[nodiscard]] auto acquire_write(stream_type stream, CallSite site = {}) {
    return acquire<Access::write>(stream, site);
  }
  [[nodiscard]] auto acquire_read_write(stream_type stream, CallSite site = {}) {
    return acquire<Access::read_write>(stream, site);
  }

  /// The run-time form, for code that learns the access when it runs, such as adapters. The lease's
  /// address is `void*` for every access: see `Lease`. @throws as above
  [[nodiscard]] lease_type acquire(Access access, stream_type stream, CallSite site = {}) {
    return pager(site).acquire(id_, access, stream);
  }

  /// Copies the bytes to host swap and gives the device range back; drops the range without a copy
  /// if the bytes on the host are still valid. No effect on a buffer that is not resident.
  ///
  /// @throws ContractViolation if a lease is held, OutOfHostMemory, DeviceError; then unchanged
  /// @stream  enqueues on a copy stream of the allocator; does not wait
  void swap_out() { pager().swap_out(id_); }

  /// Brings the bytes back ahead of need. No effect on a buffer that is resident or was never
  /// written.
  ///
  /// @throws OutOfDeviceMemory, DeviceError, FileTierError; then unchanged
  /// @stream  as `swap_out`
  void swap_in() { pager().swap_in(id_); }

  /// Where the bytes are now. Asks the device whether a copy is still in flight.
  [[nodiscard]] Residency residency() const { return pager().residency(id_); }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return size_bytes_; }
  [[nodiscard]] BlockId id() const noexcept { return id_; }
  /// True if there is no block: after a move or `reset`, and if there never was one.
  [[nodiscard]] bool empty() const noexcept { return pager_ == nullptr; }
  [[nodiscard]] explicit operator bool() const noexcept { return !empty(); }

  /// This buffer as an operand for `acquire_all` in its run-time form.
  [[nodiscard]] LeaseRequest request(Access access) const noexcept { return {id_, access}; }
  /// Whether the buffer is on that allocator; not if it is empty.
  [[nodiscard]] bool is_on(P const& pager) const noexcept { return pager_ == &pager; }
  template <class Q>
  [[nodiscard]] bool is_on(Q const& /*pager*/) const noexcept {
    return false;
  }
  /// Turns a lease on this buffer, acquired for `access` in its run-time form, into the type that
  /// belongs to `access`.
  template <Access access>
  [[nodiscard]] LeaseFor<lease_type, access> typed(lease_type lease) const noexcept {
    SPILLWAY_ASSERT(lease.block() == id_ && lease.access() == access);
    return LeaseFor<lease_type, access>{std::move(lease)};
  }

  /// The pager that owns the block. @throws ContractViolation for an empty buffer
  [[nodiscard]] P& pager(CallSite site = {}) const {
    expects(pager_ != nullptr,
            "the buffer is empty: it was moved from, reset or never filled",
            site,
            "SwappableBuffer");
    return *pager_;
  }

 private:
  P* pager_ = nullptr;  // not owned
  BlockId id_{};
  std::size_t size_bytes_ = 0;
};

}  // namespace spillway
