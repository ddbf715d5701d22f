// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/host/staging.hpp>
#include <spillway/stream/stream_order.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <thread>
#include <vector>

using namespace spillway;
using namespace spillway::detail;

using Lane = StagingLane<SimApi>;

namespace {

/// A device whose next `refusals` waits fail.
struct RefusingApi : SimApi {
  using SimApi::BasicSimApi;
  using SimApi::synchronize;

  int refusals = 0;

  void synchronize(stream_type stream) {
    if (refusals > 0) {
      --refusals;
      throw DeviceError{"synchronize failed, as it was told to"};
    }
    SimApi::synchronize(stream);
  }
};

}  // namespace

TEST_SUITE("staging") {
  TEST_CASE("StagingLane: chunks are aligned, disjoint and large enough") {
    SimApi device;
    StreamOrder<SimApi> order{device};
    Lane lane{device, order, 3, 5000, -1};
    Lane::Chunk const a{lane};
    Lane::Chunk const b{lane};
    Lane::Chunk const c{lane};

    for (Lane::Chunk const* chunk : {&a, &b, &c}) {
      CHECK(reinterpret_cast<std::uintptr_t>(chunk->data()) % Lane::alignment_bytes == 0);
    }
    CHECK(Lane::chunk_bytes_for(5000) == 8192);
    CHECK(b.data() == a.data() + 8192);
    CHECK(c.data() == b.data() + 8192);
    CHECK(device.usage().pinned_bytes >= 3 * 8192);
  }

  TEST_CASE("StagingLane: the chunk released longest ago comes next, with its fence") {
    SimApi device;
    StreamOrder<SimApi> order{device};
    Lane lane{device, order, 2, 4096, -1};
    Ticket const use = order.mark(lane.index());
    std::byte* first = nullptr;
    {
      Lane::Chunk chunk{lane};
      CHECK(chunk.fence().is_empty());
      first = chunk.data();
      chunk.fence() = use;
    }
    {
      Lane::Chunk chunk{lane};
      CHECK(chunk.data() != first);
      CHECK(chunk.fence().is_empty());
    }
    Lane::Chunk chunk{lane};
    CHECK(chunk.data() == first);
    CHECK(chunk.fence() == Fence{use});
  }

  TEST_CASE("StagingLane: if every chunk is held, the caller waits, and the wait is counted") {
    SimApi device;
    StreamOrder<SimApi> order{device};
    Lane lane{device, order, 1, 4096, -1};
    std::optional<Lane::Chunk> held;
    held.emplace(lane);
    std::byte* const data = held->data();
    std::byte* seen = nullptr;

    std::thread other{[&] { seen = Lane::Chunk{lane}.data(); }};
    while (lane.waits() == 0) {
      std::this_thread::yield();
    }
    held.reset();
    other.join();

    CHECK(seen == data);
    CHECK(lane.waits() == 1);
  }

  TEST_CASE("StagingLane: without room for its chunks a lane is empty and leaves nothing behind") {
    SimOptions options;
    options.pinned_capacity_bytes = 8192;
    SimApi device{options};
    StreamOrder<SimApi> order{device};
    SimUsage const before = device.usage();

    CHECK_THROWS_AS((Lane{device, order, 2, 4096, -1}), OutOfHostMemory);
    CHECK(device.usage() == before);
  }

  TEST_CASE("SyncCopier: bytes larger than a chunk go to the device and come back") {
    SimApi device;
    auto const stream = device.create_stream();
    std::size_t const bytes = 2 * SyncCopier<SimApi>::chunk_bytes + 1000;
    void* const memory = device.try_reserve(bytes);
    std::vector<std::byte> from(bytes);
    std::vector<std::byte> to(bytes);
    for (std::size_t i = 0; i < bytes; ++i) {
      from[i] = static_cast<std::byte>((i * 31 + i / 997) & 0xFF);
    }
    {
      SyncCopier<SimApi> copier{device};
      copier.copy_from_host_sync(memory, from.data(), bytes, stream);
      copier.copy_to_host_sync(to.data(), memory, bytes, stream);

      CHECK(to == from);
      CHECK(device.calls().pinned_allocations == 1);
      CHECK(device.calls().copies_to_device == 3);
      CHECK(device.usage().pinned_bytes == SyncCopier<SimApi>::chunk_bytes);
    }
    CHECK(device.usage().pinned_bytes == 0);
    device.release(memory, bytes);
  }

  TEST_CASE("SyncCopier: a failed copy keeps its chunk; without pinned memory copies fail") {
    SimOptions options;
    options.pinned_capacity_bytes = SyncCopier<SimApi>::chunk_bytes;
    SimApi device{options};
    auto const stream = device.create_stream();
    void* const memory = device.try_reserve(1000);
    std::vector<std::byte> bytes(1000);
    SyncCopier<SimApi> copier{device};
    void* const taken = device.try_allocate_pinned(1000, -1);
    CHECK_THROWS_WITH_AS(copier.copy_from_host_sync(memory, bytes.data(), 1000, stream),
                         doctest::Contains("out of pinned host memory: requested 4194304 bytes"),
                         OutOfHostMemory);
    device.free_pinned(taken, 1000);

    device.fail_copy(1);
    CHECK_THROWS_AS(copier.copy_from_host_sync(memory, bytes.data(), 1000, stream), DeviceError);
    copier.copy_from_host_sync(memory, bytes.data(), 1000, stream);
    copier.copy_to_host_sync(bytes.data(), memory, 1000, stream);

    CHECK(device.usage().pinned_bytes == SyncCopier<SimApi>::chunk_bytes);
    device.release(memory, 1000);
  }

  TEST_CASE("SyncCopier: a chunk that the device may still write is not reused") {
    RefusingApi device;
    auto const stream = device.create_stream();
    auto const other = device.create_stream();
    constexpr std::size_t bytes = 1 << 20;
    auto* const from = static_cast<std::byte*>(device.try_reserve(bytes));
    auto* const to = static_cast<std::byte*>(device.try_reserve(bytes));
    {
      SyncCopier<RefusingApi> copier{device};
      std::vector<std::byte> out(bytes);
      std::vector<std::byte> const in(bytes, std::byte{7});
      std::atomic<bool> may_go_on{false};
      auto const wait = [&may_go_on] {
        while (!may_go_on) {
          std::this_thread::yield();
        }
      };
      device.fill(from, 1, bytes, stream);
      device.launch(stream, wait);
      std::size_t const pinned_bytes = device.usage().pinned_bytes;
      SUBCASE("the wait fails twice") {
        device.refusals = 2;
        CHECK_THROWS_AS(copier.copy_to_host_sync(out.data(), from, bytes, stream), DeviceError);
        copier.copy_from_host_sync(to, in.data(), bytes, other);
        CHECK(device.usage().pinned_bytes - pinned_bytes ==
              2 * SyncCopier<RefusingApi>::chunk_bytes);
        may_go_on = true;
      }
      SUBCASE("the wait fails once") {
        device.refusals = 1;
        may_go_on = true;
        CHECK_THROWS_AS(copier.copy_to_host_sync(out.data(), from, bytes, stream), DeviceError);
        copier.copy_from_host_sync(to, in.data(), bytes, other);
        CHECK(device.usage().pinned_bytes - pinned_bytes == SyncCopier<RefusingApi>::chunk_bytes);
      }
      device.synchronize(stream);
      copier.copy_to_host_sync(out.data(), to, bytes, other);
      CHECK(out == in);
    }
    device.release(from, bytes);
    device.release(to, bytes);
    device.destroy_stream(stream);
    device.destroy_stream(other);
  }
}
