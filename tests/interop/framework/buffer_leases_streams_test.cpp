// SPDX-License-Identifier: Apache-2.0
// Leases on a device that runs enqueued work later, with copies on separate streams.
#include <spillway/device_allocator.hpp>
#include <spillway/interop/framework/buffer_leases.hpp>
#include <spillway/page_arena.hpp>
#include <spillway/sim.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include <support/pattern.hpp>

using namespace spillway;
using namespace spillway::framework;
using spillway::testing::SteppedSimApi;

namespace {

constexpr std::size_t block_bytes = 128_KiB;

/// Room for two buffers. Enqueued work runs only when it is waited for, or by `run`.
struct StreamBench {
  struct Policies : SimPolicies {
    using device = SteppedSimApi;
    using arena = StableAddresses;
  };
  using Allocator = DeviceAllocator<Policies>;
  using Leases = BufferLeases<Allocator>;
  using stream_type = SteppedSimApi::stream_type;

  static Allocator::Options options() {
    Allocator::Options options;
    options.capacity_bytes = 2 * block_bytes;
    options.host.pinned_bytes = 4_MiB;
    options.paging.lease_wait = std::chrono::milliseconds{0};
    return options;
  }
  ~StreamBench() {
    run();
    memory.retire_stream(compute);
    memory.retire_stream(copies);
  }

  /// An operation that is enqueued on the compute stream and makes a buffer.
  void* make(std::uint64_t seed) {
    Leases::Frame frame{1};
    REQUIRE(leases.try_enter(frame, {}).empty());
    void* const p = leases.try_allocate(block_bytes, &frame);
    REQUIRE(p != nullptr);
    kernels.write(device, compute, p, block_bytes, seed);
    std::array<void*, 1> const results{p};
    leases.make_swappable(results);
    leases.exit(frame);
    return p;
  }
  /// An operation that is enqueued on the compute stream and finds what was written.
  void check(void* p, std::uint64_t seed) {
    Leases::Frame frame{1};
    std::array<BufferUse, 1> const uses{BufferUse{p, false}};
    REQUIRE(leases.try_enter(frame, uses).empty());
    kernels.check(device, compute, p, block_bytes, seed);
    leases.exit(frame);
  }
  /// The stream for copies waits for what has been enqueued on the compute stream.
  void join() {
    auto const event = device.create_event();
    device.record(event, compute);
    device.wait(copies, event);
    device.destroy_event(event);
  }
  void run() {
    device.run_all();
    CHECK_MESSAGE(kernels.failures() == 0, kernels.first_failure());
  }

  support::PatternKernels kernels;
  SteppedSimApi device{SimOptions{.capacity_bytes = 1_MiB}};
  Allocator memory{device, options()};
  stream_type compute = device.create_stream();
  stream_type copies = device.create_stream();
  Leases leases{memory, compute};
};

}  // namespace

TEST_SUITE("buffer_leases") {
  TEST_CASE("BufferLeases: an enqueued operation finishes before its buffers leave") {
    StreamBench bench;
    std::array<void*, 5> buffers{};
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      buffers[i] = bench.make(i);
    }
    CHECK(bench.kernels.checks() == 0);
    for (int round = 0; round < 3; ++round) {
      for (std::size_t i = 0; i < buffers.size(); ++i) {
        bench.check(buffers[i], i);
      }
    }
    bench.run();
    CHECK(bench.kernels.checks() == 15);
    CHECK(bench.memory.stats().swap_outs.count >= 3);
    CHECK(bench.memory.stats().swap_ins.count >= 3);
  }

  TEST_CASE("BufferLeases: a copy ordered after the compute stream sees buffers that were still "
            "being swapped in") {
    StreamBench bench;
    void* const a = bench.make(1);
    void* const b = bench.make(2);
    void* const c = bench.make(3);
    for (void* const p : {a, b, c}) {
      StreamBench::Leases::Frame frame;
      std::array<BufferUse, 1> const uses{BufferUse{p, false}};
      REQUIRE(bench.leases.try_enter(frame, uses).empty());
      bench.join();
      bench.kernels.check(bench.device, bench.copies, p, block_bytes, p == a ? 1 : p == b ? 2 : 3);
      bench.device.synchronize(bench.copies);  // when a framework would be called back
      bench.leases.exit(frame);
    }
    bench.run();
    CHECK(bench.kernels.checks() == 3);
  }

  TEST_CASE("BufferLeases: the target of a copy on another stream stays until the host has seen "
            "the copy end") {
    StreamBench bench;
    (void)bench.make(1);
    (void)bench.make(2);
    void* const target = bench.leases.try_allocate(block_bytes, nullptr);
    REQUIRE(target != nullptr);
    StreamBench::Leases::Frame frame;
    std::array<BufferUse, 1> const uses{BufferUse{target, true}};
    REQUIRE(bench.leases.try_enter(frame, uses).empty());
    bench.join();
    bench.kernels.write(bench.device, bench.copies, target, block_bytes, 7);
    void* const other = bench.make(3);  // in the place of one of the first two
    std::array<void*, 1> const results{target};
    bench.leases.make_swappable(results);
    CHECK(bench.leases.view(target).is_resident);
    bench.device.synchronize(bench.copies);
    bench.leases.exit(frame);
    (void)bench.make(4);
    (void)bench.make(5);
    CHECK_FALSE(bench.leases.view(target).is_resident);
    bench.check(target, 7);
    bench.check(other, 3);
    bench.run();
    CHECK(bench.kernels.checks() == 2);
  }
}
