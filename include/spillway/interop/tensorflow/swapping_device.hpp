// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spillway/core/error.hpp>
#include <spillway/interop/framework/buffer_leases.hpp>
#include <spillway/interop/tensorflow/operation.hpp>

#include <array>
#include <atomic>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/str_cat.h>
#include <tensorflow/core/common_runtime/device_factory.h>
#include <tensorflow/core/common_runtime/threadpool_device.h>
#include <tensorflow/core/framework/device_base.h>
#include <tensorflow/core/framework/op_kernel.h>
#include <tensorflow/core/framework/resource_var.h>
#include <tensorflow/core/framework/tensor.h>
#include <tensorflow/core/public/session_options.h>
#include <tensorflow/core/util/device_name_utils.h>

namespace spillway::tensorflow {

/// Copies one tensor to another, and leases both until the copy has finished. After that the target
/// may be swapped out, since only operations and copies like this one use it.
///
/// @param copy  starts the copy; called with a callback, which it must call with a status when the
///              copy has finished. Not called if the tensors cannot be swapped in
/// @param done  called once, with the status of the copy
template <class Site, class Copy>
void copy_leased(tf::Tensor const& from, tf::Tensor const& to, tf::StatusCallback done, Copy copy) {
  using Frame = typename framework::BufferLeases<typename Site::allocator_type>::Frame;
  std::vector<framework::BufferUse> uses;
  auto const add = [&uses](tf::Tensor const& tensor, bool writes) {
    if (void* const p = base_of(tensor); p != nullptr && Site::may_own(p)) {
      uses.push_back({p, writes});
    }
  };
  add(from, false);
  add(to, true);
  if (uses.empty()) {
    copy(std::move(done));
    return;
  }
  auto const frame = std::make_shared<Frame>();
  try {
    std::string const why = Site::leases().try_enter(*frame, uses);
    if (!why.empty()) {
      done(absl::ResourceExhaustedError(
          absl::StrCat("OOM when swapping in a tensor that is to be copied: ", why)));
      return;
    }
  } catch (std::exception const& error) {
    done(absl::DataLossError(
        absl::StrCat("a tensor that is copied cannot be brought in: ", error.what())));
    return;
  }
  std::array<void*, 1> const target{uses.back().writes ? uses.back().address : nullptr};
  copy([frame, target, done = std::move(done)](absl::Status const& status) {
    Site::leases().make_swappable(target);
    Site::leases().exit(*frame);
    done(status);
  });
}

/// A device of TensorFlow whose tensors may be swapped out while no operation uses them.
///
/// TensorFlow runs every operation, eager or in a graph, with `Compute` or `ComputeAsync` of its
/// device. This class overrides both, so that the operands, and what the operation allocates, are
/// leased until the operation has ended. On a GPU the leases end when the operation has been
/// enqueued, in the order of the device's compute stream.
///
/// `Base` is TensorFlow's device class. `Site` gives access to the `BufferLeases`, of which a
/// process has one. It is static, since TensorFlow itself makes the devices, when it first needs
/// them:
///
/// | expression               | must                                                            |
/// |--------------------------|-----------------------------------------------------------------|
/// | `Site::allocator_type`   | a `DeviceAllocator` that keeps addresses                        |
/// | `Site::is_whole_device`  | whether allocations outside of operations count, too            |
/// | `Site::is_ready()`       | whether `Site::leases()` exists, as it does for operations      |
/// | `Site::leases()`         | the `BufferLeases`; lives until the process ends                  |
/// | `Site::tensors()`        | the `TensorAllocator`; lives until the process ends             |
/// | `Site::steps()`          | the `StepDetector`                                              |
/// | `Site::frame()`          | a reference to the calling thread's pointer to a frame          |
/// | `Site::may_own(p)`       | false if the address is certainly not one of `Site::leases()`   |
/// | `Site::limit_bytes()`    | the limit, for statistics                                       |
template <class Site, class Base>
class SwappingDevice : public Base {
 public:
  using Base::Base;

  void Compute(tf::OpKernel* kernel, tf::OpKernelContext* context) override {
    auto const name = kernel->type_string_view();
    note_batches(name);
    bool const is_program = belongs_to_program(*context);
    OperationKind kind = is_program ? kind_in(*context, *kernel) : kind_of(*kernel);
    bool has_run = false;
    {
      std::optional<framework::ObjectOrder::Right> right;
      // These read no bytes (`passes`) before the variable's first sparse use. An assignment
      // replaces its memory even then.
      bool const depends_on_variable = name == "ReadVariableOp" || name == "AssignVariableOp";
      if (Site::is_ready() &&
          (depends_on_variable || (kind != OperationKind::passes && !calls_back(name)))) {
        bool const only_reads = kind == OperationKind::reads || name == "ReadVariableOp";
        right.emplace(Site::leases().objects(), variables_of(*context, !only_reads));
        if (only_reads && name != "ReadVariableOp" && !copies_on_read(*context)) {
          // A lookup that is the variable's first sparse use replaces its memory if there are other
          // references to that.
          right.reset();
          right.emplace(Site::leases().objects(), variables_of(*context, true));
        }
        if (is_program && depends_on_variable) {
          // The first sparse use may have ended only now.
          kind = kind_in(*context, *kernel);
        }
      }
      has_run = try_compute(kernel, context, kind, is_program);
    }
    if (has_run && is_program && (name == "AssignVariableOp" || name == "AssignAddVariableOp")) {
      watch_steps(*context);
    }
  }

  void ComputeAsync(tf::AsyncOpKernel* kernel,
                    tf::OpKernelContext* context,
                    tf::AsyncOpKernel::DoneCallback done) override {
    auto const name = kernel->type_string_view();
    note_batches(name);
    bool const is_program = belongs_to_program(*context);
    OperationKind const kind = is_program ? kind_in(*context, *kernel) : kind_of(*kernel);
    if (is_program && kind == OperationKind::passes) {
      InFrame<Site> const outside{nullptr};
      Base::ComputeAsync(kernel, context, std::move(done));
      return;
    }
    // In a graph, these use variables, and need memory, as synchronous operations do.
    bool const is_compiled = is_compiled_call(*kernel);
    auto const right = std::make_shared<std::optional<framework::ObjectOrder::Right>>();
    if (is_compiled && Site::is_ready()) {
      right->emplace(Site::leases().objects(), variables_of(*context, true));
    }
    auto const operation =
        std::make_shared<Operation<Site>>(*context, name, kind, is_program, is_compiled);
    if (!operation->try_begin()) {
      right->reset();
      done();
      return;
    }
    InFrame<Site> const inside{is_program ? &operation->frame() : nullptr};
    Base::ComputeAsync(kernel, context, [operation, right, done = std::move(done)] {
      operation->finish();
      operation->end();
      right->reset();
      // Operations that `done` starts on this thread are not part of this one.
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
  /// @returns false if the operation was refused
  bool try_compute(tf::OpKernel* kernel,
                   tf::OpKernelContext* context,
                   OperationKind kind,
                   bool is_program) {
    if (is_program && kind == OperationKind::passes) {
      // What it allocates does not belong to an operation that this thread is inside of.
      InFrame<Site> const outside{nullptr};
      Base::Compute(kernel, context);
      return true;
    }
    Operation<Site> operation{*context, kernel->type_string_view(), kind, is_program, true};
    if (!operation.try_begin()) {
      return false;
    }
    InFrame<Site> const inside{is_program ? &operation.frame() : nullptr};
    Base::Compute(kernel, context);
    operation.finish();
    return true;
  }

  /// Returns how an operation of the program uses its operands, which may depend on the device, the
  /// session, and where its results go.
  [[nodiscard]] static OperationKind kind_in(tf::OpKernelContext& context,
                                             tf::OpKernel const& kernel) {
    std::string_view const name = kernel.type_string_view();
    if (name == "_Send" && Site::is_whole_device && goes_to_gpu(context)) {
      return OperationKind::
          gives_away;  // a function that is not replaced copies it from GPU to GPU
    }
    if ((name == "_Send" || name == "_HostSend") && goes_to_another_task(context)) {
      return OperationKind::gives_away;  // threads of gRPC serialize it
    }
    if (name == "_Retval" && has_batches().load(std::memory_order_relaxed)) {
      return OperationKind::gives_away;
    }
    if ((name == "_Retval" || name == "_Send") && context.session_state() != nullptr) {
      return OperationKind::gives_away;  // what a session returns becomes a NumPy array
    }
    if ((name == "ReadVariableOp" || name == "AssignVariableOp") && !copies_on_read(context)) {
      return OperationKind::passes;
    }
    if (int const shape = shape_operand(name); shape >= 0) {
      void* const p = base_of(context.input(shape));
      return p != nullptr && Site::may_own(p) ? OperationKind::touches : OperationKind::passes;
    }
    return kind_of(kernel);
  }

  /// Whether the program has called a batched function (`BatchFunction`). The results of such a
  /// function are split outside of operations.
  [[nodiscard]] static std::atomic<bool>& has_batches() {
    static std::atomic<bool> the_answer{false};
    return the_answer;
  }

  /// Called by both, since eager programs run this operation with `Compute` and graphs with
  /// `ComputeAsync`.
  static void note_batches(std::string_view name) noexcept {
    if (name == "BatchFunction") {
      has_batches().store(true, std::memory_order_relaxed);
    }
  }

  [[nodiscard]] static bool goes_to_another_task(tf::OpKernelContext const& context) {
    auto const& attributes = context.op_kernel().def().attr();
    auto const from = attributes.find("send_device");
    auto const to = attributes.find("recv_device");
    return from != attributes.end() && to != attributes.end() &&
           !tf::DeviceNameUtils::IsSameAddressSpace(from->second.s(), to->second.s());
  }

  [[nodiscard]] static bool goes_to_gpu(tf::OpKernelContext const& context) {
    auto const& attributes = context.op_kernel().def().attr();
    auto const found = attributes.find("recv_device");
    return found != attributes.end() && found->second.s().find("GPU:") != std::string::npos;
  }

  /// Whether reading and assigning this variable copy its bytes, as they do after its first sparse
  /// use.
  [[nodiscard]] static bool copies_on_read(tf::OpKernelContext& context) {
    tf::core::RefCountPtr<tf::Var> variable;
    return !tf::LookupResource(&context, tf::HandleFromInput(&context, 0), &variable).ok() ||
           variable->copy_on_read_mode.load();
  }

  /// Begins a step when an optimizer's counter of steps, a variable of one integer, is assigned.
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

/// TensorFlow's CPU device as a `SwappingDevice`.
template <class Site>
class SwappingCpuDevice final : public SwappingDevice<Site, tf::ThreadPoolDevice> {
 public:
  SwappingCpuDevice(tf::SessionOptions const& options, std::string const& name)
      : SwappingDevice<Site, tf::ThreadPoolDevice>{
            options, name, tf::Bytes{256 << 20}, tf::DeviceLocality{}, &Site::tensors()} {}
};

/// Makes a `SwappingCpuDevice` where TensorFlow would make its own CPU device.
///
/// To be registered before the first device is made, with a priority above TensorFlow's own:
/// `::tensorflow::dfactory::Registrar<SwappingCpuDeviceFactory<Site>>{"CPU", 300, ...}`.
template <class Site>
class SwappingCpuDeviceFactory final : public tf::DeviceFactory {
 public:
  absl::Status ListPhysicalDevices(std::vector<std::string>* devices) override {
    devices->emplace_back("/physical_device:CPU:0");
    return absl::OkStatus();
  }

  absl::Status CreateDevices(tf::SessionOptions const& options,
                             std::string const& name_prefix,
                             std::vector<std::unique_ptr<tf::Device>>* devices) override {
    int count = 1;
    auto const wanted = options.config.device_count().find("CPU");
    if (wanted != options.config.device_count().end()) {
      count = wanted->second;
    }
    for (int i = 0; i < count; ++i) {
      devices->push_back(std::make_unique<SwappingCpuDevice<Site>>(
          options, absl::StrCat(name_prefix, "/device:CPU:", i)));
    }
    return absl::OkStatus();
  }
};

}  // namespace spillway::tensorflow
