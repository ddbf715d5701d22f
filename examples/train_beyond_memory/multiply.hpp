// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>

#include "view.hpp"

namespace beyond {

/// The size of tiles for one core: wide, so that a tile stays in vector registers.
struct HostTiling {
  static constexpr std::size_t rows = 4;
  static constexpr std::size_t cols = 8;
  static constexpr bool has_lanes = true;
};

/// The size of tiles for thousands of threads: small, since each thread computes one.
struct CudaTiling {
  static constexpr std::size_t rows = 2;
  static constexpr std::size_t cols = 2;
  static constexpr bool has_lanes = false;
};

/// What a product is added to: zero, a row (the same for every row), or the old contents and a row.
enum class StartFrom { zero, bias, old_and_bias };

/// The left factor of a product, as it lies in memory or transposed without being moved.
template <class T>
struct LeftFactor {
  T const* data;
  Index rows;
  Index cols;
  Index row_stride;
  Index col_stride;
};

template <class T>
[[nodiscard]] LeftFactor<T> as_is(Matrix<T const> m) {
  return {m.data, m.rows, m.cols, m.cols, 1};
}
template <class T>
[[nodiscard]] LeftFactor<T> transposed(Matrix<T const> m) {
  return {m.data, m.cols, m.rows, 1, m.cols};
}

/// Computes one tile of `c = a b`, plus what `start` says.
///
/// Every element is summed by one thread in the order of `k`, so the result depends on nothing but
/// the operands: not on where they lie, not on how many threads there are.
template <class T, class Tiling>
struct MultiplyTile {
  LeftFactor<T> a;
  Matrix<T const> b;
  Matrix<T> c;
  T const* bias;  // one row; unused when starting from zero
  StartFrom start;

  using Sums = T[Tiling::rows][Tiling::cols];
  static constexpr Index height = Tiling::rows;
  static constexpr Index width = Tiling::cols;

  [[nodiscard]] static Index count(Matrix<T> c) {
    return tiles(c.rows, height) * tiles(c.cols, width);
  }

  SPILLWAY_HOST_DEVICE void operator()(Index tile) const {
    Index const across = tiles(c.cols, width);
    Index const i0 = tile / across * height;
    Index const j0 = tile % across * width;
    if (i0 + height <= c.rows && j0 + width <= c.cols) {
      Sums sums = {};
      sum_whole_tile(i0, j0, sums);
      for (Index i = 0; i < height; ++i) {
        for (Index j = 0; j < width; ++j) {
          store(i0 + i, j0 + j, sums[i][j]);
        }
      }
    } else {
      sum_edge_tile(i0, j0);
    }
  }

 private:
  SPILLWAY_HOST_DEVICE void store(Index i, Index j, T sum) const {
    if (start != StartFrom::zero) {
      sum += bias[j];
    }
    c(i, j) = start == StartFrom::old_and_bias ? c(i, j) + sum : sum;
  }

  SPILLWAY_HOST_DEVICE void sum_edge_tile(Index i0, Index j0) const {
    for (Index i = i0; i < c.rows && i < i0 + height; ++i) {
      for (Index j = j0; j < c.cols && j < j0 + width; ++j) {
        T sum = 0;
        for (Index k = 0; k < b.rows; ++k) {
          sum += a.data[i * a.row_stride + k * a.col_stride] * b(k, j);
        }
        store(i, j, sum);
      }
    }
  }

  SPILLWAY_HOST_DEVICE void sum_whole_tile(Index i0, Index j0, Sums& sums) const {
    T const* left = a.data + i0 * a.row_stride;
    T const* right = b.data + j0;
#if !defined(__CUDACC__)
    if constexpr (Tiling::has_lanes) {
      sum_with_lanes(left, right, sums);
      return;
    }
#endif
    for (Index k = 0; k < b.rows; ++k, left += a.col_stride, right += b.cols) {
      for (Index i = 0; i < height; ++i) {
        for (Index j = 0; j < width; ++j) {
          sums[i][j] += left[i * a.row_stride] * right[j];
        }
      }
    }
  }

#if !defined(__CUDACC__)
  // g++ would keep the sums of a plain loop in memory, which is four times slower.
  void sum_with_lanes(T const* left, T const* right, Sums& sums) const {
    using Lanes [[gnu::vector_size(16)]] = T;
    constexpr std::size_t across = Tiling::cols * sizeof(T) / sizeof(Lanes);
    static_assert(across * sizeof(Lanes) == Tiling::cols * sizeof(T));
    Lanes lane_sums[Tiling::rows][across] = {};
    for (Index k = 0; k < b.rows; ++k, left += a.col_stride, right += b.cols) {
      Lanes line[across];
      std::memcpy(&line, right, sizeof line);
      for (Index i = 0; i < height; ++i) {
        for (std::size_t j = 0; j < across; ++j) {
          lane_sums[i][j] += left[i * a.row_stride] * line[j];
        }
      }
    }
    std::memcpy(&sums, &lane_sums, sizeof sums);
  }
#endif
};

/// Writes one tile of `to`, the transpose of `from`.
template <class T, class Tiling>
struct TransposeTile {
  Matrix<T const> from;
  Matrix<T> to;

  static constexpr Index side = Tiling::cols;

  [[nodiscard]] static Index count(Matrix<T> to) {
    return tiles(to.rows, side) * tiles(to.cols, side);
  }

  SPILLWAY_HOST_DEVICE void operator()(Index tile) const {
    Index const across = tiles(to.cols, side);
    Index const i0 = tile / across * side;
    Index const j0 = tile % across * side;
    for (Index i = i0; i < to.rows && i < i0 + side; ++i) {
      for (Index j = j0; j < to.cols && j < j0 + side; ++j) {
        to(i, j) = from(j, i);
      }
    }
  }
};

/// Sums a few columns of `from` into the one row `to`.
template <class T, class Tiling>
struct SumColumns {
  Matrix<T const> from;
  T* to;

  [[nodiscard]] static Index count(Matrix<T const> from) { return tiles(from.cols, Tiling::cols); }

  SPILLWAY_HOST_DEVICE void operator()(Index tile) const {
    constexpr Index width = Tiling::cols;
    T sums[Tiling::cols] = {};
    Index const j0 = tile * width;
    Index const here = from.cols - j0 < width ? from.cols - j0 : width;
    for (Index i = 0; i < from.rows; ++i) {
      for (Index j = 0; j < here; ++j) {
        sums[j] += from(i, j0 + j);
      }
    }
    for (Index j = 0; j < here; ++j) {
      to[j0 + j] = sums[j];
    }
  }
};

}  // namespace beyond
