// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <thread>
#include <vector>

#include <support/buffer_leases_bench.hpp>

using namespace spillway;
using spillway::test::LeasesBench;

TEST_SUITE("operand_leases_race") {
  TEST_CASE("OperandLeases: two threads may begin steps while others reclaim") {
    LeasesBench bench{256_KiB};
    std::array<unsigned char*, 3> const buffers{
        bench.make(96_KiB, 1), bench.make(96_KiB, 2), bench.make(96_KiB, 3)};
    {
      std::vector<std::jthread> running;
      for (int thread = 0; thread < 2; ++thread) {
        running.emplace_back([&] {
          for (int step = 0; step < 200; ++step) {
            bench.leases.begin_step();
          }
        });
      }
      running.emplace_back([&] {
        for (std::size_t i = 0; i < 200; ++i) {
          (void)bench.leases.reclaim();
          CHECK(bench.read({buffers[i % 3]}).front() == i % 3 + 1);
        }
      });
    }

    CHECK(bench.memory.stats().steps == 400);
    bench.leases.begin_step();
    CHECK(bench.leases.is_under_pressure());  // two of the three are swapped out
  }
}
