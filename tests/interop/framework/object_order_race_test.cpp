// SPDX-License-Identifier: Apache-2.0
#include <spillway/interop/framework/object_order.hpp>

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <thread>
#include <vector>

#include <support/fork.hpp>

using spillway::framework::ObjectOrder;
using spillway::framework::ObjectUse;
using Right = ObjectOrder::Right;

TEST_SUITE("object_order") {
  TEST_CASE("ObjectOrder: uses that only read, or have different objects, run in parallel") {
    ObjectOrder order;
    std::array<int, 3> const objects{};
    Right const reads{order, {{&objects[0], false}, {&objects[1], false}}};
    Right const reads_too{order, {{&objects[1], false}}};
    Right const changes_another{order, {{&objects[2], true}}};
    Right const has_none{order, {}};
  }

  TEST_CASE("ObjectOrder: a use does not wait for one that its own thread has begun") {
    ObjectOrder order;
    int const object = 0;
    Right const outer{order, {{&object, true}}};
    Right const inner{order, {{&object, true}}};
  }

  TEST_CASE("ObjectOrder: a change of an object runs alone, and no thread waits for ever") {
    ObjectOrder order;
    std::array<int, 2> counts{};
    constexpr int rounds = 2000;
    auto const work = [&](std::vector<ObjectUse> const& uses, auto change) {
      for (int i = 0; i < rounds; ++i) {
        Right const right{order, uses};
        change();
      }
    };
    std::atomic<int> seen{0};
    auto const change_both = [&] {
      ++counts[0];
      ++counts[1];
    };
    auto const compare = [&] { seen += counts[0] == counts[1] ? 1 : 0; };
    std::vector<ObjectUse> const both{{&counts[0], true}, {&counts[1], true}};
    std::vector<ObjectUse> const in_reverse{{&counts[1], true}, {&counts[0], true}};
    std::vector<ObjectUse> const for_reading{{&counts[0], false}, {&counts[1], false}};
    std::thread first{[&] { work(both, change_both); }};
    std::thread second{[&] { work(in_reverse, change_both); }};
    std::thread third{[&] { work(for_reading, compare); }};
    for (std::thread* thread : {&first, &second, &third}) {
      thread->join();
    }
    CHECK(counts == std::array<int, 2>{2 * rounds, 2 * rounds});
    CHECK(seen == rounds);
  }

  TEST_CASE("ObjectOrder: a forked child has no rights of other threads") {
    ObjectOrder order;
    int const object = 0;
    std::atomic<bool> is_held{false};
    std::atomic<bool> may_end{false};
    std::thread holder{[&] {
      Right const right{order, {{&object, true}}};
      is_held = true;
      while (!may_end) {
        std::this_thread::yield();
      }
    }};
    while (!is_held) {
      std::this_thread::yield();
    }
    order.before_fork();
    spillway::test::ForkedChild const child{[&] {
      order.after_fork_in_child();
      Right const changes{order, {{&object, true}}};
    }};
    order.after_fork_in_parent();
    CHECK(child.status() == 0);
    may_end = true;
    holder.join();
  }
}
