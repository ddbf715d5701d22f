// SPDX-License-Identifier: Apache-2.0
// The parts of the PyTorch adapter that know nothing of PyTorch, on a simulated device.
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/interop/leased_memory.hpp>
#include <spillway/interop/torch/context_table.hpp>
#include <spillway/interop/torch/private_pools.hpp>
#include <spillway/interop/torch/tensor_stats.hpp>
#include <spillway/interop/torch/tensor_observer.hpp>
#include <spillway/observe/snapshot.hpp>
#include <spillway/sim.hpp>
#include <spillway/swappable_buffer.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

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

using Pools = PrivatePools<int>;

/// Hands out addresses that are numbers, and counts what is out.
struct Numbers {
  std::vector<std::pair<std::size_t, int>> taken;
  std::vector<void*> given_back;
  bool is_empty = false;

  [[nodiscard]] Pools::Source source() {
    return {[this](std::size_t bytes, int stream) -> void* {
              if (is_empty) {
                throw std::bad_alloc{};
              }
              taken.emplace_back(bytes, stream);
              return reinterpret_cast<void*>(taken.size() << 20U);
            },
            [this](void* p) { given_back.push_back(p); }};
  }
};

constexpr PoolId a_pool{0, 1};
constexpr PoolId another{0, 2};
bool always(int /*stream*/) {
  return true;
}

}  // namespace

TEST_SUITE("PyTorch's terms") {
  TEST_CASE("TensorStat: tells what is, was at most, came and went") {
    TensorStat stat;
    stat.add(5);
    stat.add(3);
    stat.subtract(6);

    CHECK(stat == TensorStat{.current = 2, .peak = 8, .allocated = 8, .freed = 6});
    stat.reset_peak();
    stat.reset_accumulated();
    CHECK(stat == TensorStat{.current = 2, .peak = 2, .allocated = 0, .freed = 0});
  }

  TEST_CASE("TensorStat: what is set counts the difference") {
    TensorStat stat;
    stat.set(7);
    stat.set(4);

    CHECK(stat == TensorStat{.current = 4, .peak = 7, .allocated = 7, .freed = 3});
  }

  TEST_CASE("TensorStatArray: 1 MiB is the largest that counts as small") {
    TensorStatArray array;
    array.add(1_MiB, 1);
    array.add(1_MiB + 256, 10);

    CHECK(array.all().current == 11);
    CHECK(array.small().current == 1);
    CHECK(array.large().current == 10);
  }

  TEST_CASE("TensorObserver: what leaves is active no longer, and reserved still") {
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

  TEST_CASE("TensorObserver: active and inactive agree with the allocator after evictions and moves") {
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
    CHECK(now.reserved_bytes.all().current == static_cast<std::int64_t>(truth.reserved_bytes));
  }

  TEST_CASE("TensorObserver: requested bytes are before rounding, allocated ones after") {
    TensorObserver watch;
    watch.on_requested(1000);
    watch.on_requested(2_MiB + 1);
    watch.on_request_freed(1000);

    TensorStats const now = watch.stats(3);
    CHECK(now.requested_bytes.all().current == 2_MiB + 1);
    CHECK(now.allocated_bytes.all().current == 2_MiB + 256);
    CHECK(now.allocated_bytes.small().freed == 1024);
    CHECK(now.allocation.all().allocated == 2);
    CHECK(now.inactive_split.all().current == 3);
  }

  TEST_CASE(
      "TensorObserver: an allocation that fails is a retry, and an error only when it is refused") {
    Program program;
    Buffer const one = program.written(3_MiB);
    auto const lease = program.memory.acquire(one.id(), Access::read, program.stream);

    CHECK_THROWS_AS((void)program.memory.allocate(2_MiB), OutOfDeviceMemory);
    Buffer const next = program.written(256);  // observers are told by the next call that succeeds

    CHECK(program.stats().num_alloc_retries == 1);
    CHECK(program.stats().num_ooms == 0);
    program.memory.observer().on_refused();
    CHECK(program.stats().num_ooms == 1);
  }

  TEST_CASE("TensorObserver: remembers the newest records while it is asked to, for snapshots") {
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
    program.memory.observer().record(false, 0);
    program.memory.observer().forget_history();
    CHECK(program.memory.observer().history().empty());
  }

  TEST_CASE("TensorObserver: a listener hears each record") {
    Program program;
    std::vector<RecordKind> heard;
    program.memory.observer().listen([&](Record const& record) { heard.push_back(record.kind); });

    { Buffer const one = program.written(1_MiB); }

    CHECK(heard ==
          std::vector{RecordKind::allocate, RecordKind::make_resident, RecordKind::deallocate});
  }

  TEST_CASE("ContextTable: remembers the freed for as long as it is told, the oldest first to go") {
    ContextTable<std::string> book;
    book.set_limit(1);
    auto const block = [](std::uint32_t i) { return make_block_id(i, 1); };
    for (std::uint32_t i = 0; i < 3; ++i) {
      book.note(block(i), std::make_shared<std::string>(std::to_string(i)));
    }
    book.on_freed(block(0));
    CHECK(*book.of(block(0)) == "0");

    book.on_freed(block(1));

    CHECK(book.of(block(0)) == nullptr);
    CHECK(*book.of(block(1)) == "1");
    CHECK(*book.of(block(2)) == "2");
    book.set_limit(0);
    CHECK(book.size() == 1);
  }
}

TEST_SUITE("private pools") {
  TEST_CASE(
      "PrivatePools: memory that is freed serves the next of nearly its size on that stream") {
    Numbers numbers;
    Pools pools{numbers.source()};
    pools.retain(a_pool);
    void* const p = pools.allocate(a_pool, 1000, 1, 1);
    CHECK(pools.free(p, false));

    CHECK(pools.allocate(a_pool, 800, 2, 2) != p);  // another stream
    CHECK(pools.allocate(a_pool, 700, 1, 1) != p);  // too small
    CHECK(pools.allocate(a_pool, 800, 1, 1) == p);
    CHECK(numbers.given_back.empty());
  }

  TEST_CASE("PrivatePools: idle memory goes back when nobody uses the pool, live memory when it is "
            "freed") {
    Numbers numbers;
    Pools pools{numbers.source()};
    pools.retain(a_pool);
    pools.retain(a_pool);
    void* const idle = pools.allocate(a_pool, 1000, 1, 1);
    void* const live = pools.allocate(a_pool, 2000, 1, 1);
    (void)pools.free(idle, false);

    pools.release(a_pool);
    CHECK(numbers.given_back.empty());
    pools.release(a_pool);
    CHECK(numbers.given_back == std::vector<void*>{idle});
    CHECK(pools.free(live, false));

    CHECK(numbers.given_back == std::vector<void*>{idle, live});
    CHECK(pools.ids().empty());
    CHECK_THROWS_AS(pools.release(a_pool), ContractViolation);
  }

  TEST_CASE("PrivatePools: what another stream used goes back, and rests in a capture") {
    Numbers numbers;
    Pools pools{numbers.source()};
    pools.retain(a_pool);
    void* const visited = pools.allocate(a_pool, 1000, 1, 1);
    void* const captured = pools.allocate(a_pool, 1000, 1, 1);
    CHECK(pools.note_stream(visited, 2));
    CHECK(pools.note_stream(captured, 2));

    (void)pools.free(visited, false);
    (void)pools.free(captured, true);

    CHECK(numbers.given_back == std::vector<void*>{visited});
    CHECK(pools.allocate(a_pool, 1000, 1, 1) != captured);
    pools.release(a_pool);
    CHECK(numbers.given_back == std::vector<void*>{visited, captured});
  }

  TEST_CASE("PrivatePools: its own stream is no other stream") {
    Numbers numbers;
    Pools pools{numbers.source()};
    pools.retain(a_pool);
    void* const p = pools.allocate(a_pool, 1000, 1, 1);
    (void)pools.note_stream(p, 1);
    (void)pools.free(p, false);

    CHECK(pools.allocate(a_pool, 1000, 1, 1) == p);
  }

  TEST_CASE("PrivatePools: the pool begun last gets the allocations that it admits") {
    Numbers numbers;
    Pools pools{numbers.source()};
    CHECK_FALSE(pools.is_routing());
    pools.begin(a_pool, always);
    pools.begin(another, [](int stream) { return stream == 2; });

    CHECK(pools.route(1) == std::optional{a_pool});
    CHECK(pools.route(2) == std::optional{another});
    pools.end(a_pool);
    CHECK(pools.route(1) == std::nullopt);
    pools.end(another);
    CHECK_FALSE(pools.is_routing());
    CHECK(pools.use_count(another) == 1);
    CHECK_THROWS_AS(pools.end(another), ContractViolation);
  }

  TEST_CASE("PrivatePools: a pool may bring a source of its own") {
    Numbers usual;
    Numbers own;
    Pools pools{usual.source()};
    pools.retain(a_pool, own.source());
    void* const p = pools.allocate(a_pool, 1000, 1, 7);
    (void)pools.free(p, false);
    pools.release(a_pool);

    CHECK(usual.taken.empty());
    CHECK(own.taken == std::vector<std::pair<std::size_t, int>>{{1000, 7}});
    CHECK(own.given_back == std::vector<void*>{p});
  }

  TEST_CASE("PrivatePools: only pools that lend give their idle memory away when it is needed") {
    Numbers numbers;
    Pools pools{numbers.source()};
    for (PoolId const& id : {a_pool, another}) {
      pools.retain(id);
      (void)pools.free(pools.allocate(id, 1000, 1, 1), false);
    }
    pools.set_lends(another, true);

    CHECK(pools.lend() == 1000);
    CHECK(pools.reserved_bytes(a_pool) == 1000);
    CHECK(pools.reserved_bytes(another) == 0);
    CHECK(pools.trim() == 1000);
  }

  TEST_CASE("PrivatePools: a source that has nothing leaves nothing behind") {
    Numbers numbers;
    Pools pools{numbers.source()};
    pools.retain(a_pool);
    numbers.is_empty = true;

    CHECK_THROWS_AS((void)pools.allocate(a_pool, 1000, 1, 1), std::bad_alloc);

    pools.release(a_pool);
    CHECK(pools.ids().empty());
  }

  TEST_CASE("PrivatePools: knows exactly what is live in which pool") {
    Numbers numbers;
    Pools pools{numbers.source()};
    pools.retain(a_pool);
    pools.retain(another);
    void* const p = pools.allocate(a_pool, 1000, 1, 1);
    void* const q = pools.allocate(a_pool, 3000, 1, 1);
    (void)pools.allocate(another, 1000, 1, 1);
    (void)pools.free(q, false);

    CHECK(pools.has_exactly(a_pool, {p}));
    CHECK_FALSE(pools.has_exactly(a_pool, {p, q}));
    CHECK_FALSE(pools.has_exactly(a_pool, {}));
    auto const pieces = pools.pieces(a_pool);
    REQUIRE(pieces.size() == 2);
    CHECK(pieces[0].requested_bytes == 1000);
    CHECK(pieces[1].requested_bytes == 0);
    CHECK_FALSE(pools.free(q, false));
    CHECK_FALSE(pools.note_stream(q, 1));
  }

  TEST_CASE("PrivatePools: serves from an allocator's leased memory, which stays in its place") {
    Program program;
    LeasedMemory<Memory> leased{program.memory};
    PrivatePools<SimStream> pools{
        {[&](std::size_t bytes, SimStream stream) { return leased.allocate(bytes, 256, stream); },
         [&](void* p) { leased.deallocate_sync(p); }}};
    pools.retain(a_pool);
    void* const p = pools.allocate(a_pool, 1_MiB, program.stream, program.stream);

    Buffer const one = program.written(2_MiB);
    Buffer const two = program.written(2_MiB);  // makes the first leave, not the pool's

    CHECK(program.memory.residency(one.id()) != Residency::device);
    CHECK(pools.has_exactly(a_pool, {p}));
    (void)pools.free(p, false);
    CHECK(leased.allocation_count() == 1);
    pools.release(a_pool);
    CHECK(leased.allocation_count() == 0);
  }
}
