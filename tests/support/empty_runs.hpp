// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>

namespace spillway::test {

/// Detects that the filters of a run select no test: such a run would always pass.
class EmptyRuns : public doctest::IReporter {
 public:
  explicit EmptyRuns(doctest::ContextOptions const& /*options*/) {}

  /// What `main` returns after a run that ended with `result`.
  [[nodiscard]] static int fail(int result) {
    if (is_empty_) {
      std::fprintf(stderr, "no test case fits the filters\n");
    }
    return is_empty_ ? EXIT_FAILURE : result;
  }

  void test_run_end(doctest::TestRunStats const& stats) override {
    is_empty_ = stats.numTestCasesPassingFilters == 0;
  }

  void report_query(doctest::QueryData const& /*query*/) override {}
  void test_run_start() override {}
  void test_case_start(doctest::TestCaseData const& /*test*/) override {}
  void test_case_reenter(doctest::TestCaseData const& /*test*/) override {}
  void test_case_end(doctest::CurrentTestCaseStats const& /*stats*/) override {}
  void test_case_exception(doctest::TestCaseException const& /*exception*/) override {}
  void subcase_start(doctest::SubcaseSignature const& /*subcase*/) override {}
  void subcase_end() override {}
  void log_assert(doctest::AssertData const& /*assertion*/) override {}
  void log_message(doctest::MessageData const& /*message*/) override {}
  void test_case_skipped(doctest::TestCaseData const& /*test*/) override {}

 private:
  inline static bool is_empty_ = false;
};

REGISTER_LISTENER("empty runs", 1, EmptyRuns);

}  // namespace spillway::test
