// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/interop/leased_memory.hpp>
#include <spillway/interop/torch/private_pools.hpp>
#include <spillway/sim.hpp>
#include <spillway/swappable_buffer.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <new>
#include <optional>
#include <utility>
#include <vector>

using namespace spillway;
using namespace spillway::torch;

namespace {

/// Room for four blocks of 1 MiB on the device and eight on the host.
struct Program {
  using Memory = DeviceAllocator<SimPolicies>;
  using Buffer = SwappableBuffer<Memory>;

  SimApi device{SimOptions{.capacity_bytes = 16_MiB}};
  Memory memory{device, options()};
  SimStream stream = device.create_stream();

  static Memory::Options options() {
    Memory::Options options{.capacity_bytes = 4_MiB};
    options.host.pinned_bytes = 8_MiB;
    return options;
  }
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

TEST_SUITE("private_pools") {
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
    CHECK(pools.record_stream(visited, 2));
    CHECK(pools.record_stream(captured, 2));

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
    (void)pools.record_stream(p, 1);
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
    CHECK_FALSE(pools.record_stream(q, 1));
  }

  TEST_CASE("PrivatePools: serves from an allocator's leased memory, which stays in its place") {
    Program program;
    LeasedMemory<Program::Memory> leased{program.memory};
    PrivatePools<SimStream> pools{
        {[&](std::size_t bytes, SimStream stream) { return leased.allocate(bytes, 256, stream); },
         [&](void* p) { leased.deallocate_sync(p); }}};
    pools.retain(a_pool);
    void* const p = pools.allocate(a_pool, 1_MiB, program.stream, program.stream);

    auto const one = program.written(2_MiB);
    auto const two = program.written(2_MiB);  // makes the first leave, not the pool's

    CHECK(program.memory.residency(one.id()) != Residency::device);
    CHECK(pools.has_exactly(a_pool, {p}));
    (void)pools.free(p, false);
    CHECK(leased.allocation_count() == 1);
    pools.release(a_pool);
    CHECK(leased.allocation_count() == 0);
  }
}
