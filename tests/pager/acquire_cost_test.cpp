// SPDX-License-Identifier: Apache-2.0
#include <spillway/device_allocator.hpp>
#include <spillway/sim.hpp>
#include <spillway/swappable_buffer.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <vector>

#include <support/counted_allocations.hpp>
#include <support/stepped_policies.hpp>

namespace {

using namespace spillway::literals;
using spillway::Access;

using Stepped = support::SteppedPolicies;
using Allocator = spillway::DeviceAllocator<Stepped>;
using Buffer = spillway::SwappableBuffer<Allocator>;

struct Bench {
  Bench() {
    for (std::size_t i = 0; i < 8; ++i) {
      buffers.emplace_back(allocator, 64_KiB);
      (void)buffers.back().acquire(Access::write, streams[0]);
    }
  }
  ~Bench() {
    buffers.clear();
    for (auto const stream : streams) {
      allocator.retire_stream(stream);
    }
  }
  Bench(Bench const&) = delete;
  Bench& operator=(Bench const&) = delete;

  void use_all(std::size_t stream) {
    for (Buffer& buffer : buffers) {
      for (auto const access : {Access::read, Access::read_write, Access::write}) {
        auto lease = buffer.acquire(access, streams[stream]);
        auto const again = buffer.acquire(Access::read, streams[stream]);
        lease.release();
      }
    }
  }

  spillway::testing::SteppedSimApi device{{.capacity_bytes = 8_MiB}};
  std::array<spillway::testing::SteppedSimApi::stream_type, 2> streams{device.create_stream(),
                                                                       device.create_stream()};
  Allocator allocator{device, {.capacity_bytes = 1_MiB}};
  std::vector<Buffer> buffers;
};

}  // namespace

TEST_SUITE("acquire_cost") {
  TEST_CASE(
      "DeviceAllocator: acquiring a resident block allocates nothing and makes no device call") {
    Bench bench;
    bench.use_all(0);  // names the stream
    SUBCASE("without steps") {}
    SUBCASE("in a step that is predicted") {
      for (int step = 0; step < 3; ++step) {
        bench.allocator.begin_step();
        bench.use_all(0);
      }
      bench.allocator.begin_step();
    }
    auto const calls = bench.device.calls();
    std::size_t const before = support::allocations;
    REQUIRE(before > 0);
    bench.use_all(0);
    CHECK(support::allocations == before);
    CHECK(bench.device.calls() == calls);
  }

  TEST_CASE(
      "DeviceAllocator: another stream waits for a writer once; later acquires make no call") {
    Bench bench;
    bench.use_all(0);
    { auto const lease = bench.buffers[0].acquire(Access::read, bench.streams[1]); }
    auto const calls = bench.device.calls();
    {
      auto const lease = bench.buffers[0].acquire(Access::read, bench.streams[1]);
      auto const other = bench.buffers[7].acquire(Access::read, bench.streams[1]);
    }
    CHECK(bench.device.calls() == calls);
  }
}
