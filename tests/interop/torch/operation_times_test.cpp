// SPDX-License-Identifier: Apache-2.0
#include <spillway/interop/torch/operation_times.hpp>

#include <doctest/doctest.h>

#include <cstdint>

TEST_SUITE("operation_times") {
  using spillway::torch::OperationTimes;

  TEST_CASE("OperationTimes: returns the least time measured for each key") {
    OperationTimes times;
    CHECK(!times.find(7));
    CHECK(times.note(7, 30) == 30);
    CHECK(times.note(7, 20) == 20);
    CHECK(times.note(7, 40) == 20);
    CHECK(times.find(7) == 20);
    CHECK(!times.find(8));
  }

  TEST_CASE("OperationTimes: an operation with known times is still measured now and then") {
    OperationTimes times;
    int op = 0;
    int other = 0;
    auto const measured_of = [&](std::uint64_t runs, bool are_known) {
      std::uint64_t measured = 0;
      for (std::uint64_t i = 0; i < runs; ++i) {
        measured += std::uint64_t{times.is_measured(&op)};
        times.note_run(&op, are_known);
      }
      return measured;
    };
    CHECK(measured_of(100, false) == 100);
    CHECK(measured_of(OperationTimes::runs_to_settle, true) == OperationTimes::runs_to_settle);
    CHECK(measured_of(10 * OperationTimes::measured_one_in, true) == 10);
    CHECK(times.is_measured(&other));

    // Other shapes, whose times are not known: from the next run on it is measured.
    times.note_run(&op, false);
    CHECK(measured_of(OperationTimes::runs_to_settle, true) == OperationTimes::runs_to_settle);
  }
}
