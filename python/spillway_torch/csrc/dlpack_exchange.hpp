// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "released_lock.hpp"
#include <ATen/dlpack.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace spillway_torch {

/// The functions in C that code outside of PyTorch takes tensors by, without Python
/// (`Tensor.__dlpack_c_exchange_api__`). Whoever has asked for their table remembers where it is,
/// so they are replaced in the table.
///
/// `Source` brings tensors in (`bring_in`) and says whether an operation runs (`is_inside`).
/// `is_read_only` tells PyTorch's two tables apart.
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
  /// What is shared lives as long as the other side wants.
  static int share(void* object, DLManagedTensorVersioned** out) {
    return bring_in(object, /*keeps=*/true)
               ? original_.managed_tensor_from_py_object_no_sync(object, out)
               : -1;
  }
  /// An address alone is good inside of an operation until that ends, as for `data_ptr`.
  static int lend(void* object, DLTensor* out) {
    return bring_in(object, /*keeps=*/!Source::is_inside())
               ? original_.dltensor_from_py_object_no_sync(object, out)
               : -1;
  }
  /// @return false if that failed; then Python knows of the error
  static bool bring_in(void* object, bool keeps) {
    HANDLE_TH_ERRORS
    if (THPVariable_Check(static_cast<PyObject*>(object))) {
      at::Tensor const& tensor = THPVariable_Unpack(static_cast<PyObject*>(object));
      ReleasedLock const others_run;
      Source::bring_in(tensor, keeps);
    }
    return true;
    END_HANDLE_TH_ERRORS_RET(false)
  }

  static inline DLPackExchangeAPI original_{};
};

}  // namespace spillway_torch
