// SPDX-License-Identifier: Apache-2.0
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <support/empty_runs.hpp>

int main(int argc, char** argv) {
  return spillway::test::EmptyRuns::fail(doctest::Context(argc, argv).run());
}
