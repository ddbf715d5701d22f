// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/prefetch_policy.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trace.hpp"

namespace replay {

enum class Eviction { lru, fifo, size, cost, schedule };

/// What decides between a copy and a recipe.
enum class Recompute { none, cheaper, planned, tuned, always };

/// What the model takes the host link for unless told, and what plans are priced with.
inline constexpr double default_link_gbps = 25;

/// What to replay a trace with.
struct Settings {
  std::size_t capacity_bytes = 0;
  Eviction eviction = Eviction::schedule;
  bool swapping = true;
  bool compaction = true;
  Recompute recompute = Recompute::none;  // a recipe is the operation that a buffer begins with
  /// 0: no prefetch.
  std::size_t lookahead_ops = spillway::PrefetchOptions{}.lookahead_ops;
  std::size_t steps = 1;               // how often the trace is repeated
  std::optional<double> link_gbps;     // each way; the model takes 25 unless told
  std::optional<double> codec_ratio;   // copies take the link for so many times faster
  std::optional<double> kernel_scale;  // of kernel times; the model takes 1, sim none at all
  bool verify = false;
  bool uses_write = false;  // each use may write, so that nothing leaves without a copy
  std::string timeline;     // the model only: a file for what happened when; empty: none

  /// How fast the bytes of buffers cross the link.
  [[nodiscard]] std::optional<double> copy_gbps() const {
    return link_gbps ? std::optional{*link_gbps * codec_ratio.value_or(1)} : std::nullopt;
  }
};

/// Counters of one repetition of the trace, or of all.
struct StepResult {
  std::uint64_t swapped_out_bytes = 0;
  std::uint64_t swapped_in_bytes = 0;
  std::uint64_t dropped_bytes = 0;
  std::uint64_t moved_bytes = 0;
  /// Of a repetition: from the end of the last kernel before it to the end of its own last kernel.
  /// Of all: until their copies have ended, too.
  std::uint64_t simulated_ns = 0;
};

struct Result {
  bool completed = false;
  std::optional<std::size_t> failed_at;  // index of the operation, over all repetitions
  std::string failure;                   // the out-of-memory error's text
  std::size_t allocated_bytes = 0;       // sum over all allocations
  std::size_t peak_reserved_bytes = 0;
  StepResult total;
  std::vector<StepResult> steps;
  std::uint64_t spared_bytes = 0;  // left without a copy, since they could be made again
  std::uint64_t recomputed_bytes = 0;
  std::uint64_t recompute_ns = 0;
  std::uint64_t compaction_passes = 0;
  std::uint64_t evictions = 0;
  std::uint64_t mispredictions = 0;
  std::uint64_t prefetch_hits = 0;
  std::uint64_t prefetch_late = 0;
  std::uint64_t prefetch_wasted = 0;
  std::uint64_t host_waits = 0;
  bool has_run_kernels = false;  // else no time is spent on them
  std::uint64_t compute_ns = 0;  // of the kernels that ran, recomputations apart
  std::uint64_t ns_per_op_median = 0;
  std::uint64_t ns_per_op_p99 = 0;
  std::size_t ops = 0;
  std::uint64_t verified_bytes = 0;
  std::uint64_t corrupt_bytes = 0;
  std::string first_corruption;
  /// What of each tensor has left the device in the last repetition, if the policies' observer
  /// counts it (`CountsLeaving`).
  std::vector<std::uint64_t> left_bytes;
};

/// @throws std::invalid_argument if what all steps take may be more nanoseconds than can be counted
void check_time(Trace const& trace, Settings const& settings);

/// On a virtual clock that holds no bytes.
[[nodiscard]] Result replay_on_model(Trace const& trace, Settings const& settings);
/// On the simulated device, with real threads and real copies.
[[nodiscard]] Result replay_on_sim(Trace const& trace, Settings const& settings);
/// On a GPU. @throws std::runtime_error where the program was built without CUDA
[[nodiscard]] Result replay_on_cuda(Trace const& trace, Settings const& settings);

}  // namespace replay
