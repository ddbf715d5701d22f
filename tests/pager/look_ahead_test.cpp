// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/pager/look_ahead.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/swappable_buffer.hpp>
#include <spillway/testing/faulty_file_io.hpp>

#include <doctest/doctest.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <tuple>
#include <vector>

#include <support/pager_bench.hpp>
#include <support/pattern.hpp>
#include <support/temporary_folder.hpp>

namespace {

using namespace spillway::literals;
using spillway::Access;
using spillway::FileTierError;
using spillway::HostTier;
using spillway::Residency;
using spillway::testing::FaultyFileIo;
using support::PagerBench;
using support::Plain;
using support::Scheduled;
using support::StubbornDevice;

/// The blocks that a test wants to be brought in, in this order.
struct Wishes {
  std::vector<spillway::BlockId> blocks;
  std::size_t most_bytes = 64_MiB;
};

struct ByWish : spillway::NoPrefetch {
  ByWish() = default;
  explicit ByWish(Wishes const& the_wishes) : wishes{&the_wishes} {}

  template <class Visit>
  void candidates(spillway::AccessSchedule const& /*schedule*/, Visit visit) const {
    for (spillway::BlockId const id : wishes->blocks) {
      if (!visit(id, std::uint64_t{1000})) {
        return;
      }
    }
  }
  [[nodiscard]] std::size_t max_inflight_bytes() const noexcept { return wishes->most_bytes; }

  Wishes const* wishes = nullptr;
};

struct Wishful : Plain {
  using prefetch = ByWish;
  using file_io = FaultyFileIo;
};

/// LRU, which has all blocks copied out as soon as they can be.
struct AllLeaving : spillway::LruEviction {
  template <class Inspect>
  [[nodiscard]] std::optional<spillway::BlockId> early_victim(Inspect inspect) noexcept {
    return victim(0, [&](spillway::BlockId id) noexcept {
      auto const candidate = inspect(id);
      return candidate && !candidate->is_clean ? candidate : std::nullopt;
    });
  }
  template <class Inspect>
  [[nodiscard]] std::optional<spillway::BlockId> leaving_victim(Inspect /*inspect*/) noexcept {
    return std::nullopt;
  }
  [[nodiscard]] bool may_return(spillway::AccessSchedule const& /*schedule*/,
                                spillway::BlockId /*id*/) const noexcept {
    return true;
  }
};
struct CopiedEarly : Plain {
  using eviction = AllLeaving;
  using file_io = FaultyFileIo;
};

/// Blocks on the host, and a resident one whose acquire makes the allocator look ahead.
struct WishBench {
  using Allocator = spillway::DeviceAllocator<Wishful>;
  using Buffer = spillway::SwappableBuffer<Allocator>;

  explicit WishBench(std::vector<std::size_t> const& sizes,
                     bool is_prefetching = true,
                     double prefetched_part = 1.0,
                     HostTier tier = HostTier::pinned)
      : allocator{device, options(is_prefetching, prefetched_part, tier)} {
    for (std::size_t const bytes : sizes) {
      away.push_back(std::make_unique<Buffer>(allocator, bytes));
      auto const lease = away.back()->acquire(Access::write, stream);
      kernels.write(device, stream, lease.data(), lease.size_bytes(), away.size());
    }
    for (auto const& buffer : away) {
      buffer->swap_out();
      wishes.blocks.push_back(buffer->id());
    }
    device.run_all();
  }
  WishBench(WishBench const&) = delete;
  WishBench& operator=(WishBench const&) = delete;
  ~WishBench() { allocator.retire_stream(stream); }

  [[nodiscard]] Allocator::Options
  options(bool is_prefetching, double prefetched_part, HostTier tier) const {
    Allocator::Options options{.capacity_bytes = 256_KiB};
    options.bounce_bytes = 0;
    if (tier == HostTier::file) {
      options.host.file = folder.path().string();
      options.host.file_bytes = 1_MiB;
      options.host.staging_bytes = 64_KiB;
      options.file_io = io;
    } else {
      options.host.pinned_bytes = 1_MiB;
      options.host.initial_pinned_bytes = 1_MiB;
    }
    options.prefetch = ByWish{wishes};
    options.paging.prefetching = is_prefetching;
    options.paging.prefetched_part = prefetched_part;
    return options;
  }

  void look_ahead() {
    Buffer resident{allocator, 4_KiB};
    (void)resident.acquire(Access::write, stream);
    device.run_all();
  }

  /// Which of the blocks are resident again.
  [[nodiscard]] std::vector<bool> back() {
    std::vector<bool> result;
    for (auto const& buffer : away) {
      result.push_back(buffer->residency() == Residency::device);
    }
    return result;
  }

  /// Whether each block has the bytes that were written to it.
  [[nodiscard]] bool are_whole() {
    for (std::size_t i = 0; i < away.size(); ++i) {
      auto const lease = away[i]->acquire(Access::read, stream);
      kernels.check(device, stream, lease.data(), lease.size_bytes(), i + 1);
      device.run_all();
    }
    return kernels.failures() == 0 && kernels.checks() == away.size();
  }

  TemporaryFolder folder;
  FaultyFileIo io;
  Wishes wishes;
  support::PatternKernels kernels;
  StubbornDevice device{{.capacity_bytes = 64_MiB, .granularity_bytes = 4_KiB}};
  StubbornDevice::stream_type stream = device.create_stream();
  Allocator allocator;
  std::vector<std::unique_ptr<Buffer>> away;
};

/// Two blocks, of which one was copied ahead of need to a file that has not taken the copy.
struct EarlyBench : private TemporaryFolder, support::SteppedBench<CopiedEarly> {
  static constexpr std::size_t bytes = 256_KiB;  // enough for a direct transfer

  EarlyBench() : EarlyBench{FaultyFileIo::reaching_device()} {}
  explicit EarlyBench(FaultyFileIo const& io)
      : SteppedBench{{.capacity_bytes = 64_MiB, .granularity_bytes = 4_KiB}, options(path(), io)} {
    {
      Buffer away{allocator, 4_KiB};
      write(away, 3);
      away.swap_out();
      write(buffer, 1);
      io.plant({.write_error = EIO});
      write(other, 2);  // looks ahead, since a block is away
    }
    REQUIRE(allocator.stats().evicted(spillway::EvictionReason::speculative).count == 1);
    device.run_all();
    io.plant({});
  }

  static Allocator::Options options(std::filesystem::path const& folder, FaultyFileIo const& io) {
    Allocator::Options options{.capacity_bytes = 2 * bytes};
    options.file_io = io;
    options.host.file = folder.string();
    options.host.file_bytes = 4_MiB;
    return options;
  }

  Buffer buffer{allocator, bytes};
  Buffer other{allocator, bytes};
};

}  // namespace

TEST_SUITE("pager") {
  TEST_CASE("DeviceAllocator: a repeated step is prefetched ahead of need, with the right bytes") {
    PagerBench<Scheduled> bench{256_KiB};
    std::vector<PagerBench<Scheduled>::Buffer> weights;
    for (std::uint64_t i = 0; i < 8; ++i) {
      weights.emplace_back(bench.allocator, 64_KiB);
      bench.write(weights.back(), i);
    }
    for (int step = 0; step < 5; ++step) {
      bench.allocator.begin_step();
      for (std::uint64_t i = 0; i < 8; ++i) {
        bench.check(weights[i], i);
      }
      bench.run();
    }
    auto const stats = bench.allocator.stats();
    CHECK(stats.prefetch_hits + stats.prefetch_late > 0);
    // With LRU all eight would come in in each of the five steps.
    CHECK(stats.swap_ins.count < 40);
    CHECK(bench.kernels.checks() == 40);
  }

  TEST_CASE("DeviceAllocator: above the high watermark blocks leave until the low one is reached") {
    PagerBench<Plain>::Allocator::Options options = PagerBench<Plain>::options(256_KiB, 64_MiB);
    options.paging.high_watermark = 0.75;
    options.paging.low_watermark = 0.5;
    StubbornDevice device{{.capacity_bytes = 64_MiB}};
    PagerBench<Plain>::Allocator allocator{device, options};
    auto const stream = device.create_stream();
    std::vector<PagerBench<Plain>::Buffer> buffers;
    for (std::size_t i = 0; i < 4; ++i) {
      buffers.emplace_back(allocator, 64_KiB);
      (void)buffers.back().acquire(Access::write, stream);
    }
    (void)buffers[3].acquire(Access::read, stream);
    CHECK(allocator.stats().evicted(spillway::EvictionReason::watermark).count == 2);
    CHECK(allocator.stats().resident.bytes.current == 128_KiB);
    CHECK(allocator.stats().evicted(spillway::EvictionReason::pressure).count == 0);
    buffers.clear();
    allocator.retire_stream(stream);
  }

  TEST_CASE("LookAhead: blocks that the policy names come in, unless prefetching is off") {
    for (bool const is_prefetching : {true, false}) {
      WishBench bench{{64_KiB, 64_KiB}, is_prefetching};
      bench.look_ahead();
      CHECK(bench.back() == std::vector{is_prefetching, is_prefetching});
      CHECK(bench.are_whole());
      CHECK(bench.allocator.stats().prefetch_hits == (is_prefetching ? 2 : 0));
    }
  }

  TEST_CASE("LookAhead: a block used before its copy has run is late, one never used is wasted") {
    WishBench bench{{48_KiB, 48_KiB, 48_KiB}};
    {
      WishBench::Buffer resident{bench.allocator, 4_KiB};
      (void)resident.acquire(Access::write, bench.stream);
    }
    (void)bench.away[0]->acquire(Access::read, bench.stream);
    bench.away[1]->swap_out();
    bench.away[2].reset();
    auto const stats = bench.allocator.stats();
    CHECK(stats.prefetch_hits == 0);
    CHECK(stats.prefetch_late == 1);
    CHECK(stats.prefetch_wasted == 2);
    bench.device.run_all();
  }

  TEST_CASE("LookAhead: a block whose bytes are lost stays away, and its owner is still told") {
    WishBench bench{{64_KiB, 64_KiB}, true, 1.0, HostTier::file};
    bench.io.plant({.read_error = EIO, .failing_to = 64_KiB});
    (void)bench.away[0]->acquire(Access::read, bench.stream);
    bench.device.run_all();
    bench.io.plant({});
    bench.away[0]->swap_out();
    CHECK(bench.back() == std::vector{false, true});

    bench.away[1]->swap_out();
    bench.look_ahead();
    CHECK(bench.back() == std::vector{false, true});

    (void)bench.away[0]->acquire(Access::write, bench.stream);
    CHECK_THROWS_AS(bench.allocator.begin_step(), FileTierError);
  }

  TEST_CASE("LookAhead: the bytes that come in ahead of need stay within the policy's limit") {
    WishBench bench{{64_KiB, 64_KiB, 64_KiB}};
    bench.wishes.most_bytes = 128_KiB;
    bench.look_ahead();
    CHECK(bench.back() == std::vector{true, true, false});
    bench.look_ahead();  // nothing was used meanwhile
    CHECK(bench.back() == std::vector{true, true, false});
    (void)bench.away[0]->acquire(Access::read, bench.stream);
    bench.look_ahead();
    CHECK(bench.back() == std::vector{true, true, true});
  }

  TEST_CASE("LookAhead: the bytes that come in also stay within a part of the capacity") {
    WishBench bench{{32_KiB, 32_KiB, 32_KiB}, true, 0.3};
    bench.look_ahead();  // 0.3 of 256 KiB
    CHECK(bench.back() == std::vector{true, true, false});
    bench.allocator.set_capacity(128_KiB);
    (void)bench.away[0]->acquire(Access::read, bench.stream);
    bench.look_ahead();
    CHECK(bench.back() == std::vector{true, true, false});
    bench.allocator.set_capacity(256_KiB);
    bench.look_ahead();
    CHECK(bench.back() == std::vector{true, true, true});
  }

  TEST_CASE("LookAhead: a block that exceeds the limit alone does not keep back later ones") {
    WishBench bench{{64_KiB, 96_KiB, 32_KiB}};
    bench.wishes.most_bytes = 96_KiB - 1;
    bench.look_ahead();
    CHECK(bench.back() == std::vector{true, false, false});
    bench.wishes.most_bytes = 96_KiB;
    bench.look_ahead();
    CHECK(bench.back() == std::vector{true, false, false});  // it waits for those in flight
    (void)bench.away[0]->acquire(Access::read, bench.stream);
    bench.look_ahead();
    CHECK(bench.back() == std::vector{true, true, false});
    (void)bench.away[1]->acquire(Access::read, bench.stream);

    WishBench part{{128_KiB, 32_KiB, 32_KiB}, true, 0.3};
    part.look_ahead();  // 0.3 of 256 KiB
    CHECK(part.back() == std::vector{false, true, true});
  }

  TEST_CASE("LookAhead: operands of a dropped block come in, the block itself does not") {
    WishBench bench{{64_KiB, 64_KiB, 64_KiB}};
    bench.wishes.blocks.clear();
    auto const& [x, y, z] = std::tie(bench.away[0], bench.away[1], bench.away[2]);
    auto const make = [&bench](auto& block, std::uint64_t seed, auto& operand) {
      {
        auto const lease = block.acquire(Access::write, bench.stream);
        bench.kernels.write(bench.device, bench.stream, lease.data(), lease.size_bytes(), seed);
      }
      bench.allocator.set_recipe(
          block.id(),
          {operand.id()},
          std::chrono::nanoseconds{0},
          [&bench, seed](auto stream, std::span<void const* const> operands, void* result) {
            bench.kernels.check(
                bench.device, stream, const_cast<void*>(operands[0]), 64_KiB, seed - 1);  // NOLINT
            bench.kernels.write(bench.device, stream, result, 64_KiB, seed);
          });
    };
    make(*y, 2, *x);
    make(*z, 3, *y);
    y->swap_out();
    z->swap_out();
    REQUIRE(x->residency() == Residency::host);
    REQUIRE(y->residency() == Residency::none);
    REQUIRE(z->residency() == Residency::none);
    bench.wishes.blocks = {z->id()};
    bench.look_ahead();
    CHECK(x->residency() == Residency::device);
    CHECK(y->residency() == Residency::none);
    CHECK(z->residency() == Residency::none);
    CHECK(bench.allocator.stats().recomputations.count == 0);
    (void)z->acquire(Access::read, bench.stream);
    bench.device.run_all();
    CHECK(bench.allocator.stats().recomputations.count == 2);
    CHECK(bench.allocator.stats().swap_ins.count == 1);
    CHECK(bench.kernels.failures() == 0);
  }

  TEST_CASE("LookAhead: blocks needed later do not take the room of blocks needed first") {
    WishBench bench{{160_KiB, 32_KiB}};
    WishBench::Buffer const other{bench.allocator, 128_KiB};
    bench.look_ahead();
    CHECK(bench.back() == std::vector{false, false});
    bench.wishes.blocks.erase(bench.wishes.blocks.begin());
    bench.look_ahead();
    CHECK(bench.back() == std::vector{false, true});
  }

  TEST_CASE("LookAhead: a failed copy ahead of need does not make an acquire fail") {
    WishBench bench{{64_KiB, 64_KiB}};
    bench.device.fail_copy(1);
    CHECK_NOTHROW(bench.look_ahead());
    CHECK(bench.back() == std::vector{false, false});
    CHECK(bench.are_whole());
  }

  TEST_CASE("LookAhead: a block is not clean if a file has not taken its copy ahead of need") {
    EarlyBench bench;
    EarlyBench::Buffer const next{bench.allocator, EarlyBench::bytes};
    CHECK(bench.buffer.residency() != Residency::device);
    bench.check(bench.buffer, 1);
    bench.run();
    CHECK(bench.kernels.checks() == 1);
  }

  TEST_CASE("LookAhead: a copy ahead of need that a file has not taken is no loss") {
    SUBCASE("the block is freed on the device") {
      EarlyBench bench;
      bench.buffer.reset();
      bench.allocator.begin_step();
    }
    SUBCASE("the block is overwritten on the device") {
      EarlyBench bench;
      bench.write(bench.buffer, 4);
      bench.buffer.swap_out();
      bench.check(bench.buffer, 4);
      bench.run();
      CHECK(bench.kernels.checks() == 1);
      bench.allocator.begin_step();
    }
  }
}
