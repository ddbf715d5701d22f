// SPDX-License-Identifier: Apache-2.0
#include <spillway/interop/tensorflow/step_detector.hpp>

#include <doctest/doctest.h>

using spillway::tensorflow::StepDetector;

TEST_SUITE("step_detector") {
  TEST_CASE("StepDetector: with one counter, each count begins a step") {
    StepDetector steps;
    int counter = 0;

    CHECK(steps.on_count(&counter));
    CHECK(steps.on_count(&counter));
  }

  TEST_CASE("StepDetector: of several counters the first marks the steps") {
    StepDetector steps;
    int first = 0;
    int second = 0;
    int third = 0;
    CHECK(steps.on_count(&first));

    for (int step = 0; step < 3; ++step) {
      CHECK_FALSE(steps.on_count(&second));
      CHECK_FALSE(steps.on_count(&third));
      CHECK(steps.on_count(&first));
    }
  }

  TEST_CASE(
      "StepDetector: a counter that advances twice while the first stands still replaces it") {
    StepDetector steps;
    int stopped = 0;
    int other = 0;
    int third = 0;
    CHECK(steps.on_count(&stopped));
    CHECK_FALSE(steps.on_count(&other));
    CHECK_FALSE(steps.on_count(&third));

    CHECK(steps.on_count(&other));

    CHECK_FALSE(steps.on_count(&third));
    CHECK(steps.on_count(&other));
  }
}
