// SPDX-License-Identifier: Apache-2.0
// Threads whose operations share buffers that do not fit together.
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <cstddef>
#include <random>
#include <thread>
#include <vector>

#include <support/buffer_leases_bench.hpp>

using namespace spillway;
using namespace spillway::framework;
using spillway::test::LeasesBench;

TEST_SUITE("buffer_leases_race") {
  TEST_CASE("BufferLeases: operations of several threads find the bytes that they left") {
    constexpr std::size_t threads = 3;
    constexpr std::size_t bytes = 32_KiB;
    LeasesBench bench{512_KiB};
    std::vector<unsigned char*> shared;
    for (unsigned char i = 0; i < 12; ++i) {
      shared.push_back(bench.make(bytes, i));
    }
    std::atomic<int> refused{0};
    std::atomic<int> wrong{0};
    std::barrier start{threads};
    std::vector<std::jthread> running;
    for (std::size_t thread = 0; thread < threads; ++thread) {
      running.emplace_back([&, thread] {
        std::mt19937_64 random{thread + 1};
        std::vector<unsigned char*> mine;
        start.arrive_and_wait();
        for (int i = 0; i < 400; ++i) {
          std::size_t const which = random() % shared.size();
          bool const has_mine = !mine.empty();
          unsigned char* const own = has_mine ? mine[random() % mine.size()] : nullptr;
          LeasesBench::Frame frame{1, i % 2 == 0};
          std::array<BufferUse, 2> const uses{BufferUse{shared[which], false},
                                              BufferUse{own, true}};
          if (!bench.leases.try_enter(frame, uses).empty()) {
            ++refused;
            continue;
          }
          wrong += shared[which][bytes - 1] != which ? 1 : 0;
          if (has_mine) {
            wrong += own[0] != own[bytes - 1] ? 1 : 0;
            own[0] = own[bytes - 1] = static_cast<unsigned char>(i);
          }
          auto* const made = static_cast<unsigned char*>(bench.leases.try_allocate(bytes, &frame));
          if (made != nullptr) {
            made[0] = made[bytes - 1] = 77;
            std::array<void*, 1> const result{made};
            bench.leases.make_swappable(result);
            mine.push_back(made);
          } else {
            ++refused;
          }
          bench.leases.exit(frame);
          if (mine.size() > 6) {
            bench.leases.free(mine.front());
            mine.erase(mine.begin());
          }
          if (thread == 0 && i % 50 == 0) {
            bench.leases.begin_step();
          }
        }
        for (unsigned char* const p : mine) {
          bench.leases.free(p);
        }
      });
    }
    running.clear();
    CHECK(wrong == 0);
    CHECK(refused == 0);  // three operations at once use less than half of the memory
    CHECK(bench.leases.counts().active_bytes == 0);
    CHECK(bench.memory.stats().swap_outs.count > 0);
  }
}
