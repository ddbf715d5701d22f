// SPDX-License-Identifier: Apache-2.0
#include <spillway/swappable_buffer.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <support/small_allocator.hpp>

using namespace spillway;
using namespace spillway::literals;
using support::SmallBench;
using Buffer = support::SmallBuffer;

static_assert(std::is_nothrow_move_constructible_v<Buffer> &&
              std::is_nothrow_move_assignable_v<Buffer>);
static_assert(!std::is_copy_constructible_v<Buffer> && !std::is_copy_assignable_v<Buffer>);

// Uses that a lease for reading does not allow do not compile.
static_assert(
    std::is_same_v<
        decltype(std::declval<Buffer&>().acquire<Access::read>(std::declval<SimStream>()).data()),
        void const*>);
static_assert(std::is_same_v<
              decltype(std::declval<Buffer&>().acquire_write(std::declval<SimStream>()).data()),
              void*>);
template <class B, Access access>
concept IsAcquirable = requires(B& buffer, SimStream stream) {
  buffer.template acquire<access>(stream);
};
static_assert(IsAcquirable<Buffer const, Access::read>);
static_assert(!IsAcquirable<Buffer const, Access::write>, "a const buffer is only read");
static_assert(!IsAcquirable<Buffer const, Access::read_write>);
static_assert(!std::is_convertible_v<ReadLease<Buffer::lease_type>, Buffer::lease_type>);

TEST_SUITE("swappable_buffer") {
  TEST_CASE("SwappableBuffer: it has a block for as long as it exists") {
    SmallBench bench;
    {
      Buffer const buffer{bench.allocator, 1000};
      CHECK(buffer.size_bytes() == 1000);
      CHECK_FALSE(buffer.empty());
      CHECK(buffer.id() != BlockId{});
      CHECK(bench.allocator.stats().allocated.blocks.current == 1);
      CHECK(bench.allocator.stats().requested_bytes.current == 1000);
    }
    CHECK(bench.allocator.stats().allocated.blocks.current == 0);
  }

  TEST_CASE("SwappableBuffer: a lease gives a 256-byte aligned address and all bytes") {
    SmallBench bench;
    Buffer first{bench.allocator, 1};
    Buffer second{bench.allocator, 300};
    auto const lease = second.acquire(Access::write, bench.stream);

    CHECK(reinterpret_cast<std::uintptr_t>(lease.data()) % 256 == 0);
    CHECK(lease.size_bytes() == 300);
    CHECK(lease.block() == second.id());
    CHECK(lease.access() == Access::write);
  }

  TEST_CASE("SwappableBuffer: bytes survive a swap-out and a swap-in") {
    SmallBench bench;
    support::KnownBytes known{bench, 100'000, 3};

    known.buffer().swap_out();
    bench.allocator.synchronize();
    CHECK(known.buffer().residency() == Residency::host);
    CHECK(bench.allocator.stats().resident.blocks.current == 0);
    known.buffer().swap_in();
    bench.allocator.synchronize();
    CHECK(known.buffer().residency() == Residency::device);
    CHECK(known.is_intact());
    known.buffer().swap_out();
    CHECK(known.is_intact());
  }

  TEST_CASE("SwappableBuffer: a second swap-out or swap-in does nothing") {
    SmallBench bench;
    support::KnownBytes known{bench, 5000, 1};

    known.buffer().swap_out();
    known.buffer().swap_out();
    CHECK(bench.allocator.stats().swap_outs.count == 1);
    known.buffer().swap_in();
    known.buffer().swap_in();
    CHECK(bench.allocator.stats().swap_ins.count == 1);
    CHECK(known.is_intact());
  }

  TEST_CASE("SwappableBuffer: a move transfers the block and leaves an empty buffer") {
    SmallBench bench;
    Buffer from{bench.allocator, 1000};
    BlockId const id = from.id();
    Buffer to{std::move(from)};

    CHECK(to.id() == id);
    CHECK(to.size_bytes() == 1000);
    CHECK(from.empty());
    CHECK(from.size_bytes() == 0);
    CHECK(from.id() == BlockId{});
    CHECK(bench.allocator.stats().allocated.blocks.current == 1);
  }

  TEST_CASE("SwappableBuffer: an empty buffer allows only assignment and destruction") {
    SmallBench bench;
    Buffer empty;

    CHECK(empty.empty());
    CHECK_FALSE(empty);
    CHECK_THROWS_AS((void)empty.acquire_read(bench.stream), ContractViolation);
    CHECK_THROWS_AS((void)empty.acquire(Access::read, bench.stream), ContractViolation);
    CHECK_THROWS_AS(empty.swap_out(), ContractViolation);
    CHECK_THROWS_AS(empty.swap_in(), ContractViolation);
    CHECK_THROWS_AS((void)empty.residency(), ContractViolation);
    CHECK_NOTHROW(empty.reset());
    empty = Buffer{bench.allocator, 10};
    CHECK_NOTHROW((void)empty.acquire(Access::write, bench.stream));
  }

  TEST_CASE(
      "SwappableBuffer: assignment frees the old block, and self-assignment changes nothing") {
    SmallBench bench;
    Buffer first{bench.allocator, 1000};
    Buffer second{bench.allocator, 2000};
    BlockId const id = second.id();

    first = std::move(second);
    CHECK(first.id() == id);
    CHECK(bench.allocator.stats().allocated.blocks.current == 1);
    Buffer& same = first;
    first = std::move(same);
    CHECK(first.id() == id);
    CHECK(first.size_bytes() == 2000);
    CHECK(bench.allocator.stats().allocated.blocks.current == 1);
  }

  TEST_CASE("SwappableBuffer: buffers in a vector keep their blocks when it grows or shrinks") {
    SmallBench bench;
    std::vector<Buffer> buffers;
    std::vector<BlockId> ids;
    for (std::size_t i = 1; i <= 20; ++i) {
      buffers.emplace_back(bench.allocator, i * 100);
      ids.push_back(buffers.back().id());
    }
    buffers.erase(buffers.begin() + 5);
    ids.erase(ids.begin() + 5);

    for (std::size_t i = 0; i < buffers.size(); ++i) {
      CHECK(buffers[i].id() == ids[i]);
    }
    CHECK(bench.allocator.stats().allocated.blocks.current == 19);
  }

  TEST_CASE("SwappableBuffer: reset frees the block at once unless it is leased") {
    SmallBench bench;
    Buffer buffer{bench.allocator, 1000};
    auto lease = buffer.acquire(Access::write, bench.stream);

    CHECK_THROWS_AS(buffer.reset(), ContractViolation);
    CHECK(buffer.size_bytes() == 1000);
    CHECK(lease.data() != nullptr);
    lease.release();
    buffer.reset();
    CHECK(buffer.empty());
    CHECK(bench.allocator.stats().allocated.blocks.current == 0);
  }

  TEST_CASE("SwappableBuffer: a lease keeps the block after the buffer is destroyed") {
    SmallBench bench;
    auto buffer = std::make_unique<Buffer>(bench.allocator, 4);
    auto lease = buffer->acquire(Access::write, bench.stream);
    buffer.reset();

    CHECK(bench.allocator.stats().allocated.blocks.current == 1);
    std::array<std::uint8_t, 4> const written{1, 2, 3, 4};
    std::array<std::uint8_t, 4> read{};
    bench.allocator.copy_from_host_sync(lease.data(), written.data(), 4, bench.stream);
    bench.allocator.copy_to_host_sync(read.data(), lease.data(), 4, bench.stream);
    CHECK(read == written);
    CHECK_THROWS_AS((void)bench.allocator.acquire(lease.block(), Access::read, bench.stream),
                    ContractViolation);
    lease.release();
    CHECK(bench.allocator.stats().allocated.blocks.current == 0);
    CHECK(bench.allocator.stats().resident.blocks.current == 0);
  }

  TEST_CASE("SwappableBuffer: a typed lease has the access with which it was acquired") {
    SmallBench bench;
    Buffer buffer{bench.allocator, 100};
    CHECK(buffer);
    CHECK(buffer.acquire_write(bench.stream).access() == Access::write);
    CHECK(buffer.acquire_read_write(bench.stream).access() == Access::read_write);
    auto lease = buffer.acquire_read(bench.stream);
    CHECK(lease.access() == Access::read);
    CHECK(lease.block() == buffer.id());
    CHECK(lease.size_bytes() == 100);
    CHECK_THROWS_AS(buffer.swap_out(), ContractViolation);
    Buffer::lease_type plain = std::move(lease).take_lease();
    CHECK(lease.empty());
    CHECK_FALSE(lease);
    CHECK(plain);
    plain.release();
    CHECK(plain.empty());
    CHECK_NOTHROW(buffer.swap_out());
    CHECK(bench.allocator.acquire<Access::read>(buffer.id(), bench.stream).access() ==
          Access::read);
  }

  TEST_CASE("SwappableBuffer: its request names it as an operand") {
    SmallBench bench;
    Buffer a{bench.allocator, 100};
    Buffer b{bench.allocator, 200};
    auto const leases = bench.allocator.acquire_all(
        {a.request(Access::write), b.request(Access::read_write)}, bench.stream);

    REQUIRE(leases.size() == 2);
    CHECK(leases[0].block() == a.id());
    CHECK(leases[0].access() == Access::write);
    CHECK(leases[1].block() == b.id());
    CHECK(leases[1].access() == Access::read_write);
  }
}
