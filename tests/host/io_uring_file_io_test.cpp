// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/host_mapping.hpp>
#include <spillway/host/io_uring_file_io.hpp>
#include <spillway/host/system_file_io.hpp>
#include <spillway/sim.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include <support/pool_bench.hpp>
#include <support/temporary_folder.hpp>

using namespace spillway;
using namespace spillway::detail;

static_assert(std::is_same_v<SystemFileIo, IoUringFileIo>);

namespace {

using File = SwapFile<IoUringFileIo>;

constexpr std::size_t part_bytes = 64 << 10;
constexpr std::size_t parts = 300;  // more than the ring has room for

}  // namespace

TEST_SUITE("io_uring_file_io") {
  // Where the kernel refuses a ring, this tests the plain calls used instead.
  TEST_CASE("IoUringFileIo: bytes come back, through registered memory and other memory") {
    for (bool const is_direct : {false, true}) {
      for (bool const is_registered : {false, true}) {
        TemporaryFolder folder;
        File file{folder.path(), is_direct, {}};
        auto const memory = HostMapping::try_map(2 * parts * part_bytes, -1);
        REQUIRE(memory.data() != nullptr);
        std::span<std::byte> const all{memory.data(), 2 * parts * part_bytes};
        put_pattern(memory.data(), parts * part_bytes, 1);
        auto queue = file.make_queue(is_registered ? all : std::span<std::byte>{});
        REQUIRE(file.try_reserve(parts * part_bytes) == 0);
        for (bool const is_write : {true, false}) {
          std::vector<FileTransfer> transfers(parts);
          for (std::size_t i = 0; i < parts; ++i) {
            std::size_t const at = (i * 7 % parts) * part_bytes;
            transfers[i] = {.memory = memory.data() + (is_write ? 0 : parts * part_bytes) + at,
                            .bytes = part_bytes,
                            .offset = at,
                            .is_write = is_write,
                            .next = i + 1 < parts ? &transfers[i + 1] : nullptr};
          }
          queue.begin(transfers[0]);
          for (FileTransfer& transfer : transfers) {
            CHECK(queue.finish(transfer) == 0);
          }
        }

        CHECK(std::memcmp(memory.data(), memory.data() + parts * part_bytes, parts * part_bytes) ==
              0);
      }
    }
  }

  TEST_CASE("IoUringFileIo: a pool uses it by default and gives its name, and bytes come back") {
    TemporaryFolder folder;
    SimApi device;
    StreamOrder<SimApi> order{device};
    auto const stream = device.create_stream();
    constexpr std::size_t bytes = 300'000;
    auto* const block = static_cast<std::byte*>(device.try_reserve(bytes));
    put_pattern(block, bytes, 3);
    {
      HostSwapPool<SimApi> pool{device,
                                order,
                                {.file_bytes = 8 << 20,
                                 .file = folder.path(),
                                 .staging_chunks = 3,
                                 .staging_bytes = 16 << 10,
                                 .file_direct_io = true}};
      CHECK(pool.stats().file_calls.find("io_uring") != std::string_view::npos);
      REQUIRE(pool.try_grow(bytes));
      HostSlotId const slot = pool.try_take(bytes).value();
      for (int round = 0; round < 20; ++round) {
        (void)pool.write(slot, block, bytes, stream);
        device.fill(block, 0, bytes, stream);
        order.synchronize(pool.read(slot, block, bytes, stream).device_done);
      }

      CHECK(has_pattern(block, bytes, 3));
    }
    device.release(block, bytes);
  }
}
