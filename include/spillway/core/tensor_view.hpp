// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>

#include <array>
#include <concepts>
#include <cstddef>

namespace spillway {

/// Extents of a tensor, outermost first.
template <std::size_t Rank>
using Extents = std::array<std::size_t, Rank>;

/// A non-owning view of the elements of a tensor: a pointer, extents and strides, as `std::mdspan`.
///
/// It is used since C++20 has no `std::mdspan`; interop/mdspan.hpp converts it to one.
/// Strides count elements. Trivially copyable, so it may be passed to kernels by value.
///
/// Address  valid until the lease from which the view was made ends.
template <class T, std::size_t Rank>
class TensorView {
 public:
  using element_type = T;
  using data_handle_type = T*;

  /// For host code only, since device code cannot access a `std::array`.
  constexpr TensorView(T* data, Extents<Rank> const& extents, Extents<Rank> const& strides) noexcept
      : data_{data} {
    for (std::size_t i = 0; i < Rank; ++i) {
      extents_[i] = extents[i];
      strides_[i] = strides[i];
    }
  }

  /// Converts a view to one through which nothing can be written, as `T*` converts to `T const*`.
  template <class U>
    requires(std::same_as<U const, T>)
  SPILLWAY_HOST_DEVICE constexpr TensorView(TensorView<U, Rank> const& other) noexcept
      : TensorView{other.data_, other} {}

  /// Returns the element at `index`, one number for each dimension. The numbers are not checked.
  template <std::convertible_to<std::size_t>... Index>
    requires(sizeof...(Index) == Rank)
  [[nodiscard]] SPILLWAY_HOST_DEVICE constexpr T& operator()(Index... index) const noexcept {
    std::size_t offset = 0;
    std::size_t dimension = 0;
    ((offset += static_cast<std::size_t>(index) * strides_[dimension++]), ...);
    return data_[offset];
  }

  /// Returns a view of `count` elements of the outermost dimension from `first` on, such as the
  /// samples of one batch. It has the same rank. The numbers are not checked.
  [[nodiscard]] SPILLWAY_HOST_DEVICE constexpr TensorView slice(std::size_t first,
                                                                std::size_t count) const noexcept
      requires(Rank > 0) {
    TensorView result = *this;
    result.data_ += first * strides_[0];
    result.extents_[0] = count;
    return result;
  }

  /// Returns a view without the outermost dimension, at `index` of it, such as one matrix of a
  /// batch. `index` is not checked.
  [[nodiscard]] SPILLWAY_HOST_DEVICE constexpr auto select(std::size_t index) const noexcept
      requires(Rank > 0) {
    return TensorView<T, Rank - 1>{data_ + index * strides_[0], *this};
  }

  [[nodiscard]] SPILLWAY_HOST_DEVICE static constexpr std::size_t rank() noexcept { return Rank; }
  [[nodiscard]] SPILLWAY_HOST_DEVICE constexpr T* data_handle() const noexcept { return data_; }
  [[nodiscard]] SPILLWAY_HOST_DEVICE constexpr std::size_t extent(std::size_t i) const noexcept {
    return extents_[i];
  }
  [[nodiscard]] SPILLWAY_HOST_DEVICE constexpr std::size_t stride(std::size_t i) const noexcept {
    return strides_[i];
  }
  /// Number of elements.
  [[nodiscard]] SPILLWAY_HOST_DEVICE constexpr std::size_t size() const noexcept {
    std::size_t count = 1;
    for (std::size_t i = 0; i < Rank; ++i) {
      count *= extents_[i];
    }
    return count;
  }

 private:
  template <class, std::size_t>
  friend class TensorView;

  /// A view at `data` with the inner dimensions of `outer`, as many as its own rank.
  template <class U, std::size_t OuterRank>
  SPILLWAY_HOST_DEVICE constexpr TensorView(T* data, TensorView<U, OuterRank> const& outer) noexcept
      : data_{data} {
    for (std::size_t i = 0; i < Rank; ++i) {
      extents_[i] = outer.extents_[OuterRank - Rank + i];
      strides_[i] = outer.strides_[OuterRank - Rank + i];
    }
  }

  T* data_;
  // Plain arrays: device code may not call std::array's members.
  std::size_t extents_[Rank == 0 ? 1 : Rank]{};
  std::size_t strides_[Rank == 0 ? 1 : Rank]{};
};

}  // namespace spillway
