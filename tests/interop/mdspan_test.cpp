// SPDX-License-Identifier: Apache-2.0
#include <spillway/interop/mdspan.hpp>
#include <spillway/swappable_tensor.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <numeric>
#include <type_traits>

#include <support/small_allocator.hpp>

using spillway::as_mdspan;
using spillway::TensorView;

static_assert(std::is_same_v<spillway::StridedMdspan<float const, 2>::element_type, float const>);
static_assert(spillway::StridedMdspan<float, 3>::rank() == 3);

namespace {

/// The element of a span at one index a dimension, in either spelling of the library.
template <class Span, class... Index>
decltype(auto) at(Span const& span, Index... index) {
  return span.accessor().access(span.data_handle(), span.mapping()(index...));
}

}  // namespace

TEST_SUITE("mdspan") {
  TEST_CASE("as_mdspan: gives the same elements as the view") {
    std::array<int, 60> data{};
    std::iota(data.begin(), data.end(), 0);
    TensorView<int, 3> const view{data.data(), {2, 3, 4}, {30, 8, 2}};
    auto const span = as_mdspan(view);

    CHECK(span.data_handle() == data.data());
    for (std::size_t i = 0; i < 3; ++i) {
      CHECK(span.extent(i) == view.extent(i));
      CHECK(span.stride(i) == view.stride(i));
    }
    for (std::size_t i = 0; i < 2; ++i) {
      for (std::size_t j = 0; j < 3; ++j) {
        for (std::size_t k = 0; k < 4; ++k) {
          CHECK(&at(span, i, j, k) == &view(i, j, k));
        }
      }
    }
  }

  TEST_CASE("as_mdspan: without dimensions it has one element") {
    int only = 5;
    auto const span = as_mdspan(TensorView<int, 0>{&only, {}, {}});

    CHECK(span.size() == 1);
    CHECK(&at(span) == &only);
  }

  TEST_CASE("as_mdspan: writing through it writes to the tensor") {
    support::SmallBench bench;
    auto tensor = spillway::make_tensor<float>(bench.allocator, {2, 3});
    {
      auto const lease = tensor.acquire(spillway::Access::write, bench.stream);
      bench.device.synchronize(bench.stream);  // the simulated device is host memory
      auto const span = as_mdspan(lease.view());
      for (std::size_t i = 0; i < 2; ++i) {
        for (std::size_t j = 0; j < 3; ++j) {
          at(span, i, j) = static_cast<float>(10 * i + j);
        }
      }
    }
    std::array<float, 6> read{};
    tensor.copy_to_host_sync(read, bench.stream);
    CHECK(read == std::array<float, 6>{0, 1, 2, 10, 11, 12});
  }
}
