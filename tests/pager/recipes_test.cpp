// SPDX-License-Identifier: Apache-2.0
// Blocks that leave without a copy and are made again by their recipes.
#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/concepts/recompute_policy.hpp>
#include <spillway/core/block_table.hpp>
#include <spillway/core/error.hpp>
#include <spillway/core/types.hpp>
#include <spillway/device/sim/model_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/pager/block_state.hpp>
#include <spillway/pager/recipes.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/policy/recompute/recompute_if_cheaper.hpp>
#include <spillway/schedule/access_schedule.hpp>
#include <spillway/sim.hpp>
#include <spillway/swappable_buffer.hpp>
#include <spillway/testing/stepped_sim_api.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include <support/stepped_bench.hpp>

TEST_SUITE("recipes") {
  namespace {

  using namespace spillway::literals;
  using namespace std::chrono_literals;
  using spillway::Access;
  using spillway::BlockId;
  using spillway::Residency;
  using spillway::detail::BlockRecord;
  using spillway::detail::BlockState;
  using spillway::detail::Recipe;

  /// A device whose streams the test can declare captured, and which calls the test at its next
  /// copy, or when a stream is next made to wait for another.
  class Capturing : public spillway::testing::SteppedSimApi {
   public:
    using spillway::testing::SteppedSimApi::SteppedSimApi;
    [[nodiscard]] bool is_capturing(stream_type /*stream*/) const { return captures; }
    void copy(void* to,
              void const* from,
              std::size_t bytes,
              spillway::CopyKind kind,
              stream_type stream) {
      if (auto const act = std::exchange(at_next_copy, nullptr)) {
        act();
      }
      spillway::testing::SteppedSimApi::copy(to, from, bytes, kind, stream);
    }
    void wait(stream_type stream, event_type event) {
      if (auto const act = std::exchange(at_next_wait, nullptr)) {
        act();
      }
      spillway::testing::SteppedSimApi::wait(stream, event);
    }
    bool captures = false;
    std::function<void()> at_next_copy;
    std::function<void()> at_next_wait;
  };
  static_assert(spillway::CapturingApi<Capturing>);

  /// Blocks with recipes and nothing else: no memory, no leases.
  struct Links {
    BlockId add(std::vector<BlockId> const& operands) {
      BlockId const id = table.emplace({.bytes = 64});
      table.find(id)->status.become(BlockState::blank);
      table.find(id)->status.become(BlockState::resident);
      for (BlockId const operand : operands) {
        recompute_all(operand);
      }
      if (!operands.empty()) {
        recipes.give(id, operands, 1, [](auto&&...) {});
      }
      return id;
    }
    void drop(BlockId id) {
      BlockRecord& block = *table.find(id);
      block.status.become(BlockState::swapping_out);
      block.status.become(BlockState::dropping);
      block.status.become(BlockState::dropped);
      recipes.on_need_ended(block);
    }
    void drop_if_possible(BlockId id) {
      BlockRecord const& block = *table.find(id);
      if (block.is_resident() && block.recipe != nullptr && recipes.may_drop(id, 1024)) {
        drop(id);
      }
    }
    void recompute(BlockId id) {
      table.find(id)->status.become(BlockState::filling);
      table.find(id)->status.become(BlockState::resident);
      recipes.on_recompute(id);
    }
    void recompute_all(BlockId id) {
      if (table.find(id)->needs_recipe()) {
        for (Recipe::Link const& operand : table.find(id)->recipe->operands) {
          recompute_all(operand.block);
        }
        recompute(id);
      }
    }
    void free(BlockId id) {
      if (recipes.may_go(id)) {
        table.erase(id);
      }
    }
    void free_orphans() {
      while (auto const orphan = recipes.take_orphan()) {
        if (orphan->is_for_good) {
          table.erase(orphan->id);
        } else if (table.find(orphan->id)->is_resident()) {
          table.find(orphan->id)->status.become(BlockState::swapping_out);
          table.find(orphan->id)->status.become(BlockState::dropping);
          table.find(orphan->id)->status.become(BlockState::dropped);
        }
      }
    }
    /// Whether each operand of a block names it at the place that the block knows.
    [[nodiscard]] bool are_mutual(BlockId id, BlockRecord const& block) {
      if (block.recipe == nullptr) {
        return true;
      }
      std::vector<Recipe::Link> const& operands = block.recipe->operands;
      std::vector<Recipe::Link> const& dependents = block.recipe->dependents;
      auto const place_of = [](auto const& links, auto const& link) {
        return static_cast<std::size_t>(&link - links.data());
      };
      return std::all_of(operands.begin(),
                         operands.end(),
                         [&](Recipe::Link const& one) {
                           if (one.place == Recipe::Link::nowhere) {
                             return true;  // named twice
                           }
                           auto const& back = table.find(one.block)->recipe->dependents[one.place];
                           return back.block == id && back.place == place_of(operands, one);
                         }) &&
             std::all_of(dependents.begin(), dependents.end(), [&](Recipe::Link const& one) {
               auto const& back = table.find(one.block)->recipe->operands[one.place];
               return back.block == id && back.place == place_of(dependents, one);
             });
    }

    spillway::detail::BlockTable<BlockRecord> table;
    spillway::detail::Recipes recipes{table};
  };

  struct Stepped : spillway::SimPolicies {
    using device = Capturing;
    using eviction = spillway::LruEviction;
    using prefetch = spillway::NoPrefetch;
  };
  using Allocator = spillway::DeviceAllocator<Stepped>;
  using Buffer = spillway::SwappableBuffer<Allocator>;
  using Stream = Allocator::stream_type;

  Allocator::Options small(std::size_t capacity_bytes, std::size_t host_bytes) {
    Allocator::Options options{.capacity_bytes = capacity_bytes};
    options.bounce_bytes = 0;
    options.host.pinned_bytes = host_bytes;
    options.host.slab_bytes = 64_KiB;
    options.paging.poison_vacated = true;
    options.paging.lease_wait = 0ms;
    return options;
  }

  struct Bench : support::SteppedBench<Stepped> {
    explicit Bench(std::size_t capacity_bytes = 1_MiB, std::size_t host_bytes = 16_MiB)
        : SteppedBench{{.capacity_bytes = 64_MiB}, small(capacity_bytes, host_bytes), 2} {}

    /// The block was made from `operands`, whose contents the recipe checks.
    struct From {
      Buffer& buffer;
      std::uint64_t seed;
    };
    void give(Buffer& result,
              std::uint64_t seed,
              std::vector<From> const& operands,
              std::chrono::nanoseconds cost = 0ns) {
      std::vector<BlockId> ids;
      std::vector<std::pair<std::size_t, std::uint64_t>> contents;
      for (From const& operand : operands) {
        ids.push_back(operand.buffer.id());
        contents.emplace_back(operand.buffer.size_bytes(), operand.seed);
      }
      std::size_t const bytes = result.size_bytes();
      allocator.set_recipe(
          result.id(),
          ids,
          cost,
          [this, contents, bytes, seed](
              Stream on, std::span<void const* const> addresses, void* made) {
            if (std::exchange(throws_next, false)) {
              throw std::runtime_error{"the recipe fails"};
            }
            REQUIRE(addresses.size() == contents.size());
            for (std::size_t i = 0; i < contents.size(); ++i) {
              kernels.check(device,
                            on,
                            const_cast<void*>(addresses[i]),  // NOLINT: the kernel only reads
                            contents[i].first,
                            contents[i].second);
            }
            kernels.write(device, on, made, bytes, seed);
          });
    }
    void drop(Buffer& buffer) {
      auto const copies = allocator.stats().swap_outs.count;
      buffer.swap_out();
      REQUIRE(allocator.stats().swap_outs.count == copies);
      REQUIRE(buffer.residency() == Residency::none);
    }
    /// Blocks of 64 KiB, each but the first made from the one before it. The seed of each is its
    /// place.
    [[nodiscard]] std::vector<Buffer> chain(std::uint64_t length) {
      std::vector<Buffer> made;
      for (std::uint64_t i = 0; i < length; ++i) {
        made.emplace_back(allocator, 64_KiB);
        write(made.back(), i);
        if (i != 0) {
          give(made[i], i, {{made[i - 1], i - 1}});
        }
      }
      return made;
    }
    [[nodiscard]] std::uint64_t recomputations() const {
      return allocator.stats().recomputations.count;
    }

    bool throws_next = false;
  };

  /// One operand and a block that is made from it.
  struct Pair : Bench {
    explicit Pair(std::size_t bytes = 128_KiB, std::size_t host_bytes = 16_MiB)
        : Bench{1_MiB, host_bytes}, x{allocator, bytes}, y{allocator, bytes} {}

    Buffer x;
    Buffer y;
    void make(std::chrono::nanoseconds cost = 0ns) {
      write(x, 1);
      write(y, 2);
      give(y, 2, {{x, 1}}, cost);
    }
  };

  /// Notes the durations of steps that it is told.
  struct TellsSteps {
    std::vector<double>* told = nullptr;
    void on_step(double step_ns, std::size_t bytes) noexcept {
      told->push_back(step_ns);
      CHECK(bytes == 1_MiB);
    }
    [[nodiscard]] bool prefers_recompute(spillway::RecomputeCosts /*costs*/) const noexcept {
      return false;
    }
    [[nodiscard]] double plan_share(spillway::RecomputeCosts /*costs*/) const noexcept { return 1; }
    [[nodiscard]] bool wants_recipes() const noexcept { return wants; }
    bool wants = true;
  };
  struct Told : spillway::PoliciesFor<spillway::ModelApi> {
    using recompute = TellsSteps;
  };

  /// Notes since when the block of each use has not been leased.
  struct SeesRecord : spillway::LruEviction {
    std::vector<std::uint32_t>* released = nullptr;
    void on_step(spillway::AccessSchedule const& schedule, std::size_t /*bytes*/) noexcept {
      released->clear();
      for (auto const& entry : schedule.record().entries) {
        released->push_back(entry.released);
      }
    }
  };
  struct Seen : Stepped {
    using eviction = SeesRecord;
  };

  /// Recomputes blocks whose recipes take less than a given time.
  struct BelowLimit {
    double most_ns = 0;
    void on_step(double /*step_ns*/, std::size_t /*bytes*/) noexcept {}
    [[nodiscard]] bool prefers_recompute(spillway::RecomputeCosts costs) const noexcept {
      return costs.recompute_ns < most_ns;
    }
    [[nodiscard]] double plan_share(spillway::RecomputeCosts /*costs*/) const noexcept { return 1; }
    [[nodiscard]] bool wants_recipes() const noexcept { return true; }
  };
  template <class Policy>
  struct DecidedBy : Stepped {
    using recompute = Policy;
  };
  /// Whether a block that its recipe makes again in `cost` leaves by a copy.
  template <class Policy>
  bool is_copied(std::chrono::nanoseconds cost, Policy policy = {}) {
    using Decided = spillway::DeviceAllocator<DecidedBy<Policy>>;
    typename Decided::Options options{.capacity_bytes = 1_MiB};
    options.host.pinned_bytes = 1_MiB;
    options.recompute = policy;
    support::SteppedBench<DecidedBy<Policy>> bench{{.capacity_bytes = 64_MiB}, options};
    spillway::SwappableBuffer<Decided> x{bench.allocator, 64_KiB};
    spillway::SwappableBuffer<Decided> y{bench.allocator, 64_KiB};
    bench.write(x, 1);
    bench.write(y, 2);
    bench.allocator.set_recipe(
        y.id(), {x.id()}, cost, [&](Stream on, std::span<void const* const>, void* made) {
          bench.kernels.write(bench.device, on, made, 64_KiB, 2);
        });
    y.swap_out();
    bool const is_spared = bench.allocator.stats().spared.count == 1;
    bench.check(y, 2);
    bench.run();
    CHECK(is_spared == (bench.allocator.stats().recomputations.count == 1));
    CHECK(is_spared == (bench.allocator.stats().swap_outs.count == 0));
    return !is_spared;
  }

  }  // namespace

  TEST_CASE("The recompute policy decides whether a block leaves by its recipe or by a copy") {
    CHECK(is_copied<spillway::NoRecompute>(0ns));
    CHECK_FALSE(is_copied<spillway::AlwaysRecompute>(1s));
    CHECK_FALSE(is_copied(99ns, BelowLimit{100}));
    CHECK(is_copied(101ns, BelowLimit{100}));
  }

  TEST_CASE("A block with a recipe leaves without a copy, and its next use makes it again") {
    Pair bench;
    bench.make(3us);
    bench.drop(bench.y);
    CHECK(bench.allocator.stats().spared == spillway::Tally{1, 128_KiB});
    CHECK(bench.allocator.host_stats().tiers[0].slot_count == 0);
    bench.check(bench.y, 2);
    bench.run();
    spillway::Stats const stats = bench.allocator.stats();
    CHECK(stats.recomputations == spillway::Tally{1, 128_KiB});
    CHECK(stats.recompute_ns == 3'000);
    CHECK(stats.swap_ins.count == 0);
    CHECK(bench.y.residency() == Residency::device);
  }

  TEST_CASE("Operands come in first, whatever stream each of them was used on") {
    Pair bench;
    bench.make();
    bench.x.swap_out();
    bench.drop(bench.y);
    bench.check(bench.y, 2, 1);
    CHECK(bench.x.residency() != Residency::host);
    bench.run();
    CHECK(bench.allocator.stats().swap_ins.count == 1);
  }

  TEST_CASE("A copy is preferred to a slower recipe, and a clean block needs neither") {
    Pair bench;
    bench.make(1s);
    bench.y.swap_out();
    CHECK(bench.allocator.stats().swap_outs.count == 1);
    bench.check(bench.y, 2);
    bench.y.swap_out();
    bench.check(bench.y, 2);
    bench.run();
    CHECK(bench.recomputations() == 0);
    CHECK(bench.allocator.stats().spared.count == 0);
  }

  TEST_CASE("When the host pool is full, a block leaves by its recipe at any cost") {
    Pair bench{128_KiB, 64_KiB};
    bench.make(1s);
    bench.drop(bench.y);
    bench.check(bench.y, 2);
    bench.run();
  }

  TEST_CASE("A block whose operands are dropped is made after they are") {
    Bench bench;
    std::vector<Buffer> chain = bench.chain(5);
    for (std::size_t i = 1; i < 5; ++i) {
      bench.drop(chain[i]);
    }
    bench.check(chain[4], 4);
    bench.run();
    CHECK(bench.recomputations() == 4);
  }

  TEST_CASE("Chains of dropped blocks are limited in length, and cycles are cut") {
    Bench bench{4_MiB};
    std::uint64_t const length = spillway::detail::Recipes::most_chained + 4;
    std::vector<Buffer> chain = bench.chain(length);
    bench.give(chain[0], 0, {{chain.back(), length - 1}});
    for (Buffer& each : chain) {
      each.swap_out();
    }
    CHECK(bench.allocator.stats().spared.count < length);
    for (std::uint64_t i = length; i-- != 0;) {
      bench.check(chain[i], i);
    }
    bench.run();
  }

  TEST_CASE("A block that does not fit together with its operand is not dropped") {
    Bench bench{1_MiB};
    Buffer x{bench.allocator, 640_KiB};
    bench.write(x, 1);
    x.swap_out();
    Buffer y{bench.allocator, 640_KiB};
    bench.write(y, 2);
    bench.give(y, 2, {{x, 1}});
    y.swap_out();
    CHECK(bench.allocator.stats().swap_outs.count == 2);
    bench.check(y, 2);
    bench.run();
  }

  TEST_CASE("A chain may be dropped if it fits with its operands, each counted once") {
    Bench bench{1_MiB};
    std::array<Buffer, 3> made;
    std::array<std::size_t, 3> const sizes{256_KiB, 320_KiB, 256_KiB};
    for (std::uint64_t i = 0; i != made.size(); ++i) {
      made[i] = Buffer{bench.allocator, sizes[i]};
      bench.write(made[i], i);
      if (i != 0) {
        bench.give(made[i], i, {{made[i - 1], i - 1}});
      }
    }
    bench.drop(made[1]);
    bench.drop(made[2]);
    bench.check(made[2], 2);
    bench.check(made[1], 1);
    bench.run();
  }

  TEST_CASE("Operands that do not fit beside a group come in before the group") {
    Pair bench{384_KiB};
    bench.make();
    bench.drop(bench.y);
    Buffer other{bench.allocator, 512_KiB};
    bench.write(other, 3);
    {
      auto const leases = bench.allocator.acquire_all(
          {other.request(Access::read), bench.y.request(Access::read)}, bench.stream());
      bench.kernels.check(bench.device, bench.stream(), leases[0].data(), 512_KiB, 3);
      bench.kernels.check(bench.device, bench.stream(), leases[1].data(), 384_KiB, 2);
    }
    bench.run();
    CHECK(bench.recomputations() == 1);
    bench.y.swap_out();  // its recipe did not pay off
    CHECK(bench.y.residency() != Residency::none);
    bench.check(bench.y, 2);
    bench.run();
  }

  TEST_CASE("Without room an acquire fails and changes nothing") {
    Pair bench{384_KiB};
    bench.make();
    bench.drop(bench.y);
    {
      Buffer held{bench.allocator, 512_KiB};
      auto const lease = held.acquire(Access::write, bench.stream());
      CHECK_THROWS_AS((void)bench.y.acquire(Access::read, bench.stream()),
                      spillway::OutOfDeviceMemory);
      CHECK(bench.y.residency() == Residency::none);
      bench.check(bench.x, 1);
    }
    bench.check(bench.y, 2);
    bench.run();
  }

  TEST_CASE("A recipe that throws leaves the block dropped, and may be tried again") {
    Pair bench;
    bench.make();
    bench.drop(bench.y);
    std::size_t const free_bytes = bench.allocator.stats().free_bytes;
    bench.throws_next = true;
    CHECK_THROWS_AS((void)bench.y.acquire(Access::read, bench.stream()), std::runtime_error);
    CHECK(bench.y.residency() == Residency::none);
    CHECK(bench.allocator.stats().free_bytes == free_bytes);
    CHECK(bench.allocator.stats().leased.blocks.current == 0);
    bench.check(bench.y, 2);
    bench.check(bench.x, 1);
    bench.run();
  }

  TEST_CASE("No recipe is run on a stream that is being captured") {
    Pair bench;
    bench.make();
    Buffer resident{bench.allocator, 64_KiB};
    bench.write(resident, 3);
    bench.give(resident, 3, {{bench.x, 1}});
    bench.drop(bench.y);
    bench.device.captures = true;
    CHECK_THROWS_AS((void)bench.y.acquire(Access::read, bench.stream()),
                    spillway::ContractViolation);
    CHECK_THROWS_AS((void)bench.x.acquire(Access::write, bench.stream()),
                    spillway::ContractViolation);
    bench.write(resident, 4);  // needs no call of the device
    bench.device.captures = false;
    CHECK(bench.y.residency() == Residency::none);
    bench.check(bench.y, 2);
    bench.check(bench.x, 1);
    bench.check(resident, 4);
    bench.run();
  }

  TEST_CASE("A chain that fails halfway is unchanged") {
    Bench bench;
    std::vector<Buffer> chain = bench.chain(3);
    bench.drop(chain[1]);
    bench.drop(chain[2]);
    bench.throws_next = true;
    CHECK_THROWS_AS((void)chain[2].acquire(Access::read, bench.stream()), std::runtime_error);
    CHECK(bench.allocator.stats().leased.blocks.current == 0);
    bench.check(chain[2], 2);
    bench.check(chain[1], 1);
    bench.run();
  }

  TEST_CASE("An acquire for writing runs no recipe, and removes it") {
    Pair bench;
    bench.make();
    bench.drop(bench.y);
    bench.write(bench.y, 3);
    bench.check(bench.y, 3);
    bench.run();
    CHECK(bench.recomputations() == 0);
    bench.y.swap_out();
    CHECK(bench.y.residency() == Residency::moving_out);
    bench.check(bench.y, 3);
    bench.run();
  }

  TEST_CASE("An acquire for reading and writing makes the block again first") {
    Pair bench;
    bench.make();
    bench.drop(bench.y);
    {
      auto const lease = bench.y.acquire(Access::read_write, bench.stream());
      bench.kernels.check(bench.device, bench.stream(), lease.data(), lease.size_bytes(), 2);
      bench.kernels.write(bench.device, bench.stream(), lease.data(), lease.size_bytes(), 3);
    }
    bench.y.swap_out();
    bench.check(bench.y, 3);
    bench.run();
    CHECK(bench.recomputations() == 1);
  }

  TEST_CASE("A failed acquire for writing leaves a dropped block's recipe") {
    Pair bench;
    bench.make();
    bench.drop(bench.y);
    auto const held = bench.x.acquire(Access::read, bench.stream());
    Buffer filler{bench.allocator, 768_KiB};
    auto const filled = filler.acquire(Access::write, bench.stream());
    Buffer large{bench.allocator, 100_KiB};
    auto const more = large.acquire(Access::write, bench.stream());
    CHECK_THROWS_AS((void)bench.y.acquire(Access::write, bench.stream()),
                    spillway::OutOfDeviceMemory);
    CHECK(bench.y.residency() == Residency::none);
  }

  namespace {

  /// `y` with a recipe that makes 2 of `x`, to be changed to 3 in place, for which `z` is read.
  struct Changing : Pair {
    Changing() : z{allocator, 64_KiB} {
      make(1us);
      write(z, 7);
    }
    [[nodiscard]] auto acquire() {
      spillway::LeaseRequest const request{y.id(), Access::read_write, /*extends_recipe=*/true};
      return std::move(allocator.acquire_all({&request, 1}, stream()).front());
    }
    void change(Allocator::lease_type const& lease, std::uint64_t from = 2, std::uint64_t to = 3) {
      kernels.check(device, stream(), lease.data(), lease.size_bytes(), from);
      kernels.write(device, stream(), lease.data(), lease.size_bytes(), to);
    }
    bool tell(Allocator::lease_type const& lease, std::uint64_t from = 2, std::uint64_t to = 3) {
      return allocator.extend_recipe(
          lease,
          std::array{z.id()},
          100ns,
          [this, from, to](Stream on, std::span<void const* const> addresses, void* made) {
            REQUIRE(addresses.size() == 1);
            kernels.check(device, on, const_cast<void*>(addresses[0]), 64_KiB, 7);  // NOLINT
            kernels.check(device, on, made, 128_KiB, from);
            kernels.write(device, on, made, 128_KiB, to);
          });
    }
    /// Whether `y` leaves by its recipe; checks that it holds `seed` afterwards.
    [[nodiscard]] bool leaves_by_recipe(std::uint64_t seed) {
      auto const copies = allocator.stats().swap_outs.count;
      y.swap_out();
      bool const is_dropped = allocator.stats().swap_outs.count == copies;
      check(y, seed);
      run();
      return is_dropped;
    }

    Buffer z;
  };

  }  // namespace

  TEST_CASE("A block changed in place keeps its recipe, extended by the change") {
    for (bool const is_dropped_before : {false, true}) {
      CAPTURE(is_dropped_before);
      Changing bench;
      if (is_dropped_before) {
        bench.drop(bench.y);
      }
      {
        auto const lease = bench.acquire();
        bench.change(lease);
        CHECK(bench.tell(lease));
        CHECK_FALSE(bench.tell(lease));
      }
      CHECK(bench.leaves_by_recipe(3));
      CHECK(bench.allocator.stats().recompute_ns == (is_dropped_before ? 2'100 : 1'100));
      bench.drop(bench.y);
      bench.write(bench.z, 8);  // made again first
      CHECK(bench.recomputations() == (is_dropped_before ? 3 : 2));
      CHECK_FALSE(bench.leaves_by_recipe(3));
    }
  }

  TEST_CASE("Changes in place are repeated in order, and their number is limited") {
    Changing bench;
    constexpr std::uint64_t most = spillway::detail::Recipes::most_extensions;
    for (std::uint64_t i = 0; i <= most; ++i) {
      {
        auto const lease = bench.acquire();
        bench.change(lease, 2 + i, 3 + i);
        CHECK(bench.tell(lease, 2 + i, 3 + i) == (i < most));
      }
      CHECK(bench.leaves_by_recipe(3 + i) == (i < most));
    }
  }

  TEST_CASE("A change in place that is not reported, or not alone, ends the recipe") {
    Changing bench;
    SUBCASE("the lease ends without extend_recipe") {
      auto lease = bench.acquire();
      bench.change(lease);
      lease.release();
    }
    SUBCASE("an operand is written meanwhile") {
      auto const lease = bench.acquire();
      bench.write(bench.x, 9);
      bench.change(lease);
      CHECK_FALSE(bench.tell(lease));
    }
    SUBCASE("an operand without a recipe is freed meanwhile") {
      auto const lease = bench.acquire();
      { Buffer const freed = std::move(bench.x); }
      bench.change(lease);
      CHECK_FALSE(bench.tell(lease));
    }
    SUBCASE("another lease for writing is acquired meanwhile") {
      auto const lease = bench.acquire();
      auto const other = bench.y.acquire(Access::read_write, bench.stream());
      bench.change(lease);
      CHECK_FALSE(bench.tell(lease));
    }
    SUBCASE("two leases report a change") {
      auto const lease = bench.acquire();
      auto const other = bench.acquire();
      bench.change(lease);
      CHECK_FALSE(bench.tell(lease));
      CHECK_FALSE(bench.tell(other));
    }
    SUBCASE("the lease was not acquired for a change in place") {
      auto const lease = bench.y.acquire(Access::read_write, bench.stream());
      bench.change(lease);
      CHECK_FALSE(bench.tell(lease));
    }
    SUBCASE("the change is a move from an operand that is freed by then") {
      auto const lease = bench.acquire();
      bench.change(lease);
      BlockId const gone = bench.z.id();
      { Buffer const freed = std::move(bench.z); }
      CHECK_THROWS_AS(
          bench.allocator.extend_recipe(
              lease, std::array{gone}, 0ns, [](Stream, std::span<void const* const>, void*) {}),
          spillway::ContractViolation);
    }
    CHECK_FALSE(bench.leaves_by_recipe(3));
  }

  TEST_CASE("A recipe outlives freed operands while its block is changed in place") {
    Bench bench;
    std::vector<Buffer> chain = bench.chain(3);
    spillway::LeaseRequest const request{chain[2].id(), Access::read_write, true};
    {
      auto const leases = bench.allocator.acquire_all({&request, 1}, bench.stream());
      chain.erase(chain.begin() + 1);
      CHECK(bench.allocator.stats().resident.bytes.current == 128_KiB);
      bench.kernels.write(bench.device, bench.stream(), leases[0].data(), 64_KiB, 5);
      CHECK(bench.allocator.extend_recipe(
          leases[0], {}, 0ns, [&](Stream on, std::span<void const* const>, void* made) {
            bench.kernels.check(bench.device, on, made, 64_KiB, 2);
            bench.kernels.write(bench.device, on, made, 64_KiB, 5);
          }));
    }
    bench.drop(chain[1]);
    bench.check(chain[1], 5);
    bench.run();
    CHECK(bench.recomputations() == 2);
  }

  TEST_CASE("Dropped blocks are made again before their operand is written") {
    for (bool const is_whole_write : {false, true}) {
      Pair bench;
      bench.make();
      bench.drop(bench.y);
      if (is_whole_write) {
        bench.x.swap_out();
      }
      bench.write(bench.x, 9);
      CHECK(bench.recomputations() == 1);
      bench.check(bench.y, 2);
      bench.check(bench.x, 9);
      bench.y.swap_out();  // its recipe has ended
      bench.check(bench.y, 2);
      bench.run();
      CHECK(bench.recomputations() == 1);
    }
  }

  TEST_CASE("A resident block loses its recipe when an operand is written") {
    Pair bench;
    bench.make();
    bench.write(bench.x, 9);
    bench.y.swap_out();
    CHECK(bench.allocator.stats().swap_outs.count == 1);
    bench.check(bench.y, 2);
    bench.run();
  }

  TEST_CASE("A failed acquire for writing leaves the recipes of the blocks that read its block") {
    // Of x and twelve blocks made from it, eight fit on the device and two on the host.
    Bench bench{512_KiB, 128_KiB};
    Buffer x{bench.allocator, 64_KiB};
    bench.write(x, 1);
    std::vector<Buffer> made;
    for (std::uint64_t seed = 10; seed < 22; ++seed) {
      made.emplace_back(bench.allocator, 64_KiB);
      bench.write(made.back(), seed);
      bench.give(made.back(), seed, {{x, 1}});
    }
    auto const check_all = [&] {
      for (std::uint64_t i = 0; i < made.size(); ++i) {
        bench.check(made[i], 10 + i);
      }
      bench.run();
    };
    check_all();
    for (Access const access : {Access::write, Access::read_write}) {
      CHECK_THROWS_AS((void)x.acquire(access, bench.stream()), spillway::OutOfDeviceMemory);
      check_all();
      bench.check(x, 1);
    }
    made.resize(4);
    bench.write(x, 9);
    bench.check(x, 9);
    check_all();
  }

  TEST_CASE(
      "A block is not dropped while the operand of its freed operand is acquired for writing") {
    Bench bench{192_KiB};
    Buffer x{bench.allocator, 64_KiB};
    Buffer y{bench.allocator, 64_KiB};
    Buffer z{bench.allocator, 64_KiB};
    bench.write(x, 1);
    bench.write(y, 2);
    bench.give(y, 2, {{x, 1}});
    bench.write(z, 3);
    bench.give(z, 3, {{y, 2}});
    x.swap_out();
    y.reset();  // can be made again for z, so its memory is given back
    Buffer other{bench.allocator, 128_KiB};
    {
      auto const held = other.acquire(Access::write, bench.stream());
      bench.write(x, 9);  // takes the room of z
    }
    CHECK(bench.allocator.stats().swap_outs.count == 2);
    bench.check(z, 3);
    bench.check(x, 9);
    bench.run();
  }

  TEST_CASE("A freed operand stays as long as a dropped block needs it") {
    Pair bench;
    bench.make();
    bench.drop(bench.y);
    BlockId const id = bench.x.id();
    SUBCASE("until the block is made again") {
      bench.x.reset();
      CHECK_THROWS_AS((void)bench.allocator.residency(id), spillway::ContractViolation);
      bench.check(bench.y, 2);
      bench.y.swap_out();
      bench.check(bench.y, 2);
    }
    SUBCASE("until the block is written") {
      bench.x = Buffer{};
      bench.write(bench.y, 5);
      bench.check(bench.y, 5);
    }
    SUBCASE("until the block is freed, too") {
      bench.x = Buffer{};
      CHECK(bench.allocator.stats().allocated.blocks.current == 2);
      bench.y.reset();
    }
    SUBCASE("the operand may be evicted meanwhile") {
      bench.x.reset();
      {
        Buffer large{bench.allocator, 1_MiB};
        bench.write(large, 7);
      }
      bench.check(bench.y, 2);
    }
    bench.run();
    std::size_t const left = bench.y.empty() ? 0 : 1;
    CHECK(bench.allocator.stats().allocated.blocks.current == left);
    CHECK(bench.allocator.stats().resident.blocks.current == left);
  }

  TEST_CASE("A block that is being copied to the host does not need its recipe") {
    Pair bench;
    bench.make(1s);  // so that the block is copied
    SUBCASE("its operand is freed") {
      bench.device.at_next_copy = [&] {
        bench.x.reset();
        CHECK(bench.allocator.stats().allocated.blocks.current == 1);
      };
      bench.y.swap_out();
      bench.run();
      CHECK(bench.y.residency() == Residency::host);
    }
    SUBCASE("its operand is written") {
      bench.device.at_next_copy = [&] { bench.write(bench.x, 5); };
      bench.y.swap_out();
      bench.run();
      CHECK(bench.y.residency() == Residency::host);
      bench.check(bench.x, 5);
    }
    SUBCASE("its operand is freed, and then the copy fails") {
      bench.device.at_next_copy = [&] {
        bench.x.reset();
        throw spillway::DeviceError{"the copy fails"};
      };
      CHECK_THROWS_AS(bench.y.swap_out(), spillway::DeviceError);
      CHECK(bench.y.residency() == Residency::device);
    }
    bench.check(bench.y, 2);
    bench.y.swap_out();
    bench.check(bench.y, 2);
    bench.run();
    CHECK(bench.recomputations() == 0);
  }

  TEST_CASE("An operand freed while a block made from it is dropped stays until it is not needed") {
    Pair bench;
    bench.make();
    Buffer z{bench.allocator, 128_KiB};
    bench.write(z, 3);
    auto lease = bench.x.acquire(Access::read, bench.stream());
    bench.device.at_next_copy = [&] {  // of `z`, which leaves together with `y`
      lease.release();
      bench.x.reset();
      CHECK(bench.allocator.stats().allocated.blocks.current == 3);
    };
    Buffer{bench.allocator, 896_KiB}.reset();
    CHECK(!bench.device.at_next_copy);
    CHECK(bench.y.residency() == Residency::none);
    CHECK(bench.allocator.stats().allocated.blocks.current == 3);
    bench.check(bench.y, 2);
    bench.run();
    CHECK(bench.recomputations() == 1);
    Buffer{bench.allocator, 64_KiB}.reset();
    CHECK(bench.allocator.stats().allocated.blocks.current == 2);
  }

  TEST_CASE("A block that gets a recipe while an operand is acquired for writing is not dropped") {
    Pair bench;
    bench.write(bench.x, 1);
    bench.write(bench.y, 2);
    bench.device.at_next_wait = [&] {  // the acquire on the second stream is under way
      bench.give(bench.y, 2, {{bench.x, 1}});
      bench.y.swap_out();
    };
    bench.write(bench.x, 5, 1);
    CHECK(!bench.device.at_next_wait);
    bench.check(bench.y, 2);
    bench.check(bench.x, 5);
    bench.run();
    CHECK(bench.recomputations() == 0);
  }

  TEST_CASE("A resident block loses its recipe when an operand without a recipe is freed") {
    Pair bench;
    bench.make();
    bench.x.reset();
    CHECK(bench.allocator.stats().allocated.blocks.current == 1);
    bench.y.swap_out();
    bench.check(bench.y, 2);
    bench.run();
    CHECK(bench.recomputations() == 0);
  }

  TEST_CASE("A block is made again through freed operands") {
    Bench bench;
    std::vector<Buffer> made = bench.chain(4);
    bench.run();
    std::array<std::uint64_t, 2> const middle{1, 2};
    SUBCASE("freed operands on the device") {}
    SUBCASE("freed operands on the host") {
      for (std::uint64_t const i : middle) {
        bench.give(made[i], i, {{made[i - 1], i - 1}}, 1s);
        made[i].swap_out();
        bench.run();
        REQUIRE(made[i].residency() == Residency::host);
        bench.give(made[i], i, {{made[i - 1], i - 1}});
      }
    }
    SUBCASE("freed operands that are dropped") {
      for (std::uint64_t const i : middle) {
        bench.drop(made[i]);
      }
    }
    for (std::uint64_t const i : middle) {
      made[i].reset();
    }
    spillway::Stats const freed = bench.allocator.stats();
    CHECK(freed.allocated.blocks.current == 2);
    CHECK(freed.resident.blocks.current == 2);
    CHECK(bench.allocator.host_stats().tiers[0].slot_count == 0);
    auto const before = bench.recomputations();
    for (std::uint64_t round = 1; round != 3; ++round) {
      bench.drop(made[3]);
      bench.check(made[3], 3);
      bench.run();
      spillway::Stats const stats = bench.allocator.stats();
      CHECK(bench.recomputations() == before + 3 * round);
      CHECK(stats.allocated.blocks.current == 2);
      CHECK(stats.resident.blocks.current == 2);
    }
    std::size_t records = 2 + middle.size();
    SUBCASE("they are forgotten when the block is freed") {
      made[3].reset();
      records = 1;
    }
    SUBCASE("they are forgotten when the block is written") {
      bench.write(made[3], 7);
      records = 2;
      bench.check(made[3], 7);
    }
    SUBCASE("they are forgotten when their own operand is written") {
      bench.write(made[0], 8);
      records = 2;
      made[3].swap_out();
      bench.check(made[3], 3);
    }
    SUBCASE("they are forgotten when their own operand is freed without a recipe") {
      made[0].reset();
      records = 1;
      made[3].swap_out();
      bench.check(made[3], 3);
    }
    SUBCASE("they stay if their own operand is freed while the block is dropped") {
      bench.drop(made[3]);
      made[0].reset();
      CHECK(bench.allocator.stats().allocated.blocks.current == 2);
      bench.check(made[3], 3);
      records = 1;
    }
    SUBCASE("the dropped block is made again before their own operand is written") {
      bench.drop(made[3]);
      bench.write(made[0], 9);
      bench.check(made[3], 3);
      records = 2;
    }
    bench.run();
    std::size_t counted = 0;
    bench.allocator.for_each_block(
        [&](BlockId, spillway::detail::BlockRecord const&) { ++counted; });
    CHECK(counted == records);
  }

  TEST_CASE("Freed blocks that are made from each other go, and their operand may be written") {
    for (bool const frees_first : {false, true}) {
      CAPTURE(frees_first);
      Bench bench;
      Buffer x{bench.allocator, 64_KiB};
      std::array<Buffer, 2> made{Buffer{bench.allocator, 64_KiB}, Buffer{bench.allocator, 64_KiB}};
      bench.write(x, 1);
      bench.write(made[0], 2);
      bench.write(made[1], 3);
      bench.give(made[0], 2, {{made[1], 3}});
      bench.give(made[1], 3, {{made[0], 2}, {x, 1}});
      made[frees_first ? 0 : 1].reset();
      made[frees_first ? 1 : 0].reset();
      bench.write(x, 4);
      bench.check(x, 4);
      bench.run();
      CHECK(bench.recomputations() == 0);
      std::size_t records = 0;
      bench.allocator.for_each_block([&](BlockId, BlockRecord const&) { ++records; });
      CHECK(records == 1);
    }
  }

  TEST_CASE("Recipes: the cost and the operands of a block are those of its whole chain") {
    Links links;
    BlockId const bottom = links.add({});
    BlockId const first = links.add({bottom});
    BlockId const second = links.add({first});
    BlockId const third = links.add({second});
    for (BlockId const id : {first, second, third}) {
      links.drop(id);
    }
    CHECK(links.recipes.cost_ns(third) == 3);
    std::vector<BlockId> visited;
    CHECK(links.recipes.all_below(third, [&](BlockId id) {
      visited.push_back(id);
      return true;
    }));
    CHECK(visited == std::vector{bottom});
  }

  TEST_CASE("Recipes: a block may be dropped if its chain is short enough and fits") {
    Links links;
    auto const made_from = [&](BlockId operand) {  // which `add` would recompute
      BlockId const id = links.add({});
      links.recipes.give(id, std::array{operand}, 1, [](auto&&...) {});
      return id;
    };
    BlockId last = links.add({});
    for (std::size_t i = 0; i < spillway::detail::Recipes::most_chained; ++i) {
      last = made_from(last);
      CHECK(links.recipes.may_drop(last, 1 << 20));
      links.drop(last);
    }
    CHECK_FALSE(links.recipes.may_drop(made_from(last), 1 << 20));

    BlockId const made = links.add({links.add({})});
    CHECK(links.recipes.may_drop(made, 128));  // it and its operand
    CHECK_FALSE(links.recipes.may_drop(made, 127));
    links.recipes.begin_writing(made);
    CHECK_FALSE(links.recipes.may_drop(made, 128));
    links.recipes.end_writing(made);
    CHECK(links.recipes.may_drop(made, 128));
  }

  TEST_CASE("Recipes: a new recipe is not suspended, and can be extended as often as the first") {
    Links links;
    BlockId const bottom = links.add({});
    BlockId const made = links.add({bottom});
    (void)links.add({made});  // so that what is known of `made` outlives its recipe
    auto const extend = [&](std::uint32_t lease) {
      links.recipes.suspend(made, lease);
      return links.recipes.extend(made, lease, {}, 1, [](auto&&...) {});
    };
    for (std::uint32_t i = 0; i < spillway::detail::Recipes::most_extensions; ++i) {
      CHECK(extend(i));
    }
    CHECK_FALSE(extend(100));
    for (bool const is_suspended : {false, true}) {
      CAPTURE(is_suspended);
      links.recipes.give(made, std::array{bottom}, 1, [](auto&&...) {});
      CHECK(links.table.find(made)->has_recipe());
      CHECK(extend(101));
      links.recipes.suspend(made, 102);
    }
  }

  TEST_CASE("Recipes: only orphans whose need may have ended are looked at") {
    Links links;
    std::vector<BlockId> operands;
    std::vector<BlockId> made;
    for (int i = 0; i < 100; ++i) {
      operands.push_back(links.add({}));
      made.push_back(links.add({operands.back()}));
      links.drop(made.back());
    }
    for (BlockId const operand : operands) {
      REQUIRE_FALSE(links.recipes.may_go(operand));
      CHECK(links.recipes.orphans_to_look_at() == 1);
      CHECK_FALSE(links.recipes.take_orphan().has_value());
      CHECK(links.recipes.orphans_to_look_at() == 0);
    }
    links.recompute(made[10]);
    CHECK(links.recipes.orphans_to_look_at() == 1);
    auto const orphan = links.recipes.take_orphan();
    REQUIRE(orphan.has_value());
    CHECK(orphan->id == operands[10]);
    CHECK(orphan->is_for_good);
    CHECK_FALSE(links.recipes.take_orphan().has_value());
  }

  TEST_CASE("Recipes: orphans have bytes exactly as long as dropped blocks need them") {
    std::uint64_t const seed = 20260212;
    CAPTURE(seed);
    std::mt19937_64 random{seed};
    std::size_t kept = 0;
    std::size_t bare = 0;
    for (int round = 0; round < 40; ++round) {
      Links links;
      std::vector<BlockId> owned;
      auto const draw = [&] { return static_cast<std::size_t>(random() % owned.size()); };
      for (int action = 0; action < 400; ++action) {
        std::uint64_t const what = owned.empty() ? 0 : random() % 8;
        if (what < 3) {
          std::vector<BlockId> operands;
          for (std::uint64_t i = random() % 4; i != 0 && !owned.empty(); --i) {
            operands.push_back(owned[draw()]);  // perhaps the same again
          }
          owned.push_back(links.add(operands));
        } else if (what < 5) {
          links.drop_if_possible(owned[draw()]);
        } else if (what == 5) {
          links.recompute_all(owned[draw()]);
        } else {
          std::size_t const at = draw();
          links.free(owned[at]);
          owned.erase(owned.begin() + static_cast<std::ptrdiff_t>(at));
        }
        links.free_orphans();
        REQUIRE(links.recipes.orphans_to_look_at() == 0);
        links.table.for_each([&](BlockId id, BlockRecord const& block) {
          REQUIRE(links.are_mutual(id, block));
          if (block.recipe == nullptr || !block.recipe->is_orphan) {
            return;
          }
          bool const is_needed = links.recipes.dependent_in_need(id).has_value();
          bool const has_bytes = block.state() != BlockState::dropped;
          REQUIRE_FALSE(block.recipe->dependents.empty());
          REQUIRE((is_needed || !has_bytes));
          kept += has_bytes ? 1U : 0U;
          bare += has_bytes ? 0U : 1U;
        });
      }
      for (BlockId const id : owned) {
        links.free(id);
        links.free_orphans();
      }
      CHECK(links.table.size() == 0);
    }
    CHECK(kept > 1000);  // otherwise this has tested little
    CHECK(bare > 1000);
  }

  TEST_CASE("A block made from a freed block that is being made again is intact") {
    Bench bench;
    std::vector<Buffer> made = bench.chain(3);
    Buffer other{bench.allocator, 64_KiB};
    bench.write(other, 11);
    bench.give(other, 11, {{made[1], 1}});
    made[1].reset();
    bench.drop(made[2]);
    bench.drop(other);
    bench.check(made[2], 2, 1);
    bench.check(other, 11);
    bench.run();
    CHECK(bench.recomputations() == 3);  // for both
    SUBCASE("also when a recipe throws on the way") {
      bench.drop(made[2]);
      bench.throws_next = true;
      CHECK_THROWS_AS(bench.check(made[2], 2), std::runtime_error);
      CHECK(bench.allocator.stats().resident.blocks.current == 2);
      bench.check(made[2], 2);
    }
    made.clear();
    other.reset();
    bench.run();
    CHECK(bench.allocator.stats().allocated.blocks.current == 0);
    CHECK(bench.allocator.stats().resident.blocks.current == 0);
  }

  TEST_CASE("Rows of freed blocks without memory are no longer than can be made again at once") {
    Bench bench{4_MiB};
    std::vector<Buffer> made = bench.chain(30);
    std::size_t most = 0;
    auto const free_next = [&](std::size_t i) {
      made[i].reset();
      std::size_t dropped = 0;
      bench.allocator.for_each_block([&](BlockId, spillway::detail::BlockRecord const& block) {
        dropped += block.is_abandoned ? 1 : 0;
      });
      most = std::max(most, dropped);
      CHECK(dropped < spillway::detail::Recipes::most_chained);
    };
    SUBCASE("freed from the first to the last") {
      for (std::size_t i = 1; i + 1 < made.size(); ++i) {
        free_next(i);
      }
    }
    SUBCASE("freed from the last to the first") {
      for (std::size_t i = made.size() - 1; --i != 0;) {
        free_next(i);
      }
    }
    CHECK(most == spillway::detail::Recipes::most_chained - 1);
    made.back().swap_out();
    bench.check(made.back(), 29);
    bench.run();
    CHECK(bench.allocator.stats().resident.blocks.current == 2);
  }

  TEST_CASE("A recipe can be replaced, can name an operand twice, and needs written operands") {
    Pair bench;
    bench.make();
    Buffer z{bench.allocator, 64_KiB};
    CHECK_THROWS_AS(bench.give(bench.y, 2, {{z, 4}}), spillway::ContractViolation);
    CHECK_THROWS_AS(bench.give(z, 4, {{bench.x, 1}}), spillway::ContractViolation);
    CHECK_THROWS_AS(bench.give(bench.y, 2, {{bench.y, 2}}), spillway::ContractViolation);
    bench.write(z, 4);
    bench.give(bench.y, 2, {{z, 4}, {z, 4}});
    bench.write(bench.x, 8);  // no longer an operand
    bench.drop(bench.y);
    CHECK_THROWS_AS(bench.give(bench.y, 2, {{z, 4}}), spillway::ContractViolation);
    bench.check(bench.y, 2);
    bench.run();
  }

  TEST_CASE("A recipe that has no operands makes a block from nothing") {
    Bench bench;
    Buffer y{bench.allocator, 64_KiB};
    bench.write(y, 3);
    bench.give(y, 3, {});
    bench.drop(y);
    bench.check(y, 3);
    bench.run();
  }

  TEST_CASE("The recompute policy is told the durations of steps after its first choice") {
    spillway::ModelApi device{{.capacity_bytes = 2_MiB}};
    std::vector<double> told;
    spillway::DeviceAllocator<Told>::Options options{.capacity_bytes = 1_MiB};
    options.host.pinned_bytes = 1_MiB;
    options.recompute = TellsSteps{&told};
    spillway::DeviceAllocator<Told> allocator{device, options};
    auto const stream = device.create_stream();
    BlockId const x = allocator.allocate(64_KiB);
    BlockId const y = allocator.allocate(64_KiB);
    for (BlockId const block : {x, y}) {
      (void)allocator.acquire(block, Access::write, stream);
    }
    auto const choose = [&] {
      allocator.set_recipe(
          y, {x}, 1us, [](auto /*stream*/, std::span<void const* const> /*x*/, void* /*y*/) {});
      allocator.swap_out(y);
      (void)allocator.acquire(y, Access::write, stream);
    };
    choose();  // before the first step
    for (std::uint64_t const kernel_ns : {1'000'000U, 2'000'000U, 3'000'000U}) {
      allocator.begin_step();
      if (kernel_ns == 1'000'000) {
        choose();
      } else if (kernel_ns == 3'000'000) {
        allocator.swap_out(x);  // without a choice: a step in which nothing leaves does not count
      }
      device.compute(stream, kernel_ns);
    }
    allocator.begin_step();
    CHECK(told == std::vector<double>{0, 1e6, 0, 3e6});
    allocator.deallocate(y);
    allocator.deallocate(x);
    allocator.retire_stream(stream);
    device.destroy_stream(stream);
  }

  TEST_CASE("A read by a recipe does not count as a use, and keeps the time of the last lease") {
    std::vector<std::uint32_t> released;
    spillway::DeviceAllocator<Seen>::Options options{.capacity_bytes = 1_MiB};
    options.host.pinned_bytes = 1_MiB;
    options.eviction.emplace().released = &released;
    support::SteppedBench<Seen> bench{{.capacity_bytes = 64_MiB}, options};
    using Block = spillway::SwappableBuffer<spillway::DeviceAllocator<Seen>>;
    Block x{bench.allocator, 64_KiB};
    Block y{bench.allocator, 64_KiB};
    Block z{bench.allocator, 64_KiB};
    for (int step = 0; step < 2; ++step) {
      bench.allocator.begin_step();
      bench.write(x, 1);
      bench.write(y, 2);
      bench.allocator.set_recipe(
          y.id(), {x.id()}, 0ns, [&](Stream on, std::span<void const* const>, void* made) {
            bench.kernels.write(bench.device, on, made, 64_KiB, 2);
          });
      y.swap_out();
      bench.write(z, 3);
      bench.check(y, 2);
      bench.check(x, 1);
      bench.run();
    }
    bench.allocator.begin_step();
    CHECK(bench.allocator.stats().recomputations.count == 2);
    REQUIRE(released.size() == 5);
    CHECK(released[0] == 1);
  }

  TEST_CASE("A group that is acquired again once its operands came in records each use once") {
    std::vector<std::uint32_t> released;
    spillway::DeviceAllocator<Seen>::Options options{.capacity_bytes = 1_MiB};
    options.bounce_bytes = 0;
    options.host.pinned_bytes = 16_MiB;
    options.eviction.emplace().released = &released;
    support::SteppedBench<Seen> bench{{.capacity_bytes = 64_MiB}, options};
    using Block = spillway::SwappableBuffer<spillway::DeviceAllocator<Seen>>;
    Block x{bench.allocator, 384_KiB};
    Block y{bench.allocator, 384_KiB};
    Block other{bench.allocator, 512_KiB};
    bench.allocator.begin_step();
    bench.write(x, 1);
    bench.write(y, 2);
    bench.allocator.set_recipe(
        y.id(), {x.id()}, 0ns, [&](Stream on, std::span<void const* const>, void* made) {
          bench.kernels.write(bench.device, on, made, 384_KiB, 2);
        });
    y.swap_out();
    bench.write(other, 3);
    {
      // Beside `other` there is no room for both `x` and `y`.
      auto const leases = bench.allocator.acquire_all(
          {other.request(Access::read), y.request(Access::read)}, bench.stream());
    }
    bench.run();

    bench.allocator.begin_step();

    CHECK(bench.allocator.stats().recomputations.count == 1);
    CHECK(released.size() == 5);
  }

  TEST_CASE("No recipes are wanted if the policy wants none and the host pool has enough room") {
    for (bool const has_room : {true, false}) {
      CAPTURE(has_room);
      spillway::ModelApi device{{.capacity_bytes = 2_MiB}};
      std::vector<double> told;
      spillway::DeviceAllocator<Told>::Options options{.capacity_bytes = 1_MiB};
      options.host.pinned_bytes = has_room ? 2_MiB : 512_KiB;
      options.recompute = TellsSteps{&told, false};
      spillway::DeviceAllocator<Told> allocator{device, options};
      auto const stream = device.create_stream();
      CHECK(allocator.wants_recipes());  // before the policy is asked
      BlockId const x = allocator.allocate(64_KiB);
      allocator.begin_step();
      CHECK(allocator.wants_recipes() == !has_room);
      (void)allocator.acquire(x, Access::write, stream);
      allocator.swap_out(x);
      device.compute(stream, 1'000'000);
      (void)allocator.acquire(x, Access::read, stream);
      allocator.begin_step();
      REQUIRE(told.size() == 2);
      CHECK((told.back() > 0) == has_room);  // otherwise there was no choice
      allocator.deallocate(x);
      allocator.retire_stream(stream);
      device.destroy_stream(stream);
    }
  }

  namespace {

  struct OnModel : spillway::PoliciesFor<spillway::ModelApi> {
    using recompute = spillway::RecomputeIfCheaper;
  };
  /// Bytes copied out in the fourth of four steps. Each step makes `large` from an operand and
  /// `small` from nothing; one of the two has to be away until both are used again.
  std::uint64_t bytes_copied(spillway::RecomputeIfCheaper policy, bool frees_operand) {
    spillway::ModelApi device{{.capacity_bytes = 2_MiB}};
    spillway::DeviceAllocator<OnModel>::Options options{.capacity_bytes = 512_KiB};
    options.host.pinned_bytes = 2_MiB;
    options.recompute = policy;
    spillway::DeviceAllocator<OnModel> allocator{device, options};
    auto const stream = device.create_stream();
    auto const use = [&](BlockId block, Access access) {
      (void)allocator.acquire(block, access, stream);
      device.compute(stream, 100'000);
    };
    std::uint64_t before = 0;
    for (int step = 0; step < 4; ++step) {
      before = allocator.stats().swap_outs.bytes;
      allocator.begin_step();
      BlockId const operand = allocator.allocate(32_KiB);
      use(operand, Access::write);
      BlockId const large = allocator.declare(160_KiB);
      use(large, Access::write);
      allocator.set_recipe(large, {operand}, 1us, [](auto, std::span<void const* const>, void*) {});
      if (frees_operand) {
        allocator.deallocate(operand);
      }
      BlockId const small = allocator.declare(128_KiB);
      use(small, Access::write);
      BlockId const between = allocator.declare(288_KiB);
      use(between, Access::write);
      allocator.deallocate(between);
      use(small, Access::read);
      use(large, Access::read);
      allocator.deallocate(small);
      allocator.deallocate(large);
      if (!frees_operand) {
        use(operand, Access::read);
        allocator.deallocate(operand);
      }
    }
    std::uint64_t const bytes = allocator.stats().swap_outs.bytes - before;
    allocator.retire_stream(stream);
    device.destroy_stream(stream);
    return bytes;
  }

  }  // namespace

  TEST_CASE("A plan that counts the cost of recipes evicts blocks with cheap recipes") {
    CHECK(bytes_copied(spillway::RecomputeIfCheaper{1, false}, false) == 128_KiB);
    CHECK(bytes_copied(spillway::RecomputeIfCheaper{1, true}, false) == 0);
  }

  TEST_CASE("A plan does not count on recipes that end before they are needed") {
    CHECK(bytes_copied(spillway::RecomputeIfCheaper{1, true}, true) == 128_KiB);
  }

  namespace {

  /// A lock that notes when it is taken a second time while held.
  struct WatchedLock {
    void lock() noexcept {
      was_taken_twice = was_taken_twice || is_taken;
      is_taken = true;
    }
    void unlock() noexcept { is_taken = false; }
    bool try_lock() noexcept { return !is_taken && (lock(), true); }
    bool is_taken = false;
    static inline bool was_taken_twice = false;
  };
  struct Watched : Stepped {
    using lock = WatchedLock;
  };

  /// A recipe that holds the last reference to its operand.
  struct HoldsOperand {
    using Allocator = spillway::DeviceAllocator<Watched>;
    using Buffer = spillway::SwappableBuffer<Allocator>;

    HoldsOperand() {
      WatchedLock::was_taken_twice = false;
      (void)operand->acquire(Access::write, stream);
      (void)made.acquire(Access::write, stream);
    }
    ~HoldsOperand() { allocator.retire_stream(stream); }
    HoldsOperand(HoldsOperand const&) = delete;
    HoldsOperand& operator=(HoldsOperand const&) = delete;

    [[nodiscard]] auto recipe() {
      return [held = operand](Stream, std::span<void const* const>, void*) {};
    }
    void give() {
      allocator.set_recipe(made.id(), {operand->id()}, 1us, recipe());
      operand.reset();
      REQUIRE(allocator.stats().allocated.blocks.current == 2);
    }
    /// Checks that the operand was freed, and not while the lock was held.
    void check_end() const {
      CHECK(allocator.stats().allocated.blocks.current == 1);
      CHECK_FALSE(WatchedLock::was_taken_twice);
    }

    Capturing device{{.capacity_bytes = 64_MiB}};
    Allocator allocator{device, {.capacity_bytes = 1_MiB}};
    Stream stream = device.create_stream();
    std::shared_ptr<Buffer> operand = std::make_shared<Buffer>(allocator, 64_KiB);
    Buffer made{allocator, 64_KiB};
  };

  }  // namespace

  TEST_CASE("A recipe that ends releases the buffers that it holds") {
    HoldsOperand bench;
    SUBCASE("when its block is written") {
      bench.give();
      (void)bench.made.acquire(Access::write, bench.stream);
      bench.check_end();
    }
    SUBCASE("when its block is given another recipe") {
      bench.give();
      bench.allocator.set_recipe(
          bench.made.id(), {}, 1us, [](Stream, std::span<void const* const>, void*) {});
      bench.check_end();
    }
    SUBCASE("when its block is freed") {
      bench.give();
      HoldsOperand::Buffer const other{bench.allocator, 64_KiB};
      bench.made.reset();
      bench.check_end();
    }
    SUBCASE("when it is refused") {
      HoldsOperand::Buffer unwritten{bench.allocator, 64_KiB};
      auto const set = [&] {
        bench.allocator.set_recipe(bench.made.id(),
                                   {unwritten.id()},
                                   1us,
                                   [held = std::exchange(bench.operand, nullptr)](
                                       Stream, std::span<void const* const>, void*) {});
      };
      CHECK_THROWS_AS(set(), spillway::ContractViolation);
      unwritten.reset();
      bench.check_end();
    }
    SUBCASE("when there is no recipe to extend") {
      auto const lease = bench.made.acquire(Access::read_write, bench.stream);
      CHECK_FALSE(
          bench.allocator.extend_recipe(lease,
                                        {},
                                        1us,
                                        [held = std::exchange(bench.operand, nullptr)](
                                            Stream, std::span<void const* const>, void*) {}));
      bench.check_end();
    }
  }

  TEST_CASE("Under pressure, blocks that can be made again are dropped") {
    Bench bench{512_KiB};
    Buffer x{bench.allocator, 64_KiB};
    bench.write(x, 1);
    std::vector<Buffer> made;
    for (std::uint64_t i = 0; i < 12; ++i) {
      made.emplace_back(bench.allocator, 64_KiB);
      bench.write(made.back(), 10 + i);
      bench.give(made.back(), 10 + i, {{x, 1}});
    }
    for (std::uint64_t i = 0; i < 12; ++i) {
      bench.check(made[i], 10 + i);
    }
    bench.run();
    CHECK(bench.recomputations() > 0);
    CHECK(bench.allocator.stats().swap_outs.bytes <= 64_KiB);  // that of `x`
  }
}
