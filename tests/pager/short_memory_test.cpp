// SPDX-License-Identifier: Apache-2.0
// Calls without memory for their own lists: they leave all blocks unchanged and usable.
#include <spillway/core/types.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/pager/block_state.hpp>
#include <spillway/sim.hpp>
#include <spillway/swappable_buffer.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <new>
#include <span>

#include <support/counted_allocations.hpp>
#include <support/stepped_policies.hpp>

namespace {

using namespace spillway::literals;
using namespace std::chrono_literals;
using spillway::Access;
using spillway::BlockId;
using spillway::Residency;

using Allocator = spillway::DeviceAllocator<support::SteppedPolicies>;
using Buffer = spillway::SwappableBuffer<Allocator>;

struct Bench {
  Bench() {
    for (Buffer& buffer : buffers) {
      (void)buffer.acquire(Access::write, stream);
    }
  }
  ~Bench() { allocator.retire_stream(stream); }
  Bench(Bench const&) = delete;
  Bench& operator=(Bench const&) = delete;

  /// Repeats a call, each time with memory for one more allocation, until it succeeds. After each
  /// failed call, `check()` examines the state.
  template <class Call, class Check>
  void call_with_little_memory(Call call, Check check) {
    bool has_succeeded = false;
    for (std::size_t more = 0; !has_succeeded; ++more) {
      CAPTURE(more);
      REQUIRE(more < 100);
      try {
        support::ShortMemory const few{more};
        call();
        has_succeeded = true;
      } catch (std::bad_alloc const&) {
      }
      if (!has_succeeded) {
        check();
      }
    }
  }

  spillway::testing::SteppedSimApi device{{.capacity_bytes = 8_MiB}};
  spillway::testing::SteppedSimApi::stream_type stream = device.create_stream();
  Allocator allocator{device, {.capacity_bytes = 1_MiB}};
  std::array<Buffer, 3> buffers{
      Buffer{allocator, 64_KiB}, Buffer{allocator, 64_KiB}, Buffer{allocator, 64_KiB}};
};

}  // namespace

TEST_SUITE("short_memory") {
  TEST_CASE("DeviceAllocator: a block whose swap-out fails for want of memory stays resident") {
    Bench bench;
    bench.call_with_little_memory(
        [&] { bench.buffers[0].swap_out(); },
        [&] {
          bool is_in_transit = false;
          bench.allocator.for_each_block([&](BlockId, spillway::detail::BlockRecord const& block) {
            is_in_transit = is_in_transit || block.is_in_transit();
          });
          REQUIRE_FALSE(is_in_transit);  // since an acquire would wait for its end
          CHECK(bench.buffers[0].residency() == Residency::device);
          (void)bench.buffers[0].acquire(Access::read, bench.stream);
        });
    CHECK(bench.buffers[0].residency() != Residency::device);
  }

  TEST_CASE("DeviceAllocator: set_recipe without memory for the recipe leaves nothing behind") {
    Bench bench;
    std::array<BlockId, 2> const operands{bench.buffers[1].id(), bench.buffers[2].id()};
    bench.call_with_little_memory(
        [&] {
          bench.allocator.set_recipe(bench.buffers[0].id(),
                                     operands,
                                     1us,
                                     [](auto, std::span<void const* const>, void*) {});
        },
        [&] {
          bench.allocator.for_each_block([](BlockId, spillway::detail::BlockRecord const& block) {
            CHECK(block.recipe == nullptr);
          });
        });
  }
}
