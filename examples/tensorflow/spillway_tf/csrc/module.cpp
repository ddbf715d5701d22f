// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "fault_report.hpp"
#include "site.hpp"
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <tensorflow/c/c_api.h>
#include <tensorflow/core/common_runtime/process_state.h>

namespace spillway_tf {

namespace py = pybind11;
using namespace spillway;

HostSite::State& installed() {
  if (HostSite::state() == nullptr) {
    throw std::runtime_error{"spillway_tf.install() has not been called"};
  }
  return *HostSite::state();
}

void install(std::size_t limit,
             std::size_t host_limit,
             std::string const& file_tier,
             std::size_t file_bytes,
             std::size_t least_bytes) {
  if (HostSite::state() != nullptr) {
    throw std::runtime_error{"spillway_tf is installed already"};
  }
  HostSite::allocator_type::Options options;
  std::size_t const machine_bytes = HostApi{}.memory_info().total_bytes;
  options.capacity_bytes = limit != 0 ? limit : machine_bytes / 10 * 9;
  options.paging.lease_wait = std::chrono::milliseconds{0};
  if (host_limit != 0) {
    options.host.pinned_bytes = host_limit;
  }
  if (!file_tier.empty()) {
    options.host.file = file_tier;
    options.host.file_bytes = file_bytes;
    if (host_limit == 0) {
      options.host.pinned_bytes = machine_bytes / 2;
    }
  }
  // A few operations ahead is early enough: copies take no longer than kernels here. What came in sooner
  // would take the room of tensors that are made in between.
  options.prefetch = ScheduleLookahead{
      PrefetchOptions{.lookahead_ops = 16, .max_inflight_bytes = options.capacity_bytes / 6}};
  // What plans are priced with: copying memory to memory.
  options.paging.link_bytes_per_second = 8e9;
  options.paging.device_bytes_per_second = 16e9;
  std::size_t const granularity = HostPagedApi::granularity_for(options.capacity_bytes);
  HostSite::state() = new HostSite::State(
      granularity,
      std::move(options),
      *tensorflow::ProcessState::singleton()->GetCPUAllocator(tensorflow::port::kNUMANoAffinity),
      least_bytes != 0 ? least_bytes : std::max<std::size_t>(16_KiB, granularity / 4));
  tensorflow::DeviceFactory::Register(
      "CPU",
      std::make_unique<spillway::tensor_flow::SwappingDeviceFactory<HostSite>>(),
      300,
      false);
  FaultReport<HostSite>::install();
}

/// Lowers the limit below the capacity that was reserved, or raises it again.
void set_limit(std::size_t limit) {
  auto& state = installed();
  std::size_t const capacity = state.memory.stats().capacity_bytes;
  if (limit > capacity) {
    throw py::value_error{"the limit can be raised to " + std::to_string(capacity) +
                          " bytes at most, with which spillway_tf was installed"};
  }
  state.desk.set_limit(limit);
  try {
    state.ballast.set_limit(limit, HostStream::caller, [&state] {
      return state.desk.is_enabled() && !state.desk.is_under_pressure() &&
             (state.desk.relieve(), true);
    });
    state.desk.reset_peaks();  // they counted what is no tensor otherwise
  } catch (OutOfDeviceMemory const& error) {
    throw std::runtime_error{std::string{"the limit cannot be lowered further now: "} +
                             error.what()};
  }
}

/// Keeps buffers where they are between `__enter__` and `__exit__`.
class Held {
 public:
  explicit Held(std::vector<std::size_t> const& addresses) {
    for (std::size_t const address : addresses) {
      uses_.push_back({reinterpret_cast<void*>(address), false});
    }
  }
  Held(Held const&) = delete;
  Held& operator=(Held const&) = delete;
  ~Held() { exit(); }

  void enter() {
    if (frame_ != nullptr || HostSite::state() == nullptr) {
      return;
    }
    auto frame = std::make_unique<HostSite::Desk::Frame>();
    std::string const why = HostSite::desk().try_enter(*frame, uses_);
    if (!why.empty()) {
      throw std::runtime_error{why};
    }
    frame_ = std::move(frame);
  }
  void exit() {
    if (frame_ != nullptr) {
      HostSite::desk().leave(*frame_);
      frame_.reset();
    }
  }

 private:
  std::vector<BufferUse> uses_;
  std::unique_ptr<HostSite::Desk::Frame> frame_;
};

/// Brings a buffer in and never lets it go again.
void keep(std::size_t address) {
  Held held{{address}};
  held.enter();
  std::array<void*, 1> const addresses{reinterpret_cast<void*>(address)};
  HostSite::desk().show(addresses, true);
}

/// Makes the buffer protocol of `type` give out what `replacement` makes of an object, if it makes
/// anything of it.
void wrap_buffer(py::type type, py::function replacement) {
  static getbufferproc inner = nullptr;
  static py::function* call = nullptr;
  auto* const as_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  if (inner != nullptr || as_type->tp_as_buffer == nullptr) {
    return;
  }
  inner = as_type->tp_as_buffer->bf_getbuffer;
  call = new py::function{std::move(replacement)};
  as_type->tp_as_buffer->bf_getbuffer = [](PyObject* self, Py_buffer* view, int flags) -> int {
    try {
      py::object const other = (*call)(py::handle{self});
      return other.is_none() ? inner(self, view, flags)
                             : PyObject_GetBuffer(other.ptr(), view, flags);
    } catch (py::error_already_set& error) {
      error.restore();
      return -1;
    }
  };
}

std::uint64_t evicted(Stats const& now, bool wants_bytes) {
  std::uint64_t sum = 0;
  for (EvictionReason const reason :
       {EvictionReason::pressure, EvictionReason::watermark, EvictionReason::prefetch}) {
    sum += wants_bytes ? now.evicted(reason).bytes : now.evicted(reason).count;
  }
  return sum;
}

py::dict raw_stats() {
  auto& state = installed();
  Stats const now = state.memory.stats();
  HostPoolStats const host = state.memory.host_stats();
  auto const counts = state.desk.counts();
  py::dict out;
  auto const set = [&out](char const* key, auto value) { out[key] = value; };
  std::size_t const ballast = state.ballast.bytes();
  std::size_t const in_use = now.resident.bytes.current - ballast;
  std::size_t const active = counts.active_bytes;
  set("bytes_in_use", in_use);
  set("peak_bytes_in_use", now.resident.bytes.peak - ballast);
  set("bytes_allocated", now.allocated.bytes.current - ballast);
  set("peak_bytes_allocated", now.allocated.bytes.peak - ballast);
  set("bytes_active", active);
  set("peak_bytes_active", counts.peak_active_bytes);
  set("bytes_inactive", in_use - std::min(active, in_use));
  set("bytes_fixed", counts.fixed_bytes);
  set("bytes_reclaimed", evicted(now, true) + now.evicted(EvictionReason::requested).bytes);
  set("current_bytes_reclaimed", now.allocated.bytes.current - now.resident.bytes.current);
  set("peak_bytes_reclaimed", counts.peak_reclaimed_bytes);
  set("num_single_reclaims", evicted(now, false));
  set("num_full_reclaims", counts.full_reclaims);
  set("num_allocs", counts.allocations);
  set("largest_alloc_size", counts.largest_bytes);
  set("bytes_limit", state.ballast.limit_bytes());
  set("bytes_reserved", in_use);
  set("num_buffers", counts.buffers);
  set("swap_outs", now.swap_outs.count);
  set("swap_out_bytes", now.swap_outs.bytes);
  set("swap_ins", now.swap_ins.count);
  set("swap_in_bytes", now.swap_ins.bytes);
  set("drops", now.drops.count);
  set("dropped_bytes", now.drops.bytes);
  set("early_copies_bytes", now.evicted(EvictionReason::speculative).bytes);
  set("prefetch_hits", now.prefetch_hits);
  set("prefetch_late", now.prefetch_late);
  set("prefetch_wasted", now.prefetch_wasted);
  set("mispredictions", now.mispredictions);
  set("steps", now.steps);
  set("frames", counts.frames);
  set("waits", counts.waits);
  set("num_ooms", counts.out_of_memory);
  set("pressures", counts.pressures);
  set("host_wait_ns", now.host_wait_ns);
  set("host_bytes", host.tier(HostTier::pinned).used_bytes);
  set("peak_host_bytes", host.tier(HostTier::pinned).peak_used_bytes);
  set("file_bytes", host.tier(HostTier::file).used_bytes);
  return out;
}

py::dict view(std::size_t address) {
  auto const seen = installed().desk.view(reinterpret_cast<void*>(address));
  py::dict out;
  out["ours"] = seen.bytes != 0;
  out["bytes"] = seen.bytes;
  out["resident"] = seen.is_resident;
  out["in_use"] = seen.is_in_use;
  out["may_leave"] = seen.may_leave;
  return out;
}

}  // namespace spillway_tf

PYBIND11_MODULE(SPILLWAY_TF_MODULE, m) {
  using namespace spillway_tf;
  using release = py::call_guard<py::gil_scoped_release>;
  m.def("install", &install);
  m.def("is_installed", [] { return HostSite::state() != nullptr; });
  m.def("enable", [](bool on) { installed().desk.enable(on); });
  m.def("is_enabled", [] { return HostSite::state() != nullptr && installed().desk.is_enabled(); });
  m.def("set_limit", &set_limit, release());
  m.def("limit", [] { return installed().ballast.limit_bytes(); });
  m.def("capacity", [] { return installed().memory.stats().capacity_bytes; });
  m.def("least_bytes", [] { return installed().tensors.least_bytes(); });
  m.def("granularity", [] { return installed().device.granularity_bytes(); });
  m.def(
      "reclaim", [] { return installed().desk.reclaim(); }, release());
  m.def(
      "begin_step", [] { installed().desk.begin_step(); }, release());
  m.def("last_failure", [] {
    return HostSite::state() == nullptr ? std::string{} : installed().desk.last_failure();
  });
  m.def("raw_stats", &raw_stats);
  m.def("reset_peaks", [] { installed().desk.reset_peaks(); });
  m.def("view", &view);
  m.def("owns", [](std::size_t address) {
    auto* const p = reinterpret_cast<void*>(address);
    return HostSite::state() != nullptr && HostSite::may_own(p) && HostSite::desk().owns(p);
  });
  m.def("keep", &keep, release());
  m.def("wrap_buffer", &wrap_buffer);
  py::class_<Held>(m, "Held")
      .def(py::init<std::vector<std::size_t> const&>())
      .def("__enter__", &Held::enter, release())
      .def("__exit__", [](Held& held, py::args const&) { held.exit(); });
}
