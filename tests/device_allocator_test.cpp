// SPDX-License-Identifier: Apache-2.0
#include <spillway/concepts/compaction_policy.hpp>
#include <spillway/concepts/fit_policy.hpp>
#include <spillway/core/range_table.hpp>
#include <spillway/defrag_arena.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/page_arena.hpp>
#include <spillway/policies.hpp>
#include <spillway/policy/compaction/sliding_compaction.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/fit/segregated_fit.hpp>
#include <spillway/sim.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <support/death.hpp>
#include <support/small_allocator.hpp>
#include <support/stepped_policies.hpp>
#include <support/temporary_folder.hpp>

using namespace spillway;
using namespace spillway::literals;
using support::SmallBench;

namespace {

/// Evicts only blocks of at least `least_bytes`.
class LargeOnly : public LruEviction {
 public:
  LargeOnly() = default;
  explicit LargeOnly(std::size_t least_bytes) : least_bytes_{least_bytes} {}

  template <class Inspect>
  [[nodiscard]] std::optional<BlockId> victim(std::size_t short_bytes,
                                              Inspect inspect) const noexcept {
    return LruEviction::victim(short_bytes, [&](BlockId id) noexcept {
      auto const candidate = inspect(id);
      return candidate && candidate->bytes >= least_bytes_ ? candidate : std::nullopt;
    });
  }

 private:
  std::size_t least_bytes_ = 0;
};

struct LargeOnlyPolicies : support::SmallPolicies {
  using eviction = LargeOnly;
};
using LargeOnlyAllocator = DeviceAllocator<LargeOnlyPolicies>;

/// Counts how often it is asked, in a counter of the caller that all its copies share.
class CountedFit : public SegregatedFit {
 public:
  CountedFit() = default;
  explicit CountedFit(int& asked) : asked_{&asked} {}

  [[nodiscard]] Fit find(RangeTable const& table, std::uint32_t count) const noexcept {
    *asked_ += asked_ != nullptr ? 1 : 0;
    return SegregatedFit::find(table, count);
  }

 private:
  int* asked_ = nullptr;
};

/// The same for the number of plans requested.
class CountedCompaction {
 public:
  static constexpr bool moves_blocks = true;

  CountedCompaction() = default;
  explicit CountedCompaction(int& asked) : asked_{&asked} {}

  [[nodiscard]] std::optional<LayoutPlan>
  plan(Layout const& layout, std::uint32_t count, std::uint64_t budget) {
    *asked_ += asked_ != nullptr ? 1 : 0;
    return sliding_.plan(layout, count, budget);
  }

 private:
  int* asked_ = nullptr;
  SlidingCompaction sliding_;
};

template <class ArenaChoice>
struct CountedPolicies : support::SmallPolicies {
  using arena = ArenaChoice;
  using fit = CountedFit;
  using compaction = CountedCompaction;
};

/// Notes how many reservations had been released when the allocator announced a release.
struct TrimWatch {
  static constexpr bool is_enabled = true;

  SimApi const* device = nullptr;
  std::vector<std::uint64_t> releases;

  void on_record(Record const& record) noexcept {
    if (record.kind == RecordKind::trim) {
      releases.push_back(device->calls().releases);
    }
  }
};
struct WatchedPolicies : support::SmallPolicies {
  using observer = TrimWatch;
};

/// Its calls do not return until another thread is about to fork.
struct SlowObserver {
  static constexpr bool is_enabled = true;

  std::atomic<bool> is_being_told{false};
  std::atomic<bool> is_forking{false};
  std::atomic<int> calls{0};  // that have not returned

  void on_record(Record const& /*record*/) noexcept {
    ++calls;
    is_being_told = true;
    while (!is_forking) {
      std::this_thread::yield();
    }
    for (int i = 0; i < 10'000; ++i) {
      std::this_thread::yield();
    }
    --calls;
  }
};
struct SlowlyObservedPolicies : support::SmallPolicies {
  using observer = SlowObserver;
};

/// Fills 1 MiB with a small block and large ones, then asks for more.
/// @returns where the small one is
Residency residency_of_small(LargeOnly eviction) {
  LargeOnlyAllocator::Options options{.capacity_bytes = 1_MiB, .bounce_bytes = 0};
  options.host.pinned_bytes = 4_MiB;
  options.eviction = eviction;
  LargeOnlyAllocator memory{options};
  auto const stream = memory.create_stream();
  std::vector<SwappableBuffer<LargeOnlyAllocator>> blocks;
  blocks.emplace_back(memory, 64_KiB);
  for (int i = 0; i < 3; ++i) {
    blocks.emplace_back(memory, 320_KiB);
  }
  for (auto& block : blocks) {
    block.acquire_write(stream).release();
  }
  SwappableBuffer<LargeOnlyAllocator> const more{memory, 64_KiB};
  memory.synchronize();
  return blocks.front().residency();
}

/// Makes its allocator in the default initializer of a member, where g++ 12 forgets to emit default
/// constructors that only the default initializers of the options call.
template <class Policies>
class Program {
 public:
  [[nodiscard]] std::size_t capacity() const { return memory_.stats().capacity_bytes; }

 private:
  typename Policies::device device_;
  DeviceAllocator<Policies> memory_{device_, {.capacity_bytes = 1_MiB}};
};

/// Twice as many known bytes as the device holds, with a file behind the host's memory.
struct FileBench {
  explicit FileBench(std::size_t file_bytes) : bench{options(folder, file_bytes)} {
    for (unsigned i = 0; i < 8; ++i) {
      known.emplace_back(bench, 256_KiB, static_cast<std::uint8_t>(i));
    }
  }
  static support::SmallAllocator::Options options(TemporaryFolder const& folder,
                                                  std::size_t file_bytes) {
    auto options = support::small_options(1_MiB);
    options.host.file_bytes = file_bytes;
    options.host.file = folder.path();
    options.host.staging_bytes = 64_KiB;
    return options;
  }

  TemporaryFolder folder;
  SmallBench bench;
  std::deque<support::KnownBytes> known;
};

}  // namespace

TEST_SUITE("device_allocator") {
  TEST_CASE("DeviceAllocator: the eviction policy is constructed with the given parameters") {
    CHECK(residency_of_small(LargeOnly{}) == Residency::host);
    CHECK(residency_of_small(LargeOnly{100_KiB}) == Residency::device);
  }

  TEST_CASE("DeviceAllocator: fit and compaction are constructed with the given parameters") {
    using Allocator = DeviceAllocator<CountedPolicies<MovableBlocks>>;
    int fits = 0;
    int plans = 0;
    Allocator::Options options{.capacity_bytes = 1_MiB, .bounce_bytes = 0};
    options.paging.swapping = false;
    options.fit = CountedFit{fits};
    options.compaction = CountedCompaction{plans};
    Allocator memory{options};
    std::vector<BlockId> blocks;
    for (int i = 0; i < 4; ++i) {
      blocks.push_back(memory.allocate(256_KiB));
    }
    CHECK(fits >= 4);
    CHECK(plans == 0);
    memory.deallocate(blocks[0]);
    memory.deallocate(blocks[2]);
    BlockId const large = memory.allocate(512_KiB);
    CHECK(plans == 1);
    CHECK(memory.stats().moves.count == 1);
    for (BlockId const id : {blocks[1], blocks[3], large}) {
      memory.deallocate(id);
    }
  }

  TEST_CASE("DeviceAllocator: an arena that maps pages uses the given fit policy") {
    using Allocator = DeviceAllocator<CountedPolicies<StableAddresses>>;
    int fits = 0;
    Allocator::Options options{.capacity_bytes = 8_MiB};
    options.paging.swapping = false;
    options.fit = CountedFit{fits};
    Allocator memory{options};
    int const before = fits;
    memory.deallocate(memory.allocate(1000));
    CHECK(fits == before + 1);
  }

  TEST_CASE("DeviceAllocator: a checked device refuses to read bytes that were never written") {
    SmallBench bench;
    auto& memory = bench.allocator;
    BlockId const id = memory.allocate(1000);
    BlockId const other = memory.declare(1000);

    CHECK_THROWS_AS((void)memory.acquire<Access::read>(id, bench.stream), ContractViolation);
    CHECK_THROWS_AS((void)memory.acquire(other, Access::read, bench.stream), ContractViolation);
    CHECK(memory.stats().leased.blocks.current == 0);
    // An operation may also read what it wrote itself.
    CHECK_NOTHROW(
        (void)memory.acquire_all({{id, Access::read}, {id, Access::write}}, bench.stream));
    CHECK_NOTHROW((void)memory.acquire(id, Access::read, bench.stream));
    CHECK_NOTHROW((void)memory.acquire(other, Access::read_write, bench.stream));
    CHECK_NOTHROW((void)memory.acquire(other, Access::read, bench.stream));
    memory.swap_out(id);
    CHECK_NOTHROW((void)memory.acquire(id, Access::read, bench.stream));
    memory.deallocate(id);
    memory.deallocate(other);
  }

  TEST_CASE("DeviceAllocator: a device without read checks allows any read") {
    SimApi device{{.capacity_bytes = 64_MiB, .check_reads = false}};
    support::SmallAllocator memory{device, support::small_options(1_MiB)};
    auto const stream = memory.create_stream();
    support::SmallBuffer const buffer{memory, 1000};
    CHECK_NOTHROW((void)buffer.acquire_read(stream));
  }

  TEST_CASE("DeviceAllocator: release_all ends several leases of one operation together") {
    SmallBench bench;
    auto const x = make_tensor<int>(bench.allocator, {4});
    auto y = make_tensor<float>(bench.allocator, {2, 2});
    CHECK_THROWS_AS((void)bench.allocator.acquire_all(bench.stream, reads(x), writes(y)),
                    ContractViolation);
    CHECK(bench.allocator.stats().leased.blocks.current == 0);
    { auto const [leased] = bench.allocator.acquire_all(bench.stream, writes(y)); }
    CHECK(bench.allocator.stats().leased.blocks.current == 0);
    auto const [leased] = bench.allocator.acquire_all(bench.stream, reads(y));
    CHECK(leased.block() == y.id());
    CHECK(bench.allocator.stats().leased.blocks.current == 1);
  }

  TEST_CASE("DeviceAllocator: host_waits counts a wait for the slot of a retired stream") {
    testing::SteppedSimApi device{{.capacity_bytes = 64_MiB}};
    DeviceAllocator<support::SteppedPolicies> memory{device, {.capacity_bytes = 1_MiB}};
    std::size_t named = 0;
    while (memory.stats().host_waits == 0 && named < 256) {
      auto const stream = device.create_stream();
      device.launch_host(
          stream, [](void*) noexcept {}, nullptr);
      (void)memory.mark(stream);
      memory.retire_stream(stream);
      ++named;
    }
    CHECK(memory.stats().host_waits == 1);
    CHECK(named > 240);
  }

  TEST_CASE("DeviceAllocator: a failed allocation does not raise a peak") {
    SmallBench bench;
    BlockId const id = bench.allocator.allocate(100'000);
    auto lease = bench.allocator.acquire(id, Access::write, bench.stream);
    Stats const before = bench.allocator.stats();
    std::size_t const most = before.capacity_bytes;
    CHECK_THROWS_AS((void)bench.allocator.allocate(most), OutOfDeviceMemory);
    CHECK_THROWS_AS((void)bench.allocator.allocate(2 * most), OutOfDeviceMemory);
    Stats const after = bench.allocator.stats();
    CHECK(after.allocated == before.allocated);
    CHECK(after.requested_bytes == before.requested_bytes);
    CHECK(after.resident == before.resident);
    CHECK(after.out_of_memory == 2);
    lease.release();
    bench.allocator.deallocate(id);
  }

  TEST_CASE("DeviceAllocator: peak_reserved_bytes includes the initial reservation") {
    SimApi device{{.capacity_bytes = 8_MiB, .granularity_bytes = 16_KiB}};
    auto options = support::small_options(2_MiB);
    options.grows_in_place = true;
    support::SmallAllocator memory{device, options};

    memory.set_capacity(512_KiB);

    CHECK(memory.stats().reserved_bytes <= 512_KiB);
    CHECK(memory.stats().peak_reserved_bytes == 2_MiB);
  }

  TEST_CASE("DeviceAllocator: every statistic uses the capacity in force") {
    SimApi device{{.capacity_bytes = 8_MiB, .granularity_bytes = 16_KiB}};
    for (bool const in_place : {false, true}) {
      auto options = support::small_options(2_MiB);
      options.initial_bytes = 0;
      options.growth_bytes = 64_KiB;
      options.grows_in_place = in_place;
      options.bounce_bytes = 0;
      support::SmallAllocator memory{device, options};
      auto const stream = memory.create_stream();
      std::vector<support::SmallBuffer> buffers;
      for (int i = 0; i < 16; ++i) {
        buffers.emplace_back(memory, 128_KiB);
        auto const lease = buffers.back().acquire_write(stream);
        device.fill(lease.data(), static_cast<unsigned char>(i), 128_KiB, stream);
      }
      CHECK(memory.stats().reserved_bytes == 2_MiB);
      CHECK(memory.stats().ranges_from(RangeSource::growth) == 16);
      memory.set_capacity(512_KiB);
      Stats now = memory.stats();
      CHECK(now.capacity_bytes == 512_KiB);
      CHECK(now.resident.bytes.current <= 512_KiB);
      CHECK(now.reserved_bytes <= 512_KiB);
      CHECK(device.memory_info().total_bytes - device.memory_info().free_bytes ==
            now.reserved_bytes);
      try {
        support::SmallBuffer const large{memory, 600'000};
        FAIL("a block larger than the capacity was made");
      } catch (OutOfDeviceMemory const& error) {
        CHECK(error.report().capacity_bytes == 512_KiB);
      }
      {
        auto const held = buffers[3].acquire_read(stream);
        auto const other = buffers[4].acquire_read(stream);
        CHECK_THROWS_AS(memory.set_capacity(128_KiB), OutOfDeviceMemory);
        CHECK(memory.stats().capacity_bytes == 512_KiB);  // as it was
      }
      CHECK_THROWS_AS(memory.set_capacity(4_MiB), ContractViolation);
      for (int i = 0; i < 16; ++i) {
        std::vector<unsigned char> bytes(128_KiB);
        auto const lease = buffers[static_cast<std::size_t>(i)].acquire_read(stream);
        memory.copy_to_host_sync(bytes.data(), lease.data(), bytes.size(), stream.get());
        CHECK(bytes[100'000] == i);
        CHECK(memory.stats().reserved_bytes <= 512_KiB);
      }
      memory.set_capacity(2_MiB);
      for (auto& buffer : buffers) {
        (void)buffer.acquire_read(stream);
      }
      CHECK(memory.stats().resident.bytes.current == 2_MiB);
    }
  }

  TEST_CASE(
      "DeviceAllocator: under pressure, leases that end together cost one event for each stream") {
    SmallBench bench;
    auto& memory = bench.allocator;
    auto const second = memory.create_stream();
    std::vector<support::SmallBuffer> blocks;
    for (int i = 0; i < 5; ++i) {
      blocks.emplace_back(memory, 1000);
      blocks.back().acquire_write(bench.stream).release();
    }
    memory.swap_out(blocks.back().id());  // pressure
    std::vector<support::SmallAllocator::lease_type> leases;
    for (int i = 0; i < 4; ++i) {
      leases.push_back(memory.acquire(blocks[static_cast<std::size_t>(i)].id(),
                                      Access::read,
                                      i % 2 == 0 ? bench.stream : second.get()));
    }
    leases.emplace_back();  // empty
    auto const before = bench.device.calls();

    memory.release_all(leases);

    CHECK(bench.device.calls().records - before.records == 2);
    CHECK(memory.stats().leased.blocks.current == 0);
    for (auto const& lease : leases) {
      CHECK(lease.empty());
      CHECK(lease.data() == nullptr);
    }
  }

  TEST_CASE("DeviceAllocator: an observer is told of a release before it happens") {
    SimApi device{{.capacity_bytes = 64_MiB}};
    DeviceAllocator<WatchedPolicies> memory{device, {.capacity_bytes = 4_MiB, .bounce_bytes = 0}};
    memory.observer().device = &device;

    CHECK(memory.trim_sync() == 4_MiB);

    CHECK(memory.observer().releases == std::vector<std::uint64_t>{0});
    CHECK(device.calls().releases == 1);
  }

  TEST_CASE("DeviceAllocator: a fork waits until no observer call is running") {
    SimApi device{{.capacity_bytes = 64_MiB}};
    DeviceAllocator<SlowlyObservedPolicies> memory{device, {.capacity_bytes = 4_MiB}};
    std::jthread const other{[&] { memory.deallocate(memory.allocate(1_MiB)); }};
    while (!memory.observer().is_being_told) {
      std::this_thread::yield();
    }
    memory.observer().is_forking = true;
    memory.before_fork();
    CHECK(memory.observer().calls == 0);
    memory.after_fork_in_parent();
  }

  TEST_CASE("DeviceAllocator: a point that another allocator has marked is refused") {
    SmallBench bench;
    SmallBench other;
    auto const more = other.allocator.create_stream();
    CHECK_THROWS_AS(bench.allocator.order_after(bench.stream, other.allocator.mark(more)),
                    ContractViolation);
    bench.allocator.order_after(bench.stream, bench.allocator.mark(bench.stream));
  }

  TEST_CASE("DeviceAllocator: a lease of another allocator is refused") {
    SmallBench bench;
    SmallBench other;
    support::SmallBuffer operand{bench.allocator, 1000};
    support::SmallBuffer made{bench.allocator, 1000};
    support::SmallBuffer foreign{other.allocator, 1000};  // with the id of `operand`
    (void)operand.acquire_write(bench.stream);
    (void)made.acquire_write(bench.stream);
    auto lease = foreign.acquire_write(other.stream);
    auto const nothing = [](auto, std::span<void const* const>, void*) {};
    CHECK_THROWS_AS((void)bench.allocator.extend_recipe(
                        lease, std::array{made.id()}, std::chrono::nanoseconds{1}, nothing),
                    ContractViolation);
    auto const death = test::death_of([&] { bench.allocator.release_all({&lease, 1}); });
    CHECK(death.message.find("lease.pager_ == this") != std::string::npos);
  }

  TEST_CASE("DeviceAllocator: a function that a stream launched cannot bring in a block") {
    SmallBench bench;
    support::KnownBytes known{bench, 10'000, 1};
    known.buffer().swap_out();
    auto const before = bench.allocator.stats();
    std::string what;
    bench.device.launch(bench.stream, [&] {
      try {
        (void)known.buffer().acquire_read(bench.stream);
      } catch (ContractViolation const& error) {
        what = error.what();
      }
    });
    bench.device.synchronize(bench.stream);
    CHECK(what.find("acquire: called by a function that a stream launched") != std::string::npos);
    CHECK(bench.allocator.stats().swap_ins.count == before.swap_ins.count);
    CHECK(bench.allocator.stats().leased.blocks.current == 0);
    CHECK(known.is_intact());
  }

  TEST_CASE("DeviceAllocator: what is in host memory moves to the file, and the host memory is "
            "released") {
    FileBench file{16_MiB};
    SmallBench& bench = file.bench;
    auto const host = [&](HostTier tier) { return bench.allocator.host_stats().tier(tier); };
    auto& known = file.known;
    CHECK(known[0].is_intact());  // on the device, with a copy on the host
    CHECK(host(HostTier::pinned).used_bytes >= 1_MiB);
    CHECK(bench.allocator.trim_host_sync() == 0);  // all host memory is in use

    bench.allocator.set_first_host_tier(HostTier::file);
    CHECK(bench.allocator.trim_host_sync() >= 1_MiB);
    CHECK(host(HostTier::pinned).reserved_bytes == 0);
    CHECK(host(HostTier::file).used_bytes >= 1_MiB);
    bench.allocator.set_first_host_tier(HostTier::pinned);
    for (auto& one : known) {
      CHECK(one.is_intact());
    }
  }

  TEST_CASE("DeviceAllocator: host memory that could not be trimmed is not used by others") {
    auto options = support::small_options(1_MiB);
    options.host.pageable_bytes = 256_KiB;
    SmallBench bench{options};
    support::KnownBytes large{bench, 512_KiB, 1};
    support::KnownBytes small{bench, 256_KiB, 2};
    bench.allocator.swap_out(large.buffer().id());
    bench.allocator.set_first_host_tier(HostTier::pageable);
    auto const used = [&](HostTier tier) {
      return bench.allocator.host_stats().tier(tier).used_bytes;
    };
    std::size_t const pinned_bytes = used(HostTier::pinned);

    bench.device.fail(SimCall::copy, 2);  // the way back to where the block came from
    CHECK_THROWS_AS((void)bench.allocator.trim_host_sync(), DeviceError);
    bench.allocator.swap_out(small.buffer().id());
    CHECK(used(HostTier::pageable) == 256_KiB);
    CHECK(used(HostTier::pinned) <= pinned_bytes);
    CHECK(large.is_intact());
    CHECK(small.is_intact());
  }

  TEST_CASE("DeviceAllocator: freed operands that recipes still need leave host memory, too") {
    auto options = support::small_options(1_MiB);
    options.host.pageable_bytes = 256_KiB;
    SmallBench bench{options};
    std::optional<support::KnownBytes> operand{std::in_place, bench, 64_KiB, std::uint8_t{1}};
    support::KnownBytes made{bench, 64_KiB, 1};
    bench.allocator.set_recipe(made.buffer().id(),
                               {operand->buffer().id()},
                               std::chrono::nanoseconds{1},
                               [&](auto stream, std::span<void const* const> from, void* to) {
                                 bench.device.copy(
                                     to, from[0], 64_KiB, CopyKind::on_device, stream);
                               });
    made.buffer().swap_out();
    REQUIRE(bench.allocator.stats().spared.count == 1);
    operand->buffer().swap_out();
    operand.reset();

    bench.allocator.set_first_host_tier(HostTier::pageable);
    (void)bench.allocator.trim_host_sync();
    CHECK(bench.allocator.host_stats().tier(HostTier::pinned).used_bytes == 0);
    CHECK(bench.allocator.host_stats().tier(HostTier::pageable).used_bytes == 64_KiB);
    CHECK(made.is_intact());
  }

  TEST_CASE("DeviceAllocator: what does not fit into the file stays in host memory") {
    FileBench file{512_KiB};
    SmallBench& bench = file.bench;
    auto& known = file.known;
    for (auto& one : known) {
      bench.allocator.swap_out(one.buffer().id());
    }
    bench.allocator.set_first_host_tier(HostTier::file);
    (void)bench.allocator.trim_host_sync();
    CHECK(bench.allocator.host_stats().tier(HostTier::file).used_bytes == 512_KiB);
    CHECK(bench.allocator.host_stats().tier(HostTier::pinned).used_bytes == 1536_KiB);
    CHECK(bench.allocator.stats().resident.bytes.current == 0);
    bench.allocator.set_first_host_tier(HostTier::pinned);
    for (auto& one : known) {
      CHECK(one.is_intact());
    }
  }
}

TEST_CASE("DeviceAllocator: can be constructed in a default member initializer") {
  Program<SimPolicies> const program;
  CHECK(program.capacity() == 1_MiB);
}
