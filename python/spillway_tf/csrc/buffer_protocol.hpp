// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include <pybind11/pybind11.h>

namespace spillway_tf {

namespace py = pybind11;

/// Replaces the buffer protocol of a type: a buffer is made from the object that `replacement`
/// returns, unless that is None.
inline void wrap_buffer(py::type type, py::function replacement) {
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

}  // namespace spillway_tf
