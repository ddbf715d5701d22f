// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>

namespace spillway::test {

/// Says whether the contract suites that are invoked after it in the same source are expected to
/// fail. The tests of the suites invoke them between two of these, for models that are wrong.
///
/// The suites are defined in the global namespace, so doctest reads their attributes from the test
/// suite of that namespace, wherever they are invoked.
struct ExpectedFailures {
  explicit ExpectedFailures(bool are_expected) {
    doctest_detail_test_suite_ns::getCurrentTestSuite() * doctest::should_fail(are_expected);
  }
};

}  // namespace spillway::test
