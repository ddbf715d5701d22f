// SPDX-License-Identifier: Apache-2.0
#include <spillway/interop/framework/fork_handlers.hpp>

#include <doctest/doctest.h>

#include <optional>
#include <stop_token>
#include <thread>
#include <vector>

#include <support/buffer_leases_bench.hpp>
#include <support/fork.hpp>

using namespace spillway;
using spillway::test::LeasesBench;
using Bytes = std::vector<unsigned char>;

namespace {

std::optional<LeasesBench> installed;

struct Site {
  static auto* leases_if_any() { return installed ? &installed->leases : nullptr; }
  static LeasesBench::Frame const* frame_of_thread() { return nullptr; }
};

/// Stands for an interpreter's own handlers, which run immediately before and after `fork`.
void collect_garbage() {
  if (installed) {
    (void)installed->leases.free(installed->make(4_KiB, 9));
  }
}

/// @returns the status of a child that ran `work` and returned its result
template <class Work>
int status_of_child(Work work) {
  collect_garbage();
  spillway::test::ForkedChild const child{[&] {
    collect_garbage();
    return work();
  }};
  collect_garbage();
  return child.status();
}

}  // namespace

TEST_SUITE("fork_handlers") {
  TEST_CASE("ForkHandlers: a child can read buffers that were away, whatever other threads did") {
    framework::ForkHandlers<Site>::install();
    CHECK(status_of_child([] { return true; }) == 0);  // there are no leases yet

    LeasesBench& bench = installed.emplace(256_KiB);
    auto* const a = bench.make(64_KiB, 1);
    auto* const b = bench.make(64_KiB, 2);
    auto* const c = bench.make(64_KiB, 3);
    auto* const d = bench.make(128_KiB, 4);
    {
      std::jthread const others{[&](std::stop_token const& stop) {
        while (spillway::test::children_may_allocate && !stop.stop_requested()) {
          (void)bench.read({b, c});
          (void)bench.read({d});
        }
      }};
      for (int i = 0; i < 20; ++i) {
        CHECK(status_of_child([&] { return bench.read({a, b}) == Bytes{1, 2}; }) == 0);
      }
    }
    CHECK(bench.read({a, b, c}) == Bytes{1, 2, 3});
    installed.reset();
    CHECK(status_of_child([] { return true; }) == 0);
  }
}
