// SPDX-License-Identifier: Apache-2.0
#include <spillway/pager/monitor.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <mutex>
#include <stop_token>
#include <thread>

namespace {

using Monitor = spillway::detail::Monitor<std::mutex>;
using namespace std::chrono_literals;

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
      CHECK(!monitor.is_waiting(std::this_thread::get_id()));
      CHECK(!monitor.wait_while([] { return false; }));
    }};
    for (bool is_seen = false; !is_seen;) {
      std::this_thread::yield();
      std::lock_guard const guard{monitor};
      is_seen = monitor.is_waiting(other.get_id());
    }
    std::lock_guard const guard{monitor};
    CHECK(monitor.waiting_count() == 1);
    is_blocked = false;
    monitor.notify();
  }

  TEST_CASE("Monitor: waiting for a release gives up the exclusive right meanwhile") {
    Monitor monitor;
    std::lock_guard const guard{monitor};
    Monitor::Exclusive const exclusive{monitor};
    std::jthread const other{[&] {
      std::lock_guard const inner{monitor};
      Monitor::Exclusive const mine{monitor};
      monitor.notify_release();
    }};
    auto const result =
        monitor.wait_for_release(monitor.releases(), Monitor::deadline_in(1h), [] { return true; });
    CHECK(result.has_slept);
    CHECK(result.is_released);
    CHECK(monitor.is_exclusive_taken());
  }

  TEST_CASE(
      "Monitor: a wait for a release ends at once if none can come, otherwise after its time") {
    Monitor monitor;
    std::lock_guard const guard{monitor};
    Monitor::Exclusive const exclusive{monitor};
    auto const none = monitor.wait_for_release(
        monitor.releases(), Monitor::deadline_in(1h), [] { return false; });
    CHECK(!none.has_slept);
    CHECK(!none.is_released);
    auto const late = monitor.wait_for_release(
        monitor.releases(), Monitor::deadline_in(1ms), [] { return true; });
    CHECK(late.has_slept);
    CHECK(!late.is_released);
  }

  TEST_CASE("Monitor: a release that came before the wait ends it at once") {
    Monitor monitor;
    std::lock_guard const guard{monitor};
    Monitor::Exclusive const exclusive{monitor};
    auto const seen = monitor.releases();
    monitor.notify_release();
    auto const result =
        monitor.wait_for_release(seen, Monitor::deadline_in(1h), [] { return true; });
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
    std::lock_guard const guard{monitor};
    Monitor::Exclusive const exclusive{monitor};
    auto const result =
        monitor.wait_for_release(monitor.releases(),
                                 Monitor::deadline_in(std::chrono::milliseconds::max()),
                                 [] { return true; });
    CHECK(result.is_released);
  }
}
