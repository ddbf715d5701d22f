// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Python.h>

namespace spillway_python {

/// Releases the interpreter's lock while it lives, so that other threads can run Python.
///
/// Needed in place of pybind11's class: until version 3.14, Python ends a daemon thread that takes
/// the lock again while the program ends, by unwinding its stack. Unwinding through pybind11's
/// class would abort the program.
class ReleasedLock {
 public:
  ReleasedLock() = default;
  ReleasedLock(ReleasedLock const&) = delete;
  ReleasedLock& operator=(ReleasedLock const&) = delete;
  ~ReleasedLock() noexcept(false) { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_ = PyEval_SaveThread();
};

/// Releases the interpreter's lock, if this thread holds it, while the thread waits for others that
/// may need it. If the interpreter ends meanwhile, the destructor is left by unwinding
/// (`ReleasedLock`).
class WithoutInterpreter {
 public:
  WithoutInterpreter() : state_{PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr} {}
  WithoutInterpreter(WithoutInterpreter const&) = delete;
  WithoutInterpreter& operator=(WithoutInterpreter const&) = delete;
  ~WithoutInterpreter() noexcept(false) {
    if (state_ != nullptr) {
      PyEval_RestoreThread(state_);
    }
  }

 private:
  PyThreadState* state_;
};

}  // namespace spillway_python
