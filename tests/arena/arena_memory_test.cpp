// SPDX-License-Identifier: Apache-2.0
#include <spillway/arena/arena_memory.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/range.hpp>
#include <spillway/device/host/host_api.hpp>
#include <spillway/device/sim/sim_api.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

TEST_SUITE("arena_memory") {
  namespace {

  using namespace spillway;
  using detail::ArenaMemory;

  constexpr std::size_t piece = 64_KiB;

  }  // namespace

  TEST_CASE("ArenaMemory: without a common address range each reservation has its own addresses") {
    SimApi device{{.capacity_bytes = 1_MiB}};
    ArenaMemory<SimApi> memory{device, 0, 0};
    CHECK_FALSE(memory.is_one_line());
    Segment segment{nullptr, 100'096, {}};
    REQUIRE(memory.try_reserve(segment));
    CHECK(segment.address != nullptr);
    Segment too_much{nullptr, 1_MiB, {}};
    CHECK_FALSE(memory.try_reserve(too_much));
    memory.release(segment);
    CHECK(device.usage().device_bytes == 0);
  }

  TEST_CASE("ArenaMemory: adjacent pieces are mapped and unmapped by one call") {
    SimApi device{{.capacity_bytes = 1_MiB, .granularity_bytes = 16_KiB}};
    ArenaMemory<SimApi> memory{device, 1_MiB, piece};
    REQUIRE(memory.is_one_line());
    Segment segment{memory.base(), 4 * piece + 16_KiB, {}};
    auto const before = device.calls();
    REQUIRE(memory.try_reserve(segment));
    CHECK(device.calls().maps - before.maps == 2);  // the whole pieces, and what is left
    CHECK(device.usage().device_bytes == segment.bytes);
    memory.release(segment);
    CHECK(device.calls().unmaps - before.unmaps == 1);
    CHECK(device.usage().device_bytes == 0);
  }

  TEST_CASE("ArenaMemory: a piece is no larger than the reserved address range") {
    SimApi device{{.capacity_bytes = 1_MiB, .granularity_bytes = 16_KiB}};
    ArenaMemory<SimApi> memory{device, 1_MiB, std::numeric_limits<std::size_t>::max()};
    Segment segment{memory.base(), 4 * piece, {}};
    REQUIRE(memory.try_reserve(segment));
    CHECK(device.usage().device_bytes == segment.bytes);
    memory.release(segment);
    CHECK(device.usage().device_bytes == 0);
  }

  TEST_CASE("ArenaMemory: top_pieces returns only whole pieces, the highest first") {
    SimApi device{{.capacity_bytes = 1_MiB, .granularity_bytes = 16_KiB}};
    ArenaMemory<SimApi> memory{device, 1_MiB, piece};
    Segment segment{memory.base(), 4 * piece, {}};
    REQUIRE(memory.try_reserve(segment));
    std::byte* const base = memory.base();

    Segment const one = memory.top_pieces(base, base + 4 * piece, 1);
    CHECK(one.address == base + 3 * piece);
    CHECK(one.bytes == piece);
    Segment const inner = memory.top_pieces(base + 256, base + 4 * piece - 256, 1_MiB);
    CHECK(inner.address == base + piece);
    CHECK(inner.bytes == 2 * piece);
    CHECK(memory.top_pieces(base + 256, base + piece, 1_MiB).bytes == 0);
    Segment const exact = memory.top_pieces(base + piece, base + 3 * piece, 1_MiB);
    CHECK(exact.address == base + piece);
    CHECK(exact.bytes == 2 * piece);
  }

  TEST_CASE("ArenaMemory: a failed reservation leaves no memory on the device") {
    SimApi device{{.capacity_bytes = 4 * piece, .granularity_bytes = 16_KiB}};
    ArenaMemory<SimApi> memory{device, 1_MiB, piece};
    Segment too_much{memory.base(), 5 * piece, {}};
    CHECK_FALSE(memory.try_reserve(too_much));
    CHECK(device.usage().device_bytes == 0);
    for (SimCall const call : {SimCall::create_physical, SimCall::map}) {
      for (std::uint64_t const nth : {1U, 2U}) {
        device.fail(call, nth);
        Segment segment{memory.base(), 2 * piece + 16_KiB, {}};
        CHECK_THROWS_AS((void)memory.try_reserve(segment), DeviceError);
        CHECK(device.usage().device_bytes == 0);
      }
    }
  }

  TEST_CASE("ArenaMemory: if the device has no memory for page tables, nothing is taken") {
    struct NoTables : SimApi {
      using SimApi::SimApi;
      bool try_map(void* /*p*/, std::size_t /*bytes*/, std::span<physical_type const> /*pieces*/) {
        return false;
      }
    };
    NoTables device{{.capacity_bytes = 4 * piece, .granularity_bytes = 16_KiB}};
    ArenaMemory<NoTables> memory{device, 1_MiB, piece};
    Segment segment{memory.base(), 2 * piece, {}};
    CHECK_FALSE(memory.try_reserve(segment));
    CHECK(device.usage().device_bytes == 0);
  }

  TEST_CASE("ArenaMemory: a range where pieces are mapped already is refused unchanged") {
    SimApi device{{.capacity_bytes = 1_MiB, .granularity_bytes = 16_KiB}};
    ArenaMemory<SimApi> memory{device, 1_MiB, piece};
    Segment there{memory.base() + piece, piece, {}};
    REQUIRE(memory.try_reserve(there));
    Segment across{memory.base(), 3 * piece, {}};
    CHECK_FALSE(memory.try_reserve(across));
    CHECK(device.usage().device_bytes == piece);
    Segment below{memory.base(), piece, {}};
    Segment above{memory.base() + 2 * piece, piece, {}};
    CHECK(memory.try_reserve(below));
    CHECK(memory.try_reserve(above));
  }

  TEST_CASE("ArenaMemory: growing in place requires a device with virtual memory") {
    HostApi device;
    CHECK_THROWS_AS((ArenaMemory<HostApi>{device, 1_MiB, piece}), ContractViolation);
  }
}
