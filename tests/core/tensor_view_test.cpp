// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/tensor_view.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <numeric>
#include <type_traits>

using spillway::TensorView;

static_assert(std::is_trivially_copyable_v<TensorView<float, 3>>, "kernels take it by value");
static_assert(TensorView<float, 3>::rank() == 3);
static_assert(std::is_same_v<TensorView<float const, 1>::element_type, float const>);
// Exactly one index for each dimension.
static_assert(std::is_invocable_v<TensorView<int, 2>, int, std::size_t>);
static_assert(!std::is_invocable_v<TensorView<int, 2>, int>);
static_assert(!std::is_invocable_v<TensorView<int, 2>, int, int, int>);
static_assert(!std::is_invocable_v<TensorView<int, 1>, char const*>);
// As pointers: what may be written can be given as what may not, and not the other way round.
static_assert(std::is_convertible_v<TensorView<int, 2>, TensorView<int const, 2>>);
static_assert(!std::is_convertible_v<TensorView<int const, 2>, TensorView<int, 2>>);
static_assert(!std::is_convertible_v<TensorView<int, 2>, TensorView<int const, 3>>);
static_assert(!std::is_convertible_v<TensorView<int, 2>, TensorView<long const, 2>>);
template <class View>
concept CanSlice = requires(View view) {
  view.slice(0, 1);
  view.select(0);
};
static_assert(CanSlice<TensorView<int, 1>> && !CanSlice<TensorView<int, 0>>);

TEST_SUITE("tensor_view") {
  TEST_CASE("TensorView: an index selects the element that the strides give") {
    std::array<int, 24> data{};
    std::iota(data.begin(), data.end(), 0);
    TensorView<int, 3> const rows{data.data(), {2, 3, 4}, {12, 4, 1}};
    TensorView<int, 3> const columns{data.data(), {4, 3, 2}, {1, 4, 12}};

    for (std::size_t i = 0; i < 2; ++i) {
      for (std::size_t j = 0; j < 3; ++j) {
        for (std::size_t k = 0; k < 4; ++k) {
          CHECK(rows(i, j, k) == static_cast<int>(i * 12 + j * 4 + k));
          CHECK(&columns(k, j, i) == &rows(i, j, k));
        }
      }
    }
  }

  TEST_CASE("TensorView: reports its extents, strides, size and address") {
    std::array<double, 24> data{};
    TensorView<double, 2> const view{data.data(), {3, 5}, {8, 1}};

    CHECK(view.extent(0) == 3);
    CHECK(view.extent(1) == 5);
    CHECK(view.stride(0) == 8);
    CHECK(view.stride(1) == 1);
    CHECK(view.size() == 15);
    CHECK(view.data_handle() == data.data());
  }

  TEST_CASE("TensorView: without dimensions it has one element") {
    int only = 7;
    TensorView<int, 0> const view{&only, {}, {}};

    CHECK(view.size() == 1);
    view() = 8;
    CHECK(only == 8);
  }

  TEST_CASE("TensorView: a slice and a selection refer to the same elements") {
    std::array<int, 24> data{};
    TensorView<int, 3> const view{data.data(), {2, 3, 4}, {1, 8, 2}};

    auto const slice = view.slice(1, 1);
    CHECK(slice.extent(0) == 1);
    CHECK(slice.size() == 12);
    CHECK(&slice(0, 2, 3) == &view(1, 2, 3));

    auto const matrix = view.select(1);
    static_assert(std::is_same_v<decltype(matrix), TensorView<int, 2> const>);
    CHECK(matrix.extent(0) == 3);
    CHECK(matrix.extent(1) == 4);
    CHECK(&matrix(2, 3) == &view(1, 2, 3));
    CHECK(&matrix.select(2).select(3)() == &view(1, 2, 3));
  }

  TEST_CASE("TensorView: a read-only view has the same shape and address") {
    std::array<int, 24> data{};
    TensorView<int, 2> const view{data.data(), {3, 4}, {8, 2}};
    TensorView<int const, 2> const read_only = view;

    CHECK(read_only.extent(0) == 3);
    CHECK(read_only.stride(1) == 2);
    CHECK(&read_only(2, 3) == &view(2, 3));
  }

  TEST_CASE("TensorView: can be used in constant expressions") {
    constexpr auto sum = [] {
      std::array<int, 4> data{1, 2, 3, 4};
      TensorView<int, 2> const view{data.data(), {2, 2}, {2, 1}};
      view(1, 1) = 10;
      TensorView<int const, 1> const second = view.slice(1, 1).select(0);
      return view(0, 0) + view(0, 1) + second(0) + second(1);
    }();
    static_assert(sum == 16);
  }
}
