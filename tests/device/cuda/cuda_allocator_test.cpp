// SPDX-License-Identifier: Apache-2.0
// The allocator on CudaApi, on a stand-in for the CUDA runtime. On a GPU: tests/gpu/.
#include <spillway/cuda.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/host_swap_pool.hpp>
#include <spillway/page_arena.hpp>
#include <spillway/stream/stream_order.hpp>
#include <spillway/swappable_buffer.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <support/allocator_load.hpp>
#include <support/fake_cudart.hpp>
#include <support/host_work.hpp>
#include <sys/mman.h>

using namespace spillway;

namespace {

struct FakeRuntime {
  FakeCudart cuda{{.capacity_bytes = 64U << 20U, .numa_node = 0}};
};

struct Remapping : CudaPolicies {
  using arena = MappedPages;
};
struct Stable : CudaPolicies {
  using arena = StableAddresses;
};

template <class Policies>
struct FakeCuda : FakeRuntime {
  using policies = Policies;
  using stream_type = cudaStream_t;
  [[nodiscard]] static std::size_t scale() { return 1; }

  [[nodiscard]] test::HostGate make_gate() { return {}; }
  void write(void* p, std::size_t n, std::uint32_t tag, cudaStream_t stream) {
    work.write(p, n, tag, stream);
  }
  void check(void const* p, std::size_t n, std::uint32_t tag, cudaStream_t stream) {
    work.check(p, n, tag, stream);
  }
  [[nodiscard]] std::uint64_t wrong() const { return work.wrong(); }
  [[nodiscard]] bool is_sound() const { return cudaPeekAtLastError() == cudaSuccess; }

  CudaApi device{1};
  test::HostWork<CudaApi> work{device};
};

using Allocator = DeviceAllocator<CudaPolicies>;
using Buffer = SwappableBuffer<Allocator>;

/// Two streams, one of which is going to be captured, and room for eight blocks of 1 MiB.
struct Capture {
  static Allocator::Options options() {
    Allocator::Options options{.capacity_bytes = 8U << 20U};
    options.host.pinned_bytes = 32U << 20U;
    return options;
  }
  ~Capture() {
    others.clear();
    for (cudaStream_t const stream : {captured, other}) {
      allocator.retire_stream(stream);
      device.synchronize(stream);
      device.destroy_stream(stream);
    }
  }

  void write(Allocator::lease_type const& lease, std::uint32_t tag, cudaStream_t stream) {
    work.write(lease.data(), lease.size_bytes(), tag, stream);
  }
  void check(Allocator::lease_type const& lease, std::uint32_t tag, cudaStream_t stream) {
    work.check(lease.data(), lease.size_bytes(), tag, stream);
  }
  /// Twelve blocks, which do not all fit on the device.
  void fill_device() {
    for (std::uint32_t i = 0; i < 12; ++i) {
      others.emplace_back(allocator, 1U << 20U);
      write(others.back().acquire(Access::write, other), 100 + i, other);
    }
  }
  void use_others() {
    for (std::uint32_t i = 0; i < others.size(); ++i) {
      check(others[i].acquire(Access::read, other), 100 + i, other);
    }
  }

  FakeRuntime fake;
  CudaApi device;
  test::HostWork<CudaApi> work{device};
  cudaStream_t captured = device.create_stream();
  cudaStream_t other = device.create_stream();
  Allocator allocator{device, options()};
  std::vector<Buffer> others;
};

/// Host memory that CUDA has pinned, as far as it is resident.
std::size_t pinned_bytes(FakeCudart const& cuda) {
  std::scoped_lock const lock{cuda.mutex};
  std::size_t bytes = 0;
  for (auto const& [address, range] : cuda.ranges) {
    if (range.kind == FakeCudart::RangeKind::pinned) {
      bytes += range.bytes;
    } else if (range.kind == FakeCudart::RangeKind::registered) {
      constexpr std::size_t page_bytes = 4096;
      std::vector<unsigned char> is_resident((range.bytes + page_bytes - 1) / page_bytes);
      // NOLINTNEXTLINE(performance-no-int-to-ptr): the stand-in keeps addresses as integers
      void* const memory = reinterpret_cast<void*>(address);
      REQUIRE(mincore(memory, range.bytes, is_resident.data()) == 0);
      bytes += page_bytes * static_cast<std::size_t>(std::count_if(
                                is_resident.begin(), is_resident.end(), [](unsigned char page) {
                                  return (page & 1U) != 0;
                                }));
    }
  }
  return bytes;
}

}  // namespace

TEST_SUITE("cuda_allocator") {
  TEST_CASE_TEMPLATE_INVOKE(
      allocator_load, FakeCuda<CudaPolicies>, FakeCuda<Remapping>, FakeCuda<Stable>);

  TEST_CASE("DeviceAllocator: capturing work on leased buffers continues while other blocks swap "
            "and move") {
    Capture now;
    Buffer used{now.allocator, 1U << 20U};
    auto const lease = used.acquire(Access::write, now.captured);
    now.write(lease, 1, now.captured);
    now.fill_device();

    now.allocator.prepare_capture(now.captured);
    now.fake.cuda.begin_capture(now.captured);
    now.use_others();
    (void)now.allocator.compact();
    CHECK_FALSE(now.fake.cuda.is_capture_broken());
    now.fake.cuda.end_capture(now.captured);

    CHECK(now.allocator.stats().swap_outs.count > 0);
    now.allocator.synchronize();
    CHECK(now.work.wrong() == 0);
  }

  TEST_CASE("DeviceAllocator: compaction moves many blocks with few calls") {
    FakeRuntime fake;
    CudaApi device;
    test::HostWork<CudaApi> work{device};
    cudaStream_t const stream = device.create_stream();
    Allocator allocator{device, {.capacity_bytes = 8U << 20U}};
    std::vector<Buffer> kept;
    {
      std::vector<Buffer> gaps;
      for (std::uint32_t i = 0; i < 128; ++i) {
        Buffer buffer{allocator, 64U << 10U};
        auto const lease = buffer.acquire(Access::write, stream);
        work.write(lease.data(), lease.size_bytes(), i, stream);
        (i % 2 == 0 ? gaps : kept).push_back(std::move(buffer));
      }
    }
    auto const calls = [&] {
      return fake.cuda.calls("cudaMemcpyAsync") + fake.cuda.calls("cudaMemcpyBatchAsync");
    };
    std::size_t const before = calls();

    while (allocator.compact() != 0) {
    }

    CHECK(allocator.stats().moves.count >= 32);
    CHECK(calls() - before <= 4);
    CHECK(allocator.stats().largest_free_bytes == allocator.stats().free_bytes);
    for (std::uint32_t i = 0; i < kept.size(); ++i) {
      auto const lease = kept[i].acquire(Access::read, stream);
      work.check(lease.data(), lease.size_bytes(), 2 * i + 1, stream);
    }
    allocator.retire_stream(stream);
    device.synchronize(stream);
    device.destroy_stream(stream);
    CHECK(work.wrong() == 0);
  }

  TEST_CASE("DeviceAllocator: under pressure, leases that end together cost one event") {
    Capture now;
    now.fill_device();  // with others away
    std::vector<Allocator::lease_type> leases;
    for (Buffer& buffer : std::span{now.others}.last(4)) {
      leases.push_back(now.allocator.acquire(buffer.id(), Access::read, now.other));
    }
    std::size_t const records = now.fake.cuda.calls("cudaEventRecord");
    std::size_t const questions = now.fake.cuda.calls("cudaStreamIsCapturing");

    now.allocator.release_all(leases);

    CHECK(now.fake.cuda.calls("cudaEventRecord") - records == 1);
    CHECK(now.fake.cuda.calls("cudaStreamIsCapturing") - questions <= 1);
  }

  TEST_CASE("DeviceAllocator: a block of many pages is mapped, and unmapped, as one piece") {
    using Mapping = DeviceAllocator<Remapping>;
    FakeRuntime fake;
    CudaApi device;
    std::size_t const bytes = 64 * device.granularity_bytes();
    {
      Mapping allocator{device, {.capacity_bytes = bytes}};
      CHECK(fake.cuda.calls("cuMemCreate") == 1);
      SwappableBuffer<Mapping> const large{allocator, bytes};
      CHECK(fake.cuda.calls("cuMemMap") == 1);
      CHECK(fake.cuda.calls("cuMemSetAccess") == 1);
    }
    CHECK(fake.cuda.calls("cuMemUnmap") == 1);
    CHECK(fake.cuda.calls("cuMemCreate") == 1);
    CHECK(fake.cuda.calls("cuMemRelease") == 1);
  }

  TEST_CASE(
      "DeviceAllocator: adjacent pieces form one larger block, and are unmapped by one call") {
    using Mapping = DeviceAllocator<Remapping>;
    FakeRuntime fake;
    CudaApi device;
    std::size_t const bytes = 32 * device.granularity_bytes();
    {
      Mapping allocator{device, {.capacity_bytes = 2 * bytes, .initial_bytes = 0}};
      {
        SwappableBuffer<Mapping> const one{allocator, bytes};
        SwappableBuffer<Mapping> const other{allocator, bytes};
        CHECK(fake.cuda.calls("cuMemCreate") == 2);
        CHECK(fake.cuda.calls("cuMemMap") == 2);
      }
      {
        SwappableBuffer<Mapping> const wide{allocator, 2 * bytes};  // both pieces are in place
        CHECK(fake.cuda.calls("cuMemMap") == 2);
      }
      CHECK(allocator.trim_sync() == 2 * bytes);
      CHECK(fake.cuda.calls("cuMemUnmap") == 1);
    }
    CHECK(fake.cuda.calls("cuMemRelease") == 2);
  }

  TEST_CASE_TEMPLATE("DeviceAllocator: a mapping that lacks memory for page tables is no error",
                     A,
                     Allocator,
                     DeviceAllocator<Remapping>) {
    FakeRuntime fake;
    CudaApi device;
    A allocator{device,
                {.capacity_bytes = 16_MiB,
                 .initial_bytes = 8_MiB,
                 .grows_in_place = std::is_same_v<A, Allocator>}};
    SwappableBuffer<A> const first{allocator, 8_MiB};
    fake.cuda.fail_next("cuMemSetAccess", cudaErrorMemoryAllocation);
    SwappableBuffer<A> const second{allocator, 8_MiB};
    CHECK(allocator.residency(second.id()) == Residency::device);
    // Pages are tried once more; growth in place is not, so that the first block leaves.
    CHECK(allocator.residency(first.id()) ==
          (std::is_same_v<A, Allocator> ? Residency::none : Residency::device));
  }

  TEST_CASE(
      "DeviceAllocator: in-place growth is made accessible by one call, and unmapped by one call") {
    FakeRuntime fake;
    CudaApi device;
    {
      Allocator allocator{device,
                          {.capacity_bytes = 33_MiB,
                           .initial_bytes = 8_MiB,
                           .growth_bytes = 4_MiB,
                           .grows_in_place = true}};
      CHECK(fake.cuda.calls("cuMemCreate") == 2);
      CHECK(fake.cuda.calls("cuMemMap") == 2);
      CHECK(fake.cuda.calls("cuMemSetAccess") == 1);
      {
        Buffer const large{allocator, 33_MiB};
        CHECK(fake.cuda.calls("cuMemCreate") == 9);
        CHECK(fake.cuda.calls("cuMemMap") == 9);
        CHECK(fake.cuda.calls("cuMemSetAccess") == 3);  // the last piece has another size
      }
      CHECK(allocator.trim_sync() == 33_MiB);
      CHECK(fake.cuda.calls("cuMemUnmap") == 1);
      CHECK(fake.cuda.calls("cuMemRelease") == 9);
      Buffer const again{allocator, 16_MiB};
      CHECK(fake.cuda.calls("cuMemSetAccess") == 4);
    }
    CHECK(fake.cuda.calls("cuMemUnmap") == 2);
    CHECK(fake.cuda.calls("cuMemCreate") == fake.cuda.calls("cuMemRelease"));
  }

  TEST_CASE(
      "HostSwapPool: for 64 MiB or more swapped out, at most 1.05 times as many bytes are pinned") {
    for (int const numa_node : {0, -1}) {
      CAPTURE(numa_node);
      FakeCudart const cuda{{.numa_node = numa_node}};
      CudaApi device;
      StreamOrder<CudaApi> order{device};
      HostSwapPool<CudaApi> pool{device, order, {.pinned_bytes = std::size_t{4} << 30U}};
      std::minstd_rand random{7};
      auto const size = [&] {  // from 4 KiB to 16 MiB, as many between 1 and 2 as between 4 and 8
        return static_cast<std::size_t>(4096 *
                                        std::exp2(12 * std::uniform_real_distribution{}(random)));
      };
      std::vector<std::pair<HostSlotId, std::size_t>> slots;
      std::size_t asked = 0;
      std::size_t most_asked = 0;
      auto const take = [&](std::size_t bytes) {
        std::optional<HostSlotId> slot = pool.try_take(bytes);
        while (!slot) {
          REQUIRE(pool.try_grow(bytes));
          slot = pool.try_take(bytes);
        }
        slots.emplace_back(*slot, bytes);
        asked += bytes;
        most_asked = std::max(most_asked, asked);
        if (most_asked >= 64_MiB) {
          CHECK(static_cast<double>(pinned_bytes(cuda)) <= 1.05 * static_cast<double>(most_asked));
        }
      };

      while (asked < 256_MiB) {
        take(size());
      }
      CHECK(cuda.calls("cudaHostAlloc") + cuda.calls("cudaHostRegister") < 100);
      for (int i = 0; i < 2000; ++i) {  // later blocks fit into these slabs
        std::size_t const at = random() % slots.size();
        pool.give_back(slots[at].first);
        asked -= slots[at].second;
        std::size_t const bytes = size();
        slots[at] = slots.back();
        slots.pop_back();
        if (asked + bytes <= most_asked) {
          take(bytes);
        }
      }
    }
  }

  TEST_CASE("DeviceAllocator: an integrated GPU does not swap to the memory that it shares with "
            "the host") {
    FakeCudart const cuda{{.is_integrated = true}};
    CudaApi device;
    Allocator const allocator{device, {.capacity_bytes = 1U << 20U}};
    CHECK(allocator.host_stats().tier(HostTier::pinned).capacity_bytes == 0);
    Allocator::Options options{.capacity_bytes = 1U << 20U};
    options.host.pinned_bytes = 1U << 20U;
    CHECK_THROWS_AS((Allocator{device, options}), ContractViolation);
  }

  TEST_CASE("DeviceAllocator: on a captured stream only resident blocks without pending waits can "
            "be acquired") {
    Capture now;
    Buffer away{now.allocator, 1U << 20U};
    now.write(away.acquire(Access::write, now.other), 1, now.other);
    away.swap_out();
    Buffer here{now.allocator, 1U << 20U};
    now.write(here.acquire(Access::write, now.captured), 2, now.captured);
    Buffer elsewhere{now.allocator, 1U << 20U};
    now.write(elsewhere.acquire(Access::write, now.other), 3, now.other);

    now.allocator.prepare_capture(now.captured);
    now.fake.cuda.begin_capture(now.captured);
    CHECK_THROWS_AS((void)away.acquire(Access::read, now.captured), ContractViolation);
    CHECK_THROWS_AS((void)elsewhere.acquire(Access::read, now.captured), ContractViolation);
    auto lease = here.acquire(Access::read, now.captured);
    CHECK_FALSE(now.fake.cuda.is_capture_broken());
    now.fake.cuda.end_capture(now.captured);
    lease.release();

    CHECK(now.allocator.stats().leased.blocks.current == 0);
    now.check(away.acquire(Access::read, now.captured), 1, now.captured);
    now.check(elsewhere.acquire(Access::read, now.captured), 3, now.captured);
    now.allocator.synchronize();
    CHECK(now.work.wrong() == 0);
  }

  TEST_CASE("DeviceAllocator: order_after_all does not wait for a stream that is being captured") {
    Capture now;
    Buffer block{now.allocator, 1U << 20U};
    now.write(block.acquire(Access::write, now.captured), 1, now.captured);
    cudaStream_t const waiting = now.device.create_stream();
    (void)now.allocator.mark(waiting);

    now.allocator.prepare_capture(now.captured);
    now.fake.cuda.begin_capture(now.captured);
    CHECK_NOTHROW(now.allocator.order_after_all(waiting));
    CHECK_FALSE(now.fake.cuda.is_capture_broken());
    now.fake.cuda.end_capture(now.captured);

    now.allocator.retire_stream(waiting);
    now.device.synchronize(waiting);
    now.device.destroy_stream(waiting);
  }

  TEST_CASE("DeviceAllocator: a stream that is being captured is not made to wait for others") {
    Capture now;
    now.allocator.prepare_capture(now.captured);
    now.allocator.order_after_all(now.captured);
    now.fake.cuda.begin_capture(now.captured);
    Fence const fence = now.allocator.mark(now.other);

    CHECK_THROWS_AS(now.allocator.order_after(now.captured, fence), ContractViolation);
    CHECK_THROWS_AS(now.allocator.order_after_all(now.captured), ContractViolation);
    CHECK_FALSE(now.fake.cuda.is_capture_broken());
    now.fake.cuda.end_capture(now.captured);

    CHECK_NOTHROW(now.allocator.order_after(now.captured, fence));
    CHECK_NOTHROW(now.allocator.order_after_all(now.captured));
  }

  TEST_CASE(
      "DeviceAllocator: a block that a stream used before it joined a capture goes to others, "
      "if all streams were prepared") {
    Capture now;
    Buffer buffer{now.allocator, 1U << 20U};
    now.write(buffer.acquire(Access::write, now.other), 1, now.other);
    cudaStream_t const third = now.device.create_stream();
    cudaEvent_t const event = now.device.create_event();

    now.allocator.prepare_capture();
    now.fake.cuda.begin_capture(now.captured);
    now.device.record(event, now.captured);
    now.device.wait(now.other, event);
    CHECK(now.device.is_capturing(now.other));
    now.check(buffer.acquire(Access::read, third), 1, third);
    CHECK_FALSE(now.fake.cuda.is_capture_broken());
    now.fake.cuda.end_capture(now.captured);

    now.allocator.synchronize();
    now.allocator.retire_stream(third);
    now.device.destroy_stream(third);
    now.device.destroy_event(event);
    CHECK(now.work.wrong() == 0);
  }

  TEST_CASE("DeviceAllocator: a copy that the host waits for is refused on a captured stream, and "
            "the capture goes on") {
    Capture now;
    Buffer buffer{now.allocator, 1U << 20U};
    auto const lease = buffer.acquire(Access::write, now.captured);
    now.write(lease, 1, now.captured);
    std::vector<std::byte> bytes(1U << 20U);

    now.fake.cuda.begin_capture(now.captured);
    CHECK_THROWS_AS(
        now.allocator.copy_to_host_sync(bytes.data(), lease.data(), bytes.size(), now.captured),
        ContractViolation);
    CHECK_THROWS_AS(
        now.allocator.copy_from_host_sync(lease.data(), bytes.data(), bytes.size(), now.captured),
        ContractViolation);
    CHECK_FALSE(now.fake.cuda.is_capture_broken());
    CHECK(now.fake.cuda.end_capture(now.captured).empty());
  }

  TEST_CASE("DeviceAllocator: the error for a stream that was destroyed too soon says so") {
    FakeRuntime fake;
    CudaApi device;
    Allocator allocator{device, {.capacity_bytes = 8U << 20U}};
    cudaStream_t const destroyed = device.create_stream();
    cudaStream_t const other = device.create_stream();
    {
      Buffer buffer{allocator, 1U << 20U};
      buffer.acquire(Access::write, destroyed).release();
      device.destroy_stream(destroyed);
      CHECK_THROWS_WITH_AS(
          (void)buffer.acquire(Access::read, other), doctest::Contains("retire_stream"), CudaError);
    }
    allocator.retire_stream(other);
    device.destroy_stream(other);
  }

  TEST_CASE("DeviceAllocator: waiting for a stream that is being captured is refused") {
    Capture now;
    Buffer buffer{now.allocator, 1U << 20U};
    now.write(buffer.acquire(Access::write, now.captured), 1, now.captured);

    now.fake.cuda.begin_capture(now.captured);  // without prepare_capture
    CHECK_THROWS_AS((void)buffer.acquire(Access::read, now.other), ContractViolation);
    CHECK_FALSE(now.fake.cuda.is_capture_broken());
    now.fake.cuda.end_capture(now.captured);

    now.check(buffer.acquire(Access::read, now.other), 1, now.other);
    now.allocator.synchronize();
    CHECK(now.work.wrong() == 0);
  }
}
