// SPDX-License-Identifier: Apache-2.0
//
// Measures what it costs to acquire and release leases of blocks that are resident and unused, to
// find room for a block that is swapped out, and to free a block while freed operands are kept.
//
// usage: bench_acquire [--benchmark_filter=REGEX ...]

#include <spillway/device/sim/model_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/policy/eviction/queue_eviction.hpp>
#include <spillway/policy/null_policies.hpp>
#include <spillway/policy/recompute/recompute_if_cheaper.hpp>
#include <spillway/sim.hpp>
#include <spillway/swappable_buffer.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include <benchmark/benchmark.h>

namespace {

using namespace spillway::literals;
using spillway::Access;

constexpr std::size_t blocks = 1024;
constexpr std::size_t block_bytes = 4_KiB;

// On the default simulated device. No work is enqueued, so only the allocator's own time is
// measured.
struct Locked : spillway::SimPolicies {};
struct Unlocked : spillway::SimPolicies {
  using lock = spillway::NullLock;
};

template <class Policies>
struct Bench {
  using Allocator = spillway::DeviceAllocator<Policies>;
  using Buffer = spillway::SwappableBuffer<Allocator>;

  Bench() : allocator{device, {.capacity_bytes = 2 * blocks * block_bytes}} {
    for (std::size_t i = 0; i < blocks; ++i) {
      buffers.emplace_back(allocator, block_bytes);
      (void)buffers.back().acquire(Access::write, stream);
    }
  }
  ~Bench() {
    buffers.clear();
    allocator.retire_stream(stream);
  }
  Bench(Bench const&) = delete;
  Bench& operator=(Bench const&) = delete;

  spillway::SimApi device;
  spillway::SimApi::stream_type stream = device.create_stream();
  Allocator allocator;
  std::vector<Buffer> buffers;
};

template <class Policies>
void one_block(benchmark::State& state) {
  Bench<Policies> bench;
  auto const access = static_cast<Access>(state.range(0));
  std::size_t i = 0;
  for (auto _ : state) {
    auto const lease = bench.buffers[i].acquire(access, bench.stream);
    benchmark::DoNotOptimize(lease.data());
    i = (i + 1) % blocks;
  }
}

/// As in training: each step uses all blocks in the same order, is recorded, and is predicted from
/// the last.
template <class Policies>
void repeating_step(benchmark::State& state) {
  Bench<Policies> bench;
  std::size_t i = 0;
  for (auto _ : state) {
    if (i == 0) {
      state.PauseTiming();
      bench.allocator.begin_step();
      state.ResumeTiming();
    }
    auto const lease = bench.buffers[i].acquire(Access::read, bench.stream);
    benchmark::DoNotOptimize(lease.data());
    i = (i + 1) % blocks;
  }
}

/// Acquires four operands at once. The figure is for one operand.
template <class Policies>
void four_operands(benchmark::State& state) {
  Bench<Policies> bench;
  std::size_t i = 0;
  for (auto _ : state) {
    auto const leases = bench.allocator.acquire_all({bench.buffers[i].request(Access::read),
                                                     bench.buffers[i + 1].request(Access::read),
                                                     bench.buffers[i + 2].request(Access::read),
                                                     bench.buffers[i + 3].request(Access::write)},
                                                    bench.stream);
    benchmark::DoNotOptimize(leases.data());
    i = (i + 4) % blocks;
  }
  state.SetItemsProcessed(4 * state.iterations());
}

/// One allocator for all threads, and a stream for each.
struct Shared : Bench<Locked> {
  Shared() {
    for (auto& each : streams) {
      each = device.create_stream();
    }
  }
  ~Shared() {
    for (auto const each : streams) {
      allocator.retire_stream(each);
    }
  }
  Shared(Shared const&) = delete;
  Shared& operator=(Shared const&) = delete;

  std::array<spillway::SimApi::stream_type, 8> streams;
};
std::optional<Shared> shared;  // made before the threads start, destroyed after they have ended

/// Each thread uses a stream and blocks of its own in one allocator.
void threads(benchmark::State& state) {
  auto const me = static_cast<std::size_t>(state.thread_index());
  std::size_t const share = blocks / static_cast<std::size_t>(state.threads());
  std::size_t i = 0;
  for (auto _ : state) {
    auto const lease = shared->buffers[me * share + i].acquire(Access::read, shared->streams[me]);
    benchmark::DoNotOptimize(lease.data());
    i = (i + 1) % share;
  }
}

std::mutex one_mutex;  // shared by all threads

/// The lower bound: two pairs of locking and unlocking.
void two_locks(benchmark::State& state) {
  for (auto _ : state) {
    for (int i = 0; i < 2; ++i) {
      std::scoped_lock const lock{one_mutex};
      benchmark::ClobberMemory();
    }
  }
}

// On a device whose copies take no time.
struct Uncopied : spillway::PoliciesFor<spillway::ModelApi> {
  using eviction = spillway::LruEviction;
  using prefetch = spillway::NoPrefetch;
};

struct AlwaysDropped : spillway::PoliciesFor<spillway::ModelApi> {
  using recompute = spillway::AlwaysRecompute;
};

/// Uses blocks in random order, of which a quarter is resident; half of the uses write. The host
/// pool has room for the blocks that are away and for one in fifty more, so that most blocks that
/// are swapped out get the slot of another one.
void full_host_pool(benchmark::State& state) {
  auto const count = static_cast<std::size_t>(state.range(0));
  spillway::ModelApi device{{.capacity_bytes = 2 * count * block_bytes}};
  spillway::DeviceAllocator<Uncopied>::Options options{.capacity_bytes = count / 4 * block_bytes};
  options.host.slab_bytes = 64_KiB;
  options.host.pinned_bytes = (count - count / 4 + count / 50) * block_bytes;
  spillway::DeviceAllocator<Uncopied> allocator{device, options};
  auto const stream = device.create_stream();
  std::vector<spillway::BlockId> ids;
  for (std::size_t i = 0; i < count; ++i) {
    ids.push_back(allocator.allocate(block_bytes));
    (void)allocator.acquire(ids.back(), Access::write, stream);
  }
  std::minstd_rand random{1};
  for (auto _ : state) {
    Access const access = random() % 2 == 0 ? Access::read : Access::read_write;
    (void)allocator.acquire(ids[random() % count], access, stream);
  }
  for (spillway::BlockId const id : ids) {
    allocator.deallocate(id);
  }
  allocator.retire_stream(stream);
  device.destroy_stream(stream);
}

/// Allocates and frees a block while `range(0)` freed blocks are kept as operands of dropped
/// blocks.
void kept_operands(benchmark::State& state) {
  auto const count = static_cast<std::size_t>(state.range(0));
  spillway::ModelApi device{{.capacity_bytes = 8 * count * block_bytes}};
  spillway::DeviceAllocator<AlwaysDropped>::Options options{.capacity_bytes =
                                                                4 * count * block_bytes};
  spillway::DeviceAllocator<AlwaysDropped> allocator{device, options};
  auto const stream = device.create_stream();
  auto const make = [&] {
    spillway::BlockId const id = allocator.allocate(block_bytes);
    (void)allocator.acquire(id, Access::write, stream);
    return id;
  };
  std::vector<spillway::BlockId> made;
  for (std::size_t i = 0; i < count; ++i) {
    spillway::BlockId const operand = make();
    made.push_back(make());
    allocator.set_recipe(made.back(),
                         {operand},
                         std::chrono::microseconds{1},
                         [](auto, std::span<void const* const>, void*) {});
    allocator.swap_out(made.back());
    allocator.deallocate(operand);
  }
  for (auto _ : state) {
    allocator.deallocate(allocator.allocate(block_bytes));
  }
  for (spillway::BlockId const id : made) {
    allocator.deallocate(id);
  }
  allocator.retire_stream(stream);
  device.destroy_stream(stream);
}

BENCHMARK(one_block<Unlocked>)->Name("unlocked/read")->Arg(static_cast<int>(Access::read));
BENCHMARK(one_block<Unlocked>)->Name("unlocked/write")->Arg(static_cast<int>(Access::write));
BENCHMARK(one_block<Locked>)->Name("locked/read")->Arg(static_cast<int>(Access::read));
BENCHMARK(one_block<Locked>)->Name("locked/write")->Arg(static_cast<int>(Access::write));
BENCHMARK(repeating_step<Locked>)->Name("locked/repeating_step");
BENCHMARK(four_operands<Locked>)->Name("locked/four_operands");
BENCHMARK(kept_operands)->Arg(100)->Arg(1000)->Arg(10'000);
BENCHMARK(full_host_pool)->Arg(1000)->Arg(10'000)->Arg(100'000);
BENCHMARK(two_locks);
BENCHMARK(two_locks)->Name("threads/two_locks")->ThreadRange(1, 8)->UseRealTime();
BENCHMARK(threads)
    ->Name("threads/read")
    ->Setup([](benchmark::State const&) { shared.emplace(); })
    ->Teardown([](benchmark::State const&) { shared.reset(); })
    ->ThreadRange(1, 8)
    ->UseRealTime();

}  // namespace

BENCHMARK_MAIN();
