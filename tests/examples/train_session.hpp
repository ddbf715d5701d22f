// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/sim.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "layers.hpp"
#include "session.hpp"
#include "sim_execution.hpp"

namespace beyond_test {

using TestSession = beyond::Session<spillway::SimPolicies, beyond::SimExecution>;
template <class T>
using Tensor = beyond::TensorOf<TestSession, T>;

/// A simulated device of so much memory, with a session on it.
class Bench {
 public:
  explicit Bench(std::size_t capacity_bytes = std::size_t{1} << 20U, bool recomputes = false)
      : device_{{.capacity_bytes = capacity_bytes + bounce_bytes}},
        allocator_{device_, options(capacity_bytes, recomputes)},
        session_{device_, allocator_, recomputes} {}

  [[nodiscard]] TestSession& session() { return session_; }

  template <class T>
  [[nodiscard]] Tensor<T> tensor(std::size_t rows, std::size_t cols, std::vector<T> const& values) {
    auto made = session_.tensor<T>(rows, cols);
    set(made, values);
    return made;
  }
  template <class T>
  void set(Tensor<T>& tensor, std::vector<T> const& values) {
    REQUIRE(values.size() == tensor.size());
    session_.upload(tensor,
                    [&](std::span<T> to) { std::copy(values.begin(), values.end(), to.begin()); });
  }

 private:
  using Allocator = TestSession::allocator_type;
  static constexpr std::size_t bounce_bytes = std::size_t{16} << 10U;
  static Allocator::Options options(std::size_t capacity_bytes, bool recomputes) {
    Allocator::Options options;
    options.capacity_bytes = capacity_bytes;
    options.bounce_bytes = bounce_bytes;
    if (recomputes) {
      options.paging.link_bytes_per_second = 1;  // so that no copy costs less than a recipe
    }
    return options;
  }

  spillway::SimApi device_;
  Allocator allocator_;
  TestSession session_;
};

/// Values away from 0, where a derivative may jump.
template <class T>
[[nodiscard]] std::vector<T> random_values(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random{seed};
  std::uniform_real_distribution<double> size{0.1, 1.0};
  std::vector<T> values(count);
  for (T& value : values) {
    value = static_cast<T>(random() % 2 == 0 ? size(random) : -size(random));
  }
  return values;
}

[[nodiscard]] inline double dot(std::vector<double> const& a, std::vector<double> const& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    sum += a[i] * b[i];
  }
  return sum;
}

/// Checks `gradient` of `loss(values)` against central differences, element by element.
template <class Loss>
void check_gradient(std::vector<double> const& gradient, std::vector<double> values, Loss loss) {
  constexpr double step = 1e-5;
  REQUIRE(gradient.size() == values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    CAPTURE(i);
    double const there = values[i];
    values[i] = there + step;
    double const above = loss(values);
    values[i] = there - step;
    double const below = loss(values);
    values[i] = there;
    CHECK(gradient[i] == doctest::Approx((above - below) / (2 * step)).epsilon(1e-6));
  }
}

}  // namespace beyond_test
