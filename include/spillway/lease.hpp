// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/pager.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace spillway {

namespace detail {
struct BlockRecord;
}  // namespace detail

/// The pager's data about a lease that it gave out; `Lease` holds one.
struct LeaseRecord {
  BlockId block{};
  detail::BlockRecord* record = nullptr;  // valid while the block is leased
  StreamIndex stream = StreamIndex::none;
  Access access = Access::read;
  bool is_sole = false;      // no other lease was held when this one was given
  std::uint32_t serial = 0;  // the block's lease counter at that moment
};

/// Keeps one block on the device, at one address, for as long as the lease lives.
///
/// This is the run-time form: `data()` is `void*` whatever the access is. Bytes written under a
/// lease for `Access::read` are lost when the block leaves the device, since its copy on the host
/// is still held to be valid. `ReadLease` and the typed calls of `SwappableBuffer` and
/// `SwappableTensor` let the compiler refuse that.
///
/// Shape    the block's `size_bytes()` bytes, contiguous, aligned to 256 B.
/// Threads  thread-compatible; may be released by another thread than the one that acquired it.
/// Streams  belongs to the stream on which it was acquired. Before the lease ends, enqueue all work
///          that uses the bytes on that stream, or on streams that it has been made to wait for.
/// Address  fixed until the lease ends, invalid afterwards.
template <class P>
class Lease {
 public:
  /// Makes an empty lease.
  Lease() noexcept = default;
  Lease(Lease&& other) noexcept
      : pager_{std::exchange(other.pager_, nullptr)},
        record_{other.record_},
        data_{std::exchange(other.data_, nullptr)},
        size_bytes_{std::exchange(other.size_bytes_, 0)} {}
  Lease& operator=(Lease&& other) noexcept {
    if (this != &other) {
      release();
      pager_ = std::exchange(other.pager_, nullptr);
      record_ = other.record_;
      data_ = std::exchange(other.data_, nullptr);
      size_bytes_ = std::exchange(other.size_bytes_, 0);
    }
    return *this;
  }
  ~Lease() { release(); }

  /// Ends the lease: work that has been enqueued on its stream so far counts as the block's last
  /// use. No effect on an empty lease. Does not wait.
  void release() noexcept {
    if (P* const pager = pager_) {
      forget();
      pager->release(record_);
    }
  }

  /// The device address; null once the lease has ended.
  [[nodiscard]] void* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return size_bytes_; }
  [[nodiscard]] BlockId block() const noexcept { return record_.block; }
  [[nodiscard]] Access access() const noexcept { return record_.access; }
  /// True if nothing is held: the lease has ended, was moved from or was never given.
  [[nodiscard]] bool empty() const noexcept { return pager_ == nullptr; }
  [[nodiscard]] explicit operator bool() const noexcept { return !empty(); }

 private:
  friend P;
  Lease(P& pager, LeaseRecord record, void* data, std::size_t size_bytes) noexcept
      : pager_{&pager}, record_{record}, data_{data}, size_bytes_{size_bytes} {}

  /// Makes the lease empty without telling the pager.
  void forget() noexcept {
    pager_ = nullptr;
    data_ = nullptr;
    size_bytes_ = 0;
  }

  P* pager_ = nullptr;  // not owned; outlives the lease
  LeaseRecord record_{};
  void* data_ = nullptr;
  std::size_t size_bytes_ = 0;
};

/// A lease for `Access::read`. Works as `Lease`, but `data()` is `void const*`, so that the
/// compiler refuses writes.
///
/// @tparam L  the run-time form, `Lease<P>`
template <class L>
class ReadLease {
 public:
  ReadLease() noexcept = default;
  /// Takes over `lease`, which was acquired for `Access::read`.
  explicit ReadLease(L lease) noexcept : lease_{std::move(lease)} {
    SPILLWAY_ASSERT(lease_.empty() || lease_.access() == Access::read);
  }

  /// The device address; null once the lease has ended.
  [[nodiscard]] void const* data() const noexcept { return lease_.data(); }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return lease_.size_bytes(); }
  [[nodiscard]] BlockId block() const noexcept { return lease_.block(); }
  [[nodiscard]] Access access() const noexcept { return lease_.access(); }
  [[nodiscard]] bool empty() const noexcept { return lease_.empty(); }
  [[nodiscard]] explicit operator bool() const noexcept { return !empty(); }
  /// As `Lease::release`.
  void release() noexcept { lease_.release(); }
  /// The run-time form, for code that keeps leases of every access in one place.
  [[nodiscard]] L take_lease() && noexcept { return std::move(lease_); }

 private:
  L lease_;
};

/// The result type of `acquire` with a template argument: `ReadLease` for `read`, else `L` itself.
template <class L, Access access>
using LeaseFor = std::conditional_t<access == Access::read, ReadLease<L>, L>;

/// What can be an operand of `acquire_all`: a `SwappableBuffer` or a `SwappableTensor`.
template <class H>
concept Leasable = requires(H const& holder) {
  { holder.request(Access::read) } -> std::same_as<LeaseRequest>;
};

/// One operand of an operation, with an access that is known at compile time. `reads`, `writes` and
/// `updates` make one for `DeviceAllocator::acquire_all`. It only refers to the buffer or tensor,
/// which must outlive it.
template <Access how, class Holder>
class Operand {
 public:
  static constexpr Access access = how;

  explicit constexpr Operand(Holder& holder) noexcept : holder_{&holder} {}

  [[nodiscard]] LeaseRequest request() const noexcept { return holder_->request(how); }
  /// Returns whether the buffer or tensor is on that allocator; false if it is empty.
  template <class P>
  [[nodiscard]] bool is_on(P const& pager) const noexcept {
    return holder_->is_on(pager);
  }
  /// Gives `lease`, which was acquired for `request()`, the type that `how` allows.
  template <class L>
  [[nodiscard]] auto typed(L lease) const noexcept {
    return holder_->template typed<how>(std::move(lease));
  }

 private:
  Holder* holder_;  // not owned
};

/// Makes an operand that the operation reads and does not change.
template <Leasable Holder>
[[nodiscard]] constexpr Operand<Access::read, Holder const> reads(Holder const& holder) noexcept {
  return Operand<Access::read, Holder const>{holder};
}
/// Makes an operand that the operation overwrites completely; its old contents are not swapped in.
template <Leasable Holder>
  requires(!std::is_const_v<Holder>)
[[nodiscard]] constexpr Operand<Access::write, Holder> writes(Holder& holder) noexcept {
  return Operand<Access::write, Holder>{holder};
}
/// Makes an operand that the operation reads and changes.
template <Leasable Holder>
  requires(!std::is_const_v<Holder>)
[[nodiscard]] constexpr Operand<Access::read_write, Holder> updates(Holder& holder) noexcept {
  return Operand<Access::read_write, Holder>{holder};
}

}  // namespace spillway
