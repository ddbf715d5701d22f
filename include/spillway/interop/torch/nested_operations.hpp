// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <memory>
#include <string>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKey.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

namespace spillway::torch {

/// Where kernels for nested tensors are registered.
inline constexpr std::array nested_keys{c10::DispatchKey::CompositeImplicitAutogradNestedTensor,
                                        c10::DispatchKey::NestedTensorCPU,
                                        c10::DispatchKey::NestedTensorCUDA};

/// A kernel for nested tensors of an operation that passes the hook by for all others: it reads sizes,
/// strides and offsets, which are tensors, too, and makes new ones.
///
/// `Hook` is a `FrameHook`.
template <class Hook>
class NestedKernel final : public c10::OperatorKernel {
 public:
  explicit NestedKernel(c10::SafeKernelFunction original) : original_{std::move(original)} {}

  void
  operator()(c10::OperatorHandle const& op, c10::DispatchKeySet keys, ::torch::jit::Stack* stack) {
    if (Hook::is_on()) {
      Hook::run_nested(op, stack, [&] { original_.callBoxed(op, keys, stack); });
    } else {
      original_.callBoxed(op, keys, stack);
    }
  }

  /// Puts such kernels in the place of an operation's own, for as long as `library` lives. Overriding them is
  /// what PyTorch would warn of.
  static void cover(::torch::Library& library, c10::OperatorHandle const& op) {
    NoWarnings silence;
    c10::WarningUtils::WarningHandlerGuard const guard{&silence};
    for (c10::DispatchKey const key : nested_keys) {
      c10::DispatchKey const runtime_key =
          key == nested_keys.front() ? c10::DispatchKey::NestedTensorCPU : key;
      if (op.hasKernelForDispatchKey(key)) {
        auto kernel =
            std::make_unique<NestedKernel>(op.getComputedKernelForDispatchKey(runtime_key));
        library.impl(
            toString(op.operator_name()).c_str(),
            ::torch::dispatch(key, ::torch::CppFunction::makeFromBoxedFunctor(std::move(kernel))));
      }
    }
  }

 private:
  struct NoWarnings final : c10::WarningHandler {
    void process(c10::Warning const& /*warning*/) override {}
  };

  c10::SafeKernelFunction original_;
};

}  // namespace spillway::torch
