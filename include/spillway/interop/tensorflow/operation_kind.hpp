// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <typeinfo>

#include <tensorflow/core/framework/function.h>
#include <tensorflow/core/framework/op_kernel.h>

namespace spillway::tensorflow {

/// What an operation does with the bytes of its operands.
enum class OperationKind : std::uint8_t {
  touches,  ///< reads or writes them while it runs
  passes,   ///< hands tensors on and never looks at their bytes
  reads,    ///< touches, and what it gets as a variable it only reads
};

/// By the name of the operation. What is not known touches.
[[nodiscard]] inline OperationKind kind_of(std::string_view name) noexcept {
  // Sorted. An operation belongs here only if no implementation of it reads a large operand. Calls do not:
  // the operations of the function they call do, each on its own.
  static constexpr std::array<std::string_view, 70> passing{
      "Bitcast",
      "Case",
      "ControlTrigger",
      "DestroyResourceOp",
      "EmptyTensorList",
      "EnsureShape",
      "Enter",
      "Exit",
      "ExpandDims",
      "GuaranteeConst",
      "Identity",
      "IdentityN",
      "If",
      "LoopCond",
      "Merge",
      "NextIteration",
      "NoOp",
      "OptionalFromValue",
      "OptionalGetValue",
      "OptionalHasValue",
      "OptionalNone",
      "PartitionedCall",
      "PlaceholderWithDefault",
      "PreventGradient",
      "Rank",
      "RefEnter",
      "RefExit",
      "RefIdentity",
      "RefMerge",
      "RefNextIteration",
      "RefSwitch",
      "RemoteCall",
      "Reshape",
      "Shape",
      "ShapeN",
      "Size",
      "Squeeze",
      "StatefulPartitionedCall",
      "StatelessCase",
      "StatelessIf",
      "StatelessWhile",
      "StopGradient",
      "Switch",
      "SymbolicGradient",
      "TemporaryVariable",
      "TensorListElementShape",
      "TensorListGetItem",
      "TensorListLength",
      "TensorListPopBack",
      "TensorListPushBack",
      "TensorListReserve",
      "TensorListResize",
      "TensorListSetItem",
      "VarHandleOp",
      "VarIsInitializedOp",
      "VariableShape",
      "VariableV2",
      "While",
      "_Arg",
      "_DeviceArg",
      "_DeviceRetval",
      "_EagerConst",
      "_HostRecv",
      "_HostSend",
      "_Recv",
      "_Retval",
      "_Send",
      "_SwitchN",
      "_VarHandlesOp",
      "_While",
  };
  static_assert(std::is_sorted(passing.begin(), passing.end()));
  if (std::binary_search(passing.begin(), passing.end(), name)) {
    return OperationKind::passes;
  }
  if (name == "ReadVariableOp" || name == "ResourceGather" || name == "ResourceGatherNd") {
    return OperationKind::reads;
  }
  return OperationKind::touches;
}

/// Whether an operation calls code that runs operations, on this thread or others, before it returns.
[[nodiscard]] inline bool calls_back(std::string_view name) noexcept {
  return name == "EagerPyFunc" || name == "PyFunc" || name == "PyFuncStateless" ||
         name == "XlaLaunch" || name == "_XlaRun";
}

/// Whether an operation is part of a program's computation: its tensors are used by operations alone.
///
/// What an input pipeline computes is used by threads of its own, and what the runtime folds into
/// constants by itself. Both are told apart by what an operation is called with: the first by the class
/// of its call frame, the second because it takes part in no collective and belongs to no session.
[[nodiscard]] inline bool
belongs_to_program(::tensorflow::OpKernelContext const& context) noexcept {
  if (context.collective_executor() == nullptr && context.session_state() == nullptr) {
    return false;
  }
  auto const* const frame = context.call_frame();
  if (frame == nullptr) {
    return true;
  }
  auto const& type = typeid(*frame);
  return type == typeid(::tensorflow::FunctionCallFrame) ||
         !std::string_view{type.name()}.starts_with("N10tensorflow4data");
}

}  // namespace spillway::tensorflow
