// SPDX-License-Identifier: Apache-2.0
#include <spillway/pager/monitor.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <latch>
#include <mutex>
#include <stop_token>
#include <thread>
#include <tuple>
#include <vector>

namespace {

using Monitor = spillway::detail::Monitor<std::mutex>;
using namespace std::chrono_literals;

/// Runs `work` on a thread of its own, which holds the lock instead of the caller.
template <class Work>
void run(std::unique_lock<Monitor>& guard, Work work) {
  guard.unlock();
  std::thread{[&] {
    std::lock_guard const inner{*guard.mutex()};
    work();
  }}.join();
  guard.lock();
}

}  // namespace

TEST_SUITE("monitor") {
  TEST_CASE("Monitor: one thread has the exclusive right, and the next gets it afterwards") {
    Monitor monitor;
    bool has_begun = false;
    bool is_done = false;
    std::unique_lock guard{monitor};
    std::jthread other;
    {
      Monitor::Exclusive const exclusive{monitor};
      CHECK(monitor.is_exclusive_taken());
      other = std::jthread{[&] {
        std::lock_guard const inner{monitor};
        has_begun = true;
        monitor.notify();
        Monitor::Exclusive const mine{monitor};
        is_done = true;
        monitor.notify();
      }};
      CHECK(monitor.wait_while([&] { return !has_begun; }));
      CHECK_FALSE(is_done);
    }
    CHECK(monitor.wait_while([&] { return !is_done; }));
    guard.unlock();
    other.join();
    std::lock_guard const last{monitor};
    CHECK(!monitor.is_exclusive_taken());
  }

  TEST_CASE("Monitor: a thread counts as waiting exactly while it is blocked") {
    Monitor monitor;
    bool is_blocked = true;
    std::jthread const other{[&] {
      std::lock_guard const guard{monitor};
      CHECK(monitor.wait_while([&] { return is_blocked; }));
      CHECK(monitor.waiting_count() == 0);
      CHECK(!monitor.wait_while([] { return false; }));
    }};
    for (bool is_seen = false; !is_seen;) {
      std::this_thread::yield();
      std::lock_guard const guard{monitor};
      is_seen = monitor.waiting_count() == 1;
    }
    std::lock_guard const guard{monitor};
    is_blocked = false;
    monitor.notify();
  }

  TEST_CASE("Monitor: waiting for a release gives up the exclusive right meanwhile") {
    Monitor monitor;
    std::unique_lock guard{monitor};
    Monitor::ThreadIndex lease{};
    run(guard, [&] { lease = monitor.begin_leases(1); });
    Monitor::Exclusive const exclusive{monitor};
    std::jthread const other{[&] {
      std::lock_guard const inner{monitor};
      Monitor::Exclusive const mine{monitor};
      monitor.end_lease(lease);
    }};
    auto const result = monitor.wait_for_release(monitor.releases(), Monitor::deadline_in(1h));
    CHECK(result.has_slept);
    CHECK(result.is_released);
    CHECK(monitor.is_exclusive_taken());
  }

  TEST_CASE("Monitor: a wait for a release ends at once if no other thread holds leases") {
    Monitor monitor;
    std::lock_guard const guard{monitor};
    Monitor::Exclusive const exclusive{monitor};
    auto const mine = monitor.begin_leases(3);
    auto const result = monitor.wait_for_release(monitor.releases(), Monitor::deadline_in(1h));
    CHECK(!result.has_slept);
    CHECK(!result.is_released);
    for (int i = 0; i < 3; ++i) {
      monitor.end_lease(mine);
    }
  }

  TEST_CASE("Monitor: a wait for a release ends after its time while others hold leases") {
    Monitor monitor;
    std::unique_lock guard{monitor};
    run(guard, [&] { std::ignore = monitor.begin_leases(1); });
    Monitor::Exclusive const exclusive{monitor};
    auto const result = monitor.wait_for_release(monitor.releases(), Monitor::deadline_in(1ms));
    CHECK(result.has_slept);
    CHECK(!result.is_released);
  }

  TEST_CASE("Monitor: more threads than it can tell apart count as running") {
    constexpr std::ptrdiff_t many = 100;
    Monitor monitor;
    std::vector<Monitor::ThreadIndex> leases;
    std::latch all_hold{many};
    std::latch is_over{1};
    std::vector<std::jthread> others;
    for (std::ptrdiff_t i = 0; i < many; ++i) {
      others.emplace_back([&] {
        {
          std::lock_guard const guard{monitor};
          leases.push_back(monitor.begin_leases(1));
        }
        all_hold.count_down();
        is_over.wait();
      });
    }
    all_hold.wait();
    std::lock_guard const guard{monitor};
    Monitor::Exclusive const exclusive{monitor};
    auto const wait = [&] {
      return monitor.wait_for_release(monitor.releases(), Monitor::deadline_in(1ms));
    };
    auto const mine = monitor.begin_leases(1);
    for (auto const lease : leases) {
      monitor.end_lease(lease);
    }
    CHECK(wait().has_slept);
    monitor.end_lease(mine);
    auto const again = monitor.begin_leases(1);  // the caller can be told apart now
    CHECK(!wait().has_slept);
    monitor.end_lease(again);
    is_over.count_down();
  }

  TEST_CASE("Monitor: a release that came before the wait ends it at once") {
    Monitor monitor;
    std::unique_lock guard{monitor};
    run(guard, [&] { std::ignore = monitor.begin_leases(1); });
    Monitor::Exclusive const exclusive{monitor};
    auto const seen = monitor.releases();
    monitor.notify_release();
    auto const result = monitor.wait_for_release(seen, Monitor::deadline_in(1h));
    CHECK(!result.has_slept);
    CHECK(result.is_released);
  }

  TEST_CASE("Monitor: a wait for a release may have no time limit") {
    Monitor monitor;
    std::jthread const other{[&](std::stop_token const& is_over) {
      while (!is_over.stop_requested()) {
        {
          std::lock_guard const inner{monitor};
          monitor.notify_release();
        }
        std::this_thread::yield();
      }
    }};
    std::unique_lock guard{monitor};
    run(guard, [&] { std::ignore = monitor.begin_leases(1); });
    Monitor::Exclusive const exclusive{monitor};
    auto const result = monitor.wait_for_release(
        monitor.releases(), Monitor::deadline_in(std::chrono::milliseconds::max()));
    CHECK(result.is_released);
  }
}
