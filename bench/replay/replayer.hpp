// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/concepts/device_capabilities.hpp>
#include <spillway/device_allocator.hpp>
#include <spillway/policies.hpp>

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <span>
#include <vector>

#include "latencies.hpp"
#include "named_policies.hpp"
#include "replay.hpp"
#include "verifier.hpp"

namespace replay {

/// An observer that counts for each block the bytes that have left the device. `take` returns them
/// and counts anew.
template <class O>
concept CountsLeaving = requires(O& observer, spillway::BlockId block) {
  { observer.take(block) } -> std::same_as<std::uint64_t>;
};

/// Runs a trace through an allocator, operation by operation, on one stream.
///
/// An operation leases all its operands at once, declares those that begin with it, keeps the
/// stream busy for the kernel's time, releases all of them and frees those that end. A buffer is
/// written when it begins and read whenever it is used again.
template <class Policies>
class Replayer {
 public:
  using Device = typename Policies::device;
  struct WithNamedPolicies : Policies {
    using eviction = NamedEviction;
    using recompute = NamedRecompute;
  };
  using Allocator = spillway::DeviceAllocator<WithNamedPolicies>;

  Replayer(Device& device, Trace const& trace, Settings const& settings, bool has_model_time)
      : device_{device},
        trace_{trace},
        settings_{settings},
        has_model_time_{has_model_time},
        allocator_{device, options(settings)},
        stream_{device.create_stream()},
        blocks_(trace.tensors.size()) {
    if (settings.verify) {
      verifier_.emplace(device, stream_);
    }
  }
  Replayer(Replayer const&) = delete;
  Replayer& operator=(Replayer const&) = delete;
  ~Replayer() {
    for (spillway::BlockId const id : blocks_) {
      if (id != spillway::BlockId{}) {
        allocator_.abandon(id);
      }
    }
    allocator_.retire_stream(stream_);
    verifier_.reset();
    device_.destroy_stream(stream_);
  }

  Result run() {
    Result result;
    started_ = Clock::now();
    StepResult before{};
    try {
      for (std::size_t step = 0; step < settings_.steps; ++step) {
        allocator_.begin_step();
        result.left_bytes.clear();
        for (Operation const& operation : trace_.operations) {
          run_operation(operation, result);
        }
        for (std::size_t tensor = 0; tensor < blocks_.size(); ++tensor) {
          take_left(tensor, result);
        }
        bool const is_last_step = step + 1 == settings_.steps;
        if (is_last_step) {
          check_survivors();
        }
        if (verifier_) {
          verifier_->finish();
        }
        StepResult const now = counters(stream_end_ns());
        result.steps.push_back(difference(now, before));
        before = now;
      }
      result.completed = true;
    } catch (spillway::OutOfDeviceMemory const& error) {
      result.failed_at = result.ops;
      result.failure = error.what();
    }
    fill_in(result);
    return result;
  }

  /// Writes what was observed as a trace for Perfetto. @pre `run` has returned
  void write_timeline(std::ostream& out) {
    allocator_.observer().write(out, allocator_.stats(), device_.spans());
  }

 private:
  using Clock = std::chrono::steady_clock;

  static typename Allocator::Options options(Settings const& settings) {
    typename Allocator::Options options{.capacity_bytes = settings.capacity_bytes};
    options.host.pinned_bytes = std::size_t{1} << 50U;  // as much as the run needs; grown by slabs
    options.paging.swapping = settings.swapping;
    options.paging.compaction = settings.compaction;
    options.paging.prefetching = settings.lookahead_ops != 0;
    options.paging.poison_vacated = settings.verify;
    options.paging.link_bytes_per_second = settings.copy_gbps().value_or(default_link_gbps) * 1e9;
    options.prefetch = spillway::ScheduleLookahead{{.lookahead_ops = settings.lookahead_ops}};
    options.eviction = NamedEviction{settings.eviction};
    options.recompute = NamedRecompute{settings.recompute};
    return options;
  }

  void run_operation(Operation const& operation, Result& result) {
    auto const start = Clock::now();
    Operand const* const first = trace_.operands.data() + operation.first_operand;
    Operand const* const last = first + operation.operand_count;
    requests_.clear();
    for (Operand const* operand = first; operand != last; ++operand) {
      spillway::BlockId& id = blocks_[operand->tensor];
      bool const exists = id != spillway::BlockId{};
      if (!exists) {
        id = allocator_.declare(trace_.tensors[operand->tensor].bytes);
        result.allocated_bytes +=
            spillway::round_up(trace_.tensors[operand->tensor].bytes, spillway::granule_bytes);
      }
      requests_.push_back({id, exists ? later_access() : spillway::Access::write});
    }
    auto leases = allocator_.acquire_all(requests_, stream_);
    for (std::size_t i = 0; i < leases.size(); ++i) {
      Tensor const& tensor = trace_.tensors[first[i].tensor];
      if (requests_[i].access != spillway::Access::write) {
        check(tensor, leases[i].data());
      } else {
        fill(tensor, leases[i].data());
      }
    }
    if constexpr (spillway::KernelTimeApi<typename Policies::device>) {
      if (std::uint64_t const kernel_ns = scaled(operation.kernel_ns); kernel_ns != 0) {
        device_.compute(stream_, kernel_ns);
        result.compute_ns += kernel_ns;
      }
    }
    leases.clear();
    if (settings_.recompute != Recompute::none) {
      give_recipes(first, last, scaled(operation.kernel_ns));
    }
    for (Operand const* operand = first; operand != last; ++operand) {
      if (operand->is_last) {
        take_left(operand->tensor, result);
        allocator_.deallocate(blocks_[operand->tensor]);
        blocks_[operand->tensor] = spillway::BlockId{};
      }
    }
    op_ns_.add(static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count()));
    ++result.ops;
  }

  [[nodiscard]] spillway::Access later_access() const noexcept {
    return settings_.uses_write ? spillway::Access::read_write : spillway::Access::read;
  }

  void take_left(std::size_t tensor, Result& result) {
    if constexpr (CountsLeaving<typename Policies::observer>) {
      result.left_bytes.resize(blocks_.size());
      result.left_bytes[tensor] += allocator_.observer().take(blocks_[tensor]);
    }
  }

  /// The operation from `first` to `last` makes what begins with it of the buffers that were there
  /// before, unless one of them ends with it.
  void give_recipes(Operand const* first, Operand const* last, std::uint64_t kernel_ns) {
    operands_.clear();
    for (Operand const* operand = first; operand != last; ++operand) {
      if (!operand->is_first || trace_.tensors[operand->tensor].is_weight) {
        operands_.push_back(blocks_[operand->tensor]);
        if (operand->is_last) {
          return;
        }
      }
    }
    for (Operand const* operand = first; operand != last; ++operand) {
      Tensor const& tensor = trace_.tensors[operand->tensor];
      if (operand->is_first && !operand->is_last && !tensor.is_weight) {
        allocator_.set_recipe(
            blocks_[operand->tensor],
            operands_,
            std::chrono::nanoseconds{kernel_ns},
            [this, &tensor, kernel_ns](auto stream, std::span<void const* const>, void* result) {
              fill(tensor, result);
              if constexpr (spillway::KernelTimeApi<Device>) {
                device_.compute(stream, kernel_ns);
              }
            });
      }
    }
  }

  void fill(Tensor const& tensor, void* address) {
    if (verifier_) {
      verifier_->fill(address, tensor.bytes, tensor.id);
    }
  }
  void check(Tensor const& tensor, void const* address) {
    if (verifier_) {
      verifier_->check(address, tensor.bytes, tensor.id);
    }
  }

  /// What lives across the whole trace must have survived it.
  void check_survivors() {
    for (std::size_t i = 0; verifier_ && i < blocks_.size(); ++i) {
      if (blocks_[i] != spillway::BlockId{}) {
        auto const lease = allocator_.acquire(blocks_[i], spillway::Access::read, stream_);
        check(trace_.tensors[i], lease.data());
      }
    }
  }

  [[nodiscard]] std::uint64_t scaled(std::uint64_t kernel_ns) const {
    double const scale = settings_.kernel_scale.value_or(has_model_time_ ? 1 : 0);
    return static_cast<std::uint64_t>(static_cast<double>(kernel_ns) * scale);
  }

  [[nodiscard]] std::uint64_t elapsed_ns() const {
    if constexpr (spillway::VirtualClockApi<typename Policies::device>) {
      return device_.finish_time_ns();
    }
    return static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - started_).count());
  }

  /// Returns when the program's stream will have run all of its work. Copies to the host may take
  /// longer. They run beside the next step then, whose kernels do not start later because of them.
  [[nodiscard]] std::uint64_t stream_end_ns() {
    if constexpr (spillway::VirtualClockApi<Device>) {
      struct Reading {
        Device const& device;
        std::uint64_t ns = 0;
      } reading{device_};
      // On a virtual clock a host function is called when it is enqueued, and its clock is the time
      // of its stream.
      device_.launch_host(
          stream_,
          [](void* p) noexcept {
            auto& the_reading = *static_cast<Reading*>(p);
            the_reading.ns = the_reading.device.clock_ns();
          },
          &reading);
      return reading.ns;
    }
    device_.synchronize(stream_);
    return elapsed_ns();
  }

  [[nodiscard]] StepResult counters(std::uint64_t time_ns) const {
    spillway::Stats const stats = allocator_.stats();
    return {
        stats.swap_outs.bytes, stats.swap_ins.bytes, stats.drops.bytes, stats.moves.bytes, time_ns};
  }

  static StepResult difference(StepResult const& now, StepResult const& before) {
    return {now.swapped_out_bytes - before.swapped_out_bytes,
            now.swapped_in_bytes - before.swapped_in_bytes,
            now.dropped_bytes - before.dropped_bytes,
            now.moved_bytes - before.moved_bytes,
            now.simulated_ns - before.simulated_ns};
  }

  void fill_in(Result& result) {
    if (!has_model_time_) {
      device_.synchronize(stream_);
    }
    result.total = counters(elapsed_ns());
    spillway::Stats const stats = allocator_.stats();
    result.peak_reserved_bytes = stats.peak_reserved_bytes;
    result.spared_bytes = stats.spared.bytes;
    result.recomputed_bytes = stats.recomputations.bytes;
    result.recompute_ns = stats.recompute_ns;
    result.compaction_passes = stats.compaction_passes;
    for (std::size_t reason = 0; reason < spillway::eviction_reason_count; ++reason) {
      if (reason != static_cast<std::size_t>(spillway::EvictionReason::speculative)) {
        result.evictions += stats.evictions[reason].count;  // a speculative copy evicts nothing
      }
    }
    result.mispredictions = stats.mispredictions;
    result.prefetch_hits = stats.prefetch_hits;
    result.prefetch_late = stats.prefetch_late;
    result.prefetch_wasted = stats.prefetch_wasted;
    result.host_waits = stats.host_waits;
    result.has_run_kernels = has_model_time_ || settings_.kernel_scale.has_value();
    result.ns_per_op_median = op_ns_.percentile(0.5);
    result.ns_per_op_p99 = op_ns_.percentile(0.99);
    if (verifier_) {
      verifier_->finish();
      result.verified_bytes = verifier_->verified_bytes();
      result.corrupt_bytes = verifier_->corrupt_bytes();
      result.first_corruption = verifier_->first_corruption();
    }
  }

  Device& device_;
  Trace const& trace_;
  Settings const& settings_;
  bool has_model_time_;
  Allocator allocator_;
  typename Device::stream_type stream_;
  std::optional<Verifier<Device>> verifier_;
  std::vector<spillway::BlockId> blocks_;  // by tensor; BlockId{} while it does not exist
  std::vector<spillway::LeaseRequest> requests_;
  std::vector<spillway::BlockId> operands_;
  Latencies op_ns_;
  Clock::time_point started_{};
};

}  // namespace replay
