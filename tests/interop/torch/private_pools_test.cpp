// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/core/fence.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/interop/torch/private_pools.hpp>
#include <spillway/sim.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include <support/stepped_bench.hpp>
#include <support/stepped_policies.hpp>

TEST_SUITE("private_pools") {
  using namespace spillway;
  using namespace spillway::torch;

  namespace {

  /// Room for four blocks of 1 MiB on the device and eight on the host, and three streams.
  struct Program : support::SteppedBench<support::SteppedPolicies> {
    using Stream = Device::stream_type;

    std::map<void*, Allocator::lease_type> leased;
    PrivatePools<Allocator> pools{allocator,
                                  {[this](std::size_t bytes, Stream on) {
                                     auto lease = allocator.acquire(
                                         allocator.allocate(bytes), Access::write, on);
                                     void* const p = lease.data();
                                     leased.emplace(p, std::move(lease));
                                     return p;
                                   },
                                   [this](void* p) {
                                     BlockId const block = leased.at(p).block();
                                     leased.erase(p);
                                     allocator.abandon(block);
                                   }}};

    Program() : SteppedBench{{.capacity_bytes = 16_MiB}, options(), 3} {}

    static Allocator::Options options() {
      Allocator::Options options{.capacity_bytes = 4_MiB};
      options.bounce_bytes = 0;
      options.host.pinned_bytes = 8_MiB;
      return options;
    }
    [[nodiscard]] Buffer written(std::size_t bytes) {
      Buffer buffer{allocator, bytes};
      write(buffer, 1);
      return buffer;
    }
    /// Throws if the work is not ordered after other work on the same bytes.
    void fill(void* p, Stream on) { device.fill(p, 1, 4_MiB, on); }
    /// Code outside of any pool takes all memory, on the first stream.
    void fill_a_block() {
      Buffer buffer{allocator, 4_MiB};
      auto const lease = buffer.acquire(Access::write, stream());
      fill(lease.data(), stream());
    }
  };

  /// A stream order in which streams are numbers. Notes which stream waited for which.
  struct Order {
    using stream_type = int;

    std::vector<std::pair<int, Fence>> waits;
    std::vector<int> waits_for_all;
    int captured = 0;  // the stream that nobody can wait for
    int refused = 0;   // the stream that cannot be marked
    std::uint64_t marks = 0;
    std::function<void()> on_call = [] {};

    [[nodiscard]] Fence mark(int stream) {
      expects(stream != refused, "refused");
      on_call();
      return Ticket{static_cast<StreamIndex>(stream), ++marks};
    }
    void order_after(int stream, Fence const& fence) {
      on_call();
      for (Ticket const ticket : fence.tickets()) {
        expects(ticket.is_none() || ticket.stream() != static_cast<StreamIndex>(captured),
                "captured");
      }
      if (!fence.is_empty()) {
        waits.emplace_back(stream, fence);
      }
    }
    void order_after_all(int stream) {
      expects(captured == 0, "captured");
      waits_for_all.push_back(stream);
    }
  };

  using Pools = PrivatePools<Order>;

  /// Allocates numbers as addresses, and counts those in use.
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

  struct NumberedPools {
    Order order;
    Numbers numbers;
    Pools pools{order, numbers.source()};
  };

  struct RetainedPool : NumberedPools {
    RetainedPool() { pools.retain(a_pool); }
  };

  bool always(int /*stream*/) {
    return true;
  }

  }  // namespace

  TEST_CASE_FIXTURE(
      RetainedPool,
      "PrivatePools: freed memory serves the next request of nearly its size on that stream") {
    void* const p = pools.allocate(a_pool, 1000, 1, 1);
    CHECK(pools.free(p));

    CHECK(pools.allocate(a_pool, 800, 2, 2) != p);  // another stream
    CHECK(pools.allocate(a_pool, 700, 1, 1) != p);  // too small
    CHECK(pools.allocate(a_pool, 800, 1, 1) == p);
    CHECK(numbers.given_back.empty());
  }

  TEST_CASE_FIXTURE(RetainedPool,
                    "PrivatePools: idle memory is released when nobody uses the pool, live memory "
                    "when it is freed") {
    pools.retain(a_pool);
    void* const idle = pools.allocate(a_pool, 1000, 1, 1);
    void* const live = pools.allocate(a_pool, 2000, 1, 1);
    (void)pools.free(idle);

    pools.release(a_pool);
    CHECK(numbers.given_back.empty());
    pools.release(a_pool);
    CHECK(numbers.given_back == std::vector<void*>{idle});
    CHECK(pools.free(live));

    CHECK(numbers.given_back == std::vector<void*>{idle, live});
    CHECK(pools.ids().empty());
    CHECK_THROWS_AS(pools.release(a_pool), ContractViolation);
  }

  TEST_CASE_FIXTURE(
      RetainedPool,
      "PrivatePools: memory that another stream used is reused after that stream's work") {
    void* const p = pools.allocate(a_pool, 1000, 1, 1);
    CHECK(pools.record_stream(p, 2));
    CHECK(pools.record_stream(p, 2));
    std::uint64_t const before = order.marks;
    (void)pools.free(p);
    CHECK(order.waits.empty());

    CHECK(pools.allocate(a_pool, 1000, 1, 1) == p);

    // All work enqueued until the memory was freed, not only until `record_stream`.
    CHECK(order.waits == std::vector{std::pair{1, Fence{Ticket{StreamIndex{2}, before + 1}}}});
    (void)pools.free(p);
    CHECK(pools.allocate(a_pool, 1000, 1, 1) == p);
    CHECK(order.waits.size() == 1);
  }

  TEST_CASE_FIXTURE(RetainedPool,
                    "PrivatePools: a capture gets no memory that another stream used") {
    void* const visited = pools.allocate(a_pool, 1000, 1, 9);  // 1 is captured, 9 is not
    void* const idle = pools.allocate(a_pool, 2000, 1, 9);
    CHECK(pools.record_stream(visited, 2));
    (void)pools.free(visited);
    (void)pools.free(idle);

    CHECK(pools.allocate(a_pool, 1000, 1, 9) != visited);
    CHECK(pools.allocate(a_pool, 2000, 1, 9) == idle);
    CHECK(order.waits.empty());
  }

  TEST_CASE_FIXTURE(RetainedPool,
                    "PrivatePools: memory is released after the streams that used it, a graph's "
                    "memory after all") {
    void* const visited = pools.allocate(a_pool, 1000, 1, 1);
    void* const captured = pools.allocate(a_pool, 2000, 2, 9);
    void* const live = pools.allocate(a_pool, 3000, 2, 9);
    CHECK(pools.record_stream(visited, 3));
    (void)pools.free(visited);
    (void)pools.free(captured);
    CHECK(numbers.given_back.empty());

    pools.release(a_pool);

    CHECK(numbers.given_back == std::vector{visited, captured});
    REQUIRE(order.waits.size() == 1);
    CHECK(order.waits[0].first == 1);
    CHECK(order.waits[0].second.tickets()[0].stream() == StreamIndex{3});
    CHECK(order.waits_for_all == std::vector{9});
    (void)pools.free(live);
    CHECK(order.waits_for_all == std::vector{9, 9});
    CHECK(numbers.given_back.back() == live);
  }

  TEST_CASE_FIXTURE(
      RetainedPool,
      "PrivatePools: memory that cannot be ordered during a capture is released after it") {
    pools.retain(another);
    void* const p = pools.allocate(a_pool, 1000, 1, 1);
    void* const q = pools.allocate(another, 1000, 1, 1);
    CHECK(pools.record_stream(p, 2));
    (void)pools.free(p);
    (void)pools.free(q);
    order.captured = 2;

    pools.release(a_pool);
    CHECK(numbers.given_back.empty());
    CHECK(pools.returns().waiting_count() == 1);
    pools.release(another);
    CHECK(numbers.given_back == std::vector{q});
    order.captured = 0;
    pools.returns().retry();

    CHECK(numbers.given_back == std::vector{q, p});
    CHECK(pools.returns().waiting_count() == 0);
  }

  TEST_CASE_FIXTURE(RetainedPool, "PrivatePools: if ordering fails, the memory stays idle") {
    void* const p = pools.allocate(a_pool, 1000, 1, 1);
    CHECK(pools.record_stream(p, 2));
    (void)pools.free(p);
    order.captured = 2;

    CHECK_THROWS_AS((void)pools.allocate(a_pool, 1000, 1, 1), ContractViolation);

    order.captured = 0;
    CHECK(pools.allocate(a_pool, 1000, 1, 1) == p);
    CHECK(order.waits.size() == 1);
  }

  TEST_CASE_FIXTURE(RetainedPool,
                    "PrivatePools: a use on the pool's own stream needs no ordering") {
    void* const p = pools.allocate(a_pool, 1000, 1, 1);
    (void)pools.record_stream(p, 1);
    (void)pools.free(p);

    CHECK(pools.allocate(a_pool, 1000, 1, 1) == p);
  }

  TEST_CASE_FIXTURE(NumberedPools,
                    "PrivatePools: the pool begun last gets the allocations that it admits") {
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

  TEST_CASE("PrivatePools: a pool may have its own source") {
    Numbers usual;
    Numbers own;
    Order order;
    Pools pools{order, usual.source()};
    pools.retain(a_pool, own.source());
    void* const p = pools.allocate(a_pool, 1000, 1, 7);
    (void)pools.free(p);
    pools.release(a_pool);

    CHECK(usual.taken.empty());
    CHECK(own.taken == std::vector<std::pair<std::size_t, int>>{{1000, 7}});
    CHECK(own.given_back == std::vector<void*>{p});
  }

  TEST_CASE_FIXTURE(
      NumberedPools,
      "PrivatePools: only pools that lend give away their idle memory when memory is needed") {
    for (PoolId const& id : {a_pool, another}) {
      pools.retain(id);
      (void)pools.free(pools.allocate(id, 1000, 1, 1));
    }
    pools.set_lends(another, true);

    CHECK(pools.lend() == 1000);
    CHECK(pools.reserved_bytes(a_pool) == 1000);
    CHECK(pools.reserved_bytes(another) == 0);
  }

  TEST_CASE_FIXTURE(RetainedPool, "PrivatePools: memory that a graph writes to is not lent") {
    pools.set_lends(a_pool, true);
    (void)pools.free(pools.allocate(a_pool, 1000, 1, 9));

    CHECK(pools.lend() == 0);
    CHECK(numbers.given_back.empty());
  }

  TEST_CASE_FIXTURE(RetainedPool,
                    "PrivatePools: restoring a checkpoint makes the same pieces live again") {
    void* const kept = pools.allocate(a_pool, 1000, 1, 9);
    void* const dropped = pools.allocate(a_pool, 2000, 1, 9);
    auto const checkpoint = pools.checkpoint(a_pool);
    (void)pools.free(dropped);
    void* const reused = pools.allocate(a_pool, 1900, 1, 9);
    void* const later = pools.allocate(a_pool, 3000, 1, 9);
    (void)pools.free(reused);
    REQUIRE(reused == dropped);

    auto were_live = pools.restore(checkpoint, 1);

    std::sort(were_live.begin(), were_live.end());
    CHECK(were_live == std::vector{kept, later});
    CHECK(pools.has_exactly(a_pool, {kept, dropped}));
    CHECK(pools.reserved_bytes(a_pool) == 6000);
    CHECK_FALSE(pools.free(later));
    CHECK(pools.allocate(a_pool, 3000, 1, 9) == later);
    CHECK(numbers.given_back.empty());
    for (void* const p : {kept, dropped, later}) {
      CHECK(pools.free(p));
    }
    pools.release(a_pool);
    CHECK(numbers.given_back.size() == 3);
    CHECK(pools.ids().empty());
  }

  TEST_CASE_FIXTURE(RetainedPool,
                    "PrivatePools: a checkpoint is restored after the work of those that used its "
                    "pieces since") {
    void* const p = pools.allocate(a_pool, 1000, 1, 9);
    void* const q = pools.allocate(a_pool, 1000, 1, 9);
    auto const both = pools.checkpoint(a_pool);
    CHECK(pools.record_stream(p, 2));
    (void)pools.free(p);
    auto const one = pools.checkpoint(a_pool);
    CHECK(pools.record_stream(q, 3));

    (void)pools.restore(both, 4);
    REQUIRE(order.waits.size() == 1);
    CHECK(order.waits[0].first == 4);
    CHECK(order.waits[0].second.tickets()[0].stream() == StreamIndex{2});
    CHECK(order.waits[0].second.tickets()[1].is_none());
    (void)pools.restore(one, 4);
    (void)pools.restore(both, 4);
    CHECK(order.waits.size() == 1);  // nobody has used p since
    (void)pools.free(q);
    (void)pools.restore(both, 4);
    REQUIRE(order.waits.size() == 2);
    CHECK(order.waits[1].second.tickets()[0].stream() == StreamIndex{3});
  }

  TEST_CASE_FIXTURE(RetainedPool, "PrivatePools: a checkpoint of memory that is gone is refused") {
    void* const p = pools.allocate(a_pool, 1000, 1, 1);
    auto const checkpoint = pools.checkpoint(a_pool);
    (void)pools.free(p);
    pools.release(a_pool);
    CHECK_THROWS_AS((void)pools.restore(checkpoint, 1), ContractViolation);

    pools.retain(a_pool);
    CHECK_THROWS_AS((void)pools.restore(checkpoint, 1), ContractViolation);

    void* const again = pools.allocate(a_pool, 1000, 1, 1);
    CHECK_THROWS_AS((void)pools.restore(checkpoint, 1), ContractViolation);
    CHECK(pools.has_exactly(a_pool, {again}));
  }

  TEST_CASE_FIXTURE(RetainedPool,
                    "PrivatePools: if a checkpoint cannot be ordered, nothing changes") {
    void* const p = pools.allocate(a_pool, 1000, 1, 1);
    auto const checkpoint = pools.checkpoint(a_pool);
    CHECK(pools.record_stream(p, 2));
    (void)pools.free(p);
    order.captured = 2;

    CHECK_THROWS_AS((void)pools.restore(checkpoint, 1), ContractViolation);

    CHECK(pools.has_exactly(a_pool, {}));
    order.captured = 0;
    (void)pools.restore(checkpoint, 1);
    CHECK(pools.has_exactly(a_pool, {p}));
  }

  TEST_CASE_FIXTURE(RetainedPool,
                    "PrivatePools: a stream that cannot be recorded does not use the memory") {
    void* const p = pools.allocate(a_pool, 1000, 1, 1);
    order.refused = 2;

    CHECK_THROWS_AS((void)pools.record_stream(p, 2), ContractViolation);

    CHECK(pools.free(p));
    CHECK(pools.allocate(a_pool, 1000, 1, 1) == p);
    CHECK(order.waits.empty());
  }

  TEST_CASE_FIXTURE(RetainedPool,
                    "PrivatePools: no other thread sees a piece that is neither live nor idle") {
    void* const p = pools.allocate(a_pool, 1000, 1, 1);
    CHECK(pools.record_stream(p, 2));
    int calls = 0;
    order.on_call = [&] {
      ++calls;
      CHECK_FALSE(std::async(std::launch::async, [&] {
                    bool const is_open = pools.try_lock();
                    if (is_open) {
                      pools.unlock();
                    }
                    return is_open;
                  }).get());
    };

    CHECK(pools.free(p));
    CHECK(calls == 1);
    CHECK(pools.allocate(a_pool, 1000, 1, 1) == p);
    CHECK(calls == 2);
  }

  TEST_CASE_FIXTURE(RetainedPool,
                    "PrivatePools: if the source has no memory, nothing is left behind") {
    numbers.is_empty = true;

    CHECK_THROWS_AS((void)pools.allocate(a_pool, 1000, 1, 1), std::bad_alloc);

    pools.release(a_pool);
    CHECK(pools.ids().empty());
  }

  TEST_CASE_FIXTURE(RetainedPool,
                    "PrivatePools: knows exactly which memory is live in which pool") {
    pools.retain(another);
    void* const p = pools.allocate(a_pool, 1000, 1, 1);
    void* const q = pools.allocate(a_pool, 3000, 1, 1);
    (void)pools.allocate(another, 1000, 1, 1);
    (void)pools.free(q);

    CHECK(pools.has_exactly(a_pool, {p}));
    CHECK_FALSE(pools.has_exactly(a_pool, {p, q}));
    CHECK_FALSE(pools.has_exactly(a_pool, {}));
    auto const pieces = pools.pieces(a_pool);
    REQUIRE(pieces.size() == 2);
    CHECK(pieces[0].requested_bytes == 1000);
    CHECK(pieces[1].requested_bytes == 0);
    CHECK_FALSE(pools.free(q));
    CHECK_FALSE(pools.record_stream(q, 1));
  }

  TEST_CASE("PrivatePools: serves from an allocator's leased memory, which keeps its place") {
    Program program;
    program.pools.retain(a_pool);
    void* const p = program.pools.allocate(a_pool, 1_MiB, program.stream(), program.stream());

    auto const one = program.written(2_MiB);
    auto const two = program.written(2_MiB);  // evicts the first block, not the pool's

    CHECK(program.allocator.residency(one.id()) != Residency::device);
    CHECK(program.pools.has_exactly(a_pool, {p}));
    (void)program.pools.free(p);
    CHECK(program.leased.size() == 1);
    program.pools.release(a_pool);
    CHECK(program.leased.size() == 0);
  }

  // In the next three tests the pool has all memory, so the next allocation reuses the pool's
  // addresses.
  TEST_CASE(
      "PrivatePools: other code gets a pool's memory after the work of all streams that used it") {
    Program program;
    program.pools.retain(a_pool);
    void* const p = program.pools.allocate(a_pool, 4_MiB, program.stream(), program.stream());
    CHECK(program.pools.record_stream(p, program.streams[1]));
    program.fill(p, program.streams[1]);
    (void)program.pools.free(p);
    program.pools.release(a_pool);

    CHECK_NOTHROW(program.fill_a_block());
  }

  TEST_CASE(
      "PrivatePools: a pool's stream gets its memory again after the work of the other streams") {
    Program program;
    program.pools.retain(a_pool);
    void* const p = program.pools.allocate(a_pool, 4_MiB, program.stream(), program.stream());
    CHECK(program.pools.record_stream(p, program.streams[1]));
    program.fill(p, program.streams[1]);
    (void)program.pools.free(p);

    void* const again = program.pools.allocate(a_pool, 4_MiB, program.stream(), program.stream());
    CHECK(again == p);
    CHECK_NOTHROW(program.fill(again, program.stream()));

    (void)program.pools.free(again);
    program.pools.release(a_pool);
  }

  TEST_CASE("PrivatePools: a graph's memory is released after its launches, on any stream") {
    Program program;
    program.pools.retain(a_pool);
    // As in a capture on the first stream: the memory is allocated on another one.
    void* const p = program.pools.allocate(a_pool, 4_MiB, program.stream(), program.streams[2]);
    (void)program.pools.free(p);
    (void)program.allocator.mark(program.streams[1]);
    program.fill(p, program.streams[1]);  // as a launch does

    program.pools.release(a_pool);

    CHECK_NOTHROW(program.fill_a_block());
  }
}
