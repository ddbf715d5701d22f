// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <utility>

#include "released_lock.hpp"
#include <torch/csrc/utils/pybind.h>

namespace spillway_torch {

/// Wraps a function of PyTorch that traces a program, so that what it does after the program has
/// returned counts as one operation. If PyTorch cannot trace an output, it prints that into an
/// error message, for which it reads tensors outside of operations.
///
/// It is written in C++, since PyTorch looks for the names of a program's variables a fixed number
/// of Python frames further up; a wrapper in Python would add a frame.
///
/// @param position  position of the program among the arguments
template <class Site>
[[nodiscard]] pybind11::object holding_after_program(pybind11::object trace, std::size_t position) {
  using Hold = std::optional<typename Site::State::Hook::Hold>;
  pybind11::cpp_function const call{
      [trace = std::move(trace), position](pybind11::args const& arguments,
                                           pybind11::kwargs const& named) {
        Hold hold;
        pybind11::list all{arguments};
        pybind11::object const program = all[position];
        all[position] = pybind11::cpp_function{
            [&program, &hold](pybind11::args const& inputs, pybind11::kwargs const& named_inputs) {
              pybind11::object outputs = program(*inputs, **named_inputs);
              {
                spillway_python::ReleasedLock const others_run;
                hold.emplace(/*is_kernel=*/true);
              }
              return outputs;
            }};
        return trace(*all, **named);
      }};
  // A method if it is an attribute of a class.
  return pybind11::reinterpret_steal<pybind11::object>(PyInstanceMethod_New(call.ptr()));
}

}  // namespace spillway_torch
