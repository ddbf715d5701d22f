// SPDX-License-Identifier: Apache-2.0
// What taking a range and giving it back cost, beside other allocators that were found.
//
//   bench_allocate --benchmark_repetitions=11 --benchmark_enable_random_interleaving=true
//                  --benchmark_report_aggregates_only=true
//
// replay/<workload>/<allocator>  nanoseconds a call, 1e6 calls in one go. `failed` calls found no
//                                room, or nothing to free as there had been none; they are quick,
//                                so ns_per_served leaves them out
// latency/...                    percentiles with a look at the clock around each call; `none` is
//                                the clock
// threads:<n>/...                wall time a call with n threads at one allocator, each with its
//                                own workload a
// live:<n>/...                   workload a with small sizes, so that n blocks are live
// first_failure/...              share of the capacity in use when a rising workload a first fails

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "allocate_adapters.hpp"
#include "workloads.hpp"
#include <benchmark/benchmark.h>

namespace spillway::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t capacity_bytes = 16_GiB;
constexpr std::size_t timed_calls = 1'000'000;
constexpr std::uint64_t seed = 7;

double seconds(Clock::duration duration) {
  return std::chrono::duration<double>{duration}.count();
}

// Makes workloads when they are first asked for, and keeps them.
class Workloads {
 public:
  template <class Make>
  Workload const& get(std::string const& name, Make make) {
    std::unique_ptr<Workload>& workload = made_[name];
    if (workload == nullptr) {
      workload = std::make_unique<Workload>(make());
    }
    return *workload;
  }

  Workload const& get(char name, std::uint64_t number = seed) {
    return get(name + std::to_string(number), [&] {
      auto const steady = [](double) noexcept { return 0.85; };
      return name == 'a'   ? random_workload(capacity_bytes, timed_calls, number, steady)
             : name == 'b' ? training_workload(capacity_bytes, timed_calls, number, 0.85)
                           : mixed_workload(capacity_bytes, timed_calls, number, steady);
    });
  }

 private:
  std::map<std::string, std::unique_ptr<Workload>> made_;
};

// Replays one workload's calls against an allocator that may be shared.
template <class Adapter>
class Player {
 public:
  Player(Adapter& adapter, Workload const& workload)
      : adapter_{&adapter}, workload_{&workload}, handles_(workload.slots) {}

  void warm_up() { play(0, workload_->warm_calls); }
  void play() { play(workload_->warm_calls, workload_->calls.size()); }

  // @returns the index of the first call that fails
  std::size_t play_until_failure() {
    std::size_t call = 0;
    while (call < workload_->calls.size() && failed_ == 0) {
      play(call, call + 1);
      ++call;
    }
    return call - 1;
  }

  // Returns the duration of each call, in no particular order.
  std::vector<std::uint32_t> play_timed() {
    std::vector<std::uint32_t> durations;
    durations.reserve(workload_->calls.size());
    for (std::size_t i = workload_->warm_calls; i < workload_->calls.size(); ++i) {
      Clock::time_point const start = Clock::now();
      play(i, i + 1);
      durations.push_back(static_cast<std::uint32_t>((Clock::now() - start).count()));
    }
    return durations;
  }

  // Number of calls that found no room, and of those that would have freed what these should have
  // allocated.
  [[nodiscard]] std::size_t failed() const noexcept { return failed_; }

 private:
  void play(std::size_t from, std::size_t to) {
    for (std::size_t i = from; i < to; ++i) {
      auto const [slot, bytes] = workload_->calls[i];
      auto& handle = handles_[slot];
      if (bytes != 0) {
        handle = adapter_->allocate(bytes);
        failed_ += handle ? 0U : 1U;
      } else if (handle) {
        adapter_->free(*handle);
      } else {
        ++failed_;  // nothing was allocated that could be freed
      }
    }
  }

  Adapter* adapter_;
  Workload const* workload_;
  std::vector<std::optional<typename Adapter::Handle>> handles_;
  std::size_t failed_ = 0;
};

// Measures the processor time of this program, without that of other programs.
class Stopwatch {
 public:
  [[nodiscard]] double seconds() const noexcept {
    return static_cast<double>(std::clock() - start_) / static_cast<double>(CLOCKS_PER_SEC);
  }

 private:
  std::clock_t start_ = std::clock();
};

void set_ns_per_call(benchmark::State& state, double seconds, std::size_t calls) {
  state.SetIterationTime(seconds);
  state.counters["ns_per_call"] = 1e9 * seconds / static_cast<double>(calls);
}

template <class Adapter>
void replay(benchmark::State& state, Workload const& workload) {
  std::size_t const calls = workload.calls.size() - workload.warm_calls;
  for ([[maybe_unused]] auto _ : state) {
    Adapter adapter{workload.capacity_bytes, workload.slots};
    Player<Adapter> player{adapter, workload};
    player.warm_up();
    std::size_t const failed_before = player.failed();
    Stopwatch const watch;
    player.play();
    double const seconds = watch.seconds();
    std::size_t const failed = player.failed() - failed_before;
    set_ns_per_call(state, seconds, calls);
    state.counters["ns_per_served"] = 1e9 * seconds / static_cast<double>(calls - failed);
    state.counters["failed"] = static_cast<double>(failed);
  }
}

template <class Adapter>
void latency(benchmark::State& state, Workload const& workload) {
  std::vector<std::uint32_t> durations;
  for ([[maybe_unused]] auto _ : state) {
    Adapter adapter{workload.capacity_bytes, workload.slots};
    Player<Adapter> player{adapter, workload};
    player.warm_up();
    Clock::time_point const start = Clock::now();
    durations = player.play_timed();
    state.SetIterationTime(seconds(Clock::now() - start));
  }
  std::sort(durations.begin(), durations.end());
  auto const percentile = [&](double share) {
    return static_cast<double>(
        durations[static_cast<std::size_t>(share * static_cast<double>(durations.size() - 1))]);
  };
  state.counters["p50_ns"] = percentile(0.5);
  state.counters["p99_ns"] = percentile(0.99);
  state.counters["p999_ns"] = percentile(0.999);
}

template <class Adapter>
void threads(benchmark::State& state, std::vector<Workload const*> const& workloads) {
  std::size_t calls = 0;
  std::size_t slots = 0;
  for (Workload const* const workload : workloads) {
    calls += workload->calls.size() - workload->warm_calls;
    slots += workload->slots;
  }
  for ([[maybe_unused]] auto _ : state) {
    Adapter adapter{workloads.size() * capacity_bytes, slots};
    Clock::time_point started;  // when all threads have arrived and before any continues
    std::barrier start{static_cast<std::ptrdiff_t>(workloads.size()),
                       [&started]() noexcept { started = Clock::now(); }};
    std::vector<std::thread> all;
    all.reserve(workloads.size());
    for (Workload const* const workload : workloads) {
      all.emplace_back([&, workload] {
        Player<Adapter> player{adapter, *workload};
        player.warm_up();
        start.arrive_and_wait();
        player.play();
      });
    }
    for (std::thread& one : all) {
      one.join();
    }
    set_ns_per_call(state, seconds(Clock::now() - started), calls);
  }
}

template <class Adapter>
void first_failure(benchmark::State& state, Workload const& workload) {
  std::size_t failing = 0;
  for ([[maybe_unused]] auto _ : state) {
    Adapter adapter{workload.capacity_bytes, workload.slots};
    Player<Adapter> player{adapter, workload};
    Clock::time_point const start = Clock::now();
    failing = player.play_until_failure();
    state.SetIterationTime(seconds(Clock::now() - start));
  }
  std::vector<std::uint64_t> live(workload.slots);
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < failing; ++i) {
    auto const [slot, size] = workload.calls[i];
    bytes += size - live[slot];  // modulo 2^64, so this is right for a call that frees, too
    live[slot] = size;
  }
  state.counters["percent"] =
      100 * static_cast<double>(bytes) / static_cast<double>(workload.capacity_bytes);
}

class Register {
 public:
  explicit Register(Workloads& workloads) : workloads_{&workloads} {}

  template <class Adapter>
  void all(std::string const& name) {
    plain<Adapter>(name);
    for (char const which : {'a', 'b', 'c'}) {
      add(std::string{"replay/"} + which + "/" + name + "+mutex",
          [=, this](auto& state) { replay<Locked<Adapter>>(state, workloads_->get(which)); });
    }
    for (std::size_t const count : {1U, 2U, 8U}) {
      add("threads:" + std::to_string(count) + "/" + name + "+mutex", [=, this](auto& state) {
        std::vector<Workload const*> each;
        for (std::size_t i = 0; i < count; ++i) {
          each.push_back(&workloads_->get('a', seed + i));
        }
        threads<Locked<Adapter>>(state, each);
      });
    }
    for (std::size_t live = 1'000; live <= 10'000'000; live *= 10) {
      add("live:" + std::to_string(live) + "/" + name,
          [=, this](auto& state) { replay<Adapter>(state, workload_of(live)); });
    }
    add("first_failure/" + name, [=, this](auto& state) {
      first_failure<Adapter>(state, workloads_->get("rising", [] {
        return random_workload(
            capacity_bytes, timed_calls, seed, [](double done) { return 0.5 + done / 2; });
      }));
    });
  }

  template <class Adapter>
  void plain(std::string const& name) {
    for (char const which : {'a', 'b', 'c'}) {
      add(std::string{"replay/"} + which + "/" + name,
          [=, this](auto& state) { replay<Adapter>(state, workloads_->get(which)); });
      add(std::string{"latency/"} + which + "/" + name,
          [=, this](auto& state) { latency<Adapter>(state, workloads_->get(which)); });
    }
  }

 private:
  template <class Run>
  static void add(std::string const& name, Run run) {
    benchmark::RegisterBenchmark(name.c_str(), run)
        ->UseManualTime()
        ->Iterations(1)
        ->Unit(benchmark::kMillisecond);
  }

  Workload const& workload_of(std::size_t live) {
    return workloads_->get("live" + std::to_string(live),
                           [&] { return small_random_workload(live, 0.85, timed_calls, seed); });
  }

  Workloads* workloads_;
};

}  // namespace
}  // namespace spillway::bench

int main(int argc, char** argv) {
  using namespace spillway::bench;
  // In a program that never had a second thread, glibc locks a mutex without an atomic instruction.
  std::thread{[] {}}.join();
  Workloads workloads;
  Register benchmarks{workloads};
  benchmarks.plain<NoAllocator>("none");
  benchmarks.all<ArenaAdapter<spillway::SegregatedFit, 0>>("arena");
  benchmarks.plain<ArenaAdapter<spillway::SegregatedFit, 1>>("arena,1_stream");
  benchmarks.plain<ArenaAdapter<spillway::SegregatedFit, 3>>("arena,3_streams");
  benchmarks.plain<ArenaAdapter<spillway::BestFit, 0>>("arena,best_fit");
#if defined(SPILLWAY_HAS_OFFSET_ALLOCATOR)
  benchmarks.all<OffsetAllocatorAdapter>("OffsetAllocator");
#endif
#if defined(SPILLWAY_HAS_VMA)
  benchmarks.all<VmaAdapter>("VMA_virtual_block");
#endif
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 2;
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
