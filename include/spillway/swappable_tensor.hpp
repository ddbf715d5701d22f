// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/pager.hpp>
#include <spillway/core/config.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/tensor_view.hpp>
#include <spillway/core/types.hpp>
#include <spillway/lease.hpp>
#include <spillway/swappable_buffer.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

namespace spillway {

/// A lease on a tensor: its address, its extents and its strides.
///
/// `TensorLease<T const, Rank, P>` is a lease for `Access::read`: nothing can be written through
/// it. The run-time form of `SwappableTensor::acquire` gives `T*` for every access; there a write
/// under a lease for `Access::read` is lost when the tensor leaves the device.
///
/// Shape    `extents()`, outermost first; strides count elements.
/// Threads  thread-compatible.
/// Streams  as `Lease`: all work with the elements belongs on the stream it was acquired on.
/// Address  fixed until the lease ends.
template <class T, std::size_t Rank, Pager P>
class TensorLease {
 public:
  using element_type = T;
  using lease_type = typename P::lease_type;

  /// Holds nothing.
  TensorLease() noexcept = default;
  /// Takes over `lease`, which is on a block of the elements that extents and strides describe.
  TensorLease(lease_type lease, Extents<Rank> const& extents, Extents<Rank> const& strides) noexcept
      : lease_{std::move(lease)}, extents_{extents}, strides_{strides} {}

  /// The first element; null once the lease has ended.
  [[nodiscard]] T* data() const noexcept { return static_cast<T*>(lease_.data()); }
  /// The elements. A view is not cleared when the lease ends, and must not be used then.
  [[nodiscard]] TensorView<T, Rank> view() const noexcept { return {data(), extents_, strides_}; }
  [[nodiscard]] Extents<Rank> const& extents() const noexcept { return extents_; }
  [[nodiscard]] Extents<Rank> const& strides() const noexcept { return strides_; }
  /// Number of elements. It is not cleared when the lease ends, and must not be used then.
  [[nodiscard]] std::size_t size() const noexcept { return view().size(); }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return lease_.size_bytes(); }
  [[nodiscard]] BlockId block() const noexcept { return lease_.block(); }
  [[nodiscard]] Access access() const noexcept { return lease_.access(); }
  /// As `Lease::release`.
  void release() noexcept { lease_.release(); }
  /// True if nothing is held: the lease has ended, was moved from or was never given.
  [[nodiscard]] bool empty() const noexcept { return lease_.empty(); }
  [[nodiscard]] explicit operator bool() const noexcept { return !empty(); }
  /// The lease in its run-time form, for code that keeps leases of every kind in one place.
  [[nodiscard]] lease_type take_lease() && noexcept { return std::move(lease_); }

 private:
  lease_type lease_;
  Extents<Rank> extents_{};
  Extents<Rank> strides_{};
};

/// A dense tensor of `T` in row-major order that lives on the device or in host swap. Move-only.
///
/// `spillway::Tensor<T, Rank>` is the one over `DeviceAllocator` with the default policies.
///
/// Shape    `extents()`, outermost first; strides count elements.
/// Threads  thread-compatible: distinct tensors may be used at once, one tensor may not.
/// Streams  as `SwappableBuffer`; functions ending in `_sync` wait on the host.
/// Address  fixed only while a lease is held.
template <class T, std::size_t Rank, Pager P>
  requires std::is_trivially_copyable_v<T>
class SwappableTensor {
 public:
  using element_type = T;
  using stream_type = typename P::stream_type;
  using lease_type = TensorLease<T, Rank, P>;
  /// The result of a typed `acquire`.
  template <Access access>
  using lease_for = TensorLease<std::conditional_t<access == Access::read, T const, T>, Rank, P>;

  /// An empty tensor, as after a move: its extents are 0 and nothing may be asked of it.
  SwappableTensor() noexcept = default;

  /// A tensor without contents: the first use must be an `Access::write`.
  ///
  /// @param pager  not owned; must outlive the tensor
  /// @throws ContractViolation for an extent of 0 or a size that overflows; OutOfDeviceMemory
  SwappableTensor(P& pager, Extents<Rank> const& extents, CallSite site = {})
      : buffer_{pager, bytes_of(extents, site)}, extents_{extents} {
    std::size_t stride = 1;
    for (std::size_t i = Rank; i-- > 0;) {
      strides_[i] = stride;
      stride *= extents[i];
    }
  }

  SwappableTensor(SwappableTensor&& other) noexcept
      : buffer_{std::move(other.buffer_)},
        extents_{std::exchange(other.extents_, {})},
        strides_{std::exchange(other.strides_, {})} {}

  SwappableTensor& operator=(SwappableTensor&& other) noexcept {
    SwappableTensor moved{std::move(other)};
    std::swap(buffer_, moved.buffer_);
    std::swap(extents_, moved.extents_);
    std::swap(strides_, moved.strides_);
    return *this;
  }

  ~SwappableTensor() = default;

  /// A tensor with the elements of `host`, in row-major order.
  ///
  /// @throws ContractViolation unless `host` has as many elements as the extents; else as above
  /// @stream copies on `stream` and waits on the host until `host` is not needed any more
  [[nodiscard]] static SwappableTensor from_host_sync(P& pager,
                                                      Extents<Rank> const& extents,
                                                      std::span<T const> host,
                                                      stream_type stream,
                                                      CallSite site = {}) {
    SwappableTensor tensor{pager, extents, site};
    tensor.copy_from_host_sync(host, stream, site);
    return tensor;
  }

  /// Makes the tensor resident and holds it there, with the access that the type of the lease
  /// allows: `read` gives `T const*`, `write` and `read_write` give `T*`. A tensor that is const
  /// can be acquired for `read` only.
  ///
  /// `write` discards the elements and brings nothing in: each element that is read later has to be
  /// written under this lease.
  ///
  /// @param stream  work enqueued there until the lease ends may use the elements
  /// @throws OutOfDeviceMemory, OutOfHostMemory, DeviceError, FileTierError; the elements are safe
  /// @stream  orders `stream` after earlier conflicting uses of the tensor; does not wait
  /// @cost    O(1) when the tensor is resident; else what making room and one swap-in cost
  template <Access access>
    requires(access == Access::read)
  [[nodiscard]] lease_for<access> acquire(stream_type stream, CallSite site = {}) const {
    return {buffer_.pager(site).acquire(id(), access, stream), extents_, strides_};
  }
  template <Access access>
    requires(access != Access::read)
  [[nodiscard]] lease_for<access> acquire(stream_type stream, CallSite site = {}) {
    return {buffer_.pager(site).acquire(id(), access, stream), extents_, strides_};
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
  /// address is `T*` for every access: see `TensorLease`. @throws as above
  [[nodiscard]] lease_type acquire(Access access, stream_type stream, CallSite site = {}) {
    return {buffer_.pager(site).acquire(id(), access, stream), extents_, strides_};
  }

  /// Overwrites the elements with those of `host`, in row-major order.
  ///
  /// @throws ContractViolation for another number of elements; else as `acquire`
  /// @stream copies on `stream` and waits on the host until `host` is not needed any more
  void copy_from_host_sync(std::span<T const> host, stream_type stream, CallSite site = {}) {
    expects(host.size() == size(), "the host span must have as many elements as the tensor", site);
    auto const lease = buffer_.acquire_write(stream, site);
    buffer_.pager().copy_from_host_sync(lease.data(), host.data(), host.size_bytes(), stream);
  }

  /// Copies the elements to `host`, in row-major order.
  ///
  /// @throws ContractViolation for another number of elements; else as `acquire`
  /// @stream copies on `stream` and waits on the host until the elements are there
  void copy_to_host_sync(std::span<T> host, stream_type stream, CallSite site = {}) const {
    expects(host.size() == size(), "the host span must have as many elements as the tensor", site);
    auto const lease = buffer_.acquire_read(stream, site);
    buffer_.pager().copy_to_host_sync(host.data(), lease.data(), host.size_bytes(), stream);
  }

  /// Chooses how the elements are written while they are away: see `DeviceAllocator::set_codec`.
  template <class Codec>
  void set_codec(std::uint64_t tag = 0) {
    if constexpr (requires { typename Codec::element_type; }) {
      static_assert(std::is_same_v<T, typename Codec::element_type>,
                    "the codec changes elements of another type");
    }
    buffer_.pager().template set_codec<Codec>(id(), tag);
  }

  /// Says how the elements are made again from those of other tensors on the same allocator:
  /// `make(stream, result, operands...)` enqueues the work, with a view of each tensor. The tensor
  /// may then leave without a copy: see `DeviceAllocator::set_recipe`.
  ///
  /// ```
  /// y.set_recipe(20us, [](auto stream, auto to, auto from) { gelu(stream, to, from); }, x);
  /// ```
  /// @throws ContractViolation if an operand is empty or on another allocator; as
  ///         `DeviceAllocator::set_recipe`
  template <class Make, class... Operands>
  void set_recipe(std::chrono::nanoseconds cost, Make make, Operands const&... operands) {
    expects((operands.is_on(buffer_.pager()) && ...),
            "an operand is empty, since it was moved from or reset, or is on another allocator");
    std::array<BlockId, sizeof...(Operands)> const ids{operands.id()...};
    buffer_.pager().set_recipe(
        id(),
        std::span{ids},
        cost,
        [make = std::move(make),
         view = std::tuple{operands.template viewer<typename Operands::element_type const>()...},
         result = viewer<T>()](
            stream_type stream, std::span<void const* const> addresses, void* address) {
          [&]<std::size_t... i>(std::index_sequence<i...>) {
            make(stream, result(address), std::get<i>(view)(addresses[i])...);
          }
          (std::index_sequence_for<Operands...>{});
        });
  }
  /// A function that gives the view of this tensor's elements at an address.
  template <class Element>
  [[nodiscard]] auto viewer() const {
    return [extents = extents_, strides = strides_](auto* address) {
      return TensorView<Element, Rank>{static_cast<Element*>(address), extents, strides};
    };
  }

  /// As `SwappableBuffer::swap_out`.
  void swap_out() { buffer_.swap_out(); }
  /// As `SwappableBuffer::swap_in`.
  void swap_in() { buffer_.swap_in(); }
  /// Frees the block now and leaves the tensor empty.
  ///
  /// @throws ContractViolation if a lease on it is still held; the tensor is then unchanged
  void reset() {
    buffer_.reset();
    *this = SwappableTensor{};
  }

  /// As `SwappableBuffer::residency`.
  [[nodiscard]] Residency residency() const { return buffer_.residency(); }
  [[nodiscard]] Extents<Rank> const& extents() const noexcept { return extents_; }
  [[nodiscard]] Extents<Rank> const& strides() const noexcept { return strides_; }
  /// Number of elements; 0 for an empty tensor.
  [[nodiscard]] std::size_t size() const noexcept { return buffer_.size_bytes() / sizeof(T); }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return buffer_.size_bytes(); }
  [[nodiscard]] BlockId id() const noexcept { return buffer_.id(); }
  /// True if there are no elements: after a move or `reset`, and if there never were any.
  [[nodiscard]] bool empty() const noexcept { return buffer_.empty(); }
  [[nodiscard]] explicit operator bool() const noexcept { return !empty(); }

  /// Whether the tensor is on that allocator; not if it is empty.
  template <class Q>
  [[nodiscard]] bool is_on(Q const& pager) const noexcept {
    return buffer_.is_on(pager);
  }
  /// This tensor as an operand for `acquire_all` in its run-time form.
  [[nodiscard]] LeaseRequest request(Access access) const noexcept {
    return buffer_.request(access);
  }
  /// Turns a lease on this tensor, acquired for `access` in its run-time form, into the type that
  /// belongs to `access`.
  template <Access access>
  [[nodiscard]] lease_for<access> typed(typename P::lease_type lease) const noexcept {
    SPILLWAY_ASSERT(lease.block() == id() && lease.access() == access);
    return {std::move(lease), extents_, strides_};
  }

 private:
  static std::size_t bytes_of(Extents<Rank> const& extents, CallSite site) {
    std::size_t bytes = sizeof(T);
    for (std::size_t const extent : extents) {
      expects(extent != 0,
              "a tensor must have at least one element: an extent is 0",
              site,
              "SwappableTensor");
      expects(extent <= std::numeric_limits<std::size_t>::max() / bytes,
              "the size in bytes does not fit in 64 bits",
              site,
              "SwappableTensor");
      bytes *= extent;
    }
    return bytes;
  }

  SwappableBuffer<P> buffer_;
  Extents<Rank> extents_{};
  Extents<Rank> strides_{};
};

/// A tensor of `T` on `pager`: `make_tensor<float>(allocator, {rows, columns})`.
template <class T, std::size_t Rank, Pager P>
[[nodiscard]] SwappableTensor<T, Rank, P>
make_tensor(P& pager, std::size_t const (&extents)[Rank], CallSite site = {}) {
  return {pager, std::to_array(extents), site};
}

}  // namespace spillway
