// SPDX-License-Identifier: Apache-2.0
// Calls without memory for their own lists: they leave all blocks unchanged and usable.
#include <spillway/arena/move_batch.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/host/host_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/pager/block_state.hpp>
#include <spillway/sim.hpp>
#include <spillway/swappable_buffer.hpp>
#include <spillway/testing/faulty_file_io.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <vector>

#include <support/counted_allocations.hpp>
#include <support/little_memory.hpp>
#include <support/stepped_policies.hpp>
#include <support/temporary_folder.hpp>

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

  spillway::testing::SteppedSimApi device{{.capacity_bytes = 8_MiB}};
  spillway::testing::SteppedSimApi::stream_type stream = device.create_stream();
  Allocator allocator{device, {.capacity_bytes = 1_MiB}};
  std::array<Buffer, 3> buffers{
      Buffer{allocator, 64_KiB}, Buffer{allocator, 64_KiB}, Buffer{allocator, 64_KiB}};
};

/// Swaps to a file that fails when the test wants it.
struct Filed : support::SteppedOnDemand {
  using file_io = spillway::testing::FaultyFileIo;
};

/// Has no memory for its queue from the second copy on, and nor has the rest of the program once
/// it has refused as many copies as a move can be refused.
struct ShortDevice : spillway::HostApi {
  void copy(void* to,
            void const* from,
            std::size_t bytes,
            spillway::CopyKind /*kind*/,
            spillway::HostStream /*stream*/) {
    if (++copies == 1) {
      std::copy_n(static_cast<std::byte const*>(from), bytes, static_cast<std::byte*>(to));
      return;
    }
    if (copies == 2 + spillway::detail::MoveCopies::most_refusals) {
      shortage.emplace(0);
    }
    throw std::bad_alloc{};
  }

  std::size_t copies = 0;
  std::optional<support::ShortMemory> shortage;
};

}  // namespace

TEST_SUITE("short_memory") {
  TEST_CASE("DeviceAllocator: a block whose swap-out fails for want of memory stays resident") {
    Bench bench;
    support::call_with_little_memory(
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
    support::call_with_little_memory(
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

  TEST_CASE("enqueue_moves: a torn block is reported as lost if there is no memory to say why") {
    std::vector<std::byte> memory(4096);
    spillway::Move move;
    move.bytes = 1000;
    move.from = memory.data() + 1000;
    move.to = move.from - 100;
    ShortDevice device;
    std::size_t done = 0;
    bool is_lost = false;
    try {
      spillway::enqueue_moves(device,
                              std::span{&move, 1},
                              spillway::HostStream::caller,
                              {},
                              done,
                              [](std::size_t /*move*/) {});
    } catch (spillway::BlockLost const&) {
      is_lost = true;
    } catch (std::bad_alloc const&) {  // would mean that the block is where it was
    }
    device.shortage.reset();
    CHECK(device.copies == 2 + spillway::detail::MoveCopies::most_refusals);
    CHECK(is_lost);
  }

  TEST_CASE("DeviceAllocator: a loss is not taken for reported without memory for the error") {
    for (bool const is_acquired : {false, true}) {
      CAPTURE(is_acquired);
      TemporaryFolder const folder;
      spillway::testing::FaultyFileIo io;
      spillway::testing::SteppedSimApi device{{.capacity_bytes = 8_MiB}};
      spillway::DeviceAllocator<Filed>::Options options{.capacity_bytes = 1_MiB};
      options.file_io = io;
      options.host.file_bytes = 1_MiB;
      options.host.file = folder.path().string();
      spillway::DeviceAllocator<Filed> allocator{device, options};
      auto const stream = device.create_stream();
      spillway::SwappableBuffer<spillway::DeviceAllocator<Filed>> buffer{allocator, 64_KiB};
      (void)buffer.acquire(Access::write, stream);
      buffer.swap_out();
      device.run_all();
      spillway::testing::FaultyFileIo::Faults faults;
      faults.failing_to = UINT64_MAX;
      faults.read_error = EIO;
      io.plant(faults);
      buffer.swap_in();
      device.run_all();
      if (is_acquired) {
        support::ShortMemory const none{0};
        CHECK_THROWS_AS((void)buffer.acquire(Access::read, stream), std::bad_alloc);
      }
      buffer.reset();
      {
        support::ShortMemory const none{0};
        CHECK_THROWS_AS(allocator.begin_step(), std::bad_alloc);
      }
      CHECK_THROWS_AS(allocator.begin_step(), spillway::FileTierError);
      allocator.begin_step();
      allocator.retire_stream(stream);
    }
  }
}
