// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/config.hpp>

#include <cstddef>

namespace beyond {

using Index = std::ptrdiff_t;

/// What a kernel sees of a leased tensor: an address and a shape, row by row without gaps.
template <class T>
struct Matrix {
  T* data = nullptr;
  Index rows = 0;
  Index cols = 0;

  [[nodiscard]] SPILLWAY_HOST_DEVICE Index size() const { return rows * cols; }
  [[nodiscard]] SPILLWAY_HOST_DEVICE T* row(Index i) const { return data + i * cols; }
  [[nodiscard]] SPILLWAY_HOST_DEVICE T& operator()(Index i, Index j) const {
    return data[i * cols + j];
  }
};

/// `n / d`, rounded up: how many tiles of size `d` cover `n`.
[[nodiscard]] SPILLWAY_HOST_DEVICE constexpr Index tiles(Index n, Index d) {
  return (n + d - 1) / d;
}

}  // namespace beyond
