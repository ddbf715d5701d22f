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

namespace detail {

/// `pager.acquire`, for buffers and tensors: a ContractViolation names `site`, the line of the
/// program. The pager gets no call site, which the fast path would have to pass on.
template <Pager P>
[[nodiscard, gnu::always_inline]] inline typename P::lease_type
acquire_at(CallSite site, P& pager, BlockId id, Access access, typename P::stream_type stream) {
  try {  // not `call_at`, whose callable would be one more frame on the stack in debug builds
    return pager.acquire(id, access, stream);
  } catch (ContractViolation const& error) {
    rethrow_at(site, error);
  }
}

}  // namespace detail

/// Owns a block of untyped bytes that is on the device or swapped out to the host. Move-only, like
/// `std::unique_ptr`.
///
/// The block belongs to a `DeviceAllocator` and is freed with the buffer. For elements with a type
/// and a shape use `SwappableTensor`.
///
/// Shape    one contiguous range of `size_bytes()` bytes, aligned to 256 B while resident.
/// Threads  thread-compatible: distinct buffers may be used at once, and const calls of one buffer.
/// Streams  `acquire` orders work on the stream that it is given; no stream is stored.
/// Address  fixed only while a lease is held; ask the lease for it each time, never cache it.
/// Errors   on an empty buffer, `acquire`, `swap_out`, `swap_in`, `residency` and `pager` throw
///          ContractViolation.
template <Pager P>
class SwappableBuffer {
 public:
  using stream_type = typename P::stream_type;
  using lease_type = typename P::lease_type;

  /// Makes an empty buffer, which owns no block, as after a move.
  SwappableBuffer() noexcept = default;

  /// Allocates a block of `size_bytes` without contents. Bytes have no defined value until they are
  /// written under a lease for `write` or `read_write`.
  ///
  /// @param pager       not owned; must outlive the buffer
  /// @param size_bytes  more than 0
  /// @throws as `DeviceAllocator::allocate`: OutOfDeviceMemory, ContractViolation for size 0 and
  ///         others; nothing is left behind
  SwappableBuffer(P& pager, std::size_t size_bytes, CallSite site = {})
      : pager_{&pager},
        id_{detail::call_at(
            site, [&] { return pager.allocate(size_bytes); }, "SwappableBuffer")},
        size_bytes_{size_bytes} {}

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
  void reset(CallSite site = {}) {
    if (pager_ != nullptr) {
      detail::call_at(
          site, [&] { pager_->deallocate(id_); }, "reset");
      pager_ = nullptr;
      id_ = BlockId{};
      size_bytes_ = 0;
    }
  }

  /// Makes the block resident and keeps it resident, at one address, until the returned lease ends.
  /// `read` gives a `ReadLease`, whose address is `void const*`; `write` and `read_write` give a
  /// `Lease`, whose address is `void*`. A const buffer can be acquired for `read` only.
  ///
  /// `write` discards the old contents, which are not swapped in: the holder must write all bytes
  /// that are read later.
  ///
  /// @param stream  work enqueued there until the lease ends may use the bytes
  /// @throws as `DeviceAllocator::acquire`: OutOfDeviceMemory, OutOfHostMemory, DeviceError,
  ///         FileTierError, and ContractViolation for a stream that is being captured; the block
  ///         keeps its contents
  /// @stream  orders `stream` after earlier conflicting uses of the block; waits as
  ///         `DeviceAllocator::acquire`
  /// @cost    O(1) when the block is resident; else what making room and one swap-in cost
  template <Access access>
    requires(access == Access::read)
  [[nodiscard]] LeaseFor<lease_type, access> acquire(stream_type stream, CallSite site = {}) const {
    return typed<access>(detail::acquire_at(site, pager(site), id_, access, stream));
  }
  template <Access access>
    requires(access != Access::read)
  [[nodiscard]] LeaseFor<lease_type, access> acquire(stream_type stream, CallSite site = {}) {
    return typed<access>(detail::acquire_at(site, pager(site), id_, access, stream));
  }
  /// The same, with the access in the name. They are shorter in templates, where `acquire<...>` has
  /// to be written `template acquire<...>`.
  [[nodiscard]] auto acquire_read(stream_type stream, CallSite site = {}) const {
    return acquire<Access::read>(stream, site);
  }
  [[nodiscard]] auto acquire_write(stream_type stream, CallSite site = {}) {
    return acquire<Access::write>(stream, site);
  }
  [[nodiscard]] auto acquire_read_write(stream_type stream, CallSite site = {}) {
    return acquire<Access::read_write>(stream, site);
  }

  /// The same with an access that is known only at run time, for code such as adapters. The address
  /// of the lease is `void*` for every access: see `Lease`. @throws as above
  [[nodiscard]] lease_type acquire(Access access, stream_type stream, CallSite site = {}) {
    return detail::acquire_at(site, pager(site), id_, access, stream);
  }

  /// Copies the bytes to the host pool and frees the device range, as `DeviceAllocator::swap_out`.
  /// Nothing is copied if the copy on the host is still valid or the block's recipe makes the bytes
  /// for less. No effect on a buffer that is not resident.
  ///
  /// @throws ContractViolation if a lease is held, OutOfHostMemory, DeviceError, FileTierError; the
  ///         block then stays resident
  /// @stream  enqueues on a copy stream of the allocator; does not wait
  void swap_out(CallSite site = {}) {
    P& owner = pager(site);
    detail::call_at(site, [&] { owner.swap_out(id_); });
  }

  /// Swaps the bytes in ahead of need, as `DeviceAllocator::swap_in`. No effect on a buffer that is
  /// resident, was never written, or must be recomputed by its recipe.
  ///
  /// @throws OutOfDeviceMemory, DeviceError, FileTierError; the block then stays on the host
  /// @stream  as `swap_out`
  void swap_in(CallSite site = {}) { pager(site).swap_in(id_); }

  /// Returns where the bytes are now. Asks the device whether a copy is still in flight.
  [[nodiscard]] Residency residency(CallSite site = {}) const { return pager(site).residency(id_); }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return size_bytes_; }
  [[nodiscard]] BlockId id() const noexcept { return id_; }
  /// Returns whether the buffer owns no block: default-constructed, moved from or reset.
  [[nodiscard]] bool empty() const noexcept { return pager_ == nullptr; }
  [[nodiscard]] explicit operator bool() const noexcept { return !empty(); }

  /// Makes a request for this buffer, for the run-time form of `acquire_all`.
  [[nodiscard]] LeaseRequest request(Access access) const noexcept { return {id_, access}; }
  /// Returns whether the buffer is on that allocator; false if it is empty.
  [[nodiscard]] bool is_on(P const& pager) const noexcept { return pager_ == &pager; }
  template <class Q>
  [[nodiscard]] bool is_on(Q const& /*pager*/) const noexcept {
    return false;
  }
  /// Converts a lease on this buffer that was acquired for `access` in the run-time form to the
  /// type that `acquire<access>` returns.
  template <Access access>
  [[nodiscard]] LeaseFor<lease_type, access> typed(lease_type lease) const noexcept {
    SPILLWAY_ASSERT(lease.block() == id_ && lease.access() == access);
    return LeaseFor<lease_type, access>{std::move(lease)};
  }

  /// Returns the pager that owns the block. @throws ContractViolation for an empty buffer
  ///
  /// @param call  the name of the call that needs it, for the error; by default that of the caller
  [[nodiscard]] P& pager(CallSite site = {}, char const* call = __builtin_FUNCTION()) const {
    expects(pager_ != nullptr,
            "the buffer or tensor is empty: it was moved from, reset or never filled",
            site,
            call);
    return *pager_;
  }

 private:
  P* pager_ = nullptr;  // not owned
  BlockId id_{};
  std::size_t size_bytes_ = 0;
};

}  // namespace spillway
