// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include <pybind11/pybind11.h>

namespace spillway_tf {

namespace py = pybind11;

/// Replaces the buffer protocol of a type: a buffer is made from the object that `replacement`
/// returns, unless that is None. Buffers are read-only, as those of TensorFlow's tensors are.
///
/// The type also gets a function that releases buffers, which does nothing. If a type has none,
/// NumPy's `frombuffer` releases the buffer at once and keeps only the exporting object alive. That
/// would free the replacement, to which only the buffer refers.
inline void wrap_buffer(py::type type, py::function replacement) {
  static getbufferproc inner = nullptr;
  static py::function* call = nullptr;
  auto* const as_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  if (inner != nullptr || as_type->tp_as_buffer == nullptr) {
    return;
  }
  inner = as_type->tp_as_buffer->bf_getbuffer;
  call = new py::function{std::move(replacement)};
  if (as_type->tp_as_buffer->bf_releasebuffer == nullptr) {
    as_type->tp_as_buffer->bf_releasebuffer = [](PyObject* /*self*/, Py_buffer* /*view*/) {};
  }
  as_type->tp_as_buffer->bf_getbuffer = [](PyObject* self, Py_buffer* view, int flags) -> int {
    if ((flags & PyBUF_WRITABLE) != 0) {
      PyErr_SetString(PyExc_BufferError, "EagerTensor is not writable.");  // TensorFlow's words
      return -1;
    }
    try {
      py::object const other = (*call)(py::handle{self});
      if (other.is_none()) {
        return inner(self, view, flags);
      }
      if (PyObject_GetBuffer(other.ptr(), view, flags) != 0) {
        return -1;
      }
      view->readonly = 1;
      return 0;
    } catch (py::error_already_set& error) {
      error.restore();
      return -1;
    }
  };
}

}  // namespace spillway_tf
