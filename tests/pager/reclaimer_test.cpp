// SPDX-License-Identifier: Apache-2.0
#include <spillway/device/host/host_api.hpp>
#include <spillway/device/sim/model_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/sim.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include <support/small_allocator.hpp>

TEST_SUITE("pager") {
  namespace {

  using namespace spillway::literals;
  using spillway::Access;
  using spillway::BlockId;
  using spillway::Residency;

  struct Planned : spillway::SimPolicies {
    using device = spillway::ModelApi;
    using eviction = spillway::LruEviction;
    using prefetch = spillway::NoPrefetch;
  };
  using Allocator = spillway::DeviceAllocator<Planned>;

  constexpr std::size_t capacity_bytes = 16_MiB;

  /// Blocks of 1 to 32 granules, twice the capacity in all, used in any order.
  class Load {
   public:
    Load(double link_bytes_per_second, std::uint64_t seed)
        : random_{seed}, allocator_{device_, options(link_bytes_per_second)} {
      for (std::size_t bytes = 0; bytes < 2 * capacity_bytes;) {
        std::size_t const size = 256 * (1 + random_() % 32);
        blocks_.push_back(allocator_.declare(size));
        use(blocks_.back(), Access::write);
        bytes += size;
      }
    }
    Load(Load const&) = delete;
    Load& operator=(Load const&) = delete;
    ~Load() {
      for (BlockId const id : blocks_) {
        allocator_.deallocate(id);
      }
      allocator_.retire_stream(stream_);
    }

    void run(std::size_t uses) {
      for (std::size_t i = 0; i < uses; ++i) {
        use(blocks_[random_() % blocks_.size()], Access::read);
        free_bytes_ += static_cast<double>(allocator_.stats().free_bytes);
      }
      free_bytes_ /= static_cast<double>(uses);
    }
    void use(BlockId id, Access access) { (void)allocator_.acquire(id, access, stream_); }

    /// The mean over the run.
    [[nodiscard]] double free_share() const {
      return free_bytes_ / static_cast<double>(capacity_bytes);
    }
    [[nodiscard]] Allocator& allocator() { return allocator_; }
    [[nodiscard]] auto stream() { return stream_; }
    [[nodiscard]] std::vector<BlockId> const& blocks() const { return blocks_; }

   private:
    static Allocator::Options options(double link_bytes_per_second) {
      Allocator::Options options{.capacity_bytes = capacity_bytes};
      options.host.pinned_bytes = 1_GiB;
      options.paging.link_bytes_per_second = link_bytes_per_second;
      return options;
    }

    std::mt19937_64 random_;
    spillway::ModelApi device_{{.capacity_bytes = 1_GiB}};
    Allocator allocator_;
    spillway::ModelApi::stream_type stream_ = device_.create_stream();
    std::vector<BlockId> blocks_;
    double free_bytes_ = 0;
  };

  /// A device that pins no memory, and calls the test when it is asked for the first time.
  struct PinRefusing : spillway::SimApi {
    using spillway::SimApi::BasicSimApi;
    [[nodiscard]] void* try_allocate_pinned(std::size_t /*bytes*/, int /*numa_node*/) {
      if (auto const call = std::exchange(refuse, nullptr)) {
        call();
      }
      return nullptr;
    }
    std::function<void()> refuse;
  };
  struct PinRefusingPolicies : spillway::PoliciesFor<PinRefusing> {
    using eviction = spillway::LruEviction;
    using prefetch = spillway::NoPrefetch;
  };

  /// The default policy, which notes the budgets with which it is asked for plans.
  struct Asked : spillway::SlidingCompaction {
    std::vector<std::uint64_t>* budgets = nullptr;

    [[nodiscard]] std::optional<spillway::LayoutPlan>
    plan(spillway::Layout const& layout, std::uint32_t count, std::uint64_t budget) {
      budgets->push_back(budget);
      return SlidingCompaction::plan(layout, count, budget);
    }
  };

  /// Wants one block to be brought in.
  struct Wish : spillway::NoPrefetch {
    BlockId const* wanted = nullptr;

    template <class Visit>
    void candidates(spillway::AccessSchedule const& /*schedule*/, Visit visit) const {
      (void)visit(*wanted, std::uint64_t{1000});
    }
    [[nodiscard]] std::size_t max_inflight_bytes() const noexcept { return 1_MiB; }
  };

  template <class Device>
  struct Wishing : Planned {
    using device = Device;
    using compaction = Asked;
    using prefetch = Wish;
  };

  /// LRU; the blocks in `leaving` count as leaving anyway.
  struct Leaving : spillway::LruEviction {
    std::vector<BlockId> const* leaving = nullptr;

    template <class Inspect>
    [[nodiscard]] std::optional<BlockId> early_victim(Inspect /*inspect*/) noexcept {
      return std::nullopt;
    }
    template <class Inspect>
    [[nodiscard]] std::optional<BlockId> leaving_victim(Inspect inspect) noexcept {
      return victim(0, [&](BlockId id) noexcept {
        bool const is_leaving = std::find(leaving->begin(), leaving->end(), id) != leaving->end();
        return is_leaving ? inspect(id) : std::nullopt;
      });
    }
    [[nodiscard]] bool may_return(spillway::AccessSchedule const& /*schedule*/,
                                  BlockId /*id*/) const noexcept {
      return true;
    }
  };

  }  // namespace

  TEST_CASE("Reclaimer: blocks that are leaving and need no copy make room before others move") {
    struct Policies : Planned {
      using eviction = Leaving;
    };
    std::vector<BlockId> leaving;
    spillway::ModelApi device{{.capacity_bytes = 64_KiB}};
    spillway::DeviceAllocator<Policies>::Options options{.capacity_bytes = 64_KiB};
    options.host.pinned_bytes = 1_MiB;
    options.eviction.emplace().leaving = &leaving;
    spillway::DeviceAllocator<Policies> allocator{device, options};
    auto const stream = device.create_stream();
    std::vector<BlockId> blocks;
    auto const use = [&](BlockId id, Access access) {
      (void)allocator.acquire(id, access, stream);
    };
    for (std::size_t i = 0; i < 16; ++i) {
      blocks.push_back(allocator.declare(4_KiB));
      use(blocks.back(), Access::write);
    }
    // Blocks 4 and 8 come back clean, each to its old place.
    for (std::size_t const i : {4U, 8U}) {
      allocator.swap_out(blocks[i]);
      use(blocks[i], Access::read);
    }
    allocator.deallocate(std::exchange(blocks[3], {}));
    allocator.deallocate(std::exchange(blocks[12], {}));
    auto const before = allocator.stats();
    std::size_t const asked_bytes = 8_KiB;

    SUBCASE("one leaving block beside free memory") {
      leaving = {blocks[4]};
    }
    SUBCASE("two leaving blocks, taken until one is beside free memory") {
      leaving = {blocks[4], blocks[8]};
    }
    SUBCASE("no block that stays or needs a copy") {
      leaving = {blocks[5]};
    }

    blocks.push_back(allocator.declare(asked_bytes));
    use(blocks.back(), Access::write);
    auto const after = allocator.stats();
    bool const may_leave = leaving.front() == blocks[4];
    CHECK((after.compaction_passes == before.compaction_passes) == may_leave);
    CHECK(after.swap_outs.bytes == before.swap_outs.bytes);
    CHECK((allocator.residency(blocks[4]) == Residency::device) != may_leave);
    CHECK(allocator.residency(blocks[5]) == Residency::device);

    for (BlockId const id : blocks) {
      if (id != BlockId{}) {
        allocator.deallocate(id);
      }
    }
    allocator.retire_stream(stream);
  }

  TEST_CASE("Reclaimer: the faster the link, the fewer blocks move, and hardly more are evicted") {
    Load slow{1e6, 3};
    Load fast{25e9, 3};
    slow.run(3000);
    fast.run(3000);

    auto const one = slow.allocator().stats();
    auto const other = fast.allocator().stats();
    CHECK(other.compaction_passes * 4 < one.compaction_passes);
    CHECK(fast.free_share() < slow.free_share() + 1.0 / 32);
    CHECK(other.swap_ins.bytes < one.swap_ins.bytes + one.swap_ins.bytes / 16);
  }

  TEST_CASE("Reclaimer: blocks move only if that takes no longer than evicting a neighbour") {
    struct Policies : Planned {
      using compaction = Asked;
    };
    constexpr double bytes_per_second = 1_GiB;
    std::vector<std::uint64_t> budgets;
    std::uint64_t moved_blocks = 0;
    // Either a neighbour of 4 KiB is evicted and comes back, or 4 KiB are moved, that is, read and
    // written.
    SUBCASE("device memory as fast as the link") {
      moved_blocks = 1;
    }
    SUBCASE("device memory half as fast") {
      moved_blocks = 0;
    }
    spillway::ModelApi device{{.capacity_bytes = 1_GiB}};
    spillway::DeviceAllocator<Policies>::Options options{.capacity_bytes = 64_KiB};
    options.compaction.emplace().budgets = &budgets;
    options.paging.link_bytes_per_second = bytes_per_second;
    options.paging.device_bytes_per_second = bytes_per_second / (moved_blocks == 1 ? 1 : 2);
    spillway::DeviceAllocator<Policies> allocator{device, options};
    auto const stream = device.create_stream();
    std::vector<BlockId> blocks;
    auto const add = [&](std::size_t bytes) {
      blocks.push_back(allocator.declare(bytes));
      (void)allocator.acquire(blocks.back(), Access::write, stream);
    };
    for (int i = 0; i < 16; ++i) {
      add(4_KiB);
    }
    allocator.deallocate(std::exchange(blocks[3], {}));
    allocator.deallocate(std::exchange(blocks[9], {}));
    std::erase(blocks, BlockId{});
    add(8_KiB);

    CHECK(budgets == std::vector<std::uint64_t>{moved_blocks == 1 ? 16U : 8U});  // granules
    CHECK(allocator.stats().moves.count == moved_blocks);
    CHECK(allocator.stats().swap_outs.count == 1 - moved_blocks);
    for (BlockId const id : blocks) {
      allocator.deallocate(id);
    }
    allocator.retire_stream(stream);
  }

  TEST_CASE_TEMPLATE(
      "Reclaimer: a failed search for a prefetch is not repeated until memory changes",
      Device,
      spillway::HostApi,
      spillway::ModelApi) {
    using Policies = Wishing<Device>;
    std::vector<std::uint64_t> budgets;
    BlockId wanted{};
    Device device;
    typename spillway::DeviceAllocator<Policies>::Options options{.capacity_bytes = 64_KiB};
    options.host.pinned_bytes = 1_MiB;
    options.compaction.emplace().budgets = &budgets;
    options.prefetch.emplace().wanted = &wanted;
    options.paging.link_bytes_per_second = 1_GiB;
    options.paging.device_bytes_per_second = 1_GiB / 2.0;  // a move costs two evictions
    spillway::DeviceAllocator<Policies> allocator{device, options};
    auto const stream = device.create_stream();
    std::vector<BlockId> blocks;
    auto const use = [&](BlockId id) { (void)allocator.acquire(id, Access::write, stream); };
    for (std::size_t i = 0; i <= 14; ++i) {
      blocks.push_back(allocator.declare(i == 0 ? 8_KiB : 4_KiB));
      use(blocks.back());
    }
    (void)allocator.swap_out(blocks[0]);
    blocks.push_back(allocator.declare(4_KiB));
    use(blocks.back());
    allocator.deallocate(std::exchange(blocks[8], {}));
    wanted = blocks[0];

    use(blocks[1]);
    REQUIRE(budgets.size() == 1);
    use(blocks[2]);
    use(blocks[3]);
    CHECK(budgets.size() == 1);

    allocator.deallocate(std::exchange(blocks[12], {}));
    use(blocks[4]);
    CHECK(budgets.size() == 2);

    for (BlockId const id : blocks) {
      if (id != BlockId{}) {
        allocator.deallocate(id);
      }
    }
    allocator.retire_stream(stream);
  }

  TEST_CASE("Reclaimer: a block on its way in is moved for an allocation, but not for a prefetch") {
    struct Policies : Planned {
      using prefetch = Wish;
    };
    BlockId wanted{};
    spillway::ModelApi device{{.capacity_bytes = 64_KiB}};
    spillway::DeviceAllocator<Policies>::Options options{.capacity_bytes = 64_KiB};
    options.host.pinned_bytes = 1_MiB;
    options.prefetch.emplace().wanted = &wanted;
    options.paging.link_bytes_per_second = 1e6;  // moving blocks costs nothing compared with a copy
    spillway::DeviceAllocator<Policies> allocator{device, options};
    auto const stream = device.create_stream();
    auto const use = [&](BlockId id) { return allocator.acquire(id, Access::read, stream); };
    auto const add = [&](std::size_t bytes) {
      BlockId const id = allocator.declare(bytes);
      (void)allocator.acquire(id, Access::write, stream);
      return id;
    };
    BlockId const large = add(8_KiB);
    allocator.swap_out(large);
    std::vector<BlockId> blocks;
    for (std::size_t i = 0; i < 16; ++i) {
      blocks.push_back(add(4_KiB));
    }
    // Block 5 comes back between two free ranges, which are large enough together only.
    BlockId const coming = blocks[5];
    allocator.swap_out(coming);
    wanted = coming;
    (void)use(blocks[0]);
    REQUIRE(allocator.residency(coming) == Residency::device);
    allocator.deallocate(std::exchange(blocks[4], {}));
    allocator.deallocate(std::exchange(blocks[6], {}));
    std::size_t movable = blocks.size();
    SUBCASE("no other block can be moved") {}
    SUBCASE("another block can be moved") {
      movable = 3;
    }
    auto leases = [&] {
      std::vector<decltype(use(large))> held;
      for (std::size_t i = 0; i < blocks.size(); ++i) {
        if (blocks[i] != BlockId{} && blocks[i] != coming && i != movable) {
          held.push_back(use(blocks[i]));
        }
      }
      return held;
    }();

    wanted = large;
    (void)use(blocks[0]);
    bool const can_move_another = movable < blocks.size();
    CHECK((allocator.residency(large) == Residency::device) == can_move_another);
    CHECK(allocator.stats().moves.count == (can_move_another ? 1 : 0));

    (void)use(large);
    CHECK(allocator.residency(large) == Residency::device);
    CHECK(allocator.residency(coming) == Residency::device);
    CHECK(allocator.stats().moves.count == 1);

    leases.clear();
    for (BlockId const id : blocks) {
      if (id != BlockId{}) {
        allocator.deallocate(id);
      }
    }
    allocator.deallocate(large);
    allocator.retire_stream(stream);
  }

  TEST_CASE("Reclaimer: if no block can leave, all free bytes can still be allocated, with any "
            "number of ranges") {
    std::mt19937_64 random{5};
    spillway::ModelApi device{{.capacity_bytes = 1_GiB}};
    Allocator::Options options{.capacity_bytes = capacity_bytes};
    options.paging.few_ranges = 64;
    options.host.pinned_bytes = 256;  // too little for any block
    Allocator allocator{device, options};
    auto const stream = device.create_stream();
    std::vector<BlockId> blocks;
    auto const add = [&](std::size_t bytes) {
      blocks.push_back(allocator.declare(bytes));
      (void)allocator.acquire(blocks.back(), Access::write, stream);
    };
    while (allocator.stats().free_bytes > 8_KiB) {
      add(512 * (1 + random() % 16));
    }
    for (BlockId& id : blocks) {
      if (random() % 5 == 0) {
        allocator.deallocate(std::exchange(id, {}));
      }
    }
    std::erase(blocks, BlockId{});
    add(allocator.stats().free_bytes);

    CHECK(allocator.stats().free_bytes == 0);
    for (BlockId const id : blocks) {
      allocator.deallocate(id);
    }
    allocator.retire_stream(stream);
  }

  TEST_CASE(
      "Reclaimer: room between leased blocks is found although few ranges are examined first") {
    Load load{25e9, 7};
    Allocator& allocator = load.allocator();
    std::vector<Allocator::lease_type> leases;
    std::size_t const resident = allocator.stats().resident.blocks.current;
    for (std::size_t i = load.blocks().size() - resident; i < load.blocks().size(); i += 40) {
      leases.push_back(allocator.acquire(load.blocks()[i], Access::read, load.stream()));
    }
    std::size_t had = 0;
    for (std::size_t bytes = 8_KiB; bytes <= 32_KiB; bytes += 8_KiB) {
      BlockId const block = allocator.declare(bytes);
      load.use(block, Access::write);
      ++had;
      allocator.deallocate(block);
    }

    CHECK(had == 4);
    leases.clear();
  }

  TEST_CASE("Reclaimer: a block that does not fit into the host pool does not keep smaller ones "
            "from leaving") {
    auto options = support::small_options(1_MiB);
    options.host.pinned_bytes = 128_KiB;
    support::SmallBench bench{options};
    support::KnownBytes held{bench, 64_KiB, 1};
    support::KnownBytes large{bench, 704_KiB, 2};  // the first to leave, if it could
    support::KnownBytes first{bench, 128_KiB, 3};
    support::KnownBytes second{bench, 128_KiB, 4};
    {
      auto const lease = held.buffer().acquire(Access::read, bench.stream);
      support::SmallBuffer const room{bench.allocator, 128_KiB};
      CHECK(first.buffer().residency() != Residency::device);
    }
    for (auto* block : {&held, &large, &first, &second}) {
      CHECK(block->is_intact());
    }
  }

  TEST_CASE("Reclaimer: a host copy is not given up for a block that would not fit even then") {
    auto options = support::small_options(1_MiB);
    options.host.pinned_bytes = 128_KiB;
    support::SmallBench bench{options};
    support::KnownBytes held{bench, 64_KiB, 1};
    support::KnownBytes large{bench, 704_KiB, 2};
    support::KnownBytes clean{bench, 128_KiB, 3};
    clean.buffer().swap_out();
    CHECK(clean.is_intact());  // it is on the device, and has a copy on the host
    auto const lease = held.buffer().acquire(Access::read, bench.stream);

    CHECK_THROWS_AS(large.buffer().swap_out(), spillway::OutOfHostMemory);
    { support::SmallBuffer const room{bench.allocator, 256_KiB}; }

    CHECK(bench.allocator.stats().swap_outs.count == 1);
    CHECK(bench.allocator.stats().drops.count == 1);
    for (auto* block : {&large, &clean}) {
      CHECK(block->is_intact());
    }
  }

  TEST_CASE("Reclaimer: reservations that are too small together are replaced by a larger one") {
    auto options = support::small_options(1_MiB);
    options.initial_bytes = 0;
    options.growth_bytes = 64_KiB;
    support::SmallBench bench{options};
    std::deque<support::KnownBytes> blocks;
    for (std::size_t i = 0; i < 16; ++i) {
      blocks.emplace_back(bench, 64_KiB, static_cast<std::uint8_t>(i));
    }
    REQUIRE(bench.allocator.stats().largest_free_bytes == 0);
    auto const lease = blocks[3].buffer().acquire(Access::read, bench.stream);

    support::KnownBytes large{bench, 640_KiB, 99};

    CHECK(bench.allocator.stats().reserved_bytes <= 1_MiB);
    // Only as many blocks have left as had to.
    CHECK(bench.allocator.stats().resident.bytes.current == 1_MiB);
    CHECK(large.is_intact());
    for (auto& block : blocks) {
      CHECK(block.is_intact());
    }
    CHECK_THROWS_AS((support::SmallBuffer{bench.allocator, 1_MiB}), spillway::OutOfDeviceMemory);
    CHECK(blocks[3].is_intact());
  }

  TEST_CASE("Reclaimer: only as much is given back as a larger reservation lacks") {
    auto options = support::small_options(1_MiB);
    options.initial_bytes = 0;
    options.growth_bytes = 64_KiB;
    support::SmallBench bench{options};
    std::deque<support::KnownBytes> blocks;
    for (std::size_t i = 0; i < 10; ++i) {
      blocks.emplace_back(bench, 64_KiB, static_cast<std::uint8_t>(i));
    }
    REQUIRE(bench.allocator.stats().reserved_bytes == 640_KiB);

    support::KnownBytes large{bench, 640_KiB, 99};

    CHECK(bench.allocator.stats().reserved_bytes == 1_MiB);
    CHECK(bench.allocator.stats().host_waits != 0);  // for the last uses of what was given back
    CHECK(large.is_intact());
    CHECK(blocks.front().is_intact());
  }

  TEST_CASE("Reclaimer: of equal neighbours of free ranges, those that are clean leave") {
    for (bool const is_first_clean : {false, true}) {
      CAPTURE(is_first_clean);
      auto options = support::small_options(1_MiB);
      options.paging.compaction = false;
      support::SmallBench bench{options};
      std::optional<support::SmallBuffer> below{std::in_place, bench.allocator, 64_KiB};
      support::KnownBytes first{bench, 64_KiB, 1};
      support::KnownBytes between{bench, 64_KiB, 2};
      std::optional<support::SmallBuffer> middle{std::in_place, bench.allocator, 64_KiB};
      support::KnownBytes second{bench, 64_KiB, 3};
      support::KnownBytes above{bench, 704_KiB, 4};
      support::KnownBytes& clean = is_first_clean ? first : second;
      support::KnownBytes& dirty = is_first_clean ? second : first;
      clean.buffer().swap_out();
      CHECK(clean.is_intact());  // has come back to the only free range
      auto const kept = between.buffer().acquire(Access::read, bench.stream);
      auto const kept_above = above.buffer().acquire(Access::read, bench.stream);
      below.reset();
      middle.reset();

      support::SmallBuffer const room{bench.allocator, 128_KiB};

      CHECK(dirty.buffer().residency() == Residency::device);
      CHECK(clean.buffer().residency() != Residency::device);
      CHECK(bench.allocator.stats().swap_outs.count == 1);
    }
  }

  TEST_CASE("Reclaimer: if waiting for its last use fails, memory is given back the next time") {
    struct Capturing : spillway::testing::SteppedSimApi {
      using spillway::testing::SteppedSimApi::SteppedSimApi;
      [[nodiscard]] bool is_capturing(stream_type /*stream*/) const { return captures; }
      bool captures = false;
    };
    struct Policies : Planned {
      using device = Capturing;
    };
    for (bool const is_tried_again : {false, true}) {
      CAPTURE(is_tried_again);
      Capturing device{{.capacity_bytes = 16_MiB}};
      {
        spillway::DeviceAllocator<Policies> memory{
            device, {.capacity_bytes = 4_MiB, .initial_bytes = 0, .bounce_bytes = 0}};
        auto const stream = memory.create_stream();
        BlockId const block = memory.allocate(2_MiB);
        memory.acquire(block, Access::write, stream).release();
        memory.deallocate(block);
        device.captures = true;
        CHECK_THROWS_AS((void)memory.trim_sync(), spillway::ContractViolation);
        device.captures = false;
        CHECK(device.usage().device_bytes == 2_MiB);
        if (is_tried_again) {
          CHECK(memory.trim_sync() == 2_MiB);
          CHECK(device.usage().device_bytes == 0);
          CHECK(memory.trim_sync() == 0);
        }
      }
      CHECK(device.usage().device_bytes == 0);
    }
  }

  TEST_CASE("Reclaimer: room divided by leased blocks is mapped again in one piece") {
    auto options = support::small_options(1_MiB);
    options.initial_bytes = 0;
    options.page_bytes = 16_KiB;
    options.grows_in_place = true;
    support::SmallBench bench{options, {.capacity_bytes = 64_MiB, .granularity_bytes = 16_KiB}};
    std::deque<support::KnownBytes> blocks;
    for (std::uint8_t i = 0; i < 16; ++i) {
      blocks.emplace_back(bench, 64_KiB, i);
    }
    for (std::size_t round = 0; round < 8; ++round) {
      std::vector<support::SmallBuffer::lease_type> leases;
      for (std::size_t i = 3; i < 16; i += 4) {
        leases.push_back(blocks[(i + round) % 16].buffer().acquire(Access::read, bench.stream));
      }
      std::vector<void const*> addresses;
      addresses.reserve(leases.size());
      for (auto const& lease : leases) {
        addresses.push_back(lease.data());
      }

      support::KnownBytes large{bench, 640_KiB + round * 8_KiB, 99};

      CHECK_THROWS_AS((support::SmallBuffer{bench.allocator, 800_KiB}),
                      spillway::OutOfDeviceMemory);
      for (std::size_t i = 0; i < leases.size(); ++i) {
        CHECK(leases[i].data() == addresses[i]);
      }
      CHECK(bench.allocator.stats().reserved_bytes <= 1_MiB);
      CHECK(bench.device.memory_info().total_bytes - bench.device.memory_info().free_bytes ==
            bench.allocator.stats().reserved_bytes);
      leases.clear();
      CHECK(large.is_intact());
      for (auto& block : blocks) {
        CHECK(block.is_intact());
      }
    }
  }

  TEST_CASE(
      "Reclaimer: after the capacity is lowered, no more is reserved, even if no block can leave") {
    auto options = support::small_options(1_MiB);
    options.initial_bytes = 0;
    options.growth_bytes = 128_KiB;
    options.grows_in_place = true;
    options.host.pinned_bytes = 16_KiB;
    support::SmallBench bench{options, {.capacity_bytes = 64_MiB, .granularity_bytes = 16_KiB}};
    std::deque<support::KnownBytes> blocks;
    std::deque<support::KnownBytes> gaps;
    for (std::uint8_t i = 0; i < 24; ++i) {  // of three sizes, and a third of them is freed
      std::size_t const bytes = (24 + std::size_t{i} % 3 * 16) * 1_KiB;
      (i % 3 == 1 ? gaps : blocks).emplace_back(bench, bytes, i);
    }
    std::size_t const lowest = bench.allocator.stats().resident.bytes.current - 8 * 40_KiB;
    gaps.clear();
    support::KnownBytes away{bench, 16_KiB, 99};
    away.buffer().swap_out();  // the host is full

    bench.allocator.set_capacity(lowest);

    CHECK(bench.allocator.stats().resident.bytes.current == lowest);
    CHECK(bench.allocator.stats().reserved_bytes <= lowest);
    CHECK(bench.device.memory_info().total_bytes - bench.device.memory_info().free_bytes ==
          bench.allocator.stats().reserved_bytes);
    CHECK(bench.allocator.stats().swap_outs.count == 1);
    bench.allocator.set_capacity(1_MiB);
    CHECK(away.is_intact());
    for (auto& block : blocks) {
      CHECK(block.is_intact());
    }
  }

  TEST_CASE("Reclaimer: after the capacity is lowered, all but leased blocks lie together") {
    auto options = support::small_options(4_MiB);
    options.initial_bytes = 0;
    options.growth_bytes = 16_KiB;
    options.page_bytes = 16_KiB;
    options.grows_in_place = true;
    support::SmallBench bench{options, {.capacity_bytes = 64_MiB, .granularity_bytes = 16_KiB}};
    std::deque<support::KnownBytes> blocks;
    std::deque<support::KnownBytes> gaps;
    for (std::uint8_t i = 0; i < 64; ++i) {
      (i % 2 == 1 ? gaps : blocks).emplace_back(bench, 32_KiB, i);
    }
    gaps.clear();
    for (bool const is_one_leased : {false, true}) {
      CAPTURE(is_one_leased);
      std::optional<support::SmallBuffer::lease_type> lease;
      if (is_one_leased) {
        lease.emplace(blocks[4].buffer().acquire(Access::read, bench.stream));
      }

      bench.allocator.set_capacity(768_KiB);

      std::size_t pieces = 0;  // between holes
      std::size_t free_ranges = 0;
      bench.allocator.for_each_range([&](spillway::RangeView const& range) {
        pieces = range.segment + 1;
        free_ranges += range.state == spillway::RangeState::free ? 1 : 0;
      });
      CHECK(bench.allocator.stats().reserved_bytes == 768_KiB);
      CHECK(bench.allocator.stats().resident.bytes.current == 768_KiB);
      CHECK(pieces == (is_one_leased ? 2 : 1));
      CHECK(free_ranges == 0);
      lease.reset();
      bench.allocator.set_capacity(4_MiB);
      for (auto& block : blocks) {
        CHECK(block.is_intact());
      }
      for (std::uint8_t i = 0; i < 16; ++i) {
        gaps.emplace_back(bench, 96_KiB, i);
      }
      gaps.clear();
    }
  }

  TEST_CASE("Reclaimer: room that a lease leaves during the search is found") {
    PinRefusing device{{.capacity_bytes = 64_MiB}};
    using Bench = spillway::DeviceAllocator<PinRefusingPolicies>;
    Bench::Options options{.capacity_bytes = 384_KiB};
    options.host.pinned_bytes = 16_MiB;
    options.paging.compaction = false;
    options.paging.lease_wait = std::chrono::milliseconds{0};
    Bench allocator{device, options};
    auto const stream = allocator.create_stream();
    BlockId const below = allocator.allocate(64_KiB);
    BlockId const unleased = allocator.allocate(64_KiB);
    BlockId const above = allocator.allocate(64_KiB);
    BlockId const released = allocator.allocate(128_KiB);
    BlockId const leased = allocator.allocate(64_KiB);
    (void)allocator.acquire(unleased, Access::write, stream);
    auto released_lease = allocator.acquire(released, Access::write, stream);
    auto lease = allocator.acquire(leased, Access::write, stream);
    allocator.deallocate(below);
    allocator.deallocate(above);
    // Enough bytes are free, and the block between them cannot leave since the host refuses memory.
    // While the host is asked, another block gives its place up.
    device.refuse = [&] {
      released_lease.release();
      allocator.abandon(released);
    };

    BlockId const added = allocator.allocate(128_KiB);

    CHECK(!device.refuse);
    lease.release();
    for (BlockId const id : {added, unleased, leased}) {
      allocator.deallocate(id);
    }
  }

  TEST_CASE("Reclaimer: if the system refuses host memory, blocks that need none leave") {
    PinRefusing device{{.capacity_bytes = 64_MiB}};
    using Bench = spillway::DeviceAllocator<PinRefusingPolicies>;
    Bench::Options options{.capacity_bytes = 1_MiB};
    options.host.pinned_bytes = 128_KiB;
    options.paging.lease_wait = std::chrono::milliseconds{0};
    Bench allocator{device, options};
    auto const stream = allocator.create_stream();
    BlockId const leased = allocator.allocate(64_KiB);
    auto lease = allocator.acquire(leased, Access::write, stream);
    BlockId const too_large = allocator.allocate(704_KiB);
    (void)allocator.acquire(too_large, Access::write, stream);
    BlockId const small = allocator.allocate(128_KiB);  // would fit into the host pool
    (void)allocator.acquire(small, Access::write, stream);
    BlockId const unwritten = allocator.allocate(128_KiB);

    BlockId const added = allocator.allocate(128_KiB);

    CHECK(allocator.residency(small) == Residency::device);
    CHECK(allocator.residency(unwritten) == Residency::none);
    lease.release();
    for (BlockId const id : {leased, too_large, small, unwritten, added}) {
      allocator.deallocate(id);
    }
  }

  TEST_CASE(
      "DeviceAllocator: no block is evicted for an allocation larger than a lowered capacity") {
    support::SmallBench bench{support::small_options(1_MiB)};
    support::KnownBytes const small{bench, 128_KiB, 1};
    BlockId const large = bench.allocator.declare(768_KiB);
    bench.allocator.set_capacity(512_KiB);

    CHECK_THROWS_AS((void)bench.allocator.acquire(large, Access::write, bench.stream),
                    spillway::OutOfDeviceMemory);

    CHECK(bench.allocator.stats().resident.bytes.current == 128_KiB);
    CHECK(bench.allocator.stats().swap_outs.count == 0);
    bench.allocator.set_capacity(1_MiB);
    (void)bench.allocator.acquire(large, Access::write, bench.stream);
    bench.allocator.deallocate(large);
  }
}
