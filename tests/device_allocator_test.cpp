// SPDX-License-Identifier: Apache-2.0
#include <spillway/device_allocator.hpp>
#include <spillway/policies.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/sim.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <optional>
#include <vector>

#include <support/small_allocator.hpp>

using namespace spillway;
using namespace spillway::literals;
using support::SmallBench;

namespace {

/// Sends away blocks of at least `least_bytes` only.
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

}  // namespace

TEST_SUITE("device_allocator") {
  TEST_CASE("DeviceAllocator: an eviction policy starts with the parameters that it is given") {
    CHECK(residency_of_small(LargeOnly{}) == Residency::host);
    CHECK(residency_of_small(LargeOnly{100_KiB}) == Residency::device);
  }

  TEST_CASE("DeviceAllocator: a checked device refuses to read what was never written") {
    SmallBench bench;
    auto& memory = bench.allocator;
    BlockId const id = memory.allocate(1000);
    BlockId const other = memory.declare(1000);

    CHECK_THROWS_AS((void)memory.acquire<Access::read>(id, bench.stream), ContractViolation);
    CHECK_THROWS_AS((void)memory.acquire(other, Access::read, bench.stream), ContractViolation);
    CHECK(memory.stats().leased.blocks.current == 0);
    // What an operation writes it may read, too.
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

  TEST_CASE("DeviceAllocator: a device that does not check lets anything be read") {
    SimApi device{{.capacity_bytes = 64_MiB, .check_reads = false}};
    support::SmallAllocator memory{device, support::small_options(1_MiB)};
    auto const stream = memory.create_stream();
    support::SmallBuffer const buffer{memory, 1000};
    CHECK_NOTHROW((void)buffer.acquire_read(stream));
  }

  TEST_CASE("DeviceAllocator: what several leases of one operation hold ends with them") {
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
}
