// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <sstream>
#include <string>
#include <vector>

#include "report.hpp"
#include <nlohmann/json.hpp>

namespace {

beyond::RunReport completed() {
  beyond::RunReport run;
  run.capacity_factor = 0.5;
  run.completed = true;
  run.bitwise_equal = true;
  run.result.step_losses = {2.0F, 1.0F, 0.5F, 0.25F};
  run.result.test_accuracy = 0.97;
  return run;
}

beyond::RunReport failed(bool swapping) {
  beyond::RunReport run;
  run.capacity_factor = 0.5;
  run.swapping = swapping;
  run.error = "no room";
  return run;
}

beyond::Report report_of(std::vector<beyond::RunReport> runs) {
  beyond::Report report;
  report.device = "sim";
  report.reference = completed();
  report.runs = std::move(runs);
  return report;
}

}  // namespace

TEST_SUITE("train_beyond_memory report") {
  using beyond::judge;
  using beyond::Verdict;

  TEST_CASE("judge: running out of memory is a failure with swapping only") {
    CHECK(judge(report_of({failed(false), completed()}), true) == Verdict::good);
    CHECK(judge(report_of({failed(true), completed()}), true) == Verdict::out_of_memory);
  }

  TEST_CASE("judge: a run with a different result is wrong, with swapping or without") {
    for (bool const swapping : {false, true}) {
      auto different = completed();
      different.swapping = swapping;
      different.bitwise_equal = false;
      CHECK(judge(report_of({completed(), different}), true) == Verdict::wrong);
    }
  }

  TEST_CASE("judge: too low an accuracy is wrong if accuracy is judged") {
    auto poor = completed();
    poor.result.test_accuracy = 0.94;
    CHECK(judge(report_of({poor}), true) == Verdict::wrong);
    CHECK(judge(report_of({poor}), false) == Verdict::good);
  }

  TEST_CASE("epoch_losses: gives the means of equal parts") {
    CHECK(beyond::epoch_losses(completed().result.step_losses, 2) ==
          std::vector<double>{1.5, 0.375});
  }

  TEST_CASE("print_json: values that a failed run does not have are null") {
    std::ostringstream out;
    beyond::ExperimentOptions options;
    options.training.epochs = 2;
    beyond::print_json(out, {}, options, report_of({failed(false), completed()}));

    auto const json = nlohmann::json::parse(out.str());
    CHECK(json["runs"][0]["final_loss"].is_null());
    CHECK(json["runs"][0]["error"] == "no room");
    CHECK(json["runs"][1]["final_loss"] == 0.375);
    CHECK(json["runs"][1]["test_accuracy"] == 0.97);
  }
}
