// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Python.h>

namespace spillway_torch {

/// Lets other threads run Python for as long as it lives.
///
/// Until version 3.14 a daemon thread that takes the lock again while the program ends is ended
/// then and there, by unwinding its stack. pybind11's class for this must not be unwound through,
/// so that the whole program would end with an abort.
class ReleasedLock {
 public:
  ReleasedLock() = default;
  ReleasedLock(ReleasedLock const&) = delete;
  ReleasedLock& operator=(ReleasedLock const&) = delete;
  ~ReleasedLock() noexcept(false) { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_ = PyEval_SaveThread();
};

}  // namespace spillway_torch
