// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/core/stats.hpp>
#include <spillway/host/host_tier.hpp>
#include <spillway/interop/framework/codec_choice.hpp>
#include <spillway/interop/framework/fork_handlers.hpp>
#include <spillway/interop/framework/share_arguments.hpp>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "held.hpp"
#include "released_lock.hpp"
#include "site.hpp"
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace spillway_tf {

namespace py = pybind11;

/// The functions of the Python module, for one kind of device.
template <class Site>
struct Bindings {
  static void install(std::size_t limit,
                      std::size_t host_limit,
                      std::string const& file_tier,
                      std::size_t file_bytes,
                      std::size_t least_bytes) {
    if (Site::is_installed()) {
      throw std::runtime_error{"spillway_tf is installed already"};
    }
    Site::install({.limit = limit,
                   .host_limit = host_limit,
                   .file_tier = file_tier,
                   .file_bytes = file_bytes,
                   .least_bytes = least_bytes});
    spillway::framework::ForkHandlers<Bindings>::install();
  }
  // The following two are for `ForkHandlers`.
  static typename Site::Leases* leases_if_any() {
    return Site::is_ready() ? &Site::leases() : nullptr;
  }
  static typename Site::Leases::Frame const* frame_of_thread() { return Site::frame(); }

  static typename Site::State& installed() {
    if (!Site::is_ready()) {
      throw std::runtime_error{"spillway_tf.install() has not been called"};
    }
    return *Site::state();
  }

  /// Sets the limit, which can be lowered and raised again up to that of `install`, which 0 stands
  /// for.
  static void set_limit(std::size_t limit) {
    auto& state = installed();
    limit = limit == 0 ? state.most_bytes : limit;
    std::size_t const page_bytes = state.device.granularity_bytes();
    if (limit < page_bytes) {
      throw py::value_error{"the limit has to be at least one page, which is " +
                            std::to_string(page_bytes) + " bytes here"};
    }
    if (limit > state.most_bytes) {
      throw py::value_error{"the limit can be raised to " + std::to_string(state.most_bytes) +
                            " bytes at most, with which spillway_tf was installed"};
    }
    try {
      state.leases.set_capacity(limit);
      state.leases.reset_peaks();  // peaks under the old limit may exceed the new one
    } catch (spillway::OutOfDeviceMemory const& error) {
      throw std::runtime_error{std::string{"the limit cannot be lowered that far now: "} +
                               error.what()};
    }
  }

  /// Shares the device with other processes that name the same file.
  static void share(std::string const& file,
                    std::size_t least_bytes,
                    double weight,
                    double idle_seconds,
                    double patience_seconds) {
    try {
      installed().leases.share(spillway::framework::share_options(
          file, least_bytes, weight, idle_seconds, patience_seconds));
    } catch (spillway::OutOfDeviceMemory const& error) {
      throw std::runtime_error{error.what()};
    }
  }

  /// Swaps a buffer in and keeps it resident for good.
  static void keep(std::size_t address) { Held<Site>::keep(reinterpret_cast<void*>(address)); }

  /// Sets the codec of the buffers at these addresses; without addresses, of all buffers that are
  /// made from now on.
  static void set_codec(std::optional<std::string> const& name,
                        std::optional<std::vector<std::size_t>> const& addresses) {
    using spillway::framework::CodecChoice;
    CodecChoice const choice = spillway::framework::codec_named(name, addresses.has_value());
    if (!Site::Leases::can_encode && choice != CodecChoice::none) {
      std::string const why =
          "spillway_tf.set_codec(\"" + *name + "\"): only CPU tensors can have a codec so far";
      PyErr_SetString(PyExc_NotImplementedError, why.c_str());
      throw py::error_already_set{};
    }
    auto& leases = installed().leases;
    if (!addresses) {
      leases.set_default_codec(choice);
      return;
    }
    for (std::size_t const address : *addresses) {
      leases.set_codec(reinterpret_cast<void*>(address), choice);
    }
  }

  static py::dict raw_stats() {
    using spillway::EvictionReason;
    auto& state = installed();
    spillway::Stats const now = state.memory.stats();
    spillway::HostPoolStats const host = state.memory.host_stats();
    auto const counts = state.leases.counts();
    py::dict out;
    auto const set = [&out](char const* key, auto value) { out[key] = value; };
    std::size_t const in_use = now.resident.bytes.current;
    std::size_t const active = counts.active_bytes;
    spillway::Tally const for_room = now.evicted(
        {EvictionReason::pressure, EvictionReason::watermark, EvictionReason::prefetch});
    set("bytes_in_use", in_use);
    set("peak_bytes_in_use", now.resident.bytes.peak);
    set("bytes_allocated", now.allocated.bytes.current);
    set("peak_bytes_allocated", now.allocated.bytes.peak);
    set("bytes_active", active);
    set("peak_bytes_active", counts.peak_active_bytes);
    set("bytes_inactive", in_use - std::min(active, in_use));
    set("bytes_fixed", counts.fixed_bytes);
    set("bytes_reclaimed", for_room.bytes + now.evicted(EvictionReason::requested).bytes);
    set("current_bytes_reclaimed", now.allocated.bytes.current - now.resident.bytes.current);
    set("peak_bytes_reclaimed", counts.peak_reclaimed_bytes);
    set("num_single_reclaims", for_room.count);
    set("num_full_reclaims", counts.full_reclaims);
    set("num_defragmentations", 0);
    set("bytes_defragged", 0);
    set("num_allocs", counts.allocations);
    set("largest_alloc_size", counts.largest_bytes);
    set("bytes_limit", now.capacity_bytes);
    set("bytes_reserved", now.reserved_bytes);
    set("peak_bytes_reserved", now.peak_reserved_bytes);
    // Bytes that cannot be swapped out now. While support is off, nothing can be.
    set("bytes_pinned",
        state.leases.is_enabled()
            ? std::min<std::size_t>(state.leases.unreclaimable().bytes, in_use)
            : in_use);
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
    set("host_bytes", host.tier(spillway::HostTier::pinned).used_bytes);
    set("peak_host_bytes", host.tier(spillway::HostTier::pinned).peak_used_bytes);
    set("file_bytes", host.tier(spillway::HostTier::file).used_bytes);
    set("encoded_raw_bytes", host.encoded_raw_bytes);
    set("encoded_stored_bytes", host.encoded_stored_bytes);
    set("codecs_given_up", host.codecs_given_up);
    return out;
  }

  static py::dict view(std::size_t address) {
    auto const seen = installed().leases.view(reinterpret_cast<void*>(address));
    py::dict out;
    out["ours"] = seen.bytes != 0;
    out["bytes"] = seen.bytes;
    out["resident"] = seen.is_resident;
    out["in_use"] = seen.is_in_use;
    out["may_leave"] = seen.is_swappable;
    return out;
  }

  static void define(py::module_& m) {
    using WithoutLock = py::call_guard<spillway_python::ReleasedLock>;
    m.def("install", &install);
    m.def("is_installed", &Site::is_installed);
    m.def("enable", [](bool on) { installed().leases.enable(on); });
    m.def("is_enabled", [] { return Site::is_ready() && installed().leases.is_enabled(); });
    m.def("set_limit", &set_limit, WithoutLock());
    m.def("limit", [] { return installed().limit(); });
    m.def("share", &share, WithoutLock());
    m.def(
        "leave_share", [] { installed().leases.leave_share(); }, WithoutLock());
    m.def(
        "share_members",
        [] { return spillway::framework::share_rows(installed().leases.share_members()); },
        WithoutLock());
    m.def("capacity", [] { return installed().memory.stats().capacity_bytes; });
    m.def("least_bytes", [] { return Site::tensors().least_bytes(); });
    m.def("granularity", [] { return installed().device.granularity_bytes(); });
    m.def(
        "reclaim", [] { return installed().leases.reclaim(); }, WithoutLock());
    m.def("has_file_tier", [] {
      auto const host = installed().memory.host_stats();
      return host.tier(spillway::HostTier::file).capacity_bytes != 0;
    });
    m.def(
        "park",
        [](bool to_file) {
          return installed().leases.park(to_file ? spillway::HostTier::file
                                                 : spillway::HostTier::pinned);
        },
        WithoutLock());
    m.def(
        "wake", [] { return installed().leases.wake(); }, WithoutLock());
    m.def(
        "trim", [] { return installed().memory.trim_sync(); }, WithoutLock());
    m.def(
        "begin_step", [] { installed().leases.begin_step(); }, WithoutLock());
    m.def("last_failure",
          [] { return !Site::is_ready() ? std::string{} : installed().leases.last_failure(); });
    m.def("raw_stats", &raw_stats);
    m.def("reset_peaks", [] { installed().leases.reset_peaks(); });
    m.def("reset_stats", [] { installed().leases.reset_stats(); });
    m.def("view", &view);
    m.def("base_of", [](std::size_t address) {
      auto* const p = reinterpret_cast<void*>(address);
      bool const is_ours = Site::is_ready() && Site::may_own(p);
      return reinterpret_cast<std::size_t>(is_ours ? Site::leases().base_of(p) : nullptr);
    });
    m.def("keep", &keep, WithoutLock());
    m.def("set_codec", &set_codec);
    py::register_local_exception_translator([](std::exception_ptr error) {
      try {
        std::rethrow_exception(std::move(error));
      } catch (OutOfMemory const& out_of_memory) {
        py::object const type = py::module_::import("spillway_tf._shims").attr("OutOfMemoryError");
        py::object const raised = type(py::none(), py::none(), out_of_memory.what());
        PyErr_SetObject(type.ptr(), raised.ptr());
      }
    });
    py::class_<Held<Site>>(m, "Held", py::module_local())
        .def(py::init<std::vector<std::size_t> const&, bool>(),
             py::arg("addresses"),
             py::arg("may_write") = false)
        .def("__enter__", &Held<Site>::enter, WithoutLock())
        .def("__exit__", [](Held<Site>& held, py::args const&) { held.exit(); });
  }
};

}  // namespace spillway_tf
