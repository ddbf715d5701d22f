// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/interop/torch.hpp>

#include <memory>
#include <utility>

#include "site.hpp"
#include <ATen/core/interned_strings.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <torch/csrc/jit/runtime/operator.h>

namespace spillway_torch {

/// Surrounds an operator of TorchScript's interpreter by a frame, as if it were an operation.
template <class Site>
::torch::jit::Operation with_frame(::torch::jit::Operation operation) {
  return [operation = std::move(operation)](::torch::jit::Stack& stack) mutable {
    using Hook = typename Site::State::Hook;
    if (Site::state() == nullptr || !Hook::is_on()) {
      operation(stack);
      return;
    }
    spillway::torch::Operands operands;
    // How many of the values are operands differs from operator to operator. To lease one too many
    // does no harm.
    for (c10::IValue const& value : stack) {
      value.visit([&](c10::IValue const& part) {
        spillway::torch::collect<typename Site::Leases>({&part, 1}, operands, {});
        return false;  // go on with what is inside
      });
    }
    typename Hook::Frame frame;
    frame.enter(operands);
    operation(stack);
  };
}

/// Puts frames around the operators of TorchScript's interpreter that print tensors. They are no
/// operations of the dispatcher, which the hook would see. `tolist` and `format` read tensors, too,
/// but the interpreter has instructions for them, which nothing can surround.
template <class Site>
void install_script_operators() {
  using ::torch::jit::Operator;
  for (char const* const name : {"aten::str", "aten::percentFormat", "prim::Print"}) {
    auto const symbol = c10::Symbol::fromQualString(name);
    for (std::shared_ptr<Operator> const& one : ::torch::jit::getAllOperatorsFor(symbol)) {
      // In its place: graphs that were compiled before refer to it.
      *one = Operator{
          toString(one->schema()), with_frame<Site>(one->getOperation()), one->aliasAnalysisKind()};
    }
  }
}

}  // namespace spillway_torch
