// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/interop/framework/codec_choice.hpp>
#include <spillway/interop/framework/share_arguments.hpp>
#include <spillway/interop/torch/large_model_support.hpp>
#include <spillway/interop/torch/operations.hpp>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "dlpack_exchange.hpp"
#include "held.hpp"
#include "interpreter.hpp"
#include "released_lock.hpp"
#include "statistics.hpp"
#include "tracing.hpp"
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace spillway_torch {

/// The functions of the Python module, for one kind of device.
template <class Site>
class Bindings {
 public:
  using Support = spillway::torch::LargeModelSupport<Site>;
  using State = typename Site::State;
  using Frame = typename State::Hook::Frame;
  using Leases = typename Site::Leases;

  static void define(pybind11::module_& m);

 private:
  [[nodiscard]] static State& installed() { return Support::installed(); }
  [[nodiscard]] static bool is_installed() { return Support::is_installed(); }

  /// Python switches the hook on, in each of its threads.
  static void install(int ordinal,
                      std::size_t limit,
                      std::size_t host_limit,
                      std::string const& file_tier,
                      std::size_t file_bytes,
                      std::size_t least_bytes,
                      double link_bytes_per_second) {
    Support::install(
        {{limit, host_limit, file_tier, file_bytes, least_bytes}, ordinal, link_bytes_per_second});
    Support::set_least_bytes(least_bytes);  // also if it is 0
    Support::set_hook(false);
  }

  [[nodiscard]] static c10::StorageImpl* storage_of(at::Tensor const& tensor) {
    return Support::storage_of(tensor);
  }
  static void bring_in_storage(pybind11::handle object, bool keeps) {
    if (!is_installed() || !torch::isStorage(object.ptr())) {
      return;
    }
    State::Hook::bring_in(
        *torch::createStorage(object.ptr()).unsafeGetStorageImpl(), nullptr, keeps);
  }
  /// Whether the memory of a storage comes from this module's allocator.
  [[nodiscard]] static bool is_storage_ours(pybind11::handle object) {
    return is_installed() && torch::isStorage(object.ptr()) &&
           Support::is_ours(torch::createStorage(object.ptr()).unsafeGetStorageImpl());
  }
  /// Moves a storage to memory of PyTorch's own allocator, which other processes can share.
  static void hand_over(pybind11::handle object) {
    c10::Storage const storage = torch::createStorage(object.ptr());
    spillway_python::ReleasedLock const others_run;
    Site::tensors().hand_over(*storage.unsafeGetStorageImpl());
  }
  static void freeze(at::Tensor const& tensor, bool frozen) {
    if (auto* const storage = storage_of(tensor)) {
      installed().leases.freeze(*storage, frozen);
    }
  }

  /// Replaces `Tensor.__setitem__`, in which PyTorch reads a value and writes an element without an
  /// operation.
  static PyObject* set_item(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 2, "__setitem__ takes an index and a value");
    spillway::torch::Operands operands;
    for (PyObject* const object : {self, arguments[1]}) {
      if (THPVariable_Check(object)) {
        at::Tensor const& tensor = THPVariable_Unpack(object);
        c10::StorageImpl* const storage = storage_of(tensor);
        // A storage that no operation has used is resident, and a thread without the hook may be
        // using it.
        if (Support::is_ours(storage) && !Leases::is_unseen(*storage)) {
          bool const is_written = object == self;
          operands.push_back(
              {storage, tensor.unsafeGetTensorImpl(), {/*keeps=*/false, is_written}});
        }
      }
    }
    std::optional<Frame> frame;
    if (!operands.empty()) {
      spillway_python::ReleasedLock const others_run;
      frame.emplace();
      frame->enter(operands);
      // An index may be an object of the program, and a class of tensors may assign in its own way.
      Site::leases().begin_program(Site::frames());
    }
    PyTypeObject const* const base = reinterpret_cast<PyTypeObject*>(THPVariableClass)->tp_base;
    if (base->tp_as_mapping->mp_ass_subscript(self, arguments[0], arguments[1]) != 0) {
      return nullptr;
    }
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
  }
  [[nodiscard]] static pybind11::object set_item_method() {
    static PyMethodDef method{
        "__setitem__",
        reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&set_item)),
        METH_FASTCALL,
        nullptr};
    return pybind11::reinterpret_steal<pybind11::object>(
        PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(THPVariableClass), &method));
  }

  [[nodiscard]] static pybind11::dict view(at::Tensor const& tensor) {
    pybind11::dict out;
    c10::StorageImpl* const storage = storage_of(tensor);
    out["ours"] = Support::is_ours(storage);
    if (Support::is_ours(storage)) {
      auto const seen = Site::leases().view(*storage);
      out["enrolled"] = seen.is_enrolled;
      out["leased"] = seen.is_leased;
      out["in_use"] = seen.is_in_use;
      out["kept"] = seen.is_kept;
      out["bytes"] = seen.bytes;
      out["resident"] = Support::is_resident(seen);
      out["has_address"] = storage->_mutable_data_ptr_no_checks().get() != nullptr;
    }
    return out;
  }
  [[nodiscard]] static pybind11::list holders() {
    pybind11::list out;
    for (auto const& one : installed().leases.views()) {
      pybind11::dict row;
      row["bytes"] = one.bytes;
      row["tensor"] = one.is_enrolled ? one.description.text() : std::string{"?"};
      row["enrolled"] = one.is_enrolled;
      row["leased"] = one.is_leased;
      row["in_use"] = one.is_in_use;
      row["kept"] = one.is_kept;
      row["lent"] = one.is_lent;
      row["frozen"] = one.is_frozen;
      row["resident"] = Support::is_resident(one);
      out.append(row);
    }
    return out;
  }

  /// Sets the codec of these tensors; without tensors, of all tensors that are made from now on.
  static void set_codec(std::optional<std::string> const& name,
                        std::optional<std::vector<at::Tensor>> const& tensors) {
    auto const choice = spillway::framework::codec_named(name, tensors.has_value());
    if (tensors) {
      Support::set_codec(choice, *tensors);
    } else {
      Support::set_codec(choice);
    }
  }

  /// Shares the device with other processes that name the same file.
  static void share(std::string const& file,
                    std::size_t least_bytes,
                    double weight,
                    double idle_seconds,
                    double patience_seconds) {
    Support::share(spillway::framework::share_options(
        file, least_bytes, weight, idle_seconds, patience_seconds));
  }

  [[nodiscard]] static pybind11::dict recomputed() {
    pybind11::dict out;
    for (auto const& [name, what] : installed().operation_times.recomputed()) {
      pybind11::dict row;
      row["count"] = what.results.count;
      row["bytes"] = what.results.bytes;
      row["ns"] = what.ns;
      out[pybind11::str(name)] = row;
    }
    return out;
  }
};

template <class Site>
void Bindings<Site>::define(pybind11::module_& m) {
  namespace py = pybind11;
  using WithoutLock = py::call_guard<spillway_python::ReleasedLock>;
  m.def("install", &install);
  m.def("is_installed", &is_installed);
  m.def("set_hook", &Support::set_hook);
  m.def("has_hook", &Support::has_hook);
  m.def("hook_key", [] { return std::string{c10::toString(spillway::torch::hook_key)}; });
  m.def("enable", &Support::enable);
  m.def("is_enabled", &Support::is_enabled);
  m.def("set_limit", &Support::set_limit, WithoutLock());
  m.def("limit", &Support::limit);
  m.def("share", &share, WithoutLock());
  m.def("leave_share", &Support::leave_share, WithoutLock());
  m.def(
      "share_members",
      [] { return spillway::framework::share_rows(Support::share_members()); },
      WithoutLock());
  m.def(
      "set_profiled", [](bool is_on) { installed().leases.set_profiled(is_on); }, WithoutLock());
  m.def("set_recompute", &Support::set_recompute);
  m.def("set_codec", &set_codec, WithoutLock());
  m.def("recomputes", &Support::recomputes);
  m.def("recomputed", &recomputed);
  m.def("recomputable", [] {
    using spillway::torch::detail::overwriting, spillway::torch::detail::recomputable;
    std::vector<std::string> all(recomputable.begin(), recomputable.end());
    all.insert(all.end(), overwriting.begin(), overwriting.end());
    return all;
  });
  m.def("set_least_bytes", &Support::set_least_bytes);
  m.def("least_bytes", &Support::least_bytes);
  m.def("set_foreach_bytes", &Support::set_foreach_bytes);
  m.def("reclaim", &Support::reclaim, WithoutLock());
  m.def("has_file_tier", [] {
    auto const host = installed().memory.host_stats();
    return host.tier(spillway::HostTier::file).capacity_bytes != 0;
  });
  m.def(
      "park",
      [](bool to_file) {
        return Support::park(to_file ? spillway::HostTier::file : spillway::HostTier::pinned);
      },
      WithoutLock());
  m.def("wake", &Support::wake, WithoutLock());
  m.def("begin_step", &Support::begin_step, WithoutLock());
  m.def("name_stream", [] { (void)installed().memory.mark(Site::current_stream()); });
  m.def("take_warning", [] { return installed().leases.take_warning(); });
  m.def("raw_stats", [] { return statistics(installed()); });
  m.def("reset_peaks", &Support::reset_peak_stats);
  m.def("trim", &Support::trim_sync, WithoutLock());
  m.def("view", &view);
  m.def("holders", &holders);
  m.def("bring_in", &Support::bring_in, WithoutLock());
  m.def("bring_in_storage", &bring_in_storage);
  m.def("is_ours", &is_storage_ours);
  if constexpr (requires { Site::tensors(); }) {
    m.def("hand_over", &hand_over);
  }
  m.def("is_holding", &Support::is_inside);
  m.def("end_all_holds", [] {
    if (is_installed()) {
      Site::leases().end_all_holds(Site::frames());
    }
  });
  m.def("freeze", &freeze, WithoutLock());
  m.def("end_frames_early", [](bool early) { installed().leases.end_frames_early(early); });
  py::class_<Held<Site>>(m, "Held")
      .def(py::init<py::handle, bool>(), py::arg("objects"), py::arg("may_write") = false)
      .def("__enter__", &Held<Site>::enter, WithoutLock())
      .def("returns", &Held<Site>::returns)
      .def("__exit__", [](Held<Site>& held, py::args const&) { held.exit(); });
#if __has_include(<torch/csrc/distributed/c10d/Work.hpp>)
  py::class_<Communicating<Site>>(m, "Communicating")
      .def(py::init<py::handle>())
      .def("__enter__",
           [](Communicating<Site>& call) -> Communicating<Site>& {
             spillway_python::ReleasedLock const others_run;
             call.enter();
             return call;
           })
      .def("begun", &Communicating<Site>::begun)
      .def("__exit__", [](Communicating<Site>& call, py::args const&) { call.exit(); });
#endif
  py::class_<KeepingNew<Site>>(m, "KeepingNew")
      .def(py::init<>())
      .def("__enter__", &KeepingNew<Site>::enter)
      .def("__exit__", [](KeepingNew<Site>& keeping, py::args const&) { keeping.exit(); });
  py::class_<KernelInPython<Site>>(m, "KernelInPython")
      .def(py::init<>())
      .def("__enter__", &KernelInPython<Site>::enter, WithoutLock())
      .def("__exit__", [](KernelInPython<Site>& kernel, py::args const&) {
        spillway_python::ReleasedLock const others_run;
        kernel.exit();
      });
  py::class_<Lent<Site>>(m, "Lent").def(py::init<at::Tensor const&>(), WithoutLock());
  m.def("set_item_method", &set_item_method);
  m.def("wrap_dlpack_exchange", &DlpackExchange<Support, /*is_read_only=*/false>::install);
  m.def("wrap_read_only_dlpack_exchange", &DlpackExchange<Support, /*is_read_only=*/true>::install);
  m.def("install_barriers", &install_barriers<Site>);
  m.def("holding_after_program", &holding_after_program<Site>);
}

}  // namespace spillway_torch
