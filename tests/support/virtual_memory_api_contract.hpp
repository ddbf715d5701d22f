// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/virtual_memory_api.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include <support/device_rig.hpp>

// What every model of VirtualMemoryApi owes. A device joins with
// TEST_CASE_TEMPLATE_INVOKE(virtual_memory_contract, MyApi); it is made without arguments.

TEST_CASE_TEMPLATE_DEFINE("VirtualMemoryApi: ", D, virtual_memory_contract) {
  using namespace spillway;
  using namespace spillway::test;
  D device;
  DeviceRig<D> rig{device};
  auto const stream = rig.stream();
  std::size_t const piece = device.granularity_bytes();
  unsigned char* const base = static_cast<unsigned char*>(device.reserve_address(4 * piece));
  unsigned char* const target = rig.pinned(piece, 0);
  auto const first = device.try_create_physical(piece);
  auto const second = device.try_create_physical(piece);
  REQUIRE(first.has_value());
  REQUIRE(second.has_value());
  auto const reads = [&](unsigned char* p, unsigned char byte) {
    device.copy(target, p, piece, CopyKind::to_host, stream);
    device.synchronize(stream);
    return !holds_bytes<D>() ||
           std::count(target, target + piece, byte) == static_cast<std::ptrdiff_t>(piece);
  };

  SUBCASE("the granularity is a power of two and addresses are multiples of it") {
    CHECK(std::has_single_bit(piece));
    CHECK(piece % granule_bytes == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(base) % piece == 0);
  }
  SUBCASE("physical memory takes room of the device, addresses do not") {
    std::size_t const before = device.memory_info().free_bytes;
    void* const addresses = device.reserve_address(64 * piece);
    auto const memory = device.try_create_physical(64 * piece);
    REQUIRE(memory.has_value());
    CHECK(device.memory_info().free_bytes + 64 * piece <= before);
    device.release_physical(*memory);
    device.free_address(addresses, 64 * piece);
    CHECK(device.try_create_physical(round_up(device.memory_info().total_bytes, piece) + piece) ==
          std::nullopt);
  }
  SUBCASE("mapped memory is used like any other, across mappings too") {
    device.map(base + piece, piece, *first);
    device.map(base + 2 * piece, piece, *second);
    device.fill(base + piece, 1, 2 * piece, stream);
    CHECK(reads(base + piece + piece / 2, 1));
    device.unmap(base + piece, 2 * piece);
  }
  SUBCASE("bytes stay with the memory, not with the address") {
    device.map(base, piece, *first);
    device.map(base + piece, piece, *second);
    device.fill(base, 1, piece, stream);
    device.fill(base + piece, 2, piece, stream);
    device.synchronize(stream);

    device.unmap(base, piece);
    device.unmap(base + piece, piece);
    device.map(base + piece, piece, *first);
    device.map(base, piece, *second);

    CHECK(reads(base, 2));
    CHECK(reads(base + piece, 1));
    device.unmap(base, piece);
    device.unmap(base + piece, piece);
  }
  SUBCASE("an address can be mapped again after it was unmapped") {
    for (int round = 0; round < 3; ++round) {
      device.map(base + 3 * piece, piece, *first);
      device.fill(base + 3 * piece, static_cast<unsigned char>(round), piece, stream);
      CHECK(reads(base + 3 * piece, static_cast<unsigned char>(round)));
      device.unmap(base + 3 * piece, piece);
    }
  }

  device.release_physical(*first);
  device.release_physical(*second);
  device.free_address(base, 4 * piece);
}
