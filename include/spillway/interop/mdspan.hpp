// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/tensor_view.hpp>

#include <array>
#include <cstddef>
#include <version>

#if defined(__cpp_lib_mdspan)
#  include <mdspan>
#elif __has_include(<cuda/std/mdspan>)
#  include <cuda/std/mdspan>
#else
#  error "no mdspan here: use that of C++23, or of CUDA with its include/cccl on the include path"
#  define SPILLWAY_STOP <no mdspan here>  // see core/config.hpp
#  include SPILLWAY_STOP
#endif

namespace spillway {

/// Namespace of the `mdspan` that is used: the standard library's if it has one, else that of the
/// CUDA toolkit.
#if defined(__cpp_lib_mdspan)
namespace mdspan_ns = ::std;
#else
namespace mdspan_ns = ::cuda::std;
#endif

template <class T, std::size_t Rank>
using StridedMdspan =
    mdspan_ns::mdspan<T, mdspan_ns::dextents<std::size_t, Rank>, mdspan_ns::layout_stride>;

/// Returns an `mdspan` with dynamic extents over the same elements. It is valid as long as the view
/// is.
template <class T, std::size_t Rank>
[[nodiscard]] StridedMdspan<T, Rank> as_mdspan(TensorView<T, Rank> const& view) {
  mdspan_ns::array<std::size_t, Rank> extents{};
  mdspan_ns::array<std::size_t, Rank> strides{};
  for (std::size_t i = 0; i < Rank; ++i) {
    extents[i] = view.extent(i);
    strides[i] = view.stride(i);
  }
  using Dynamic = mdspan_ns::dextents<std::size_t, Rank>;
  return StridedMdspan<T, Rank>{
      view.data_handle(),
      typename mdspan_ns::layout_stride::template mapping<Dynamic>{Dynamic{extents}, strides}};
}

}  // namespace spillway
