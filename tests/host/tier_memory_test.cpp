// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/sim/sim_api.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/host/tier_memory.hpp>
#include <spillway/testing/faulty_file_io.hpp>

#include <doctest/doctest.h>

#include <cerrno>
#include <cstddef>
#include <optional>
#include <utility>

#include <support/temporary_folder.hpp>

using namespace spillway;
using spillway::testing::FaultyFileIo;
using namespace spillway::detail;

namespace {

using Pinned = PinnedMemory<SimApi>;
using Memory = TierMemory<SimApi, FaultyFileIo>;

SimOptions pinned_capacity(std::size_t bytes) {
  SimOptions options;
  options.pinned_capacity_bytes = bytes;
  return options;
}

}  // namespace

TEST_SUITE("tier_memory") {
  TEST_CASE("PinnedMemory: the memory is freed once, by its last owner") {
    SimApi device;
    {
      Pinned first = Pinned::try_allocate(device, 4096, -1);
      CHECK(first.size_bytes() == 4096);
      std::byte* const data = first.data();
      Pinned second{std::move(first)};
      CHECK(second.data() == data);
      Pinned third;
      third = std::move(second);
      CHECK(third.data() == data);
      CHECK(device.usage().pinned_bytes == 4096);
    }
    CHECK(device.usage().pinned_bytes == 0);
  }

  TEST_CASE("PinnedMemory: without room it is empty") {
    SimApi device{pinned_capacity(4096)};
    CHECK(Pinned::try_allocate(device, 8192, -1).data() == nullptr);
    CHECK(device.usage().pinned_bytes == 0);
  }

  TEST_CASE("TierMemory: a slab that is not adopted is freed, an adopted one stays") {
    SimApi device;
    Memory memory{device, {}, -1, {}};
    CHECK(memory.file() == nullptr);

    CHECK(memory.try_reserve(HostTier::pinned, 8192).has_value());
    CHECK(device.usage().pinned_bytes == 0);

    auto slab = memory.try_reserve(HostTier::pinned, 8192);
    REQUIRE(slab.has_value());
    CHECK(slab->place.memory == slab->pinned.data());
    memory.prepare_adopt();
    memory.adopt(std::move(*slab));
    slab.reset();
    CHECK(device.usage().pinned_bytes == 8192);
  }

  TEST_CASE("TierMemory: pageable slabs are mapped, and not bound if no node is named") {
    SimApi device;
    Memory memory{device, {}, -1, {}};

    auto const slab = memory.try_reserve(HostTier::pageable, 64 << 10);

    REQUIRE(slab.has_value());
    CHECK(slab->place.memory == slab->mapping.data());
    CHECK(slab->place.numa_bound_bytes == 0);
    slab->place.memory[(64 << 10) - 1] = std::byte{1};
    CHECK_FALSE(memory.try_reserve(HostTier::pageable, std::size_t{1} << 60U).has_value());
  }

  TEST_CASE("TierMemory: slabs of the file are consecutive, and a full disk gives none") {
    TemporaryFolder folder;
    FaultyFileIo io;
    SimApi device;
    Memory memory{device, {.file_bytes = 1_MiB, .file = folder.path()}, -1, io};
    REQUIRE(memory.file() != nullptr);

    CHECK(memory.try_reserve(HostTier::file, 4096)->place.file_offset == 0);
    auto second = memory.try_reserve(HostTier::file, 8192);
    CHECK(second->place.file_offset == 4096);
    CHECK(second->place.memory == nullptr);
    io.plant({.allocate_error = ENOSPC});
    CHECK_FALSE(memory.try_reserve(HostTier::file, 4096).has_value());
    io.plant({});
    memory.give_back(std::move(*second));
    CHECK(memory.try_reserve(HostTier::file, 4096)->place.file_offset == 4096);
  }

  TEST_CASE("TierMemory: the error for a file that cannot be opened names it") {
    SimApi device;
    CHECK_THROWS_AS((Memory{device, {.file_bytes = 4096, .file = "/nowhere/at/all"}, -1, {}}),
                    FileTierError);
  }
}
