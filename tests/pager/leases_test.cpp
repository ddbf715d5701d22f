// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/pager/leases.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <support/pager_bench.hpp>

namespace {

using namespace spillway::literals;
using spillway::Access;
using spillway::Residency;
using support::PagerBench;
using support::Plain;
using support::SteppedBench;

constexpr spillway::SimOptions device_options{.capacity_bytes = 64_MiB, .granularity_bytes = 4_KiB};

/// A device that calls back once when a stream is about to wait for an event.
class InterruptingDevice : public support::StubbornDevice {
 public:
  using support::StubbornDevice::StubbornDevice;

  void wait(stream_type stream, event_type event) {
    if (auto const call = std::exchange(before_wait, nullptr)) {
      call();
    }
    support::StubbornDevice::wait(stream, event);
  }

  std::function<void()> before_wait;
};
struct Interrupting : Plain {
  using device = InterruptingDevice;
};

}  // namespace

TEST_SUITE("pager") {
  TEST_CASE("DeviceAllocator: operands acquired together do not evict each other") {
    PagerBench<Plain> bench{128_KiB};
    std::vector<PagerBench<Plain>::Buffer> buffers;
    for (std::uint64_t i = 0; i < 3; ++i) {
      buffers.emplace_back(bench.allocator, 64_KiB);
      bench.write(buffers.back(), i);
    }
    // The first was swapped out; the second is the next victim, but it is an operand too.
    auto const leases = bench.allocator.acquire_all(
        {buffers[0].request(Access::read), buffers[1].request(Access::read)}, bench.stream());
    CHECK(leases.size() == 2);
    CHECK(buffers[2].residency() != Residency::device);
    CHECK(bench.allocator.stats().swap_ins.count == 1);
    CHECK(bench.allocator.stats().leased.blocks.current == 2);
  }

  TEST_CASE("DeviceAllocator: a group that does not fit leaves nothing leased and nothing lost") {
    PagerBench<Plain> bench{128_KiB};
    std::vector<PagerBench<Plain>::Buffer> buffers;
    for (std::uint64_t i = 0; i < 3; ++i) {
      buffers.emplace_back(bench.allocator, 64_KiB);
      bench.write(buffers.back(), i);
    }
    // The first would be overwritten, so no bytes come in for it; its only copy must survive.
    std::array const requests{buffers[0].request(Access::write),
                              buffers[1].request(Access::read),
                              buffers[2].request(Access::read)};
    CHECK_THROWS_WITH_AS((void)bench.allocator.acquire_all(requests, bench.stream()),
                         doctest::Contains("requested 196608 bytes"),
                         spillway::OutOfDeviceMemory);
    CHECK(bench.allocator.stats().leased.blocks.current == 0);
    for (std::uint64_t i = 0; i < 3; ++i) {
      bench.check(buffers[i], i);
    }
    bench.run();
    CHECK(bench.kernels.checks() == 3);
  }

  TEST_CASE("DeviceAllocator: work under several leases of a block comes before what is next") {
    for (bool const ends_in_order : {true, false}) {
      CAPTURE(ends_in_order);
      SteppedBench<Plain> bench{device_options, PagerBench<Plain>::options(64_KiB, 64_KiB), 3};
      SteppedBench<Plain>::Buffer block{bench.allocator, 8_KiB};
      auto first = block.acquire(Access::read_write, bench.streams[0]);
      auto second = block.acquire(Access::read_write, bench.streams[1]);
      auto* const bytes = static_cast<std::byte*>(first.data());
      bench.device.fill(bytes, 1, 4_KiB, bench.streams[0]);
      bench.device.fill(bytes + 4_KiB, 2, 4_KiB, bench.streams[1]);
      (ends_in_order ? first : second).release();
      (ends_in_order ? second : first).release();

      CHECK_NOTHROW(bench.fill(block, 3, 2));
      bench.run();
    }
  }

  TEST_CASE("DeviceAllocator: a resident block is written after other streams have read it") {
    SteppedBench<Plain> bench{device_options, PagerBench<Plain>::options(64_KiB, 64_KiB), 2};
    SteppedBench<Plain>::Buffer from{bench.allocator, 8_KiB};
    SteppedBench<Plain>::Buffer to{bench.allocator, 8_KiB};
    bench.write(from, 1);
    {
      auto const source = from.acquire(Access::read, bench.streams[1]);
      auto const target = to.acquire(Access::write, bench.streams[1]);
      bench.device.copy(
          target.data(), source.data(), 8_KiB, spillway::CopyKind::on_device, bench.streams[1]);
    }

    CHECK_NOTHROW(bench.fill(from, 2, 0));
    bench.run();
  }

  TEST_CASE("DeviceAllocator: a stream that was retired can be used again") {
    SteppedBench<Plain> bench{device_options, PagerBench<Plain>::options(64_KiB, 64_KiB), 2};
    SteppedBench<Plain>::Buffer block{bench.allocator, 8_KiB};
    bench.write(block, 1);
    bench.allocator.retire_stream(bench.streams[0]);
    bench.fill(block, 2, 0);

    CHECK_NOTHROW(bench.fill(block, 3, 1));
    bench.run();
  }

  TEST_CASE("DeviceAllocator: a block that a group overwrites and reads is not swapped in") {
    PagerBench<Plain> bench{64_KiB};
    PagerBench<Plain>::Buffer block{bench.allocator, 32_KiB};
    bench.write(block, 1);
    block.swap_out();
    auto const leases = bench.allocator.acquire_all(
        {block.request(Access::write), block.request(Access::read)}, bench.stream());
    CHECK(bench.allocator.stats().swap_ins.count == 0);
    CHECK(leases[0].data() == leases[1].data());
  }

  TEST_CASE("DeviceAllocator: an operand that is named twice is not too much for one call") {
    PagerBench<Plain> bench{128_KiB};
    PagerBench<Plain>::Buffer large{bench.allocator, 96_KiB};
    bench.write(large, 1);
    PagerBench<Plain>::Buffer other{bench.allocator, 64_KiB};
    auto const held = other.acquire(Access::write, bench.stream());
    std::array const requests{large.request(Access::read), large.request(Access::read)};
    std::string message;
    try {
      (void)bench.allocator.acquire_all(requests, bench.stream());
    } catch (spillway::OutOfDeviceMemory const& error) {
      message = error.what();
    }
    CHECK(message.find("Release leases") != std::string::npos);
  }

  TEST_CASE("DeviceAllocator: using a resident block again on one stream makes no device call") {
    PagerBench<Plain> bench{64_KiB};
    PagerBench<Plain>::Buffer a{bench.allocator, 4_KiB};
    (void)a.acquire(Access::write, bench.stream());
    auto const before = bench.device.calls();
    for (int i = 0; i < 100; ++i) {
      (void)a.acquire(Access::read_write, bench.stream());
      (void)a.acquire(Access::read, bench.stream());
    }
    CHECK(bench.device.calls() == before);
  }

  TEST_CASE("DeviceAllocator: a freed block lives until its last lease ends") {
    PagerBench<Plain> bench{64_KiB};
    PagerBench<Plain>::Allocator::lease_type lease;
    {
      PagerBench<Plain>::Buffer buffer{bench.allocator, 64_KiB};
      bench.write(buffer, 1);
      lease = buffer.acquire(Access::read, bench.stream());
    }
    CHECK(bench.allocator.stats().allocated.blocks.current == 1);
    bench.kernels.check(bench.device, bench.stream(), lease.data(), lease.size_bytes(), 1);
    CHECK_THROWS_AS(bench.allocator.close(), spillway::ContractViolation);
    lease.release();
    CHECK(bench.allocator.stats().allocated.blocks.current == 0);
    bench.run();
    CHECK(bench.kernels.checks() == 1);
  }

  TEST_CASE(
      "DeviceAllocator: a block that loses its range to a failed move can still be acquired") {
    using Bench = support::SteppedBench<Interrupting>;
    for (Access const access : {Access::read, Access::write}) {
      CAPTURE(static_cast<int>(access));
      auto options = PagerBench<Interrupting>::options(1_MiB, 16_MiB);
      options.bounce_bytes = 0;
      Bench bench{{.capacity_bytes = 64_MiB, .granularity_bytes = 4_KiB}, options, 2};
      // A block with a gap of half its size on both sides, and a copy on the host.
      std::map<void*, std::unique_ptr<Bench::Buffer>> small;
      for (std::size_t i = 0; i < 16; ++i) {
        auto buffer = std::make_unique<Bench::Buffer>(bench.allocator, 64_KiB);
        void* const address = buffer->acquire(Access::write, bench.stream()).data();
        small.emplace(address, std::move(buffer));
      }
      auto const at = [&](std::ptrdiff_t i) -> auto& {
        return std::next(small.begin(), i)->second;
      };
      at(4).reset();
      at(5).reset();
      Bench::Buffer block{bench.allocator, 128_KiB};
      bench.write(block, 1);
      block.swap_out();
      block.swap_in();
      at(3).reset();
      at(6).reset();
      std::vector<Bench::Allocator::lease_type> held;
      for (auto const& [address, buffer] : small) {
        if (buffer != nullptr) {
          held.push_back(buffer->acquire(Access::read_write, bench.stream()));
        }
      }

      bench.device.before_wait = [&] {
        bench.device.copies_left = 1;  // of a slide in two pieces; the way back is refused, too
        CHECK_THROWS_AS(bench.allocator.compact(), spillway::BlockLost);
        bench.device.copies_left = SIZE_MAX;
      };
      {
        auto const lease = block.acquire(access, bench.streams[1]);
        CHECK(!bench.device.before_wait);
        REQUIRE(lease.data() != nullptr);
        if (access == Access::write) {
          bench.kernels.write(bench.device, bench.streams[1], lease.data(), 128_KiB, 1);
        }
      }
      bench.check(block, 1);
      bench.run();
      CHECK(bench.kernels.checks() == 1);
    }
  }
}
