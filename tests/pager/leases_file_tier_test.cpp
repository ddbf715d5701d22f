// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/device/sim/sim_options.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/policy/codec/zero_bitmap.hpp>
#include <spillway/sim.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include <support/stepped_bench.hpp>
#include <support/stepped_policies.hpp>
#include <support/temporary_folder.hpp>

TEST_SUITE("pager") {
  namespace {

  using namespace spillway::literals;
  using spillway::Access;
  using spillway::DeviceError;
  using spillway::FileTierError;
  using spillway::SimCall;
  using spillway::ZeroBitmap;

  using SteppedBench = support::SteppedBench<support::SteppedPolicies>;
  using Allocator = SteppedBench::Allocator;
  using Buffer = SteppedBench::Buffer;

  /// An allocator that swaps to a file only, which the test can truncate.
  struct Bench : private TemporaryFolder, SteppedBench {
    static constexpr std::size_t block_bytes = 64_KiB;

    explicit Bench(std::size_t blocks = 1, std::size_t file_bytes = 8_MiB)
        : SteppedBench{{.capacity_bytes = 64_MiB, .granularity_bytes = 4_KiB},
                       options(path(), blocks, file_bytes)} {}

    static Allocator::Options
    options(std::filesystem::path const& path, std::size_t blocks, std::size_t file_bytes) {
      Allocator::Options options{.capacity_bytes = blocks * block_bytes};
      options.host.file_bytes = file_bytes;
      options.host.file = path;
      options.host.slab_bytes = 1_MiB;
      options.host.staging_bytes = 64_KiB;
      return options;
    }

    /// The file has no name, so it is found among the open descriptors of this process.
    void truncate_file() const {
      std::string const prefix = path().string();
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

    /// Swaps a block out to the file, and takes its bytes away from there.
    void swap_out_and_lose(Buffer& buffer) {
      buffer.swap_out();
      device.run_all();
      truncate_file();
    }
    /// Writes a block that has lost its bytes, and checks that it is like any other.
    void check_recovers(Buffer& buffer) {
      write(buffer, 2);
      buffer.swap_out();
      check(buffer, 2);
      run();
      CHECK(kernels.checks() == 1);
    }

    /// Overwrites a block before its swap-in runs, and checks that it has the new bytes for good.
    void check_overwritten(Buffer& buffer) {
      write(buffer, 2);
      buffer.swap_out();
      device.run_all();

      check(buffer, 2);
      run();
      check(buffer, 2);
      run();
      CHECK(kernels.checks() == 2);
    }

    /// A block that was swapped in from a file that had lost its bytes, which was not reported yet.
    void lose(Buffer& buffer) {
      {
        Buffer other{allocator, block_bytes};
        device.run_all();
      }
      truncate_file();
      (void)buffer.acquire(Access::read, stream());
      device.run_all();
    }
  };

  /// A dropped block is made from another one, whose bytes are lost and which work has read.
  struct LossBench : Bench {
    LossBench() : Bench{2} {
      write(buffer, 1);
      write(made, 2);
      allocator.set_recipe(made.id(),
                           {buffer.id()},
                           std::chrono::nanoseconds{0},
                           [](auto, std::span<void const* const>, void*) {});
      swap_out_and_lose(buffer);
      (void)buffer.acquire(Access::read, stream());
    }

    Buffer buffer{allocator, block_bytes};
    Buffer made{allocator, block_bytes};
  };

  }  // namespace

  TEST_CASE("DeviceAllocator: bytes that a file did not return are an error of the next acquire") {
    Bench bench;
    Buffer buffer{bench.allocator, Bench::block_bytes};
    bench.write(buffer, 1);
    bench.lose(buffer);

    CHECK_THROWS_AS((void)buffer.acquire(Access::read, bench.stream()), FileTierError);
    CHECK_THROWS_AS((void)buffer.acquire(Access::read_write, bench.stream()), FileTierError);
    CHECK(bench.allocator.stats().leased.blocks.current == 0);
    bench.allocator.begin_step();  // the owner was told
  }

  TEST_CASE("DeviceAllocator: a lost block that is written again swaps like any other") {
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

  TEST_CASE(
      "DeviceAllocator: lost bytes that were changed before the loss was known are not kept") {
    Bench bench;
    Buffer buffer{bench.allocator, Bench::block_bytes};
    bench.write(buffer, 1);
    bench.swap_out_and_lose(buffer);
    (void)buffer.acquire(Access::read_write, bench.stream());
    bench.device.run_all();
    buffer.swap_out();
    bench.device.run_all();

    CHECK_THROWS_AS((void)buffer.acquire(Access::read, bench.stream()), FileTierError);
    CHECK_THROWS_AS((void)buffer.acquire(Access::read, bench.stream()), FileTierError);
    bench.check_recovers(buffer);
  }

  TEST_CASE("DeviceAllocator: a swap-in that fails after its host memory was given to another "
            "block is reported") {
    Bench bench{2, Bench::block_bytes};
    Buffer buffer{bench.allocator, Bench::block_bytes};
    Buffer other{bench.allocator, Bench::block_bytes};
    bench.write(buffer, 1);
    bench.swap_out_and_lose(buffer);
    (void)buffer.acquire(Access::read, bench.stream());
    bench.write(other, 2);
    other.swap_out();  // the file has room for one of them
    bench.device.run_all();

    CHECK_THROWS_AS((void)buffer.acquire(Access::read, bench.stream()), FileTierError);
    CHECK_THROWS_AS((void)buffer.acquire(Access::read, bench.stream()), FileTierError);
    bench.allocator.begin_step();  // the owner was told
    bench.write(buffer, 3);
    bench.check(other, 2);
    bench.check(buffer, 3);
    bench.run();
    CHECK(bench.kernels.checks() == 2);
  }

  TEST_CASE("DeviceAllocator: a swap-in that fails after its block has got another slot is "
            "reported, however often it moved") {
    for (int moves = 1; moves <= 3; ++moves) {
      CAPTURE(moves);
      Bench bench;
      Buffer buffer{bench.allocator, Bench::block_bytes};
      bench.write(buffer, 3);  // mostly zeros
      bench.allocator.set_codec<ZeroBitmap>(buffer.id());
      bench.swap_out_and_lose(buffer);
      for (int i = 0; i < moves; ++i) {  // a slot with a codec is written only once
        (void)buffer.acquire(Access::read_write, bench.stream());
        buffer.swap_out();
      }
      bench.device.run_all();

      CHECK_THROWS_AS((void)buffer.acquire(Access::read, bench.stream()), FileTierError);
      CHECK_THROWS_AS((void)buffer.acquire(Access::read_write, bench.stream()), FileTierError);
      bench.check_recovers(buffer);
      CHECK(bench.allocator.host_stats().tiers[2].slot_count == 1);
    }
  }

  TEST_CASE("DeviceAllocator: a swap-in that fails after its block was overwritten is no loss") {
    Bench bench;
    Buffer buffer{bench.allocator, Bench::block_bytes};
    bench.write(buffer, 1);
    bench.swap_out_and_lose(buffer);
    buffer.swap_in();
    bench.check_overwritten(buffer);

    bench.allocator.begin_step();
  }

  TEST_CASE("DeviceAllocator: a swap-in that fails after its block was overwritten is reported "
            "if a lease could read its bytes before") {
    Bench bench;
    Buffer buffer{bench.allocator, Bench::block_bytes};
    bench.write(buffer, 1);
    bench.swap_out_and_lose(buffer);
    (void)buffer.acquire(Access::read, bench.stream());
    bench.check_overwritten(buffer);

    CHECK_THROWS_AS(bench.allocator.begin_step(), FileTierError);
    bench.allocator.begin_step();
  }

  TEST_CASE("DeviceAllocator: a loss that only an acquire of another block has met is reported") {
    LossBench bench;
    bench.device.run_all();
    bench.made.swap_out();
    REQUIRE(bench.made.residency() == spillway::Residency::none);

    CHECK_THROWS_AS((void)bench.made.acquire(Access::read, bench.stream()), FileTierError);
    bench.made.reset();
    bench.write(bench.buffer, 3);
    CHECK_THROWS_AS(bench.allocator.begin_step(), FileTierError);
    bench.allocator.begin_step();
  }

  TEST_CASE(
      "DeviceAllocator: a loss of a block that its owner frees is reported while it is kept") {
    for (bool const is_known_first : {true, false}) {
      CAPTURE(is_known_first);
      LossBench bench;
      bench.made.swap_out();
      REQUIRE(bench.made.residency() == spillway::Residency::none);
      if (is_known_first) {
        bench.device.run_all();
      }
      bench.buffer.reset();  // `made` still needs its bytes
      bench.device.run_all();

      CHECK_THROWS_AS(bench.allocator.begin_step(), FileTierError);
      CHECK_THROWS_AS((void)bench.made.acquire(Access::read, bench.stream()), FileTierError);
      bench.made.reset();
      bench.allocator.begin_step();
    }
  }

  TEST_CASE("DeviceAllocator: a loss that no acquire reported is reported by begin_step, once") {
    Bench bench;
    Buffer buffer{bench.allocator, Bench::block_bytes};
    bench.write(buffer, 1);
    bench.lose(buffer);
    buffer.reset();

    CHECK_THROWS_AS(bench.allocator.begin_step(), FileTierError);
    bench.allocator.begin_step();
    CHECK(bench.allocator.stats().steps == 2);
  }

  TEST_CASE(
      "DeviceAllocator: a block that came back from a file in full is checked once, then usable") {
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

  TEST_CASE("DeviceAllocator: if a swap-in fails after its codec was launched, its range is not "
            "reused before the codec ends") {
    std::size_t failures = 0;
    for (std::uint64_t trial = 0; trial < 100; ++trial) {
      CAPTURE(trial);
      Bench bench;
      Buffer buffer{bench.allocator, Bench::block_bytes};
      bench.write(buffer, 3);  // mostly zeros
      bench.allocator.set_codec<ZeroBitmap>(buffer.id());
      buffer.swap_out();
      bench.device.run_all();

      bench.device.fail(SimCall::wait, 1 + trial % 10);
      try {
        (void)buffer.acquire(Access::read, bench.stream());
      } catch (DeviceError const&) {
        ++failures;
      }
      bench.device.fail(SimCall::wait, 0);

      Buffer other{bench.allocator, Bench::block_bytes};
      bench.write(other, 2);
      bench.check(other, 2);
      bench.device.run_random(trial);
      bench.check(buffer, 3);
      bench.run();
      CHECK(bench.kernels.checks() == 2);
    }
    CHECK(failures > 10);  // before the launch, and after it
  }
}
