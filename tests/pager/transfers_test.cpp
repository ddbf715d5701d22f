// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/sim/model_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/pager/block_state.hpp>
#include <spillway/pager/transfers.hpp>
#include <spillway/policy/codec/as_bfloat16.hpp>
#include <spillway/policy/codec/identity.hpp>
#include <spillway/policy/codec/zero_bitmap.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/prefetch/reverse_order.hpp>
#include <spillway/schedule/use.hpp>
#include <spillway/sim.hpp>
#include <spillway/swappable_buffer.hpp>
#include <spillway/swappable_tensor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <set>
#include <span>
#include <vector>

#include <support/pager_bench.hpp>
#include <support/small_allocator.hpp>

TEST_SUITE("pager") {
  using namespace spillway;
  using namespace spillway::detail;
  using support::KnownBytes;
  using support::PagerBench;
  using support::Plain;
  using support::small_options;
  using support::SmallBench;
  using support::SmallBuffer;
  using support::SteppedBench;

  namespace {

  constexpr std::size_t capacity_bytes = 512_KiB;

  /// An allocator that is full of small blocks with known bytes.
  struct FullOfSmallBlocks {
    explicit FullOfSmallBlocks(std::size_t block_bytes, SmallBench& the_bench) : bench{the_bench} {
      for (std::size_t i = 0; i < capacity_bytes / round_up(block_bytes, granule_bytes); ++i) {
        blocks.push_back(
            std::make_unique<KnownBytes>(bench, block_bytes, static_cast<std::uint8_t>(i)));
      }
    }

    /// Evicts all blocks, by one large block that is freed again.
    void send_all_out() { SmallBuffer const large{bench.allocator, capacity_bytes}; }

    [[nodiscard]] std::size_t torn() {
      std::size_t count = 0;
      for (auto const& block : blocks) {
        count += block->is_intact() ? 0U : 1U;
      }
      return count;
    }

    SmallBench& bench;
    std::vector<std::unique_ptr<KnownBytes>> blocks;
  };

  /// A codec that cannot decode what it encoded itself.
  struct Forgetful : ZeroBitmap {
    static bool decode(std::span<std::byte const> /*from*/, std::span<std::byte> /*to*/) noexcept {
      return false;
    }
  };

  /// Elements of which every fourth is not 0.
  [[nodiscard]] std::vector<float> sparse_elements(std::size_t count) {
    std::vector<float> elements(count);
    for (std::size_t i = 0; i < count; i += 4) {
      elements[i] = 1.0F + static_cast<float>(i);
    }
    return elements;
  }

  /// A pass over small blocks and back, all of which were evicted in between.
  struct ThereAndBack {
    struct Policies : SimPolicies {
      using eviction = LruEviction;
      using prefetch = ReverseOrder;
    };
    using Allocator = DeviceAllocator<Policies>;
    using Buffer = SwappableBuffer<Allocator>;

    static constexpr std::size_t count = 40;
    static constexpr std::size_t bytes = 1000;

    ThereAndBack() {
      for (std::size_t i = 0; i < count; ++i) {
        blocks.push_back(std::make_unique<Buffer>(allocator, bytes));
        auto const lease = blocks.back()->acquire(Access::write, stream);
        device.fill(lease.data(), static_cast<unsigned char>(i + 1), bytes, stream);
      }
      Buffer const large{allocator, capacity_bytes};
    }
    ThereAndBack(ThereAndBack const&) = delete;
    ThereAndBack& operator=(ThereAndBack const&) = delete;
    ~ThereAndBack() {
      allocator.retire_stream(stream);
      device.synchronize(stream);
      device.destroy_stream(stream);
    }

    [[nodiscard]] bool is_intact(std::size_t i) {
      std::array<unsigned char, bytes> read{};
      auto const lease = blocks[i]->acquire(Access::read, stream);
      allocator.copy_to_host_sync(read.data(), lease.data(), bytes, stream);
      return std::all_of(
          read.begin(), read.end(), [&](unsigned char byte) { return byte == i + 1; });
    }

    SimApi device{{.capacity_bytes = 64_MiB}};
    SimApi::stream_type stream = device.create_stream();
    Allocator allocator{device,
                        {.capacity_bytes = capacity_bytes,
                         .bounce_bytes = 0,
                         .host = {.pinned_bytes = 1_MiB, .slab_bytes = 1_MiB}}};
    std::vector<std::unique_ptr<Buffer>> blocks;
  };

  }  // namespace

  TEST_CASE("DeviceAllocator: adjacent small blocks that leave together are one or two copies") {
    SmallBench bench{small_options(capacity_bytes)};
    FullOfSmallBlocks full{4096, bench};
    SimCalls const before = bench.device.calls();

    full.send_all_out();

    // The first blocks do not wait for work that only the last ones have to wait for.
    CHECK(bench.device.calls().copies_to_host <= before.copies_to_host + 2);
    CHECK(bench.device.calls().bytes_to_host == before.bytes_to_host + capacity_bytes);
    CHECK(bench.allocator.stats().swap_outs.count == 128);
    CHECK(full.torn() == 0);
  }

  TEST_CASE("DeviceAllocator: a block is copied out while work that only reads it runs") {
    constexpr std::uint64_t kernel_ns = 1'000'000;
    // In a room for two blocks, one is written and then used again, and leaves for a third one.
    auto const nanoseconds = [](Access last_access) {
      ModelApi device{{.capacity_bytes = 2_MiB, .link_bytes_per_second = 1'000'000'000}};
      DeviceAllocator<PoliciesFor<ModelApi>> allocator{
          device,
          {.capacity_bytes = capacity_bytes,
           .bounce_bytes = 0,
           .host = {.pinned_bytes = 1_MiB, .slab_bytes = 1_MiB}}};
      auto const writer = device.create_stream();
      auto const reader = device.create_stream();
      auto const use = [&](BlockId id, Access access, auto stream) {
        auto const lease = allocator.acquire(id, access, stream);
        device.compute(stream, kernel_ns);
      };
      BlockId const block = allocator.allocate(capacity_bytes / 2);
      BlockId const other = allocator.allocate(capacity_bytes / 2);
      use(other, Access::write, writer);
      use(block, Access::write, writer);
      use(block, last_access, reader);
      allocator.swap_out(block);
      BlockId const third = allocator.allocate(capacity_bytes / 2);
      use(third, Access::write, writer);
      device.synchronize(writer);
      std::uint64_t const end_ns = device.clock_ns();
      for (BlockId const id : {block, other, third}) {
        allocator.deallocate(id);
      }
      for (auto const stream : {writer, reader}) {
        allocator.retire_stream(stream);
        device.destroy_stream(stream);
      }
      return end_ns;
    };

    // The copy takes less time than a kernel. The third block gets the range, and so waits for the
    // kernel that reads all the same.
    constexpr std::uint64_t copy_ns = capacity_bytes / 2;
    CHECK(nanoseconds(Access::read) == 4 * kernel_ns);
    CHECK(nanoseconds(Access::read_write) == 4 * kernel_ns + copy_ns);
  }

  TEST_CASE(
      "DeviceAllocator: in a full host pool outdated copies are dropped first, then the newest") {
    auto options = small_options(1_MiB);
    options.host.pinned_bytes = 256_KiB;
    options.host.slab_bytes = 256_KiB;
    SmallBench bench{options};
    auto const make = [&](std::uint8_t seed) {
      return std::make_unique<KnownBytes>(bench, 64_KiB, seed);
    };
    std::array<std::unique_ptr<KnownBytes>, 4> const blocks{make(0), make(1), make(2), make(3)};
    for (auto const& block : blocks) {
      block->buffer().swap_out();
    }
    for (std::size_t const i : {3U, 2U, 0U, 1U}) {
      Access const access = i == 2 ? Access::read_write : Access::read;
      (void)blocks[i]->buffer().acquire(access, bench.stream);
    }
    auto const copies = [&] { return bench.allocator.stats().swap_outs.count; };
    std::uint64_t const before = copies();

    // Both blocks need a slot: the first gets that of block 2, the second that of block 1.
    auto const first = make(4);
    first->buffer().swap_out();
    auto const second = make(5);
    second->buffer().swap_out();
    CHECK(copies() == before + 2);
    blocks[0]->buffer().swap_out();
    blocks[3]->buffer().swap_out();
    CHECK(copies() == before + 2);  // both kept their slots
    CHECK_THROWS_AS(blocks[1]->buffer().swap_out(), OutOfHostMemory);
    CHECK_THROWS_AS(blocks[2]->buffer().swap_out(), OutOfHostMemory);
    for (auto const& block : blocks) {
      CHECK(block->is_intact());
    }
    CHECK(first->is_intact());
    CHECK(second->is_intact());
  }

  TEST_CASE("DeviceAllocator: small blocks that are not adjacent leave in batches") {
    SmallBench bench{small_options(capacity_bytes)};
    FullOfSmallBlocks full{1000, bench};  // rounded up: the bytes in between are nobody's
    SimCalls const before = bench.device.calls();

    full.send_all_out();

    std::size_t const blocks = full.blocks.size();
    CHECK(bench.device.calls().copies_to_host == before.copies_to_host + blocks);
    CHECK(bench.device.calls().copy_batches == before.copy_batches + 2);
    CHECK(full.torn() == 0);
  }

  TEST_CASE("DeviceAllocator: blocks whose copies failed are unchanged") {
    for (std::uint64_t const nth : {1U, 2U, 300U, 512U}) {
      CAPTURE(nth);
      SmallBench bench{small_options(capacity_bytes)};
      FullOfSmallBlocks full{1000, bench};
      bench.device.fail_copy(nth);

      CHECK_THROWS_AS(full.send_all_out(), DeviceError);

      CHECK(full.torn() == 0);
      full.send_all_out();
      CHECK(full.torn() == 0);
    }
  }

  TEST_CASE("DeviceAllocator: when the second batch fails the blocks of the first have left") {
    auto options = small_options(capacity_bytes);
    SmallBench bench{options};
    FullOfSmallBlocks full{500, bench};
    REQUIRE(full.blocks.size() > 512);
    bench.device.fail_copy(600);

    CHECK_THROWS_AS(full.send_all_out(), DeviceError);

    CHECK(bench.allocator.stats().swap_outs.count == 512);
    CHECK(full.torn() == 0);
  }

  TEST_CASE("DeviceAllocator: small blocks are prefetched together") {
    ThereAndBack now;
    std::uint64_t const batches = now.device.calls().copy_batches;
    std::size_t i = ThereAndBack::count;
    while (now.device.calls().copy_batches == batches) {
      REQUIRE(i > 20);
      CHECK(now.is_intact(--i));  // before it is known to be a backward pass
    }
    std::size_t const left = ThereAndBack::count - now.allocator.stats().swap_ins.count;
    CHECK(left + 8 < i);
    while (i > 0) {
      CHECK(now.is_intact(--i));
    }
    Stats const stats = now.allocator.stats();
    CHECK(stats.swap_ins.count == ThereAndBack::count);
    CHECK(stats.swap_ins.bytes == ThereAndBack::count * 1_KiB);
  }

  TEST_CASE(
      "DeviceAllocator: if some blocks cannot be swapped in, the others are, and all stay intact") {
    for (std::uint64_t nth = 1; nth <= 12; ++nth) {
      CAPTURE(nth);
      ThereAndBack now;
      for (std::size_t i = ThereAndBack::count; i-- > 30;) {
        now.device.fail_copy(nth);  // the copy of this acquire, one of a prefetch, or none
        bool is_intact = false;
        try {
          is_intact = now.is_intact(i);
        } catch (DeviceError const&) {
          now.device.fail_copy(0);
          is_intact = now.is_intact(i);
        }
        CHECK(is_intact);
      }
      now.device.fail_copy(0);
      for (std::size_t i = ThereAndBack::count; i-- > 0;) {
        CHECK(now.is_intact(i));
      }
    }
  }

  TEST_CASE(
      "DeviceAllocator: with the host pool full, blocks that need no room there still leave") {
    PagerBench<Plain> bench{128_KiB, 64_KiB};
    PagerBench<Plain>::Buffer outside{bench.allocator, 64_KiB};
    bench.write(outside, 1);
    outside.swap_out();  // fills the pool
    PagerBench<Plain>::Buffer dirty{bench.allocator, 64_KiB};
    bench.write(dirty, 2);
    PagerBench<Plain>::Buffer empty{bench.allocator, 64_KiB};

    // The dirty block is the least recently used, and has nowhere to go.
    PagerBench<Plain>::Buffer more{bench.allocator, 64_KiB};
    CHECK(dirty.residency() == Residency::device);
    CHECK(empty.residency() == Residency::none);
    CHECK_THROWS_AS(dirty.swap_out(), OutOfHostMemory);
    CHECK(dirty.residency() == Residency::device);

    bench.write(more, 3);
    CHECK_THROWS_AS((void)outside.acquire(Access::read, bench.stream()), OutOfDeviceMemory);
    more.reset();
    bench.check(outside, 1);
    bench.check(dirty, 2);
    bench.run();
    CHECK(bench.kernels.checks() == 2);
  }

  TEST_CASE("DeviceAllocator: a host copy of a resident block makes way for other blocks") {
    PagerBench<Plain> bench{128_KiB, 64_KiB};
    PagerBench<Plain>::Buffer a{bench.allocator, 64_KiB};
    bench.write(a, 1);
    a.swap_out();
    bench.check(a, 1);  // resident, and its host copy fills the pool
    PagerBench<Plain>::Buffer b{bench.allocator, 64_KiB};
    bench.write(b, 2);
    b.swap_out();
    CHECK(bench.allocator.stats().swap_outs.count == 2);
    bench.check(a, 1);
    a.reset();
    bench.check(b, 2);
    bench.run();
    CHECK(bench.kernels.checks() == 3);
  }

  TEST_CASE("DeviceAllocator: a compaction whose copies fail keeps every block intact") {
    // A slide by 4 KiB of a block of 48 KiB takes twelve pieces; each of them fails once.
    for (std::size_t nth = 1; nth <= 13; ++nth) {
      PagerBench<Plain> bench{64_KiB};
      PagerBench<Plain>::Buffer first{bench.allocator, 4_KiB};
      PagerBench<Plain>::Buffer second{bench.allocator, 48_KiB};
      PagerBench<Plain>::Buffer third{bench.allocator, 8_KiB};
      bench.write(first, 1);
      bench.write(second, 2);
      bench.write(third, 3);
      first.reset();  // 4 KiB free in front, 4 KiB behind
      bench.device.fail_copy(nth);
      std::size_t failures = 0;
      try {
        bench.allocator.compact();
      } catch (DeviceError const&) {
        ++failures;
      }
      bench.device.fail_copy(0);
      CAPTURE(nth);
      CHECK((failures == 1 || nth > 2));
      bench.check(second, 2);
      bench.check(third, 3);
      bench.run();
      CHECK(bench.kernels.checks() == 2);
    }
  }

  TEST_CASE("DeviceAllocator: what comes next waits for the part of a failed copy that runs") {
    using Bench = SteppedBench<Plain>;
    Bench::Allocator::Options options{.capacity_bytes = 64_KiB, .bounce_bytes = 0};
    options.host.pageable_bytes = 1_MiB;
    options.host.staging_bytes = 4_KiB;  // a block takes several copies
    Bench bench{{.capacity_bytes = 64_MiB, .granularity_bytes = 4_KiB}, options};
    Bench::Buffer block{bench.allocator, 32_KiB};
    SUBCASE("out: the block is overwritten") {
      bench.fill(block, 1);
      bench.device.copies_left = 2;
      CHECK_THROWS_AS(block.swap_out(), DeviceError);
      bench.device.copies_left = SIZE_MAX;
      CHECK_NOTHROW(bench.fill(block, 2));
    }
    SUBCASE("in: another block gets the range") {
      bench.write(block, 1);
      block.swap_out();
      bench.device.copies_left = 2;
      CHECK_THROWS_AS((void)block.acquire(Access::read, bench.stream()), DeviceError);
      bench.device.copies_left = SIZE_MAX;
      {
        Bench::Buffer other{bench.allocator, 64_KiB};
        CHECK_NOTHROW(bench.fill(other, 2));
      }
      bench.check(block, 1);
    }
    bench.run();
  }

  TEST_CASE("DeviceAllocator: bytes lost when a copy fails are never handed out") {
    PagerBench<Plain> bench{64_KiB};
    PagerBench<Plain>::Buffer first{bench.allocator, 4_KiB};
    PagerBench<Plain>::Buffer second{bench.allocator, 60_KiB};
    bench.write(first, 1);
    bench.write(second, 2);
    first.reset();
    bench.device.copies_left = 3;  // of a slide in pieces; the way back is refused too
    bool is_torn = false;
    try {
      bench.allocator.compact();
    } catch (BlockLost const&) {
      is_torn = true;
    } catch (DeviceError const&) {
    }
    bench.device.copies_left = SIZE_MAX;
    if (is_torn) {
      CHECK_THROWS_AS((void)second.acquire(Access::read, bench.stream()), BlockLost);
      bench.write(second, 3);
      bench.check(second, 3);
    } else {
      bench.check(second, 2);
    }
    bench.run();
  }

  TEST_CASE(
      "DeviceAllocator: a policy without memory for one block does not keep others from leaving") {
    /// Has no memory for a block that is inserted a second time.
    struct Strained : LruEviction {
      std::set<BlockId> known;
      void on_insert(BlockId id, std::size_t bytes, Use use) {
        if (!known.insert(id).second) {
          throw std::bad_alloc{};
        }
        LruEviction::on_insert(id, bytes, use);
      }
    };
    struct Policies : Plain {
      using eviction = Strained;
    };
    PagerBench<Policies> bench{384_KiB, 128_KiB};
    PagerBench<Policies>::Buffer first{bench.allocator, 128_KiB};
    PagerBench<Policies>::Buffer second{bench.allocator, 128_KiB};
    bench.write(first, 1);
    bench.write(second, 2);
    PagerBench<Policies>::Buffer third{bench.allocator, 128_KiB};  // leaves without a copy
    // The host has room for one block, so the second stays.
    CHECK_THROWS_AS((PagerBench<Policies>::Buffer{bench.allocator, 384_KiB}), std::bad_alloc);
    std::size_t in_transit = 0;
    bench.allocator.for_each_block(
        [&](BlockId, BlockRecord const& block) { in_transit += block.is_in_transit() ? 1U : 0U; });
    REQUIRE(in_transit == 0);
    bench.check(second, 2);
    bench.run();
  }

  TEST_CASE("DeviceAllocator: of equal victims, those that a codec makes smaller leave") {
    constexpr std::size_t blocks = 16;
    SimApi device;
    DeviceAllocator<SimPolicies> allocator{
        device, {.capacity_bytes = 12 * 64_KiB, .host = {.pinned_bytes = 16_MiB}}};
    auto const stream = allocator.create_stream();
    auto const elements = sparse_elements(64_KiB / sizeof(float));
    std::vector<Tensor<float, 1>> tensors;
    for (std::size_t i = 0; i < blocks; ++i) {
      tensors.push_back(make_tensor<float>(allocator, {elements.size()}));
      tensors.back().copy_from_host_sync(elements, stream);
      if (i % 2 == 1) {
        tensors.back().set_codec<ZeroBitmap>();
      }
    }
    std::uint64_t plain_bytes = 0;
    std::uint64_t coded_bytes = 0;
    for (int step = 0; step < 8; ++step) {
      allocator.begin_step();
      std::uint64_t const all_before = allocator.stats().swap_outs.bytes;
      std::uint64_t const coded_before = allocator.host_stats().encoded_raw_bytes;
      for (std::size_t i = 0; i < 2 * blocks; ++i) {
        auto const lease =
            tensors[i < blocks ? i : 2 * blocks - 1 - i].acquire<Access::read_write>(stream);
      }
      allocator.synchronize();
      std::uint64_t const coded = allocator.host_stats().encoded_raw_bytes - coded_before;
      if (step >= 4) {
        coded_bytes += coded;
        plain_bytes += allocator.stats().swap_outs.bytes - all_before - coded;
      }
    }
    CAPTURE(coded_bytes);
    CAPTURE(plain_bytes);
    CHECK(coded_bytes > 0);
    CHECK(plain_bytes == 0);
  }

  TEST_CASE(
      "DeviceAllocator: a block with a codec takes fewer bytes on the host and comes back intact") {
    SmallBench bench;
    auto tensor = make_tensor<float>(bench.allocator, {100'000});
    auto const expected = sparse_elements(tensor.size());
    tensor.copy_from_host_sync(expected, bench.stream);
    tensor.set_codec<ZeroBitmap>();
    for (int round = 0; round < 3; ++round) {
      tensor.swap_out();
      bench.allocator.synchronize();
      HostPoolStats const stats = bench.allocator.host_stats();
      CHECK(stats.tier(HostTier::pinned).slot_count == 1);
      CHECK(stats.tier(HostTier::pinned).used_bytes < 120'000);
      std::vector<float> found(tensor.size());
      tensor.copy_to_host_sync(found, bench.stream);
      CHECK(found == expected);
      tensor.copy_from_host_sync(expected, bench.stream);  // a slot with a codec takes one write
    }
    CHECK(bench.allocator.stats().swap_outs.count == 3);

    tensor.set_codec<AsBfloat16>();
    tensor.swap_out();
    std::vector<float> rounded(tensor.size());
    tensor.copy_to_host_sync(rounded, bench.stream);
    CHECK(rounded[4] == 5.0F);
    CHECK(rounded[2000] == 2000.0F);  // 2001 has 11 bits, and bfloat16 keeps 8
    tensor.set_codec<Identity>();
    tensor.copy_from_host_sync(expected, bench.stream);
    tensor.swap_out();
    CHECK(bench.allocator.host_stats().tier(HostTier::pinned).used_bytes >= 400'000);
  }

  TEST_CASE("DeviceAllocator: a block that cannot be decoded is an error, and others are intact") {
    SmallBench bench;
    auto lost = make_tensor<float>(bench.allocator, {50'000});
    auto whole = make_tensor<float>(bench.allocator, {50'000});
    auto const expected = sparse_elements(lost.size());
    for (auto* tensor : {&lost, &whole}) {
      tensor->copy_from_host_sync(expected, bench.stream);
    }
    lost.set_codec<Forgetful>();
    whole.set_codec<ZeroBitmap>();
    lost.swap_out();
    whole.swap_out();
    auto const read = [&] {
      auto const lease = lost.acquire_read(bench.stream);
      bench.allocator.synchronize();
    };
    try {
      read();  // its copy may be in flight
    } catch (FileTierError const&) {
    }
    CHECK_THROWS_AS(read(), FileTierError);
    std::vector<float> found(whole.size());
    whole.copy_to_host_sync(found, bench.stream);
    CHECK(found == expected);
    lost.copy_from_host_sync(expected, bench.stream);  // and can be written again
    lost.copy_to_host_sync(found, bench.stream);
    CHECK(found == expected);
  }
}
