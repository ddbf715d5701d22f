// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/pager.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <type_traits>
#include <utility>
#include <vector>

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
  std::uint8_t thread = 0;   // the index of the thread that acquired it (`Monitor`)
  std::uint32_t serial = 0;  // the block's lease counter when it was given
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

namespace detail {

/// Return the buffer or tensor that an element of a range is or points to.
template <Leasable Holder>
[[nodiscard]] constexpr Holder& holder_of(Holder& holder) noexcept {
  return holder;
}
template <class Pointer>
  requires requires(Pointer const& pointer) {
    holder_of(*pointer);
  }
[[nodiscard]] constexpr auto& holder_of(Pointer const& pointer) noexcept {
  return *pointer;
}

}  // namespace detail

/// A range of such buffers or tensors, or of pointers to them: a `std::vector<Tensor<float, 2>>`,
/// or a `std::array` of pointers to tensors that lie elsewhere.
template <class R>
concept LeasableRange = requires(R& range) {
  std::begin(range) != std::end(range);
  detail::holder_of(*std::begin(range));
};

namespace detail {

/// A range of buffers or tensors that may be acquired for writing.
template <class R>
concept ChangeableRange = LeasableRange<R> && requires(R& range) {
  requires !std::is_const_v<std::remove_reference_t<decltype(holder_of(*std::begin(range)))>>;
};

}  // namespace detail

/// One operand of an operation, with an access that is known at compile time. `reads`, `writes` and
/// `updates` make one for `DeviceAllocator::acquire_all`. It only refers to the buffer or tensor,
/// which must outlive it.
template <Access how, class Holder>
class Operand {
 public:
  static constexpr Access access = how;
  static constexpr bool is_range = false;

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
  /// Adds `request()` to `requests`.
  void add_to(std::vector<LeaseRequest>& requests) const { requests.push_back(request()); }
  /// Takes the next lease, which was acquired for that request, and returns it as `typed` does.
  template <class L>
  [[nodiscard]] auto take(L*& next) const noexcept {
    return typed(std::move(*next++));
  }

 private:
  Holder* holder_;  // not owned
};

/// The same for a range of operands, with one access for all of them. It only refers to the range.
template <Access how, class Range>
class OperandRange {
 public:
  static constexpr Access access = how;
  static constexpr bool is_range = true;

  explicit constexpr OperandRange(Range& range) noexcept : range_{&range} {}

  /// Returns whether all are on that allocator; false if one is empty or a null pointer.
  template <class P>
  [[nodiscard]] bool is_on(P const& pager) const {
    return std::all_of(std::begin(*range_), std::end(*range_), [&pager](auto&& element) {
      if constexpr (requires { element == nullptr; }) {
        if (element == nullptr) {
          return false;
        }
      }
      return detail::holder_of(element).is_on(pager);
    });
  }
  void add_to(std::vector<LeaseRequest>& requests) const {
    for (auto&& element : *range_) {
      requests.push_back(detail::holder_of(element).request(how));
    }
  }
  /// Returns a vector with one lease for each buffer or tensor of the range.
  template <class L>
  [[nodiscard]] auto take(L*& next) const {
    auto const one = [&next](auto&& element) {
      return detail::holder_of(element).template typed<how>(std::move(*next++));
    };
    std::vector<decltype(one(*std::begin(*range_)))> leases;
    for (auto&& element : *range_) {
      leases.push_back(one(element));
    }
    return leases;
  }

 private:
  Range* range_;  // not owned
};

/// An `Operand` or an `OperandRange`.
template <class O>
concept GroupOperand = requires(O const& operand, std::vector<LeaseRequest>& requests) {
  { O::access } -> std::same_as<Access const&>;
  { O::is_range } -> std::same_as<bool const&>;
  operand.add_to(requests);
};

namespace detail {

/// Returns the requests for all operands in their order, in an array if their number is known at
/// compile time.
template <GroupOperand... Operands>
[[nodiscard]] auto requests_for(Operands const&... operands) {
  if constexpr ((Operands::is_range || ...)) {
    std::vector<LeaseRequest> requests;
    (operands.add_to(requests), ...);
    return requests;
  } else {
    return std::array<LeaseRequest, sizeof...(operands)>{operands.request()...};
  }
}

}  // namespace detail

/// Makes an operand that the operation reads and does not change.
template <Leasable Holder>
[[nodiscard]] constexpr auto reads(Holder const& holder) noexcept {
  return Operand<Access::read, Holder const>{holder};
}
/// Makes an operand that the operation overwrites completely; its old contents are not swapped in.
template <Leasable Holder>
  requires(!std::is_const_v<Holder>)
[[nodiscard]] constexpr auto writes(Holder& holder) noexcept {
  return Operand<Access::write, Holder>{holder};
}
/// Makes an operand that the operation reads and changes.
template <Leasable Holder>
  requires(!std::is_const_v<Holder>)
[[nodiscard]] constexpr auto updates(Holder& holder) noexcept {
  return Operand<Access::read_write, Holder>{holder};
}
/// The same for each buffer or tensor of a range, such as `reads(weights)` for a
/// `std::vector<Tensor<float, 2>> weights`.
template <LeasableRange Range>
[[nodiscard]] constexpr auto reads(Range&& range) noexcept {
  return OperandRange<Access::read, std::remove_reference_t<Range>>{range};
}
template <detail::ChangeableRange Range>
[[nodiscard]] constexpr auto writes(Range&& range) noexcept {
  return OperandRange<Access::write, std::remove_reference_t<Range>>{range};
}
template <detail::ChangeableRange Range>
[[nodiscard]] constexpr auto updates(Range&& range) noexcept {
  return OperandRange<Access::read_write, std::remove_reference_t<Range>>{range};
}

}  // namespace spillway
