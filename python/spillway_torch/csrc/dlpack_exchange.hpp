// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "released_lock.hpp"
#include <ATen/dlpack.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace spillway_torch {

/// Replaces the C functions with which code outside of PyTorch takes tensors without Python
/// (`Tensor.__dlpack_c_exchange_api__`). Code that has asked for the table of these functions keeps
/// its address, so they are replaced within the table.
///
/// `Source` swaps tensors in (`bring_in`) and says whether an operation runs (`is_inside`).
/// `is_read_only` distinguishes PyTorch's two tables.
template <class Source, bool is_read_only>
class DlpackExchange {
 public:
  /// To be called once.
  static void install(pybind11::handle capsule) {
    void* const table = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
    if (table == nullptr) {
      throw pybind11::error_already_set{};
    }
    auto& functions = *static_cast<DLPackExchangeAPI*>(table);
    original_ = functions;
    functions.managed_tensor_from_py_object_no_sync = &share;
    if (functions.dltensor_from_py_object_no_sync != nullptr) {
      functions.dltensor_from_py_object_no_sync = &lend;
    }
  }

 private:
  /// Shares a tensor's memory for as long as the other side wants, so the tensor is kept resident
  /// for good.
  static int share(void* object, DLManagedTensorVersioned** out) {
    return bring_in(object, /*keeps=*/true)
               ? original_.managed_tensor_from_py_object_no_sync(object, out)
               : -1;
  }
  /// Gives only an address. Inside of an operation it is valid until that ends, as with `data_ptr`;
  /// otherwise the tensor is kept resident for good.
  static int lend(void* object, DLTensor* out) {
    return bring_in(object, /*keeps=*/!Source::is_inside())
               ? original_.dltensor_from_py_object_no_sync(object, out)
               : -1;
  }
  /// @return false if that failed; the Python error is set then
  static bool bring_in(void* object, bool keeps) {
    HANDLE_TH_ERRORS
    if (THPVariable_Check(static_cast<PyObject*>(object))) {
      at::Tensor const& tensor = THPVariable_Unpack(static_cast<PyObject*>(object));
      spillway_python::ReleasedLock const others_run;
      Source::bring_in(tensor, keeps);
    }
    return true;
    END_HANDLE_TH_ERRORS_RET(false)
  }

  static inline DLPackExchangeAPI original_{};
};

}  // namespace spillway_torch
