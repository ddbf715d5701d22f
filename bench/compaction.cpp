// SPDX-License-Identifier: Apache-2.0
//
// Measures what it takes to keep a nearly full arena of 16 GiB usable without evicting anything:
// when no free range fits an allocation, compaction makes room. The device holds no bytes, so only
// planning takes time.
//
//   bench_compaction [--benchmark_filter=REGEX ...]
//
// moved/<workload>/<percent>       bytes moved per byte allocated, in 1e6 calls (at 99 % 4e5) with
//                                  so much of the arena in use; how many allocations needed a pass,
//                                  and how long planning one took
// plan/<live blocks>/<percent>     the same for workload a with small sizes, so that many blocks
//                                  are live
// widen/<live blocks>/<percent>    planning a pass for the largest free range that can be made by
//                                  moving at most 1/64 of the capacity, every 10 000 calls
// join/<blocks>                    the processor's time for each block that `compact` moves where
//                                  every other block of a full allocator has been freed, and until
//                                  the first copy is enqueued

#include <spillway/defrag_arena.hpp>
#include <spillway/device/sim/model_api.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/policies.hpp>
#include <spillway/swappable_buffer.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "workloads.hpp"
#include <benchmark/benchmark.h>

namespace spillway::bench {
namespace {

constexpr std::uint64_t capacity_bytes = 16_GiB;
constexpr std::uint64_t seed = 7;

/// An arena that compacts itself whenever an allocation would fail.
class CompactedArena {
 public:
  CompactedArena(std::uint64_t bytes, bool is_widened)
      : device_{{.capacity_bytes = bytes}},
        arena_{device_, {.capacity_bytes = bytes, .bounce_bytes = 0}},
        is_widened_{is_widened} {}

  [[nodiscard]] RangeId allocate(std::uint64_t bytes) {
    allocated_bytes_ += bytes;
    auto placement = arena_.try_take(bytes, BlockId{1});
    if (!placement) {
      compact([&] { return arena_.plan_compaction(bytes, no_budget, can_move); }, !is_widened_);
      placement = arena_.try_take(bytes, BlockId{1});
    }
    if (!placement) {
      throw std::runtime_error{"no room though every block may move"};
    }
    return placement->range;
  }
  void free(RangeId range) { arena_.give_back(range, {}); }
  void widen() {
    compact([&] { return arena_.plan_pass(arena_.capacity_bytes() / 64, can_move); }, true);
  }
  /// Resets all counters.
  void reset() {
    allocated_bytes_ = 0;
    moved_bytes_ = 0;
    plan_clocks_.clear();
  }

  [[nodiscard]] std::size_t live() const { return arena_.stats().taken_ranges; }
  [[nodiscard]] std::size_t passes() const { return plan_clocks_.size(); }
  [[nodiscard]] double moved_per_allocated() const {
    return static_cast<double>(moved_bytes_) / static_cast<double>(allocated_bytes_);
  }
  [[nodiscard]] double plan_us(double share) {
    if (plan_clocks_.empty()) {
      return 0;
    }
    std::sort(plan_clocks_.begin(), plan_clocks_.end());
    auto const rank =
        static_cast<std::size_t>(share * static_cast<double>(plan_clocks_.size() - 1));
    return 1e6 * static_cast<double>(plan_clocks_[rank]) / static_cast<double>(CLOCKS_PER_SEC);
  }

 private:
  static constexpr std::size_t no_budget = std::numeric_limits<std::size_t>::max();
  static constexpr auto can_move = [](BlockId) noexcept { return true; };

  template <class MakePlan>
  void compact(MakePlan make_plan, bool is_counted) {
    std::clock_t const start = std::clock();  // processor time, so that other programs do not count
    std::optional<CompactionPlan> plan = make_plan();
    if (is_counted) {
      plan_clocks_.push_back(std::clock() - start);
    }
    if (plan) {
      moved_bytes_ += plan->cost_bytes;
      arena_.begin_moves(*plan);
      arena_.commit_moves(*plan, plan->moves.size(), {});
    }
  }

  ModelApi device_;
  DefragArena<ModelApi> arena_;
  bool is_widened_;  // whether only widening passes are counted
  std::uint64_t allocated_bytes_ = 0;
  std::uint64_t moved_bytes_ = 0;
  std::vector<std::clock_t> plan_clocks_;
};

/// @param widen_calls  number of calls between two widening passes; 0 for none
void run(benchmark::State& state, Workload const& workload, std::size_t widen_calls) {
  for ([[maybe_unused]] auto _ : state) {
    CompactedArena arena{workload.capacity_bytes, widen_calls != 0};
    std::vector<RangeId> ranges(workload.slots);
    for (std::size_t i = 0; i < workload.calls.size(); ++i) {
      if (i == workload.warm_calls) {
        arena.reset();
      }
      auto const [slot, bytes] = workload.calls[i];
      if (bytes != 0) {
        ranges[slot] = arena.allocate(bytes);
      } else {
        arena.free(ranges[slot]);
      }
      if (widen_calls != 0 && i > workload.warm_calls && i % widen_calls == 0) {
        arena.widen();
      }
    }
    state.counters["moved/allocated"] = arena.moved_per_allocated();
    state.counters["live"] = static_cast<double>(arena.live());
    state.counters["passes"] = static_cast<double>(arena.passes());
    state.counters["plan_p50_us"] = arena.plan_us(0.5);
    state.counters["plan_p99_us"] = arena.plan_us(0.99);
    state.counters["plan_max_us"] = arena.plan_us(1);
  }
}

double thread_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e9 * static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec);
}

/// A device whose copies take no time, and that records when the first one was enqueued.
struct FreeCopies : ModelApi {
  FreeCopies() : ModelApi{{.capacity_bytes = 64_GiB}} {}
  void copy(void* /*to*/, void const* /*from*/, std::size_t, CopyKind, stream_type) { note(); }
  void copy_batch(std::span<void* const> /*to*/,
                  std::span<void const* const> /*from*/,
                  std::span<std::size_t const> /*sizes_bytes*/,
                  CopyKind,
                  stream_type) {
    note();
  }

  double first_ns = 0;

 private:
  void note() { first_ns = first_ns == 0 ? thread_ns() : first_ns; }
};
struct FreeCopiesPolicies : PoliciesFor<FreeCopies> {};

void join(benchmark::State& state, std::size_t blocks) {
  constexpr std::size_t block_bytes = 64_KiB;
  FreeCopies device;
  auto const stream = device.create_stream();
  using Allocator = DeviceAllocator<FreeCopiesPolicies>;
  double ns = 0;
  double ns_before = 0;
  double moves = 0;
  for ([[maybe_unused]] auto _ : state) {
    Allocator allocator{device, {.capacity_bytes = blocks * block_bytes}};
    std::vector<SwappableBuffer<Allocator>> kept;
    std::vector<SwappableBuffer<Allocator>> freed;
    for (std::size_t i = 0; i < blocks; ++i) {
      SwappableBuffer<Allocator> buffer{allocator, block_bytes};
      (void)buffer.acquire(Access::write, stream);
      (i % 2 == 0 ? freed : kept).push_back(std::move(buffer));
    }
    freed.clear();
    device.first_ns = 0;
    double const start_ns = thread_ns();
    while (allocator.compact() != 0) {
    }
    ns += thread_ns() - start_ns;
    ns_before += device.first_ns - start_ns;
    moves += static_cast<double>(allocator.stats().moves.count);
    kept.clear();
    allocator.retire_stream(stream);
  }
  device.destroy_stream(stream);
  state.counters["moves"] = moves / static_cast<double>(state.iterations());
  state.counters["ns_per_move"] = ns / moves;
  state.counters["until_first_copy"] = ns_before / moves;
}

template <class Make>
void add(std::string const& name, std::size_t widen_calls, Make make) {
  auto const bench = [=](benchmark::State& state) { run(state, make(), widen_calls); };
  benchmark::RegisterBenchmark(name.c_str(), bench)->Iterations(1)->Unit(benchmark::kMillisecond);
}

void register_all() {
  for (int const percent : {85, 90, 95, 99}) {
    double const occupancy = percent / 100.0;
    auto const steady = [=](double) noexcept { return occupancy; };
    // fewer at 99 %, where most calls need a pass
    std::size_t const calls = percent == 99 ? 400'000 : 1'000'000;
    add("moved/a/" + std::to_string(percent), 0, [=] {
      return random_workload(capacity_bytes, calls, seed, steady);
    });
    add("moved/c/" + std::to_string(percent), 0, [=] {
      return mixed_workload(capacity_bytes, calls, seed, steady);
    });
  }
  for (std::size_t const live : {10'000U, 100'000U}) {
    for (int const percent : {85, 95, 99}) {
      std::string const rest = std::to_string(live) + "/" + std::to_string(percent);
      auto const make = [=] { return small_random_workload(live, percent / 100.0, 100'000, seed); };
      add("plan/" + rest, 0, make);
      add("widen/" + rest, 10'000, make);
    }
  }
  for (std::size_t const blocks : {512U, 2'000U, 20'000U, 131'072U}) {
    std::string const name = "join/" + std::to_string(blocks);
    benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
      join(state, blocks);
    })->Iterations(10);
  }
}

}  // namespace
}  // namespace spillway::bench

int main(int argc, char** argv) {
  spillway::bench::register_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 2;
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
