// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/record.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/interop/torch/tensor_stats.hpp>
#include <spillway/observe/snapshot.hpp>
#include <spillway/sim.hpp>
#include <spillway/swappable_buffer.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

TEST_SUITE("tensor_stats") {
  using namespace spillway;
  using namespace spillway::torch;

  namespace {

  struct WatchedPolicies : SimPolicies {
    using observer = TensorObserver;
  };
  using Memory = DeviceAllocator<WatchedPolicies>;
  using Buffer = SwappableBuffer<Memory>;

  /// Room for four blocks of 1 MiB on the device and eight on the host.
  struct Program {
    SimApi device{SimOptions{.capacity_bytes = 16_MiB}};
    Memory memory{device, options()};
    SimStream stream = device.create_stream();

    Program() { memory.observer().on_reserved(memory.stats().reserved_bytes); }

    static Memory::Options options() {
      Memory::Options options{.capacity_bytes = 4_MiB};
      options.host.pinned_bytes = 8_MiB;
      return options;
    }
    [[nodiscard]] TensorStats stats() { return memory.observer().stats(0); }
    [[nodiscard]] Buffer written(std::size_t bytes) {
      Buffer buffer{memory, bytes};
      (void)buffer.acquire(Access::write, stream);
      return buffer;
    }
  };

  }  // namespace

  TEST_CASE("TensorStat: tracks current, peak, allocated and freed amounts") {
    TensorStat stat;
    stat.add(5);
    stat.add(3);
    stat.subtract(6);

    CHECK(stat == TensorStat{.current = 2, .peak = 8, .allocated = 8, .freed = 6});
    stat.reset_peak();
    stat.reset_accumulated();
    CHECK(stat == TensorStat{.current = 2, .peak = 2, .allocated = 0, .freed = 0});
  }

  TEST_CASE("TensorStat: set() counts the difference") {
    TensorStat stat;
    stat.set(7);
    stat.set(4);

    CHECK(stat == TensorStat{.current = 4, .peak = 7, .allocated = 7, .freed = 3});
  }

  TEST_CASE("TensorStatArray: 1 MiB is the largest size that counts as small") {
    TensorStatArray array;
    array.add(1_MiB, 1);
    array.add(1_MiB + 256, 10);

    CHECK(array.all().current == 11);
    CHECK(array.small().current == 1);
    CHECK(array.large().current == 10);
  }

  TEST_CASE("TensorObserver: an evicted tensor is no longer active, but still reserved") {
    Program program;
    Buffer const one = program.written(2_MiB);
    Buffer const two = program.written(2_MiB);
    CHECK(program.stats().active_bytes.large().current == 4_MiB);
    CHECK(program.stats().inactive_split_bytes.all().current == 0);

    program.memory.swap_out(one.id());

    TensorStats const now = program.stats();
    CHECK(now.active_bytes.all().current == 2_MiB);
    CHECK(now.active.all().current == 1);
    CHECK(now.active_bytes.all().peak == 4_MiB);
    CHECK(now.reserved_bytes.all().current == 4_MiB);
    CHECK(now.inactive_split_bytes.all().current == 2_MiB);
  }

  TEST_CASE(
      "TensorObserver: active and inactive agree with the allocator after evictions and moves") {
    Program program;
    std::vector<Buffer> buffers;
    for (std::size_t i = 1; i <= 9; ++i) {  // more than fits; sizes differ, so that blocks move
      buffers.push_back(program.written(i * 100_KiB));
    }
    for (std::size_t i = 0; i < buffers.size(); i += 2) {
      (void)buffers[i].acquire(Access::read, program.stream);
    }
    buffers.erase(buffers.begin() + 3);

    TensorStats const now = program.stats();
    Stats const truth = program.memory.stats();
    CHECK(truth.swap_outs.count != 0);
    CHECK(now.active_bytes.all().current ==
          static_cast<std::int64_t>(truth.resident.bytes.current));
    CHECK(now.active.all().current == static_cast<std::int64_t>(truth.resident.blocks.current));
    CHECK(now.active.all().peak == static_cast<std::int64_t>(truth.resident.blocks.peak));
    CHECK(now.allocated_bytes == now.active_bytes);  // what is away is not on the device
    CHECK(now.allocation == now.active);
    CHECK(now.reserved_bytes.all().current == static_cast<std::int64_t>(truth.reserved_bytes));
  }

  TEST_CASE("TensorObserver: requested bytes are before rounding, allocated bytes after") {
    TensorObserver watch;
    watch.on_requested(1000);
    watch.on_requested(2_MiB + 1);
    watch.on_request_freed(1000);
    CHECK(watch.stats(3).requested_bytes.all().current == 2_MiB + 1);
    CHECK(watch.stats(3).inactive_split.all().current == 3);

    Program program;
    { Buffer const gone = program.written(1000); }
    Buffer const stays = program.written(2_MiB + 1);
    TensorStats const now = program.stats();
    CHECK(now.allocated_bytes.all().current == 2_MiB + 256);
    CHECK(now.allocated_bytes.small().freed == 1024);
    CHECK(now.allocation.all().allocated == 2);
  }

  TEST_CASE("TensorObserver: a failed allocation counts as a retry, and as out of memory only when "
            "reported") {
    Program program;
    Buffer const one = program.written(3_MiB);
    auto const lease = program.memory.acquire(one.id(), Access::read, program.stream);

    CHECK_THROWS_AS((void)program.memory.allocate(2_MiB), OutOfDeviceMemory);
    Buffer const next = program.written(256);  // observers are told by the next call that succeeds

    CHECK(program.stats().num_alloc_retries == 1);
    CHECK(program.stats().num_ooms == 0);
    program.memory.observer().on_out_of_memory();
    CHECK(program.stats().num_ooms == 1);
  }

  TEST_CASE("TensorObserver: keeps the newest records for snapshots while that is enabled") {
    Program program;
    Buffer const before = program.written(1_MiB);
    CHECK(program.memory.observer().history().empty());

    program.memory.observer().record(true, 100);
    Buffer const during = program.written(1_MiB);
    program.memory.swap_out(during.id());
    auto const records = program.memory.observer().history();
    MemorySnapshot const snapshot = spillway::snapshot(program.memory, records);

    REQUIRE(snapshot.changes.size() == 2);
    CHECK(snapshot.changes[0].kind == MemorySnapshot::Change::Kind::take);
    CHECK(snapshot.changes[1].kind == MemorySnapshot::Change::Kind::leave);
    CHECK(snapshot.changes[1].id == during.id());
    program.memory.observer().record(true, 1);
    Buffer const last = program.written(1_MiB);
    program.memory.swap_out(last.id());
    auto const newest = program.memory.observer().history();
    REQUIRE(newest.size() == 1);
    CHECK(newest[0].kind == RecordKind::swap_out);
    CHECK(newest[0].block == last.id());
    program.memory.observer().record(false, 0);
    program.memory.observer().clear_history();
    CHECK(program.memory.observer().history().empty());
  }

  TEST_CASE("TensorObserver: a listener is told of each record") {
    Program program;
    std::vector<RecordKind> heard;
    program.memory.observer().listen([&](Record const& record) { heard.push_back(record.kind); });

    { Buffer const one = program.written(1_MiB); }

    CHECK(heard ==
          std::vector{RecordKind::allocate, RecordKind::make_resident, RecordKind::deallocate});
  }
}
