// SPDX-License-Identifier: Apache-2.0
// Calls without memory for their own lists: they leave all blocks unchanged and usable.
#include <spillway/arena/move_batch.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/range.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/host/host_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/pager/block_state.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/schedule/use.hpp>
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
#include <utility>
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

bool has_block_in_transit(Bench const& bench) {
  bool is_in_transit = false;
  bench.allocator.for_each_block([&](BlockId, spillway::detail::BlockRecord const& block) {
    is_in_transit = is_in_transit || block.is_in_transit();
  });
  return is_in_transit;
}

/// Swaps to a file that fails when the test wants it.
struct Filed : support::SteppedOnDemand {
  using file_io = spillway::testing::FaultyFileIo;
};

/// LRU, which has no memory for a block when the test wants it.
struct FailingInsert : spillway::LruEviction {
  void on_insert(BlockId id, std::size_t bytes, spillway::Use use) {
    if (fails != nullptr && std::exchange(*fails, false)) {
      throw std::bad_alloc{};
    }
    spillway::LruEviction::on_insert(id, bytes, use);
  }
  bool* fails = nullptr;
};
struct Inserting : support::SteppedOnDemand {
  using eviction = FailingInsert;
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
          REQUIRE_FALSE(has_block_in_transit(bench));  // since an acquire would wait for its end
          CHECK(bench.buffers[0].residency() == Residency::device);
          (void)bench.buffers[0].acquire(Access::read, bench.stream);
        });
    CHECK(bench.buffers[0].residency() != Residency::device);
  }

  TEST_CASE("DeviceAllocator: a block whose swap-in fails for want of memory stays on the host") {
    Bench bench;
    Buffer& buffer = bench.buffers[0];
    buffer.swap_out();
    bench.device.run_all();
    std::size_t const free_bytes = bench.allocator.stats().free_bytes;
    std::size_t const failures =
        support::call_with_little_memory([&] { buffer.swap_in(); },
                                         [&] {
                                           REQUIRE_FALSE(has_block_in_transit(bench));
                                           CHECK(buffer.residency() == Residency::host);
                                           CHECK(bench.allocator.stats().free_bytes == free_bytes);
                                         });
    CHECK(failures != 0);
    CHECK(bench.allocator.stats().swap_ins.count == 1);
    CHECK(bench.allocator.stats().free_bytes == free_bytes - 64_KiB);
  }

  TEST_CASE("DeviceAllocator: a swap-in for which the policy has no memory is not tried later") {
    spillway::testing::SteppedSimApi device{{.capacity_bytes = 8_MiB}};
    bool fails = false;
    spillway::DeviceAllocator<Inserting>::Options options{.capacity_bytes = 1_MiB};
    options.eviction.emplace().fails = &fails;
    spillway::DeviceAllocator<Inserting> allocator{device, options};
    auto const stream = device.create_stream();
    using OwnBuffer = spillway::SwappableBuffer<spillway::DeviceAllocator<Inserting>>;
    OwnBuffer first{allocator, 64_KiB};
    OwnBuffer second{allocator, 64_KiB};
    for (OwnBuffer* const buffer : {&first, &second}) {
      (void)buffer->acquire(Access::write, stream);
      buffer->swap_out();
    }
    device.run_all();

    fails = true;
    CHECK_THROWS_AS(first.swap_in(), std::bad_alloc);
    OwnBuffer in_its_place{allocator, 64_KiB};
    {
      auto const lease = in_its_place.acquire(Access::write, stream);
      device.fill(lease.data(), 1, 64_KiB, stream);
    }
    second.swap_in();

    device.run_all();
    CHECK(first.residency() == Residency::host);
    CHECK(second.residency() == Residency::device);
    CHECK(allocator.stats().swap_ins.count == 1);
    allocator.retire_stream(stream);
  }

  TEST_CASE("DeviceAllocator: a block without memory for what is noted of it does not exist") {
    Bench bench;
    auto const block_count = [&] {
      std::size_t count = 0;
      bench.allocator.for_each_block(
          [&](BlockId, spillway::detail::BlockRecord const&) { ++count; });
      return count;
    };
    std::vector<BlockId> declared;
    std::size_t failures = 0;
    for (std::size_t const before : {3U, 4U, 5U, 6U, 7U, 8U}) {
      BlockId id{};
      failures += support::call_with_little_memory([&] { id = bench.allocator.declare(4_KiB); },
                                                   [&] { CHECK(block_count() == before); });
      declared.push_back(id);
    }
    CHECK(failures != 0);
    for (BlockId const id : declared) {
      bench.allocator.deallocate(id);
    }
  }

  TEST_CASE("DeviceAllocator: extend_recipe without memory for the change ends the recipe") {
    auto const nothing = [](auto, std::span<void const* const>, void*) {};
    std::size_t more = 0;
    for (bool is_extended = false; !is_extended; ++more) {
      CAPTURE(more);
      REQUIRE(more < 100);
      Bench bench;
      BlockId const made = bench.buffers[0].id();
      bench.allocator.set_recipe(made, {bench.buffers[1].id()}, 1us, nothing);
      auto const leases =
          bench.allocator.acquire_all({{made, Access::read_write, true}}, bench.stream);
      try {
        support::ShortMemory const few{more};
        is_extended = bench.allocator.extend_recipe(
            leases.front(), std::array{bench.buffers[2].id()}, 1us, nothing);
      } catch (std::bad_alloc const&) {
      }
      bench.allocator.for_each_block([&](BlockId, spillway::detail::BlockRecord const& block) {
        CHECK((block.recipe != nullptr) == is_extended);
      });
    }
    CHECK(more > 1);
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

  TEST_CASE("DeviceAllocator: waits for its work, also at its end, without memory for an event") {
    spillway::HostApi device;
    std::array<int, 2> done{};
    spillway::HostStream const stream = device.create_stream();
    {
      std::optional<spillway::DeviceAllocator<spillway::PoliciesFor<spillway::HostApi>>> memory;
      memory.emplace(device, decltype(memory)::value_type::Options{.capacity_bytes = 1_MiB});
      BlockId const id = memory->allocate(4_KiB);
      auto const work = [&](int& flag) {
        auto const lease = memory->acquire(id, Access::write, stream);
        device.launch(stream, [&flag] { flag = 1; });
      };
      work(done[0]);
      {
        support::ShortMemory const is_short{0};
        memory->synchronize();
      }
      CHECK(done[0] == 1);
      work(done[1]);
      memory->deallocate(id);
      support::ShortMemory const is_short{0};
      memory.reset();
    }
    CHECK(done[1] == 1);
    device.destroy_stream(stream);
  }
}
