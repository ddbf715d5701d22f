// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <string>

#include "site.hpp"
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace spillway_torch {

namespace py = pybind11;
using namespace spillway;
using c10::DispatchKey;

constexpr DispatchKey hook_key = DispatchKey::TESTING_ONLY_GenericMode;
using Hook = pytorch::FrameHook<HostSite, hook_key>;

HostSite::State& installed() {
  TORCH_CHECK(HostSite::state() != nullptr, "spillway_torch.install() has not been called");
  return *HostSite::state();
}

void install(std::size_t limit,
             std::size_t host_limit,
             std::string const& file_tier,
             std::size_t file_bytes,
             std::size_t least_bytes) {
  TORCH_CHECK(HostSite::state() == nullptr, "spillway_torch is installed already");
  HostSite::allocator_type::Options options;
  options.capacity_bytes = limit;
  // Address space costs nothing here; memory is taken when it is touched.
  options.paging.lease_wait = std::chrono::milliseconds{0};
  if (host_limit != 0) {
    options.host.pinned_bytes = host_limit;
  }
  if (!file_tier.empty()) {
    options.host.file = file_tier;
    options.host.file_bytes = file_bytes;
    if (host_limit == 0) {
      options.host.pinned_bytes = HostApi{}.memory_info().total_bytes / 2;
    }
  }
  // A few operations ahead is early enough: copies take no longer than kernels here. What came in sooner
  // would take the room of tensors that are made in between.
  options.prefetch = ScheduleLookahead{PrefetchOptions{
      .lookahead_ops = 16,
      .max_inflight_bytes = limit == 0 ? std::numeric_limits<std::size_t>::max() : limit / 6}};
  // What plans are priced with: copying memory to memory.
  options.paging.link_bytes_per_second = 8e9;
  options.paging.device_bytes_per_second = 16e9;
  HostSite::state() = new HostSite::State(
      std::move(options), *c10::GetAllocator(c10::DeviceType::CPU), least_bytes);
  installed().foreach_bytes = installed().memory.stats().capacity_bytes / 8;
  installed().hook = Hook::install();
  c10::SetAllocator(c10::DeviceType::CPU, &installed().tensors, 200);
}

void set_hook(bool on) {
  c10::impl::tls_set_dispatch_key_included(hook_key, on);
}

/// Lowers the limit below what was reserved: room that nothing else may have.
void set_limit(std::size_t limit) {
  auto& state = installed();
  std::size_t const capacity = state.memory.stats().capacity_bytes;
  TORCH_CHECK(limit <= capacity,
              "the limit can be raised to ",
              capacity,
              " bytes at most, with which spillway_torch was installed");
  std::scoped_lock const lock{state.ballast_mutex};
  constexpr std::size_t piece = std::size_t{1} << 20U;
  std::size_t const wanted = (capacity - limit) / piece * piece;
  while (state.ballast_bytes > wanted) {
    auto [block, lease] = std::move(state.ballast.back());
    state.ballast.pop_back();
    std::size_t const bytes = lease.size_bytes();
    lease.release();
    state.memory.abandon(block);
    state.ballast_bytes -= bytes;
  }
  std::size_t bytes = wanted - state.ballast_bytes;
  while (state.ballast_bytes < wanted) {
    bytes = std::min(bytes, wanted - state.ballast_bytes);
    try {
      BlockId const block = state.memory.allocate(bytes);
      try {
        state.ballast.emplace_back(block,
                                   state.memory.acquire(block, Access::write, HostStream::caller));
      } catch (...) {
        state.memory.abandon(block);
        throw;
      }
      state.ballast_bytes += bytes;
    } catch (OutOfDeviceMemory const& error) {
      if (!state.desk.is_under_pressure()) {
        (void)state.desk.relieve();
      } else if (bytes > piece) {
        bytes = std::max(piece, bytes / 2 / piece * piece);
      } else {
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "the limit cannot be lowered further now: ", error.what());
      }
    }
  }
}

std::size_t limit() {
  return installed().memory.stats().capacity_bytes - installed().ballast_bytes;
}

c10::StorageImpl* storage_of(at::Tensor const& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl()
                                                  : nullptr;
}

/// Brings a tensor in; keeps it there for good if asked to.
void bring_in(at::Tensor const& tensor, bool keeps) {
  if (HostSite::state() == nullptr) {
    return;
  }
  pytorch::for_each_part(tensor, [&](at::Tensor const& part, bool) {
    c10::StorageImpl* const storage = storage_of(part);
    if (storage != nullptr && HostSite::Desk::is_ours(*storage)) {
      Hook::Frame frame;
      pytorch::Operands operands{
          pytorch::Operand{storage, part.unsafeGetTensorImpl(), {keeps, false}}};
      frame.enter(operands);
    }
  });
}

void bring_in_storage(py::handle object, bool keeps) {
  if (HostSite::state() == nullptr || !torch::isStorage(object.ptr())) {
    return;
  }
  at::Storage const storage = torch::createStorage(object.ptr());
  if (HostSite::Desk::is_ours(*storage.unsafeGetStorageImpl())) {
    Hook::Frame frame;
    frame.enter({pytorch::Operand{storage.unsafeGetStorageImpl(), nullptr, {keeps, false}}});
  }
}

/// Whether a storage's memory may come and go.
bool is_ours(py::handle object) {
  return HostSite::state() != nullptr && torch::isStorage(object.ptr()) &&
         HostSite::Desk::is_ours(*torch::createStorage(object.ptr()).unsafeGetStorageImpl());
}

/// Holds tensors and storages between `__enter__` and `__exit__`, for code that works on addresses.
/// What is done in between counts as one operation, whose inner tensors have addresses, too.
class Held {
 public:
  explicit Held(py::iterable const& objects) {
    auto const add = [this](at::Tensor const& part, bool) { storages_.push_back(part.storage()); };
    for (py::handle const object : objects) {
      if (THPVariable_Check(object.ptr())) {
        pytorch::for_each_part(THPVariable_Unpack(object.ptr()), add);
      } else if (torch::isStorage(object.ptr())) {
        storages_.push_back(torch::createStorage(object.ptr()));
      }
    }
  }
  Held(Held const&) = delete;
  Held& operator=(Held const&) = delete;
  ~Held() { exit(); }

  void enter() {
    if (HostSite::state() == nullptr || frame_) {
      return;
    }
    frame_.emplace();
    ++HostSite::frames().held;
    pytorch::Operands operands;
    for (c10::Storage const& storage : storages_) {
      if (HostSite::Desk::is_ours(*storage.unsafeGetStorageImpl())) {
        operands.push_back({storage.unsafeGetStorageImpl()});
      }
    }
    try {
      frame_->enter(operands);
    } catch (...) {
      exit();
      throw;
    }
  }
  void exit() {
    if (frame_) {
      --HostSite::frames().held;
      frame_.reset();
    }
  }

 private:
  std::vector<c10::Storage> storages_;
  std::optional<Hook::Frame> frame_;
};

/// Entered around Python code that PyTorch calls in the middle of an operation. That code knows no
/// addresses, so its operations are outermost; and PyTorch has switched the hook off for it.
class Barrier {
 public:
  Barrier() : is_excluded_{c10::impl::tls_is_dispatch_key_excluded(hook_key)} {
    bool const is_on = c10::impl::tls_is_dispatch_key_included(hook_key);
    if (is_excluded_ && is_on) {
      c10::impl::tls_set_dispatch_key_excluded(hook_key, false);
    }
    if (suspends_) {
      suspended_ = std::exchange(HostSite::frames(), {});
      if (suspended_.depth != 0 || suspended_.beside != 0) {
        HostSite::desk().uncount_frame();
      }
    }
  }
  void exit() {
    if (is_done_) {
      return;
    }
    is_done_ = true;
    c10::impl::tls_set_dispatch_key_excluded(hook_key, is_excluded_);
    if (suspends_) {
      HostSite::frames() = std::move(suspended_);
      if (HostSite::frames().depth != 0 || HostSite::frames().beside != 0) {
        HostSite::desk().count_frame();
      }
    }
  }

 private:
  bool is_excluded_;
  bool suspends_ = HostSite::state() != nullptr && HostSite::frames().held == 0;
  bool is_done_ = false;
  HostSite::Desk::Frames suspended_;
};

py::dict view(at::Tensor const& tensor) {
  py::dict out;
  c10::StorageImpl* const storage = storage_of(tensor);
  out["ours"] =
      storage != nullptr && HostSite::state() != nullptr && HostSite::Desk::is_ours(*storage);
  if (out["ours"].cast<bool>()) {
    auto const seen = HostSite::desk().view(*storage);
    out["enrolled"] = seen.is_enrolled;
    out["leased"] = seen.is_leased;
    out["in_use"] = seen.is_in_use;
    out["kept"] = seen.is_kept;
    out["bytes"] = seen.bytes;
    out["resident"] = seen.is_leased ||
                      installed().memory.residency(seen.block) == Residency::device ||
                      installed().memory.residency(seen.block) == Residency::moving_in;
    out["has_address"] = storage->_mutable_data_ptr_no_checks().get() != nullptr;
  }
  return out;
}

py::list holders() {
  py::list out;
  for (auto const& one : installed().desk.views()) {
    py::dict row;
    row["bytes"] = one.bytes;
    row["tensor"] = one.is_enrolled ? one.likeness.text() : std::string{"?"};
    row["enrolled"] = one.is_enrolled;
    row["leased"] = one.is_leased;
    row["in_use"] = one.is_in_use;
    row["kept"] = one.is_kept;
    row["frozen"] = one.is_frozen;
    out.append(row);
  }
  return out;
}

/// Under PyTorch's names, which tell pools apart. There is one here, for what PyTorch calls large.
void put(py::dict& out, std::string const& name, char const* what, std::uint64_t value) {
  out[py::str(name + ".all." + what)] = value;
  out[py::str(name + ".large_pool." + what)] = value;
  out[py::str(name + ".small_pool." + what)] = 0;
}

void put(py::dict& out, std::string const& name, Gauge const& gauge) {
  put(out, name, "current", gauge.current);
  put(out, name, "peak", gauge.peak);
  put(out, name, "allocated", gauge.total);
  put(out, name, "freed", gauge.total - gauge.current);
}

py::dict raw_stats() {
  auto& state = installed();
  Stats const now = state.memory.stats();
  HostPoolStats const host = state.memory.host_stats();
  auto const counts = state.desk.counts();
  py::dict out;
  put(out, "allocation", now.allocated.blocks);
  put(out, "allocated_bytes", now.allocated.bytes);
  put(out, "requested_bytes", now.requested_bytes);
  put(out, "active", now.leased.blocks);
  put(out, "active_bytes", now.leased.bytes);
  put(out, "resident", now.resident.blocks);
  put(out, "resident_bytes", now.resident.bytes);
  put(out, "reserved_bytes", "current", now.reserved_bytes);
  put(out, "reserved_bytes", "peak", now.peak_reserved_bytes);
  put(out, "inactive_split", "current", now.resident.blocks.current - now.leased.blocks.current);
  put(out, "inactive_split_bytes", "current", now.inactive_bytes());
  HostTierStats const& pinned = host.tier(HostTier::pinned);
  put(out, "pinned", "current", pinned.slots);
  put(out, "pinned_bytes", "current", pinned.used_bytes);
  put(out, "pinned_bytes", "peak", pinned.peak_used_bytes);
  auto const set = [&out](char const* key, auto value) { out[key] = value; };
  std::uint64_t reclaimed = 0;
  std::uint64_t reclaimed_bytes = 0;
  for (EvictionReason const reason : {EvictionReason::pressure,
                                      EvictionReason::watermark,
                                      EvictionReason::prefetch,
                                      EvictionReason::requested}) {
    reclaimed += now.evicted(reason).count;
    reclaimed_bytes += now.evicted(reason).bytes;
  }
  set("reclaimed", reclaimed);
  set("reclaimed_bytes", reclaimed_bytes);
  set("alloc_distribution.freelist", now.ranges_from(RangeSource::free_range));
  set("alloc_distribution.cudamalloc", now.ranges_from(RangeSource::growth));
  set("alloc_distribution.reclaim_one", now.ranges_from(RangeSource::after_drop));
  set("alloc_distribution.reclaim_fragments", now.ranges_from(RangeSource::after_compaction));
  set("alloc_distribution.reclaim_all", now.ranges_from(RangeSource::after_swap_out));
  set("alloc_distribution.cudamalloc_retry", now.ranges_from(RangeSource::retry));
  set("num_ooms", counts.out_of_memory);
  set("num_alloc_retries", counts.pressures + counts.waits);
  set("swap_outs", now.swap_outs.count);
  set("swap_out_bytes", now.swap_outs.bytes);
  set("swap_ins", now.swap_ins.count);
  set("swap_in_bytes", now.swap_ins.bytes);
  set("drops", now.drops.count);
  set("dropped_bytes", now.drops.bytes);
  set("moves", now.moves.count);
  set("moved_bytes", now.moves.bytes);
  set("speculative", now.evicted(EvictionReason::speculative).count);
  set("speculative_bytes", now.evicted(EvictionReason::speculative).bytes);
  set("prefetch.hits", now.prefetch_hits);
  set("prefetch.late", now.prefetch_late);
  set("prefetch.wasted", now.prefetch_wasted);
  set("mispredictions", now.mispredictions);
  set("steps", now.steps);
  set("frames", counts.frames);
  set("active_frames", counts.active_frames);
  set("enrolled", counts.holdings);
  set("strays", counts.strays);
  set("waits", counts.waits);
  set("pressures", counts.pressures);
  set("compaction_passes", now.compaction_passes);
  set("host_wait_ns", now.host_wait_ns);
  set("external_fragmentation", now.external_fragmentation());
  set("largest_free_bytes", now.largest_free_bytes);
  set("free_bytes", now.free_bytes);
  set("capacity_bytes", now.capacity_bytes);
  set("host.pageable_bytes", host.tier(HostTier::pageable).used_bytes);
  set("host.file_bytes", host.tier(HostTier::file).used_bytes);
  return out;
}

}  // namespace spillway_torch

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace spillway_torch;
  m.def("install", &install);
  m.def("is_installed", [] { return HostSite::state() != nullptr; });
  m.def("set_hook", &set_hook);
  m.def("has_hook", [] { return c10::impl::tls_is_dispatch_key_included(hook_key); });
  m.def("hook_key", [] { return std::string{c10::toString(hook_key)}; });
  m.def("enable", [](bool on) { installed().desk.enable(on); });
  m.def("is_enabled", [] { return HostSite::state() != nullptr && installed().desk.is_enabled(); });
  m.def("set_limit", &set_limit, py::call_guard<py::gil_scoped_release>());
  m.def("limit", &limit);
  m.def("set_least_bytes", [](std::size_t bytes) { installed().tensors.set_least_bytes(bytes); });
  m.def("least_bytes", [] { return installed().tensors.least_bytes(); });
  m.def("set_foreach_bytes", [](std::size_t bytes) { installed().foreach_bytes = bytes; });
  m.def(
      "reclaim",
      [] { return installed().desk.reclaim(); },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "begin_step",
      [] { installed().desk.begin_step(); },
      py::call_guard<py::gil_scoped_release>());
  m.def("raw_stats", &raw_stats);
  m.def("reset_peaks", [] { installed().memory.reset_peak_stats(); });
  m.def(
      "trim",
      [] { return installed().memory.trim_sync(); },
      py::call_guard<py::gil_scoped_release>());
  m.def("view", &view);
  m.def("holders", &holders);
  m.def("bring_in", &bring_in, py::call_guard<py::gil_scoped_release>());
  m.def("bring_in_storage", &bring_in_storage);
  m.def("is_ours", &is_ours);
  m.def("keep_new", [](bool keeps) { return std::exchange(HostSite::frames().keeps_new, keeps); });
  m.def(
      "freeze",
      [](at::Tensor const& tensor, bool frozen) {
        if (auto* const storage = storage_of(tensor)) {
          installed().desk.freeze(*storage, frozen);
        }
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("end_frames_early", [](bool early) { installed().desk.end_frames_early(early); });
  m.def("before_fork", [] {
    if (HostSite::state() != nullptr) {
      installed().desk.before_fork();
      installed().device.before_fork();
    }
  });
  m.def("after_fork_in_parent", [] {
    if (HostSite::state() != nullptr) {
      installed().device.after_fork_in_parent();
      installed().desk.after_fork();
    }
  });
  m.def("after_fork_in_child", [] {
    if (HostSite::state() != nullptr) {
      installed().device.after_fork_in_child();
      installed().desk.after_fork();
    }
  });
  py::class_<Held>(m, "Held")
      .def(py::init<py::iterable const&>())
      .def("__enter__", &Held::enter, py::call_guard<py::gil_scoped_release>())
      .def("__exit__", [](Held& held, py::args const&) { held.exit(); });
  py::class_<Barrier>(m, "Barrier").def(py::init<>()).def("exit", &Barrier::exit);
}
