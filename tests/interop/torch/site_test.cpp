// SPDX-License-Identifier: Apache-2.0
#include <spillway/interop/torch/site.hpp>

#include <doctest/doctest.h>

#include <functional>

#include <support/concept_checks.hpp>

namespace {

using namespace spillway::torch;

struct PlainSite {};

struct FullSite {
  static bool is_capturing() { return false; }
  static bool is_capturing(int stream) { return stream == 2; }
  static int uncaptured_stream() { return 1; }
  static int joining_stream() { return 2; }
  static void give_back_after_launches(std::function<void()> const& give_back) { give_back(); }
};

static_assert(CapturingSite<FullSite> && JoiningSite<FullSite>);
static_assert(!CapturingSite<PlainSite> && !JoiningSite<PlainSite>);

}  // namespace

TEST_SUITE("site") {
  TEST_CASE("CapturingSite: the concept requires all three members") {
    CHECK_NEEDS(CapturingSite, FullSite, is_capturing);
    CHECK_NEEDS(CapturingSite, FullSite, uncaptured_stream);
    CHECK_NEEDS(CapturingSite, FullSite, give_back_after_launches);
    CHECK_REFUSES(CapturingSite, FullSite, static void is_capturing());
    CHECK_REFUSES(CapturingSite, FullSite, static void give_back_after_launches());
    CHECK_NEEDS(JoiningSite, FullSite, joining_stream);
  }
}
