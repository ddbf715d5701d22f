// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <c10/core/DispatchKey.h>

namespace spillway::torch {

/// How an operation uses its operands' bytes.
enum class OperationKind : std::uint8_t {
  unknown,     ///< not looked at yet
  kernel,      ///< reads and writes them: all operands are held while it runs
  view,        ///< looks at sizes and strides only
  composite,   ///< calls other operations, which hold their own operands
  per_tensor,  ///< a kernel that does the same to each element of its lists, one after the other
  factory,     ///< returns memory without contents, whose address the caller may use to fill it
  lazy_clone,  ///< would share the operand's memory until one of the two is written
  exposing     ///< may go on with its operands' addresses after it has returned
};

namespace detail {

inline bool writes(c10::Argument const& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

/// A view has one tensor operand, which each of its results is an alias of, and writes nothing.
inline bool is_view(c10::FunctionSchema const& schema) {
  std::size_t tensors = 0;
  for (c10::Argument const& argument : schema.arguments()) {
    if (writes(argument)) {
      return false;
    }
    auto const kind = argument.type()->kind();
    bool const is_number = kind == c10::TypeKind::IntType || kind == c10::TypeKind::BoolType ||
                           kind == c10::TypeKind::SymIntType || kind == c10::TypeKind::FloatType ||
                           kind == c10::TypeKind::NumberType || kind == c10::TypeKind::StringType;
    if (kind == c10::TypeKind::TensorType) {
      ++tensors;
    } else if (!is_number && argument.type()->str().find("Tensor") != std::string::npos) {
      return false;
    }
  }
  for (c10::Argument const& result : schema.returns()) {
    if (result.alias_info() == nullptr || result.alias_info()->isWrite()) {
      return false;
    }
  }
  return tensors == 1 && !schema.returns().empty();
}

inline bool has_kernel(c10::OperatorHandle const& op,
                       std::initializer_list<c10::DispatchKey> keys) {
  return std::any_of(keys.begin(), keys.end(), [&op](c10::DispatchKey key) {
    return op.hasKernelForDispatchKey(key);
  });
}

/// True if nothing but the composite kernel runs for dense tensors: one for all backends' gradients
/// (`Autograd`) only runs where there is a kernel for the backend.
inline bool is_composite(c10::OperatorHandle const& op) {
  using c10::DispatchKey;
  return op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) &&
         !has_kernel(op,
                     {DispatchKey::CPU,
                      DispatchKey::CUDA,
                      DispatchKey::AutogradCPU,
                      DispatchKey::AutogradCUDA,
                      DispatchKey::CompositeExplicitAutograd});
}

/// True if the composite kernel also runs for tensors that are not dense, apart from nested ones.
inline bool is_composite_for_all(c10::OperatorHandle const& op) {
  using c10::DispatchKey;
  return is_composite(op) && !has_kernel(op,
                                         {DispatchKey::SparseCPU,
                                          DispatchKey::SparseCUDA,
                                          DispatchKey::SparseCsrCPU,
                                          DispatchKey::SparseCsrCUDA,
                                          DispatchKey::QuantizedCPU,
                                          DispatchKey::QuantizedCUDA,
                                          DispatchKey::MkldnnCPU});
}

}  // namespace detail

/// What an operation does, judged by its schema. Only PyTorch's own schemas are trusted to tell.
inline OperationKind kind_of(c10::OperatorHandle const& op) {
  auto const& schema = op.schema();
  auto const begins_with_one_of = [&schema](std::initializer_list<char const*> prefixes) {
    return std::any_of(prefixes.begin(), prefixes.end(), [&schema](char const* prefix) {
      return schema.name().rfind(prefix, 0) == 0;
    });
  };
  if (begins_with_one_of({"c10d::", "_c10d_functional::", "symm_mem::"})) {
    return OperationKind::exposing;
  }
  if (!begins_with_one_of({"aten::"})) {
    return OperationKind::kernel;
  }
  if (schema.name() == "aten::_lazy_clone") {
    return OperationKind::lazy_clone;
  }
  if (begins_with_one_of({"aten::empty", "aten::new_empty", "aten::_empty"})) {
    return OperationKind::factory;
  }
  if (begins_with_one_of({"aten::_foreach_",
                          "aten::_amp_foreach_",
                          "aten::_fused_adam",
                          "aten::_fused_sgd",
                          "aten::_fused_adagrad"})) {
    return OperationKind::per_tensor;
  }
  if (detail::is_composite(op)) {
    return OperationKind::composite;
  }
  return detail::is_view(schema) ? OperationKind::view : OperationKind::kernel;
}

/// Remembers the kinds of operations; one for each thread.
class OperationKinds {
 public:
  [[nodiscard]] OperationKind of(c10::OperatorHandle const& op) {
    void const* const name = &op.schema();
    std::size_t const bits = reinterpret_cast<std::uintptr_t>(name) >> 4U;
    for (std::size_t probe = 0; probe < 4; ++probe) {
      Entry& entry = entries_[((bits ^ (bits >> 9U)) + probe) & (entries_.size() - 1)];
      if (entry.schema == name) {
        return entry.kind;
      }
      if (entry.schema == nullptr || probe == 3) {
        entry = {name, kind_of(op)};
        return entry.kind;
      }
    }
    return kind_of(op);
  }

 private:
  struct Entry {
    void const* schema = nullptr;
    OperationKind kind = OperationKind::unknown;
  };
  std::array<Entry, 1024> entries_{};
};

}  // namespace spillway::torch
