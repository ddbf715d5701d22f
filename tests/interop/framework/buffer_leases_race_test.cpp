// SPDX-License-Identifier: Apache-2.0
// Threads whose operations share buffers that do not fit together.
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <random>
#include <thread>
#include <vector>

#include <support/buffer_leases_bench.hpp>
#include <support/temporary_folder.hpp>

using namespace spillway;
using namespace spillway::framework;
using spillway::test::LeasesBench;

TEST_SUITE("buffer_leases_race") {
  TEST_CASE("BufferLeases: operations of several threads find the bytes that they wrote") {
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

  TEST_CASE("BufferLeases: programs that share a device wait for each other and lose no byte") {
    constexpr std::size_t bytes = 32_KiB;
    TemporaryFolder folder;
    std::atomic<int> wrong{0};
    std::vector<std::jthread> programs;
    for (unsigned char program = 0; program < 2; ++program) {
      programs.emplace_back([&, program] {
        std::mt19937_64 random{program};
        LeasesBench bench{512_KiB};
        bench.leases.share({.file = folder.path() / "table",
                            .least_bytes = 64_KiB,
                            .period = std::chrono::milliseconds{1},
                            .idle_after = std::chrono::milliseconds{5},
                            .patience = std::chrono::minutes{10}});
        std::vector<unsigned char*> buffers;
        for (unsigned char i = 0; i < 14; ++i) {
          buffers.push_back(bench.make(bytes, static_cast<unsigned char>(100 * program + i)));
        }
        for (int i = 0; i < 300; ++i) {
          // Four need 128 KiB, and both programs are promised 64.
          std::size_t const first = random() % (buffers.size() - 3);
          auto const read = bench.read(
              {buffers[first], buffers[first + 1], buffers[first + 2], buffers[first + 3]});
          for (std::size_t k = 0; k < 4; ++k) {
            wrong += read[k] != 100U * program + first + k ? 1 : 0;
          }
        }
        wrong += bench.leases.share_members().empty() ? 1 : 0;
        for (unsigned char* const p : buffers) {
          bench.leases.free(p);
        }
        bench.leases.leave_share();
        wrong += bench.leases.is_shared() ? 1 : 0;
      });
    }
    programs.clear();
    CHECK(wrong == 0);
  }

  TEST_CASE("BufferLeases: programs whose operations do not fit beside each other take turns") {
    constexpr std::size_t bytes = 32_KiB;
    constexpr std::size_t operands = 4;
    constexpr std::size_t results = 6;  // with the operands more than half of what there is
    constexpr int rounds = 6;
    TemporaryFolder folder;
    std::atomic<int> wrong{0};
    std::atomic<int> refused{0};
    std::barrier together{2};
    std::array<std::atomic<int>, 2> done{};
    std::vector<std::jthread> programs;
    for (unsigned char program = 0; program < 2; ++program) {
      programs.emplace_back([&, program] {
        LeasesBench bench{512_KiB};
        bench.leases.share({.file = folder.path() / "table",
                            .least_bytes = 64_KiB,
                            .period = std::chrono::milliseconds{1},
                            .idle_after = std::chrono::milliseconds{20},
                            .patience = std::chrono::minutes{10}});
        std::array<unsigned char*, operands> read{};
        std::array<BufferUse, operands> uses{};
        for (unsigned char i = 0; i < operands; ++i) {
          read[i] = bench.make(bytes, static_cast<unsigned char>(100 * program + i));
          uses[i] = {read[i], true};
        }
        auto const operate = [&] {
          LeasesBench::Frame frame{1, true};
          std::vector<void*> made;
          refused += bench.leases.try_enter(frame, uses).empty() ? 0 : 1;
          for (unsigned char i = 0; i < operands; ++i) {
            wrong += *read[i] != 100U * program + i ? 1 : 0;
          }
          for (std::size_t i = 0; i < results; ++i) {
            void* const p = bench.leases.try_allocate(bytes, &frame);
            refused += p == nullptr ? 1 : 0;
            made.push_back(p);
          }
          bench.leases.make_swappable(made);
          bench.leases.exit(frame);
          for (void* const p : made) {
            bench.leases.free(p);
          }
        };
        together.arrive_and_wait();
        for (int round = 1; round <= rounds; ++round) {
          operate();
          done[program] = round;
          while (done[1 - program] < round) {
            operate();
          }
        }
        bench.leases.leave_share();
      });
    }
    programs.clear();
    CHECK(wrong == 0);
    CHECK(refused == 0);
  }
}
