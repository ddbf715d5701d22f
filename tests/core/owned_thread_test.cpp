// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/owned_thread.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <support/fork.hpp>

namespace {

using spillway::detail::OwnedThread;
using spillway::test::ForkedChild;

/// An owner whose thread sleeps until it has to end.
struct Owner {
  void start() {
    worker.start([this] {
      std::unique_lock lock{mutex};
      is_asleep = true;
      worker.changed().notify_all();
      worker.changed().wait(lock, [this] { return worker.is_ending(); });
      has_ended = true;
    });
    std::unique_lock lock{mutex};
    worker.changed().wait(lock, [this] { return is_asleep; });
  }

  std::mutex mutex;
  bool is_asleep = false;
  bool has_ended = false;
  OwnedThread worker;
};

}  // namespace

TEST_SUITE("core") {
  TEST_CASE("OwnedThread: end wakes the thread and waits until it has ended") {
    Owner owner;
    owner.start();
    CHECK_FALSE(owner.worker.is_ending());
    owner.worker.end(owner.mutex);
    CHECK(owner.has_ended);
  }

  TEST_CASE("OwnedThread: end without a thread wakes the calls that sleep") {
    Owner owner;
    std::thread call{[&] {
      std::unique_lock lock{owner.mutex};
      owner.worker.changed().wait(lock, [&] { return owner.worker.is_ending(); });
    }};
    owner.worker.end(owner.mutex);
    call.join();
    CHECK(owner.worker.is_ending());
  }

  TEST_CASE("OwnedThread: a forked child forgets the thread, and keeps its own threads") {
    std::optional<Owner> owner{std::in_place};
    owner->start();
    ForkedChild const child{[&] {
      std::atomic<bool> may_end = false;
      std::thread own{[&] { may_end.wait(false); }};  // may have the handle of the owner's thread
      owner->worker.end(owner->mutex);
      owner.reset();
      may_end = true;
      may_end.notify_all();
      own.join();
    }};
    CHECK(child.status() == 0);
    owner->worker.end(owner->mutex);
    CHECK(owner->has_ended);
  }

  TEST_CASE("OwnedThread: a forked child can end it while a thread of the parent has the lock") {
    Owner owner;
    owner.start();
    {
      std::scoped_lock const lock{owner.mutex};
      ForkedChild const child{[&] { owner.worker.end(owner.mutex); }};
      CHECK(child.status() == 0);
    }
    owner.worker.end(owner.mutex);
  }
}
