// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/interop/framework/buffer_leases.hpp>
#include <spillway/interop/tensorflow/leased_copy.hpp>
#include <spillway/interop/tensorflow/operation.hpp>
#include <spillway/interop/tensorflow/operation_kind.hpp>

#include <memory>
#include <string_view>
#include <utility>

#include <absl/status/status.h>
#include <tensorflow/core/framework/op_kernel.h>
#include <tensorflow/core/framework/resource_var.h>

namespace spillway::tensorflow {

/// One of TensorFlow's devices, with tensors that may leave its memory while no operation uses them.
///
/// Every operation of every program, eager or in a graph, is run by `Compute` or `ComputeAsync` of its
/// device. Around it the operands are leased, and what it allocates is until it is done. On a GPU an
/// operation is done, to the desk, when it is enqueued: its leases end in the order of the device's
/// stream.
///
/// `Base` is the device it is made of. `Site` says where the one desk of a process is, since TensorFlow
/// makes devices as it likes:
///
/// | expression               | must                                                            |
/// |--------------------------|-----------------------------------------------------------------|
/// | `Site::allocator_type`   | a `DeviceAllocator` that keeps addresses                        |
/// | `Site::is_whole_device`  | whether all memory of the device is the desk's: what is not made by operations counts, too, and what there is no room for is refused |
/// | `Site::is_ready()`       | whether there is a desk; there is before the first operation    |
/// | `Site::leases()`           | the `BufferLeases`; lives until the process ends                  |
/// | `Site::tensors()`        | the `TensorAllocator`; lives until the process ends             |
/// | `Site::steps()`          | the `StepDetector`                                                 |
/// | `Site::frame()`          | a reference to the calling thread's pointer to a frame          |
/// | `Site::may_own(p)`       | false if the desk certainly gave out no such address            |
/// | `Site::limit_bytes()`    | the limit, for statistics                                       |
/// | `Site::reservation_bytes()`  | resident bytes that are no tensors                              |
template <class Site, class Base>
class SwappingDevice : public Base {
 public:
  using Base::Base;

  void Compute(tf::OpKernel* kernel, tf::OpKernelContext* context) override {
    auto const name = kernel->type_string_view();
    bool const is_program = belongs_to_program(*context);
    if (is_program && passes(name, *context)) {
      Base::Compute(kernel, context);
    } else {
      Operation<Site> operation{*context, name, is_program, true};
      if (!operation.try_begin()) {
        return;
      }
      InFrame<Site> const inside{is_program ? &operation.frame() : nullptr};
      Base::Compute(kernel, context);
      operation.show_results();
    }
    if (is_program && (name == "AssignVariableOp" || name == "AssignAddVariableOp")) {
      watch_steps(*context);
    }
  }

  void ComputeAsync(tf::AsyncOpKernel* kernel,
                    tf::OpKernelContext* context,
                    tf::AsyncOpKernel::DoneCallback done) override {
    auto const name = kernel->type_string_view();
    bool const is_program = belongs_to_program(*context);
    if (is_program && passes(name, *context)) {
      InFrame<Site> const outside{nullptr};
      Base::ComputeAsync(kernel, context, std::move(done));
      return;
    }
    auto const operation = std::make_shared<Operation<Site>>(*context, name, is_program, false);
    if (!operation->try_begin()) {
      done();
      return;
    }
    InFrame<Site> const inside{is_program ? &operation->frame() : nullptr};
    Base::ComputeAsync(kernel, context, [operation, done = std::move(done)] {
      operation->show_results();
      operation->end();
      // What comes after runs on this thread, too, and is no part of the operation.
      InFrame<Site> const outside{nullptr};
      done();
    });
  }

  void CopyTensorInSameDevice(tf::Tensor const* from,
                              tf::Tensor* to,
                              tf::DeviceContext const* context,
                              tf::StatusCallback done) override {
    copy_leased<Site>(*from, *to, std::move(done), [&](tf::StatusCallback after) {
      Base::CopyTensorInSameDevice(from, to, context, std::move(after));
    });
  }

 private:
  /// Whether an operation hands its operands on as they are.
  [[nodiscard]] static bool passes(std::string_view name, tf::OpKernelContext& context) {
    if (name == "_Send" && Site::is_whole_device && goes_to_gpu(context)) {
      return false;  // copied from device to device, by a function that cannot be replaced
    }
    if (name == "_Retval" || name == "_Send") {
      return context.session_state() == nullptr;  // what a session returns becomes a NumPy array
    }
    if (name == "ReadVariableOp" || name == "AssignVariableOp") {
      return !copies_on_read(context);
    }
    return kind_of(name) == OperationKind::passes;
  }

  [[nodiscard]] static bool goes_to_gpu(tf::OpKernelContext const& context) {
    auto const& attributes = context.op_kernel().def().attr();
    auto const found = attributes.find("recv_device");
    return found != attributes.end() && found->second.s().find("GPU:") != std::string::npos;
  }

  /// Whether reading and assigning this variable copies it: once it has been used sparsely.
  [[nodiscard]] static bool copies_on_read(tf::OpKernelContext& context) {
    tf::core::RefCountPtr<tf::Var> variable;
    return !tf::LookupResource(&context, tf::HandleFromInput(&context, 0), &variable).ok() ||
           variable->copy_on_read_mode.load();
  }

  /// Optimizers count their steps in a variable.
  static void watch_steps(tf::OpKernelContext& context) {
    tf::core::RefCountPtr<tf::Var> variable;
    bool const is_counter =
        context.input(1).dtype() == tf::DT_INT64 && context.input(1).NumElements() == 1 &&
        tf::LookupResource(&context, tf::HandleFromInput(&context, 0), &variable).ok();
    if (is_counter && Site::steps().on_count(variable.get())) {
      try {
        Site::leases().begin_step();
      } catch (FileTierError const& error) {
        context.SetStatus(absl::DataLossError(error.what()));
      }
    }
  }
};

}  // namespace spillway::tensorflow
