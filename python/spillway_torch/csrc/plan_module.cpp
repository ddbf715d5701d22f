// SPDX-License-Identifier: Apache-2.0
// The parts of `spillway_torch.plan` that are written in C++: they find how much memory an
// operation allocates for itself and which operations use bytes, and replay a recorded step on a
// virtual clock.
#include <spillway/core/record.hpp>
#include <spillway/core/types.hpp>
#include <spillway/interop/torch/operations.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "bench/replay/model.hpp"
#include "bench/replay/replayer.hpp"
#include "bench/replay/trace.hpp"
#include "bench/step_bound.hpp"
#include "bench/trace_step.hpp"
#include "released_lock.hpp"
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace {

/// Counts what the calling thread allocates between `begin` and `end`, from the reports of
/// PyTorch's allocators to the profiler.
class AllocationWatch {
 public:
  explicit AllocationWatch(std::size_t least_bytes)
      : listener_{std::make_shared<Listener>(least_bytes)} {}

  void begin() {
    listener_->now_bytes = 0;
    listener_->most_bytes = 0;
    c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::PROFILER_STATE, listener_);
  }
  /// Returns the peak of the allocated bytes, and the bytes that are still allocated.
  [[nodiscard]] std::pair<std::int64_t, std::int64_t> end() {
    c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::PROFILER_STATE);
    return {listener_->most_bytes, listener_->now_bytes};
  }

 private:
  struct Listener final : c10::MemoryReportingInfoBase {
    explicit Listener(std::size_t least) : least_bytes{static_cast<std::int64_t>(least)} {}

    void reportMemoryUsage(void* /*p*/,
                           std::int64_t bytes,
                           std::size_t /*allocated*/,
                           std::size_t /*reserved*/,
                           c10::Device /*device*/) override {
      if (bytes >= least_bytes) {
        now_bytes += rounded(bytes);
        most_bytes = std::max(most_bytes, now_bytes);
      } else if (-bytes >= least_bytes) {
        now_bytes -= rounded(-bytes);
      }
    }
    [[nodiscard]] bool memoryProfilingEnabled() const override { return true; }

    [[nodiscard]] static std::int64_t rounded(std::int64_t bytes) {
      return static_cast<std::int64_t>(
          spillway::round_up(static_cast<std::size_t>(bytes), spillway::granule_bytes));
    }

    std::int64_t least_bytes;
    std::int64_t now_bytes = 0;
    std::int64_t most_bytes = 0;
  };
  std::shared_ptr<Listener> listener_;
};

/// Returns the name of the kind of an operation, by which the hook decides what to do.
std::string kind_of(std::string const& name, std::string const& overload) {
  using spillway::torch::OperationKind;
  auto const op = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!op) {
    return "kernel";
  }
  switch (spillway::torch::kind_of(*op)) {
  case OperationKind::view:
    return "view";
  case OperationKind::factory:
    return "factory";
  case OperationKind::per_tensor:
    return "per_tensor";
  default:
    return "kernel";
  }
}

/// Counts for each block the bytes that leave the device.
class LeavingObserver {
 public:
  static constexpr bool is_enabled = true;

  void on_record(spillway::Record const& record) noexcept {
    if (record.kind == spillway::RecordKind::swap_out ||
        record.kind == spillway::RecordKind::drop) {
      bytes_[record.block] += record.bytes;
    }
  }
  [[nodiscard]] std::uint64_t take(spillway::BlockId block) {
    auto const node = bytes_.extract(block);
    return node ? node.mapped() : 0;
  }

 private:
  std::unordered_map<spillway::BlockId, std::uint64_t> bytes_;
};

struct PlanPolicies : replay::ModelPolicies {
  using observer = LeavingObserver;
};

/// Replays a trace under different limits.
class Replay {
 public:
  explicit Replay(std::string const& file) : trace_{replay::read_trace(file, 1)} {}

  [[nodiscard]] replay::Trace const& trace() const noexcept { return trace_; }

  [[nodiscard]] replay::Result
  run(std::size_t limit, double link_gbps, std::size_t steps, bool swapping) const {
    replay::Settings settings;
    settings.capacity_bytes =
        std::max(limit / spillway::granule_bytes, std::size_t{1}) * spillway::granule_bytes;
    settings.link_gbps = link_gbps;
    settings.steps = steps;
    settings.swapping = swapping;
    settings.uses_write = true;  // as in the module, since schemas do not declare all writes
    spillway::ModelApi device{replay::model_options(settings)};
    return replay::Replayer<PlanPolicies>{device, trace_, settings, true}.run();
  }
  [[nodiscard]] double least_ns(std::size_t limit, double link_gbps) const {
    return bound_.least_ns(limit, link_gbps);
  }

 private:
  replay::Trace trace_;
  spillway::bench::StepBound bound_{spillway::bench::step_of(trace_),
                                    spillway::bench::kernels_ns(trace_)};
};

pybind11::dict to_dict(replay::Trace const& trace, replay::Result const& result) {
  pybind11::dict out;
  out["completed"] = result.completed;
  if (!result.completed) {
    out["failed_at"] = result.failed_at.value_or(0) % trace.operations.size();
    out["failure"] = result.failure;
    return out;
  }
  replay::StepResult const& step = result.steps.back();
  out["step_ns"] = step.simulated_ns;
  out["in_bytes"] = step.swapped_in_bytes;
  out["out_bytes"] = step.swapped_out_bytes;
  out["moved_bytes"] = step.moved_bytes;
  pybind11::dict left;
  for (std::size_t i = 0; i < result.left_bytes.size(); ++i) {
    if (result.left_bytes[i] != 0) {
      left[pybind11::int_(trace.tensors[i].id)] = result.left_bytes[i];
    }
  }
  out["left_bytes"] = left;
  return out;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  m.attr("granule_bytes") = spillway::granule_bytes;
  m.def("kind_of", &kind_of);
  py::class_<AllocationWatch>(m, "AllocationWatch")
      .def(py::init<std::size_t>())
      .def("begin", &AllocationWatch::begin)
      .def("end", &AllocationWatch::end);
  py::class_<Replay>(m, "Replay")
      .def(py::init<std::string const&>())
      .def_property_readonly("peak_bytes",
                             [](Replay const& r) { return r.trace().peak_live_bytes; })
      .def_property_readonly("largest_operation_bytes",
                             [](Replay const& r) { return r.trace().working_set_bytes; })
      .def_property_readonly("compute_ns", [](Replay const& r) { return r.trace().compute_ns; })
      .def_property_readonly("operations",
                             [](Replay const& r) { return r.trace().operations.size(); })
      .def(
          "run",
          [](Replay const& self, std::size_t limit, double gbps, std::size_t steps, bool swapping) {
            replay::Result result;
            {
              spillway_python::ReleasedLock const others_run;
              result = self.run(limit, gbps, steps, swapping);
            }
            return to_dict(self.trace(), result);
          },
          py::arg("limit"),
          py::arg("link_gbps") = replay::default_link_gbps,
          py::arg("steps") = 3,
          py::arg("swapping") = true)
      .def("least_ns", &Replay::least_ns, py::call_guard<spillway_python::ReleasedLock>());
}
