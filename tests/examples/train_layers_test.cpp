// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "adam.hpp"
#include "layers.hpp"
#include "train_session.hpp"

namespace {

using namespace beyond_test;

/// A matrix on the host, and its product by the textbook formula.
struct HostMatrix {
  std::size_t rows;
  std::size_t cols;
  std::vector<double> values;

  [[nodiscard]] double at(std::size_t i, std::size_t j) const { return values[i * cols + j]; }
};

HostMatrix random_matrix(std::size_t rows, std::size_t cols, std::uint64_t seed) {
  return {rows, cols, random_values<double>(rows * cols, seed)};
}

HostMatrix product(HostMatrix const& a, HostMatrix const& b) {
  HostMatrix c{a.rows, b.cols, std::vector<double>(a.rows * b.cols)};
  for (std::size_t i = 0; i < a.rows; ++i) {
    for (std::size_t j = 0; j < b.cols; ++j) {
      for (std::size_t k = 0; k < b.rows; ++k) {
        c.values[i * b.cols + j] += a.at(i, k) * b.at(k, j);
      }
    }
  }
  return c;
}

void check_near(std::vector<double> const& found, std::vector<double> const& expected) {
  REQUIRE(found.size() == expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    CAPTURE(i);
    CHECK(found[i] == doctest::Approx(expected[i]).epsilon(1e-12));
  }
}

struct Shape {
  std::size_t rows;
  std::size_t inputs;
  std::size_t outputs;
};

// Whole tiles, tiles cut at either edge, and nothing but an edge.
constexpr Shape shapes[] = {{8, 16, 16}, {9, 7, 10}, {4, 5, 19}, {3, 2, 1}};

}  // namespace

TEST_SUITE("train_beyond_memory layers") {
  TEST_CASE("linear: agrees with the textbook product at any shape") {
    for (Shape const& shape : shapes) {
      auto const rows = shape.rows;
      auto const inputs = shape.inputs;
      auto const outputs = shape.outputs;
      CAPTURE(rows);
      Bench bench;
      HostMatrix const x = random_matrix(rows, inputs, 1);
      HostMatrix const w = random_matrix(inputs, outputs, 2);
      auto const b = random_values<double>(outputs, 3);
      auto const dx = bench.tensor(rows, inputs, x.values);
      auto const dw = bench.tensor(inputs, outputs, w.values);
      auto const db = bench.tensor(1, outputs, b);
      auto y = bench.session().tensor<double>(rows, outputs);

      beyond::linear(bench.session(), dx, dw, db, y);

      HostMatrix expected = product(x, w);
      for (std::size_t i = 0; i < expected.values.size(); ++i) {
        expected.values[i] += b[i % outputs];
      }
      check_near(bench.session().values_sync(y), expected.values);

      auto positive = bench.session().tensor<double>(rows, outputs);
      beyond::linear_relu(bench.session(), dx, dw, db, positive);

      HostMatrix clipped = expected;
      for (double& value : clipped.values) {
        value = std::max(value, 0.0);
      }
      check_near(bench.session().values_sync(positive), clipped.values);

      beyond::add_linear(bench.session(), dx, dw, db, y);

      for (double& value : expected.values) {
        value *= 2;
      }
      check_near(bench.session().values_sync(y), expected.values);
    }
  }

  TEST_CASE_TEMPLATE("MultiplyTile: agrees with the textbook product, however the work is divided",
                     Tiling,
                     beyond::HostTiling,
                     beyond::CudaTiling) {
    for (Shape const& shape : shapes) {
      CAPTURE(shape.rows);
      HostMatrix const a = random_matrix(shape.rows, shape.inputs, 1);
      HostMatrix const b = random_matrix(shape.inputs, shape.outputs, 2);
      std::vector<double> found(shape.rows * shape.outputs);
      auto const extent = [](std::size_t n) { return static_cast<beyond::Index>(n); };
      beyond::Matrix<double const> const left{a.values.data(), extent(a.rows), extent(a.cols)};
      beyond::Matrix<double const> const right{b.values.data(), extent(b.rows), extent(b.cols)};
      beyond::Matrix<double> const out{found.data(), extent(a.rows), extent(b.cols)};
      using Multiply = beyond::MultiplyTile<double, Tiling>;
      Multiply const multiply{beyond::as_is(left), right, out, nullptr, beyond::StartFrom::zero};

      for (beyond::Index i = 0; i < Multiply::count(out); ++i) {
        multiply(i);
      }

      check_near(found, product(a, b).values);
    }
  }

  TEST_CASE_TEMPLATE(
      "MultiplyTile, TransposeTile, SumColumns: write only their own part of the result",
      Tiling,
      beyond::HostTiling,
      beyond::CudaTiling) {
    constexpr float untouched = -7;
    for (Shape const& shape : shapes) {
      auto const rows = shape.rows;
      auto const inputs = shape.inputs;
      auto const outputs = shape.outputs;
      CAPTURE(rows);
      auto const extent = [](std::size_t n) { return static_cast<beyond::Index>(n); };
      std::size_t const behind = 4 * std::max(rows, outputs);
      std::vector<float> const a(rows * inputs, 1.0F);
      std::vector<float> const b(inputs * outputs, 1.0F);
      std::vector<float> out(rows * outputs + behind, untouched);
      auto const check = [&](std::size_t written) {
        CHECK(std::count(out.begin(), out.end(), untouched) == extent(out.size() - written));
        out.assign(out.size(), untouched);
      };
      auto const run_all = [](beyond::Index count, auto const& kernel) {
        for (beyond::Index i = 0; i < count; ++i) {
          kernel(i);
        }
      };
      beyond::Matrix<float const> const left{a.data(), extent(rows), extent(inputs)};
      beyond::Matrix<float const> const right{b.data(), extent(inputs), extent(outputs)};
      beyond::Matrix<float> const product{out.data(), extent(rows), extent(outputs)};

      using Multiply = beyond::MultiplyTile<float, Tiling>;
      run_all(Multiply::count(product),
              Multiply{beyond::as_is(left), right, product, nullptr, beyond::StartFrom::zero});
      check(rows * outputs);

      beyond::Matrix<float> const turned{out.data(), extent(inputs), extent(rows)};
      out.resize(std::max(out.size(), rows * inputs + behind), untouched);
      using Transpose = beyond::TransposeTile<float, Tiling>;
      run_all(Transpose::count(turned), Transpose{left, {out.data(), turned.rows, turned.cols}});
      check(rows * inputs);

      using Sum = beyond::SumColumns<float, Tiling>;
      run_all(Sum::count(left), Sum{left, out.data()});
      check(inputs);
    }
  }

  TEST_CASE("linear: gradients agree with finite differences") {
    for (Shape const& shape : shapes) {
      auto const rows = shape.rows;
      auto const inputs = shape.inputs;
      auto const outputs = shape.outputs;
      CAPTURE(rows);
      Bench bench;
      auto& session = bench.session();
      auto const x = random_values<double>(rows * inputs, 1);
      auto const w = random_values<double>(inputs * outputs, 2);
      auto const b = random_values<double>(outputs, 3);
      auto const weights = random_values<double>(rows * outputs, 4);
      auto dx = bench.tensor(rows, inputs, x);
      auto dw = bench.tensor(inputs, outputs, w);
      auto db = bench.tensor(1, outputs, b);
      auto y = session.tensor<double>(rows, outputs);
      auto const loss = [&] {
        beyond::linear(session, dx, dw, db, y);
        return dot(session.values_sync(y), weights);
      };

      auto const y_gradient = bench.tensor(rows, outputs, weights);
      auto x_gradient = session.tensor<double>(rows, inputs);
      auto w_gradient = session.tensor<double>(inputs, outputs);
      auto b_gradient = session.tensor<double>(1, outputs);
      beyond::linear_gradients(session, dx, y_gradient, w_gradient, b_gradient);
      beyond::linear_input_gradient(session, y_gradient, dw, x_gradient);

      check_gradient(session.values_sync(x_gradient), x, [&](auto const& values) {
        bench.set(dx, values);
        return loss();
      });
      bench.set(dx, x);
      check_gradient(session.values_sync(w_gradient), w, [&](auto const& values) {
        bench.set(dw, values);
        return loss();
      });
      bench.set(dw, w);
      check_gradient(session.values_sync(b_gradient), b, [&](auto const& values) {
        bench.set(db, values);
        return loss();
      });
    }
  }

  TEST_CASE("linear_relu: a recomputed result is identical bit for bit") {
    Bench bench{std::size_t{1} << 20U, true};
    auto& session = bench.session();
    auto const x = bench.tensor(8, 16, random_values<double>(8 * 16, 1));
    auto const weight = bench.tensor(16, 12, random_values<double>(16 * 12, 2));
    auto const bias = bench.tensor(1, 12, random_values<double>(12, 3));
    auto y = session.tensor<double>(8, 12);
    beyond::linear_relu(session, x, weight, bias, y);
    auto const made = session.values_sync(y);

    y.swap_out();

    CHECK(session.values_sync(y) == made);
    CHECK(session.allocator().stats().recomputations.count == 1);
    CHECK(session.allocator().stats().swap_outs.count == 0);
  }

  TEST_CASE("relu_gradient: agrees with finite differences") {
    Bench bench;
    auto& session = bench.session();
    auto const x = random_values<double>(40, 5);
    auto const weights = random_values<double>(40, 6);
    std::vector<double> identity(5 * 5);
    for (std::size_t i = 0; i < 5; ++i) {
      identity[i * 5 + i] = 1;
    }
    auto const weight = bench.tensor(5, 5, identity);
    auto const bias = bench.tensor(1, 5, std::vector<double>(5));
    auto dx = bench.tensor(8, 5, x);
    auto y = session.tensor<double>(8, 5);
    beyond::linear_relu(session, dx, weight, bias, y);
    auto gradient = bench.tensor(8, 5, weights);

    beyond::relu_gradient(session, y, gradient);

    check_gradient(session.values_sync(gradient), x, [&](auto const& values) {
      bench.set(dx, values);
      beyond::linear_relu(session, dx, weight, bias, y);
      return dot(session.values_sync(y), weights);
    });
  }

  TEST_CASE("normalize: rows get mean 0 and variance 1, and the gradient is accumulated") {
    constexpr std::size_t rows = 5;
    constexpr std::size_t cols = 12;
    Bench bench;
    auto& session = bench.session();
    auto const x = random_values<double>(rows * cols, 7);
    auto const weights = random_values<double>(rows * cols, 8);
    auto dx = bench.tensor(rows, cols, x);
    auto normal = session.tensor<double>(rows, cols);
    auto scale = session.tensor<double>(rows, 1);
    beyond::normalize(session, dx, normal, scale);
    auto const values = session.values_sync(normal);
    for (std::size_t i = 0; i < rows; ++i) {
      std::vector<double> const row(values.begin() + static_cast<std::ptrdiff_t>(i * cols),
                                    values.begin() + static_cast<std::ptrdiff_t>((i + 1) * cols));
      CHECK(dot(row, std::vector<double>(cols, 1.0)) == doctest::Approx(0.0));
      CHECK(dot(row, row) / cols == doctest::Approx(1.0).epsilon(1e-3));
    }

    auto const normal_gradient = bench.tensor(rows, cols, weights);
    auto const before = random_values<double>(rows * cols, 9);
    auto x_gradient = bench.tensor(rows, cols, before);
    beyond::add_normalize_gradient(session, normal_gradient, normal, scale, x_gradient);

    auto added = session.values_sync(x_gradient);
    for (std::size_t i = 0; i < added.size(); ++i) {
      added[i] -= before[i];
    }
    check_gradient(added, x, [&](auto const& moved) {
      bench.set(dx, moved);
      beyond::normalize(session, dx, normal, scale);
      return dot(session.values_sync(normal), weights);
    });
  }

  TEST_CASE("softmax_loss: gradient agrees with finite differences") {
    constexpr std::size_t rows = 6;
    constexpr std::size_t classes = 4;
    Bench bench;
    auto& session = bench.session();
    auto const x = random_values<double>(rows * classes, 10);
    auto logits = bench.tensor(rows, classes, x);
    auto const labels = bench.tensor<std::int32_t>(rows, 1, {0, 1, 2, 3, 0, 3});
    auto gradient = session.tensor<double>(rows, classes);
    auto loss = session.tensor<double>(1, 1);
    beyond::softmax_loss(session, logits, labels, gradient, loss);
    auto const found = session.values_sync(gradient);

    check_gradient(found, x, [&](auto const& values) {
      bench.set(logits, values);
      beyond::softmax_loss(session, logits, labels, gradient, loss);
      return session.values_sync(loss).front();
    });
  }

  TEST_CASE("softmax_loss: equal logits give the logarithm of the number of classes, and nothing "
            "overflows") {
    Bench bench;
    auto& session = bench.session();
    auto const labels = bench.tensor<std::int32_t>(2, 1, {1, 0});
    auto gradient = session.tensor<float>(2, 3);
    auto loss = session.tensor<float>(1, 1);

    auto const equal = bench.tensor<float>(2, 3, {7, 7, 7, -9, -9, -9});
    beyond::softmax_loss(session, equal, labels, gradient, loss);
    CHECK(session.values_sync(loss).front() == doctest::Approx(std::log(3.0)));

    auto const large = bench.tensor<float>(2, 3, {0, 1e30F, 0, 1e30F, 0, 0});
    beyond::softmax_loss(session, large, labels, gradient, loss);
    CHECK(session.values_sync(loss).front() == 0.0F);
  }

  TEST_CASE("find_correct: marks the rows whose highest logit is at the label") {
    Bench bench;
    auto& session = bench.session();
    auto const logits = bench.tensor<float>(3, 2, {1, 2, 5, -1, 0, 0.5F});
    auto const labels = bench.tensor<std::int32_t>(3, 1, {1, 1, 1});
    auto correct = session.tensor<std::int32_t>(3, 1);

    beyond::find_correct(session, logits, labels, correct);

    CHECK(session.values_sync(correct) == std::vector<std::int32_t>{1, 0, 1});
  }

  TEST_CASE("Adam: follows the published rule") {
    constexpr std::size_t count = 6;
    Bench bench;
    auto& session = bench.session();
    auto expected = random_values<double>(count, 11);
    std::vector<double> mean(count);
    std::vector<double> square(count);
    beyond::Parameter<Tensor<double>> parameter{
        bench.tensor(2, 3, expected), bench.tensor(2, 3, mean), bench.tensor(2, 3, square)};
    beyond::Adam adam;
    for (int step = 1; step <= 4; ++step) {
      auto const g = random_values<double>(count, 11 + static_cast<std::uint64_t>(step));
      double const rate = 0.1 / step;
      auto const gradient = bench.tensor(2, 3, g);

      adam.begin_step(rate);
      adam.apply(session, parameter, gradient);

      for (std::size_t i = 0; i < count; ++i) {
        mean[i] = 0.9 * mean[i] + 0.1 * g[i];
        square[i] = 0.999 * square[i] + 0.001 * g[i] * g[i];
        double const m = mean[i] / (1 - std::pow(0.9, step));
        double const v = square[i] / (1 - std::pow(0.999, step));
        expected[i] -= rate * m / (std::sqrt(v) + 1e-8);
      }
      check_near(session.values_sync(parameter.value), expected);
    }
  }
}
