// SPDX-License-Identifier: Apache-2.0
// Calls that lack host memory fail, and lose no piece of a pool.
#include <spillway/core/fence.hpp>
#include <spillway/core/types.hpp>
#include <spillway/interop/torch/private_pools.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <set>
#include <tuple>
#include <vector>

#include <support/counted_allocations.hpp>

TEST_SUITE("private_pools_memory") {
  namespace {

  using namespace spillway;
  using namespace spillway::torch;

  /// A stream order in which streams are numbers, and in which nothing has to wait.
  struct Order {
    using stream_type = int;

    std::uint64_t marks = 0;

    [[nodiscard]] Fence mark(int stream) {
      return Ticket{static_cast<StreamIndex>(stream), ++marks};
    }
    void order_after(int /*stream*/, Fence const& /*fence*/) {}
    void order_after_all(int /*stream*/) {}
  };

  using Pools = PrivatePools<Order>;

  constexpr PoolId a_pool{0, 1};

  /// A pool with two live pieces and an idle one. The source needs no host memory.
  struct Program {
    Order order;
    std::set<void*> taken;
    std::uintptr_t last = 0;
    Pools pools{order,
                {[this](std::size_t /*bytes*/, int /*stream*/) {
                   support::AmpleMemory const ample;
                   auto* const p = reinterpret_cast<void*>(++last << 20U);
                   taken.insert(p);
                   return p;
                 },
                 [this](void* p) { REQUIRE(taken.erase(p) == 1); }}};
    void* small = nullptr;
    void* idle = nullptr;
    void* visited = nullptr;
    Pools::Checkpoint before;

    Program() {
      pools.retain(a_pool);
      pools.set_lends(a_pool, true);
      small = pools.allocate(a_pool, 1000, 1, 1);
      idle = pools.allocate(a_pool, 5000, 1, 1);
      visited = pools.allocate(a_pool, 9000, 1, 1);
      REQUIRE(pools.record_stream(visited, 2));
      before = pools.checkpoint(a_pool);
      REQUIRE(pools.free(idle));
    }

    /// All that a failed call must leave as it was.
    [[nodiscard]] auto picture() const {
      std::vector<std::tuple<void*, std::size_t, std::size_t>> pieces;
      for (Pools::Piece const& piece : pools.pieces(a_pool)) {
        pieces.emplace_back(piece.address, piece.bytes, piece.requested_bytes);
      }
      return std::tuple{pieces, pools.use_count(a_pool), pools.ids(), pools.is_routing(), taken};
    }
    void end_sound() {
      while (pools.use_count(a_pool) != 0) {
        pools.release(a_pool);
      }
      for (PoolId const& id : pools.ids()) {
        for (Pools::Piece const& piece : pools.pieces(id)) {
          CHECK(pools.free(piece.address));
        }
      }
      CHECK(pools.ids().empty());
      CHECK(pools.returns().waiting_count() == 0);
      CHECK(taken.empty());
    }
  };

  /// Lets each allocation of host memory in the call fail once, and all from there on.
  template <class Call>
  void check_that_failures_change_nothing(Call call) {
    for (std::size_t failures : {std::size_t{1}, std::size_t{1000}}) {
      bool has_failed = true;
      for (std::size_t more = 0; has_failed; ++more) {
        CAPTURE(more);
        Program program;
        auto const before = program.picture();
        has_failed = false;
        try {
          support::ShortMemory const shortage{more, failures};
          call(program);
        } catch (std::bad_alloc const&) {
          has_failed = true;
        }
        if (has_failed) {
          CHECK(program.picture() == before);
        } else {
          REQUIRE(more != 0);  // the call needs host memory, so this tests something
        }
        program.end_sound();
      }
    }
  }

  }  // namespace

  TEST_CASE("PrivatePools: an allocation without host memory leaves everything as it was") {
    check_that_failures_change_nothing(
        [](Program& program) { (void)program.pools.allocate(a_pool, 50'000, 1, 1); });
    check_that_failures_change_nothing(
        [](Program& program) { (void)program.pools.allocate(a_pool, 4900, 1, 1); });
    check_that_failures_change_nothing([](Program& program) {
      (void)program.pools.allocate({0, 2}, 1000, 1, 1);
    });
  }

  TEST_CASE("PrivatePools: what cannot be freed for lack of host memory stays live") {
    check_that_failures_change_nothing(
        [](Program& program) { (void)program.pools.free(program.small); });
    check_that_failures_change_nothing(
        [](Program& program) { (void)program.pools.free(program.visited); });
  }

  TEST_CASE("PrivatePools: no memory is lost if a pool cannot return it for lack of host memory") {
    check_that_failures_change_nothing([](Program& program) { program.pools.release(a_pool); });
    check_that_failures_change_nothing([](Program& program) { (void)program.pools.lend(); });
  }

  TEST_CASE("PrivatePools: a checkpoint that cannot be restored for lack of host memory changes "
            "nothing, and neither does a route that cannot begin") {
    check_that_failures_change_nothing(
        [](Program& program) { (void)program.pools.restore(program.before, 1); });
    check_that_failures_change_nothing(
        [](Program& program) { program.pools.begin(a_pool, [](int) { return true; }); });
  }
}
