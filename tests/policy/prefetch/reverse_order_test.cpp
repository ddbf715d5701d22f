// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/types.hpp>
#include <spillway/policy/prefetch/reverse_order.hpp>
#include <spillway/testing/policy_contracts.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

using namespace spillway;
using testing::block;
using testing::PrefetchRig;

}  // namespace

TEST_SUITE("prefetch") {
  TEST_CASE("ReverseOrder: in a backward pass the blocks before the last one come back") {
    PrefetchRig<ReverseOrder> rig{40, ReverseOrder{{.lookahead_ops = 3}}};
    for (std::uint32_t i = 0; i < 40; ++i) {
      rig.use(i);
      CHECK(rig.wanted().empty());
    }
    for (std::uint32_t i = 40; i-- != 25;) {
      rig.use(i);
    }
    CHECK(rig.wanted() == std::vector{24U, 23U, 22U});
  }

  TEST_CASE("ReverseOrder: by default it considers 64 blocks, however many there are") {
    PrefetchRig<ReverseOrder> rig{200};
    for (std::uint32_t i = 0; i < 200; ++i) {
      rig.use(i);
    }
    for (std::uint32_t i = 200; i-- != 180;) {
      rig.use(i);
    }
    CHECK(rig.wanted().size() == 64);
  }

  TEST_CASE("ReverseOrder: gradients made during the pass do not disturb it") {
    PrefetchRig<ReverseOrder> rig{80, ReverseOrder{{.lookahead_ops = 2}}};
    for (std::uint32_t i = 0; i < 40; ++i) {
      rig.use(i);
    }
    for (std::uint32_t i = 40; i-- != 20;) {
      rig.use(i);
      rig.use(40 + i);  // made by this operation
      rig.use(40 + i);  // and used by the next
    }
    CHECK(rig.wanted() == std::vector{19U, 18U});
  }

  TEST_CASE(
      "ReverseOrder: a use of one of the eight newest blocks does not start a backward pass") {
    for (std::uint32_t const first : {31U, 32U}) {
      CAPTURE(first);
      PrefetchRig<ReverseOrder> rig{40};
      for (std::uint32_t i = 0; i < 40; ++i) {
        rig.use(i);
      }
      rig.use(first);
      rig.use(30);
      rig.use(29);
      CHECK(rig.wanted().empty() == (first == 32));  // two consecutive uses are not enough yet
    }
  }

  TEST_CASE("ReverseOrder: a use of a block far behind the last one starts a new pass") {
    for (std::uint32_t const later : {28U, 29U}) {
      CAPTURE(later);
      PrefetchRig<ReverseOrder> rig{40, ReverseOrder{{.lookahead_ops = 1}}};
      for (std::uint32_t i = 0; i < 40; ++i) {
        rig.use(i);
      }
      for (std::uint32_t const down : {24U, 22U, 20U}) {
        rig.use(down);
      }
      REQUIRE(rig.wanted() == std::vector{19U});
      rig.use(later);
      CHECK(rig.wanted().empty() == (later == 29));
    }
  }

  TEST_CASE("ReverseOrder: a loop over weights is not a backward pass") {
    PrefetchRig<ReverseOrder> rig{40};
    for (int round = 0; round < 3; ++round) {
      for (std::uint32_t i = 0; i < 40; ++i) {
        rig.use(i);
        CHECK(rig.wanted().empty());
      }
    }
  }

  TEST_CASE("ReverseOrder: freeing a block does not change the order of the others") {
    PrefetchRig<ReverseOrder> rig{40, ReverseOrder{{.lookahead_ops = 3}}};
    for (std::uint32_t i = 0; i < 40; ++i) {
      rig.use(i);
    }
    for (std::uint32_t i = 40; i-- != 20;) {
      rig.use(i);
      rig.policy.on_destroy(block(i));
    }
    CHECK(rig.wanted() == std::vector{19U, 18U, 17U});
  }

  TEST_CASE("ReverseOrder: a new step starts a new order") {
    PrefetchRig<ReverseOrder> rig{40};
    for (std::uint32_t i = 0; i < 40; ++i) {
      rig.use(i);
    }
    for (std::uint32_t i = 40; i-- != 20;) {
      rig.use(i);
    }
    CHECK(!rig.wanted().empty());
    rig.begin();
    CHECK(rig.wanted().empty());
    rig.use(5);
    CHECK(rig.wanted().empty());
  }
}
