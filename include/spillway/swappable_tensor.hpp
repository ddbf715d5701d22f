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

/// Keeps a tensor on the device, at one address, for as long as the lease lives, and gives access
/// to its elements.
///
/// `TensorLease<T const, Rank, P>` is a lease for `Access::read`, through which nothing can be
/// written. The run-time form of `SwappableTensor::acquire` gives `T*` for every access; bytes that
/// are written under such a lease for `Access::read` are lost when the tensor leaves the device.
///
/// Shape    `extents()`, outermost first; strides count elements.
/// Threads  thread-compatible.
/// Streams  as `Lease`: enqueue all work that uses the elements on the stream of the `acquire`.
/// Address  fixed until the lease ends.
template <class T, std::size_t Rank, Pager P>
class TensorLease {
 public:
  using element_type = T;
  using lease_type = typename P::lease_type;

  /// Makes an empty lease.
  TensorLease() noexcept = default;
  /// Takes over `lease`, whose block contains the elements that extents and strides describe.
  TensorLease(lease_type lease, Extents<Rank> const& extents, Extents<Rank> const& strides) noexcept
      : lease_{std::move(lease)}, extents_{extents}, strides_{strides} {}

  /// The first element; null once the lease has ended.
  [[nodiscard]] T* data() const noexcept { return static_cast<T*>(lease_.data()); }
  /// Returns a view of the elements. It is valid only until the lease ends.
  [[nodiscard]] TensorView<T, Rank> view() const noexcept { return {data(), extents_, strides_}; }
  [[nodiscard]] Extents<Rank> const& extents() const noexcept { return extents_; }
  [[nodiscard]] Extents<Rank> const& strides() const noexcept { return strides_; }
  /// Returns the number of elements. The value does not change when the lease ends.
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

/// Owns a dense tensor of `T` in row-major order that is on the device or swapped out to the host.
/// Move-only.
///
/// `spillway::Tensor<T, Rank>` is short for a tensor on a `DeviceAllocator` with the default
/// policies.
///
/// Shape    `extents()`, outermost first; strides count elements.
/// Threads  thread-compatible: distinct tensors may be used at once, and const calls of one tensor.
/// Streams  as `SwappableBuffer`; functions ending in `_sync` wait on the host.
/// Address  fixed only while a lease is held.
/// @tparam T  trivially copyable, since it is copied byte by byte; aligned to at most 256 bytes, as
///            blocks are
template <class T, std::size_t Rank, Pager P>
  requires(std::is_trivially_copyable_v<T> && alignof(T) <= granule_bytes)
class SwappableTensor {
 public:
  using element_type = T;
  using stream_type = typename P::stream_type;
  using lease_type = TensorLease<T, Rank, P>;
  /// The result type of `acquire` with a template argument.
  template <Access access>
  using lease_for = TensorLease<std::conditional_t<access == Access::read, T const, T>, Rank, P>;

  /// Makes an empty tensor, which owns no block, as after a move. Its extents are 0.
  SwappableTensor() noexcept = default;

  /// Makes a tensor without contents. Elements have no defined value until they are written under a
  /// lease for `write` or `read_write`.
  ///
  /// @param pager  not owned; must outlive the tensor
  /// @throws ContractViolation for an extent of 0 or a size that overflows; OutOfDeviceMemory and
  ///         others as `DeviceAllocator::allocate`
  SwappableTensor(P& pager, Extents<Rank> const& extents, CallSite site = {})
      : buffer_{pager, bytes_of(extents, site), site}, extents_{extents} {
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

  /// Makes a tensor with the elements of `host`, in row-major order.
  ///
  /// @throws ContractViolation unless `host` has as many elements as the extents; else as above
  /// @stream copies on `stream` and waits on the host until `host` is not needed any more
  [[nodiscard]] static SwappableTensor from_host_sync(P& pager,
                                                      Extents<Rank> const& extents,
                                                      std::span<T const> host,
                                                      stream_type stream,
                                                      CallSite site = {}) {
    SwappableTensor tensor{pager, extents, site};
    tensor.expect_as_many(host.size(), site);
    tensor.copy_from_host_sync(host, stream, site);
    return tensor;
  }

  /// Makes the tensor resident and keeps it resident, at one address, until the returned lease
  /// ends. `read` gives a lease with `T const*`, `write` and `read_write` one with `T*`. A const
  /// tensor can be acquired for `read` only.
  ///
  /// `write` discards the old elements, which are not swapped in: the holder must write all
  /// elements that are read later.
  ///
  /// @param stream  work enqueued there until the lease ends may use the elements
  /// @throws as `DeviceAllocator::acquire`: OutOfDeviceMemory, OutOfHostMemory, DeviceError,
  ///         FileTierError, and ContractViolation for a stream that is being captured or if the
  ///         tensor is empty; the tensor keeps its elements
  /// @stream  orders `stream` after earlier conflicting uses of the tensor; waits as
  ///         `DeviceAllocator::acquire`
  /// @cost    O(1) when the tensor is resident; else what making room and one swap-in cost
  template <Access access>
    requires(access == Access::read)
  [[nodiscard]] lease_for<access> acquire(stream_type stream, CallSite site = {}) const {
    return {
        detail::acquire_at(site, buffer_.pager(site), id(), access, stream), extents_, strides_};
  }
  template <Access access>
    requires(access != Access::read)
  [[nodiscard]] lease_for<access> acquire(stream_type stream, CallSite site = {}) {
    return {
        detail::acquire_at(site, buffer_.pager(site), id(), access, stream), extents_, strides_};
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
  /// of the lease is `T*` for every access: see `TensorLease`. @throws as above
  [[nodiscard]] lease_type acquire(Access access, stream_type stream, CallSite site = {}) {
    return {
        detail::acquire_at(site, buffer_.pager(site), id(), access, stream), extents_, strides_};
  }

  /// Overwrites the elements with those of `host`, in row-major order.
  ///
  /// @throws ContractViolation for another number of elements; else as `acquire`
  /// @stream copies on `stream` and waits on the host until `host` is not needed any more
  void copy_from_host_sync(std::span<T const> host, stream_type stream, CallSite site = {}) {
    P& pager = buffer_.pager(site);
    expect_as_many(host.size(), site);
    auto const lease = buffer_.acquire_write(stream, site);
    pager.copy_from_host_sync(lease.data(), host.data(), host.size_bytes(), stream);
  }

  /// Copies the elements to `host`, in row-major order.
  ///
  /// @throws ContractViolation for another number of elements; else as `acquire`
  /// @stream copies on `stream` and waits on the host until the elements are there
  void copy_to_host_sync(std::span<T> host, stream_type stream, CallSite site = {}) const {
    P& pager = buffer_.pager(site);
    expect_as_many(host.size(), site);
    auto const lease = buffer_.acquire_read(stream, site);
    pager.copy_to_host_sync(host.data(), lease.data(), host.size_bytes(), stream);
  }

  /// Chooses the codec that encodes the elements in the host pool from the next swap-out on: see
  /// `DeviceAllocator::set_codec`. A codec for another element type does not compile.
  ///
  /// @throws as `DeviceAllocator::set_codec`; ContractViolation for an empty tensor
  template <class Codec>
  void set_codec(std::uint64_t tag = 0, CallSite site = {}) {
    if constexpr (requires { typename Codec::element_type; }) {
      static_assert(std::is_same_v<T, typename Codec::element_type>,
                    "the codec changes elements of another type");
    }
    buffer_.pager(site).template set_codec<Codec>(id(), tag);
  }

  /// Gives the tensor a recipe, which makes its elements again from those of other tensors on the
  /// same allocator: `make(stream, result, operands...)` enqueues the work and gets a `TensorView`
  /// of each tensor. The tensor may then leave without a copy: see `DeviceAllocator::set_recipe`.
  ///
  /// ```
  /// y.set_recipe(20us, [](auto stream, auto to, auto from) { gelu(stream, to, from); }, x);
  /// ```
  /// @throws ContractViolation if an operand is empty or on another allocator; as
  ///         `DeviceAllocator::set_recipe`
  template <class Make, class... Operands>
  void set_recipe(Located<std::chrono::nanoseconds> cost, Make make, Operands const&... operands) {
    P& pager = buffer_.pager(cost.site());
    expects((operands.is_on(pager) && ...),
            "an operand is empty, since it was moved from or reset, or is on another allocator",
            cost.site());
    std::array<BlockId, sizeof...(Operands)> const ids{operands.id()...};
    auto make_again =
        [make = std::move(make),
         view = std::tuple{operands.template viewer<typename Operands::element_type const>()...},
         result = viewer<T>()](
            stream_type stream, std::span<void const* const> addresses, void* address) {
          [&]<std::size_t... i>(std::index_sequence<i...>) {
            make(stream, result(address), std::get<i>(view)(addresses[i])...);
          }
          (std::index_sequence_for<Operands...>{});
        };
    detail::call_at(cost.site(), [&] {
      pager.set_recipe(id(), std::span{ids}, cost.value(), std::move(make_again));
    });
  }
  /// Returns a function that makes a view of this tensor's shape from an address.
  template <class Element>
  [[nodiscard]] auto viewer() const {
    return [extents = extents_, strides = strides_](auto* address) {
      return TensorView<Element, Rank>{static_cast<Element*>(address), extents, strides};
    };
  }

  /// As `SwappableBuffer::swap_out`.
  void swap_out(CallSite site = {}) { buffer_.swap_out(site); }
  /// As `SwappableBuffer::swap_in`.
  void swap_in(CallSite site = {}) { buffer_.swap_in(site); }
  /// Frees the block now and leaves the tensor empty.
  ///
  /// @throws ContractViolation if a lease on it is still held; the tensor is then unchanged
  void reset(CallSite site = {}) {
    buffer_.reset(site);
    *this = SwappableTensor{};
  }

  /// As `SwappableBuffer::residency`.
  [[nodiscard]] Residency residency(CallSite site = {}) const { return buffer_.residency(site); }
  [[nodiscard]] Extents<Rank> const& extents() const noexcept { return extents_; }
  [[nodiscard]] Extents<Rank> const& strides() const noexcept { return strides_; }
  /// Number of elements; 0 for an empty tensor.
  [[nodiscard]] std::size_t size() const noexcept { return buffer_.size_bytes() / sizeof(T); }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return buffer_.size_bytes(); }
  [[nodiscard]] BlockId id() const noexcept { return buffer_.id(); }
  /// Returns whether the tensor owns no block: default-constructed, moved from or reset.
  [[nodiscard]] bool empty() const noexcept { return buffer_.empty(); }
  [[nodiscard]] explicit operator bool() const noexcept { return !empty(); }

  /// Returns whether the tensor is on that allocator; false if it is empty.
  template <class Q>
  [[nodiscard]] bool is_on(Q const& pager) const noexcept {
    return buffer_.is_on(pager);
  }
  /// Makes a request for this tensor, for the run-time form of `acquire_all`.
  [[nodiscard]] LeaseRequest request(Access access) const noexcept {
    return buffer_.request(access);
  }
  /// Converts a lease on this tensor that was acquired for `access` in the run-time form to the
  /// type that `acquire<access>` returns.
  template <Access access>
  [[nodiscard]] lease_for<access> typed(typename P::lease_type lease) const noexcept {
    SPILLWAY_ASSERT(lease.block() == id() && lease.access() == access);
    return {std::move(lease), extents_, strides_};
  }

 private:
  /// Checks that a host span has as many elements as the tensor. `function` as for `expects`.
  void expect_as_many(std::size_t elements,
                      CallSite site,
                      char const* function = __builtin_FUNCTION()) const {
    if (elements != size()) {
      throw ContractViolation{detail::head_of_error(site, function) + "the host span has " +
                              elements + " elements, the tensor has " + size()};
    }
  }
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

/// Makes a tensor of `T` without contents on `pager`: `make_tensor<float>(allocator, {rows,
/// columns})`. @throws as the constructor of `SwappableTensor`
template <class T, std::size_t Rank, Pager P>
[[nodiscard]] SwappableTensor<T, Rank, P>
make_tensor(P& pager, std::size_t const (&extents)[Rank], CallSite site = {}) {
  return {pager, std::to_array(extents), site};
}
/// The same for extents that are an object: `make_tensor<float>(allocator, Extents<2>{rows,
/// columns})`, or `other.extents()`.
template <class T, std::size_t Rank, Pager P>
[[nodiscard]] SwappableTensor<T, Rank, P>
make_tensor(P& pager, Extents<Rank> const& extents, CallSite site = {}) {
  return {pager, extents, site};
}

}  // namespace spillway
