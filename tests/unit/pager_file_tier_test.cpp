// SPDX-License-Identifier: Apache-2.0
#include <spillway/device_allocator.hpp>
#include <spillway/swappable_buffer.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include <support/pattern.hpp>
#include <support/temporary_folder.hpp>

namespace {

using namespace spillway::literals;
using spillway::Access;
using spillway::FileTierError;

struct Stepped : spillway::SimPolicies {
  using device = spillway::SteppedSimApi;
};
using Allocator = spillway::DeviceAllocator<Stepped>;
using Buffer = spillway::SwappableBuffer<Allocator>;

/// An allocator that swaps to a file alone, which somebody else can cut short.
struct Bench {
  static constexpr std::size_t block_bytes = 64_KiB;

  Bench() : allocator{device, options(folder.path())} {}
  ~Bench() { allocator.retire_stream(stream); }
  Bench(Bench const&) = delete;
  Bench& operator=(Bench const&) = delete;

  static Allocator::Options options(std::filesystem::path const& path) {
    Allocator::Options options{.capacity_bytes = block_bytes};
    options.host.file_bytes = 8_MiB;
    options.host.file = path;
    options.host.slab_bytes = 1_MiB;
    options.host.staging_bytes = 64_KiB;
    return options;
  }

  void write(Buffer& buffer, std::uint64_t seed, Access access = Access::write) {
    auto const lease = buffer.acquire(access, stream);
    kernels.write(device, stream, lease.data(), lease.size_bytes(), seed);
  }
  void check(Buffer& buffer, std::uint64_t seed) {
    auto const lease = buffer.acquire(Access::read, stream);
    kernels.check(device, stream, lease.data(), lease.size_bytes(), seed);
  }
  void run() {
    device.run_all();
    CHECK_MESSAGE(kernels.failures() == 0, kernels.first_failure());
  }

  /// The file has no name, so it is found by what this process has open.
  void truncate_file() const {
    std::string const prefix = folder.path().string();
    for (auto const& entry : std::filesystem::directory_iterator{"/proc/self/fd"}) {
      std::error_code gone;
      auto const target = std::filesystem::read_symlink(entry.path(), gone).string();
      if (target.rfind(prefix, 0) == 0) {
        std::filesystem::resize_file(entry.path(), 0);
        return;
      }
    }
    FAIL("no file of the tier is open");
  }

  /// A block that was swapped in from a file that had lost its bytes; nobody knows yet.
  void lose(Buffer& buffer) {
    {
      Buffer other{allocator, block_bytes};
      device.run_all();
    }
    truncate_file();
    (void)buffer.acquire(Access::read, stream);
    device.run_all();
  }

  TemporaryFolder folder;
  support::PatternKernels kernels;  // before the device, whose end runs what is enqueued
  spillway::SteppedSimApi device{{.capacity_bytes = 64_MiB, .granularity_bytes = 4_KiB}};
  Allocator allocator;
  spillway::SteppedSimApi::stream_type stream = device.create_stream();
};

}  // namespace

TEST_SUITE("pager, file tier") {
  TEST_CASE("SwapPager: bytes that a file did not give back are an error of the next acquire") {
    Bench bench;
    Buffer buffer{bench.allocator, Bench::block_bytes};
    bench.write(buffer, 1);
    bench.lose(buffer);

    CHECK_THROWS_AS((void)buffer.acquire(Access::read, bench.stream), FileTierError);
    CHECK_THROWS_AS((void)buffer.acquire(Access::read_write, bench.stream), FileTierError);
    CHECK(bench.allocator.stats().leased.blocks.current == 0);
    bench.allocator.begin_step();  // the owner was told
  }

  TEST_CASE("SwapPager: a lost block that is written anew swaps as any other") {
    Bench bench;
    Buffer buffer{bench.allocator, Bench::block_bytes};
    bench.write(buffer, 1);
    bench.lose(buffer);

    bench.write(buffer, 2);
    Buffer other{bench.allocator, Bench::block_bytes};
    bench.write(other, 3);
    bench.check(buffer, 2);
    bench.check(other, 3);
    bench.run();
    CHECK(bench.kernels.checks() == 2);
  }

  TEST_CASE("SwapPager: a loss of which no acquire told is told by begin_step, once") {
    Bench bench;
    Buffer buffer{bench.allocator, Bench::block_bytes};
    bench.write(buffer, 1);
    bench.lose(buffer);
    buffer.reset();

    CHECK_THROWS_AS(bench.allocator.begin_step(), FileTierError);
    bench.allocator.begin_step();
    CHECK(bench.allocator.stats().steps == 2);
  }

  TEST_CASE("SwapPager: a block that a file gave back in full is asked about once and used") {
    Bench bench;
    Buffer a{bench.allocator, Bench::block_bytes};
    Buffer b{bench.allocator, Bench::block_bytes};
    bench.write(a, 1);
    bench.write(b, 2);
    for (int round = 0; round < 3; ++round) {
      bench.check(a, 1);
      bench.run();
      bench.check(a, 1);
      bench.check(b, 2);
    }
    bench.run();
    CHECK(bench.kernels.checks() == 9);
  }
}
