// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace spillway::bench {

/// One call of an allocator: allocates `bytes` into `slot`, or frees `slot` if `bytes` is 0.
struct Call {
  std::uint32_t slot = 0;
  std::uint64_t bytes = 0;
};

/// A sequence of calls to replay against one allocator. Slots are reused, so there are as many as
/// blocks are alive at the same time.
struct Workload {
  std::uint64_t capacity_bytes = 0;
  std::uint32_t slots = 0;
  std::vector<Call> calls;
  /// Number of calls at the front that only prepare the allocator and are not timed
  std::size_t warm_calls = 0;
};

/// A small random number generator with the same numbers on every platform (SplitMix64).
class Random {
 public:
  explicit Random(std::uint64_t seed) noexcept : state_{seed * golden + 1} {}

  [[nodiscard]] std::uint64_t bits() noexcept {
    state_ += golden;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31U);
  }
  /// Returns a number in [0, 1).
  [[nodiscard]] double unit() noexcept { return static_cast<double>(bits() >> 11U) * 0x1p-53; }
  [[nodiscard]] std::uint64_t below(std::uint64_t n) noexcept {
    return static_cast<std::uint64_t>(unit() * static_cast<double>(n));
  }
  /// Returns a multiple of 256 whose logarithm is evenly distributed.
  [[nodiscard]] std::uint64_t size_between(double least, double most) noexcept {
    double const size = least * std::exp(unit() * std::log(most / least));
    return (static_cast<std::uint64_t>(size) + 255) & ~std::uint64_t{255};
  }
  [[nodiscard]] double exponential(double mean) noexcept { return -mean * std::log(1 - unit()); }

 private:
  static constexpr std::uint64_t golden = 0x9E3779B97F4A7C15U;

  std::uint64_t state_;
};

inline constexpr double kib = 1024;
inline constexpr double mib = 1024 * kib;

/// Records calls and assigns slots.
class WorkloadWriter {
 public:
  struct Block {
    std::uint32_t slot = 0;
    std::uint64_t bytes = 0;
  };

  explicit WorkloadWriter(std::uint64_t capacity_bytes) {
    workload_.capacity_bytes = capacity_bytes;
  }

  Block allocate(std::uint64_t bytes) {
    if (vacant_.empty()) {
      vacant_.push_back(workload_.slots++);
    }
    Block const block{vacant_.back(), bytes};
    vacant_.pop_back();
    workload_.calls.push_back({block.slot, bytes});
    live_bytes_ += bytes;
    peak_bytes_ = std::max(peak_bytes_, live_bytes_);
    return block;
  }
  void free(Block block) {
    workload_.calls.push_back({block.slot, 0});
    vacant_.push_back(block.slot);
    live_bytes_ -= block.bytes;
  }
  /// Makes all calls so far part of the warm-up.
  void end_warm_up() noexcept { workload_.warm_calls = calls(); }

  [[nodiscard]] std::size_t calls() const noexcept { return workload_.calls.size(); }
  [[nodiscard]] std::uint64_t live_bytes() const noexcept { return live_bytes_; }
  [[nodiscard]] std::uint64_t peak_bytes() const noexcept { return peak_bytes_; }
  [[nodiscard]] Workload finish() { return std::move(workload_); }

 private:
  Workload workload_;
  std::vector<std::uint32_t> vacant_;
  std::uint64_t live_bytes_ = 0;
  std::uint64_t peak_bytes_ = 0;
};

/// Workload a: sizes between `least_bytes` and `most_bytes`. Whenever the next block would exceed
/// the target, a random block is freed.
///
/// @param occupancy  target as a share of the capacity, as a function of the share of calls made (0
///                   to 1)
template <std::invocable<double> Occupancy>
[[nodiscard]] Workload random_workload(std::uint64_t capacity_bytes,
                                       std::size_t calls,
                                       std::uint64_t seed,
                                       Occupancy occupancy,
                                       double least_bytes = 512,
                                       double most_bytes = 64 * mib) {
  WorkloadWriter writer{capacity_bytes};
  Random random{seed};
  std::vector<WorkloadWriter::Block> live;
  std::uint64_t next = random.size_between(least_bytes, most_bytes);
  auto const call = [&](double share) {
    auto const target = static_cast<std::uint64_t>(share * static_cast<double>(capacity_bytes));
    if (writer.live_bytes() + next <= target) {
      live.push_back(writer.allocate(next));
      next = random.size_between(least_bytes, most_bytes);
      return true;
    }
    std::size_t const victim = random.below(live.size());
    writer.free(live[victim]);
    live[victim] = live.back();
    live.pop_back();
    return false;
  };
  while (call(occupancy(0.0))) {
  }
  writer.end_warm_up();
  for (std::size_t i = 0; i < calls; ++i) {
    call(occupancy(static_cast<double>(i) / static_cast<double>(calls)));
  }
  return writer.finish();
}

/// Workload a with sizes up to 256 KiB. The capacity is chosen so that about `live` blocks are
/// alive, which fill the share `occupancy` of it.
[[nodiscard]] inline Workload
small_random_workload(std::size_t live, double occupancy, std::size_t calls, std::uint64_t seed) {
  constexpr double least_bytes = 512;
  constexpr double most_bytes = 256 * kib;
  double const mean_bytes = (most_bytes - least_bytes) / std::log(most_bytes / least_bytes);
  auto const bytes = static_cast<std::uint64_t>(mean_bytes * static_cast<double>(live) / occupancy);
  return random_workload((bytes + 255) & ~std::uint64_t{255},
                         calls,
                         seed,
                         [=](double) noexcept { return occupancy; },
                         least_bytes,
                         most_bytes);
}

/// Workload b: training steps of a network of 96 layers. In the forward pass, each layer makes
/// three blocks that stay for the backward pass, and a workspace that is freed at once. The
/// backward pass frees the blocks in reverse order. Every step has the same sizes, and its peak is
/// `occupancy` of the capacity.
[[nodiscard]] inline Workload training_workload(std::uint64_t capacity_bytes,
                                                std::size_t calls,
                                                std::uint64_t seed,
                                                double occupancy) {
  constexpr std::size_t layers = 96;
  std::array<std::array<std::uint64_t, layers>, 3> kept{};
  std::array<std::uint64_t, layers> workspaces{};
  std::array<std::uint64_t, 2 * layers> weights{};
  Random random{seed};
  for (auto& sizes : kept) {
    for (std::uint64_t& size : sizes) {
      size = random.size_between(mib, 64 * mib);
    }
  }
  for (std::uint64_t& size : workspaces) {
    size = random.size_between(64 * kib, 64 * mib);
  }
  for (std::uint64_t& size : weights) {
    size = random.size_between(4 * kib, 32 * mib);
  }

  auto const write = [&](double scale, std::size_t least_calls) {
    using Block = WorkloadWriter::Block;
    WorkloadWriter writer{capacity_bytes};
    auto const allocate = [&](std::uint64_t size) {
      auto const scaled = static_cast<std::uint64_t>(static_cast<double>(size) * scale);
      return writer.allocate((scaled + 511) & ~std::uint64_t{255});
    };
    auto const step = [&] {
      std::array<std::array<Block, layers>, 3> blocks;
      for (std::size_t i = 0; i < layers; ++i) {
        for (std::size_t k = 0; k < 3; ++k) {
          blocks[k][i] = allocate(kept[k][i]);
        }
        writer.free(allocate(workspaces[i]));
      }
      Block gradient = allocate(kept[2][layers - 1]);
      for (std::size_t i = layers; i-- > 0;) {
        Block const workspace = allocate(workspaces[i]);
        Block const next_gradient = allocate(kept[0][i]);
        writer.free(workspace);
        for (std::size_t k = 3; k-- > 0;) {
          writer.free(blocks[k][i]);
        }
        writer.free(gradient);
        gradient = next_gradient;
      }
      writer.free(gradient);
    };
    for (std::uint64_t const size : weights) {
      allocate(size);
    }
    step();
    writer.end_warm_up();
    std::size_t const end = writer.calls() + least_calls;
    while (writer.calls() < end) {
      step();
    }
    return writer;
  };

  double scale = 1;
  for (int round = 0; round < 4; ++round) {
    std::uint64_t const peak = write(scale, 1).peak_bytes();
    scale *= occupancy * static_cast<double>(capacity_bytes) / static_cast<double>(peak);
  }
  return write(scale * 0.9999, calls).finish();
}

/// Workload c: lifetimes of three kinds, counted in allocations: 10 % are long (80 000 on average),
/// 30 % medium (8000), 60 % short (60). The sizes of medium blocks change every 50 000 calls, as if
/// the sequence length changed.
///
/// @param occupancy  as for workload a. If the next block would exceed the target, the block whose
///                   lifetime ends next is freed early
template <std::invocable<double> Occupancy>
[[nodiscard]] Workload mixed_workload(std::uint64_t capacity_bytes,
                                      std::size_t calls,
                                      std::uint64_t seed,
                                      Occupancy occupancy) {
  struct Ending {
    double at = 0;
    std::uint64_t serial = 0;
    WorkloadWriter::Block block;

    bool operator>(Ending const& other) const noexcept {
      return std::pair{at, serial} > std::pair{other.at, other.serial};
    }
  };
  constexpr std::array<double, 6> factors{0.75, 1, 1.33, 1.5, 2, 0.5};
  constexpr std::size_t phase_calls = 50'000;
  WorkloadWriter writer{capacity_bytes};
  Random random{seed};
  std::priority_queue<Ending, std::vector<Ending>, std::greater<>> endings;
  std::size_t const all_calls = calls * 5 / 4;
  std::size_t const warm_calls = all_calls - calls;
  std::uint64_t serial = 0;
  std::size_t last_phase = 0;
  double factor = 1;
  auto const end_next = [&] {
    writer.free(endings.top().block);
    endings.pop();
  };
  double now = 0;
  while (writer.calls() < all_calls) {
    now += 1;
    if (std::size_t const phase = writer.calls() / phase_calls; phase != last_phase) {
      factor = factors[random.below(factors.size())];
      last_phase = phase;
    }
    while (!endings.empty() && endings.top().at <= now) {
      end_next();
    }
    double const kind = random.unit();
    std::uint64_t size = 0;
    double lifetime = 0;
    if (kind < 0.10) {
      size = random.size_between(64 * kib, 4 * mib);
      lifetime = random.exponential(80'000);
    } else if (kind < 0.40) {
      size = random.size_between(512 * factor, 24 * mib * factor);
      lifetime = random.exponential(8000);
    } else {
      size = random.size_between(4 * kib, 64 * mib);
      lifetime = random.exponential(60);
    }
    double const done = static_cast<double>(writer.calls()) / static_cast<double>(all_calls);
    auto const target =
        static_cast<std::uint64_t>(occupancy(done) * static_cast<double>(capacity_bytes));
    while (writer.live_bytes() + size > target && !endings.empty()) {
      end_next();
    }
    endings.push({now + lifetime, serial++, writer.allocate(size)});
  }
  Workload workload = writer.finish();
  workload.warm_calls = warm_calls;
  return workload;
}

}  // namespace spillway::bench
